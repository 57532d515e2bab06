"""Grid posterior of one law: cells over shape and noise, each solved exactly.

Given the shapes of curve and noise, R0 and A are linear and Gaussian, so each cell has its marginal likelihood in
closed form. The grid is zoomed to where the weight is: nothing depends on a start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import log, pi

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from sweeps.fit.constants import FIT_A_PRIOR, FIT_R0_PRIOR
from sweeps.fit.family import Box
from sweeps.fit.least_squares import Array
from sweeps.fit.wander import Noises, Seen

# Log weights below the best at which cells are dropped, and kinds of noise no longer looked at.
_DROPPED, _UNLIKELY = 12.0, 7.0
# A grid is zoomed to the cells within this log weight of the best, and left where that would shrink it to no less than
# this share.
_WORTH = 8.0
_SHRINKS = 0.6
# Standard deviations from an end beyond which nothing of a normal distribution is cut off by it.
_INSIDE = 7.0

Prior = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Cells:
    """Grid cells of non-negligible weight, one array entry per cell.

    Attributes:
        log_weight: log posterior weight, up to a constant; (k,), as all that follow unless another shape is given.
        u, v: shape coordinates of the cell's centre. sides (2, k): its extent in both.
        noise: index into the kinds of noise.
        precision (3, k): posterior precision of (R0, A) as upper triangle 00, 01, 11.
        mean (2, k): posterior mean of (R0, A).
    """

    log_weight: Array
    u: Array
    v: Array
    sides: Array
    noise: NDArray[np.intp]
    precision: Array
    mean: Array

    @property
    def variance(self) -> Array:
        """Posterior variance of A in each cell, (k,)."""
        p00, p01, p11 = self.precision
        return np.asarray(p00 / np.maximum(p00 * p11 - p01**2, 1e-300))

    def noise_share(self, kinds: int) -> Array:
        """Weight of each of so many kinds of noise, (J,); they sum to 1."""
        share = np.bincount(self.noise, np.exp(self.log_weight), kinds)
        return np.asarray(share / max(float(share.sum()), 1e-300))


@dataclass(frozen=True, eq=False)
class Solved:
    """Results of the Bayesian linear regression of every cell.

    Shapes, for J kinds of noise and M cells: log_evidence (J, M), precision 3 x (J, M), mean 2 x (J, M).
    """

    log_evidence: Array
    precision: tuple[Array, Array, Array]
    mean: tuple[Array, Array]


def usual_prior(bounded: bool) -> Prior:
    """Return the default prior of R0 and of A, mean and standard deviation each; twice as wide without bounds."""
    wide = 1.0 if bounded else 2.0
    return (FIT_R0_PRIOR[0], wide * FIT_R0_PRIOR[1]), (FIT_A_PRIOR[0], wide * FIT_A_PRIOR[1])


@dataclass(frozen=True, eq=False)
class Rewards:
    """Rewards of one recipe under J kinds of noise in B bases, to be regressed on curves.

    Attributes:
        seen: the evaluations. noise: kinds of noise.
        prior: mean and standard deviation of R0, and of A.
        rows: a column of ones and the rewards about the prior's mean of R0, turned to each basis, (B, n, 2).
    """

    seen: Seen
    noise: Noises
    prior: Prior
    rows: Array

    @classmethod
    def of(cls, seen: Seen, noise: Noises, prior: Prior) -> Rewards:
        """Turn one recipe's rewards to every basis."""
        one = np.ones(len(seen.x))
        return cls(seen, noise, prior, noise.turn @ np.stack([one, seen.z - prior[0][0] * one], axis=1))

    @cached_property
    def _weighed(self) -> list[Array]:
        """The rows under the precision of each kind of noise."""
        return self.noise.weighed(self.rows)

    @cached_property
    def _own(self) -> tuple[Array, Array, Array]:
        """Products of the rows with each other: ones and ones, ones and rewards, rewards and rewards; (J, 1) each."""
        (oo, oy), (_, yy) = self.noise.products(self._weighed, self.rows).transpose(1, 2, 0)[..., None]
        return oo, oy, yy

    @cached_property
    def _log_inside(self) -> tuple[float, float]:
        """Log prior probability that R0, and that A, lies in [0, 1]."""
        r0, a = (log(ndtr((1 - centre) / scale) - ndtr(-centre / scale)) for centre, scale in self.prior)
        return r0, a

    @cached_property
    def _constant(self) -> Array:
        """What the log evidence, times -2, holds whatever the curve is; (J, 1)."""
        (_, s0), (_, s1) = self.prior
        return (len(self.seen.x) * log(2 * pi) + 2 * log(s0 * s1) + self.noise.log_det)[:, None]

    def on(self, basis: Array) -> Solved:
        """Regress them on R0 (1 - g) + A g in every cell. basis: g of each of M cells at the points, (n, M)."""
        noise, ((m0, s0), (m1, s1)) = self.noise, self.prior
        d = m1 - m0
        oo, oy, yy = self._own
        g = noise.turn @ basis
        g1, gy = noise.products(self._weighed, g).transpose(1, 0, 2)
        gg = noise.squares(g)
        # Rewards about the prior's mean, m0 (1 - g) + m1 g.
        b1 = gy - d * gg
        rr = yy - d * (gy + b1)
        b0 = oy - d * g1 - b1
        # Normal equations of the columns 1 - g and g; the prior adds its precision to the diagonal.
        p01, p11 = g1 - gg, gg + s1**-2
        p00 = (oo + s0**-2) - (g1 + p01)
        det = p00 * p11 - p01 * p01
        # Covariance of R0 and A, and how far their means lie off the prior's.
        v00, v01, v11 = p11 / det, -p01 / det, p00 / det
        a0, a1 = v00 * b0 + v01 * b1, v01 * b0 + v11 * b1
        quadratic = np.maximum(rr - b0 * a0 - b1 * a1, 0.0)
        # Log evidence of a Gaussian linear model, R0 and A integrated out: P their posterior precision, S prior
        # covariance, -1/2 (n log 2 pi + log |V| + r' V^-1 r - b' P^-1 b + log |P| + log |S|).
        evidence = -0.5 * (self._constant + quadratic + np.log(det))
        mean = m0 + a0, m1 + a1
        if self.seen.bounded:
            # What lies outside [0, 1] is cut off, of the prior as of what the data leave.
            r0, a = (_log_inside(*of) - whole for *of, whole in zip(mean, (v00, v11), self._log_inside, strict=True))
            evidence = evidence + r0 + a
        return Solved(evidence, (p00, p01, p11), mean)


