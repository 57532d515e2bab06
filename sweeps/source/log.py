"""Read curves from the log of a run by any tracker: metrics by step, most of them missing at most steps.

Evaluations are rarer than training steps and often logged separately. So reward and compute are read as two series and
joined by step. Two values at one step mean that the run was resumed: the later value is used, as in a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sweeps.curve import DEVICE_HOURS, VIRTUAL_HOURS, Array
from sweeps.errors import UserError
from sweeps.fit.schedule import at_peak_rate
from sweeps.run.journal import LABEL
from sweeps.source.cells import is_empty, numbers
from sweeps.source.collected import ALL, Collected, ForeignRun, make_labels
from sweeps.source.frame import Table, group_rows, table_of
from sweeps.source.run_names import pairs_in
from sweeps.source.text import listed, short
from sweeps.source.vocabulary import (
    ORDER,
    RATE,
    RUN_COLUMNS,
    SCALERL,
    STEP_NAMES,
    SUM,
    Vocabulary,
    first_match,
    vocabulary_of,
)
from sweeps.terminal import counted

# Default axes of logs by this project's trainer, in order of preference.
OUR_AXES = (VIRTUAL_HOURS, DEVICE_HOURS)


@dataclass(frozen=True)
class Series:
    """One metric of one run.

    Attributes:
        steps, values: the logged values in order, and the step of each, (n,).
        absent: number of rows without the metric.
        bad: number of rows in which the metric is not a finite number.
        first_bad: description of the first of these; "" if there is none.
    """

    steps: Array
    values: Array
    absent: int = 0
    bad: int = 0
    first_bad: str = ""

    def latest(self) -> tuple[Array, Array, int]:
        """Return the sorted distinct steps, the last value logged at each, and the number of values replaced."""
        steps, first = np.unique(self.steps[::-1], return_index=True)
        return steps, self.values[::-1][first], len(self.steps) - len(steps)


@dataclass(frozen=True)
class Log:
    """Log of one run.

    Attributes:
        name: name of the run, which is the recipe if there is no label `recipe`.
        names: names of the metrics.
        rows: number of rows; 0 if the source has no rows.
        series: function that reads a metric.
        labels: names of the run's labels (tags, configuration, constant columns). Those named `recipe`, `seed` and
            `baseline` are used by default.
        label: function that returns a label's value; None if the run lacks the label.
        warnings: remarks on damage.
        key, state: see `ForeignRun`.
    """

    name: str
    names: Sequence[str]
    rows: int
    series: Callable[[str], Series]
    labels: Sequence[str] = ()
    label: Callable[[str], str | None] = field(default=lambda name: None)
    warnings: Sequence[str] = ()
    key: str = ""
    state: str = ""


@dataclass(frozen=True)
class Column:
    """The metric chosen for reward or compute.

    Attributes:
        rule: why it was chosen, for the mapping.
        set: evaluation set of a reward if there is one curve per set, else "".
        summed: whether compute is the running sum of the metric.
        is_order: whether compute is not a metric, but the number of each value in the order of logging.
    """

    name: str
    rule: str
    set: str = ""
    summed: bool = False
    is_order: bool = False


def series_of(table: Table, steps: Array) -> Callable[[str], Series]:
    """Return a function that reads a metric from the rows of one run. `steps` has the step of each row, (n,)."""

    def series(name: str) -> Series:
        cells = table.column(name)
        values = numbers(cells)
        missing = cells[np.isnan(values)]
        bad = missing[~missing.map(is_empty).to_numpy(bool)]
        first_bad = f"row {bad.index[0] + 1}: {short(str(bad.iloc[0]), 40)!r}" if len(bad) else ""
        is_usable = np.isfinite(values) & np.isfinite(steps)
        return Series(steps[is_usable], values[is_usable], len(missing) - len(bad), len(bad), first_bad)

    return series


def series_of_points(points: Sequence[tuple[float, float]], absent: int = 0) -> Series:
    """Make a series from (step, value) pairs in order of logging. Values that are not finite are only counted."""
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    is_finite = np.isfinite(values)
    first_bad = f"step {steps[~is_finite][0]:g}: {values[~is_finite][0]}" if not is_finite.all() else ""
    return Series(steps[is_finite], values[is_finite], absent, int((~is_finite).sum()), first_bad)


def series_of_records(records: Sequence[tuple[float, dict[str, Any]]]) -> Callable[[str], Series]:
    """Return a function that reads a metric from (step, metrics) records."""
    return series_of(table_of([record for _, record in records]), np.array([step for step, _ in records], dtype=float))


def logs_of_rows(table: Table, name: str, step: str, group_columns: Sequence[str]) -> tuple[list[Log], int, str | None]:
    """Split a table of log rows into runs, by run name, `recipe`, `seed` and the user's grouping columns.

    Returns:
        The logs, the number of rows without a step, and the column that names runs.
    """
    steps = numbers(table.column(step))
    stepless = int(np.isnan(steps).sum())
    run_column = next((c for c in RUN_COLUMNS if c in table.names), None)
    labels = dict.fromkeys([run_column, "recipe", *group_columns, "seed"])
    columns = [c for c in labels if c is not None and c in table.names]
    if not columns:
        return [Log(name=name, names=table.names, rows=table.count, series=series_of(table, steps))], stepless, None
    logs = []
    for key, rows in group_rows([table.label(part) for part in columns]).items():
        values = dict(zip(columns, key, strict=True))
        run = values[run_column] if run_column else name
        series = series_of(table.take(rows), steps[rows])
        logs.append(
            Log(name=run, names=table.names, rows=len(rows), series=series, labels=tuple(table.names), label=values.get)
        )
    return logs, stepless, run_column


def add_logs(
    logs: Sequence[Log],
    reader: str,
    where: str,
    into: Collected,
    vocabulary: Vocabulary | None = None,
    named: str = "the file's name",
    step: str = "step",
    notes: Iterable[str] = (),
    reward: Column | None = None,
    compute: Column | None = None,
) -> None:
    """Choose the metrics of reward and compute for the runs of one source, add their points, and note the choice.

    Args:
        logs: the runs.
        reader: name of the format, for the mapping.
        where: the source, for messages.
        into: the curves so far, and the user's request.
        vocabulary: the framework, if the format implies it; None to recognise it by the metrics' names.
        named: where the runs' names come from, for the mapping.
        step: the column that steps come from.
        notes: further remarks of the reader.
        reward, compute: columns that are already chosen; None to choose them here.

    Raises:
        UserError: a metric is missing or ambiguous, or no point results.
    """
    if into.takes(logs):
        return
    names = list(dict.fromkeys(name for log in logs for name in log.names))
    framework = vocabulary or vocabulary_of(names)
    rewards = [reward] if reward is not None else _rewards(names, framework, where, into)
    compute = compute or _compute(names, framework, step, where, into)
    warnings = []
    if compute.is_order:
        warnings.append(f"{compute.name} numbers the values in the order of logging, which is not compute")
    elif compute.name in STEP_NAMES or compute.rule.startswith("no counter"):
        warnings.append(f"{compute.name} counts steps, not compute: the compute of a step differs between recipes")
    if rewards[0].rule.startswith("training"):
        warnings.append(f"{rewards[0].name} is the reward during training, not that of a held-out evaluation")
    for chosen in rewards:
        _add_reward(
            reward=chosen,
            compute=compute,
            logs=logs,
            reader=reader,
            where=where,
            into=into,
            named=named,
            notes=list(notes),
            warnings=warnings,
        )


def _rewards(names: Sequence[str], vocabulary: Vocabulary | None, where: str, into: Collected) -> list[Column]:
    """Choose the metric of the reward: the requested one, else that of a framework.

    With `--metric all` there may be several.
    """
    metric = into.request.y
    if metric is not None and metric != ALL:
        if metric not in names:
            raise UserError(f"{where}: no metric {short(metric)}; found {listed(names)}; choose with --metric")
        return [Column(metric, "given by --metric")]
    if vocabulary is None:
        raise UserError(
            f"{where}: no name of a reward that a reader knows; found {listed(names)}; choose with --metric"
        )
    candidates = first_match(vocabulary.evaluations, names)
    rule = f"{vocabulary.project}'s name"
    if not candidates:
        candidates = first_match(vocabulary.training, names)
        rule = f"training reward, {vocabulary.project}'s name, no evaluation found"
    if not candidates:
        raise UserError(
            f"{where}: none of {vocabulary.project}'s names of a reward; found {listed(names)}; choose with --metric"
        )
    if len(candidates) > 1 and metric != ALL:
        raise UserError(
            f"{where}: {len(candidates)} rewards could be meant ({listed(candidates)}); choose one with --metric, "
            f"or --metric {ALL} for a curve each"
        )
    return [Column(name, rule, set=candidates[name] if metric == ALL else "") for name in candidates]


def _compute(names: Sequence[str], vocabulary: Vocabulary | None, step: str, where: str, into: Collected) -> Column:
    """Choose the metric of compute: the requested one, else a framework's counter, else the step."""
    per_step = {} if vocabulary is None else first_match([vocabulary.per_step], names)
    metric = into.request.x
    if metric == ORDER and metric not in names:
        return Column(ORDER, "given by --x: values numbered in the order of logging", is_order=True)
    if metric is not None and metric.startswith(SUM) and metric not in names:
        metric = metric.removeprefix(SUM)
        if metric not in names:
            raise UserError(f"{where}: no metric {short(metric)}; found {listed(names)}; choose with --x {SUM}METRIC")
        return Column(metric, f"given by --x {SUM}, running sum over the steps", summed=True)
    if metric is not None:
        if metric not in names and metric not in (step, *STEP_NAMES):
            raise UserError(f"{where}: no metric {short(metric)}; found {listed(names)}; choose with --x")
        rule = "given by --x, running sum" if metric in per_step else "given by --x"
        return Column(metric, rule, summed=metric in per_step)
    candidates = {} if vocabulary is None else first_match(vocabulary.compute, names)
    if (
        vocabulary is SCALERL
        and (default_axis := next((axis for axis in OUR_AXES if axis in candidates), None)) is not None
    ):
        return Column(default_axis, "our default: virtual device hours, else device hours")
    if len(candidates) > 1:
        raise UserError(
            f"{where}: {len(candidates)} compute axes could be meant ({listed(candidates)}); choose one with --x"
        )
    for name in candidates:
        project = f"{vocabulary.project}'s name" if vocabulary else ""
        rule = f"{project}, running sum over the steps" if name in per_step else project
        return Column(name, rule, summed=name in per_step)
    return Column(step, "no counter of tokens or compute was found")


