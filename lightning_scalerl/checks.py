"""Checks of configuration values, and the one-line error that they raise.

Light: the command line answers without importing Lightning.
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
    """Error about a configuration that cannot run, in one line: the field, the value and what is valid."""


class CannotGoOnError(RuntimeError):
    """Condition that training cannot continue from and that its user can fix; one line."""


def said(error: BaseException) -> str:
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


# --- what a constructor's annotations say of its settings -------------------------------------------------------

_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_ELEMENTS = re.compile(r"(?:Sequence|list|tuple)\[([^\[\],]+)(?:, \.\.\.)?\]|(?:Mapping|dict)\[str, ([^\[\],]+)\]")


def check_arguments(field: str, target: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check settings against the annotations of what is called with them, before it computes.

    A truth value is no number and a text is none, though Python takes `True` for 1. Only parameters that are annotated
    as numbers or truth values, alone or in a list or mapping, are looked at: all else is left to `target` itself.

    Args:
        field: where the settings stand, such as `optimizer`.
        target: the class or function that is called with them.
        values: settings by name, in plain values; Hydra's own keys (`_target_`) are passed over.

    Raises:
        ConfigurationError: a name that `target` does not take, or a value that its annotation rules out.
    """
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):  # nothing is known of it
        return
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name, value in values.items():
        if name.startswith("_") and name.endswith("_"):
            continue
        if name in parameters:
            for where, item, expected in _mismatches(f"{field}.{name}", parameters[name].annotation, value):
                raise ConfigurationError(f"{where}: {shown(item)} must be {expected}")
        elif not anything:
            raise ConfigurationError(
                f"{field}.{name}: no such setting{did_you_mean(name, parameters, f'{field}.')}; valid: "
                f"{', '.join(parameters)}"
            )


def _mismatches(field: str, annotation: Any, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield each place where a value does not fit its annotation: the field, the value there, and what it must be."""
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
    """Return a value as its user wrote it: `true` and `null` as in YAML, texts in quotes."""
    words = {True: "true", False: "false"}
    return words[value] if isinstance(value, bool) else "null" if value is None else repr(value)


def did_you_mean(name: str, valid: Sequence[str] | Mapping[str, Any], before: str = "") -> str:
    """Return `; did you mean ...?` with the nearest valid name, behind `before`; empty if none is near."""
    close = get_close_matches(name, list(valid), n=1)
    return f"; did you mean {before}{close[0]}?" if close else ""


def looks_local(path: str) -> bool:
    """Return whether a path can be meant for this machine's files only, and for no name on a hub.

    A name there is one word, or two with a slash; of two, the first may also be a folder that is here.
    """
    first, _, rest = path.partition("/")
    return path.startswith((".", "/", "~")) or "/" in rest or (bool(rest) and Path(first).is_dir())


def check_scale(scaled_for: str | None, made_for_it: bool) -> None:
    """Refuse settings that were made for one model on another, unless their user asked for that.

    Args:
        scaled_for: dotted name of the model that the settings were made for; None for any.
        made_for_it: the model is the one in question.

    Raises:
        ConfigurationError: with how to ask for it.
    """
    if scaled_for is not None and not made_for_it:
        raise ConfigurationError(
            "scale: the settings (learning rate, batch, context, thinking) were made for "
            f"{scaled_for.rpartition('.')[2]}, and this is another model; choose scale=0.6b, 1.7b, 8b or one of yours "
            'in a folder scale/, or say scaled_for=null if you mean them (in a script overrides=["scale=..."])'
        )
