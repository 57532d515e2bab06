"""Grid posterior of a curve: cells over kind, shape and noise, each solved exactly.

Given the shape of a curve and the noise's, the rest (R0, A, and an extra on top) is linear and Gaussian, so each cell
has its marginal likelihood in closed form. The grid is zoomed to where the weight is: nothing depends on a start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import log, pi

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from sweeps.fit.constants import A_PRIOR, R0_PRIOR
from sweeps.fit.family import Box
from sweeps.fit.kinds import Kind, silent
from sweeps.fit.least_squares import Array
from sweeps.fit.wander import Noises, Seen

# Log weights below the best at which cells are dropped, and kinds of noise no longer looked at.
DROPPED, _UNLIKELY = 12.0, 7.0
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
        kind: index into the kinds of curves; (k,), as all that follow unless another shape is given.
        log_weight: log posterior weight, up to a constant; `Law` and `Mixture` normalize it.
        u, v: shape coordinates of the cell's centre. sides (2, k): its extent in both.
        noise: index into the kinds of noise.
        precision (3, k): posterior precision of (R0, A) as upper triangle 00, 01, 11.
        mean (2, k): posterior mean of (R0, A) where the extra has size 0.
        cross (2, k): how much each falls per unit of the extra's size.
        extra: `NONE`, `DRIFT` or `JUMP` of `sweeps.fit.mixture`; its size is normal (extra_mean, extra_sd),
            on the reward scale of width 1.
        at, width: place and width of a jump, in windows; meaningless for other extras.
    """

    kind: NDArray[np.intp]
    log_weight: Array
    u: Array
    v: Array
    sides: Array
    noise: NDArray[np.intp]
    precision: Array
    mean: Array
    cross: Array
    extra: NDArray[np.intp]
    extra_mean: Array
    extra_sd: Array
    at: Array
    width: Array

    def take(self, keep: NDArray[np.bool_]) -> Cells:
        """Return the cells that the mask keep, (k,), selects."""
        return Cells(**{name: getattr(self, name)[..., keep] for name in self.__dataclass_fields__})

    @property
    def variance(self) -> Array:
        """Posterior variance of A in each cell, without an extra, (k,)."""
        p00, p01, p11 = self.precision
        return np.asarray(p00 / np.maximum(p00 * p11 - p01**2, 1e-300))

    def noise_share(self, kinds: int) -> Array:
        """Weight of each of so many kinds of noise, (J,); they sum to 1."""
        share = np.bincount(self.noise, np.exp(self.log_weight), kinds)
        return np.asarray(share / max(float(share.sum()), 1e-300))


def joined(parts: Sequence[Cells]) -> Cells:
    """Concatenate several sets of cells into one."""
    names = Cells.__dataclass_fields__
    return Cells(**{name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names})


@dataclass(frozen=True, eq=False)
class OnTop:
    """Results of the regressions of every cell for each extra: a column on top of the curve, of unknown size.

    Shapes, for E extras, J kinds of noise and M cells: mean and precision of the size (E, J, M); cross (2, E, J, M),
    how much R0 and A fall per unit of it.
    """

    cross: Array
    mean: Array
    precision: Array


@dataclass(frozen=True, eq=False)
class Solved:
    """Results of the Bayesian linear regression of every cell.

    Shapes, for E extras, J kinds of noise and M cells: log_evidence (E, J, M), precision 3 x (J, M), mean 2 x (J, M).
    Without extras E is 1 and on_top None.
    """

    log_evidence: Array
    precision: tuple[Array, Array, Array]
    mean: tuple[Array, Array]
    on_top: OnTop | None


