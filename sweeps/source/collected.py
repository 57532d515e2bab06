"""The user's request, and the collected points per curve, with a line on how each source was read."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.curve import UNNAMED, Array, Curve, make_curve, with_shared_scale
from sweeps.errors import UserError
from sweeps.run.journal import JournalView, finite
from sweeps.source.run_names import hidden_seed
from sweeps.source.text import short

# --metric all: one curve per evaluation set.
ALL = "all"


# State of a run of another trainer; "" if its source does not record one.
RUNNING, FINISHED, FAILED = "running", "finished", "failed"


@dataclass(frozen=True, eq=False)
class ForeignRun:
    """One run of another trainer: its name, its labels and its points.

    Attributes:
        where, name: the source as given by the user, and the run's name in it.
        key: identity of the run that survives renaming; "" if only place and name identify it.
        state: `RUNNING`, `FINISHED` or `FAILED`; "" if the source does not record it.
        final: reason why it finished before its budget and cannot be continued; None for any other run.
        labels: requested labels by name; also `recipe` and, where known, `seed` and `baseline`.
        axis, metric: columns of compute and reward.
        steps: (n,); None where the source has none.
        compute, reward: (n,).
        sd: standard errors of the rewards, (n,); None, or NaN for a point, where unknown.
    """

    where: str
    name: str
    labels: Mapping[str, str]
    axis: str
    metric: str
    compute: Array
    reward: Array
    steps: Array | None = None
    sd: Array | None = None
    key: str = ""
    state: str = ""
    final: str | None = None


def described(factors: Mapping[str, str], **labels: str | None) -> dict[str, str]:
    """Return the labels of a `ForeignRun`: the requested factors, and the given labels without None."""
    return {**factors, **{name: value for name, value in labels.items() if value is not None}}


@dataclass
class LoadedStudy:
    """Content of the sources: one curve per recipe, the journals, and warnings about omitted content.

    Attributes:
        curves: the curves.
        runs: journals of our own runs.
        warnings: content that was left out or looks wrong, with the reasons.
        mapping: one line per source: the reader, the use of each column with the rule for it, and how many rows became
            points, with the reasons for the others.
        shown: lines of the mapping that the user must see, because the format is foreign or a column was chosen by
            name.
        foreign: runs of other trainers, one by one.
    """

    curves: list[Curve] = field(default_factory=list)
    runs: list[JournalView] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    mapping: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    foreign: list[ForeignRun] = field(default_factory=list)

    @property
    def all_warnings(self) -> list[str]:
        """`warnings`, followed by those of each curve. Fits repeat the latter and add their own."""
        return [*self.warnings, *(f"{curve.recipe}: {note}" for curve in self.curves for note in curve.notes)]

    def note(self, line: str, shown: bool) -> None:
        """Add a line to the mapping; if `shown`, also to the lines that the user must see."""
        self.mapping.append(line)
        if shown:
            self.shown.append(line)


@dataclass(frozen=True)
class Asked:
    """The user's request: reward (`y` of a table or log, `metric` of a journal), compute, labels.

    seed_from: a pattern with one group, for seeds that are part of run names in foreign sources.
    bounds: lowest and highest possible value of the metric; None to infer them.
    lower_is_better: whether the metric is a loss or an error rate.
    """

    metric: str | None = None
    x: str | None = None
    y: str | None = None
    by: str | None = None
    factors: tuple[str, ...] = ()
    seed_from: re.Pattern[str] | None = None
    bounds: tuple[float, float] | None = None
    lower_is_better: bool = False

    def split_seed(self, name: str) -> tuple[str, str | None]:
        """Split a name by `seed_from` into the recipe's label and the seed in its group, None without a seed."""
        match = self.seed_from.search(name) if self.seed_from is not None else None
        if match is None or match[1] is None:
            return name, None
        label = (name[: match.start()] + name[match.end() :]).strip(" -_./:")
        return label or name[: match.start(1)].strip(" -_./:") or name, match[1]