def _add_reward(
    reward: Column,
    compute: Column,
    logs: Sequence[Log],
    reader: str,
    where: str,
    into: Collected,
    named: str,
    notes: list[str],
    warnings: Sequence[str],
) -> None:
    counts = {"points": 0, "absent": 0, "superseded": 0, "bad": 0, "start": 0, "between": 0, "rows": 0}
    failed = with_sd = run_count = decays = 0
    empty: list[str] = []  # runs without a value
    seeds_named = recipes_named = False
    for log in logs:
        counts["rows"] += log.rows
        if reward.name not in log.names:
            empty.append(log.name)
            counts["absent"] += log.rows
            continue
        series = log.series(reward.name)
        steps, values, superseded = number_values(series) if compute.is_order else series.latest()
        counts["absent"] += series.absent
        counts["bad"] += series.bad
        counts["superseded"] += superseded
        if not len(steps):
            empty.append(log.name)
            continue
        try:
            _check_steps(series, reward.name, steps, where)
            spent, start, between, messages = _compute_at(log, compute, steps, where)
        except UserError as error:
            if len(logs) == 1:
                raise
            # A run without compute must not hide the other runs.
            into.study.warnings.append(f"run {short(log.name, 60)} is left out: {error}")
            failed += 1
            continue
        recipe, factors = recipe_of(log, where, into)
        recipe, seed_in_name = into.split_seed(recipe)
        if reward.set:
            factors = {**factors, "set": reward.set}
        points = into.points(recipe, factors, compute.name, reward.name, where, log.label("baseline"))
        prefix = f"{short(log.name, 60)}: "
        counts["start"] += start
        counts["between"] += between
        messages = [*messages, *log.warnings]
        if superseded:
            messages.append(
                f"{counted(superseded, 'value')} of {reward.name} replaced by a later value at the same step"
            )
        if series.bad:
            messages.append(
                f"{counted(series.bad, 'value')} of {reward.name} left out: not finite numbers "
                f"(first {series.first_bad})"
            )
        points.warnings += [note for note in warnings if note not in points.warnings] + [
            prefix + note for note in messages
        ]
        seed = log.label("seed") or seed_in_name
        seeds_named = seeds_named or seed is not None
        points.own_seeds |= seed is not None
        named_recipe = own_recipe(log)
        points.named_after_run |= len(logs) > 1 and into.request.by is None and named_recipe is None
        recipes_named = recipes_named or named_recipe is not None
        sd = _standard_error(log, reward.name, steps)
        with_sd += sd is not None
        label = into.run_label(points, seed)
        at_peak = _at_peak(log, compute, steps, spent, where)
        decays += at_peak is not None
        labels = make_labels(factors, recipe=recipe, seed=seed, baseline=log.label("baseline"))
        run = ForeignRun(
            where, log.name, labels, compute.name, reward.name, spent, values, steps, sd, log.key, log.state
        )
        into.add(points, label, run, at_peak)
        counts["points"] += len(steps)
        run_count += 1
    if not counts["points"]:
        bad = f", {counts['bad']} are not finite numbers" if counts["bad"] else ""
        reasons = f" ({into.study.warnings[-1]})" if failed and into.study.warnings else ""
        raise UserError(
            f"{where}: no usable value of {short(reward.name)} in {counts['rows']} rows{bad}{reasons}; "
            "choose another with --metric"
        )
    if empty:
        into.study.warnings.append(
            f"{where}: {len(empty)} of {counted(len(logs), 'run')} left out for lack of a value of "
            f"{short(reward.name)}: {listed(map(short, empty))}"
        )
    amounts = [f"{run_count} of {len(logs)} runs"] if len(logs) > 1 else []
    if counts["rows"]:
        amounts.append(counted(counts["rows"], "row"))
    of_all = counted(counts["points"], "point")
    parts = [f"{', '.join(amounts)}: {of_all}" if amounts else of_all]
    for number, description in (
        (counts["absent"], f"rows without {reward.name}"),
        (counts["bad"], "values not finite"),
        (counts["superseded"], "values replaced by a later value at the same step"),
        (counts["start"], "points before the first step, at compute 0"),
        (counts["between"], "points whose compute is interpolated between logged steps"),
        (decays, "runs whose compute counts less as the learning rate decays"),
        (failed + len(empty), "runs left out"),
    ):
        if number:
            parts.append(f"{description}: {number}")
    by = f"{into.request.by} (given by --by)" if into.request.by else "recipe" if recipes_named else named
    line = (
        f"{where}: {reader}; compute <- {compute.name} ({compute.rule}); reward <- {reward.name} ({reward.rule}); "
        f"recipe <- {by}; "
        f"seed <- {'seed' if seeds_named else 'the number of the run'}; "
        f"sd <- {f'{reward.name}_se' if with_sd == run_count else 'none'}; {', '.join([*parts, *notes])}"
    )
    into.study.note(short(line, 2000), shown=True)


