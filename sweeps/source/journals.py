"""Read journals of this project's runs into one curve per recipe and, on request, per evaluation set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.curve import FLOPS, STEPS, UNITS, Curve, default_axis
from sweeps.errors import UserError
from sweeps.fit.schedule import at_peak_rate
from sweeps.run.files import parse_json, read_yaml
from sweeps.run.journal import CONFIG_FILE, PASS_RATE, JournalError, JournalView, Record, finite, read_journal
from sweeps.source.branches import START, views_from_divergence
from sweeps.source.collected import ALL, Collected, CurvePoints, LoadedStudy, Request
from sweeps.source.held_out import with_at_k
from sweeps.source.namesakes import relabel_namesakes, unlike_scripts
from sweeps.source.text import listed, short
from sweeps.source.vocabulary import ORDER, order_warning
from sweeps.terminal import counted

# An axis of every journal, besides its axes of compute.
STEP = "step"
_LEARNING_RATE = "train/learning_rate"
# Metrics with values between 0 and 1.
_IN_UNIT_INTERVAL = re.compile(r"eval/.+/(pass_rate.*|(pass|maj)@\d+)")


def is_journal(path: Path) -> bool:
    """Return whether a `metrics.jsonl` is this project's journal. Rows of other frameworks have no key `kind`."""
    try:
        with path.open("rb") as handle:
            first = parse_json(handle.readline(1 << 20))
    except (OSError, ValueError):
        return True  # empty, incomplete or damaged: the journal's reader reports the problem
    return not isinstance(first, dict) or "kind" in first


def read_runs(run_dirs: Sequence[Path], into: Collected, read: Callable[[Path], JournalView] = read_journal) -> None:
    """Add the evaluations of runs to the curves of their recipes. `read` is the function that reads one journal.

    Raises:
        UserError: an evaluation lacks the metric or the axis.
        JournalError: there is a single journal, and it is damaged.
    """
    study, request = into.study, into.request
    for run_dir in dict.fromkeys(path.resolve() for path in run_dirs):
        try:
            study.runs.append(with_at_k(read(run_dir), request.metric or ""))
        except JournalError as error:
            # A run that has not started, or a damaged file, must not hide the other runs of a study.
            if len(run_dirs) == 1:
                raise
            study.warnings.append(str(error))
    evaluated = [view for view in study.runs if view.of_kind("eval")]
    cut_views, notes = views_from_divergence(evaluated)
    if notes:
        empty = [view for view in study.runs if not view.of_kind("eval")]
        evaluated, study.runs = cut_views, [*cut_views, *empty]
        for line in notes:
            study.note(line, shown=True)
    study.warnings += [f"{v.path.parent}: no evaluation yet" for v in study.runs if not v.of_kind("eval")]
    if not evaluated:
        return
    relabel_namesakes([(view, _labels(view, into)[1]) for view in evaluated], study)
    axis = request.x or _default_axis(evaluated)
    names = _sets(evaluated) if request.metric == ALL else {request.metric or _default_metric(evaluated): ""}
    seeds = _run_labels(evaluated)
    runs_by_curve: dict[str, tuple[CurvePoints, list[JournalView]]] = {}
    count = 0
    for view, seed in zip(evaluated, seeds, strict=True):
        recipe, factors = _labels(view, into)
        for name, set_name in names.items():
            records = view.of_kind("eval")
            # A set may be evaluated less often than others (`evaluation.sets`).
            with_metric = [record for record in records if name in record.metrics]
            if set_name and len(with_metric) < len(records):
                absent = len(records) - len(with_metric)
                study.warnings.append(f"{view.path.parent}: {absent} of {len(records)} evaluations have no {name}")
                if not with_metric:
                    continue
            records = with_metric or records
            curve_factors = {**factors, "set": set_name} if set_name else factors
            base = view.header.get("baseline")
            points = into.points(recipe, curve_factors, axis, name, str(view.path), None if base is None else str(base))
            points.own_seeds = True
            points.journal_seeds[seed] = str(view.header.get("seed", "0"))
            if _IN_UNIT_INTERVAL.fullmatch(name) and not view.header.get(
                "axis"
            ):  # the metric of another trainer may be any reward
                points.bounds = (0.0, 1.0)
            runs_by_curve.setdefault(points.recipe, (points, []))[1].append(view)
            if view.status == "failed":
                reason = f": {short(str(view.reason))}" if view.reason else ""
                points.warnings.append(f"run {view.path.parent.name} (seed {seed}) failed{reason}; its points are used")
            if view.final:
                last_step = max(record.step for record in view.records)
                points.ended = True
                points.warnings.append(
                    f"run {view.path.parent.name} (seed {seed}) ended at step {last_step}: {short(str(view.reason))}"
                )
            if view.missing:
                points.warnings.append(
                    f"run {view.path.parent.name} (seed {seed}) has {view.missing}: it continued from a checkpoint "
                    "that is newer than its journal"
                )
            spent: list[float] = []
            if axis == ORDER and (note := order_warning(axis)) and note not in points.warnings:
                points.warnings.append(note)
            for number, record in enumerate(records, start=1):
                start = view.header.get(START, {})
                if axis in (STEP, ORDER):
                    compute = float(number if axis == ORDER else record.step - start.get("step", 0))
                else:
                    compute = _metric(view, record, axis, "--x", ("compute/",))
                reward = _metric(view, record, name, "--metric", ("eval/",))
                points.compute.append(compute)
                points.reward.append(reward)
                points.sd.append(finite(record.metrics.get(f"{name}_se")))
                points.seed.append(seed)
                spent.append(compute)
                count += 1
            points.at_peak.extend(_at_peak(view, axis, spent))
            points.origins.append(float(view.header.get(START, {}).get(axis, 0.0)))
    for label, (points, views) in runs_by_curve.items():
        if (differences := unlike_scripts(label, views)) is not None:
            points.warnings.append(differences)
        curves = {str(view.header.get("curve", "")) for view in views}
        if len(curves) > 1:  # some headers have no key `curve`, so `relabel_namesakes` cannot separate these runs
            points.warnings.append(
                f"{len(curves)} different configurations share the label {label!r} and are fitted together"
            )
    axis_rule = "given by --x" if request.x else "default of the device"
    metric_rule = {ALL: "every set"}.get(
        request.metric or "", "given by --metric" if request.metric else "first set of the task"
    )
    study.note(
        f"journals; compute <- {axis} ({axis_rule}); reward <- {short(', '.join(names), 400)} ({metric_rule}); "
        f"recipe <- the header's label{''.join(f', {factor}' for factor in request.factors)}; seed <- the header; "
        f"sd <- the evaluation's standard error; {counted(len(study.runs), 'run')}: {counted(count, 'point')}",
        shown=False,
    )