def _log_inside(mean: Array, variance: Array) -> Array | float:
    """Log probability that a normal value lies in [0, 1], all shapes alike; one number if nothing is ever cut off."""
    # So far inside that nothing is, as nearly always: all of them together, or each.
    most = _INSIDE * variance.max() ** 0.5
    if most < mean.min() and mean.max() < 1 - most:
        return 0.0
    near = np.flatnonzero(np.abs(mean - 0.5) + _INSIDE * np.sqrt(variance) > 0.5)
    if not len(near):
        return 0.0
    result = np.zeros(mean.size)
    some, own = mean.ravel()[near], np.sqrt(variance.ravel()[near])
    result[near] = np.log(np.maximum(ndtr((1 - some) / own) - ndtr(-some / own), 1e-12))
    return result.reshape(mean.shape)


@dataclass(frozen=True, eq=False)
class Kind:
    """A law with the grid and the prior of its shape.

    Attributes:
        basis: g(x, u, v), for compute x in windows and shape coordinates that broadcast against it.
        box: limits of the shape coordinates, (u low, u high, v low, v high); equal where there is no such coordinate.
        cells: number of grid cells in u and in v.
        likely: prior of the shape, (mean of u, its standard deviation, mean of v, its standard deviation).
    """

    basis: Callable[[Array, Array, Array], Array]
    box: Box
    cells: tuple[int, int]
    likely: Box

    def log_prior(self, u: Array, v: Array) -> Array:
        """Log prior of the shapes of cells, up to a constant; (k,)."""
        centre_u, sd_u, centre_v, sd_v = self.likely
        result: Array = -0.5 * (((u - centre_u) / sd_u) ** 2 + ((v - centre_v) / sd_v) ** 2)
        return result

    def grid(self, box: Box) -> Grid:
        """Return the cells of a box; a side without width has one cell."""
        u, v = (
            box[i] + (np.arange(count) + 0.5) * (box[i + 1] - box[i]) / count
            for i, count in zip((0, 2), self._counts, strict=True)
        )
        u, v = np.repeat(u, len(v)), np.tile(v, len(u))
        sides = [(box[i + 1] - box[i]) / count for i, count in zip((0, 2), self._counts, strict=True)]
        # The prior's integral is the same for all cells: it does not matter to one law.
        return Grid(u, v, np.repeat(np.array(sides)[:, None], len(u), 1), self.log_prior(u, v))

    @property
    def _counts(self) -> tuple[int, int]:
        low_u, high_u, low_v, high_v = self.box
        return self.cells[0] if high_u > low_u else 1, self.cells[1] if high_v > low_v else 1


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells of a law: shape coordinates u, v of their centres (M,), their extent (2, M), and log prior weight (M,)."""

    u: Array
    v: Array
    sides: Array
    log_cell: Array


@dataclass(frozen=True, eq=False)
class Explored:
    """A grid zoomed to where the weight is, and its cells solved under every kind of noise.

    Attributes:
        noise, grid: the J kinds of noise and the M cells.
        solved: the regression of every cell. weight: log posterior weights, up to a constant, (J, M).
        box: what the grid covers.
    """

    noise: Noises
    grid: Grid
    solved: Solved
    weight: Array
    box: Box

    def cells(self) -> Cells:
        """Return the cells that are not negligible."""
        j, m = np.nonzero(self.weight > self.weight.max() - _DROPPED)
        grid, solved = self.grid, self.solved
        return Cells(
            self.weight[j, m], grid.u[m], grid.v[m], grid.sides[:, m], j,
            np.stack([part[j, m] for part in solved.precision]), np.stack([part[j, m] for part in solved.mean]),
        )  # fmt: skip

    @property
    def likely(self) -> NDArray[np.intp]:
        """Indices of the kinds of noise whose best cell is within `_UNLIKELY` log weight of the best."""
        best = self.weight.max(1)
        return np.flatnonzero(best > best.max() - _UNLIKELY)


def explore(
    seen: Seen,
    noise: Noises,
    kind: Kind,
    rounds: int,
    fine: float,
    prior: Prior,
    box: Box | None = None,
) -> Explored:
    """Zoom the grid of a law, at most so many rounds less one.

    Args:
        seen: evaluations of one recipe, without units.
        noise: kinds of noise under which every cell is solved.
        kind: the law.
        rounds: largest number of times the grid is solved.
        fine: effective number of cells that must share the weight for the grid to be fine enough.
        prior: mean and standard deviation of R0 and of A, such as `usual_prior`.
        box: where to begin; None for the whole box of the law.
    """
    rewards = Rewards.of(seen, noise, prior)
    box = box or kind.box
    for round_ in range(rounds):
        grid = kind.grid(box)
        with np.errstate(divide="ignore", over="ignore", under="ignore", invalid="ignore"):
            basis = kind.basis(seen.x[:, None], grid.u, grid.v)
        solved = rewards.on(basis)
        weight = solved.log_evidence + grid.log_cell + noise.log_prior[:, None]
        closer = _zoomed(kind, grid, weight.max(0), box, fine)
        if closer == box:
            break
        if round_ < rounds - 1:
            box = closer
    return Explored(noise, grid, solved, weight, box)


def _zoomed(kind: Kind, grid: Grid, best: Array, box: Box, fine: float) -> Box:
    """Return a box about the cells with weight, a cell wider on every side; the same one if that shrinks it too little.

    best (M,) is the log weight of each cell of `grid`, which covers `box`.
    """
    below = best - best.max()
    if len(below) == 1 or np.exp(below).sum() > fine:
        return box
    inside = below > -_WORTH
    area, ends = 1.0, []
    for k, at, side in ((0, grid.u[inside], grid.sides[0, 0]), (2, grid.v[inside], grid.sides[1, 0])):
        low, high = max(at.min() - side, kind.box[k]), min(at.max() + side, kind.box[k + 1])
        ends += [float(low), float(high)]
        area *= float((high - low) / (box[k + 1] - box[k])) if box[k + 1] > box[k] else 1.0
    return (ends[0], ends[1], ends[2], ends[3]) if area < _SHRINKS else box


def log_sum(values: Array) -> float:
    """Return the logarithm of the sum of weights given by their logarithms (n,); minus infinity for none."""
    top = float(values.max()) if len(values) else -np.inf
    return top if not np.isfinite(top) else top + float(np.log(np.exp(values - top).sum()))


def by_weight(weight: Array, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw indices (count,) by weight (n,), stratified for less noise than independent draws, in random order."""
    place = (np.arange(count) + rng.random(count)) / count
    chosen = np.minimum(np.searchsorted(np.cumsum(weight) / weight.sum(), place), len(weight) - 1)
    return np.asarray(rng.permutation(chosen), dtype=np.intp)


