"""Read exports of W&B: the CSV of a chart, and the history of runs as CSV, JSON, JSONL or Parquet.

A chart's CSV has a column of the x axis, usually the first. For each run it has a column `<run> - <metric>`, and two
more whose names end with `__MIN` and `__MAX`. A history has W&B's `_step` (or a framework's step) and one column per
metric, in which most cells are empty. Logs of prime-rl, open-instruct and other programs that report to W&B can be
exported in this form. A framework's JSONL file with the same rows (prime-rl's file monitor) is read too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sweeps.errors import UserError
from sweeps.source.cells import numbers
from sweeps.source.collected import ALL, Collected
from sweeps.source.columns import is_index, refuse_blank_labels
from sweeps.source.frame import Table, read_table
from sweeps.source.log import Column, Log, Series, add_logs, logs_of_rows, series_of
from sweeps.source.run_names import labels_in, pairs_in, seed_in_name
from sweeps.source.table import is_table
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import ORDER, RUN_COLUMNS, step_column, vocabulary_of

CHART, HISTORY = "W&B chart export", "W&B history export"
NAME = HISTORY
_RANGE_SUFFIXES = ("__MIN", "__MAX")
_MEANS = (
    "points whose __MIN and __MAX differ are means over steps or over the runs of a group; ungroup the chart to keep "
    "the seeds"
)


def matches(file: File, into: Collected) -> bool:
    """Return whether the rows are a W&B chart, or a history with steps and names of W&B or a framework."""
    table = read_table(file, into.request)
    if table is None or is_table(table, into):
        return False
    if _chart_of(table, _requested_metric(into)) is not None:
        return True
    return ("_step" in table.names or vocabulary_of(table.names) is not None) and step_column(table.names) is not None


@dataclass(frozen=True)
class _Chart:
    """Columns of a chart.

    Attributes:
        columns: columns that belong to a run.
        others: other columns.
        runs: metrics of each run, by the run's name.
    """

    columns: Collection[str]
    others: Sequence[str]
    runs: Mapping[str, Sequence[str]]

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(metric for metrics in self.runs.values() for metric in metrics))


def _requested_metric(into: Collected) -> str | None:
    """Return the metric that the user requested; None if the user requested none, or all."""
    return None if into.request.y == ALL else into.request.y


def _chart_of(table: Table, requested: str | None) -> _Chart | None:
    """Assign the columns of a chart to runs; None if the table is not a chart.

    A column `<run> - <metric>` belongs to a run if another column has the same run or metric, or if the user asked for
    this metric. So an x axis with a dash in its name is not mistaken for a run.
    """
    parts = {name: part for name in table.names if (part := _run_and_metric(name, requested)) is not None}
    per_run, per_metric = (Counter(part[side] for part in parts.values()) for side in (0, 1))
    columns = {
        name: (run, metric)
        for name, (run, metric) in parts.items()
        if per_run[run] > 1 or per_metric[metric] > 1 or metric == requested
    }
    runs: dict[str, list[str]] = {}
    for name, (run, metric) in columns.items():
        if not name.endswith(_RANGE_SUFFIXES) and not metric.startswith("_"):
            runs.setdefault(run, []).append(metric)
    chart = _Chart(columns, [name for name in table.names if name not in columns], runs)
    has_ranges = any(f"{name}__MIN" in columns for name in columns)
    is_requested = requested not in table.names and requested in chart.metrics
    return chart if has_ranges or is_requested or _is_bare_chart(chart) else None


def _run_and_metric(name: str, requested: str | None) -> tuple[str, str] | None:
    """Split a column's name `<run> - <metric>`, without `__MIN` or `__MAX`; None if it has another form.

    `requested` is the metric that the user asked for, which may contain a dash; None for none.
    """
    for extreme in _RANGE_SUFFIXES:
        name = name.removesuffix(extreme)
    if requested is not None and name.endswith(f" - {requested}"):
        return name.removesuffix(f" - {requested}"), requested
    run, _, metric = name.rpartition(" - ")
    return (run, metric) if run else None


def _is_bare_chart(chart: _Chart) -> bool:
    """Return whether columns without `__MIN` and `__MAX` are a chart (of points, or made by hand).

    They are a chart if all runs have the same metric, or if all metrics have a slash: a text without a slash may be
    part of a run's name.
    """
    axes = [name for name in chart.others if not is_index(name)]
    if len(axes) > 1 or len(chart.runs) < 2:
        return False
    metrics = chart.metrics
    return seed_in_name(metrics[0]) is None if len(metrics) == 1 else all("/" in metric for metric in metrics)


def read(file: File, into: Collected) -> None:
    """Add the runs of an export.

    Raises:
        UserError: no rows, or no metric that can be the reward.
    """
    table = read_table(file, into.request)
    if table is None or not table.count:
        raise UserError(f"{file.path}: a header and no rows; give an export with points")
    repeated = [name for name, count in Counter(table.names).items() if count > 1]
    if repeated:
        raise UserError(f"{file.path}: column {listed(repeated)} occurs more than once; rename one")
    chart = _chart_of(table, _requested_metric(into))
    if chart is not None:
        _read_chart(file, table, chart, into)
        return
    step = step_column(table.names) or ""
    labels = [name for name in (into.request.by, *into.request.factors) if name is not None]
    for label in labels:
        if label not in table.names and label not in pairs_in(file.run_name):
            raise UserError(f"{file.path}: no column {short(label)}; found {listed(table.names)}")
    _check_labels(file, table, step)
    logs, stepless, run_column = logs_of_rows(table, into.run_name(file), step, labels)
    notes = [f"step <- {step}"]
    if stepless:
        notes.append(f"rows without {step}: {stepless}")
    if table.torn:
        notes.append("an incomplete last line was left out")
    framework = vocabulary_of(table.names)
    reader = HISTORY if "_step" in table.names else f"{framework.project if framework else 'a'} log"
    add_logs(logs, reader, str(file.path), into, framework, run_column or "the file's name", step, notes)


def _check_labels(file: File, table: Table, step: str) -> None:
    """Refuse rows without a run's name, and runs of which only some rows have a recipe or a seed.

    If all rows of a run lack a recipe or seed, it is unknown. If only some rows lack it, these would become a second
    run.

    Raises:
        UserError: a row that has a step lacks such a label.
    """
    stepless = np.isnan(numbers(table.column(step)))
    run_column = next((name for name in RUN_COLUMNS if name in table.names), None)
    runs = [""] * table.count if run_column is None else table.label(run_column)
    if run_column is not None:
        refuse_blank_labels(file, table, run_column, runs, stepless)
    for name in ("recipe", "seed"):
        if name in table.names:
            labels = table.label(name)
            labelled = {
                run for run, label, skip in zip(runs, labels, stepless.tolist(), strict=True) if label and not skip
            }
            unlabelled = np.array([run not in labelled for run in runs], dtype=bool)
            refuse_blank_labels(file, table, name, labels, stepless | unlabelled)


def _read_chart(file: File, table: Table, chart: _Chart, into: Collected) -> None:
    """Add the runs of a chart, which share one x axis. A cell whose `__MIN` and `__MAX` differ is a mean.

    Raises:
        UserError: the chart has no x axis, or not the axis that the user asked for.
    """
    x = _axis(file, chart, table.names[0], into.request.x)
    steps = numbers(table.column(x)) if x is not None else np.arange(1, table.count + 1, dtype=np.float64)
    series = series_of(table, steps)
    metrics = chart.metrics
    single_metric = Column(metrics[0], "the chart's metric") if len(metrics) == 1 and into.request.y is None else None
    metric_name = single_metric.name if single_metric is not None else into.request.y
    axes = [] if x is None else [x]
    logs = []
    averaged_runs = 0
    for run, logged in chart.runs.items():
        candidates = [metric for metric in logged if metric_name in (None, ALL, metric)]
        is_averaged = any(_is_average(table, f"{run} - {metric}") for metric in candidates)
        averaged_runs += is_averaged
        labels = labels_in(run)
        log = Log(run, [*axes, *logged], table.count, _run_series(series, run, x), tuple(labels), labels.get)
        logs.append(replace(log, warnings=[_MEANS]) if is_averaged else log)
    notes = [f"rows without {short(str(x))}: {int(np.isnan(steps).sum())}"] if np.isnan(steps).any() else []
    if averaged_runs:
        notes.append(f"runs whose points are means (their __MIN and __MAX differ): {averaged_runs}")
    compute = None if x is None or into.request.x == ORDER else Column(x, "the chart's x axis")
    add_logs(
        logs,
        CHART,
        str(file.path),
        into,
        None,
        "the run's name",
        x or ORDER,
        notes,
        reward=single_metric,
        compute=compute,
    )


def _axis(file: File, chart: _Chart, first: str, requested: str | None) -> str | None:
    """Return the column of a chart's x axis; None if there is none and the user asked to number the rows.

    Args:
        file: the file, for errors.
        chart: columns of the chart.
        first: name of the first column.
        requested: the axis that the user asked for; None for none.

    Raises:
        UserError: the chart has no x axis, or not the axis that the user asked for.
    """
    if requested in chart.others:
        return requested
    x = next((name for name in chart.others if not is_index(name)), None)
    if x is None and requested != ORDER:
        problem = "is a run" if first in chart.columns else "numbers the rows"
        raise UserError(
            f"{file.path}: no column of steps: the first column, {short(first)!r}, {problem}; export the chart with "
            f"its Step column, or give --x {ORDER}"
        )
    if requested not in (None, ORDER):
        raise UserError(
            f"{file.path}: the chart was exported along {short(str(x))}, without {short(str(requested))}; export it "
            "again along that axis, or leave out --x"
        )
    return x


def _run_series(series: Callable[[str], Series], run: str, x: str | None) -> Callable[[str], Series]:
    """Return a function that reads one run's metric from a chart, by the metric's name."""
    return lambda name: series(name if name == x else f"{run} - {name}")


def _is_average(table: Table, name: str) -> bool:
    low, high = f"{name}__MIN", f"{name}__MAX"
    if low not in table.names or high not in table.names:
        return False
    return bool(np.nanmax(np.append(numbers(table.column(high)) - numbers(table.column(low)), 0.0)) > 0)