def curves_by_set(views: Sequence[JournalView], axis: str, factors: Sequence[str] = ()) -> list[Curve]:
    """Make one curve per recipe and evaluation set from journals; none with fewer than two sets.

    Args:
        views: journals of the runs.
        axis: compute axis.
        factors: as for `load`.
    """
    names = {name for view in views for record in view.of_kind("eval") for name in record.metrics}
    if sum(PASS_RATE.fullmatch(name) is not None for name in names) < 2:
        return []
    return curves_of(views, ALL, axis, factors)


def curves_of(views: Sequence[JournalView], metric: str, axis: str, factors: Sequence[str] = ()) -> list[Curve]:
    """Make curves of another metric from journals. The other arguments are as for `curves_by_set`."""
    by_folder = {view.path.parent.resolve(): view for view in views}
    into = Collected(Request(metric=metric, x=axis, factors=tuple(factors)), LoadedStudy())
    read_runs(list(by_folder), into, by_folder.__getitem__)
    return into.curves()


def _at_peak(view: JournalView, axis: str, spent: Sequence[float]) -> list[float | None]:
    """Convert compute spent to effective compute, in which steps at a decayed learning rate count only in part.

    Return a list of None if the rate does not decay.
    """
    logged = [
        (float(record.step) if axis == STEP else value, rate)
        for record in view.of_kind("train")
        if (rate := finite(record.metrics.get(_LEARNING_RATE))) is not None
        and ((value := finite(record.metrics.get(axis))) is not None or axis == STEP)
    ]
    if not logged:
        return [None] * len(spent)
    compute, rate = np.array(logged, dtype=float).T
    converted = at_peak_rate(compute, rate, np.array(spent))
    return [None] * len(spent) if converted is None else list(converted.tolist())


def _labels(view: JournalView, into: Collected) -> tuple[str, dict[str, str]]:
    """Return a run's recipe and the requested factors, each from its header or else from its configuration."""
    recipe = str(view.header.get("recipe", view.path.parent.name))
    if not into.request.factors:
        return recipe, {}
    config = read_yaml(view.path.parent / CONFIG_FILE)
    factors = {}
    for name in into.request.factors:
        value = view.header[name] if name in view.header else _value_at(config, name)
        if value is None or isinstance(value, Mapping | list):
            raise UserError(
                f"{view.path}: no field {short(name)} in the header, and no such key in {CONFIG_FILE}; "
                f"found {listed([*view.header, *_dotted_keys(config)])}"
            )
        factors[name] = str(value)
    return recipe, factors