def number_values(series: Series) -> tuple[Array, Array, int]:
    """Number a metric's values from 1 in order of logging. Return the same fields as `Series.latest`."""
    return np.array(range(1, len(series.values) + 1), dtype=float), series.values, 0


def _check_steps(series: Series, name: str, steps: Array, where: str) -> None:
    """Refuse a metric whose values were all logged at one step: only the last value would remain.

    Raises:
        UserError: there are more than two values, and all are at one step.
    """
    if len(steps) == 1 and len(series.steps) > 2:
        raise UserError(
            f"{where}: all {len(series.steps)} values of {short(name)} are at step {steps[0]:g}, as if they had been "
            f"logged without one, so a single point is left; log them with their step, or give --x {ORDER}, which "
            "numbers them"
        )


def own_recipe(log: Log) -> str | None:
    """Return the recipe from a run's labels.

    The label of this project's trainer comes first, because it includes changed settings.
    """
    return log.label(LABEL) or log.label("recipe")


def recipe_of(log: Log, where: str, into: Collected) -> tuple[str, dict[str, str]]:
    """Return a run's recipe and factors, from the labels by which the user groups.

    Raises:
        UserError: the run has no such label.
    """
    values = {}
    request = into.request
    for name, option in [(request.by, "--by"), *((factor, request.option_of(factor)) for factor in request.factors)]:
        if name is None:
            continue
        value = log.label(name)
        if value is None:
            # Try the name that trackers give to a configuration's value, and `key=value` pairs in the run's name.
            value = log.label(name.removeprefix("config.")) or pairs_in(log.name).get(name)
        if value is None:
            raise UserError(
                f"{where}: nothing named {short(name)} describes run {short(log.name, 60)}; "
                f"found {listed(log.labels)}; choose with {option}"
            )
        values[name] = value
    recipe = values[request.by] if request.by is not None else own_recipe(log) or log.name
    return recipe, {factor: values[factor] for factor in request.factors}


