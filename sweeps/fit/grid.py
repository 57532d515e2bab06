"""Grid posterior of a curve: cells over kind, shape and noise, each solved exactly.

Given the shape of a curve and the noise's, the rest (R0, A, and an extra on top) is linear and Gaussian, so each cell
has its marginal likelihood in closed form. The grid is zoomed to where the weight is: nothing depends on a start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from sweeps.fit.constants import A_PRIOR, R0_PRIOR
from sweeps.fit.family import Box
from sweeps.fit.kinds import Kind
from sweeps.fit.least_squares import Array
from sweeps.fit.wander import Noises, Seen

# Log weights below the best at which cells are dropped, and kinds of noise no longer looked at.
DROPPED, _UNLIKELY = 12.0, 7.0
# A grid is left where zooming would shrink it to no less than this share.
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
class Solved:
    """Results of the Bayesian linear regression of every cell.

    Shapes, for E extras, J kinds of noise and M cells: log_evidence, extra_mean and extra_precision (E, J, M), cross
    (2, E, J, M), precision 3 x (J, M), mean 2 x (J, M).
    """

    log_evidence: Array
    precision: tuple[Array, Array, Array]
    mean: tuple[Array, Array]
    cross: Array
    extra_mean: Array
    extra_precision: Array


def usual_prior(bounded: bool) -> Prior:
    """Return the default prior of R0 and of A, mean and standard deviation each; twice as wide without bounds."""
    wide = 1.0 if bounded else 2.0
    return (R0_PRIOR[0], wide * R0_PRIOR[1]), (A_PRIOR[0], wide * A_PRIOR[1])


def solve(
    tilde: Array,
    g: Array,
    log_det: Array,
    extras: tuple[Array, Array, Array] | None,
    ceiling: NDArray[np.bool_],
    bounded: bool,
    prior: Prior | None = None,
) -> Solved:
    """Regress rewards on R0 (1 - g) + A g + an extra, in every cell.

    Args:
        tilde: a column of ones and the rewards, whitened under each of J kinds of noise, (J, n, 2).
        g: basis function of each of M cells, whitened, (J, n, M).
        log_det: log determinant of each noise covariance, (J,).
        extras: whitened columns (J, n, E), prior standard deviation of their sizes (E,), 0 for no extra, and log prior
            weight (E,); None to regress on R0 and A alone.
        ceiling: whether A is an asymptote in the cell, and so confined to [0, 1], (M,).
        bounded: whether rewards lie in [0, 1].
        prior: mean and standard deviation of R0 and of A; None for `usual_prior`.
    """
    (m0, s0), (m1, s1) = prior or usual_prior(bounded)
    d = m1 - m0
    products = tilde.transpose(0, 2, 1) @ g
    g1, gy = products[:, 0], products[:, 1]
    gg = np.einsum("jnm,jnm->jm", g, g)
    oo, oy, yy = (np.einsum("jn,jn->j", tilde[..., a], tilde[..., b])[:, None] for a, b in ((0, 0), (0, 1), (1, 1)))
    # Rewards about the prior's mean, m0 (1 - g) + m1 g.
    rr = yy + m0**2 * oo + d**2 * gg - 2 * m0 * oy - 2 * d * gy + 2 * m0 * d * g1
    b1 = gy - m0 * g1 - d * gg
    b0 = oy - m0 * oo - d * g1 - b1
    # Normal equations of the columns 1 - g and g; the prior adds its precision to the diagonal.
    p00, p01, p11 = oo - 2 * g1 + gg + s0**-2, g1 - gg, gg + s1**-2
    det = p00 * p11 - p01**2
    a0, a1 = (p11 * b0 - p01 * b1) / det, (p00 * b1 - p01 * b0) / det
    quadratic = np.maximum(rr - b0 * a0 - b1 * a1, 0.0)
    # Log evidence of a Gaussian linear model, R0 and A integrated out: P their posterior precision, S prior covariance,
    # -1/2 (n log 2 pi + log |V| + r' V^-1 r - b' P^-1 b + log |P| + log |S|).
    base = -0.5 * (tilde.shape[1] * np.log(2 * np.pi) + log_det[:, None] + quadratic + np.log(det * (s0 * s1) ** 2))

    cross = np.zeros((2, 1, *base.shape))
    size, kappa, evidence = np.zeros((1, *base.shape)), np.full((1, *base.shape), np.inf), base[None]
    if extras is not None:
        columns, sd, log_prior = extras
        sd = sd[:, None, None]
        some = sd > 0
        safe = np.where(some, sd, 1.0)
        h1 = (columns.transpose(0, 2, 1) @ g).transpose(1, 0, 2)
        et = (columns.transpose(0, 2, 1) @ tilde).transpose(1, 0, 2)
        ee = np.einsum("jne,jne->ej", columns, columns)[..., None]
        h0 = et[..., :1] - h1
        # One more column, by block elimination: kappa, the Schur complement, is the posterior precision of its size.
        # Without an extra kappa is infinite, so that its size is exactly 0.
        cross = np.stack([(p11 * h0 - p01 * h1) / det, (p00 * h1 - p01 * h0) / det]) * some
        kappa = np.where(some, ee + safe**-2 - h0 * cross[0] - h1 * cross[1], np.inf)
        left = et[..., 1:] - m0 * et[..., :1] - d * h1 - h0 * a0 - h1 * a1
        size = left / kappa
        gain = np.where(some, left * size - np.log(np.where(some, kappa, 1.0) * safe**2), 0.0)
        evidence = base + 0.5 * gain + log_prior[:, None, None]
    if bounded:
        # What lies outside [0, 1] is cut off, of the prior as of what the data leave.
        for axis, own, (centre, scale), counts in ((0, p11, (m0, s0), 1.0), (1, p00, (m1, s1), ceiling)):
            spread = np.sqrt(own / det + cross[axis] ** 2 / kappa)
            at = (m0 + a0, m1 + a1)[axis] - cross[axis] * size
            whole = log(ndtr((1 - centre) / scale) - ndtr(-centre / scale))
            evidence = evidence + counts * (_log_inside(at, spread) - whole)
    return Solved(evidence, (p00, p01, p11), (m0 + a0, m1 + a1), cross, size, kappa)


def _log_inside(mean: Array, sd: Array) -> Array:
    """Log probability that a normal value lies in [0, 1]; all shapes alike."""
    result = np.zeros(mean.shape)
    # So far inside that nothing is cut off, as nearly always.
    near = np.abs(mean - 0.5) + _INSIDE * sd > 0.5
    mean, sd = mean[near], sd[near]
    result[near] = np.log(np.maximum(ndtr((1 - mean) / sd) - ndtr(-mean / sd), 1e-12))
    return result


@dataclass(frozen=True, eq=False)
class Grid:
    """Shapes of several kinds: all (M,) but sides (2, M). log_cell: prior weight of a cell within its kind."""

    kinds: Sequence[Kind]
    kind: NDArray[np.intp]
    u: Array
    v: Array
    sides: Array
    log_cell: Array

    @property
    def ceiling(self) -> NDArray[np.bool_]:
        """Mask of the cells in whose kind A is a ceiling, (M,)."""
        return np.array([kind.ceiling for kind in self.kinds])[self.kind]

    def basis(self, x: Array) -> Array:
        """g of every cell; (n,) -> (n, M)."""
        parts = []
        for i in np.unique(self.kind):
            mine = self.kind == i
            parts.append(self.kinds[i].shape(x[:, None], self.u[mine], self.v[mine]))
        return np.concatenate(parts, axis=1)


def grid_of(kinds: Sequence[Kind], boxes: Mapping[int, Box]) -> Grid:
    """Make the grid of cell centres of each kind's box, by number of the kind."""
    parts = [_centres(kinds[i], box) for i, box in boxes.items()]
    number = np.repeat(list(boxes), [len(u) for u, *_ in parts])
    u, v, sides, log_cell = (np.concatenate(each, axis=-1) for each in zip(*parts, strict=True))
    return Grid(kinds, number, u, v, sides, log_cell)