@dataclass
class CurvePoints:
    """Points of one curve while its sources are read, one list per column.

    recipe: the curve's label. name: the part of it that comes from the source. own_seeds: whether the source names some
    of its seeds. names_run: whether `name` is the name of a run, for want of a recipe. bounds: lowest and highest
    possible value of the metric, where the source knows them. origins: of each run, the compute at which its points
    begin (`Curve.origin`).
    """

    recipe: str
    name: str
    factors: dict[str, str]
    axis: str
    metric: str
    compute: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    seed: list[str] = field(default_factory=list)
    sd: list[float | None] = field(default_factory=list)
    at_peak: list[float | None] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    baseline: str | None = None
    own_seeds: bool = False
    names_run: bool = False
    ended: bool = False
    bounds: tuple[float, float] | None = None
    origins: list[float] = field(default_factory=list)

    def extend(
        self,
        compute: Sequence[float],
        reward: Sequence[float],
        seed: Sequence[str],
        sd: Sequence[float | None] | None,
        at_peak: Sequence[float | None] | None = None,
    ) -> None:
        """Add points; sd and at_peak (compute at the peak learning rate) where known."""
        self.compute.extend(compute)
        self.reward.extend(reward)
        self.seed.extend(seed)
        self.sd.extend([None] * len(compute) if sd is None else sd)
        self.at_peak.extend([None] * len(compute) if at_peak is None else at_peak)


