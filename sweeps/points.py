"""From a curve to a least-squares problem: the window, R0, bounds and weights.

How R0 enters (the paper does not say; an error of 0.05 in it moves A by about 0.014):

    a number   R0 is that, exactly; evaluations at compute 0 are left out.
    "first"    R0 is fitted, and the first evaluation of every seed is an observation of it, with its error,
               also where `min_compute` cuts the rest of the early part off. At compute 0 it observes R0
               itself; later, only the curve there.
    "free"     R0 is fitted to the points of the window, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sweeps import noise, profile
from sweeps.curve import Curve
from sweeps.profile import Array, Problem

# The penalty on offsets between the seeds given: twice the published spread of A, weak on purpose.
_RIDGE_SD = 0.03

R0Mode = float | Literal["first", "free"]


@dataclass(frozen=True)
class FitOptions:
    """How to fit. min_compute and max_compute are inclusive, in the curve's unit; asymptote fixes A."""

    r0: R0Mode = "first"
    min_compute: float | None = None
    max_compute: float | None = None
    asymptote: float | None = None


@dataclass(frozen=True)
class Points:
    """The points of a fit, by seed and compute; each (n,). variance: of their own errors, if known."""

    compute: Array
    reward: Array
    variance: Array | None
    seed: NDArray[np.intp]


def select(curve: Curve, options: FitOptions) -> Points:
    """The points within the window, and the first evaluations where they observe R0."""
    low = -np.inf if options.min_compute is None else options.min_compute
    high = np.inf if options.max_compute is None else options.max_compute
    keep = (curve.compute >= low) & (curve.compute <= high)
    if options.r0 == "first":
        for label in np.unique(curve.seed):
            own = curve.seed == label
            keep |= own & (curve.compute == curve.compute[own].min()) & (curve.compute <= high)
    elif options.r0 != "free":
        keep &= curve.compute > 0
    _, seed = np.unique(curve.seed[keep], return_inverse=True)
    order = np.lexsort((curve.reward[keep], curve.compute[keep], seed))
    sd = None if curve.sd is None else curve.sd[keep][order]
    variance = None
    if sd is not None and sd.size and float(np.median(sd)) > 0:
        # An evaluation whose samples all agree reports no error; it is not infinitely precise.
        variance = np.maximum(sd, 0.5 * float(np.median(sd))) ** 2
    return Points(curve.compute[keep][order], curve.reward[keep][order], variance, seed[order].astype(np.intp))


def bounds_of(reward: Array) -> tuple[float, float]:
    """Where R0 and A may lie: [0, 1] for pass rates, else well beyond the rewards seen."""
    low, high = float(reward.min()), float(reward.max())
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    return low - 2 * (high - low), high + 2 * (high - low)


def problem_of(points: Points, options: FitOptions, bounds: tuple[float, float], variance: Array) -> Problem:
    """The problem with the given variance of each point; shapes: (n,)."""
    with np.errstate(divide="ignore"):
        log_compute = np.log(points.compute)
    r0 = bounds if isinstance(options.r0, str) else (float(options.r0), float(options.r0))
    a = bounds if options.asymptote is None else (options.asymptote, options.asymptote)
    ridge = 1.0 / (_RIDGE_SD * (bounds[1] - bounds[0])) ** 2
    return Problem(log_compute, points.reward, 1.0 / variance, points.seed, ridge, r0, a)


def weighted(points: Points, options: FitOptions, bounds: tuple[float, float]) -> Problem:
    """The problem with weights from the points' own errors and from what the residuals show beyond them."""
    n = len(points.reward)
    known = np.zeros(n) if points.variance is None else points.variance
    start = known if points.variance is not None else np.full(n, float(np.var(points.reward)) / 10)
    problem = problem_of(points, options, bounds, start)
    best, _ = profile.solve(problem, polished=1, tolerance=1e-6)
    _, residual, _ = profile.evaluate(problem, best.ln_b, best.ln_c)
    # Rounding of the grid's sums of squares must stay below what counts as noise, also in noise-free data.
    floor = (1e-7 * max(1.0, float(np.abs(points.reward).max()))) ** 2
    extra = noise.extra_variance(residual, known + floor, max(n - 4, 1))
    return problem_of(points, options, bounds, known + extra + floor)