@lru_cache(maxsize=64)
def _centres(kind: Kind, box: Box) -> tuple[Array, Array, Array, Array]:
    """Cells of one kind: u, v (k,), sides (2, k), log prior weight (k,); cached, for most boxes stay the same."""
    u, v, area = kind.cells_in(box)
    sides = np.repeat([[(box[1] - box[0]) / kind.cells[0]], [(box[3] - box[2]) / kind.cells[1]]], len(u), 1)
    return u, v, sides, kind.log_prior(u, v) + np.log(area) - kind.log_norm


def whitened(seen: Seen, noise: Noises) -> Array:
    """Whiten a column of ones and the rewards under every kind of noise, (J, n, 2)."""
    return np.asarray(noise.whiten @ np.stack([np.ones(len(seen.x)), seen.z], axis=1))


@lru_cache(maxsize=8)
def _whole_grid(kinds: tuple[Kind, ...]) -> Grid:
    """Return the grid over every kind's whole box, where each search begins."""
    return grid_of(kinds, {i: kind.box for i, kind in enumerate(kinds)})


@dataclass(frozen=True, eq=False)
class Explored:
    """A grid zoomed to where the weight is, and its cells solved under every kind of noise.

    Attributes:
        noise, grid: the J kinds of noise and the M cells.
        tilde, g: whitened ones and rewards, (J, n, 2), and whitened basis functions, (J, n, M).
        solved: the regression of every cell. weight: log posterior weights, up to a constant, (J, M).
        boxes: box of each kind that the grid covers, by its index.
    """

    noise: Noises
    grid: Grid
    tilde: Array
    g: Array
    solved: Solved
    weight: Array
    boxes: dict[int, Box]

    def cells(self) -> Cells:
        """Return the cells that are not negligible, without a drift or jump on top of their curves."""
        nothing = np.zeros(1, dtype=np.intp), np.zeros(1), np.ones(1)
        return cells_of(self.solved, np.zeros(1), self.grid, self.noise, *nothing)

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
    tilde = whitened(seen, noise)
    whole = boxes is None
    boxes = boxes or {i: kind.box for i, kind in enumerate(kinds)}
    for round_ in range(rounds):
        grid = _whole_grid(kinds) if whole and not round_ else grid_of(kinds, boxes)
        g = noise.whiten @ grid.basis(seen.x)
        solved = solve(tilde, g, noise.log_det, None, grid.ceiling, seen.bounded, prior)
        weight = solved.log_evidence[0] + grid.log_cell + noise.log_prior[:, None]
        closer = zoomed(grid, weight, boxes, fine, np.inf if round_ == 0 else behind)
        if closer == boxes:
            break
        if round_ < rounds - 1:
            boxes = closer
    return Explored(noise, grid, tilde, g, solved, weight, boxes)