def _compute_at(log: Log, compute: Column, steps: Array, where: str) -> tuple[Array, int, int, list[str]]:
    """Interpolate compute at `steps`.

    Returns:
        The compute, the number of steps before the first logged step, the number between logged steps, and warnings.
    """
    if compute.is_order:
        return steps, 0, 0, []
    if compute.name not in log.names:
        if compute.name in STEP_NAMES or compute.rule.startswith("no counter"):
            if (steps < 0).any():
                raise UserError(f"{where}: negative steps: {(steps < 0).sum()}, first {steps[steps < 0][0]:g}")
            return steps, 0, 0, []
        raise UserError(
            f"{where}: run {short(log.name, 60)} has no {short(compute.name)}; found {listed(log.names)}; "
            "choose with --x"
        )
    series = log.series(compute.name)
    logged_steps, values, _ = series.latest()
    messages = []
    if series.bad:
        messages.append(
            f"{counted(series.bad, 'value')} of {compute.name} left out: not finite numbers (first {series.first_bad})"
        )
    if not len(logged_steps):
        raise UserError(f"{where}: no value of {short(compute.name)}; choose another with --x")
    _check_steps(series, compute.name, logged_steps, where)
    if (values < 0).any():
        raise UserError(
            f"{where}: {short(compute.name)} is negative at {counted(int((values < 0).sum()), 'step')}, "
            f"first {logged_steps[values < 0][0]:g}; compute starts at 0"
        )
    if compute.summed:
        messages += _gap_warnings(logged_steps, compute.name)
        values = np.cumsum(values)
    falls = np.flatnonzero(np.diff(values) < 0)
    if not compute.summed and looks_per_step(values):
        messages.append(
            f"{compute.name} falls at {len(falls)} of {len(values)} steps: it looks like the compute of each step, "
            f"not the total so far; give --x {SUM}{compute.name}, which sums it over the steps"
        )
    elif len(falls):
        messages.append(
            f"{compute.name} falls at {counted(len(falls), 'step')}, first at step {logged_steps[falls[0] + 1]:g}: "
            "it is not cumulative, or started again when the run was resumed"
        )
    is_logged = np.isin(steps, logged_steps)
    start = 0
    if logged_steps[0] > 0 and not len(falls):  # compute is 0 before the first step
        logged_steps, values = np.concatenate([[0.0], logged_steps]), np.concatenate([[0.0], values])
        start = int((steps <= 0).sum())
    return np.interp(steps, logged_steps, values), start, int((~is_logged).sum()) - start, messages


