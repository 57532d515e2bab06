"""Comparison of recipes over several evaluation sets at once, as in rliable (Agarwal et al. 2021, arXiv 2108.13264).

The scores of a recipe are a matrix x of shape (runs, sets).

    interquartile mean           mean of all runs * sets scores without the lowest and the highest quarter
    probability of improvement   mean over sets of P(x > y) + P(x = y) / 2, over all pairs of a run of x and one of y
    performance profile          share of the runs * sets scores above tau, for each tau
    interval                     percentiles 2.5 and 97.5 of the statistic over a stratified bootstrap: runs are drawn
                                 with replacement, for each set by itself

A run's score on a set is its newest evaluation at or before the compute that all runs have spent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.decide.set_scores import SET, SetScores, set_scores
from sweeps.errors import UserError
from sweeps.fit.fit import Interval
from sweeps.fit.forecast import generator
from sweeps.terminal import counted

# Resamples of the bootstrap: as many as rliable draws for profiles.
REPS = 2000
# Thresholds of the profile, as shares of the range from 0 to the highest score.
_TAUS = 21
_TAIL = (2.5, 97.5)


@dataclass(frozen=True)
class AggregateRow(AsJson):
    """One recipe over all sets; intervals are 95%, with open bounds where the recipe has one run.

    Attributes:
        runs: number of runs with a score on every set.
        by_set: mean score over runs, by set.
        iqm: interquartile mean over runs and sets.
        p_first_improves: probability of improvement of the first recipe on this one; None for the first.
        profile, profile_low, profile_high: share of scores above each of the thresholds, with its interval.
    """

    recipe: str
    runs: int
    by_set: Mapping[str, float]
    iqm: Interval
    p_first_improves: Interval | None
    profile: tuple[float, ...]
    profile_low: tuple[float | None, ...]
    profile_high: tuple[float | None, ...]


@dataclass(frozen=True)
class Aggregate(AsJson):
    """All recipes over several evaluation sets, the highest interquartile mean first.

    Attributes:
        axis, compute: compute axis, and the largest compute that all runs have spent.
        sets: names of the sets.
        thresholds: thresholds of the performance profiles.
        rows: one per recipe.
        notes: runs that were left out or end early.
        sentence: the outcome in words.
    """

    axis: str
    compute: float
    sets: tuple[str, ...]
    thresholds: tuple[float, ...]
    rows: tuple[AggregateRow, ...]
    notes: tuple[str, ...]
    sentence: str


def iqm(scores: Array) -> Array:
    """Return the interquartile mean of scores; (..., runs, sets) -> (...,)."""
    pooled = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = pooled.shape[-1] // 4
    return np.asarray(pooled[..., cut : pooled.shape[-1] - cut].mean(axis=-1))


def improvement(x: Array, y: Array) -> Array:
    """Return the probability (...,) that a run of x (..., n, sets) scores higher than one of y (..., m, sets)."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    return np.asarray(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-3, -2, -1)))


def profile(scores: Array, thresholds: Array) -> Array:
    """Return the share (..., k) of scores (..., runs, sets) above each threshold (k,)."""
    return np.asarray((scores[..., None] > thresholds).mean(axis=(-3, -2)))


def resample(scores: Array, rng: np.random.Generator, reps: int = REPS) -> Array:
    """Return stratified bootstrap samples (reps, runs, sets) of scores (runs, sets)."""
    return take(scores, rng.integers(0, len(scores), (reps, *scores.shape)))


def take(scores: Array, runs: NDArray[np.int64]) -> Array:
    """Return the scores (reps, runs, sets) that the run indices (reps, runs, sets) select from each set's column."""
    return np.asarray(scores[runs, np.arange(scores.shape[1])])


def aggregate(curves: Sequence[Curve], sets: Sequence[str]) -> Aggregate:
    """Compare recipes over several evaluation sets.

    Args:
        curves: one per recipe and evaluation set, which is the factor `set`.
        sets: names of the sets to use.

    Raises:
        UserError: a set is unknown, the sets differ in scale, or no run has a score on all of them.
    """
    names = tuple(dict.fromkeys(sets))
    known = dict.fromkeys(curve.factors[SET] for curve in curves if SET in curve.factors)
    asked = ",".join(names)
    if unknown := [name for name in names if name not in known]:
        listed = f"there are {', '.join(known)}" if known else "the sources name none"
        raise UserError(f"--sets {asked}: no evaluation set {unknown[0]!r}; {listed}")
    chosen = [curve for curve in curves if curve.factors.get(SET) in names]
    if len({curve.range for curve in chosen}) > 1:
        raise UserError(f"--sets {asked}: rewards of different scales have no common mean; name pass rates only")
    found = set_scores(chosen)
    if found is None:
        raise UserError(f"--sets {asked}: no run has an evaluation after the start; wait for one")
    matrices, notes = _matrices(found, names)
    if not matrices:
        raise UserError(f"--sets {asked}: no run has an evaluation after the start on every set; wait for one")
    return _aggregated(matrices, names, found, notes)