def draw_levels(cells: Cells, chosen: NDArray[np.intp], bounded: bool, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw R0 and A of the chosen cells: A first, then R0 given A, truncated to the reward's bounds. (k,) each.

    Args:
        cells: posterior cells.
        chosen: index of the cell of each draw, (k,).
        bounded: whether rewards lie in [0, 1].
        rng: source of random numbers.
    """
    mean = cells.mean[:, chosen]
    p00, p01, _ = cells.precision[:, chosen]
    a = _within(mean[1], np.sqrt(cells.variance[chosen]), bounded, rng)
    # Of a joint normal with precision p, R0 given A has precision p00 and mean m0 - p01 / p00 (A - m1).
    r0 = _within(mean[0] - p01 / p00 * (a - mean[1]), p00**-0.5, bounded, rng)
    return r0, a


def _within(mean: Array, sd: Array, bounded: bool, rng: np.random.Generator) -> Array:
    """Normal draws, cut off at 0 and 1 where bounded; (k,)."""
    uniform = rng.random(len(mean))
    low, high = (ndtr(-mean / sd), ndtr((1 - mean) / sd)) if bounded else (0.0, 1.0)
    # By the inverse of the distribution function, kept off 0 and 1, where it is infinite.
    value = mean + sd * ndtri(np.clip(low + (high - low) * uniform, 1e-15, 1 - 1e-15))
    return np.clip(value, 0.0, 1.0) if bounded else np.asarray(value)
