"""Further fits of the same points, by which a reader judges a fit.

They decide nothing, and are computed where they are shown: a race or a ranking refits recipes by the hundred and reads
none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.as_json import AsJson
from sweeps.fit import least_squares as profile
from sweeps.fit import verdict
from sweeps.fit.least_squares import Array, Optimum
from sweeps.fit.points import FitOptions, Points, weighted

# How far R0 is moved, in units of the reward's range, to show what it does to A and B.
R0_STEP = 0.05


@dataclass(frozen=True)
class R0Effect(AsJson):
    """A and B refitted with R0 fixed `step` lower and higher than it is; None where that is no possible reward."""

    step: float
    A: tuple[float | None, float | None]
    B: tuple[float | None, float | None]


@dataclass(frozen=True, eq=False)
class Checks:
    """The fitted points and their solution, and the checks made of them, each at first use.

    Attributes:
        points: the fitted points.
        options: how they were fitted.
        bounds: lowest and highest value that R0 and A may take, in reward.
        scale: width of the reward's range.
        best: the least-squares solution.
        parameters: how many the fit has.
    """

    points: Points
    options: FitOptions
    bounds: tuple[float, float]
    scale: float
    best: Optimum
    parameters: int

    @cached_property
    def extrapolation_error(self) -> float | None:
        """Absolute error in reward, on the mean of the window's last quarter, of the curve fitted to its first half.

        None where that half cannot carry a fit.
        """
        points, end = self.points, float(self.points.compute.max())
        first, last = points.compute <= 0.5 * end, points.compute >= 0.75 * end
        half = points.take(first)
        if not len(half.reward):
            return None
        if verdict.before_fit(half.compute, half.reward, half.seed, self.parameters) is not None:
            return None
        predicted = point_prediction(half, self.options, self.bounds, points.compute[last])
        return abs(float(predicted.mean() - points.reward[last].mean()))

    @cached_property
    def R0_effect(self) -> R0Effect | None:
        """A and B refitted with R0 fixed a step lower and higher; None for other families or a fixed A."""
        if not self.options.sigmoid:
            return None
        problem, best, step = weighted(self.points, self.options, self.bounds), self.best, R0_STEP * self.scale
        found: list[tuple[float | None, float | None]] = []
        for r0 in (best.r0 - step, best.r0 + step):
            if not problem.a_bounds[0] <= r0 < best.a:
                found.append((None, None))
                continue
            moved = profile.polish(replace(problem, r0_bounds=(r0, r0)), best.u, best.v, tolerance=1e-5)
            found.append((moved.a, float(np.exp(moved.u))))
        return R0Effect(step, (found[0][0], found[1][0]), (found[0][1], found[1][1]))


def point_prediction(
    points: Points,
    options: FitOptions,
    bounds: tuple[float, float],
    compute: Array,
    seed: NDArray[np.intp] | None = None,
) -> Array:
    """Predict rewards at other computes by the least-squares curve of some points, without an interval.

    Args:
        points: the points to fit.
        options: how R0 enters, and the family.
        bounds: lowest and highest reward.
        compute: where to predict, (m,).
        seed: number in `points.seed` of the seed to predict for, -1 for one that is not among them, (m,); None for the
            mean over seeds.

    Returns:
        Predicted rewards, (m,).
    """
    problem = weighted(points, options, bounds)
    best = profile.solve(problem, tolerance=1e-6)
    with np.errstate(divide="ignore"):
        g = problem.family.at(np.log(compute), best.u, best.v)
    offset = np.zeros(1) if seed is None else np.append(best.seed_offset, 0.0)[seed]
    result: Array = best.r0 * (1 - g) + (best.a + offset) * g
    return result
