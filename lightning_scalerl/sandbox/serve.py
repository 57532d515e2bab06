"""Process of the judged program: it loads the program and answers calls. It never receives expected values.

Runs inside the program's sandbox (standard library only), in the same process as untrusted code, which can change
everything in it. The other side (`examine.py`) therefore checks the messages from here.

Requests and answers are plain data (`plain.py`). Requests:

- `["names", names]`: values of these globals;
- `["get", object, name]`: an attribute;
- `["call", object, encoded (args, kwargs)]`: the result of a call;
- `["await", coroutine]`: the result of a coroutine.

Answers:

- `["gave", value, changed]`: a value, and the arguments after the call if the call changed them, else None;
- `["raised", type, args, changed]`: an exception, and the changed arguments as above;
- `["unplain", reason]`: the value cannot be sent.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning_scalerl.sandbox.frames import receive, send
from lightning_scalerl.sandbox.plain import Handle, NotPlainError, decode, encode


class _ObjectTable:
    """Table of objects that stay in this process, with the numbers by which the judge refers to them."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def to_handle(self, value: Any) -> Handle:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            # This keeps the object alive, so that its id() is not reused.
            self._objects.append(value)
        return Handle(number, "type" if isinstance(value, type) else type(value).__name__)

    def from_handle(self, handle: Handle) -> Any:
        return self._objects[handle.number]


def run_script(source: str) -> None:
    """Run a whole program as `python program.py` would."""
    module = type(sys)("__main__")
    module.__dict__.update(__file__="program.py", __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    # dont_inherit: otherwise this file's `from __future__ import annotations` would apply to the program too.
    exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)


def serve(source: str, requests: int, answers: int) -> None:
    """Load the program, report whether that succeeded, and answer requests until the judge closes the pipe."""
    module = type(sys)("program")
    sys.modules["program"] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        send(answers, encode(["failed", type(error).__name__]))
        return
    send(answers, encode(["loaded", ""]))
    objects = _ObjectTable()
    while (request := receive(requests)) is not None:
        send(answers, _answer(request, module.__dict__, objects))


def _answer(request: bytes, names: dict[str, Any], objects: _ObjectTable) -> bytes:
    """Return the encoded answer to one request; it never raises."""
    try:
        request_name, *operands = decode(request, objects.from_handle)
        if request_name == "names":
            values = encode({n: names[n] for n in operands[0] if n in names}, objects.to_handle)
            return encode(["gave", values, None])
        if request_name == "get":
            return _call_and_encode(lambda: getattr(operands[0], operands[1]), objects, lambda: None)
        if request_name == "await":
            from asyncio import run  # only for programs with coroutines, which have imported it already

            return _call_and_encode(lambda: run(operands[0]), objects, lambda: None)
        encoded = operands[1]
        args, kwargs = decode(encoded, objects.from_handle)
        # Mutable arguments are encoded again after the call, to see whether the call has changed them.
        mutable = any(isinstance(a, list | dict | set | bytearray | tuple) for a in (*args, *kwargs.values()))

        def changed() -> Any:
            return (args, kwargs) if mutable and encode((args, kwargs), objects.to_handle) != encoded else None

        return _call_and_encode(lambda: operands[0](*args, **kwargs), objects, changed)
    except BaseException as error:
        return encode(["unplain", f"{type(error).__name__}: {error}"[:200]])


def _call_and_encode(act: Any, objects: _ObjectTable, changed: Any) -> bytes:
    """Call `act` and return the encoded answer: its value or exception, and the changed arguments from `changed`."""
    try:
        value = act()
        # Encode inside the `try`, because encoding a returned iterator runs the program's code.
        encoded = encode(value, objects.to_handle)
    except NotPlainError:
        raise
    except BaseException as error:
        try:
            args = decode(encode(tuple(error.args)))
        except Exception:
            args = ()
        return encode(["raised", type(error).__name__, args, changed()], objects.to_handle)
    return encode(["gave", encoded, changed()], objects.to_handle)