class Collected:
    """Collector of a study's curves while its sources are read.

    Args:
        asked: the user's request.
        study: receives warnings and the mapping.
    """

    def __init__(self, asked: Asked, study: LoadedStudy) -> None:
        self.asked = asked
        self.study = study
        self.run_folders: dict[Path, Path] = {}  # by run, the state read first: later states repeat it
        self._points: dict[str, CurvePoints] = {}
        self._runs: dict[str, list[str]] = {}

    def points(
        self, recipe: str, factors: Mapping[str, str], axis: str, metric: str, where: str, baseline: str | None = None
    ) -> CurvePoints:
        """Return the curve of a recipe and its factors, to add points to; it is created if needed.

        `baseline` is the recipe that this one is compared with, if the source names one; its curve has the same
        factors.

        Raises:
            UserError: the curve already has points along another axis.
        """
        suffix = "".join(f" {name}={value}" for name, value in factors.items())
        label = recipe + suffix
        points = self._points.setdefault(
            label, CurvePoints(recipe=label, name=recipe, factors=dict(factors), axis=axis, metric=metric)
        )
        points.baseline = points.baseline or (baseline and baseline + suffix)
        if points.axis != axis:
            raise UserError(
                f"{where}: recipe {label!r} has another compute axis elsewhere ({points.axis}, here {axis}); "
                "choose one with --x"
            )
        if points.metric != metric:
            note = f"rewards of different names are fitted together: {points.metric}, {metric}"
            if note not in points.warnings:
                points.warnings.append(note)
        return points

    def add(self, points: CurvePoints, seed: str, run: ForeignRun, at_peak: Array | None = None) -> None:
        """Add a run to the study and its points to a curve, under a label of its seed; `at_peak`: see `Curve`."""
        points.extend(
            run.compute.tolist(),
            run.reward.tolist(),
            [seed] * len(run.compute),
            None if run.sd is None else [finite(value) for value in run.sd.tolist()],
            None if at_peak is None else at_peak.tolist(),
        )
        self.study.foreign.append(run)

    def takes(self, logs: Sequence[Any]) -> bool:
        """Return whether this collector takes unprocessed logs, without choosing points (as `sweeps.source.raw`)."""
        return False

    def run_label(self, points: CurvePoints, seed: str | None) -> str:
        """Return a unique seed label for a run: its seed if known, else `run N`, its number in the curve."""
        known = self._runs.setdefault(points.recipe, [])
        label = _free(f"{UNNAMED}{len(known)}" if seed is None else seed, known)
        known.append(label)
        return label

    def curves(self) -> list[Curve]:
        """Make the curves, sorted by label. Seeds that are only in run names are found first.

        Raises:
            UserError: two curves have different axes.
        """
        if self.asked.seed_from is None:
            self._take_seeds_from_names()
        axes = sorted({points.axis for points in self._points.values()})
        if len(axes) > 1:
            raise UserError(f"sources differ in their compute axis ({short(', '.join(axes))}); choose one with --x")
        self._say_bounds()
        self._say_single_runs()
        curves = []
        for label in sorted(self._points):
            points = self._points[label]
            known = [value for value in points.sd if value is not None]
            curve = make_curve(
                recipe=label,
                compute=points.compute,
                reward=points.reward,
                seed=points.seed,
                sd=known if len(known) == len(points.sd) else None,
                axis=points.axis,
                metric=points.metric,
                warnings=points.warnings,
                factors=points.factors,
                baseline=points.baseline,
                at_peak=_at_peak(points),
                bounds=points.bounds or self.asked.bounds,
                lower_is_better=self.asked.lower_is_better,
            )
            # `statistics` is not used, because its import brings six more modules.
            origin = sum(points.origins) / max(1, len(points.origins))
            curves.append(replace(curve, ended=points.ended, origin=origin))
        return with_shared_scale(curves)

    def _say_bounds(self) -> None:
        """Note the effect of `--lower-is-better`, and warn of metrics whose own bounds take precedence.

        Raises:
            UserError: the user said lower is better, but higher is better for a metric.
        """
        metrics = dict.fromkeys(points.metric for points in self._points.values())
        own = {points.metric: points.bounds for points in self._points.values() if points.bounds is not None}
        if self.asked.lower_is_better:
            if own:
                raise UserError(
                    f"--lower-is-better: {next(iter(own))} is a pass rate, higher is better; leave the option out, or "
                    "name a loss with --metric"
                )
            without = "; A has no bounds: give --bounds 0 1 for an error rate" if self.asked.bounds is None else ""
            self.study.note(
                "lower is better: every reward is shown as minus the metric "
                f"({short(', '.join(f'-{metric}' for metric in metrics))}), so the highest is the best{without}",
                shown=True,
            )
        self.study.warnings += [
            f"--bounds {self.asked.bounds[0]:g} {self.asked.bounds[1]:g}: {metric} is a pass rate and keeps its own, "
            f"{low:g} to {high:g}"
            for metric, (low, high) in own.items()
            if self.asked.bounds not in (None, (low, high))
        ]

    def _say_single_runs(self) -> None:
        """Note how to name the seeds if every run of several has become a recipe of its own, by its name."""
        all_points = self._points.values()
        recipes = {points.name for points in all_points}
        are_single = all(
            points.names_run and not points.own_seeds and len(set(points.seed)) == 1 for points in all_points
        )
        if len(recipes) > 2 and are_single:
            self.study.note(
                f"each of the {len(recipes)} runs is a recipe of its own: if some are seeds of one recipe, give "
                "--seed-from REGEX, or --by with what names the recipe (a column, a value of the configuration, or a "
                "key in the runs' names), or put the seed into the runs' names (grpo-seed1)",
                shown=True,
            )

    def _take_seeds_from_names(self) -> None:
        """Merge runs whose names show that they are seeds of one recipe, if no field gives a seed; note it.

        The word `seed` in a name suffices. A single letter counts only if the names then differ in the number alone.
        """
        hidden = {}
        for label, points in self._points.items():
            match = None if points.own_seeds else hidden_seed(points.name)
            if match is not None and match[0]:
                hidden[label] = match
        seeds: dict[str, set[str]] = {}
        for rest, seed, _ in hidden.values():
            seeds.setdefault(rest, set()).add(seed)
        taken = {label: match for label, match in hidden.items() if match[2] or len(seeds[match[0]]) > 1}
        if not taken:
            return
        old_points = self._points
        self._points = {label: points for label, points in old_points.items() if label not in taken}
        new_labels = {}  # old label -> new label
        for label, (rest, seed, _) in taken.items():
            old = old_points[label]
            new = self.points(rest, old.factors, old.axis, old.metric, label)
            new_labels[label] = new.recipe
            known = set(new.seed)
            names = {}
            for old_seed in dict.fromkeys(old.seed):
                names[old_seed] = _free(seed, known)
                known.add(names[old_seed])
            new.extend(old.compute, old.reward, [names[old_seed] for old_seed in old.seed], old.sd, old.at_peak)
            new.warnings += [note for note in old.warnings if note not in new.warnings]
            new.baseline = new.baseline or old.baseline
        for points in self._points.values():
            points.baseline = new_labels.get(points.baseline or "", points.baseline)
        parts: dict[str, list[str]] = {}
        for label, (_, seed, _) in taken.items():
            parts.setdefault(new_labels[label], []).append(f"{label} (seed {seed})")
        merged = "; ".join(f"{recipe} <- {', '.join(runs)}" for recipe, runs in sorted(parts.items()))
        self.study.note(short(f"seeds from the runs' names: {merged}", 2000), shown=True)


def _at_peak(points: CurvePoints) -> list[float] | None:
    """Return each point's compute at the peak learning rate; None if no run's rate decays."""
    if points.at_peak.count(None) == len(points.at_peak):
        return None
    return [spent if value is None else value for spent, value in zip(points.compute, points.at_peak, strict=True)]


def _free(label: str, known: Container[str]) -> str:
    """Return the label, or `label#N` with the smallest free N from 2."""
    free, number = label, 2
    while free in known:
        free = f"{label}#{number}"
        number += 1
    return free
