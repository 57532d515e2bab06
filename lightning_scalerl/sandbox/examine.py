"""Judge's process: it runs a data set's tests against a program in another process.

Runs inside the judge's sandbox (standard library only). Names that the tests take from the program are bound to values
that the program sends: plain data or `Remote` proxies. A proxy forwards calls to the program and is equal only to
itself. `conduct.py` runs the tests. On success, the nonce, a secret random text, is written to a pipe that only the
parent reads.
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
# Built-ins that swallow an exception and return a default value, each with that exception. A test that calls such a
# built-in on the examined program would not notice that the program raised.
_HIDDEN_BY = {"getattr": AttributeError, "hasattr": AttributeError}


class ProgramError(Exception):
    """Raised in the tests in place of a program's exception that is not built in, or that the tests would hide."""


class ProgramGoneError(BaseException):
    """Raised when the program's process has ended or sent an invalid answer. Not an `Exception`: tests catch those."""


class Remote:
    """Proxy for an object of the program. Attribute look-ups and calls are forwarded to it; all else is local."""

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
    """Connection to the program's process, over two pipes.

    Attributes:
        calls: number of calls so far.
        failure: reason why the program is unusable; empty while it works.
        hidden: exception types that the tests would hide. They are replaced by `ProgramError`.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self.calls, self.failure = 0, ""
        self.hidden: set[type[Exception]] = set()

    def wait_until_loaded(self) -> str | None:
        """Wait until the program is loaded; return None, or the type name of the exception that loading raised."""
        status, exception_name = self._receive()
        return None if status == "loaded" else str(exception_name)

    def names(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of the given names, without names that the program does not define."""
        values = self.ask("names", sorted(names))
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise self._gone_error("an answer of another kind")
        return values

    def ask(self, request: str, *operands: Any) -> Any:
        """Send a request and return its answer, or raise the program's exception."""
        return self._exchange([request, *operands])[0]

    def call(self, target: Handle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an object of the program. Arguments that the call changed in place are changed here too."""
        self.calls += 1
        value, changed = self._exchange(["call", target, encode((args, kwargs), _handle_of)], (args, kwargs))
        if changed is not None:
            _apply_changes((args, kwargs), changed)
        return value

    def _exchange(self, request: list[Any], arguments: Any = None) -> tuple[Any, Any]:
        """Send a request; return its value and changed arguments (None: unchanged), or raise the program's error."""
        try:
            send(self._requests, encode(request, _handle_of))
        except OSError:
            raise self._gone_error("the program ended") from None
        status, *fields = self._receive()
        if status == "gave" and len(fields) == 2:
            return self._decode(fields[0]), fields[1]
        if status == "raised" and len(fields) == 3 and isinstance(fields[0], str) and isinstance(fields[1], tuple):
            if fields[2] is not None:
                _apply_changes(arguments, fields[2])
            raise _rebuild_exception(fields[0], fields[1], (*_ENDS_A_LOOP, *self.hidden))
        if status == "unplain":
            raise ProgramError(f"what the program gives cannot be sent: {str(fields)[:200]}")
        raise self._gone_error("an answer of another kind")

    def _receive(self) -> list[Any]:
        message = receive(self._answers)
        if message is None:
            raise self._gone_error("the program ended")
        answer = self._decode(message)
        if not isinstance(answer, list) or len(answer) < 2 or not isinstance(answer[0], str):
            raise self._gone_error("an answer of another kind")
        return answer

    def _decode(self, message: Any) -> Any:
        if not isinstance(message, bytes):
            raise self._gone_error("an answer of another kind")
        try:
            return decode(message, self._proxy)
        except MalformedError as error:
            raise self._gone_error(f"a malformed answer, {error}") from None

    def _proxy(self, handle: Handle) -> Any:
        if handle.kind != "coroutine":
            return Remote(self, handle)

        async def awaited() -> Any:
            return self.ask("await", handle)

        return awaited()

    def _gone_error(self, reason: str) -> ProgramGoneError:
        self.failure = self.failure or reason
        return ProgramGoneError(reason)


def _handle_of(value: Any) -> Handle | None:
    if isinstance(value, Handle):
        return value
    return value._Remote__handle if type(value) is Remote else None


def _rebuild_exception(kind: str, args: tuple[Any, ...], hidden: tuple[type[Exception], ...]) -> Exception:
    """Rebuild a program's exception in this process.

    Args:
        kind: name of the exception's type.
        args: the exception's arguments.
        hidden: exception types to replace by `ProgramError`. Types other than built-in subclasses of `Exception` are
            always replaced.
    """
    exception_type = getattr(builtins, kind, None)
    if (
        isinstance(exception_type, type)
        and issubclass(exception_type, Exception)
        and not issubclass(exception_type, hidden)
    ):
        try:
            return exception_type(*args)
        except Exception:
            # Some exceptions, such as UnicodeDecodeError, need other arguments than `args`: create them without
            # arguments.
            return exception_type.__new__(exception_type)
    return ProgramError(f"{kind}: {args}"[:200])


def _apply_changes(target: Any, source: Any) -> None:
    """Copy the program's changes (`source`) into the tests' mutable arguments (`target`), which keep their identity."""
    if isinstance(target, list) and isinstance(source, list):
        if len(target) != len(source):
            target[:] = source
            return
        for index, (old, new) in enumerate(zip(target, source, strict=True)):
            target[index] = _merge_change(old, new)
    elif isinstance(target, tuple) and isinstance(source, tuple):
        for old, new in zip(target, source, strict=False):
            _merge_change(old, new)
    elif isinstance(target, dict) and isinstance(source, dict):
        updated = {key: _merge_change(target[key], new) if key in target else new for key, new in source.items()}
        target.clear()
        target.update(updated)
    elif isinstance(target, set) and isinstance(source, set):
        target.clear()
        target.update(source)
    elif isinstance(target, bytearray) and isinstance(source, bytearray):
        target[:] = source


def _merge_change(old: Any, new: Any) -> Any:
    if isinstance(old, list | dict | set | bytearray | tuple) and isinstance(new, type(old)):
        _apply_changes(old, new)
        return new if isinstance(old, tuple) else old
    # Each message creates a new proxy; keep the one that the tests have, which refers to the same object.
    return old if type(old) is Remote else new


def examine(config: dict[str, Any], requests: int, answers: int, report: int) -> None:
    """Run the tests. Write the nonce to the pipe `report` if all pass, otherwise one line that explains the failure."""
    program = Program(requests, answers)
    try:
        _examine(config, program)
        # A bare `except` in the tests may have swallowed the program's death, but the program has failed.
        if program.failure:
            raise FailedError(program.failure)
        result = config["nonce"]
    except FailedError as error:
        result = str(error)
    except ProgramGoneError as error:
        result = f"the program: {error}"
    except BaseException as error:
        result = f"{type(error).__name__}{_place_in_tests(error)}: {_message(error)}"
    os.write(report, result.replace("\n", " ")[:_LONGEST_REASON].encode("utf-8", "replace"))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "?"


def _place_in_tests(error: BaseException) -> str:
    """Return the line of the tests in which an error was raised, as text for a message."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" in line {line} of the tests" if line else ""


def _examine(config: dict[str, Any], program: Program) -> None:
    """Run the prelude, the tests and everything that they define; raises at the first failure."""
    # Run as the main module, so that `if __name__ == "__main__"` is true. The module must be in `sys.modules`, where
    # dataclasses look it up.
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    names["__file__"] = "tests.py"
    try:
        tree = ast.parse(config["tests"], "tests.py")
        # dont_inherit: otherwise this file's `from __future__ import annotations` would apply to the prelude too.
        exec(compile(config["prelude"], "prelude.py", "exec", dont_inherit=True), names)
    except Exception as error:
        raise FailedError(f"the data set's own code: {type(error).__name__}: {_message(error)}") from None
    failed = program.wait_until_loaded()
    if failed is not None:
        raise FailedError(f"the program does not load: {failed}")
    candidate = _bind_names(config, names, program)
    program.hidden = {_HIDDEN_BY[n.id] for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in _HIDDEN_BY}
    program.hidden |= {IndexError for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__getitem__"}
    run = TestRun(tree, names, candidate, config["tests"])
    run.run_all()
    # Tests that never call the program prove nothing.
    if not program.calls:
        raise FailedError("the tests never called the program")


def _bind_names(config: dict[str, Any], names: dict[str, Any], program: Program) -> Any:
    """Bind the names that the tests use but do not define (`survey.py`); return the entry point as a callable, or None.

    Raises:
        FailedError: the program does not define the entry point.
    """
    entry_point = config["entry_point"]
    root = entry_point.partition(".")[0].removesuffix("()") if entry_point else None
    for name, module in config["modules"].items():
        names.setdefault(name, import_module(module))
    for name, module in config["standard_library"].items():
        names.setdefault(name, getattr(import_module(module), name))
    values = program.names(config["program_names"])
    if root is not None and root not in values:
        raise FailedError(f"the program does not define {root}")
    for name in config["program_names"]:
        if name in values and (name == root or name not in names):
            names[name] = values[name]
    if entry_point is None or root is None:
        return None
    candidate = _candidate(entry_point, values[root])
    last_name = entry_point.rpartition(".")[2].removesuffix("()")
    if "." not in entry_point:
        names[last_name] = candidate
    for name in (last_name, "candidate"):
        if not hasattr(builtins, name):
            names.setdefault(name, candidate)
    return candidate


def _candidate(entry_point: str, root: Any) -> Callable[..., Any]:
    """Return a callable for `f`, or for `Solution.method` with a new instance for each call."""
    path = entry_point.split(".")

    def candidate(*args: Any, **kwargs: Any) -> Any:
        target = root
        for index, step in enumerate(path):
            name = step.removesuffix("()")
            if index:
                target = getattr(target, name)
            # A class before the last step is instantiated: `Solution.method` is a method of a new instance.
            handle = _handle_of(target)
            if step.endswith("()") or (index < len(path) - 1 and handle is not None and handle.kind == "type"):
                target = target()
        return target(*args, **kwargs)

    candidate.__name__ = candidate.__qualname__ = path[-1].removesuffix("()")
    return candidate
