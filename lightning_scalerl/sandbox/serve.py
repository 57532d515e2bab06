"""Program's side of a judgement: it loads the program and answers calls. Expected values never come here.

Runs inside the program's sandbox (standard library only), next to foreign code that can change all of it; what it
sends is checked by the other side (`examine.py`).

Requests and answers are plain data (`plain.py`). `["names", names]` asks for globals, `["get", object, name]` for an
attribute, `["call", object, encoded (args, kwargs)]` calls, `["await", coroutine]` runs it to its end. Answers:
`["gave", value, the arguments after a call that changed them or None]`, `["raised", type, args, the arguments
likewise]`, `["unplain", why]`.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning_scalerl.sandbox.frames import receive, send
from lightning_scalerl.sandbox.plain import Handle, NotPlainError, decode, encode


class _Kept:
    """Objects that stay in this process, by the number that the judge knows them by."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def to_handle(self, thing: Any) -> Handle:
        number = self._numbers.setdefault(id(thing), len(self._objects))
        if number == len(self._objects):
            # Kept alive with that: its id() is never given to another object.
            self._objects.append(thing)
        return Handle(number, "type" if isinstance(thing, type) else type(thing).__name__)

    def from_handle(self, handle: Handle) -> Any:
        return self._objects[handle.number]


def run_script(source: str) -> None:
    """Run a whole program, as `python program.py` would."""
    module = type(sys)("__main__")
    module.__dict__.update(__file__="program.py", __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    # dont_inherit: else this file's `annotations` future would hold in foreign code as well.
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)


def serve(source: str, requests: int, answers: int) -> None:
    """Load the program, report on that, and answer calls until the judge sends no more."""
    module = type(sys)("program")
    sys.modules["program"] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        send(answers, encode(["failed", type(error).__name__]))
        return
    send(answers, encode(["loaded", ""]))
    kept = _Kept()
    while (request := receive(requests)) is not None:
        send(answers, _answer(request, module.__dict__, kept))


def _answer(request: bytes, names: dict[str, Any], kept: _Kept) -> bytes:
    """Return the encoded answer to one request; it never raises."""
    try:
        what, *operands = decode(request, kept.from_handle)
        if what == "names":
            given = encode({n: names[n] for n in operands[0] if n in names}, kept.to_handle)
            return encode(["gave", given, None])
        if what == "get":
            return _outcome(lambda: getattr(operands[0], operands[1]), kept, lambda: None)
        if what == "await":
            from asyncio import run  # of programs with coroutines, which have imported it

            return _outcome(lambda: run(operands[0]), kept, lambda: None)
        encoded = operands[1]
        args, kwargs = decode(encoded, kept.from_handle)
        # Only these are encoded a second time, after the call, to see whether it has changed them.
        mutable = any(isinstance(a, list | dict | set | bytearray | tuple) for a in (*args, *kwargs.values()))

        def changed() -> Any:
            return (args, kwargs) if mutable and encode((args, kwargs), kept.to_handle) != encoded else None

        return _outcome(lambda: operands[0](*args, **kwargs), kept, changed)
    except BaseException as error:
        return encode(["unplain", f"{type(error).__name__}: {error}"[:200]])


def _outcome(act: Any, kept: _Kept, changed: Any) -> bytes:
    """Act, and return the encoded value or exception with the arguments that the call changed."""
    try:
        value = act()
        # Inside: an iterator that is returned runs the program's code only now.
        given = encode(value, kept.to_handle)
    except NotPlainError:
        raise
    except BaseException as error:
        try:
            args = decode(encode(tuple(error.args)))
        except Exception:
            args = ()
        return encode(["raised", type(error).__name__, args, changed()], kept.to_handle)
    return encode(["gave", given, changed()], kept.to_handle)
