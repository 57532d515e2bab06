"""Read tables with a column of compute or steps, and one column of rewards per run.

A log's table looks similar, with one column per metric. So columns are taken for runs only if none of them has the name
of a metric, and all have the same scale. `--y all` declares columns of any name as runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sweeps.errors import UserError
from sweeps.source.cells import is_blank, numbers
from sweeps.source.collected import ALL, Collected, ForeignRun, Request, make_labels
from sweeps.source.columns import (
    check_columns,
    column_named,
    counter_named,
    is_index,
    refuse_negative,
    strict_numbers,
    whole_steps,
)
from sweeps.source.frame import Table, read_table, with_order
from sweeps.source.log import Log, Series, recipe_of
from sweeps.source.run_names import is_bare_seed, labels_in
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import RUN_COLUMNS, STEP_NAMES, counters, order_warning
from sweeps.terminal import counted

if TYPE_CHECKING:
    import pandas

NAME = "table with one column per run"

# A table with one of these columns is a table of points.
_POINT_COLUMNS = ("reward", "recipe", "seed", "sd", "baseline", *RUN_COLUMNS)
# Columns that are neither runs nor metrics, besides row numbers: times and epochs.
_IGNORED_COLUMNS = re.compile(r"_?(wall|relative)?[ _]?(time(stamp)?|runtime)( \(process\))?|date|epoch", re.IGNORECASE)
# A column is a metric if its name ends with one of these words, or consists only of these and the words below.
_ENDS = re.compile(r"loss|rewards?|scores?|acc|accuracy|rate|norm|f1|mse|rmse|ppl")
_WORDS = re.compile(
    r"train|eval|val|test|mean|std|min|max|median|learning|lr|kl|approx|entropy|grad|gradient|clip|clipped|ratio|num|"
    r"tokens?|total|completions?|response|prompt|lengths?|size|batch|samples|per|seconds?|hours|flops|memory|gpu|count|"
    r"id|values?|metric|objective|policy|actor|critic|advantages?|importance|weight|decay|temperature|perplexity"
)


def matches(file: File, into: Collected) -> bool:
    """Return whether the header has compute or a step, and columns of runs, and is not that of a table of points."""
    table = _table(file, into.request)
    if table is None or len(table.names) < 2 or not table.count or table.torn or into.request.y not in (None, ALL):
        return False
    runs = run_columns(file, table, into.request)
    if into.request.y == ALL:
        return bool(runs)
    return len(runs) > 1 and not any(map(_is_metric, runs)) and _on_one_scale(table, runs)


def _table(file: File, request: Request) -> Table | None:
    """Read the table, with numbered rows for `--x order`; None for an empty file."""
    table = read_table(file, request)
    return None if table is None else with_order(table, request, ())


def run_columns(file: File, table: Table, request: Request) -> list[str]:
    """Return the columns that can be runs: most of their filled cells are numbers. A table of points has none."""
    if any(table.named(name) for name in (*_POINT_COLUMNS, request.by or "recipe")):
        return []
    compute = _compute(file, table, request)
    if compute is None:
        return []
    no_runs = {name.casefold() for name in (compute, *STEP_NAMES, *counters(table.names))}
    names = [
        name
        for name in table.names
        if name.casefold() not in no_runs and not is_index(name) and not _IGNORED_COLUMNS.fullmatch(name.strip())
    ]
    return [name for name in dict.fromkeys(names) if _has_numbers(table.column(name))]


def wide_hint(file: File, table: Table, request: Request) -> str:
    """Return a hint for an error message on how to declare the columns as runs; "" if they cannot be runs."""
    if request.y is not None or len(table.names) < 2 or not table.count:
        return ""
    if len(run_columns(file, table, request)) > 1:
        return "; if every column is a run, give --y all"
    if request.x is None and len(table.names) > 2 and _compute(file, table, request) is None:
        x = next((name for name in table.names if name), None)
        if x is not None and len(run_columns(file, table, replace(request, x=x))) > 1:
            return "; if the others are runs, --x alone names the column of compute"
    return ""


def _compute(file: File, table: Table, request: Request) -> str | None:
    """Return the column of compute: the requested one, or else `compute`, a counter or a step; None without one."""
    column = column_named(file, table, request.x or "compute", "--x", exact=request.x is not None)
    return column if column is not None or request.x is not None else counter_named(file, table)


def _has_numbers(cells: pandas.Series[Any]) -> bool:
    return 2 * int(np.isfinite(numbers(cells)).sum()) > len(cells) - sum(map(is_blank, cells.tolist()))


def _is_metric(name: str) -> bool:
    """Return whether a column's name is that of a metric, or has no letters."""
    words = re.findall(r"[a-z]+\d*", name.casefold())
    if not words or _ENDS.fullmatch(words[-1]):
        return True
    return all(_WORDS.fullmatch(word) or _ENDS.fullmatch(word) for word in words)


