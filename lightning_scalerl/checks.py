"""Checks of configuration values, and the one-line error that they raise.

This module does not import Lightning, so that the command line answers quickly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

ONE_TRAINER = "trainer: one for a whole study; take it out of the grid, and launch a study for each trainer"


class ConfigurationError(ValueError):
    """Error about a configuration that cannot run, in one line: the field, its value and the valid values."""


class CannotGoOnError(RuntimeError):
    """Error that ends training and that the user can fix, in one line."""


def error_line(error: BaseException) -> str:
    """Return another library's error as one line: its type, and at most 200 characters of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def positive(field: str, value: float) -> float:
    """Return `value` if it is a finite number above zero.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigurationError(f"{field}: {value!r} must be a number above 0")
    return value


def not_negative(field: str, value: float) -> float:
    """Return `value` if it is a finite number of 0 or more.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"{field}: {value!r} must be a number, 0 or more")
    return value


def whole_number(field: str, value: Any, least: int = 1) -> int:
    """Return `value` if it is a whole number of `least` or more.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{field}: {value!r} must be a whole number, {least} or more")
    return value


# --- settings against the annotations of a constructor ----------------------------------------------------------

_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_ELEMENTS = re.compile(r"(?:Sequence|list|tuple)\[([^\[\],]+)(?:, \.\.\.)?\]|(?:Mapping|dict)\[str, ([^\[\],]+)\]")


def check_arguments(field: str, target: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check settings against the annotations of the class or function that will be called with them.

    Only parameters annotated as numbers or booleans are checked, alone or in a list or mapping; `target` must check the
    others itself. A boolean does not count as a number, although `True == 1` in Python.

    Args:
        field: name of the configuration group, such as `optimizer`.
        target: the class or function that will be called.
        values: plain values by parameter name. Hydra's own keys (`_target_`) are skipped.

    Raises:
        ConfigurationError: `target` has no such parameter, or its annotation excludes the value.
    """
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # no signature, for example a builtin
        return
    takes_any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name, value in values.items():
        if name.startswith("_") and name.endswith("_"):
            continue
        if name in parameters:
            for where, item, expected in _mismatches(f"{field}.{name}", parameters[name].annotation, value):
                raise ConfigurationError(f"{where}: {shown(item)} must be {expected}")
        elif not takes_any_name:
            raise ConfigurationError(
                f"{field}.{name}: no such setting{did_you_mean(name, parameters, f'{field}.')}; valid: "
                f"{', '.join(parameters) or 'none'}"
            )


def _mismatches(field: str, annotation: Any, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield each mismatch between a value and its annotation as (field, value, expected kind)."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if (container := _ELEMENTS.fullmatch(text)) is not None:
        inner = container[1] or container[2]
        if isinstance(value, Mapping):
            items = [(f"{field}.{key}", item) for key, item in value.items()]
        else:
            items = [(field, item) for item in value] if isinstance(value, list | tuple) else []
        for where, item in items:
            yield from _mismatches(where, inner, item)
        return
    kinds = {kind.strip() for kind in text.split("|")}
    expected = kinds - {"None"}
    if value is None and "None" in kinds:
        return
    if expected == {"bool"}:
        wrong = not isinstance(value, bool)
    elif expected and expected <= {"int", "float"}:
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
    else:
        return
    if wrong:
        kind = "float" if "float" in expected else min(expected)
        yield field, value, _EXPECTED[kind] + (", or null" if "None" in kinds else "")


def shown(value: Any) -> str:
    """Return a value as the user would write it: `true` and `null` as in YAML, strings in quotes."""
    words = {True: "true", False: "false"}
    return words[value] if isinstance(value, bool) else "null" if value is None else repr(value)


def did_you_mean(name: str, valid: Sequence[str] | Mapping[str, Any], before: str = "") -> str:
    """Return `; did you mean ...?` with the closest valid name, prefixed by `before`; empty if none is close."""
    close = get_close_matches(name, list(valid), n=1)
    return f"; did you mean {before}{close[0]}?" if close else ""


ADDRESSES = ("http://", "https://")


def looks_local(path: str) -> bool:
    """Return whether a path can only mean a local file or folder, not a name on the hub.

    A hub name is NAME or OWNER/NAME. The second form counts as local if OWNER is a folder here.
    """
    owner, _, name = path.partition("/")
    return path.startswith((".", "/", "~")) or "/" in name or (bool(name) and Path(owner).is_dir())


def check_scale(scaled_for: str | None, made_for_it: bool) -> None:
    """Refuse settings that were made for another model, unless the user set `scaled_for=null`.

    Args:
        scaled_for: dotted name of the model that the settings were made for; None if they are for any model.
        made_for_it: whether the run's model is that model.

    Raises:
        ConfigurationError: they were made for another model.
    """
    if scaled_for is not None and not made_for_it:
        raise ConfigurationError(
            "scale: the settings (learning rate, batch, context, thinking) were made for "
            f"{scaled_for.rpartition('.')[2]}, and this is another model; choose scale=trial for a first try, 0.6b, "
            "1.7b, 8b or one of yours in a folder scale/, or say scaled_for=null if you mean them "
            '(in a script overrides=["scale=..."])'
        )
