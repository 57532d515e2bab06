"""The posterior of one law: A, B, C_mid and R0 with their intervals, joint draws, and the noise about the curve.

The same engine, priors and noise as of forecasts (`sweeps.fit.grid`, `sweeps.fit.wander`), for the fitted family alone
and with nothing on top of it. The estimate beside the interval is the least-squares one, as the source fits it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from sweeps.fit.constants import B_PRIOR, C_MID_PRIOR
from sweeps.fit.family import SIGMOID, Box, Family
from sweeps.fit.forecast import Lookout
from sweeps.fit.grid import Cells, Kind, Prior, by_weight, draw_levels, explore, log_sum, usual_prior
from sweeps.fit.least_squares import Array, Optimum, Problem
from sweeps.fit.schedule import Schedule
from sweeps.fit.wander import Noise, Noises, noise_of, noises

# Share of the posterior beyond either end of an interval.
TAIL = 0.025
# The grid is zoomed until this many cells share the weight, at most so often.
_FINE, _ROUNDS = 20, 6
# The last look has so many times the cells on either side.
_FINER = 2
# Cells of a family other than the sigmoid, whose shape is as likely anywhere in its box: two coordinates, or one.
_CELLS = {2: (10, 14), 1: (24, 1), 0: (1, 1)}
# What is fixed is known this well, on a reward scale of width 1.
_FIXED = 1e-5
# An end is open where A's best likelihood beyond it is less than this deviance behind: that of 95%.
_DEVIANCE, _TRIALS = 3.84, 41
# An interval that ends in the last part of a box ends there because the box does.
_EDGE = 0.05


@dataclass(frozen=True, eq=False)
class Draws:
    """Joint draws of a curve's parameters.

    Attributes:
        A, R0: in reward, (K,).
        B, C_mid: shape parameters, (K,); of a family other than the sigmoid its first and second one.
        family: family of the curve.
        schedule: decay of the learning rate, by which compute is counted; None where it is constant or unknown.
    """

    A: Array
    B: Array
    C_mid: Array
    R0: Array
    family: Family = SIGMOID
    schedule: Schedule | None = None

    def at_peak(self, compute: Array) -> Array:
        """Convert compute spent to its equivalent at the peak of the learning rate; any shape."""
        return compute if self.schedule is None else self.schedule.count(compute)

    def curve(self, compute: Array) -> Array:
        """R at `compute` for each draw. Shapes: (m,) -> (K, m)."""
        with np.errstate(divide="ignore"):
            log_compute = np.log(self.at_peak(compute))
        u, v = self.family.search(self.B, self.C_mid)
        g = self.family.basis(log_compute[None], u[:, None], v[:, None])
        result: Array = self.R0[:, None] * (1 - g) + self.A[:, None] * g
        return result


@dataclass(frozen=True, eq=False)
class Law:
    """Posterior of one law's parameters as weighted grid cells.

    Attributes:
        family: the fitted family.
        cells: k grid cells whose weights sum to 1; u and v are the family's search coordinates, R0 and A are unit-free:
            (reward - bottom) / width.
        log_prior: log prior of each cell's shape, up to a constant, (k,).
        best: the least-squares solution.
        box: limits of the search coordinates.
        a_bounds: lowest and highest value of A, in reward; equal where A is fixed.
        bottom, width: lower end and width of the reward's scale. bounded: whether rewards cannot leave it.
        noise: noise of evaluations about the curve.
        schedule: decay of the learning rate, by which compute is counted; None where it is constant or unknown.
    """

    family: Family
    cells: Cells
    log_prior: Array
    best: Optimum
    box: Box
    a_bounds: tuple[float, float]
    bottom: float
    width: float
    bounded: bool
    noise: Noise
    schedule: Schedule | None = None

    @property
    def weight(self) -> Array:
        """Posterior weight of each cell, (k,); they sum to 1."""
        return np.exp(self.cells.log_weight)

    def _asymptote(self) -> tuple[Array, Array]:
        """Mean and standard deviation of A in each cell, in reward; (k,)."""
        return self.bottom + self.width * self.cells.mean[1], self.width * np.sqrt(self.cells.variance)

    def asymptote_interval(self) -> tuple[float, float]:
        """A's interval; an end that the data leave open is a bound of A. A plateau there is for the verdict."""
        low, high = self.a_bounds
        if low == high:
            return low, low
        mean, sd = self._asymptote()
        weight = self.weight

        def beyond(value: float, level: float) -> float:
            return float(weight @ ndtr((value - mean) / sd)) - level

        ends = []
        for level in _LEVELS:
            # A mixture's quantile lies among those of its parts; a little aside of them, for rounding.
            each, aside = mean + sd * ndtri(level), 1e-6 * self.width
            least, most = float(each.min()) - aside, float(each.max()) + aside
            ends.append(brentq(beyond, least, most, (level,), 1e-8 * self.width))
        # The estimate is least squares and the interval the posterior's: widened, if need be, to hold it.
        first, last = max(min(ends[0], self.best.a), low), min(max(ends[1], self.best.a), high)
        # What only the priors end is open: half-way to the bound the best likelihood, over all else, is as good.
        trial = np.linspace(low, high, _TRIALS)
        # A profile likelihood: the best cell at each A, the priors of shape and of A taken off.
        # The square about each cell's mean, multiplied out to a product of matrices; without units no digits are lost.
        at, own, precision = (trial - self.bottom) / self.width, self.cells.mean[1], 1 / self.cells.variance
        top = self.cells.log_weight - self.log_prior + 0.5 * np.log(precision) - 0.5 * precision * own**2
        powers = np.stack([-0.5 * at**2, at, np.ones(_TRIALS)], axis=1)
        log_density = powers @ np.stack([precision, precision * own, top])
        centre, spread = usual_prior(self.bounded)[1]
        likely = log_density.max(1) + 0.5 * ((at - centre) / spread) ** 2
        good = trial[likely > likely.max() - 0.5 * _DEVIANCE]
        down, up = (good <= 0.5 * (low + first)).any(), (good >= 0.5 * (high + last)).any()
        return (low if down else first), (high if up else last)

    def shape_interval(self, axis: int) -> tuple[float | None, float | None]:
        """Interval of a search coordinate, 0 or 1; None for an end where only the search's box ends it."""
        at, side = (self.cells.u, self.cells.v)[axis], self.cells.sides[axis]
        low, high = self.box[2 * axis : 2 * axis + 2]
        # Even within a cell, and all cells of one grid: the distribution goes straight from one cell's end to the next.
        start, step = float(at.min()), float(side[0]) or 1.0
        share = np.bincount(np.rint((at - start) / step).astype(np.intp), self.weight)
        ends = start + side[0] * (np.arange(len(share) + 1) - 0.5)
        first, last = np.interp(_LEVELS, np.append(0.0, share.cumsum()), ends).tolist()
        best = (self.best.u, self.best.v)[axis]
        first, last, margin = min(first, best), max(last, best), _EDGE * (high - low)
        return (None if first < low + margin else first), (None if last > high - margin else last)

    def confidence(self, values: Array) -> Array:
        """Twice the posterior beyond each trial value of A, on its lesser side: 0.05 at the ends of the 95% interval.

        That of `asymptote_interval`: the one that a fit names may reach further up (`constants.OTHERS`).

        Shapes: (k,), increasing -> (k,).

        Raises:
            ValueError: A is fixed, or the values do not increase or lie outside its bounds.
        """
        low, high = self.a_bounds
        if low == high:
            raise ValueError(f"A is fixed at {low:g}: it has no confidence curve")
        if len(values) and not ((np.diff(values) > 0).all() and low <= values[0] and values[-1] <= high):
            raise ValueError(f"values of A must increase and lie within its bounds, {low:g} to {high:g}")
        mean, sd = self._asymptote()
        chance = ndtr((values[:, None] - mean) / sd) @ self.weight
        return np.asarray(2 * np.minimum(chance, 1 - chance))

    def draw(self, count: int, rng: np.random.Generator) -> Draws:
        """Joint draws: a cell by its weight, a shape within it evenly, then A, then R0 given A, within their bounds."""
        cells = self.cells
        chosen = by_weight(self.weight, count, rng)
        u, v = (
            np.clip(at[chosen] + side[chosen] * (rng.random(count) - 0.5), low, high)
            for at, side, low, high in (
                (cells.u, cells.sides[0], *self.box[:2]),
                (cells.v, cells.sides[1], *self.box[2:]),
            )
        )
        r0, a = draw_levels(cells, chosen, self.bounded, rng)
        first, second = self.family.natural(u, v)
        if self.family.name != "logistic":
            second = np.maximum(second, np.finfo(float).tiny)
        return Draws(
            self.bottom + self.width * a, first, second, self.bottom + self.width * r0, self.family, self.schedule
        )