def zoomed(grid: Grid, weight: Array, boxes: Mapping[int, Box], fine: float, behind: float) -> dict[int, Box]:
    """Boxes about the cells with weight, a cell wider on every side; as they were where many cells share it.

    Args:
        grid: grid that was solved over `boxes`.
        weight: log weight of each cell under each kind of noise, (J, M).
        boxes: box of each kind, by its index in the grid's kinds.
        fine: effective number of cells that must share a kind's weight for its grid to be fine enough.
        behind: log weight; a kind whose best cell is further than this behind the best of all is not zoomed.
    """
    best = weight.max(0)
    result = {}
    for i, box in boxes.items():
        kind, mine = grid.kinds[i], grid.kind == i
        own = best[mine]
        inside = own > own.max() - 8
        lost = own.max() < best.max() - behind
        if len(own) == 1 or lost or np.exp(own - own.max()).sum() > fine:
            result[i] = box
            continue
        ends: list[float] = []
        for line, k, count in ((grid.u[mine], 0, kind.cells[0]), (grid.v[mine], 2, kind.cells[1])):
            step = (box[k + 1] - box[k]) / count
            low, high = float(line[inside].min()) - step, float(line[inside].max()) + step
            ends += [max(low, kind.box[k]), min(high, kind.box[k + 1])]
        area = [(high - low) / (end - start) for low, high, start, end in _sides(ends, box) if end > start]
        result[i] = (ends[0], ends[1], ends[2], ends[3]) if np.prod(area) < _SHRINKS else box
    return result


def _sides(inner: Sequence[float], outer: Box) -> Iterator[tuple[float, float, float, float]]:
    for k in (0, 2):
        yield inner[k], inner[k + 1], outer[k], outer[k + 1]


def cells_of(
    solved: Solved, log_extra: Array, grid: Grid, noise: Noises, extra: NDArray[np.intp], at: Array, width: Array
) -> Cells:
    """Flatten solved regressions into cells, dropping those of negligible weight within their kind."""
    weight = solved.log_evidence + log_extra + grid.log_cell + noise.log_prior[:, None]
    # Against the best of its own kind: a kind that is far behind must still show its evidence (`Mixture.skill`).
    by_kind = np.full(len(grid.kinds), -np.inf)
    np.maximum.at(by_kind, grid.kind, weight.max((0, 1)))
    e, j, m = np.nonzero(weight > by_kind[grid.kind] - DROPPED)
    return Cells(
        grid.kind[m], weight[e, j, m], grid.u[m], grid.v[m], grid.sides[:, m], j,
        np.stack([part[j, m] for part in solved.precision]), np.stack([part[j, m] for part in solved.mean]),
        solved.cross[:, e, j, m], extra[e], solved.extra_mean[e, j, m], solved.extra_precision[e, j, m] ** -0.5,
        at[e], width[e],
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
