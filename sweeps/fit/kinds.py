"""Kinds of mean curve that forecasts average over, each with the grid and the prior of its shape.

    sigmoid   g = 1 / (1 + (m / x)^B)                       arXiv 2510.13786, eq. 1
    weibull   g = 1 - exp(-(x / s)^k)                       the exponential among them, k = 1 (arXiv 2507.18014)
    delayed   g = 1 - exp(-(x - t)+ / s)                    nothing happens before t
    line      g = x                                         no ceiling
    constant  g = 0
    walk      the last value: a level that wanders on without a trend

x is compute in units of the window's end, so nothing depends on its unit. The mean is R0 (1 - g) + A g, A the ceiling
where there is one and the reward at the window's end where there is none. Each may drift slowly on top, or have jumped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sweeps.fit.constants import KIND_PRIORS, P_CONSTANT, P_LINE, P_WALK, SCALE_PRIOR, STRAIGHT
from sweeps.fit.family import Box, logistic_of
from sweeps.fit.least_squares import Array


@dataclass(frozen=True)
class Kind:
    """A kind of curve: its basis function, the box and grid of its shape, and their priors.

    Attributes:
        prior: weight before the data.
        ceiling: whether the curve has an asymptote, which is then A.
        basis: g(x, u, v), for compute x in windows and shape coordinates that broadcast against it.
        box: limits of the shape coordinates, (u low, u high, v low, v high); equal where there is no such coordinate.
        cells: number of grid cells in u and in v.
        likely: prior of the shape, (mean of u, its standard deviation, mean of v, its standard deviation).
    """

    name: str
    prior: float
    ceiling: bool
    basis: Callable[[Array, Array, Array], Array]
    box: Box = (0.0, 0.0, 0.0, 0.0)
    cells: tuple[int, int] = (1, 1)
    likely: Box = (0.0, 1.0, 0.0, 1.0)

    def log_prior(self, u: Array, v: Array) -> Array:
        """Log prior of the shapes of cells, up to a constant; (k,)."""
        centre_u, sd_u, centre_v, sd_v = self.likely
        result: Array = -0.5 * (((u - centre_u) / sd_u) ** 2 + ((v - centre_v) / sd_v) ** 2)
        return result

    @cached_property
    def _steps(self) -> tuple[Array, Array]:
        """How many steps each cell's centre lies from the lower ends of a box, in u and in v, (k,) each."""
        rows, columns = (
            np.arange(count if self.box[i + 1] > self.box[i] else 1) + 0.5
            for i, count in zip((0, 2), self.cells, strict=True)
        )
        return np.repeat(rows, len(columns)), np.tile(columns, len(rows))

    def cells_in(self, box: Box) -> tuple[Array, Array, float]:
        """Centres of a box's cells, (k,) each, and the area of one; sides without width count 1."""
        across, along = ((box[i + 1] - box[i]) / count for i, count in zip((0, 2), self.cells, strict=True))
        steps = self._steps
        return box[0] + across * steps[0], box[2] + along * steps[1], (across or 1.0) * (along or 1.0)

    @cached_property
    def log_norm(self) -> float:
        """Logarithm of the prior's integral over the whole box, which normalizes `log_prior`."""
        u, v, area = self.cells_in(self.box)
        return float(np.log(np.exp(self.log_prior(u, v)).sum() * area))

    def shape(self, x: Array, u: Array, v: Array) -> Array:
        """Return g at computes x of 0 or more, in windows; all arguments broadcast."""
        with silent():
            return self.basis(x, u, v)


def silent() -> np.errstate:
    """Return a context in which a basis function at its limits, compute 0 among them, warns of nothing."""
    return np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore")


def drifting(x: Array) -> Array:
    """A slow drift on top of a curve, 1 at the window's end."""
    result: Array = np.where(x <= STRAIGHT, x, STRAIGHT + np.tanh(np.maximum(x - STRAIGHT, 0.0)))
    return result


def _sigmoid(x: Array, u: Array, v: Array) -> Array:
    return logistic_of(np.exp(u) * (np.log(x) - v))


def _weibull(x: Array, u: Array, v: Array) -> Array:
    # A power by its logarithm, which takes a fraction of the time.
    result: Array = -np.expm1(-np.exp(np.exp(u) * (np.log(x) - v)))
    return result


def _delayed(x: Array, u: Array, v: Array) -> Array:
    result: Array = -np.expm1(-np.maximum(x - u, 0.0) / np.exp(v))
    return result


def _line(x: Array, u: Array, v: Array) -> Array:
    slower = STRAIGHT * (1 + np.log(np.maximum(x, STRAIGHT) / STRAIGHT))
    # Adding 0 (u + v) gives it the shape of the grid, as every basis function has.
    result: Array = np.where(x <= STRAIGHT, x, slower) + 0.0 * (u + v)
    return result


def _constant(x: Array, u: Array, v: Array) -> Array:
    return np.zeros(np.broadcast_shapes(np.shape(x), np.shape(u), np.shape(v)))


def _log(low: float, high: float) -> tuple[float, float]:
    return float(np.log(low)), float(np.log(high))


def _kind(name: str, basis: Callable[[Array, Array, Array], Array], box: Box, cells: tuple[int, int]) -> Kind:
    prior, shape = KIND_PRIORS[name]
    return Kind(name, prior, True, basis, box, cells, (*shape, *SCALE_PRIOR))


SIGMOID = _kind("sigmoid", _sigmoid, (*_log(0.4, 12.0), *_log(0.02, 10.0)), (8, 12))
KINDS = (
    SIGMOID,
    _kind("weibull", _weibull, (*_log(0.35, 4.0), *_log(0.02, 8.0)), (6, 9)),
    _kind("delayed", _delayed, (0.05, 0.85, *_log(0.02, 5.0)), (7, 7)),
    Kind("line", P_LINE, False, _line),
    Kind("constant", P_CONSTANT, True, _constant),
)
WALK = Kind("walk", P_WALK, False, _constant)