_LEVELS = (TAIL, 1 - TAIL)


def law_of(ahead: Lookout, problem: Problem, best: Optimum, every: Noises | None = None) -> Law:
    """The posterior of the problem's family.

    Args:
        ahead: the evaluations without units, and the units to convert back to.
        problem: least-squares problem: the family, the box of its search, and bounds of R0 and A (equal where fixed).
        best: its solution.
        every: kinds of noise to average over; None for `noises`.
    """
    family, seen, end = problem.family, ahead.seen, ahead.end
    sigmoid = family.basis is SIGMOID.basis
    kind = _SIGMOID if sigmoid else _flat_kind(family, problem.box, end)
    prior = _prior(problem, seen.bounded, ahead.bottom, ahead.width)
    every = every or noises(seen)
    rough = explore(seen, every, kind, _ROUNDS, _FINE, prior)
    # Of the box that was found a finer look, under the kinds of noise that matter: intervals are read off its cells.
    every = every.take(rough.likely)
    cells = explore(seen, every, _finer(kind), 1, _FINE, prior, rough.box).cells()
    cells = replace(cells, log_weight=cells.log_weight - log_sum(cells.log_weight))
    shift = np.log(end) if sigmoid else 0.0
    box = (*kind.box[:2], kind.box[2] + shift, kind.box[3] + shift)
    return Law(
        family, replace(cells, v=cells.v + shift), kind.log_prior(cells.u, cells.v), best, box, problem.a_bounds,
        ahead.bottom, ahead.width, seen.bounded,
        noise_of(every, cells.noise_share(len(every.log_prior)), end, ahead.width, seen.of), ahead.schedule,
    )  # fmt: skip


