"""The user's request, and the collector of points per curve, which also notes how each source was read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.curve import UNNAMED, Array, Curve, conflicts, make_curve, with_shared_scale
from sweeps.errors import UserError
from sweeps.run.journal import JournalView, finite
from sweeps.source.run_names import seed_in_name
from sweeps.source.text import File, short
from sweeps.terminal import counted

# Value of --metric that asks for one curve per evaluation set.
ALL = "all"


# Two runs count as one run if at least `_COMMON_POINTS` of their rewards are equal, with `_DISTINCT_REWARDS` or more
# distinct values. Fewer can be equal by chance, as in runs that never pass.
_COMMON_POINTS, _DISTINCT_REWARDS = 5, 3
# At most this many copies are listed in a warning.
_MAX_LISTED = 3


def show_one_run(rewards: Collection[float]) -> bool:
    """Return whether two runs that share these rewards are one run: they are very unlikely to agree by chance."""
    return len(rewards) >= _COMMON_POINTS and len(set(rewards)) >= _DISTINCT_REWARDS


# State of another trainer's run; "" if its source does not record one.
RUNNING, FINISHED, FAILED = "running", "finished", "failed"


@dataclass(frozen=True, eq=False)
class ForeignRun:
    """One run of another trainer: its name, its labels and its points.

    Attributes:
        where, name: the source as given by the user, and the run's name in the source.
        key: identity of the run that renaming does not change; "" if only source and name identify the run.
        state: `RUNNING`, `FINISHED` or `FAILED`; "" if the source does not record it.
        final: why the run ended before its budget and cannot be continued; None for any other run.
        labels: value by name of each requested label; also `recipe` and, where known, `seed` and `baseline`.
        axis, metric: columns of compute and reward.
        steps: step of each evaluation, (n,); None if the source has no steps.
        compute, reward: compute and reward of each evaluation, (n,).
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


def make_labels(factors: Mapping[str, str], **labels: str | None) -> dict[str, str]:
    """Make the labels of a `ForeignRun`: `factors`, and those of the other labels that are not None."""
    return {**factors, **{name: value for name, value in labels.items() if value is not None}}


@dataclass
class LoadedStudy:
    """Result of reading the sources: one curve per recipe, the journals, and warnings about omitted content.

    Attributes:
        curves: one curve per recipe and factors.
        runs: journals of this project's runs.
        warnings: content that was left out or looks wrong, with the reasons.
        mapping: one line per source: the reader, the use of each column with the rule that chose it, how many rows
            became points, and why other rows did not.
        shown: lines of the mapping that the user must see, because a source is not a journal or a column was chosen by
            name.
        foreign: all runs of other trainers.
    """

    curves: list[Curve] = field(default_factory=list)
    runs: list[JournalView] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    mapping: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    foreign: list[ForeignRun] = field(default_factory=list)

    @property
    def all_warnings(self) -> list[str]:
        """`warnings`, followed by those of each curve, which are also among the warnings of its fit."""
        return [*self.warnings, *(f"{curve.recipe}: {note}" for curve in self.curves for note in curve.notes)]

    def note(self, line: str, shown: bool) -> None:
        """Add a line to the mapping and, if `shown`, to the lines that the user must see."""
        self.mapping.append(line)
        if shown:
            self.shown.append(line)