def usual_prior(bounded: bool) -> Prior:
    """Return the default prior of R0 and of A, mean and standard deviation each; twice as wide without bounds."""
    wide = 1.0 if bounded else 2.0
    return (R0_PRIOR[0], wide * R0_PRIOR[1]), (A_PRIOR[0], wide * A_PRIOR[1])


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
    def of(cls, seen: Seen, noise: Noises, prior: Prior | None = None) -> Rewards:
        """Turn one recipe's rewards to every basis; prior None is `usual_prior`."""
        prior = prior or usual_prior(seen.bounded)
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

    def on(self, basis: Array, ceiling: NDArray[np.bool_], extras: tuple[Array, float] | None = None) -> Solved:
        """Regress them on R0 (1 - g) + A g, and an extra if there are some, in every cell.

        Args:
            basis: g, the basis function, of each of M cells at the points, (n, M).
            ceiling: whether A is an asymptote in the cell, and so confined to [0, 1], (M,).
            extras: columns (n, E), and the prior standard deviation of their sizes; None to regress on R0 and A alone.
        """
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
        evidence = (-0.5 * (self._constant + quadratic + np.log(det)))[None]
        # Where an extra has size 0; and over all its sizes, see below.
        mean = m0 + a0, m1 + a1
        over_all, variance, on_top = mean, (v00, v11), None
        if extras is not None:
            columns, sd = noise.turn @ extras[0], extras[1]
            h1 = noise.products(noise.weighed(columns), g).transpose(1, 0, 2)
            e1, ey = noise.products(self._weighed, columns).transpose(1, 2, 0)[..., None]
            h0 = e1 - h1
            # One more column, by block elimination: kappa, the Schur complement, is its size's posterior precision.
            cross = np.stack([v00 * h0 + v01 * h1, v01 * h0 + v11 * h1])
            kappa = noise.squares(columns).T[..., None] + sd**-2 - h0 * cross[0] - h1 * cross[1]
            left = ey - h0 * a0 - h1 * (a1 + d)
            size = left / kappa
            evidence = evidence + 0.5 * (left * size - np.log(kappa * sd**2))
            over_all = mean[0] - cross[0] * size, mean[1] - cross[1] * size
            variance = v00 + cross[0] ** 2 / kappa, v11 + cross[1] ** 2 / kappa
            on_top = OnTop(cross, size, kappa)
        if self.seen.bounded:
            # What lies outside [0, 1] is cut off, of the prior as of what the data leave.
            r0, a = (_log_inside(*of) - whole for *of, whole in zip(over_all, variance, self._log_inside, strict=True))
            evidence = evidence + r0 + ceiling * a
        return Solved(evidence, (p00, p01, p11), mean, on_top)


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
class Grid:
    """Shapes of several kinds, those of one kind side by side.

    Shapes: (M,) for M cells, but sides (2, M), and one entry a kind in first and count.

    Attributes:
        kinds: every kind there is. kind: index into it.
        u, v, sides: shape coordinates of the cells' centres, and their extent in both.
        log_cell: log prior weight of a cell within its kind.
        ceiling: whether A is a ceiling in the cell's kind.
        first, count: index of the first cell of each kind that the grid has, and their number.
    """

    kinds: Sequence[Kind]
    kind: NDArray[np.intp]
    u: Array
    v: Array
    sides: Array
    log_cell: Array
    ceiling: NDArray[np.bool_]
    first: NDArray[np.intp]
    count: NDArray[np.intp]

    def basis(self, x: Array) -> Array:
        """g of every cell; (n,) -> (n, M)."""
        found = np.empty((len(x), len(self.u)))
        with silent():
            for start, count in zip(self.first.tolist(), self.count.tolist(), strict=True):
                mine = slice(start, start + count)
                found[:, mine] = self.kinds[self.kind[start]].basis(x[:, None], self.u[mine], self.v[mine])
        return found


def grid_of(kinds: Sequence[Kind], boxes: Mapping[int, Box]) -> Grid:
    """Make the grid of cell centres of each kind's box, by number of the kind."""
    parts = [_centres(kinds[i], box) for i, box in boxes.items()]
    count = np.array([len(u) for u, *_ in parts])
    u, v, sides, log_cell = (np.concatenate(each, axis=-1) for each in zip(*parts, strict=True))
    kind, ceiling = (np.repeat(each, count) for each in (list(boxes), [kinds[i].ceiling for i in boxes]))
    return Grid(kinds, kind, u, v, sides, log_cell, ceiling, count.cumsum() - count, count)


@lru_cache(maxsize=64)
def _centres(kind: Kind, box: Box) -> tuple[Array, Array, Array, Array]:
    """Cells of one kind: u, v (k,), sides (2, k), log prior weight (k,); cached, for most boxes stay the same."""
    u, v, area = kind.cells_in(box)
    sides = np.repeat([[(box[1] - box[0]) / kind.cells[0]], [(box[3] - box[2]) / kind.cells[1]]], len(u), 1)
    return u, v, sides, kind.log_prior(u, v) + np.log(area) - kind.log_norm