def _windowed(x: Array, u: Array, v: Array) -> Array:
    return SIGMOID.basis(np.log(x), u, v)


# B, and C_mid in windows: from 0.4 to 12, and from 0.02 to 10.
_SIGMOID = Kind(
    _windowed, (float(np.log(0.4)), float(np.log(12)), float(np.log(0.02)), float(np.log(10))), (8, 12),
    (*B_PRIOR, *C_MID_PRIOR),
)  # fmt: skip


def _finer(kind: Kind) -> Kind:
    """The same law with more cells."""
    return replace(kind, cells=(_FINER * kind.cells[0], _FINER * kind.cells[1]))


def _flat_kind(family: Family, box: Box, end: float) -> Kind:
    """Make a law from a family, with a flat prior of the shape over the box of its search."""
    wide = 1e3 * (1 + max(abs(side) for side in box))
    return Kind(partial(_basis, family, end), box, _CELLS[family.shape], (0.0, wide, 0.0, wide))


def _basis(family: Family, end: float, x: Array, u: Array, v: Array) -> Array:
    return family.basis(np.log(x * end), u, v)


def _prior(problem: Problem, bounded: bool, bottom: float, width: float) -> Prior:
    """Return the default prior of R0 and A, narrowed to the given value where one is fixed."""
    r0, a = usual_prior(bounded)
    if problem.r0_bounds[0] == problem.r0_bounds[1]:
        r0 = ((problem.r0_bounds[0] - bottom) / width, _FIXED)
    if problem.a_bounds[0] == problem.a_bounds[1]:
        a = ((problem.a_bounds[0] - bottom) / width, _FIXED)
    return r0, a