@dataclass(frozen=True)
class Request:
    """Request to read curves from the sources, see `sweeps.source.load.load`.

    Attributes:
        metric: metric that is the reward in journals; None for the default.
        x: column or metric of compute; None for the default.
        y: column or metric that is the reward in tables and logs; None for the default.
        by: column or label that names the recipe; None for the default.
        factors: columns or labels by which points are also grouped.
        seed_from: pattern with one group that finds the seed in names of other trainers' runs; None without one.
        bounds: lowest and highest possible value of the metric; None to infer them.
        lower_is_better: whether the metric is a loss or an error rate.
        factor_options: option of the command line that named a factor, for messages, by factor.
    """

    metric: str | None = None
    x: str | None = None
    y: str | None = None
    by: str | None = None
    factors: tuple[str, ...] = ()
    seed_from: re.Pattern[str] | None = None
    bounds: tuple[float, float] | None = None
    lower_is_better: bool = False
    factor_options: Mapping[str, str] = field(default_factory=dict)

    def option_of(self, factor: str) -> str:
        """Return the command-line option that named this factor."""
        return self.factor_options.get(factor, "--group")

    def split_seed(self, name: str) -> tuple[str, str | None]:
        """Split a run's name by `seed_from` into the recipe's label and the seed, which is None without a match."""
        match = self.seed_from.search(name) if self.seed_from is not None else None
        if match is None or match[1] is None:
            return name, None
        label = (name[: match.start()] + name[match.end() :]).strip(" -_./:")
        return label or name[: match.start(1)].strip(" -_./:") or name, match[1]