def _matrices(found: SetScores, sets: Sequence[str]) -> tuple[dict[str, Array], list[str]]:
    """Return each recipe's newest scores (runs, sets), of runs that have one on every set, and notes on the others."""
    matrices, notes = {}, list(found.notes)
    for recipe in dict.fromkeys(recipe for by_recipe in found.scores.values() for recipe in by_recipe):
        by_set = [found.scores[name].get(recipe, {}) for name in sets]
        seeds = list(dict.fromkeys(seed for runs in by_set for seed in runs))
        complete = [seed for seed in seeds if all(seed in runs for runs in by_set)]
        if len(complete) < len(seeds):
            left = counted(len(seeds) - len(complete), "run")
            notes.append(f"{recipe}: {left} without a score on every set by compute {found.compute:.4g}; left out")
        if complete:
            matrices[recipe] = np.array([[runs[seed][-1] for runs in by_set] for seed in complete])
    return matrices, notes


def _aggregated(
    matrices: Mapping[str, Array], sets: tuple[str, ...], found: SetScores, notes: Sequence[str]
) -> Aggregate:
    """Compute the statistics of each recipe's scores (runs, sets)."""
    order = sorted(matrices, key=lambda recipe: (-float(iqm(matrices[recipe])), recipe))
    every = np.concatenate([matrices[recipe].ravel() for recipe in order])
    thresholds = np.linspace(min(0.0, float(every.min())), float(every.max()), _TAUS)
    draws = {recipe: resample(matrices[recipe], generator(recipe, "sets")) for recipe in order}
    first = order[0]
    rows = []
    for recipe in order:
        scores, drawn = matrices[recipe], draws[recipe]
        alone = len(scores) == 1
        ends = np.percentile(profile(drawn, thresholds), _TAIL, axis=0)
        better = None
        if recipe != first:
            value = float(improvement(matrices[first], scores))
            better = _interval(value, improvement(draws[first], drawn), alone or len(matrices[first]) == 1)
        rows.append(
            AggregateRow(
                recipe=recipe,
                runs=len(scores),
                by_set=dict(zip(sets, scores.mean(axis=0).tolist(), strict=True)),
                iqm=_interval(float(iqm(scores)), iqm(drawn), alone),
                p_first_improves=better,
                profile=tuple(profile(scores, thresholds).tolist()),
                profile_low=tuple(None if alone else float(end) for end in ends[0]),
                profile_high=tuple(None if alone else float(end) for end in ends[1]),
            )
        )
    return Aggregate(
        axis=found.axis,
        compute=found.compute,
        sets=sets,
        thresholds=tuple(thresholds.tolist()),
        rows=tuple(rows),
        notes=tuple(notes),
        sentence=_sentence(rows, sets, found.compute),
    )


def _interval(value: float, draws: Array, alone: bool) -> Interval:
    """Return a value with its bootstrap interval; open bounds for a single run, which shows no spread."""
    if alone:
        return Interval(value, None, None)
    low, high = np.percentile(draws, _TAIL)
    return Interval(value, float(low), float(high))


def _sentence(rows: Sequence[AggregateRow], sets: Sequence[str], compute: float) -> str:
    first = rows[0]
    text = (
        f"over {counted(len(sets), 'set')} ({', '.join(sets)}) at compute {compute:.4g}, which all runs have spent, "
        f"{first.recipe} has the highest interquartile mean, {first.iqm.value:.3f}"
    )
    if len(rows) > 1 and rows[1].p_first_improves is not None:
        text += f"; it improves on {rows[1].recipe} with probability {rows[1].p_first_improves.value:.2f}"
        if rows[1].p_first_improves.low is None:
            text += " (one run shows no spread: more seeds give an interval)"
        else:
            text += f" ({rows[1].p_first_improves.low:.2f} to {rows[1].p_first_improves.high:.2f})"
    return text
