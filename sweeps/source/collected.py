"""The user's request to the sources, and the points that they gave by curve, with a line on how each was read."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.curve import UNNAMED, Array, Curve, make_curve, with_shared_scale
from sweeps.errors import UserError
from sweeps.run.journal import JournalView
from sweeps.source.run_names import hidden_seed
from sweeps.source.text import short

# --metric: a curve for every evaluation set there is.
ALL = "all"


# How a run that is not ours says it is; "" where its source does not say.
RUNNING, FINISHED, FAILED = "running", "finished", "failed"


@dataclass(frozen=True, eq=False)
class ForeignRun:
    """One run of a source that is not ours: what it is called, what describes it, and its points.

    Attributes:
        where, name: the source as the user gave it, and the run's name there.
        key: by which the run is known again whatever its name; "" where its place and name are all there is.
        state: `RUNNING`, `FINISHED` or `FAILED`; "" where the source does not say.
        final: why it is finished before its budget and cannot be continued; None of any other run.
        labels: what describes it and was asked for, by name; `recipe`, and where they are known `seed` and `baseline`.
        axis, metric: columns of compute and reward.
        steps: (n,), None where the source has none.
        compute, reward: (n,).
        sd: standard errors of the rewards, (n,), None where they are not known.
    """

    where: str
    name: str
    key: str
    state: str
    labels: Mapping[str, str]
    axis: str
    metric: str
    steps: Array | None
    compute: Array
    reward: Array
    sd: Array | None
    final: str | None = None


def described(factors: Mapping[str, str], **labels: str | None) -> dict[str, str]:
    """Return the labels of a `ForeignRun`: the factors asked for, and those of its own that are known."""
    return {**factors, **{name: value for name, value in labels.items() if value is not None}}


@dataclass
class LoadedStudy:
    """Content of the sources: a curve per recipe, the journals, and what was left out and why.

    mapping: a line a source: which reader it was, which column became what and by which rule, how many rows gave
    points and what became of the others. shown: those of the lines that a user must see, because the format is
    not ours or a column was found by its name. foreign: runs that are not ours, one by one.
    """

    curves: list[Curve] = field(default_factory=list)
    runs: list[JournalView] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    mapping: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    foreign: list[ForeignRun] = field(default_factory=list)

    def note(self, line: str, shown: bool) -> None:
        """Add a line to the mapping, and to the lines that a user must see if `shown`."""
        self.mapping.append(line)
        if shown:
            self.shown.append(line)


@dataclass(frozen=True)
class Asked:
    """Names given by the user: the reward (`y` of a table or log, `metric` of a journal), compute, labels.

    seed_from: a pattern with one group, for seeds that are hidden in the recipes' names of foreign sources.
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

    def parted(self, name: str) -> tuple[str, str | None]:
        """Split a name by `seed_from` into the recipe's label and the seed in its group; None for no seed."""
        found = self.seed_from.search(name) if self.seed_from is not None else None
        if found is None or found[1] is None:
            return name, None
        rest = (name[: found.start()] + name[found.end() :]).strip(" -_./:")
        return rest or name[: found.start(1)].strip(" -_./:") or name, found[1]


