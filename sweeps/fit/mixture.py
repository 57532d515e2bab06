"""What a curve may be: kinds of curves (`sweeps.fit.kinds`) averaged by how well each foretells the next evaluations.

Given the shape of a curve and the noise's, the rest (R0, A, a slow drift or a jump) is linear and Gaussian, so each
cell of a grid over kind, shape and noise has its marginal likelihood in closed form. Its logarithm is the sum of the
log predictive densities of every point given those before: each kind is weighed by its forecasts from all origins. The
last value is among the kinds, as a random walk.

Sources: prequential weights, Dawid 1984; rolling origins, Tashman 2000.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr

from sweeps.fit.family import Box
from sweeps.fit.kinds import KINDS, WALK, drifting
from sweeps.fit.least_squares import Array
from sweeps.fit.wander import Noises, Seen, noises, whitening

# Before the data: R0 and A, mean and standard deviation, on a reward scale of width 1; twice that where rewards have
# no bounds.
R0_PRIOR, A_PRIOR = (0.3, 0.35), (0.6, 0.4)
# A slow drift over the window: its standard deviation in units of the points' roughness, within two limits, and how
# likely there is one. What a run strays from any law goes with its noise; set on real curves (docs/real_curves.md).
DRIFT_SD, DRIFT_LIMITS, P_DRIFT = 3.0, (0.02, 0.3), 0.5
# A jump: standard deviation of its size, and how likely there is one.
JUMP_SD, P_JUMP = 0.3, 0.45
# Kinds that may have jumped: a jump on top of the others looks like one on top of these.
_JUMPING = ("sigmoid", "weibull", "line", "constant")
_JUMP_WIDTHS = (1e-3, 0.35, 1.0)
_MOST_JUMPS = 24
# Log weight behind the best place at which a jump of one width lies so far off that none of another width is there.
_ELSEWHERE = 25.0
# Kinds of noise, the likeliest, under which places of a jump are looked for.
_SEARCHED = 7
# A grid is zoomed so often, less one, where there may be a jump: what jumped twice is a steep rise and a jump.
_JUMP_ROUNDS = 3
# The random walk: standard deviations over one window, and weights.
_STEPS = ((0.01, 0.3), (0.035, 0.35), (0.1, 0.2), (0.3, 0.15))
# Log weights below the best at which cells are dropped, and noises no longer looked at.
_DROPPED, _UNLIKELY = 12.0, 7.0
# A kind's grid is zoomed, at most so often, until this many cells share its weight; fewer where it is to be brief.
_ROUNDS, _FINE, _ROUGH = 6, 10, 4
# It is left where zooming would shrink it to no less than this share, or where its kind has been left behind.
_SHRINKS, _BEHIND = 0.6, 25.0
# Points are calm where they wander by no more than this, in units of their roughness; beside a jump they wander no more
# than `_LITTLE`, by noise of no less log weight than `_RARE`.
_CALM, _LITTLE, _RARE = 0.3, 0.8, -5.0
NONE, DRIFT, JUMP = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells that matter; all (k,) but precision (3, k), mean (2, k) and cross (2, k).

    kind: index in `KINDS`. log_weight: of the cell within everything. u, v: shape. noise: index in `Mixture.noise`.
    precision: of R0 and A, the upper triangle. mean: of R0 and A with no extra; less cross times the extra's size with
    it. extra: `NONE`, `DRIFT` or `JUMP`, of size extra_mean, extra_sd; a jump is at `at`, `width` wide, in windows.
    """

    kind: NDArray[np.intp]
    log_weight: Array
    u: Array
    v: Array
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
        """Some of them."""
        return Cells(**{name: getattr(self, name)[..., keep] for name in self.__dataclass_fields__})


def _joined(parts: Sequence[Cells]) -> Cells:
    names = Cells.__dataclass_fields__
    return Cells(**{name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names})


