"""Reader of tables with one column per run: a column of compute or steps, and each run's rewards.

A log's table looks similar, with one column per metric. So columns are read as runs only if none has a metric's name
and all have the same scale; `--y all` declares them as runs under any name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sweeps.errors import UserError
from sweeps.source.cells import is_blank, numbers
from sweeps.source.collected import ALL, Asked, Collected, ForeignRun, described
from sweeps.source.columns import check_columns, column_named, counter_named, is_index, not_negative, strict_numbers
from sweeps.source.frame import Table, read_table, with_order
from sweeps.source.log import Log, Series, recipe_of
from sweeps.source.run_names import is_bare_seed, labels_in
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import RUN_COLUMNS, STEP_NAMES, counters, order_warning
from sweeps.terminal import counted

if TYPE_CHECKING:
    import pandas

NAME = "table with a column a run"

# Columns that mark a table of points, even with other columns.
_POINT_COLUMNS = ("reward", "recipe", "seed", "sd", "baseline", *RUN_COLUMNS)
# Columns that are neither runs nor metrics, besides row numbers: clocks, epochs.
_IGNORED_COLUMNS = re.compile(r"_?(wall|relative)?[ _]?(time(stamp)?|runtime)( \(process\))?|date|epoch", re.IGNORECASE)
# A metric's name ends in one of these words, or consists only of these and the words below.
_ENDS = re.compile(r"loss|rewards?|scores?|acc|accuracy|rate|norm|f1|mse|rmse|ppl")
_WORDS = re.compile(
    r"train|eval|val|test|mean|std|min|max|median|learning|lr|kl|approx|entropy|grad|gradient|clip|clipped|ratio|num|"
    r"tokens?|total|completions?|response|prompt|lengths?|size|batch|samples|per|seconds?|hours|flops|memory|gpu|count|"
    r"id|values?|metric|objective|policy|actor|critic|advantages?|importance|weight|decay|temperature|perplexity"
)


def matches(file: File, into: Collected) -> bool:
    """Return whether the header has compute or a step and columns of runs, and is not a table of points."""
    table = _table(file, into.asked)
    if table is None or len(table.names) < 2 or not table.count or table.torn or into.asked.y not in (None, ALL):
        return False
    runs = run_columns(file, table, into.asked)
    if into.asked.y == ALL:
        return bool(runs)
    return len(runs) > 1 and not any(map(_is_metric, runs)) and _on_one_scale(table, runs)


def _table(file: File, asked: Asked) -> Table | None:
    table = read_table(file, asked)
    return None if table is None else with_order(table, asked, ())


def run_columns(file: File, table: Table, asked: Asked) -> list[str]:
    """Return the columns that can be runs (most filled cells are numbers); empty for a table of points."""
    if any(table.named(name) for name in (*_POINT_COLUMNS, asked.by or "recipe")):
        return []
    compute = _compute(file, table, asked)
    if compute is None:
        return []
    no_runs = {name.casefold() for name in (compute, *STEP_NAMES, *counters(table.names))}
    names = [
        name
        for name in table.names
        if name.casefold() not in no_runs and not is_index(name) and not _IGNORED_COLUMNS.fullmatch(name.strip())
    ]
    return [name for name in dict.fromkeys(names) if _has_numbers(table.column(name))]


def how_wide(file: File, table: Table, asked: Asked) -> str:
    """Return a hint for an error message, how to declare the columns as runs; "" if they cannot be runs."""
    if asked.y is not None or len(table.names) < 2 or not table.count:
        return ""
    if len(run_columns(file, table, asked)) > 1:
        return "; if every column is a run, give --y all"
    if asked.x is None and len(table.names) > 2 and _compute(file, table, asked) is None:
        x = next((name for name in table.names if name), None)
        if x is not None and len(run_columns(file, table, replace(asked, x=x))) > 1:
            return "; if the others are runs, --x alone names the column of compute"
    return ""


def _compute(file: File, table: Table, asked: Asked) -> str | None:
    """Return the compute column: the requested one, else `compute`, else a counter or a step, else None."""
    column = column_named(file, table, asked.x or "compute", "--x", asked=asked.x is not None)
    return column if column is not None or asked.x is not None else counter_named(file, table)


def _has_numbers(cells: pandas.Series[Any]) -> bool:
    """Return whether most of the filled cells are finite numbers."""
    return 2 * int(np.isfinite(numbers(cells)).sum()) > len(cells) - sum(map(is_blank, cells.tolist()))


def _is_metric(name: str) -> bool:
    words = re.findall(r"[a-z]+\d*", name.casefold())
    if not words or _ENDS.fullmatch(words[-1]):
        return True
    return all(_WORDS.fullmatch(word) or _ENDS.fullmatch(word) for word in words)


def _on_one_scale(table: Table, names: Sequence[str]) -> bool:
    """Return whether all columns stay within [-1, 1], or all of them leave it."""
    inside = {bool(np.nanmax(np.abs(numbers(table.column(name)))) <= 1) for name in names}
    return len(inside) == 1


def _no_metrics(name: str) -> Series:
    """Return an empty series, for a log of which only name and labels are used."""
    return Series(np.empty(0), np.empty(0))


def read(file: File, into: Collected) -> None:
    """Add every column as a run.

    Raises:
        UserError: a repeated column, a cell that is not a number, or negative compute.
    """
    asked = into.asked
    table = _table(file, asked)
    x = None if table is None else _compute(file, table, asked)
    if table is None or x is None:
        raise UserError(f"{file.path}: no column of compute; choose one with --x")
    runs = run_columns(file, table, asked)
    check_columns(file, table, [x, *runs])
    compute, no_compute = strict_numbers(file, table, x, "another with --x")
    not_negative(file, table, x, compute)
    axis = asked.x or x.casefold()
    note = None if asked.x is not None else order_warning(x)
    blank = points_read = 0
    seeds_named = False
    for run in runs:
        reward, no_reward = strict_numbers(file, table, run, "it values, or leave it out")
        at = np.flatnonzero(~(no_compute | no_reward))
        blank += int((no_reward & ~no_compute).sum())
        if not len(at):
            into.study.warnings.append(
                f"{file.path}: column {short(run)} has no reward where there is compute; left out"
            )
            continue
        labels = labels_in(run)
        name = f"{file.run_name}/{run}" if is_bare_seed(run) else run
        log = Log(name=name, names=(), rows=table.count, series=_no_metrics, labels=tuple(labels), label=labels.get)
        recipe, factors = recipe_of(log, str(file.path), into)
        recipe, hidden = asked.split_seed(recipe)
        seed = labels.get("seed") or hidden
        points = into.points(recipe, factors, axis, "reward", str(file.path), labels.get("baseline"))
        points.own_seeds |= seed is not None
        points.names_run |= asked.by is None and "recipe" not in labels
        seeds_named = seeds_named or seed is not None
        if note is not None and note not in points.warnings:
            points.warnings.append(note)
        label = into.run_label(points, seed)
        known = described(factors, recipe=recipe, seed=seed, baseline=labels.get("baseline"))
        into.add(points, label, ForeignRun(str(file.path), run, known, axis, "reward", compute[at], reward[at]))
        points_read += len(at)
    if not points_read:
        raise UserError(f"{file.path}: no row has both compute and a reward; give another table")
    if no_compute.any():
        into.study.warnings.append(f"{file.path}: {no_compute.sum()} rows without compute were skipped")
    left_out = [name for name in table.names if name not in (x, *runs)]
    parts = [f"{counted(table.count, 'row')}: {counted(points_read, 'point')}", *table.notes]
    parts += [f"cells without a reward: {blank}"] if blank else []
    parts += [f"columns left out: {listed(left_out)}"] if left_out else []
    how = "given by --x" if asked.x else "default" if x.casefold() == "compute" else "for want of a column compute"
    line = (
        f"{file.path}: {NAME}; compute <- {x} ({how}); reward <- the cells of {len(runs)} columns "
        f"({listed(runs)}); recipe <- {f'{asked.by} (given by --by)' if asked.by else 'the name of the column'}; "
        f"seed <- {'seed' if seeds_named else 'a number a run'}; sd <- none; {', '.join(parts)}"
    )
    into.study.note(short(line, 2000), shown=True)
