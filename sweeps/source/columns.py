"""Find a table's columns by name in any case, and read them strictly. Error messages name the line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array
from sweeps.errors import UserError
from sweeps.run.fields import MAX_INTEGER
from sweeps.source.cells import is_blank, is_numeric, mixed_percent, numbers
from sweeps.source.frame import Table
from sweeps.source.text import File, short
from sweeps.source.vocabulary import STEP_NAMES, counters
from sweeps.terminal import counted

# Names of the column of row numbers that pandas writes.
_INDEX = re.compile(r"|unnamed: \d+|index", re.IGNORECASE)


def is_index(name: str) -> bool:
    """Return whether a column has the name that pandas gives to a table's row numbers."""
    return _INDEX.fullmatch(name.strip()) is not None


def column_named(file: File, table: Table, name: str, option: str, exact: bool = False) -> str | None:
    """Find a column by name in any case; None without one. With `exact`, its exact case is tried first.

    Raises:
        UserError: several columns match.
    """
    if exact and name in table.names:
        return name
    matching = table.named(name)
    if len(matching) > 1:
        raise UserError(
            f"{file.path}: columns {' and '.join(map(short, matching))} differ only in case; rename one, or choose "
            f"with {option}"
        )
    return matching[0] if matching else None


def counter_named(file: File, table: Table) -> str | None:
    """Find the column of a compute counter, else a column of steps (which give an order, not compute), else None.

    Raises:
        UserError: there are several counters.
    """
    known = counters(table.names)
    if len(known) > 1:
        raise UserError(
            f"{file.path}: {len(known)} compute axes could be meant ({short(', '.join(known))}); choose one with --x"
        )
    steps = (column_named(file, table, name, "--x") for name in STEP_NAMES)
    return known[0] if known else next((name for name in steps if name is not None), None)


def whole_steps(table: Table) -> Array | None:
    """Return the column of steps, with NaN for a step that is not a whole number; None without such a column."""
    names = [name for wanted in STEP_NAMES for name in table.named(wanted)]
    if not names:
        return None
    try:
        steps = numbers(table.column(names[0]))
    # It is unclear whether commas are decimal. Steps are optional, so the table can be read without them.
    except UserError:
        return None
    is_whole = (np.abs(steps) <= MAX_INTEGER) & (steps == np.round(steps))
    return np.where(is_whole, steps, np.nan)


def check_once(file: File, table: Table, names: Sequence[str]) -> None:
    """Check that each of these columns occurs once.

    Raises:
        UserError: a column occurs twice.
    """
    repeated = sorted({name for name in names if table.names.count(name) > 1})
    if repeated:
        raise UserError(f"{file.path}: column {', '.join(map(short, repeated))} occurs more than once; rename one")


def check_columns(file: File, table: Table, names: Sequence[str]) -> None:
    """Check that each of these columns occurs once, and that every row is long enough for them.

    Raises:
        UserError: a column occurs twice, there are no rows, or a row has too few cells.
    """
    check_once(file, table, names)
    if not table.count:
        raise UserError(f"{file.path}: a header and no rows; give a file with points")
    last = max(names, key=table.names.index)
    cells = table.column(last)
    short_rows = (
        [] if is_numeric(cells) or not (cells == "").any() else table.rows_narrower_than(table.names.index(last) + 1)
    )
    if short_rows:
        raise UserError(
            f"{file.path}: too few cells in {counted(len(short_rows), 'row')}, first at {table.place(short_rows[0])}; "
            "repair them"
        )


def strict_numbers(file: File, table: Table, name: str, option: str) -> tuple[Array, NDArray[np.bool_]]:
    """Convert a column to numbers. Return these, and a mask of the blank cells, which are NaN.

    Raises:
        UserError: a cell is neither blank nor a finite number, or only some cells have percent signs.
    """
    cells = table.column(name)
    values = numbers(cells)
    missing = np.isnan(values)
    unread = cells[missing]
    bad = unread[~unread.map(is_blank).to_numpy(bool)]
    if len(bad):
        cell = str(bad.iloc[0])
        remedy = "correct them, or leave the cells empty"
        if "," in cell:
            remedy += "; decimal commas are read if ';' or tabs separate the cells and no number has a point"
        raise UserError(
            f"{file.path}: column {short(name)} is not a finite number in {len(bad)} of {len(cells)} rows, "
            f"first at {table.place(int(bad.index[0]))} ({short(cell)!r}); {remedy}"
        )
    if missing.all():
        raise UserError(f"{file.path}: column {short(name)} is blank in all {len(cells)} rows; give {option}")
    mixed = mixed_percent(cells, values)
    if mixed is not None:
        with_sign, without = (f"{short(str(cells.iloc[i]).strip())!r} at {table.place(i)}" for i in mixed)
        raise UserError(
            f"{file.path}: column {short(name)} has {with_sign} and, without a percent sign, {without}; "
            "write all of them alike"
        )
    return values, missing


def refuse_negative(file: File, table: Table, name: str, values: Array) -> None:
    """Raise a UserError if a column has negative numbers."""
    below = np.flatnonzero(values < 0)
    if len(below):
        raise UserError(
            f"{file.path}: column {short(name)} is negative in {counted(len(below), 'row')}, first at "
            f"{table.place(int(below[0]))} ({values[below[0]]:g}); it starts at 0"
        )


def refuse_blank_labels(file: File, table: Table, name: str, labels: Sequence[str], skipped: NDArray[np.bool_]) -> None:
    """Refuse blank labels in a column of recipes or seeds, which would become a recipe or a seed without a name.

    Args:
        file, table: the table.
        name: the column.
        labels: the label of each row.
        skipped: mask of the rows that are not used.

    Raises:
        UserError: a row that is used has a blank label.
    """
    blank = np.flatnonzero(~skipped & np.array([not label for label in labels], dtype=bool))
    if len(blank):
        raise UserError(
            f"{file.path}: column {short(name)} is blank in {len(blank)} of {len(labels)} rows, first at "
            f"{table.place(int(blank[0]))}; fill them (of merged cells, only the first holds the text)"
        )