@dataclass(frozen=True, eq=False)
class Walk:
    """The last value: levels at nodes, under each strength of wandering.

    Shapes: log_weight (J,); x (m,), the distinct computes; level (J, m) and root (J, m, m), mean and Cholesky factor
    there; step (J,): standard deviation over one window.
    """

    log_weight: Array
    x: Array
    level: Array
    root: Array
    step: Array


@dataclass(frozen=True, eq=False)
class Mixture:
    """Everything a curve may do, weighted; the log weights of cells and walk sum to 1 together.

    noise: what the cells' indices point to. skill: log predictive density of each kind, by name. rise: log evidence of
    all kinds over the constant, that the curve has not stayed level. restless: see `_restless`.
    """

    seen: Seen
    cells: Cells
    walk: Walk
    noise: Noises
    skill: Mapping[str, float]
    rise: float
    restless: bool

    @cached_property
    def weights(self) -> dict[str, float]:
        """Of each kind; they sum to 1."""
        by_kind = np.bincount(self.cells.kind, np.exp(self.cells.log_weight), len(KINDS))
        found = {kind.name: float(weight) for kind, weight in zip(KINDS, by_kind, strict=True)}
        found[WALK.name] = float(np.exp(self.walk.log_weight).sum())
        # Cells without weight were dropped.
        return {name: weight / sum(found.values()) for name, weight in found.items()}

    def p_ceiling(self, low: float, high: float) -> float:
        """Probability that the curve has a ceiling, and that it lies between two rewards."""
        cells = self.cells
        p00, p01, p11 = cells.precision
        own = p00 / np.maximum(p00 * p11 - p01**2, 1e-300)
        spread = np.sqrt(own + (cells.cross[1] * cells.extra_sd) ** 2)
        mean = cells.mean[1] - cells.cross[1] * cells.extra_mean + np.where(cells.extra == JUMP, cells.extra_mean, 0.0)
        inside = ndtr((high - mean) / spread) - ndtr((low - mean) / spread)
        if self.seen.bounded:
            inside = inside / np.maximum(ndtr((1 - mean) / spread) - ndtr(-mean / spread), 1e-9)
        has = _CEILING[cells.kind] & (cells.extra != DRIFT)
        return float(np.exp(cells.log_weight) @ np.where(has, np.clip(inside, 0.0, 1.0), 0.0))

    @cached_property
    def noise_share(self) -> Array:
        """Weight of each kind of noise, (J,)."""
        share = np.bincount(self.cells.noise, np.exp(self.cells.log_weight), len(self.noise.log_prior))
        return np.asarray(share / max(float(share.sum()), 1e-300))


PRIOR = {kind.name: kind.prior for kind in (*KINDS, WALK)}
# The kinds' prior is worth this many recipes when a study's own are counted.
_WORTH = 4.0


