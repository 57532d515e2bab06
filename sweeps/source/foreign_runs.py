"""Read each run of other trainers separately, for `scalerl adopt`."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import DEVICE_HOURS, FLOPS, STEPS, TOKENS, VIRTUAL_HOURS, Array
from sweeps.errors import UserError
from sweeps.run.journal import JournalView
from sweeps.run.spec import RunSpec, flatten_config
from sweeps.source import trl
from sweeps.source.collected import ALL, ForeignRun, LoadedStudy
from sweeps.source.journals import STEP
from sweeps.source.load import load
from sweeps.source.places import Kind, Place
from sweeps.source.text import short
from sweeps.source.vocabulary import STEP_NAMES
from sweeps.terminal import counted

SEED = "seed"
# Units of compute. Each has the name of its axis in a journal, and a pattern for names of its columns.
UNITS: Mapping[str, tuple[str, str]] = {
    "device_hours": (DEVICE_HOURS, r"(?:compute/)?(?:device|gpu)[ _-]hours"),
    "virtual_device_hours": (VIRTUAL_HOURS, r"compute/virtual_device_hours"),
    "flops": (FLOPS, r"(?:compute/|total[ _])?flop?s"),
    "tokens": (TOKENS, r".*tokens"),
    "steps": (STEPS, "|".join(map(re.escape, (*STEP_NAMES, "steps")))),
}
_LOGS = (".csv", ".jsonl", ".ndjson", ".parquet", ".log", ".xlsx", ".gz", ".zst")


@dataclass(frozen=True)
class Points:
    """Evaluations of one run, in order of steps, which are whole numbers.

    Attributes:
        steps, compute, reward: one entry per evaluation.
        sd: standard errors of the rewards; empty where unknown.
        by_step: whether the steps come from the source; if not, they number the evaluations.
    """

    steps: tuple[int, ...]
    compute: tuple[float, ...]
    reward: tuple[float, ...]
    sd: tuple[float, ...] = ()
    by_step: bool = True

    @property
    def rows(self) -> list[tuple[int, float, float]]:
        """Step, compute and reward of each point."""
        return list(zip(self.steps, self.compute, self.reward, strict=True))

    @property
    def digest(self) -> str:
        """First 12 hexadecimal digits of a SHA-256 of all points."""
        text = json.dumps([self.steps, self.compute, self.reward, self.sd], separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def columns_of(texts: Sequence[str]) -> dict[str, str]:
    """Parse `--by`: `loss,seed` or `loss=config.loss_type`. Return the source's column for each name, in order.

    Raises:
        UserError: a name is empty or occurs twice.
    """
    columns: dict[str, str] = {}
    for text in [entry for words in texts for entry in words.split(",")]:
        name, equals, column = (part.strip() for part in text.partition("="))
        if not name or (equals and not column) or name in columns:
            raise UserError(
                f"--by {text!r}: give names of columns or parameters, each once: loss,seed or loss=config.loss"
            )
        columns[name] = column or name
    return columns


def axis_of(column: str, unit: str | None) -> str:
    """Return the journal's name for a compute column. `unit` is its unit, None for the unit that the name suggests."""
    if unit is not None:
        return UNITS[unit][0]
    name = column.strip()
    known = next((axis for axis, names in UNITS.values() if re.fullmatch(names, name, re.IGNORECASE)), None)
    return known or (name if name.startswith("compute/") else f"compute/{name}")


def expand_source(source: str) -> list[str]:
    """Return the files of a folder of logs that no reader reads as a whole; return any other source unchanged.

    If a run has several checkpoints, only the newest trainer state is returned, because it has the whole history.
    """
    place = Place(source)
    if place.kind is not Kind.FOLDER or place.run_folders or place.event_files or place.wandb_logs:
        return [source]
    if place.files and place.files != place.collected:
        return [source]
    files = [str(path) for path in trl.last_states(place.path)]
    files += [str(path) for path in sorted(place.path.rglob("*")) if path.suffix.lower() in _LOGS and path.is_file()]
    return files or [source]


def read_runs(
    sources: Sequence[str],
    by: Mapping[str, str],
    metric: str | None = None,
    x: str | None = None,
    y: str | None = None,
    seed_from: str | None = None,
) -> tuple[list[ForeignRun], list[str]]:
    """Read the runs of the sources separately.

    Return the runs, and notes on how they were read or why they were left out.

    Raises:
        UserError: a source cannot be read, or lacks a column named by `--by`.
    """
    if metric == ALL or y == ALL:
        raise UserError(f"--metric {ALL}: a member has one reward; name it")
    columns = [column for name, column in by.items() if name != SEED]
    other_columns = [*columns[1:], *([by[SEED]] if by.get(SEED, SEED) != SEED else [])]
    runs: list[ForeignRun] = []
    notes: list[str] = []
    for source in sources:
        parts = expand_source(source)
        errors: list[UserError] = []
        for part in parts:
            try:
                study = load(
                    [part],
                    metric,
                    x,
                    y,
                    columns[0] if columns else None,
                    other_columns,
                    seed_from,
                    factor_options=dict.fromkeys(other_columns, "--by"),
                )
            except UserError as error:
                if len(parts) == 1:
                    raise
                errors.append(error)
                continue
            runs += study.foreign
            runs += _own_as_foreign(study, columns, other_columns)
            notes += [*study.shown, *(f"warning: {warning}" for warning in study.warnings)]
        if len(errors) == len(parts):
            raise errors[0]
        notes += [f"warning: left out: {error}" for error in errors]
    return runs, notes + _duplicate_warnings(runs)