@lru_cache(maxsize=8)
def _whole_grid(kinds: tuple[Kind, ...]) -> Grid:
    """Return the grid over every kind's whole box, where each search begins."""
    return grid_of(kinds, {i: kind.box for i, kind in enumerate(kinds)})


@dataclass(frozen=True, eq=False)
class Explored:
    """A grid zoomed to where the weight is, and its cells solved under every kind of noise.

    Attributes:
        noise, grid: the J kinds of noise and the M cells.
        solved: the regression of every cell. weight: log posterior weights, up to a constant, (J, M).
        boxes: box of each kind that the grid covers, by its index.
    """

    noise: Noises
    grid: Grid
    solved: Solved
    weight: Array
    boxes: dict[int, Box]

    def cells(self, log_extra: Array | float = 0.0) -> Cells:
        """Return the cells that are not negligible, without a drift or jump on top of their curves.

        Args:
            log_extra: log prior weight that there is none; a number, or one for each cell of the grid, (M,).
        """
        return cells_of(self.solved, log_extra, self.grid, self.noise, np.zeros(1, dtype=np.intp))

    @property
    def likely(self) -> NDArray[np.intp]:
        """Indices of the kinds of noise whose best cell is within `_UNLIKELY` log weight of the best."""
        best = self.weight.max(1)
        return np.flatnonzero(best > best.max() - _UNLIKELY)


def explore(
    seen: Seen,
    noise: Noises,
    kinds: tuple[Kind, ...],
    rounds: int,
    fine: float,
    behind: float = np.inf,
    prior: Prior | None = None,
    boxes: dict[int, Box] | None = None,
) -> Explored:
    """Zoom the grid of all kinds, at most so many rounds less one.

    Args:
        seen: evaluations of one recipe, without units.
        noise: kinds of noise under which every cell is solved.
        kinds: kinds of curves to explore.
        rounds: largest number of times the grid is solved.
        fine: see `zoomed`.
        behind: see `zoomed`; of no effect in the first round.
        prior: mean and standard deviation of R0 and of A; None for `usual_prior`.
        boxes: box to begin with for each kind, by its index in `kinds`; None for each kind's whole box.
    """
    rewards = Rewards.of(seen, noise, prior)
    whole = boxes is None
    boxes = boxes or {i: kind.box for i, kind in enumerate(kinds)}
    for round_ in range(rounds):
        grid = _whole_grid(kinds) if whole and not round_ else grid_of(kinds, boxes)
        solved = rewards.on(grid.basis(seen.x), grid.ceiling)
        weight = solved.log_evidence[0] + grid.log_cell + noise.log_prior[:, None]
        closer = zoomed(grid, weight, boxes, fine, np.inf if round_ == 0 else behind)
        if closer == boxes:
            break
        if round_ < rounds - 1:
            boxes = closer
    return Explored(noise, grid, solved, weight, boxes)


def zoomed(grid: Grid, weight: Array, boxes: Mapping[int, Box], fine: float, behind: float) -> dict[int, Box]:
    """Boxes about the cells with weight, a cell wider on every side; as they were where many cells share it.

    Args:
        grid: grid that was solved over `boxes`.
        weight: log weight of each cell under each kind of noise, (J, M).
        boxes: box of each kind, by its index in the grid's kinds, in the order of the grid.
        fine: effective number of cells that must share a kind's weight for its grid to be fine enough.
        behind: log weight; a kind whose best cell is further than this behind the best of all is not zoomed.
    """
    best, first, count = weight.max(0), grid.first, grid.count
    top = np.maximum.reduceat(best, first)
    below = best - np.repeat(top, count)
    shared = np.add.reduceat(np.exp(below), first)
    inside = below > -_WORTH
    ends = [
        least_or_most.reduceat(np.where(inside, line, nothing), first).tolist()
        for line in (grid.u, grid.v)
        for least_or_most, nothing in ((np.minimum, np.inf), (np.maximum, -np.inf))
    ]
    fine_enough = (count == 1) | (top < top.max() - behind) | (shared > fine)
    result = {}
    for (i, box), done, *of in zip(boxes.items(), fine_enough.tolist(), *ends, strict=True):
        result[i] = box if done else _closer(grid.kinds[i], box, (of[0], of[1], of[2], of[3]))
    return result


