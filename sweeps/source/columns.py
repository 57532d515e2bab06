"""Columns of a table: found by name in any case, and read strictly, with the line of what is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array
from sweeps.errors import UserError
from sweeps.source.cells import is_blank, is_numeric, mixed_percent, numbers
from sweeps.source.frame import Table
from sweeps.source.text import File, short
from sweeps.source.vocabulary import STEP_NAMES, counters


def column_named(file: File, table: Table, wanted: str, option: str, asked: bool = False) -> str | None:
    """Find the column of a name in any case, None if there is none; a user's own name is tried as it is first.

    Raises:
        UserError: there are several.
    """
    if asked and wanted in table.names:
        return wanted
    found = table.named(wanted)
    if len(found) > 1:
        raise UserError(
            f"{file.path}: columns {' and '.join(map(short, found))} differ only in case; rename one, or choose with "
            f"{option}"
        )
    return found[0] if found else None


def counter_named(file: File, table: Table) -> str | None:
    """Find the column of a framework's compute counter, else of a step (an order, not compute), else None.

    Raises:
        UserError: there are several counters.
    """
    found = counters(table.names)
    if len(found) > 1:
        raise UserError(
            f"{file.path}: {len(found)} compute axes could be meant ({short(', '.join(found))}); choose one with --x"
        )
    steps = (column_named(file, table, name, "--x") for name in STEP_NAMES)
    return found[0] if found else next((name for name in steps if name is not None), None)


def check_columns(file: File, table: Table, names: Sequence[str]) -> None:
    """Check that these columns exist once each, and that no row is too short for them.

    Raises:
        UserError: one is there twice, there are no rows, or some have too few cells.
    """
    twice = sorted({name for name in names if table.names.count(name) > 1})
    if twice:
        raise UserError(f"{file.path}: column {', '.join(map(short, twice))} occurs more than once; rename one")
    if not table.count:
        raise UserError(f"{file.path}: a header and no rows; give a file with points")
    last = max(names, key=table.names.index)
    cells = table.column(last)
    ragged = [] if is_numeric(cells) or not (cells == "").any() else table.narrow(table.names.index(last) + 1)
    if ragged:
        raise UserError(
            f"{file.path}: {len(ragged)} rows have too few cells, first at {table.place(ragged[0])}; repair them"
        )


def strict_numbers(file: File, table: Table, name: str, option: str) -> tuple[Array, NDArray[np.bool_]]:
    """Convert a column to numbers; return them, and the mask of blank cells (NaN among the numbers).

    Raises:
        UserError: a cell that is neither blank nor a finite number, or percent signs at some cells only.
    """
    cells = table.column(name)
    values = numbers(cells)
    none = np.isnan(values)
    unread = cells[none]
    bad = unread[~unread.map(is_blank).to_numpy(bool)]
    if len(bad):
        cell = str(bad.iloc[0])
        remedy = "correct them, or leave the cells empty"
        if "," in cell:
            remedy += "; decimal commas are read if ';' or tabs part the cells and no number has a point"
        raise UserError(
            f"{file.path}: column {short(name)} is not a finite number in {len(bad)} of {len(cells)} rows, "
            f"first at {table.place(int(bad.index[0]))} ({short(cell)!r}); {remedy}"
        )
    if none.all():
        raise UserError(f"{file.path}: column {short(name)} is blank in all {len(cells)} rows; give {option}")
    mixed = mixed_percent(cells, values)
    if mixed is not None:
        with_sign, without = (f"{short(str(cells.iloc[i]).strip())!r} at {table.place(i)}" for i in mixed)
        raise UserError(
            f"{file.path}: column {short(name)} has {with_sign} and, without a percent sign, {without}; "
            "write all of them alike"
        )
    return values, none


def not_negative(file: File, table: Table, name: str, values: Array) -> None:
    """Refuse a column with negative numbers."""
    below = np.flatnonzero(values < 0)
    if len(below):
        raise UserError(
            f"{file.path}: column {short(name)} is negative in {len(below)} rows, first at "
            f"{table.place(int(below[0]))} ({values[below[0]]:g}); it starts at 0"
        )
