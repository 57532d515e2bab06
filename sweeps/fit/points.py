"""Selection of the evaluations that a fit uses: the range of compute, and the role of R0.

The paper (arXiv 2510.13786) does not say how R0 is obtained. An error of 0.05 in R0 moves A by about 0.014. So
`FitOptions.r0` offers a choice:

    a number   R0 is fixed; evaluations at compute 0 are left out.
    "first"    R0 is fitted. The first evaluation of every seed counts as a noisy observation, even where
               `min_compute` leaves out the rest of the early part. An evaluation at compute 0 observes
               R0 itself, a later one only the curve at its compute.
    "free"     R0 is fitted to the points within `min_compute` and `max_compute` only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array, Curve
from sweeps.errors import UserError
from sweeps.fit.family import FAMILIES, Family

# Averaging leaves at least this many points per run, because widely spaced points would hide the bend between them.
_MIN_POINTS_OF_RUN = 40
R0Mode = float | Literal["first", "free"]


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit: how R0 is treated, range of compute, family and robustness.

    Attributes:
        r0: value of R0 or how it is fitted, see the module's docstring.
        min_compute, max_compute: range of compute, inclusive, in the curve's unit; None for no limit.
        asymptote: fixed A; None to fit A.
        family: a name in `sweeps.fit.family.FAMILIES`.
        robust: whether points far from the curve get less weight.
    """

    r0: R0Mode = "first"
    min_compute: float | None = None
    max_compute: float | None = None
    asymptote: float | None = None
    family: str = "sigmoid"
    robust: bool = False

    def inside(self, compute: Array) -> NDArray[np.bool_]:
        """Return a mask of the computes (n,) that are within the limits."""
        low, high = self.min_compute, self.max_compute
        return (compute >= (-np.inf if low is None else low)) & (compute <= (np.inf if high is None else high))

    @property
    def curve_family(self) -> Family:
        """The curve family with the name `family`.

        Raises:
            UserError: no such family.
        """
        if self.family not in FAMILIES:
            raise UserError(f"--family {self.family!r}: unknown; choose one of {', '.join(FAMILIES)}, all")
        return FAMILIES[self.family]

    @property
    def is_free_sigmoid(self) -> bool:
        """True if the sigmoid is fitted with A free. Only then are other laws compared with it."""
        return self.family == "sigmoid" and self.asymptote is None


@dataclass(frozen=True)
class Points:
    """The points of a fit, ordered by seed and compute; arrays (n,).

    Attributes:
        compute: effective compute (`sweeps.fit.schedule`), in the curve's unit.
        reward: reward of the evaluation.
        variance: variance of the sampling error of each reward; None if unknown.
        seed: number of the seed, from 0.
    """

    compute: Array
    reward: Array
    variance: Array | None
    seed: NDArray[np.intp]

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return int(self.seed.max()) + 1

    def take(self, keep: NDArray[np.bool_]) -> Points:
        """Return the points selected by a mask, with seeds renumbered from 0."""
        _, seed = np.unique(self.seed[keep], return_inverse=True)
        variance = None if self.variance is None else self.variance[keep]
        return Points(self.compute[keep], self.reward[keep], variance, seed.astype(np.intp))


def select(curve: Curve, options: FitOptions) -> Points:
    """Select the points within the options' range of compute, and convert their compute to effective compute.

    If `options.r0` is `first`, the first evaluation of every seed is added, even if it is below `min_compute`. If R0 is
    fixed, or the family is not defined at compute 0, evaluations at compute 0 are left out.
    """
    keep = options.inside(curve.compute)
    if not options.curve_family.from_zero or not isinstance(options.r0, str) or options.family == "sigmoid_zero":
        keep &= curve.compute > 0
    elif options.r0 == "first":
        _, seeds = np.unique(curve.seed, return_inverse=True)
        first = np.full(int(seeds.max()) + 1, np.inf)
        np.minimum.at(first, seeds, curve.compute)
        keep |= (curve.compute == first[seeds]) & replace(options, min_compute=None).inside(curve.compute)
    _, seed = np.unique(curve.seed[keep], return_inverse=True)
    # Sorting ties in compute by reward makes the result independent of the order of the evaluations.
    order = np.lexsort((curve.reward[keep], curve.compute[keep], seed))
    sd = None if curve.sd is None else curve.sd[keep][order]
    variance = None
    # If half of the evaluations report an error of 0, all errors count as unknown, and all points weigh the same.
    if sd is not None and sd.size and float(np.median(sd)) > 0:
        # An evaluation whose samples all agree reports an error of 0, but is not infinitely precise: set a lower limit.
        variance = np.maximum(sd, 0.5 * float(np.median(sd))) ** 2
    at_peak = curve.compute if curve.at_peak is None else curve.at_peak
    return Points(at_peak[keep][order], curve.reward[keep][order], variance, seed[order].astype(np.intp))


def average_neighbours(points: Points, limit: int) -> Points:
    """Average neighbouring points until about `limit` points remain.

    If each seed then keeps `_MIN_POINTS_OF_RUN` points, neighbours of one seed are averaged. With too many seeds for
    that, seeds are divided into groups, and each group is merged into one run, so that the common curve keeps its
    resolution. Evaluations at compute 0 are not averaged with later ones.
    """
    seeds, block = points.seeds, -(-len(points.reward) // limit)
    if block == 1 or limit >= _MIN_POINTS_OF_RUN * seeds:
        return _average_blocks(points, block)
    groups = -(-seeds // block)
    group_of = np.arange(seeds) * groups // seeds
    group = group_of[points.seed]
    order = np.lexsort((points.seed, points.compute, group))
    variance = None if points.variance is None else points.variance[order]
    merged = Points(points.compute[order], points.reward[order], variance, group[order])
    # A block holds one point of each seed in the group, or more points if even a single merged run is too long.
    return _average_blocks(merged, block if groups == 1 else np.bincount(group_of))


def _average_blocks(points: Points, block: int | NDArray[np.intp]) -> Points:
    """Average blocks of neighbours within each run.

    `block` is the number of points per block, for all runs or for each.
    """
    if np.max(block) == 1:
        return points
    n = len(points.reward)
    start = np.flatnonzero(np.concatenate([[True], points.seed[1:] != points.seed[:-1]]))
    position = np.arange(n) - np.repeat(start, np.diff(np.append(start, n)))
    block_size = np.broadcast_to(block, points.seeds)[points.seed]
    key = np.where(points.compute > 0, 1 + position // block_size, 0)
    starts_block = np.concatenate([[True], (points.seed[1:] != points.seed[:-1]) | (key[1:] != key[:-1])])
    block_of = np.cumsum(starts_block) - 1
    count = np.bincount(block_of)

    def mean(values: Array) -> Array:
        return np.asarray(np.bincount(block_of, values) / count)

    with np.errstate(divide="ignore"):
        # A curve is nearly straight in log compute, so use the geometric mean.
        compute = np.where(points.compute[starts_block] > 0, np.exp(mean(np.log(points.compute))), 0.0)
    variance = None if points.variance is None else mean(points.variance) / count
    return Points(compute, mean(points.reward), variance, points.seed[starts_block])


def fits_r0(options: FitOptions) -> bool:
    """Return whether R0 is a fitted parameter. A power law always fits it: it is the reward at the first point."""
    if options.family in ("power_law", "constant"):
        return options.family == "power_law"
    return isinstance(options.r0, str) and options.family != "sigmoid_zero"
