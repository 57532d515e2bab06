"""Read tables with one row per run and its final value, as written by coding assistants' loops (`scalerl decide`).

The format follows karpathy/autoresearch: a TSV with commit, value and status. Several rows of one commit are repeated
runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sweeps.errors import UserError
from sweeps.source.cells import is_blank, number
from sweeps.source.collected import Request
from sweeps.source.columns import check_once, column_named
from sweeps.source.frame import Table, read_table, table_of_rows
from sweeps.source.text import File, short

# Default names of the columns, in the order in which they are tried.
RECIPES = ("commit", "recipe")
VALUES = ("value", "reward", "score", "val_bpb")
STATUS = "status"
# Statuses of runs that ended without a value. autoresearch writes 0 as their value, which would be the best loss.
FAILED = ("crash", "crashed", "fail", "failed", "error", "timeout", "oom", "killed")
# Words in a column's name which mark its values as losses.
_LOSSES = frozenset(
    ("loss", "bpb", "bpc", "nll", "ppl", "perplexity", "error", "err", "wer", "cer", "mse", "rmse", "mae")
)


@dataclass(frozen=True)
class RunValues:
    """Values of one recipe's finished runs, in the table's unit, and the number of its failed runs."""

    recipe: str
    values: tuple[float, ...]
    failed: int


@dataclass(frozen=True)
class RunTable:
    """The runs of all recipes in a table.

    Attributes:
        value: name of the column of values.
        recipes: the recipes in order of appearance.
        statuses: number of rows by status, in lower case; empty if the table has no column of statuses.
        notes: remarks on rows that could not be read as expected.
    """

    value: str
    recipes: tuple[RunValues, ...]
    statuses: dict[str, int]
    notes: tuple[str, ...]


def read_run_values(
    path: Path,
    by: str | None = None,
    y: str | None = None,
    status: str | None = None,
    failed: Sequence[str] = FAILED,
    lower_is_better: bool = False,
) -> RunTable:
    """Read a table with one row per run.

    Args:
        path: TSV, CSV, JSONL, Parquet or Excel file with a header.
        by: column of the recipe; None for `commit`, else `recipe`.
        y: column of the run's value; None for the first of `VALUES`.
        status: column of the run's status; None for `status`, which may be missing.
        failed: statuses of failed runs; runs without a finite value also count as failed.
        lower_is_better: whether the value is a loss; used only to check the column's name.

    Raises:
        UserError: the file or a column cannot be read; or the value's column has the name of a loss and
            `lower_is_better` is False; or a value is text although its run did not fail.
    """
    file = File(path, "a table with a header line and one row per run")
    table = _table(file, tuple(name for name in (by, status) if name))
    recipe_column = _column(file, table, "--by", by, RECIPES)
    value_column = _column(file, table, "--y", y, VALUES)
    status_column = _column(file, table, "--status", status, (STATUS,)) if status or table.named(STATUS) else None
    if not lower_is_better and _LOSSES & set(re.split(r"[^a-z]+", value_column.casefold())):
        raise UserError(f"--y {value_column}: its name is that of a loss; add --lower-is-better, or rename the column")
    words = {word.strip().casefold() for word in failed}
    recipes = table.label(recipe_column)
    cells = table.column(value_column).tolist()
    values = [number(cell) for cell in cells]
    states = [word.casefold() for word in table.label(status_column)] if status_column else [""] * len(recipes)
    for row, (cell, value, state) in enumerate(zip(cells, values, states, strict=True)):
        text = str(cell).strip()
        # A status of failure may be written in place of the value. Other text may be a value that cannot be read, which
        # must not count as a failed run.
        if math.isnan(value) and not is_blank(cell) and not {state, text.casefold()} & words:
            raise UserError(
                f"{path}: column {short(value_column)} is not a number at {table.place(row)} ({short(text)!r}); "
                "correct it, or leave the cell empty if the run failed"
            )
    finished: dict[str, list[float]] = {}
    failures: Counter[str] = Counter()
    valueless = 0
    for recipe, value, state in zip(recipes, values, states, strict=True):
        if not recipe:
            raise UserError(f"{path}: a row has no {recipe_column}; every run needs its recipe there")
        runs = finished.setdefault(recipe, [])
        if state in words or not math.isfinite(value):
            failures[recipe] += 1
            valueless += state not in words
        else:
            runs.append(value)
    note = f"{valueless} of {len(recipes)} rows have no number in {value_column}: counted as failed"
    return RunTable(
        value=value_column,
        recipes=tuple(RunValues(recipe, tuple(runs), failures[recipe]) for recipe, runs in finished.items()),
        statuses=dict(Counter(states)) if status_column else {},
        notes=(note,) if valueless else (),
    )


def _table(file: File, labels: tuple[str, ...]) -> Table:
    """Read the table. `labels` are columns to keep as text."""
    header = file.start.split(b"\n", 1)[0]
    if b"\t" in header and not header.startswith((b"{", b"[", b"PAR1", b"PK")):
        # Coding assistants' loops write descriptions without quotes, so a quotation mark is an ordinary character.
        lines = [(at, line) for at, line in enumerate(file.text.splitlines(), start=1) if line.strip()]
        first_row, *rows = [line.split("\t") for _, line in lines]
        header_names = [name.strip() for name in first_row]
        text_table = table_of_rows(file, header_names, rows)
        return replace(text_table, place=lambda row: f"line {lines[row + 1][0]}")
    table = read_table(file, Request(by=None, factors=(*labels, *RECIPES, STATUS)))
    if table is None:
        raise UserError(f"{file.path}: an empty file; give a table with a header line and one row per run")
    return table


def _column(file: File, table: Table, option: str, name: str | None, defaults: Sequence[str]) -> str:
    """Return the table's column for a role, from the user's name or the default names.

    Raises:
        UserError: there is no such column, several, or no row.
    """
    if not table.count:
        raise UserError(f"{file.path}: a header without rows; give one row per run")
    for candidate in (name,) if name else defaults:
        if (column := column_named(file, table, candidate, option, exact=name is not None)) is not None:
            check_once(file, table, [column])
            return column
    candidate = name or " or ".join(defaults)
    raise UserError(f"{file.path}: no column {candidate}; name it with {option}; found {', '.join(table.names)}")
