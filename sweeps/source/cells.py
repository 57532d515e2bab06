"""Conversion of a column's cells: numbers, percentages, missing values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sweeps.curve import Array
from sweeps.run.journal import finite

if TYPE_CHECKING:
    from pandas import Series

# Words that mean a missing value in exports: the words that pandas reads as missing, and dashes.
_NO_VALUE = frozenset(["nan", "-nan", "na", "n/a", "<na>", "#na", "#n/a", "null", "none", "-", "–", "—"])


def is_numeric(cells: Series[Any]) -> bool:
    """Return whether a column has a numeric type, so that none of its cells is text or empty."""
    return cells.dtype.kind in "iuf"


def numbers(cells: Series[Any]) -> Array:
    """Convert a column to numbers: "21%" becomes 0.21; booleans and cells that are not finite numbers become NaN."""
    if is_numeric(cells):
        values = np.array(cells, dtype=float)
    else:
        listed = cells.tolist()
        try:
            # Take the slow path for booleans, which float() would accept.
            if not set(map(type, listed)) <= {str, int, float}:
                raise ValueError("truth values are no numbers, though float() takes them for such")
            values = np.fromiter(map(float, listed), float, len(listed))
        except (ValueError, OverflowError):
            values = np.fromiter(map(number, listed), float, len(listed))
    values[~np.isfinite(values)] = np.nan
    return values


def number(cell: Any) -> float:
    """Convert one cell to a number, by the rules of `numbers`."""
    if isinstance(cell, str):
        try:
            text = cell.rstrip()
            return math.nan if not text else float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            return math.nan
    value = finite(cell)
    return math.nan if value is None else value


def mixed_percent(cells: Series[Any], values: Array) -> tuple[int, int] | None:
    """Find out whether a column mixes percentages with numbers above 1.

    Returns:
        The row of the first cell with a percent sign, and of the first cell above 1 without one; None if either is
        missing.
    """
    if is_numeric(cells):
        return None
    signed = np.array([isinstance(cell, str) and "%" in cell for cell in cells.tolist()], dtype=bool)
    plain = ~signed & (values > 1)
    return (int(signed.argmax()), int(plain.argmax())) if signed.any() and plain.any() else None


def is_empty(cell: object) -> bool:
    """Return whether a cell is None or blank text, as where nothing was logged."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def is_blank(cell: object) -> bool:
    """Return whether a cell is empty, NaN, or a word that exports write for a missing value."""
    if isinstance(cell, str):
        text = cell.strip()
        return not text or text.casefold() in _NO_VALUE
    return cell is None or (isinstance(cell, float) and math.isnan(cell))