def _duplicate_warnings(runs: Sequence[ForeignRun]) -> list[str]:
    """Return a warning for each source with duplicated rows, which `points_of` drops, with their number."""
    duplicated, remaining = Counter[str](), Counter[str]()
    for run in runs:
        points = len(_distinct_rows(run)[0])
        duplicated[run.where] += len(run.compute) - points
        remaining[run.where] += points
    return [
        f"warning: {short(where)}: {counted(count, 'duplicated row')} left out; "
        f"{counted(remaining[where], 'point')} remain{'s' if remaining[where] == 1 else ''}"
        for where, count in duplicated.items()
        if count
    ]


def _own_as_foreign(study: LoadedStudy, columns: Sequence[str], other_columns: Sequence[str]) -> Iterator[ForeignRun]:
    """Yield a study's runs with this project's journals as `ForeignRun`s, with the axis and metric of their curves."""
    if not study.runs:
        return
    axis, metric = study.curves[0].axis, study.curves[0].metric
    for view in study.runs:
        evaluations = view.of_kind("eval")
        if not evaluations:
            continue
        fields = {**_configuration(view), **view.header}
        labels = {column: str(fields[column]) for column in other_columns if column in fields}
        labels |= {"recipe": str(fields.get(columns[0] if columns else "recipe", view.path.parent.name))}
        labels |= {SEED: str(fields[SEED])} if SEED in fields else {}
        errors = [record.metrics.get(f"{metric}_se", np.nan) for record in evaluations]
        yield ForeignRun(
            where=str(view.path.parent),
            name=view.path.parent.name,
            key=f"run:{view.header.get('run', view.path.parent.resolve())}",
            state=view.status,
            labels=labels,
            axis=axis,
            metric=metric,
            steps=np.array([record.step for record in evaluations], dtype=float),
            compute=np.array(
                [record.step if axis == STEP else record.metrics[axis] for record in evaluations], dtype=float
            ),
            reward=np.array([record.metrics[metric] for record in evaluations], dtype=float),
            sd=np.array(errors) if np.isfinite(errors).all() else None,
            final=str(view.reason) if view.final else None,
        )


def _configuration(view: JournalView) -> dict[str, Any]:
    try:
        return flatten_config(RunSpec.read(view.path.parent).config)
    except UserError:
        return {}


def points_of(run: ForeignRun) -> Points:
    """Return a run's points by whole steps. If the source has no steps, the points are numbered in order of compute.

    Raises:
        UserError: compute decreases along the steps.
    """
    rows, steps = _distinct_rows(run)
    compute, reward = run.compute[rows], run.reward[rows]
    sd = None if run.sd is None or not np.isfinite(run.sd).all() else run.sd[rows]
    if steps is not None and (np.diff(compute) < 0).any():
        at = int(np.flatnonzero(np.diff(compute) < 0)[0])
        raise UserError(
            f"{run.axis} falls from {compute[at]:g} to {compute[at + 1]:g} at step {steps[at + 1]:g}: it is not "
            "cumulative, or began again with a resumed run; choose another with --x"
        )
    has_whole_steps = steps is not None and bool((steps == np.round(steps)).all())
    numbers = steps.astype(int) if steps is not None and has_whole_steps else np.arange(len(rows))
    return Points(
        steps=tuple(numbers.tolist()),
        compute=tuple(compute.tolist()),
        reward=tuple(reward.tolist()),
        sd=() if sd is None else tuple(sd.tolist()),
        by_step=has_whole_steps,
    )


def _distinct_rows(run: ForeignRun) -> tuple[NDArray[np.intp], Array | None]:
    """Return the indices of a run's rows in order, without rows that repeat a point, and their steps.

    The order is by step. If the source has no steps, or several points at one step, the order is by compute, and the
    steps are None.
    """
    known = [run.compute, run.reward] if run.steps is None else [run.steps, run.compute, run.reward]
    order = np.lexsort(known[::-1])
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = np.any([np.diff(column[order]) != 0 for column in known], axis=0)
    rows = order[is_new]
    if run.steps is None:
        return rows, None
    steps = run.steps[rows]
    return (rows, steps) if len(np.unique(steps)) == len(steps) else _distinct_rows(replace(run, steps=None))
