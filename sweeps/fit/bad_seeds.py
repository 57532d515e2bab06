"""Detection of outlier seeds, which are reported and left out of the curve.

A seed is compared with the median of the others, over the later half of the compute that it shares with them. Sound
seeds differ by the noise of their means, the wander of a policy and the published spread of asymptotes; a seed that is
further off than `BAD_SEED` times that is left out of the curve, the worst first, as long as most seeds agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.fit.constants import BAD_SEED, MEANS_SD


@dataclass(frozen=True)
class BadSeed(AsJson):
    """A seed that left the others.

    Attributes:
        seed: its label.
        since: compute from which it lies off, in the curve's unit.
        by: median of its rewards less those of the others, over the later half; negative below them.
    """

    seed: str
    since: float
    by: float


def without_bad_seeds(curve: Curve, until: float | None = None) -> tuple[Curve, tuple[BadSeed, ...]]:
    """Split off outlier seeds: return the curve of the seeds that agree, and those that were left out.

    Nothing is left out unless a majority of the seeds agrees: of two seeds it cannot be told which one went bad.

    Args:
        curve: evaluations of one recipe, all seeds.
        until: largest compute that is looked at, in the curve's unit, so that a fit of the early part does not know
            what came later; None for all of it.
    """
    found: list[BadSeed] = []
    left = curve if until is None else curve.take(curve.compute <= until)
    seeds = len(np.unique(left.seed))
    while len(np.unique(left.seed)) > 2 and (worst := _worst(left)) is not None:
        found.append(worst)
        left = left.take(left.seed != worst.seed)
    if not found or 2 * len(found) >= seeds or disagreeing(left) is not None:
        return curve, ()
    return curve.take(~np.isin(curve.seed, [bad.seed for bad in found])), tuple(found)


def disagreeing(curve: Curve) -> BadSeed | None:
    """The lower of two seeds that lie further apart than honest seeds do; None if there are not two, or they agree."""
    if len(np.unique(curve.seed)) != 2:
        return None
    return min(_beyond(curve), key=lambda pair: pair[0].by, default=(None, 0.0))[0]


def _beyond(curve: Curve) -> list[tuple[BadSeed, float]]:
    """Seeds that lie off the median of the others by more than the limit, each with its limit."""
    measured = [found for label in np.unique(curve.seed) if (found := _off(curve, str(label))) is not None]
    return [(found, limit) for found, limit in measured if abs(found.by) > limit]


def _worst(curve: Curve) -> BadSeed | None:
    return max(_beyond(curve), key=lambda pair: abs(pair[0].by) / pair[1], default=(None, 0.0))[0]


def _off(curve: Curve, label: str) -> tuple[BadSeed, float] | None:
    """Return a seed's distance from the median of the others and the limit for it; None with under 3 evaluations."""
    mine = curve.seed == label
    others = [str(other) for other in np.unique(curve.seed) if other != label]
    end = min(float(curve.compute[mine].max()), max(float(curve.compute[curve.seed == s].max()) for s in others))
    later = mine & (curve.compute >= 0.5 * end) & (curve.compute <= end)
    if int(later.sum()) < 3:
        return None
    at, own = curve.compute[later], curve.reward[later]
    paths = []
    for other in others:
        theirs = curve.seed == other
        order = np.argsort(curve.compute[theirs], kind="stable")
        x, y = curve.compute[theirs][order], curve.reward[theirs][order]
        paths.append(np.where(at <= x[-1], np.interp(at, x, y), np.nan))
    stacked = np.array(paths)
    seen = ~np.isnan(stacked).all(axis=0)
    if int(seen.sum()) < 3:
        return None
    gap: Array = own[seen] - np.nanmedian(stacked[:, seen], axis=0)
    # Twice the variance of one seed's mean (this one's and the others' median), and the noise of the evaluations, told
    # by differences of neighbours, which a lasting gap leaves alone.
    honest = 2 * (MEANS_SD * curve.scale) ** 2 + float(np.var(np.diff(gap))) / len(gap)
    off = np.abs(gap) > 0.5 * abs(float(gap.mean()))
    first = float(at[seen][np.argmax(off)])
    return BadSeed(label, first, float(np.median(gap))), BAD_SEED * float(np.sqrt(honest))
