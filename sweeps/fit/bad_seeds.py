"""Detection of outlier seeds, which are reported and left out of the curve.

A seed is compared with the median of the others, over the later half of the compute range they share. Healthy seeds
differ through the noise of their means, the drift of a policy and the published spread of asymptotes. A seed whose gap
exceeds `BAD_SEED` standard deviations of these is left out of the curve, the worst first, provided that most seeds
agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.fit.constants import BAD_SEED, MEANS_SD


@dataclass(frozen=True)
class BadSeed(AsJson):
    """A seed that departed from the others.

    Attributes:
        seed: its label.
        since: compute at which the gap begins, in the curve's unit.
        by: median of its rewards minus those of the others, over the later half; negative if it is below them.
    """

    seed: str
    since: float
    by: float


def without_bad_seeds(curve: Curve, until: float | None = None) -> tuple[Curve, tuple[BadSeed, ...]]:
    """Split off outlier seeds. Returns the curve of the agreeing seeds, and the seeds left out.

    Nothing is left out unless a majority of the seeds agrees: with two seeds, either could be the bad one.

    Args:
        curve: evaluations of one recipe, all seeds.
        until: largest compute to use, in the curve's unit, so that a fit of the early part cannot use later
            evaluations; None for no limit.
    """
    outliers: list[BadSeed] = []
    remaining = curve if until is None else curve.take(curve.compute <= until)
    seeds = len(np.unique(remaining.seed))
    while len(np.unique(remaining.seed)) > 2 and (worst := _worst(remaining)) is not None:
        outliers.append(worst)
        remaining = remaining.take(remaining.seed != worst.seed)
    if not outliers or 2 * len(outliers) >= seeds or disagreeing(remaining) is not None:
        return curve, ()
    return curve.take(~np.isin(curve.seed, [bad.seed for bad in outliers])), tuple(outliers)


def disagreeing(curve: Curve) -> BadSeed | None:
    """Return the lower of two seeds that are further apart than healthy seeds; None if they agree or are not two."""
    if len(np.unique(curve.seed)) != 2:
        return None
    return min(_beyond(curve), key=lambda pair: pair[0].by, default=(None, 0.0))[0]


def _beyond(curve: Curve) -> list[tuple[BadSeed, float]]:
    """Return each seed whose gap to the median of the others exceeds its limit, with that limit."""
    gaps = [gap for label in np.unique(curve.seed) if (gap := _gap_and_limit(curve, str(label))) is not None]
    return [(gap, limit) for gap, limit in gaps if abs(gap.by) > limit]


def _worst(curve: Curve) -> BadSeed | None:
    return max(_beyond(curve), key=lambda pair: abs(pair[0].by) / pair[1], default=(None, 0.0))[0]


def _gap_and_limit(curve: Curve, label: str) -> tuple[BadSeed, float] | None:
    """Return a seed's gap to the median of the others and its limit; None with fewer than 3 comparable evaluations."""
    of_seed = curve.seed == label
    others = [str(other) for other in np.unique(curve.seed) if other != label]
    end = min(float(curve.compute[of_seed].max()), max(float(curve.compute[curve.seed == s].max()) for s in others))
    later = of_seed & (curve.compute >= 0.5 * end) & (curve.compute <= end)
    if int(later.sum()) < 3:
        return None
    at, reward = curve.compute[later], curve.reward[later]
    paths = []
    for other in others:
        other_seed = curve.seed == other
        order = np.argsort(curve.compute[other_seed], kind="stable")
        x, y = curve.compute[other_seed][order], curve.reward[other_seed][order]
        # A run that ended earlier has no value to compare with: do not extend it.
        paths.append(np.where(at <= x[-1], np.interp(at, x, y), np.nan))
    stacked = np.array(paths)
    covered = ~np.isnan(stacked).all(axis=0)
    if int(covered.sum()) < 3:
        return None
    gap: Array = reward[covered] - np.nanmedian(stacked[:, covered], axis=0)
    # Variance of a healthy gap: twice that of one seed's mean (this seed's and the others' median), plus the noise of
    # the evaluations. That noise is estimated from differences of neighbours, which a lasting gap does not affect.
    variance = 2 * (MEANS_SD * curve.scale) ** 2 + float(np.var(np.diff(gap))) / len(gap)
    off = np.abs(gap) > 0.5 * abs(float(gap.mean()))
    first = float(at[covered][np.argmax(off)])
    return BadSeed(label, first, float(np.median(gap))), BAD_SEED * float(np.sqrt(variance))
