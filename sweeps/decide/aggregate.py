"""Comparison of recipes over several evaluation sets at once, as in rliable (Agarwal et al. 2021, arXiv 2108.13264).

The scores of a recipe are a matrix x of shape (runs, sets).

    interquartile mean           mean of the scores of all runs and sets without the lowest and the highest quarter
    probability of improvement   mean over sets of P(x > y) + P(x = y) / 2, over all pairs of a run of x and one of y
    performance profile          fraction of the scores of all runs and sets above a threshold tau, for each tau
    interval                     percentiles 2.5 and 97.5 of the statistic over a stratified bootstrap: runs are drawn
                                 with replacement, separately for each set

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

# Number of bootstrap samples, the same as rliable uses for profiles.
REPS = 2000
# Number of thresholds of the profile, evenly spaced from 0 to the highest score.
_TAUS = 21
_TAIL = (2.5, 97.5)


@dataclass(frozen=True)
class AggregateRow(AsJson):
    """Statistics of one recipe over all sets. Intervals are 95%; their bounds are None if the recipe has only one run.

    Attributes:
        runs: number of runs with a score on every set.
        by_set: mean score over runs, by set.
        iqm: interquartile mean over runs and sets.
        p_first_improves: probability that a run of the first recipe scores higher than a run of this recipe; None for
            the first.
        profile, profile_low, profile_high: fraction of scores above each threshold, with 95% bounds.
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
    """Comparison of all recipes over several evaluation sets, the highest interquartile mean first.

    Attributes:
        axis, compute: compute axis, and the largest compute that all runs have spent.
        sets: names of the sets.
        thresholds: thresholds of the performance profiles.
        rows: one per recipe.
        notes: remarks on runs that were left out, or that end early.
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
    """Return the probability (...,) that a run of x (..., n, sets) scores higher than a run of y (..., m, sets)."""
    difference = x[..., :, None, :] - y[..., None, :, :]
    return np.asarray(((difference > 0) + 0.5 * (difference == 0)).mean(axis=(-3, -2, -1)))


def profile(scores: Array, thresholds: Array) -> Array:
    """Return the fraction (..., k) of scores (..., runs, sets) above each threshold (k,)."""
    return np.asarray((scores[..., None] > thresholds).mean(axis=(-3, -2)))


def resample(scores: Array, rng: np.random.Generator, reps: int = REPS) -> Array:
    """Return stratified bootstrap samples (reps, runs, sets) of scores (runs, sets)."""
    return take(scores, rng.integers(0, len(scores), (reps, *scores.shape)))


def take(scores: Array, runs: NDArray[np.int64]) -> Array:
    """Return resampled scores of shape (reps, runs, sets).

    Entry (i, j, s) is row runs[i, j, s] of column s of `scores`.
    """
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
    set_names = dict.fromkeys(curve.factors[SET] for curve in curves if SET in curve.factors)
    set_list = ",".join(names)
    if unknown := [name for name in names if name not in set_names]:
        available = f"there are {', '.join(set_names)}" if set_names else "the sources name none"
        raise UserError(f"--sets {set_list}: no evaluation set {unknown[0]!r}; {available}")
    used_curves = [curve for curve in curves if curve.factors.get(SET) in names]
    if len({curve.range for curve in used_curves}) > 1:
        raise UserError(f"--sets {set_list}: rewards of different scales have no common mean; name pass rates only")
    evaluations = set_scores(used_curves)
    if evaluations is None:
        raise UserError(f"--sets {set_list}: no run has an evaluation after the start; wait for one")
    matrices, notes = _score_matrices(evaluations, names)
    if not matrices:
        raise UserError(f"--sets {set_list}: no run has an evaluation after the start on every set; wait for one")
    return _compute_aggregate(matrices, names, evaluations, notes)


def _score_matrices(evaluations: SetScores, sets: Sequence[str]) -> tuple[dict[str, Array], list[str]]:
    """Return each recipe's newest scores (runs, sets), and notes on runs left out for lack of a score."""
    matrices, notes = {}, list(evaluations.notes)
    for recipe in dict.fromkeys(recipe for by_recipe in evaluations.scores.values() for recipe in by_recipe):
        by_set = [evaluations.scores[name].get(recipe, {}) for name in sets]
        seeds = list(dict.fromkeys(seed for runs in by_set for seed in runs))
        complete = [seed for seed in seeds if all(seed in runs for runs in by_set)]
        if len(complete) < len(seeds):
            excluded = counted(len(seeds) - len(complete), "run")
            notes.append(
                f"{recipe}: left out {excluded} without a score on every set by compute {evaluations.compute:.4g}"
            )
        if complete:
            matrices[recipe] = np.array([[runs[seed][-1] for runs in by_set] for seed in complete])
    return matrices, notes


