"""Judge's side of a judgement: it runs a data set's tests against a program in another process.

Runs inside the judge's sandbox (standard library only). Names that the tests take from the program are bound to values
that the program sends: plain data, or `Remote` proxies, whose calls go to the program and which are equal only to
themselves. `conduct.py` runs the tests. On success, the nonce is written to a pipe that only the parent reads.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from lightning_scalerl.sandbox.conduct import FailedError, TestRun
from lightning_scalerl.sandbox.frames import receive, send
from lightning_scalerl.sandbox.plain import Handle, MalformedError, decode, encode

_LONGEST_REASON = 300
# Exceptions that would silently end a loop over `map` or `iter` in the tests, so that its asserts never run.
_ENDS_A_LOOP = (StopIteration, StopAsyncIteration)
# Built-ins that turn an exception into a default value. In tests that use them, this exception of the program would be
# hidden from the judge.
_HIDES = {"getattr": AttributeError, "hasattr": AttributeError}


class ProgramError(Exception):
    """Raised in the tests in place of a program's exception that is not an ordinary built-in, or would be hidden."""


class ProgramGoneError(BaseException):
    """Raised when the program's process has ended or sent an invalid answer; not an `Exception`, which tests catch."""


class Remote:
    """Proxy for an object of the program: attributes and calls are forwarded to it, everything else happens here."""

    __slots__ = ("__handle", "__program")

    def __init__(self, program: Program, handle: Handle) -> None:
        self.__program, self.__handle = program, handle

    def __getattr__(self, name: str) -> Any:
        # Look-ups of special methods, as by `copy`, are not forwarded to the program.
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__program.ask("get", self.__handle, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the program's process."""
        return self.__program.call(self.__handle, args, kwargs)

    def __repr__(self) -> str:
        return "<an object of the program>"


class Program:
    """Connection to the program's process, over two pipes."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self.calls, self.broken = 0, ""
        self.hides: set[type[Exception]] = set()

    def loaded(self) -> str | None:
        """Wait until the program is loaded. Returns None, or the type of the exception that loading raised."""
        status, kind = self._receive()
        return None if status == "loaded" else str(kind)

    def names(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of these names, as far as the program defines them."""
        values = self.ask("names", sorted(names))
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise self._gone("an answer of another kind")
        return values

    def ask(self, what: str, *operands: Any) -> Any:
        """Send a request and return its answer, or raise the program's exception."""
        return self._answer([what, *operands])[0]

    def call(self, target: Handle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an object of the program. Arguments that the call changed in place are changed here too."""
        self.calls += 1
        value, changed = self._answer(["call", target, encode((args, kwargs), _handle_of)], (args, kwargs))
        if changed is not None:
            _change((args, kwargs), changed)
        return value

    def _answer(self, request: list[Any], arguments: Any = None) -> tuple[Any, Any]:
        """Send a request and return its value and changed arguments (None: unchanged), or raise the exception."""
        try:
            send(self._requests, encode(request, _handle_of))
        except OSError:
            raise self._gone("the program ended") from None
        status, *rest = self._receive()
        if status == "gave" and len(rest) == 2:
            return self._decoded(rest[0]), rest[1]
        if status == "raised" and len(rest) == 3 and isinstance(rest[0], str) and isinstance(rest[1], tuple):
            if rest[2] is not None:
                _change(arguments, rest[2])
            raise _as_raised(rest[0], rest[1], (*_ENDS_A_LOOP, *self.hides))
        if status == "unplain":
            raise ProgramError(f"what the program gives cannot be sent: {str(rest)[:200]}")
        raise self._gone("an answer of another kind")

    def _receive(self) -> list[Any]:
        message = receive(self._answers)
        if message is None:
            raise self._gone("the program ended")
        answer = self._decoded(message)
        if not isinstance(answer, list) or len(answer) < 2 or not isinstance(answer[0], str):
            raise self._gone("an answer of another kind")
        return answer

    def _decoded(self, message: Any) -> Any:
        if not isinstance(message, bytes):
            raise self._gone("an answer of another kind")
        try:
            return decode(message, self._stand_in)
        except MalformedError as error:
            raise self._gone(f"a malformed answer, {error}") from None

    def _stand_in(self, handle: Handle) -> Any:
        if handle.kind != "coroutine":
            return Remote(self, handle)

        async def awaited() -> Any:
            return self.ask("await", handle)

        return awaited()

    def _gone(self, why: str) -> ProgramGoneError:
        self.broken = self.broken or why
        return ProgramGoneError(why)


def _handle_of(value: Any) -> Handle | None:
    if isinstance(value, Handle):
        return value
    return value._Remote__handle if type(value) is Remote else None


def _as_raised(kind: str, args: tuple[Any, ...], hidden: tuple[type[Exception], ...]) -> Exception:
    """Return the same built-in exception if it is an ordinary one and not in `hidden`, else a `ProgramError`."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, hidden):
        try:
            return known(*args)
        except Exception:
            # Some, such as UnicodeDecodeError, need other arguments than `args`: create it without arguments.
            return known.__new__(known)
    return ProgramError(f"{kind}: {args}"[:200])


def _change(mine: Any, theirs: Any) -> None:
    """Copy the program's changes into the tests' mutable arguments, which keep their identity."""
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            mine[:] = theirs
            return
        for at, (old, new) in enumerate(zip(mine, theirs, strict=True)):
            mine[at] = _changed(old, new)
    elif isinstance(mine, tuple) and isinstance(theirs, tuple):
        for old, new in zip(mine, theirs, strict=False):
            _changed(old, new)
    elif isinstance(mine, dict) and isinstance(theirs, dict):
        kept = {key: _changed(mine[key], new) if key in mine else new for key, new in theirs.items()}
        mine.clear()
        mine.update(kept)
    elif isinstance(mine, set) and isinstance(theirs, set):
        mine.clear()
        mine.update(theirs)
    elif isinstance(mine, bytearray) and isinstance(theirs, bytearray):
        mine[:] = theirs


def _changed(old: Any, new: Any) -> Any:
    if isinstance(old, list | dict | set | bytearray | tuple) and isinstance(new, type(old)):
        _change(old, new)
        return new if isinstance(old, tuple) else old
    # Each message creates a new proxy; keep the one that the tests have, which refers to the same object.
    return old if type(old) is Remote else new


def examine(config: dict[str, Any], requests: int, answers: int, report: int) -> None:
    """Run the tests. Write the nonce to the pipe `report` if all pass, otherwise one line that explains the failure."""
    program = Program(requests, answers)
    try:
        _examine(config, program)
        # A bare `except` in the tests may have swallowed the program's death, but the program has failed.
        if program.broken:
            raise FailedError(program.broken)
        result = config["nonce"]
    except FailedError as error:
        result = str(error)
    except ProgramGoneError as error:
        result = f"the program: {error}"
    except BaseException as error:
        result = f"{type(error).__name__}{_where(error)}: {_text(error)}"
    os.write(report, result.replace("\n", " ")[:_LONGEST_REASON].encode("utf-8", "replace"))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "?"


def _where(error: BaseException) -> str:
    """Return the line of the tests in which an error was raised, as text for a message."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" in line {line} of the tests" if line else ""


def _examine(config: dict[str, Any], program: Program) -> None:
    """Run the prelude, the tests and everything that they define; raises at the first failure."""
    # Run as the main module, so that main guards are true. It must be in `sys.modules`, where dataclasses look it up.
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    names["__file__"] = "tests.py"
    try:
        tree = ast.parse(config["tests"], "tests.py")
        # dont_inherit: otherwise this file's `from __future__ import annotations` would apply to the prelude too.
        exec(compile(config["prelude"], "prelude.py", "exec", dont_inherit=True), names)
    except Exception as error:
        raise FailedError(f"the data set's own code: {type(error).__name__}: {_text(error)}") from None
    failed = program.loaded()
    if failed is not None:
        raise FailedError(f"the program does not load: {failed}")
    candidate = _bind(config, names, program)
    program.hides = {_HIDES[n.id] for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in _HIDES}
    program.hides |= {IndexError for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__getitem__"}
    run = TestRun(tree, names, candidate, config["tests"])
    run.all()
    # Tests that never call the program prove nothing.
    if not program.calls:
        raise FailedError("the tests never called the program")


def _bind(config: dict[str, Any], names: dict[str, Any], program: Program) -> Any:
    """Bind the names that the tests lack, as found by `survey.py`; returns the entry point as a callable, or None."""
    entry_point = config["entry_point"]
    root = entry_point.partition(".")[0].removesuffix("()") if entry_point else None
    for name, module in config["modules"].items():
        names.setdefault(name, import_module(module))
    for name, module in config["lent"].items():
        names.setdefault(name, getattr(import_module(module), name))
    values = program.names(config["asked"])
    if root is not None and root not in values:
        raise FailedError(f"the program does not define {root}")
    for name in config["asked"]:
        if name in values and (name == root or name not in names):
            names[name] = values[name]
    if entry_point is None or root is None:
        return None
    candidate = _candidate(entry_point, values[root])
    last = entry_point.rpartition(".")[2].removesuffix("()")
    if "." not in entry_point:
        names[last] = candidate
    for name in (last, "candidate"):
        if not hasattr(builtins, name):
            names.setdefault(name, candidate)
    return candidate


def _candidate(entry_point: str, root: Any) -> Callable[..., Any]:
    """Return a callable for `f`, or for `Solution.method` with a new instance for each call."""
    path = entry_point.split(".")

    def candidate(*args: Any, **kwargs: Any) -> Any:
        target = root
        for at, step in enumerate(path):
            name = step.removesuffix("()")
            if at:
                target = getattr(target, name)
            # A class before the last step is instantiated: `Solution.method` is a method of a new instance.
            handle = _handle_of(target)
            if step.endswith("()") or (at < len(path) - 1 and handle is not None and handle.kind == "type"):
                target = target()
        return target(*args, **kwargs)

    candidate.__name__ = candidate.__qualname__ = path[-1].removesuffix("()")
    return candidate
