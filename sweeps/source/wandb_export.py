"""Exports of W&B: the CSV of a chart, and the history of runs as CSV, JSON, JSONL or Parquet.

A chart's CSV has its x axis first, then `<run> - <metric>` with `__MIN` and `__MAX` for each run. A history has W&B's
`_step` (or a framework's own step) and one column per metric, most cells empty. Logs of prime-rl, open-instruct and
other programs that report to W&B are available as files in this form. A framework's own JSONL with the same rows
(prime-rl's file monitor) is read too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from sweeps.errors import UserError
from sweeps.source.cells import numbers
from sweeps.source.collected import Collected
from sweeps.source.frame import Table, read_table
from sweeps.source.log import Column, Log, Series, add_logs, logs_of_rows, series_of
from sweeps.source.run_names import hidden_seed, labels_in, pairs_in
from sweeps.source.table import is_table
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import ORDER, step_column, vocabulary_of

CHART, HISTORY = "W&B chart export", "W&B history export"
NAME = HISTORY
_EXTREME = ("__MIN", "__MAX")


def matches(file: File, into: Collected) -> bool:
    """Return whether the rows are a W&B chart, or a history with a step and names of W&B or a framework."""
    table = read_table(file, into.asked)
    if table is None or is_table(table, into):
        return False
    if _is_chart(table):
        return True
    return ("_step" in table.names or vocabulary_of(table.names) is not None) and step_column(table.names) is not None


def _is_chart(table: Table) -> bool:
    pairs = [name.removesuffix("__MIN") for name in table.names if name.endswith("__MIN")]
    if any(" - " in name and name in table.names for name in pairs):
        return True
    # A table without ranges (a chart of points, or made by hand) is a chart if all runs have the same metric.
    parts = [name.rpartition(" - ") for name in table.names[1:]]
    metrics = {metric for _, _, metric in parts}
    return len(parts) > 1 and len(metrics) == 1 and all(run for run, _, _ in parts) and hidden_seed(parts[0][2]) is None


def read(file: File, into: Collected) -> None:
    """Add the runs of an export.

    Raises:
        UserError: no rows, or no metric that can be the reward.
    """
    table = read_table(file, into.asked)
    if table is None or not table.count:
        raise UserError(f"{file.path}: a header and no rows; give an export with points")
    twice = [name for name, count in Counter(table.names).items() if count > 1]
    if twice:
        raise UserError(f"{file.path}: column {listed(twice)} occurs more than once; rename one")
    if _is_chart(table):
        _read_chart(file, table, into)
        return
    step = step_column(table.names) or ""
    labels = [name for name in (into.asked.by, *into.asked.factors) if name is not None]
    for label in labels:
        if label not in table.names and label not in pairs_in(file.run_name):
            raise UserError(f"{file.path}: no column {short(label)}; found {listed(table.names)}")
    logs, stepless, run_column = logs_of_rows(table, file.run_name, step, labels)
    notes = [f"step <- {step}"]
    if stepless:
        notes.append(f"rows without {step}: {stepless}")
    if table.torn:
        notes.append("a torn last line was left out")
    framework = vocabulary_of(table.names)
    reader = HISTORY if "_step" in table.names else f"{framework.project if framework else 'a'} log"
    add_logs(logs, reader, str(file.path), into, framework, run_column or "the file's name", step, notes)


def _read_chart(file: File, table: Table, into: Collected) -> None:
    """Add the runs of a chart, which share one x axis; a cell with a range averages several steps."""
    x = table.names[0]
    if into.asked.x not in (None, x, ORDER):
        raise UserError(
            f"{file.path}: the chart was exported along {short(x)}, without {short(str(into.asked.x))}; export it "
            "again along that axis, or leave out --x"
        )
    steps = numbers(table.column(x))
    series = series_of(table, steps)
    runs: dict[str, list[str]] = {}
    for name in table.names[1:]:
        run, dash, metric = name.rpartition(" - ")
        if dash and not metric.endswith(_EXTREME) and not metric.startswith("_"):
            runs.setdefault(run, []).append(metric)
    logs = []
    for run, metrics in runs.items():
        labels = labels_in(run)
        logs.append(Log(run, [x, *metrics], table.count, _of_run(series, run, x), tuple(labels), labels.get))
    metrics = list(dict.fromkeys(metric for names in runs.values() for metric in names))
    notes = [f"rows without {short(x)}: {int(np.isnan(steps).sum())}"] if np.isnan(steps).any() else []
    averaged = sum(any(_is_average(table, f"{run} - {metric}") for metric in names) for run, names in runs.items())
    if averaged:
        notes.append(f"runs with points averaged over steps (their __MIN and __MAX differ): {averaged}")
    only = Column(metrics[0], "the chart's metric") if len(metrics) == 1 and into.asked.y is None else None
    axis = None if into.asked.x == ORDER else Column(x, "the chart's x axis")
    add_logs(logs, CHART, str(file.path), into, None, "the run's name", x, notes, reward=only, compute=axis)


def _of_run(series: Callable[[str], Series], run: str, x: str) -> Callable[[str], Series]:
    """Return a function that reads one run's metrics in a chart, by their names without the run's."""
    return lambda name: series(name if name == x else f"{run} - {name}")


def _is_average(table: Table, name: str) -> bool:
    low, high = f"{name}__MIN", f"{name}__MAX"
    if low not in table.names or high not in table.names:
        return False
    return bool(np.nanmax(np.append(numbers(table.column(high)) - numbers(table.column(low)), 0.0)) > 0)
