"""Checked fields of recorded lines: a damaged file, or another program's, has values of any kind in them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# Whole numbers beyond it are no longer exact as floats, which arrays and other programs keep them in.
MOST_WHOLE = 2**53
# Bytes of a file's name on all usual file systems.
_MOST_NAME = 255


def text(entry: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text.

    Raises:
        ValueError: it is missing, or something else.
    """
    value = entry.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: {_shown(value)} is no text")
    return value


def texts(entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a field that is a list of texts; raise as `text`."""
    value = entry.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{name}: {_shown(value)} is no list of texts")
    return tuple(value)


def run_name(entry: Mapping[str, Any], name: str = "run") -> str:
    """Return a field that names a run, and so a folder; raise as `text`."""
    value = text(entry, name)
    raw = value.encode(errors="replace")
    if not raw or len(raw) > _MOST_NAME or value in (".", "..") or "/" in value or not value.isprintable():
        raise ValueError(f"{name}: {_shown(value)} is no name of a folder")
    return value


def whole(entry: Mapping[str, Any], name: str, least: int = -MOST_WHOLE) -> int:
    """Return a field that is a whole number, of at most 2^53 either way; raise as `text`."""
    value = entry.get(name)
    # In Python a bool is an int, and JSON's true is no number.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST_WHOLE:
        raise ValueError(f"{name}: {_shown(value)} is no whole number{'' if least < -1 else f' from {least}'} to 2^53")
    return value


def number(entry: Mapping[str, Any], name: str) -> float:
    """Return a field that is a finite number; raise as `text`."""
    value = entry.get(name)
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # a whole number beyond what a float holds
        pass
    raise ValueError(f"{name}: {_shown(value)} is no finite number")


def number_or_none(entry: Mapping[str, Any], name: str) -> float | None:
    """Return a field that is a finite number or null; raise as `text`."""
    return None if entry.get(name) is None else number(entry, name)


def group(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a field that is a JSON object; raise as `text`."""
    value = entry.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: {_shown(value)} is no group of fields")
    return value


def groups(entry: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """Return a field that is a list of JSON objects; raise as `text`."""
    value = entry.get(name)
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise ValueError(f"{name}: {_shown(value)} is no list of groups of fields")
    return value


def _shown(value: Any) -> str:
    try:
        said = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        said = "a number of thousands of digits"
    return said if len(said) <= 60 else f"{said[:57]}..."