def _closer(kind: Kind, box: Box, inside: Box) -> Box:
    """Box a cell wider than the centres of those inside; the same one where that shrinks it by too little."""
    area, sides = 1.0, []
    for k, cells in ((0, kind.cells[0]), (2, kind.cells[1])):
        start, end = box[k], box[k + 1]
        step = (end - start) / cells
        low, high = max(inside[k] - step, kind.box[k]), min(inside[k + 1] + step, kind.box[k + 1])
        sides += [low, high]
        area *= (high - low) / (end - start) if end > start else 1.0
    return (sides[0], sides[1], sides[2], sides[3]) if area < _SHRINKS else box


def cells_of(
    solved: Solved,
    log_extra: Array | float,
    grid: Grid,
    noise: Noises,
    extra: NDArray[np.intp],
    at: Array | None = None,
    width: Array | None = None,
) -> Cells:
    """Flatten solved regressions into cells, dropping those of negligible weight within their kind."""
    weight = solved.log_evidence + (log_extra + grid.log_cell) + noise.log_prior[:, None]
    # Against the best of its own kind: a kind that is far behind must still show its evidence (`Mixture.skill`).
    best = np.repeat(np.maximum.reduceat(weight.max((0, 1)), grid.first), grid.count)
    e, j, m = np.nonzero(weight > best - DROPPED)
    none, on_top = np.zeros(len(e)), solved.on_top
    cross, extra_mean, extra_sd = (np.zeros((2, len(e))), none, none) if on_top is None else (
        on_top.cross[:, e, j, m], on_top.mean[e, j, m], on_top.precision[e, j, m] ** -0.5
    )  # fmt: skip
    return Cells(
        grid.kind[m], weight[e, j, m], grid.u[m], grid.v[m], grid.sides[:, m], j,
        np.stack([part[j, m] for part in solved.precision]), np.stack([part[j, m] for part in solved.mean]),
        cross, extra[e], extra_mean, extra_sd,
        none if at is None else at[e], np.ones(len(e)) if width is None else width[e],
    )  # fmt: skip


def log_sum(values: Array) -> float:
    """Return the logarithm of the sum of weights given by their logarithms (n,); minus infinity for none."""
    top = float(values.max()) if len(values) else -np.inf
    return top if not np.isfinite(top) else top + float(np.log(np.exp(values - top).sum()))


def by_weight(weight: Array, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw indices (count,) by weight (n,), stratified for less noise than independent draws, in random order."""
    place = (np.arange(count) + rng.random(count)) / count
    chosen = np.minimum(np.searchsorted(np.cumsum(weight) / weight.sum(), place), len(weight) - 1)
    return np.asarray(rng.permutation(chosen), dtype=np.intp)


def draw_levels(
    cells: Cells,
    chosen: NDArray[np.intp],
    size: Array | float,
    bounded: bool,
    ceiling: NDArray[np.bool_],
    rng: np.random.Generator,
) -> tuple[Array, Array]:
    """Draw R0 and A of the chosen cells: A first, then R0 given A, truncated to the reward's bounds. (k,) each.

    Args:
        cells: posterior cells.
        chosen: index of the cell of each draw, (k,).
        size: size of the drift or jump on top of each drawn curve, in reward, (k,).
        bounded: whether rewards lie in [0, 1].
        ceiling: whether A is an asymptote in the drawn cell, and so confined to [0, 1], (k,).
        rng: source of random numbers.
    """
    mean = cells.mean[:, chosen] - cells.cross[:, chosen] * size
    p00, p01, _ = cells.precision[:, chosen]
    a = _within(mean[1], np.sqrt(cells.variance[chosen]), ceiling & bounded, rng)
    # Of a joint normal with precision p, R0 given A has precision p00 and mean m0 - p01 / p00 (A - m1).
    r0 = _within(mean[0] - p01 / p00 * (a - mean[1]), p00**-0.5, np.full(len(chosen), bounded), rng)
    return r0, a


def _within(mean: Array, sd: Array, bounded: NDArray[np.bool_], rng: np.random.Generator) -> Array:
    """Normal draws, cut off at 0 and 1 where bounded; (k,)."""
    uniform = rng.random(len(mean))
    low = np.where(bounded, ndtr(-mean / sd), 0.0)
    high = np.where(bounded, ndtr((1 - mean) / sd), 1.0)
    # By the inverse of the distribution function, kept off 0 and 1, where it is infinite.
    value = mean + sd * ndtri(np.clip(low + (high - low) * uniform, 1e-15, 1 - 1e-15))
    return np.where(bounded, np.clip(value, 0.0, 1.0), value)
