"""Checks of configuration values, and the one-line error that they raise.

This module does not import Lightning, so that the command line answers quickly.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

ONE_TRAINER = "trainer: one for a whole study; take it out of the grid, and launch a study for each trainer"


class ConfigurationError(ValueError):
    """Error about a configuration that cannot run, in one line: the field, its value and the valid values."""


class CannotGoOnError(RuntimeError):
    """Error that ends training and that the user can fix, in one line."""


def check_public_name(shown_name: str, target: Any) -> None:
    """Check that a user's class or function does not have the name of a class or function of this package.

    Args:
        shown_name: dotted name of the class or function.
        target: the class or function.

    Raises:
        ConfigurationError: the name is taken. Labels and identities contain names, so they would not tell the two
            apart.
    """
    name = shown_name.rpartition(".")[2]
    package = import_module("lightning_scalerl")  # an import statement would be a cycle
    if name in package.public_names() and getattr(package, name) is not target:
        raise ConfigurationError(
            f"{shown_name}: bears the name of lightning_scalerl.{name}, and names tell runs apart; rename it"
        )


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


def check_layout(strategy: Mapping[str, Any]) -> None:
    """Check the numbers of nodes and of ranks per node in the group `strategy`.

    Raises:
        ConfigurationError: a number is not a whole number above 0, or there are several nodes without a number of ranks
            per node, so that the ranks could not be started.
    """
    nodes, devices = strategy.get("nodes"), strategy.get("devices")
    for name, count in (("nodes", nodes), ("devices", devices)):
        if count is not None:
            whole_number(f"strategy.{name}", count)
    if devices is None and nodes not in (None, 1):
        raise ConfigurationError(
            f"strategy.nodes: {nodes}, and strategy.devices does not say how many ranks each has; give both, "
            f"strategy.nodes={nodes} strategy.devices=8, or hydra.launcher.nodes={nodes} in their place"
        )


# --- checking settings against the annotations of a constructor -------------------------------------------------

_TYPE_DESCRIPTIONS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_CONTAINER_ANNOTATION = re.compile(
    r"(?:Sequence|list|tuple)\[([^\[\],]+)(?:, \.\.\.)?\]|(?:Mapping|dict)\[str, ([^\[\],]+)\]"
)


def check_arguments(field: str, target: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check settings against the annotations of the class or function that will be called with them.

    Only numbers and booleans are checked, alone or as elements of a list or mapping. `target` itself must check
    parameters with other annotations. A boolean does not count as a number, although `True == 1` in Python. NaN does
    not count as a number, and infinity not as a whole number.

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
            for key, item, expected in _mismatches(f"{field}.{name}", parameters[name].annotation, value):
                raise ConfigurationError(f"{key}: {shown(item)} must be {expected}")
        elif not takes_any_name:
            raise ConfigurationError(
                f"{field}.{name}: no such setting{did_you_mean(name, parameters, f'{field}.')}; valid: "
                f"{', '.join(parameters) or 'none'}"
            )


def _mismatches(field: str, annotation: Any, value: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield each mismatch between a value and its annotation as (field, value, description of the expected type)."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if (container := _CONTAINER_ANNOTATION.fullmatch(text.removesuffix(" | None"))) is not None:
        element_annotation = container[1] or container[2]
        if isinstance(value, Mapping):
            items = [(f"{field}.{key}", item) for key, item in value.items()]
        else:
            items = [(field, item) for item in value] if isinstance(value, list | tuple) else []
        for item_field, item in items:
            yield from _mismatches(item_field, element_annotation, item)
        return
    types = {name.strip() for name in text.split("|")}
    expected = types - {"None"}
    if value is None and "None" in types:
        return
    if expected == {"bool"}:
        mismatched = not isinstance(value, bool)
    elif expected and expected <= {"int", "float"}:
        # NaN passes comparisons such as `value < 0`, so constructors often accept it.
        mismatched = (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or math.isnan(value)
            or (expected == {"int"} and math.isinf(value))
        )
    else:
        return
    if mismatched:
        type_name = "float" if "float" in expected else min(expected)
        yield field, value, _TYPE_DESCRIPTIONS[type_name] + (", or null" if "None" in types else "")


def shown(value: Any) -> str:
    """Return a value as the user would write it: `true` and `null` as in YAML, strings in quotes."""
    words = {True: "true", False: "false"}
    return words[value] if isinstance(value, bool) else "null" if value is None else repr(value)


def lone_surrogate(value: Any) -> str | None:
    r"""Return a description of a lone surrogate in a text, or in a list or mapping with texts; None if there is none.

    JSON can write one as the escape "\ud800". Tokenizers and files, which need UTF-8, cannot take such a text.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            excerpt = value[max(0, error.start - 20) : error.start + 20]
            return (
                f"{excerpt!r} has a lone surrogate, which UTF-8 cannot encode; remove it, or write \\ufffd in its place"
            )
        return None
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        parts = value
    return next(filter(None, map(lone_surrogate, parts)), None)


def did_you_mean(name: str, valid: Sequence[str] | Mapping[str, Any], prefix: str = "") -> str:
    """Return `; did you mean PREFIXNAME?` with the valid name closest to `name`, or "" if no valid name is close."""
    close = get_close_matches(name, list(valid), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


ADDRESSES = ("http://", "https://")


def looks_local(path: str) -> bool:
    """Return whether a path can only be a local file or folder, not a model's name on the Hugging Face hub.

    A hub name is NAME or OWNER/NAME. OWNER/NAME counts as local if OWNER is a folder in the working directory.
    """
    owner, _, name = path.partition("/")
    return path.startswith((".", "/", "~")) or "/" in name or (bool(name) and Path(owner).is_dir())


def check_scale(scaled_for: str | None, same_model: bool) -> None:
    """Refuse settings that were made for another model, unless the user set `scaled_for=null`.

    Args:
        scaled_for: dotted name of the model that the settings were made for; None if they are for any model.
        same_model: whether the run's model is the model `scaled_for`.

    Raises:
        ConfigurationError: the settings were made for another model.
    """
    if scaled_for is not None and not same_model:
        raise ConfigurationError(
            "scale: the settings (learning rate, batch, context, thinking) were made for "
            f"{scaled_for.rpartition('.')[2]}, and this is another model; choose scale=trial for a first try, 0.6b, "
            "1.7b, 8b or one of yours in a folder scale/, or say scaled_for=null if you mean them "
            '(in a script overrides=["scale=..."])'
        )
