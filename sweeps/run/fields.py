"""Get fields of JSON objects and check their types, because damaged files or those of others may contain anything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Larger integers are not exact as floats, and arrays and other programs store numbers as floats.
MAX_INTEGER = 2**53
# Longest file name, in bytes, on common file systems.
_MAX_NAME_BYTES = 255


def text(entry: Mapping[str, Any], name: str) -> str:
    """Return a field that must be a string.

    Raises:
        ValueError: the field is missing or of another type.
    """
    value = entry.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {_shown(value)} is no text")
    return value


def texts(entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a field that must be a list of strings; raises like `text`."""
    value = entry.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name}: {_shown(value)} is no list of texts")
    return tuple(value)


def run_name(entry: Mapping[str, Any], name: str = "run") -> str:
    """Return a field with a run's name, which must be valid as the name of a folder; raises like `text`."""
    value = text(entry, name)
    raw = value.encode(errors="replace")
    if not raw or len(raw) > _MAX_NAME_BYTES or value in (".", "..") or "/" in value or not value.isprintable():
        raise ValueError(f"{name}: {_shown(value)} is no name of a folder")
    return value


def whole(entry: Mapping[str, Any], name: str, least: int = -MAX_INTEGER) -> int:
    """Return a field that must be an integer from `least` to 2^53; raises like `text`."""
    value = entry.get(name)
    # In Python bool is a subclass of int, but JSON's true is not a number.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_INTEGER:
        raise ValueError(f"{name}: {_shown(value)} is no whole number{'' if least < -1 else f' from {least}'} to 2^53")
    return value


def number(entry: Mapping[str, Any], name: str) -> float:
    """Return a field that must be a finite number; raises like `text`."""
    value = entry.get(name)
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer too large for a float
        pass
    raise ValueError(f"{name}: {_shown(value)} is no finite number")


def number_or_none(entry: Mapping[str, Any], name: str) -> float | None:
    """Return a field that must be a finite number or null; raises like `text`."""
    return None if entry.get(name) is None else number(entry, name)


def group(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that must be a JSON object; raises like `text`."""
    value = entry.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {_shown(value)} is no group of fields")
    return value


def groups(entry: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """Return a field that must be a list of JSON objects; raises like `text`."""
    value = entry.get(name)
    if not isinstance(value, list | tuple) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{name}: {_shown(value)} is no list of groups of fields")
    return value


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        shown = "a number of thousands of digits"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
