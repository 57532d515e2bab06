"""Selection of the points of a fit: the window, and the role of R0.

The paper does not say how R0 is obtained; an error of 0.05 in it moves A by about 0.014. The modes:

    a number   R0 is fixed; evaluations at compute 0 are left out.
    "first"    R0 is fitted. The first evaluation of every seed counts as a noisy observation, even where
               `min_compute` cuts off the rest of the early part. At compute 0 it observes R0 itself; later,
               only the curve there.
    "free"     R0 is fitted to the points of the window only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array, Curve
from sweeps.errors import UserError
from sweeps.fit.family import FAMILIES, Family

# A run keeps at least this many points: widely spaced neighbours would hide the bend between them.
_OF_A_RUN = 40
R0Mode = float | Literal["first", "free"]


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit: R0 rule, compute window, family and robustness.

    min_compute and max_compute are inclusive, in the curve's unit; asymptote fixes A; family is a name of
    `sweeps.fit.family.FAMILIES`; robust gives points far from the curve less weight.
    """

    r0: R0Mode = "first"
    min_compute: float | None = None
    max_compute: float | None = None
    asymptote: float | None = None
    family: str = "sigmoid"
    robust: bool = False

    def inside(self, compute: Array) -> NDArray[np.bool_]:
        """Return which computes (n,) lie in the window."""
        low, high = self.min_compute, self.max_compute
        return (compute >= (-np.inf if low is None else low)) & (compute <= (np.inf if high is None else high))

    @property
    def shape(self) -> Family:
        """The curve family that the options name.

        Raises:
            UserError: no such family.
        """
        if self.family not in FAMILIES:
            raise UserError(f"--family {self.family!r}: unknown; choose one of {', '.join(FAMILIES)}, all")
        return FAMILIES[self.family]

    @property
    def sigmoid(self) -> bool:
        """Return whether the sigmoid is fitted with A free; only then are other laws compared with it."""
        return self.family == "sigmoid" and self.asymptote is None


@dataclass(frozen=True)
class Points:
    """The points of a fit, ordered by seed and compute; each (n,). variance: of their sampling errors, if known."""

    compute: Array
    reward: Array
    variance: Array | None
    seed: NDArray[np.intp]

    @property
    def seeds(self) -> int:
        """Number of seeds. Seeds are numbered from 0."""
        return int(self.seed.max()) + 1

    def take(self, keep: NDArray[np.bool_]) -> Points:
        """Return the points selected by a mask, with seeds renumbered from 0."""
        _, seed = np.unique(self.seed[keep], return_inverse=True)
        variance = None if self.variance is None else self.variance[keep]
        return Points(self.compute[keep], self.reward[keep], variance, seed.astype(np.intp))


def select(curve: Curve, options: FitOptions) -> Points:
    """Select the points within the window, and first evaluations where they observe R0.

    Their compute is converted to the peak of the learning rate (`sweeps.fit.schedule`).
    """
    keep = options.inside(curve.compute)
    if not options.shape.from_zero or not isinstance(options.r0, str) or options.family == "sigmoid_zero":
        keep &= curve.compute > 0
    elif options.r0 == "first":
        _, seeds = np.unique(curve.seed, return_inverse=True)
        first = np.full(int(seeds.max()) + 1, np.inf)
        np.minimum.at(first, seeds, curve.compute)
        keep |= (curve.compute == first[seeds]) & replace(options, min_compute=None).inside(curve.compute)
    _, seed = np.unique(curve.seed[keep], return_inverse=True)
    # Sort by reward last: with ties in compute, the result must not depend on the order of the evaluations.
    order = np.lexsort((curve.reward[keep], curve.compute[keep], seed))
    sd = None if curve.sd is None else curve.sd[keep][order]
    variance = None
    # If half of the evaluations report no error, treat all errors as unknown and weigh all points alike.
    if sd is not None and sd.size and float(np.median(sd)) > 0:
        # An evaluation whose samples all agree reports an error of 0, but is not infinitely precise.
        variance = np.maximum(sd, 0.5 * float(np.median(sd))) ** 2
    at_peak = curve.compute if curve.at_peak is None else curve.at_peak
    return Points(at_peak[keep][order], curve.reward[keep][order], variance, seed[order].astype(np.intp))


def grouped(points: Points, most: int) -> Points:
    """Average points down to about `most`: neighbours of one seed first, and whole seeds if there are too many.

    Neighbours are averaged as long as each run keeps `_OF_A_RUN` points. With more seeds, groups of seeds are merged
    into one run each: the common curve keeps its resolution. Evaluations at compute 0 are not averaged with later ones.
    """
    seeds, block = points.seeds, -(-len(points.reward) // most)
    if block == 1 or most >= _OF_A_RUN * seeds:
        return _in_blocks(points, block)
    groups = -(-seeds // block)
    group_of = np.arange(seeds) * groups // seeds
    group = group_of[points.seed]
    order = np.lexsort((points.seed, points.compute, group))
    variance = None if points.variance is None else points.variance[order]
    merged = Points(points.compute[order], points.reward[order], variance, group[order])
    # A block holds one point of each seed in the group; more where even a single run is too long.
    return _in_blocks(merged, block if groups == 1 else np.bincount(group_of))


def _in_blocks(points: Points, block: int | NDArray[np.intp]) -> Points:
    """Average blocks of `block` neighbours in a run: one size for all runs, or one per run."""
    if np.max(block) == 1:
        return points
    n = len(points.reward)
    start = np.flatnonzero(np.concatenate([[True], points.seed[1:] != points.seed[:-1]]))
    position = np.arange(n) - np.repeat(start, np.diff(np.append(start, n)))
    size = np.broadcast_to(block, points.seeds)[points.seed]
    key = np.where(points.compute > 0, 1 + position // size, 0)
    fresh = np.concatenate([[True], (points.seed[1:] != points.seed[:-1]) | (key[1:] != key[:-1])])
    cell = np.cumsum(fresh) - 1
    count = np.bincount(cell)

    def mean(values: Array) -> Array:
        return np.asarray(np.bincount(cell, values) / count)

    with np.errstate(divide="ignore"):
        # The geometric mean: a curve is nearly straight in log compute.
        compute = np.where(points.compute[fresh] > 0, np.exp(mean(np.log(points.compute))), 0.0)
    variance = None if points.variance is None else mean(points.variance) / count
    return Points(compute, mean(points.reward), variance, points.seed[fresh])


def fits_r0(options: FitOptions) -> bool:
    """Return whether R0 is a fitted parameter. A power law always fits it, as the reward at its first point."""
    if options.family in ("power_law", "constant"):
        return options.family == "power_law"
    return isinstance(options.r0, str) and options.family != "sigmoid_zero"
