"""Functions and classes of the user, given by location (`Source`) or as objects (`FunctionObject`).

Code in a file is loaded by its path in each process. An object from a script or notebook is pickled by value.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_scalerl.checks import ConfigurationError, error_line


@dataclass(frozen=True)
class Source:
    """Location of a function: `place` is an absolute path of a file or the name of a module."""

    place: str
    function: str

    @classmethod
    def of(cls, field: str, name: str) -> Source:
        """Parse `file.py:function` or `module:function`; the path of a file becomes absolute.

        Args:
            field: configuration key, for error messages.
            name: the text to parse.

        Raises:
            ConfigurationError: the text has neither form, or the file does not exist.
        """
        place, _, function = name.rpartition(":")
        if not place or not function:
            raise ConfigurationError(
                f"{field}: {name!r} is neither one of ours nor file.py:function nor module:function"
            )
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            if not path.is_file():
                raise ConfigurationError(f"{field}: there is no file {place!r}")
            place = str(path)
        return cls(place, function)

    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes; empty for a module."""
        path = Path(self.place)
        return hashlib.sha256(path.read_bytes()).hexdigest() if self.place.endswith(".py") else ""

    def load(self) -> Callable[..., Any]:
        """Import the function from its file or module.

        Raises:
            ImportError, AttributeError: the function does not exist.
            Exception: any error that the file raises on import.
        """
        if not self.place.endswith(".py"):
            function: Callable[..., Any] = getattr(import_module(self.place), self.function)
            return function
        path = Path(self.place)
        # The file can import the files next to it, as if it were run from its folder.
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        # Hash the whole path into the module's name, so that two files of the same name are two modules.
        name = f"_reward_file_{hashlib.sha256(self.place.encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            # Otherwise the next import would use the partly loaded module.
            del sys.modules[name]
            raise
        function = getattr(module, self.function)
        return function


@dataclass(frozen=True)
class FunctionObject:
    """Function object from a script or a notebook, used in place of a `Source`.

    It is identified by its source text and by plain values: the values in its closure, or the bound arguments of a
    `functools.partial`. A method or a callable object is identified by the source text of its class and the object's
    attributes. Plain values are strings, numbers, None, and lists and dicts of them.
    """

    field: str
    called: Callable[..., Any]

    @property
    def function(self) -> str:
        """Name of the function, under which its values are recorded."""
        called = _unwrapped(self.called)
        name = str(getattr(called, "__name__", type(called).__name__))
        return "reward" if name == "<lambda>" else name

    @property
    def place(self) -> str:
        """Module in which the function is defined."""
        return str(getattr(_unwrapped(self.called), "__module__", "") or "__main__")

    def digest(self) -> str:
        """Return the SHA-256 of the function's source text.

        Raises:
            ConfigurationError: the source text cannot be read.
        """
        try:
            text, values = _text_and_values(self.called)
        except (OSError, TypeError) as error:
            raise ConfigurationError(
                f"{self.field}: the source text of {self.function} cannot be read ({error_line(error)}), and a run is "
                "identified by it; give a function that is written with def or lambda in a file or a notebook, or "
                '"file.py:function"'
            ) from error
        plain_values = {name: value for name, value in sorted(values.items()) if _is_plain(value)}
        content = text + (json.dumps(plain_values) if plain_values else "")
        return hashlib.sha256(content.encode()).hexdigest()

    def load(self) -> Callable[..., Any]:
        """Return the function object."""
        return self.called

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the function by value, for the process that grades.

        Raises:
            ConfigurationError: it cannot be pickled.
        """
        import cloudpickle

        try:
            return {"field": self.field, "sent": cloudpickle.dumps(self.called)}
        except Exception as error:
            raise ConfigurationError(
                f"{self.field}: {self.function} cannot be sent to the process that grades ({error_line(error)}); make "
                "what it holds (a model, a client, a lock) inside of it, or write it into a file and give "
                f'"file.py:{self.function}"; verify.workers=0 grades in the trainer\'s own process, where nothing can '
                "stop it if it hangs"
            ) from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        import cloudpickle

        object.__setattr__(self, "field", state["field"])
        object.__setattr__(self, "called", cloudpickle.loads(state["sent"]))


def _unwrapped(called: Any) -> Any:
    """Return the function inside a `functools.partial`, however deep; other callables are returned unchanged."""
    while isinstance(called, partial):
        called = called.func
    return called


def _text_and_values(called: Any) -> tuple[str, dict[str, Any]]:
    """Return the source text of a callable, and the values that it holds (closure, bound arguments, attributes).

    Raises:
        OSError, TypeError: the source text cannot be read.
    """
    if isinstance(called, partial):
        text, values = _text_and_values(called.func)
        keywords = {name: value for name, value in sorted(called.keywords.items()) if _is_plain(value)}
        return text, {**values, "partial": [[value for value in called.args if _is_plain(value)], keywords]}
    if inspect.isfunction(called):
        return textwrap.dedent(inspect.getsource(called)), dict(inspect.getclosurevars(called).nonlocals)
    owner = getattr(called, "__self__", called)
    if inspect.isclass(owner) or not hasattr(type(owner), "__module__"):
        return textwrap.dedent(inspect.getsource(called)), {}
    name = getattr(called, "__name__", "__call__") if owner is not called else "__call__"
    attributes = {key: value for key, value in getattr(owner, "__dict__", {}).items() if _is_plain(value)}
    return textwrap.dedent(inspect.getsource(type(owner))), {"called": name, "attributes": attributes}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a string, a number or None, or a list or dict of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    return isinstance(value, str | int | float | None) or (
        isinstance(value, list | tuple) and all(map(_is_plain, value))
    )