def shared_prior(skills: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The kinds' weights that a study's recipes have shown: what foretold the others is trusted more in each.

    Stacking by expectation and maximization, drawn to the kinds' own prior as if by `_WORTH` more recipes.

    Args:
        skills: log predictive density of each kind, by name, of every recipe.
    """
    names, start = list(PRIOR), np.array(list(PRIOR.values()))
    start = start / start.sum()
    if not skills:
        return dict(zip(names, start.tolist(), strict=True))
    table = np.array([[skill[name] for name in names] for skill in skills])
    likely = np.exp(table - table.max(1, keepdims=True))
    weight = start
    for _ in range(50):
        share = likely * weight
        weight = (_WORTH * start + (share / share.sum(1, keepdims=True)).sum(0)) / (_WORTH + len(table))
    return dict(zip(names, weight.tolist(), strict=True))


def mixture(seen: Seen, brief: bool = False, prior: Mapping[str, float] | None = None) -> Mixture:
    """Average over kinds.

    Args:
        seen: one recipe's evaluations.
        prior: of each kind, by name; their own if not given, see `shared_prior`.
        brief: with few kinds of noise, and without drifts or jumps: to see whether anything is amiss. Otherwise a jump
            is looked for where the points wander more than is usual.
    """
    noise = noises(seen, brief)
    tilde = noise.whiten @ np.stack([np.ones(len(seen.x)), seen.z], axis=1)
    cells, boxes = _explored(seen, noise, tilde, brief)
    walk = _walked(seen, brief)
    restless = _restless(cells, walk, noise, seen)
    every = _joined([cells, *_jumped(seen, noise, tilde, boxes)]) if restless and not brief else cells
    skill = {kind.name: _lse(every.log_weight[every.kind == i]) for i, kind in enumerate(KINDS)}
    skill[WALK.name] = _lse(walk.log_weight)
    weights = prior or PRIOR
    log_prior = np.log([weights[kind.name] for kind in KINDS])
    log_cell = every.log_weight + log_prior[every.kind]
    log_walk = walk.log_weight + np.log(weights[WALK.name])
    whole = _lse(np.concatenate([log_cell, log_walk]))
    log_cell, log_walk = log_cell - whole, log_walk - whole
    kept = log_cell > -_DROPPED
    cells = replace(every, log_weight=log_cell).take(kept)
    rise = max(value for name, value in skill.items() if name != WALK.name) - skill["constant"]
    return Mixture(seen, cells, replace(walk, log_weight=log_walk), noise, skill, rise, restless)


def _lse(values: Array) -> float:
    top = float(values.max()) if len(values) else -np.inf
    return top if not np.isfinite(top) else top + float(np.log(np.exp(values - top).sum()))


@dataclass(frozen=True, eq=False)
class _Solved:
    """Bayesian linear regressions of every cell. Shapes: log_evidence, extra_mean, extra_sd (E, J, M); precision
    (3, J, M), mean (2, J, M), cross (2, E, J, M)."""

    log_evidence: Array
    precision: Array
    mean: Array
    cross: Array
    extra_mean: Array
    extra_sd: Array


def _solve(
    tilde: Array, g: Array, log_det: Array, extras: tuple[Array, Array, Array] | None, ceiling: Array, bounded: bool
) -> _Solved:
    """Regress rewards on R0 (1 - g) + A g + an extra, in every cell.

    Args:
        tilde: whitened ones and rewards, (J, n, 2).
        g: whitened, (J, n, M).
        log_det: of the noise's covariance, (J,).
        extras: whitened columns (J, n, E), prior standard deviation (E,), 0 for no extra, and log prior (E,); None for
            no extra at all.
        ceiling: whether A is a ceiling, (M,).
        bounded: rewards lie in [0, 1].
    """
    (m0, s0), (m1, s1) = R0_PRIOR, A_PRIOR
    if not bounded:
        s0, s1 = 2 * s0, 2 * s1
    d = m1 - m0
    products = g.transpose(0, 2, 1) @ tilde
    g1, gy = products[..., 0], products[..., 1]
    gg = np.einsum("jnm,jnm->jm", g, g)
    oo, oy, yy = (np.einsum("jn,jn->j", tilde[..., a], tilde[..., b])[:, None] for a, b in ((0, 0), (0, 1), (1, 1)))
    # Rewards about the prior's mean, m0 (1 - g) + m1 g.
    rr = yy + m0**2 * oo + d**2 * gg - 2 * m0 * oy - 2 * d * gy + 2 * m0 * d * g1
    b1 = gy - m0 * g1 - d * gg
    b0 = oy - m0 * oo - d * g1 - b1
    p00, p01, p11 = oo - 2 * g1 + gg + s0**-2, g1 - gg, gg + s1**-2
    det = p00 * p11 - p01**2
    a0, a1 = (p11 * b0 - p01 * b1) / det, (p00 * b1 - p01 * b0) / det
    quadratic = np.maximum(rr - b0 * a0 - b1 * a1, 0.0)
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
            inside = np.maximum(ndtr((1 - at) / spread) - ndtr(-at / spread), 1e-12)
            evidence = evidence + counts * np.log(inside / (ndtr((1 - centre) / scale) - ndtr(-centre / scale)))
    return _Solved(evidence, np.stack([p00, p01, p11]), np.stack([m0 + a0, m1 + a1]), cross, size, kappa**-0.5)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Shapes of several kinds: all (M,). log_cell: prior weight of a cell within its kind."""

    kind: NDArray[np.intp]
    u: Array
    v: Array
    log_cell: Array

    def basis(self, x: Array) -> Array:
        """g of every cell; (n,) -> (n, M)."""
        parts = []
        for i in np.unique(self.kind):
            mine = self.kind == i
            parts.append(KINDS[i].shape(x[:, None], self.u[mine], self.v[mine]))
        return np.concatenate(parts, axis=1)


def _grid(boxes: Mapping[int, Box]) -> _Grid:
    """Centres of the cells of a box a kind."""
    kinds, us, vs, weights = [], [], [], []
    for i, box in boxes.items():
        kind = KINDS[i]
        u, v, area = kind.cells_in(box)
        kinds.append(np.full(len(u), i))
        us.append(u)
        vs.append(v)
        weights.append(kind.log_prior(u, v) + np.log(area) - kind.log_norm)
    return _Grid(np.concatenate(kinds), np.concatenate(us), np.concatenate(vs), np.concatenate(weights))


@cache
def _whole_grid() -> _Grid:
    """Of every kind's whole box: where each search begins."""
    return _grid({i: kind.box for i, kind in enumerate(KINDS)})


_CEILING = np.array([kind.ceiling for kind in KINDS])


def _explored(seen: Seen, noise: Noises, tilde: Array, brief: bool) -> tuple[Cells, dict[int, Box]]:
    """The cells of all kinds, and the box of each kind that matters where points are calm.

    Calm points and wandering ones have grids of their own: a grid that is fine enough for wander is too coarse to say
    whether a curve explains the points without any.
    """
    calm = noise.strength <= _CALM * seen.roughness
    parts, boxes = [], {i: kind.box for i, kind in enumerate(KINDS)}
    for rows in (np.flatnonzero(~calm), np.flatnonzero(calm)):
        # Where points wander a coarser grid tells enough to see whether anything is amiss.
        rounds = 3 if brief and noise.strength[rows].min() > 0 else _ROUNDS
        cells, boxes = _explored_under(seen, noise.take(rows), tilde[rows], brief, rounds)
        parts.append(replace(cells, noise=rows[cells.noise]))
    return _joined(parts), boxes


def _explored_under(seen: Seen, noise: Noises, tilde: Array, brief: bool, rounds: int) -> tuple[Cells, dict[int, Box]]:
    """The same under some kinds of noise, the grid zoomed to where the weight is, at most so many times less one."""
    boxes = {i: kind.box for i, kind in enumerate(KINDS)}
    for round_ in range(rounds):
        grid = _grid(boxes) if round_ else _whole_grid()
        g = noise.whiten @ grid.basis(seen.x)
        solved = _solve(tilde, g, noise.log_det, None, _CEILING[grid.kind], seen.bounded)
        weight = solved.log_evidence[0] + grid.log_cell + noise.log_prior[:, None]
        zoomed = _zoomed(grid, weight, boxes, _ROUGH if brief else _FINE, np.inf if round_ == 0 else _BEHIND)
        if zoomed == boxes or round_ == rounds - 1:
            break
        boxes = zoomed
    if brief:
        return _cells(solved, np.zeros(1), grid, noise, np.array([NONE]), np.zeros(1), np.ones(1)), boxes
    by_noise = weight.max(1)
    likely = np.flatnonzero(by_noise > by_noise.max() - _UNLIKELY)
    some = noise.take(likely)
    column = some.whiten @ drifting(seen.x)[:, None]
    drift_sd = float(np.clip(DRIFT_SD * seen.roughness, *DRIFT_LIMITS))
    extras = np.concatenate([np.zeros_like(column), column], axis=2), np.array([0.0, drift_sd]), np.zeros(2)
    solved = _solve(tilde[likely], g[likely], some.log_det, extras, _CEILING[grid.kind], seen.bounded)
    drifts = np.where(_CEILING[grid.kind], P_DRIFT, 0.0)
    with np.errstate(divide="ignore"):
        log_extra = np.log(np.stack([1 - drifts, drifts]))[:, None, :]
    cells = _cells(solved, log_extra, grid, some, np.array([NONE, DRIFT]), np.zeros(2), np.ones(2))
    return replace(cells, noise=likely[cells.noise]), boxes


def _zoomed(grid: _Grid, weight: Array, boxes: Mapping[int, Box], fine: float, behind: float) -> dict[int, Box]:
    """Boxes about the cells with weight, a cell wider on every side; as they were where many cells share it."""
    best = weight.max(0)
    result = {}
    for i, box in boxes.items():
        kind, mine = KINDS[i], grid.kind == i
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


def _cells(
    solved: _Solved, log_extra: Array, grid: _Grid, noise: Noises, extra: NDArray[np.intp], at: Array, width: Array
) -> Cells:
    """Flat, and without what does not matter in its kind."""
    weight = solved.log_evidence + log_extra + grid.log_cell + noise.log_prior[:, None]
    by_kind = np.full(len(KINDS), -np.inf)
    np.maximum.at(by_kind, grid.kind, weight.max((0, 1)))
    e, j, m = np.nonzero(weight > by_kind[grid.kind] - _DROPPED)
    return Cells(
        grid.kind[m], weight[e, j, m], grid.u[m], grid.v[m], j, solved.precision[:, j, m], solved.mean[:, j, m],
        solved.cross[:, e, j, m], extra[e], solved.extra_mean[e, j, m], solved.extra_sd[e, j, m], at[e], width[e],
    )  # fmt: skip


def _restless(cells: Cells, walk: Walk, noise: Noises, seen: Seen) -> bool:
    """Whether smooth curves explain the points only by more wander than is usual, or not as well as a walk."""
    weight = np.exp(cells.log_weight - cells.log_weight.max())
    strong = noise.strength[cells.noise] > seen.roughness
    return float(weight[strong].sum()) > 0.5 * float(weight.sum()) or _lse(walk.log_weight) > _lse(cells.log_weight)


def _jumped(seen: Seen, noise: Noises, tilde: Array, boxes: Mapping[int, Box]) -> list[Cells]:
    """Kinds with a jump somewhere, sudden or spread over an evaluation or two."""
    computes = np.unique(seen.x)
    at = 0.5 * (computes[1:] + computes[:-1])
    # Every seed must have seen it, and a start: one evaluation of one of them that lies off is no jump of the curve.
    before = np.searchsorted(seen.x, at)
    at = at[(before >= 2 * seen.seeds) & (len(seen.x) - before >= seen.seeds)]
    if not len(at):
        return []
    if len(at) > _MOST_JUMPS:
        # A late jump decides what comes next: there every gap is tried.
        late = _MOST_JUMPS // 3
        at = np.concatenate(
            [at[:-late][np.linspace(0, len(at) - late - 1, _MOST_JUMPS - late).astype(int)], at[-late:]]
        )
    # Wander and a jump explain the same thing: beside a jump there is little, and no unlikely kind, of it.
    calm = np.flatnonzero((noise.strength <= _LITTLE * seen.roughness) & (noise.log_prior > _RARE))
    some, tilde = noise.take(calm), tilde[calm]
    spacing = float(np.median(np.diff(computes)))
    log_prior = float(np.log(P_JUMP / (len(at) * len(_JUMP_WIDTHS))))

    def extras(within: Noises, places: Array, width: Array) -> tuple[Array, Array, Array]:
        columns = within.whiten @ expit((seen.x[:, None] - places) / width)
        return columns, np.full(len(places), JUMP_SD), np.full(len(places), log_prior)

    # The search, for places and shapes, makes do with the likeliest kinds of noise and one width.
    first = np.argsort(-some.log_prior, kind="stable")[:_SEARCHED]
    few = some.take(first)
    anywhere = extras(few, at, np.full(len(at), _JUMP_WIDTHS[1] * spacing))
    found = []
    for i, kind in enumerate(KINDS):
        if kind.name not in _JUMPING:
            continue
        # What explains a curve best without a jump need not do so with one: both are tried.
        for box in dict.fromkeys((kind.box, boxes[i])):
            for round_ in range(_JUMP_ROUNDS):
                grid = _grid({i: box})
                basis = grid.basis(seen.x)
                solved = _solve(
                    tilde[first], few.whiten @ basis, few.log_det, anywhere, _CEILING[grid.kind], seen.bounded
                )
                weight = solved.log_evidence + grid.log_cell + few.log_prior[:, None]
                zoomed = _zoomed(grid, weight.max(0), {i: box}, _FINE, np.inf)[i]
                if zoomed == box or round_ == _JUMP_ROUNDS - 1:
                    break
                box = zoomed
            by_place = weight.max((1, 2))
            likely = at[by_place > by_place.max() - _ELSEWHERE]
            places = np.tile(likely, len(_JUMP_WIDTHS))
            width = np.repeat(np.array(_JUMP_WIDTHS) * spacing, len(likely))
            there = extras(some, places, width)
            solved = _solve(tilde, some.whiten @ basis, some.log_det, there, _CEILING[grid.kind], seen.bounded)
            cells = _cells(solved, np.zeros(1), grid, some, np.full(len(places), JUMP), places, width)
            found.append(replace(cells, noise=calm[cells.noise]))
    return found


def _walked(seen: Seen, brief: bool) -> Walk:
    """The last value; its levels are left out where it is to be brief."""
    x, z, n = seen.x, seen.z, len(seen.x)
    common = np.minimum(x[:, None], x[None, :])
    own = seen.between + seen.wandering(min(0.7 * seen.roughness, 0.012), 0.1)
    tried = [(step, variance, share * weight) for variance, share in seen.white for step, weight in _STEPS]
    covariance = np.stack([own + np.diag(variance) + step**2 * common for step, variance, _ in tried])
    steps, log_prior = np.array([step for step, _, _ in tried]), np.log([weight for _, _, weight in tried])
    whiten = whitening(covariance)
    m0, s0 = R0_PRIOR if seen.bounded else (R0_PRIOR[0], 2 * R0_PRIOR[1])
    tilde = whiten @ np.stack([np.ones(n), z - m0], axis=1)
    one, y = tilde[..., 0], tilde[..., 1]
    p, b = (one * one).sum(1) + s0**-2, (one * y).sum(1)
    fitted = (y * y).sum(1) - b * b / p + np.log(p * s0**2)
    weight = -0.5 * (n * np.log(2 * np.pi) + fitted) + np.log(np.einsum("jnn->jn", whiten)).sum(1) + log_prior
    kept = np.flatnonzero(weight > weight.max() - 8)
    if brief:
        return Walk(weight[kept], np.zeros(0), np.zeros((len(kept), 0)), np.zeros((len(kept), 0, 0)), steps[kept])
    nodes = np.union1d(x, [1.0])
    levels, roots = [], []
    for j in kept:
        # Kriging, with the level's start as uncertain as its prior says.
        across = steps[j] ** 2 * np.minimum(nodes[:, None], x[None, :]) + s0**2
        gain = np.linalg.solve(covariance[j] + s0**2, across.T).T
        left = steps[j] ** 2 * np.minimum(nodes[:, None], nodes[None, :]) + s0**2 - gain @ across.T
        levels.append(m0 + gain @ (z - m0))
        roots.append(np.linalg.cholesky(left + (1e-9 + 1e-9 * s0**2) * np.eye(len(nodes))))
    return Walk(weight[kept], nodes, np.stack(levels), np.stack(roots), steps[kept])