@dataclass
class CurvePoints:
    """Points of one curve while its sources are read; lists have one entry per point.

    Attributes:
        recipe: label of the curve.
        name: the label without factors.
        own_seeds: whether the source gives the seeds of the curve's runs.
        named_after_run: whether `name` is a run's name, because the source names no recipe.
        plain_table: whether a table without seeds gave points; if it is the only run, its seed is `0`.
        ended: whether a run of the curve finished and cannot be continued.
        bounds: lowest and highest possible value of the metric; None if the source does not know them.
        origins: compute at which the points of each run begin (`Curve.origin`).
        runs: runs of other trainers, by their label in `seed`. Several runs of tables may have the same label.
        journal_seeds: seeds in the headers of journals, by label in `seed`.
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
    named_after_run: bool = False
    plain_table: bool = False
    ended: bool = False
    bounds: tuple[float, float] | None = None
    origins: list[float] = field(default_factory=list)
    runs: dict[str, list[ForeignRun]] = field(default_factory=dict)
    journal_seeds: dict[str, str] = field(default_factory=dict)

    def extend(
        self,
        compute: Sequence[float],
        reward: Sequence[float],
        seed: Sequence[str],
        sd: Sequence[float | None] | None,
        at_peak: Sequence[float | None] | None = None,
    ) -> None:
        """Add points, with standard errors and compute at the peak learning rate where these are known."""
        self.compute.extend(compute)
        self.reward.extend(reward)
        self.seed.extend(seed)
        self.sd.extend([None] * len(compute) if sd is None else sd)
        self.at_peak.extend([None] * len(compute) if at_peak is None else at_peak)

    def named_seed(self, label: str) -> str | None:
        """Return the seed that the source gives for the run with this label; None if it gives none."""
        return self.runs[label][0].labels.get("seed")

    def drop_copies(self) -> list[tuple[ForeignRun, ForeignRun]]:
        """Drop runs of other trainers that have exactly the points of an earlier run.

        Return each with that earlier run.

        If the sources do not give the same seed for both, their equality must also be too unlikely by chance
        (`show_one_run`).
        """
        if len(self.runs) < 2:
            return []
        points: dict[str, set[tuple[float, float]]] = {label: set() for label in self.runs}
        for label, compute, reward in zip(self.seed, self.compute, self.reward, strict=True):
            if label in points:
                points[label].add((compute, reward))
        kept: dict[frozenset[tuple[float, float]], list[str]] = {}  # labels by points
        copies: dict[str, str] = {}  # label of each copy -> label of the run that is kept
        for label, pairs in points.items():
            earlier = kept.setdefault(frozenset(pairs), [])
            known = self.named_seed(label)
            is_one_run = show_one_run([reward for _, reward in pairs])
            twins = (
                other for other in earlier if is_one_run or (known is not None and known == self.named_seed(other))
            )
            if (twin := next(twins, None)) is None:
                earlier.append(label)
            else:
                copies[label] = twin
        is_kept = [label not in copies for label in self.seed]
        self.compute = list(compress(self.compute, is_kept))
        self.reward = list(compress(self.reward, is_kept))
        self.sd = list(compress(self.sd, is_kept))
        self.at_peak = list(compress(self.at_peak, is_kept))
        self.seed = list(compress(self.seed, is_kept))
        return [(self.runs.pop(label)[0], self.runs[twin][0]) for label, twin in copies.items()]

    def note_shared_seeds(self) -> None:
        """Warn of different runs for which the sources give the same seed."""
        seeds = {**self.journal_seeds, **{label: self.named_seed(label) for label in self.runs}}
        counts = Counter(seeds.values())
        shared = {label: seed for label, seed in seeds.items() if seed is not None and counts[seed] > 1}
        if not shared:
            return
        rows = zip(self.seed, self.compute, self.reward, strict=True)
        pairs = sorted({(shared[label], compute, reward) for label, compute, reward in rows if label in shared})
        seed, compute, reward = (np.array(column) for column in zip(*pairs, strict=True))
        self.warnings += conflicts(compute, reward, seed) or [
            f"seed {label}: several runs have this seed; do two runs share one name? give them seeds, or use --by"
            for label in dict.fromkeys(shared.values())
        ]


class Collected:
    """Collector of a study's curves while its sources are read.

    Args:
        request: the user's request.
        study: receives warnings and the mapping.
        run_names: distinct names for runs in files of the same name, by resolved path.
    """

    def __init__(self, request: Request, study: LoadedStudy, run_names: Mapping[Path, str] | None = None) -> None:
        self.request = request
        self.study = study
        self._run_names = run_names or {}
        self.run_folders: dict[Path, Path] = {}  # for each folder of a run, the trainer state that was read first
        self._split_names: dict[str, bool] = {}  # names given to `split_seed`: whether the pattern matched
        self._points: dict[str, CurvePoints] = {}
        self._runs: dict[str, list[str]] = {}

    def points(
        self, recipe: str, factors: Mapping[str, str], axis: str, metric: str, where: str, baseline: str | None = None
    ) -> CurvePoints:
        """Return the `CurvePoints` of a recipe with these factors, to which points can be added; created if needed.

        Args:
            recipe, factors: label of the recipe, and values of the factors.
            axis, metric: columns of compute and reward.
            where: the source, for errors.
            baseline: recipe that this recipe is compared with, whose curve has the same factors; None if the source
                names none.

        Raises:
            UserError: the curve already has points with another compute axis.
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
            note = f"rewards with different names are fitted together: {points.metric}, {metric}"
            if note not in points.warnings:
                points.warnings.append(note)
        return points

    def add(self, points: CurvePoints, seed: str, run: ForeignRun, at_peak: Array | None = None) -> None:
        """Add a run to the study and its points to a curve, under the label `seed`. For `at_peak` see `Curve`."""
        points.extend(
            run.compute.tolist(),
            run.reward.tolist(),
            [seed] * len(run.compute),
            None if run.sd is None else [finite(value) for value in run.sd.tolist()],
            None if at_peak is None else at_peak.tolist(),
        )
        points.runs.setdefault(seed, []).append(run)
        self.study.foreign.append(run)

    def takes(self, logs: Sequence[Any]) -> bool:
        """Return whether this collector keeps whole logs and needs no points, as the one in `sweeps.source.raw`."""
        return False

    def run_name(self, file: File) -> str:
        """Return the name of a file's run, with as many folders as it takes to be distinct in the study."""
        return self._run_names.get(file.path.resolve(), file.run_name)

    def split_seed(self, name: str) -> tuple[str, str | None]:
        """Split a run's name as `Request.split_seed` does, and note whether a seed was found."""
        label, seed = self.request.split_seed(name)
        self._split_names[name] = seed is not None
        return label, seed

    def run_label(self, points: CurvePoints, seed: str | None) -> str:
        """Return a label for a run's points that is unique in the curve: its seed if known, else `run N`."""
        known = self._runs.setdefault(points.recipe, [])
        label = _unique_label(f"{UNNAMED}{len(known)}" if seed is None else seed, known)
        known.append(label)
        return label

    def curves(self) -> list[Curve]:
        """Make the curves, sorted by label. Find seeds in run names and drop copies of runs first.

        Raises:
            UserError: two curves have different axes.
        """
        if self.request.seed_from is None:
            self._merge_seeds_in_names()
        elif self._split_names and not any(self._split_names.values()):
            self.study.warnings.append(
                f"--seed-from {short(self.request.seed_from.pattern)!r} matches none of "
                f"{counted(len(self._split_names), 'name')}, such as {short(next(iter(self._split_names)))!r}; correct "
                "it, or leave it out to find seeds such as grpo-seed1"
            )
        axes = sorted({points.axis for points in self._points.values()})
        if len(axes) > 1:
            raise UserError(f"sources differ in their compute axis ({short(', '.join(axes))}); choose one with --x")
        self._drop_copies()
        self._note_bounds()
        self._note_single_runs()
        curves = []
        for label in sorted(self._points):
            points = self._points[label]
            known = [value for value in points.sd if value is not None]
            if points.plain_table and set(points.seed) == {f"{UNNAMED}0"}:
                points.seed = ["0"] * len(points.seed)
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
                bounds=points.bounds or self.request.bounds,
                lower_is_better=self.request.lower_is_better,
            )
            # `statistics.mean` would take time to import.
            origin = sum(points.origins) / max(1, len(points.origins))
            curves.append(replace(curve, ended=points.ended, origin=origin))
        return with_shared_scale(curves)

    def _drop_copies(self) -> None:
        """Drop copies of runs, with one warning per source, and warn of different runs with the same seed."""
        copies: dict[str, dict[str, list[str]]] = {}  # by source and recipe
        for points in self._points.values():
            for copy, original in points.drop_copies():
                texts = copies.setdefault(copy.where, {}).setdefault(points.recipe, [])
                texts.append(f"{_place(copy, original)} = {_place(original, copy)}")
            points.note_shared_seeds()
        for where, by_recipe in copies.items():
            counts = ", ".join(f"{len(texts)} of {recipe}" for recipe, texts in by_recipe.items())
            pairs = [text for texts in by_recipe.values() for text in texts]
            rest = f"; and {len(pairs) - _MAX_LISTED} more" if len(pairs) > _MAX_LISTED else ""
            self.study.warnings.append(
                f"{where}: left out {counted(len(pairs), 'run')} with exactly the points of another run of their "
                f"recipe, because a run counts once: {short(counts, 400)} ({'; '.join(pairs[:_MAX_LISTED])}{rest})"
            )

    def _note_bounds(self) -> None:
        """Note the effect of `--lower-is-better`, and warn of pass rates, whose bounds override `--bounds`.

        Raises:
            UserError: `--lower-is-better` was given for a pass rate.
        """
        metrics = dict.fromkeys(points.metric for points in self._points.values())
        metric_bounds = {points.metric: points.bounds for points in self._points.values() if points.bounds is not None}
        if self.request.lower_is_better:
            if metric_bounds:
                raise UserError(
                    f"--lower-is-better: {next(iter(metric_bounds))} is a pass rate, higher is better; leave the "
                    "option out, or name a loss with --metric"
                )
            bounds_hint = (
                "; A has no bounds: give --bounds 0 1 for an error rate" if self.request.bounds is None else ""
            )
            self.study.note(
                "lower is better: every reward is shown as minus the metric "
                f"({short(', '.join(f'-{metric}' for metric in metrics))}), so the highest is the best{bounds_hint}",
                shown=True,
            )
        self.study.warnings += [
            f"--bounds {self.request.bounds[0]:g} {self.request.bounds[1]:g}: {metric} is a pass rate and keeps its "
            f"own bounds, {low:g} to {high:g}"
            for metric, (low, high) in metric_bounds.items()
            if self.request.bounds not in (None, (low, high))
        ]

    def _note_single_runs(self) -> None:
        """If every run has become a separate recipe, add a note on how the user can mark runs as seeds."""
        all_points = self._points.values()
        recipes = {points.name for points in all_points}
        are_single = all(
            points.named_after_run and not points.own_seeds and len(set(points.seed)) == 1 for points in all_points
        )
        if len(recipes) > 2 and are_single:
            self.study.note(
                f"each of the {len(recipes)} runs is treated as a separate recipe; if some are seeds of one recipe, "
                "give --seed-from REGEX, or --by with the field that names the recipe (a column, a value of the "
                "configuration, or a key in the runs' names), or put the seed into the runs' names (grpo-seed1)",
                shown=True,
            )

    def _merge_seeds_in_names(self) -> None:
        """Merge runs whose names show that they are seeds of one recipe, if no field gives a seed. Add a note.

        The word `seed` in a name suffices. The letter `s` counts only if names differ in nothing but the number.
        """
        seeds_in_names = {}
        for label, points in self._points.items():
            match = None if points.own_seeds else seed_in_name(points.name)
            if match is not None and match[0]:
                seeds_in_names[label] = match
        seeds: dict[str, set[str]] = {}
        for recipe, seed, _ in seeds_in_names.values():
            seeds.setdefault(recipe, set()).add(seed)
        merged_runs = {label: match for label, match in seeds_in_names.items() if match[2] or len(seeds[match[0]]) > 1}
        if not merged_runs:
            return
        old_points = self._points
        self._points = {label: points for label, points in old_points.items() if label not in merged_runs}
        new_labels = {}  # old label -> new label
        for label, (recipe, seed, _) in merged_runs.items():
            old_curve = old_points[label]
            new_curve = self.points(recipe, old_curve.factors, old_curve.axis, old_curve.metric, label)
            new_labels[label] = new_curve.recipe
            known = set(new_curve.seed)
            new_seeds = {}
            for old_seed in dict.fromkeys(old_curve.seed):
                new_seeds[old_seed] = _unique_label(seed, known)
                known.add(new_seeds[old_seed])
            new_curve.extend(
                old_curve.compute,
                old_curve.reward,
                [new_seeds[old_seed] for old_seed in old_curve.seed],
                old_curve.sd,
                old_curve.at_peak,
            )
            for old_seed, runs in old_curve.runs.items():
                new_curve.runs[new_seeds[old_seed]] = [
                    replace(run, labels=make_labels(run.labels, seed=seed)) for run in runs
                ]
            new_curve.warnings += [note for note in old_curve.warnings if note not in new_curve.warnings]
            new_curve.baseline = new_curve.baseline or old_curve.baseline
        for points in self._points.values():
            points.baseline = new_labels.get(points.baseline or "", points.baseline)
        parts: dict[str, list[str]] = {}
        for label, (_, seed, _) in merged_runs.items():
            parts.setdefault(new_labels[label], []).append(f"{label} (seed {seed})")
        merged = "; ".join(f"{recipe} <- {', '.join(runs)}" for recipe, runs in sorted(parts.items()))
        self.study.note(short(f"seeds from the runs' names: {merged}", 2000), shown=True)


def _place(run: ForeignRun, other: ForeignRun) -> str:
    """Return a run's name with what distinguishes it from another run: its source, its key or its seed."""
    seed = f"seed {run.labels['seed']}" if "seed" in run.labels else ""
    detail = run.where if run.where != other.where else run.key or seed
    return short(run.name, 60) + (f" ({detail})" if detail else "")


def _at_peak(points: CurvePoints) -> list[float] | None:
    """Return each point's compute at the peak learning rate; None if no run's learning rate decays."""
    if points.at_peak.count(None) == len(points.at_peak):
        return None
    return [spent if value is None else value for spent, value in zip(points.compute, points.at_peak, strict=True)]


def _unique_label(label: str, known: Container[str]) -> str:
    """Return the label or, if it is known, `label#N` with the smallest N from 2 that is not known."""
    candidate, number = label, 2
    while candidate in known:
        candidate = f"{label}#{number}"
        number += 1
    return candidate