def _at_peak(log: Log, compute: Column, steps: Array, spent: Array, where: str) -> Array | None:
    """Convert compute spent to compute at the peak learning rate; None if no rate is logged, or it does not decay."""
    name = next(iter(first_match([RATE], log.names)), None)
    if name is None:
        return None
    rate_steps, rate, _ = log.series(name).latest()
    return None if not len(rate_steps) else at_peak_rate(_compute_at(log, compute, rate_steps, where)[0], rate, spent)


def looks_per_step(values: Array) -> bool:
    """Return whether values in order of steps look like amounts per step: they are constant, or fall often."""
    rises = np.diff(values)
    falls = int((rises < 0).sum())
    # A running total that restarts whenever a run resumes falls only once per resume.
    often = falls > 1 and 3 * falls >= len(rises)
    return len(values) > 3 and (often or bool(not rises.any() and values[0] > 0))


def _gap_warnings(steps: Array, name: str) -> list[str]:
    """Return warnings about missing steps, whose values a running sum lacks."""
    messages = []
    if steps[0] > 1:
        messages.append(f"the log starts at step {steps[0]:g}: earlier values of {name} are not in the running sum")
    missing = round(steps[-1] - steps[0]) + 1 - len(steps)
    if missing > 0:
        messages.append(f"{counted(missing, 'step')} missing in the log: the running sum of {name} is too low")
    return messages


def _standard_error(log: Log, reward: str, steps: Array) -> Array | None:
    """Return the metric `<reward>_se` at the reward's steps; None if a step lacks it, or a value is negative."""
    name = f"{reward}_se"
    if name not in log.names:
        return None
    logged_steps, values, _ = log.series(name).latest()
    if not np.isin(steps, logged_steps).all() or (values < 0).any():
        return None
    return values[np.searchsorted(logged_steps, steps)]