@dataclass
class CurvePoints:
    """Points of one curve while they are read, one list per column.

    recipe: the label; name: what of it the source gave. own_seeds: its seeds, or some of them, stand in the source.
    bounds: lowest and highest possible value of the metric, where the source knows them.
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
    ended: bool = False
    bounds: tuple[float, float] | None = None

    def extend(
        self,
        compute: Sequence[float],
        reward: Sequence[float],
        seed: Sequence[str],
        sd: Sequence[float | None] | None,
        at_peak: Sequence[float | None] | None = None,
    ) -> None:
        """Add points, with their standard errors and what their compute counts as where they are known."""
        self.compute.extend(compute)
        self.reward.extend(reward)
        self.seed.extend(seed)
        self.sd.extend([None] * len(compute) if sd is None else sd)
        self.at_peak.extend([None] * len(compute) if at_peak is None else at_peak)


class Collected:
    """Collector of a study's curves while its sources are read.

    Args:
        asked: what the user named.
        study: where warnings and the mapping go.
    """

    def __init__(self, asked: Asked, study: LoadedStudy) -> None:
        self.asked = asked
        self.study = study
        self.run_folders: dict[Path, Path] = {}  # where a state was found, for the states that repeat each other
        self._points: dict[str, CurvePoints] = {}
        self._runs: dict[str, list[str]] = {}

    def points(
        self, recipe: str, factors: Mapping[str, str], axis: str, metric: str, where: str, baseline: str | None = None
    ) -> CurvePoints:
        """Return the curve of a recipe and its factors, made if need be, to add points to.

        `baseline` is the recipe that it departs from, if the source says; its curve is that of the same factors.

        Raises:
            UserError: the curve has points along another axis.
        """
        parted = "".join(f" {name}={value}" for name, value in factors.items())
        label = recipe + parted
        found = self._points.setdefault(label, CurvePoints(label, recipe, dict(factors), axis, metric))
        found.baseline = found.baseline or (baseline and baseline + parted)
        if found.axis != axis:
            raise UserError(
                f"{where}: recipe {label!r} has another compute axis elsewhere ({found.axis}, here {axis}); "
                "choose one with --x"
            )
        if found.metric != metric:
            note = f"rewards of different names are fitted together: {found.metric}, {metric}"
            if note not in found.warnings:
                found.warnings.append(note)
        return found

    def takes(self, logs: Sequence[Any]) -> bool:
        """Return whether logs are wanted as they are and no points of them (`sweeps.source.raw`); here not."""
        return False

    def run_label(self, points: CurvePoints, seed: str | None) -> str:
        """Return a unique seed label for a log's run: its seed if known, else `run N`, its number in the curve."""
        known = self._runs.setdefault(points.recipe, [])
        label = _free(f"{UNNAMED}{len(known)}" if seed is None else seed, known)
        known.append(label)
        return label

    def curves(self) -> list[Curve]:
        """Make the curves, sorted by label, after taking seeds from the runs' names.

        Raises:
            UserError: two of them do not share an axis.
        """
        if self.asked.seed_from is None:
            self._take_seeds_from_names()
        axes = sorted({points.axis for points in self._points.values()})
        if len(axes) > 1:
            raise UserError(f"sources differ in their compute axis ({short(', '.join(axes))}); choose one with --x")
        self._say_bounds()
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
            curves.append(replace(curve, ended=points.ended))
        return with_shared_scale(curves)

    def _say_bounds(self) -> None:
        """Note what `--lower-is-better` does to the metrics, and warn of metrics that keep bounds of their own.

        Raises:
            UserError: a metric with known bounds is one of which higher is better.
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

    def _take_seeds_from_names(self) -> None:
        """Merge runs that are seeds of one recipe by their names, where no field gives a seed, and note it.

        The word `seed` suffices; a letter does if the names then differ in the number alone.
        """
        hidden = {}
        for label, points in self._points.items():
            found = None if points.own_seeds else hidden_seed(points.name)
            if found is not None and found[0]:
                hidden[label] = found
        seeds: dict[str, set[str]] = {}
        for rest, seed, _ in hidden.values():
            seeds.setdefault(rest, set()).add(seed)
        taken = {label: found for label, found in hidden.items() if found[2] or len(seeds[found[0]]) > 1}
        if not taken:
            return
        before = self._points
        self._points = {label: points for label, points in before.items() if label not in taken}
        now = {}  # the labels that have changed
        for label, (rest, seed, _) in taken.items():
            old = before[label]
            new = self.points(rest, old.factors, old.axis, old.metric, label)
            now[label] = new.recipe
            known = set(new.seed)
            names = {}
            for own in dict.fromkeys(old.seed):
                names[own] = _free(seed, known)
                known.add(names[own])
            new.extend(old.compute, old.reward, [names[own] for own in old.seed], old.sd, old.at_peak)
            new.warnings += [note for note in old.warnings if note not in new.warnings]
            new.baseline = new.baseline or old.baseline
        for points in self._points.values():
            points.baseline = now.get(points.baseline or "", points.baseline)
        parts: dict[str, list[str]] = {}
        for label, (_, seed, _) in taken.items():
            parts.setdefault(now[label], []).append(f"{label} (seed {seed})")
        said = "; ".join(f"{recipe} <- {', '.join(runs)}" for recipe, runs in sorted(parts.items()))
        self.study.note(short(f"seeds from the runs' names: {said}", 2000), shown=True)


def _at_peak(points: CurvePoints) -> list[float] | None:
    """Return each point's compute at the peak of the learning rate; None if no run's rate decays."""
    if points.at_peak.count(None) == len(points.at_peak):
        return None
    return [own if value is None else value for own, value in zip(points.compute, points.at_peak, strict=True)]


def _free(label: str, known: Container[str]) -> str:
    """Return the label, or `label#N` with the first N from 2 on that is free."""
    free, number = label, 2
    while free in known:
        free = f"{label}#{number}"
        number += 1
    return free