def _on_one_scale(table: Table, names: Sequence[str]) -> bool:
    """Return whether the values of all columns are within [-1, 1], or those of no column are."""
    is_inside = {bool(np.nanmax(np.abs(numbers(table.column(name)))) <= 1) for name in names}
    return len(is_inside) == 1


def _no_metrics(name: str) -> Series:
    """Return an empty series, for a log of which only name and labels are used."""
    return Series(np.empty(0), np.empty(0))


def read(file: File, into: Collected) -> None:
    """Add every column as a run.

    Raises:
        UserError: a column is repeated, a cell is not a number, or compute is negative.
    """
    request = into.request
    table = _table(file, request)
    x = None if table is None else _compute(file, table, request)
    if table is None or x is None:
        raise UserError(f"{file.path}: no column of compute; choose one with --x")
    runs = run_columns(file, table, request)
    check_columns(file, table, [x, *runs])
    compute, no_compute = strict_numbers(file, table, x, "another with --x")
    refuse_negative(file, table, x, compute)
    steps = whole_steps(table)
    axis = request.x or x.casefold()
    note = None if request.x is not None else order_warning(x)
    blank_cells = points_read = 0
    seeds_named = False
    for run in runs:
        reward, no_reward = strict_numbers(file, table, run, "it values, or leave it out")
        rows = np.flatnonzero(~(no_compute | no_reward))
        blank_cells += int((no_reward & ~no_compute).sum())
        if not len(rows):
            into.study.warnings.append(
                f"{file.path}: column {short(run)} left out: it has no reward in a row with compute"
            )
            continue
        labels = labels_in(run)
        name = f"{into.run_name(file)}/{run}" if is_bare_seed(run) else run
        log = Log(name=name, names=(), rows=table.count, series=_no_metrics, labels=tuple(labels), label=labels.get)
        recipe, factors = recipe_of(log, str(file.path), into)
        recipe, named_seed = into.split_seed(recipe)
        seed = labels.get("seed") or named_seed
        points = into.points(recipe, factors, axis, "reward", str(file.path), labels.get("baseline"))
        points.own_seeds |= seed is not None
        points.named_after_run |= request.by is None and "recipe" not in labels
        seeds_named = seeds_named or seed is not None
        if note is not None and note not in points.warnings:
            points.warnings.append(note)
        label = into.run_label(points, seed)
        known = make_labels(factors, recipe=recipe, seed=seed, baseline=labels.get("baseline"))
        run_steps = None if steps is None or np.isnan(steps[rows]).any() else steps[rows]
        into.add(
            points,
            label,
            ForeignRun(str(file.path), run, known, axis, "reward", compute[rows], reward[rows], run_steps),
        )
        points_read += len(rows)
    if not points_read:
        raise UserError(f"{file.path}: no row has both compute and a reward; give another table")
    if no_compute.any():
        into.study.warnings.append(f"{file.path}: skipped {counted(int(no_compute.sum()), 'row')} without compute")
    left_out = [name for name in table.names if name not in (x, *runs)]
    parts = [f"{counted(table.count, 'row')}: {counted(points_read, 'point')}", *table.notes]
    parts += [f"cells without a reward: {blank_cells}"] if blank_cells else []
    parts += [f"columns left out: {listed(left_out)}"] if left_out else []
    rule = "given by --x" if request.x else "default" if x.casefold() == "compute" else "there is no column compute"
    line = (
        f"{file.path}: {NAME}; compute <- {x} ({rule}); reward <- the cells of {len(runs)} columns "
        f"({listed(runs)}); recipe <- {f'{request.by} (given by --by)' if request.by else 'the name of the column'}; "
        f"seed <- {'seed' if seeds_named else 'the number of the run'}; sd <- none; {', '.join(parts)}"
    )
    into.study.note(short(line, 2000), shown=True)