def _compute_aggregate(
    matrices: Mapping[str, Array], sets: tuple[str, ...], evaluations: SetScores, notes: Sequence[str]
) -> Aggregate:
    order = sorted(matrices, key=lambda recipe: (-float(iqm(matrices[recipe])), recipe))
    all_scores = np.concatenate([matrices[recipe].ravel() for recipe in order])
    thresholds = np.linspace(min(0.0, float(all_scores.min())), float(all_scores.max()), _TAUS)
    resamples_by_recipe = {recipe: resample(matrices[recipe], generator(recipe, "sets")) for recipe in order}
    first = order[0]
    rows = []
    for recipe in order:
        scores, resamples = matrices[recipe], resamples_by_recipe[recipe]
        single_run = len(scores) == 1
        profile_bounds = np.percentile(profile(resamples, thresholds), _TAIL, axis=0)
        p_improves = None
        if recipe != first:
            value = float(improvement(matrices[first], scores))
            p_improves = _interval(
                value, improvement(resamples_by_recipe[first], resamples), single_run or len(matrices[first]) == 1
            )
        rows.append(
            AggregateRow(
                recipe=recipe,
                runs=len(scores),
                by_set=dict(zip(sets, scores.mean(axis=0).tolist(), strict=True)),
                iqm=_interval(float(iqm(scores)), iqm(resamples), single_run),
                p_first_improves=p_improves,
                profile=tuple(profile(scores, thresholds).tolist()),
                profile_low=tuple(None if single_run else float(end) for end in profile_bounds[0]),
                profile_high=tuple(None if single_run else float(end) for end in profile_bounds[1]),
            )
        )
    return Aggregate(
        axis=evaluations.axis,
        compute=evaluations.compute,
        sets=sets,
        thresholds=tuple(thresholds.tolist()),
        rows=tuple(rows),
        notes=tuple(notes),
        sentence=_sentence(rows, sets, evaluations.compute),
    )


def _interval(value: float, draws: Array, single_run: bool) -> Interval:
    """Return a value with its bootstrap interval. A single run shows no spread, so its bounds are None."""
    if single_run:
        return Interval(value, None, None)
    low, high = np.percentile(draws, _TAIL)
    return Interval(value, float(low), float(high))


def _sentence(rows: Sequence[AggregateRow], sets: Sequence[str], compute: float) -> str:
    first = rows[0]
    text = (
        f"over {counted(len(sets), 'set')} ({', '.join(sets)}) at compute {compute:.4g}, which all runs reached, "
        f"{first.recipe} has the highest interquartile mean, {first.iqm.value:.3f}"
    )
    if len(rows) > 1 and rows[1].p_first_improves is not None:
        text += f"; it improves on {rows[1].recipe} with probability {rows[1].p_first_improves.value:.2f}"
        if rows[1].p_first_improves.low is None:
            text += " (one run shows no spread: more seeds give an interval)"
        else:
            text += f" ({rows[1].p_first_improves.low:.2f} to {rows[1].p_first_improves.high:.2f})"
    return text
