"""Detection of outlier seeds, which are reported and left out of the curve.

A seed is compared with the median of the other seeds, over the later half of the compute that they share. Healthy seeds
also differ: by the noise of their means, the drift of a policy and the published spread of asymptotes. Seeds whose gap
exceeds `BAD_SEED` standard deviations of such healthy differences are left out, the worst first, provided that most
seeds agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.fit.constants import BAD_SEED, MEANS_SD


@dataclass(frozen=True)
class BadSeed(AsJson):
    """An outlier seed.

    Attributes:
        seed: label of the seed.
        since: compute at which the gap to the other seeds begins, in the curve's unit.
        by: median gap of the seed's rewards to those of the others, over the later half; negative if the seed is below.
    """

    seed: str
    since: float
    by: float


def without_bad_seeds(curve: Curve, until: float | None = None) -> tuple[Curve, tuple[BadSeed, ...]]:
    """Remove outlier seeds from a curve. Return the curve of the other seeds, and the removed seeds.

    Seeds are removed only if a majority agrees: with two seeds, either could be the outlier.

    Args:
        curve: evaluations of one recipe, all seeds.
        until: largest compute to use, in the curve's unit, so that a fit of the early part cannot use later
            evaluations; None for no limit.
    """
    outliers: list[BadSeed] = []
    remaining = curve if until is None else curve.take(curve.compute <= until)
    seeds = len(np.unique(remaining.seed))
    while len(np.unique(remaining.seed)) > 2 and (outlier := _worst_seed(remaining)) is not None:
        outliers.append(outlier)
        remaining = remaining.take(remaining.seed != outlier.seed)
    if not outliers or 2 * len(outliers) >= seeds or find_disagreement(remaining) is not None:
        return curve, ()
    return curve.take(~np.isin(curve.seed, [bad.seed for bad in outliers])), tuple(outliers)


def find_disagreement(curve: Curve) -> BadSeed | None:
    """Return the lower of a curve's two seeds if they differ more than healthy seeds do, else None.

    A curve with more or fewer seeds gives None.
    """
    if len(np.unique(curve.seed)) != 2:
        return None
    return min(_outlying_seeds(curve), key=lambda pair: pair[0].by, default=(None, 0.0))[0]


def _outlying_seeds(curve: Curve) -> list[tuple[BadSeed, float]]:
    """Return each seed whose gap to the median of the others exceeds the limit, with that limit."""
    gaps = [gap for label in np.unique(curve.seed) if (gap := _gap_and_limit(curve, str(label))) is not None]
    return [(gap, limit) for gap, limit in gaps if abs(gap.by) > limit]


def _worst_seed(curve: Curve) -> BadSeed | None:
    return max(_outlying_seeds(curve), key=lambda pair: abs(pair[0].by) / pair[1], default=(None, 0.0))[0]


def _gap_and_limit(curve: Curve, label: str) -> tuple[BadSeed, float] | None:
    """Return a seed's gap to the median of the others, and the limit of a healthy gap.

    None if fewer than 3 evaluations of the seed can be compared.
    """
    of_seed = curve.seed == label
    others = [str(other) for other in np.unique(curve.seed) if other != label]
    end = min(float(curve.compute[of_seed].max()), max(float(curve.compute[curve.seed == s].max()) for s in others))
    later = of_seed & (curve.compute >= 0.5 * end) & (curve.compute <= end)
    if int(later.sum()) < 3:
        return None
    computes, reward = curve.compute[later], curve.reward[later]
    paths = []
    for other in others:
        other_seed = curve.seed == other
        order = np.argsort(curve.compute[other_seed], kind="stable")
        x, y = curve.compute[other_seed][order], curve.reward[other_seed][order]
        # The other run has no value beyond its end: use NaN instead of its last value.
        paths.append(np.where(computes <= x[-1], np.interp(computes, x, y), np.nan))
    stacked = np.array(paths)
    covered = ~np.isnan(stacked).all(axis=0)
    if int(covered.sum()) < 3:
        return None
    gap: Array = reward[covered] - np.nanmedian(stacked[:, covered], axis=0)
    # Variance of a healthy gap: that of this seed's mean, that of the others' median (about the same), and the noise of
    # evaluations. The noise comes from differences of neighbours, in which a lasting gap cancels.
    variance = 2 * (MEANS_SD * curve.scale) ** 2 + float(np.var(np.diff(gap))) / len(gap)
    is_off = np.abs(gap) > 0.5 * abs(float(gap.mean()))
    since = float(computes[covered][np.argmax(is_off)])
    return BadSeed(label, since, float(np.median(gap))), BAD_SEED * float(np.sqrt(variance))