def _value_at(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def _dotted_keys(config: Any, prefix: str = "") -> list[str]:
    if not isinstance(config, Mapping):
        return [prefix[:-1]] if prefix else []
    return [key for name, value in config.items() for key in _dotted_keys(value, f"{prefix}{name}.")]


def _run_labels(views: Sequence[JournalView]) -> list[str]:
    """Return a label per run: its seed, with a number if another run of the recipe has the same seed."""
    known: dict[tuple[str, str], list[str]] = {}
    labels = []
    for view in views:
        seed = str(view.header.get("seed", "0"))
        runs = known.setdefault((str(view.header.get("recipe", view.path.parent.name)), seed), [])
        run = str(view.header.get("run", view.path))
        if run not in runs:
            runs.append(run)
        at = runs.index(run)
        labels.append(seed if at == 0 else f"{seed}#{at + 1}")
    return labels


def axes_of(views: Sequence[JournalView]) -> list[str]:
    """Return the axes on which runs can be compared: steps, and the compute axes that all evaluations have."""
    records = [record for view in views for record in view.of_kind("eval")]
    shared = [axis for axis in UNITS if records and all(axis in record.metrics for record in records)]
    return [STEP, *(axis for axis in shared if axis != STEPS)]


def compared_by(views: Sequence[JournalView]) -> tuple[str, str]:
    """Return the default compute axis and the default reward of runs with evaluations.

    Raises:
        UserError: the runs have none in common.
    """
    return _default_axis(views), _default_metric(views)


def _default_axis(views: Sequence[JournalView]) -> str:
    """Return the default compute axis of the runs' device, or FLOPs if some evaluation lacks the default."""
    # A run of another trainer has one axis, which its header names.
    named_axes = {str(view.header["axis"]) for view in views if view.header.get("axis")}
    measures = {str(view.header.get("compute_is")) for view in views if view.header.get("axis")}
    if len(named_axes) > 1 or len(measures) > 1:
        raise UserError(
            f"{views[0].path}: runs measure compute in different ways ({listed(sorted(measures))}), and reward at "
            "one of them says nothing of another; give runs of one way, or compare by --x step"
        )
    if named_axes and all(
        axis in record.metrics for axis in named_axes for view in views for record in view.of_kind("eval")
    ):
        return named_axes.pop()
    on_gpu = all(str(view.header.get("device", "")).startswith("cuda") for view in views)
    for axis in (default_axis(on_gpu), FLOPS):
        if all(axis in record.metrics for view in views for record in view.of_kind("eval")):
            return axis
    axes = sorted({k for v in views for r in v.of_kind("eval") for k in r.metrics if k.startswith("compute/")})
    raise UserError(
        f"{views[0].path}: the runs share none of the default compute axes; found {listed(axes)}; choose one with --x"
    )


def _sets(views: Sequence[JournalView]) -> dict[str, str]:
    """Return the evaluation set of each pass rate in the runs, by the pass rate's name."""
    names = dict.fromkeys(name for view in views for record in view.of_kind("eval") for name in record.metrics)
    sets = {name: match[1] for name in names if (match := PASS_RATE.fullmatch(name))}
    if not sets:
        raise UserError(f"{views[0].path}: no eval/<set>/pass_rate; found {listed(names)}; choose with --metric")
    return sets


def _default_metric(views: Sequence[JournalView]) -> str:
    names = views[0].of_kind("eval")[0].metrics
    for name in names:
        if PASS_RATE.fullmatch(name):
            return name
    raise UserError(f"{views[0].path}: no eval/<set>/pass_rate; found {listed(names)}; choose with --metric")


def _metric(view: JournalView, record: Record, name: str, option: str, prefixes: tuple[str, ...]) -> float:
    """Return a metric of a record.

    `option` and `prefixes` are for the error message: the option, and the prefixes of metrics that could be chosen.
    """
    value = finite(record.metrics.get(name))
    if value is None:
        candidates = [key for key in record.metrics if key.startswith(prefixes)]
        raise UserError(
            f"{view.path}: {short(name)} is missing or not a number in the evaluation at step {record.step}; "
            f"found {listed(candidates)}; choose with {option}"
        )
    return value
