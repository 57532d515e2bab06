"""The least-squares core of a fit: variable projection of a compute curve.

    R(C) = R0 (1 - g) + A g,   g = g(C; u, v)          (`sweeps.fit.family`; u = ln B, v = ln C_mid of a sigmoid)

Given (u, v) the rest is linear and solved exactly within its bounds, so only two dimensions are searched, on a
grid that is the same whatever the data's units: nothing depends on a starting value.

Several seeds of a recipe share the curve and differ in their asymptote, A_s = A + d_s with sum(d_s) = 0 and a
ridge on d_s (a random effect). A is then the mean over the runs given, and a lasting offset between two seeds
is neither taken for noise nor for independent evidence. All weights are 1 / variance.

Source: arXiv 2510.13786, eq. 1; variable projection as in arXiv 2603.22339.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.fit.family import SIGMOID, Box, Family

Array = NDArray[np.float64]
_COARSE = (21, 34)
# Lines of the grid for steep curves, and how far down in u it goes: to a fifth of the steepest.
_STEEP, _STEEP_SPAN = (8, 110), 1.8
# How far past the last point its midpoints go, in widths of its least steep curve: the window may cut off a rise.
_STEEP_BEYOND = 6.0
_RESTARTS = 8
# Minima of each grid that are polished: a curve that is poorly determined has several.
_MINIMA = (1, 2)
# The eight neighbours of a grid's cell, in a grid with an edge of one cell around it.
_NEIGHBOURS = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
# A minimum of a grid that is worse than its best by this factor is not polished.
_HOPELESS = 10.0
_ITERATIONS = 60
# In shares of the search's box: how far one step of the descent reaches, and how far apart differences are taken.
_REACH, _BESIDE = 0.25, 1e-7
# To what share of its SSE a minimum is worked out that is only compared with others.
_ROUGH = 1e-3
# The least that is divided by: sums of squares vanish where the data say nothing.
_NOTHING = 1e-200
# Minima that lie this close, in shares of the search's box, are one.
_SAME = 5e-3


@dataclass(frozen=True)
class Problem:
    """One recipe's weighted least-squares problem.

    Shapes: log_compute, reward, weight, seed are (n,), by seed and within a seed by compute; log_compute is -inf
    at compute 0; seed counts from 0. ridge is 1 / (variance of the seeds' asymptotes). Bounds are inclusive;
    equal bounds fix a parameter. informing: which seeds have an asymptote of their own, (S,), all if None; a run
    that ended early says nothing of its asymptote and only lends its points to the common curve.
    """

    log_compute: Array
    reward: Array
    weight: Array
    seed: NDArray[np.intp]
    ridge: float
    r0_bounds: tuple[float, float]
    a_bounds: tuple[float, float]
    family: Family = SIGMOID
    informing: NDArray[np.bool_] | None = None

    @cached_property
    def loose(self) -> Array:
        """1 where a seed has an asymptote of its own, else 0; (S,)."""
        return np.ones(self.seeds) if self.informing is None else self.informing.astype(float)

    @cached_property
    def box(self) -> Box:
        """Limits of the search: u low, high, v low, high."""
        return self.family.box(self.log_compute)

    @cached_property
    def seeds(self) -> int:
        """Number of seeds among the points."""
        return int(self.seed.max()) + 1

    @cached_property
    def member(self) -> Array:
        """1 where a point is of a seed; (n, S)."""
        found: Array = (self.seed[:, None] == np.arange(self.seeds)[None, :]).astype(float)
        return found

    @cached_property
    def root(self) -> Array:
        """Square root of the weights, (n,)."""
        return np.sqrt(self.weight)

    @cached_property
    def centre(self) -> float:
        """The weighted mean reward: sums of squares about it keep the digits that the mean would cost."""
        return float(self.weight @ self.reward / self.weight.sum())

    @cached_property
    def by_seed(self) -> tuple[Array, Array]:
        """Weights, and weighted rewards about their centre, of each seed's points and 0 elsewhere; (S, n) each."""
        one = np.ascontiguousarray((self.weight[:, None] * self.member).T)
        return one, one * (self.reward - self.centre)

    @cached_property
    def totals(self) -> tuple[float, float, float]:
        """Sums of the weights, the weighted centred rewards, and their weighted squares."""
        one, y = self.by_seed
        return float(one.sum()), float(y.sum()), float((y @ (self.reward - self.centre)).sum())

    @cached_property
    def bounds(self) -> tuple[float, float, float, float]:
        """Lowest and highest R0, lowest and highest A, about the centre and as tight as A >= R0 makes them."""
        r_lo, r_hi, a_lo, a_hi = (x - self.centre for x in (*self.r0_bounds, *self.a_bounds))
        return r_lo, min(r_hi, a_hi), max(a_lo, r_lo), a_hi

    def basis(self, u: Array, v: Array) -> Array:
        """g at the points for cells (k,) -> (k, n)."""
        return self.family.basis(self.log_compute[None, :], u[:, None], v[:, None])


@dataclass(frozen=True)
class Quadratic:
    """SSE as a function of (R0, A), one a cell: c - 2 (h0 R0 + h1 A) + H00 R0^2 + 2 H01 R0 A + H11 A^2."""

    c: Array
    h0: Array
    h1: Array
    H00: Array
    H01: Array
    H11: Array

    def at(self, r0: Array | float, a: Array | float) -> Array:
        """SSE at (R0, A), broadcast over cells; rounding never makes it negative."""
        value = self.c - 2 * (self.h0 * r0 + self.h1 * a)
        value += self.H00 * r0 * r0 + 2 * self.H01 * r0 * a + self.H11 * a * a
        return np.maximum(value, 0.0)

    def take(self, cells: NDArray[np.intp]) -> Quadratic:
        """The same for some of the cells."""
        return Quadratic(*(x[cells] for x in self.fields()))

    def fields(self) -> tuple[Array, ...]:
        """Coefficients in the order of the class."""
        return self.c, self.h0, self.h1, self.H00, self.H01, self.H11


@dataclass(frozen=True)
class Surface:
    """The SSE over a grid with everything linear solved. Shapes: u (I,), v (J,), sse (I, J)."""

    u: Array
    v: Array
    sse: Array


@dataclass(frozen=True)
class Optimum:
    """A least-squares solution, by its parameters. sse is weighted, seeds' penalty included; seed_offset is (S,)."""

    u: float
    v: float
    r0: float
    a: float
    sse: float
    seed_offset: Array


def normal_equations(problem: Problem, g: Array) -> Quadratic:
    """SSE by (R0, A), both about the centre, of cells with basis g (cells, n), seeds' offsets eliminated; (cells,)."""
    # With w the weights: H11 = sum w g^2, H01 = sum w g (1 - g), H00 = sum w (1 - g)^2, h1 = sum w y g,
    # h0 = sum w y (1 - g); per seed first, then summed.
    one, y = problem.by_seed
    weights, lean, squares = problem.totals
    gg, g1, p = one @ (g * g).T, one @ g.T, y @ g.T
    if problem.seeds == 1:
        H11, h1 = gg[0], p[0]
        H01 = g1[0] - H11
        return Quadratic(np.full_like(H11, squares), lean - h1, h1, weights - H11 - 2 * H01, H01, H11)
    e = g1 - gg
    H11, H01, h1 = gg.sum(0), e.sum(0), p.sum(0)
    H00, h0 = weights - H11 - 2 * H01, lean - h1
    # min over d_s with sum(d_s) = 0 of sum gg_s d_s^2 + ridge d_s^2 - 2 q_s d_s, q = p - R0 e - A gg.
    k = problem.loose[:, None] / (gg + problem.ridge)
    ksum = k.sum(0)
    k_e, k_a, k_p = ((k * x).sum(0) for x in (e, gg, p))
    H00 = H00 - (k * e * e).sum(0) + k_e * k_e / ksum
    H01 = H01 - (k * e * gg).sum(0) + k_e * k_a / ksum
    H11 = H11 - (k * gg * gg).sum(0) + k_a * k_a / ksum
    h0 = h0 - (k * p * e).sum(0) + k_p * k_e / ksum
    h1 = h1 - (k * p * gg).sum(0) + k_p * k_a / ksum
    return Quadratic(squares - (k * p * p).sum(0) + k_p * k_p / ksum, h0, h1, H00, H01, H11)


def least_sse(q: Quadratic, problem: Problem) -> Array:
    """SSE at the best (R0, A) of each cell within bounds and A >= R0: exact, by trying each face of the region."""
    r_lo, r_hi, a_lo, a_hi = problem.bounds

    def best_a(q: Quadratic, r0: Array | float) -> Array:
        free = (q.h1 - q.H01 * r0) / np.maximum(q.H11, _NOTHING)
        return np.asarray(np.minimum(np.maximum(free, np.maximum(a_lo, r0)), a_hi))

    def best_r0(q: Quadratic, a: Array | float) -> Array:
        free = (q.h0 - q.H01 * a) / np.maximum(q.H00, _NOTHING)
        return np.asarray(np.maximum(np.minimum(free, np.minimum(r_hi, a)), r_lo))

    if r_lo == r_hi:
        return q.at(r_lo, best_a(q, r_lo))
    if a_lo == a_hi:
        return q.at(best_r0(q, a_lo), a_lo)
    # 0 <= det <= H00 H11 (Cauchy-Schwarz); where it vanishes g is constant, and R0 and A are not told apart.
    most = q.H00 * q.H11
    det = most - q.H01 * q.H01
    told = det > 1e-12 * most
    safe = np.where(told, det, 1.0)
    r0, a = (q.h0 * q.H11 - q.h1 * q.H01) / safe, (q.h1 * q.H00 - q.h0 * q.H01) / safe
    sse = q.at(r0, a)
    outside = np.flatnonzero(~(told & (r0 >= r_lo) & (r0 <= r_hi) & (a >= np.maximum(a_lo, r0)) & (a <= a_hi)))
    if not len(outside):
        return sse
    q = q.take(outside)
    # R0 at either end, A at either end, and the face A = R0, a level curve.
    r0, a = np.empty((2, 5, len(outside)))
    ends = np.array([[r_lo], [r_hi]]), np.array([[a_lo], [a_hi]])
    r0[:2], a[:2] = ends[0], best_a(q, ends[0])
    r0[2:4], a[2:4] = best_r0(q, ends[1]), ends[1]
    level = (q.h0 + q.h1) / np.maximum(q.H00 + 2 * q.H01 + q.H11, _NOTHING)
    r0[4] = a[4] = np.minimum(np.maximum(level, max(a_lo, r_lo)), min(r_hi, a_hi))
    value = q.at(r0, a)
    # Where R0 cannot come up to A there is no level curve.
    sse[outside] = value[: 5 if r_hi >= a_lo else 4].min(0)
    return sse


def cells_of(u: Array, v: Array) -> tuple[Array, Array]:
    """Coordinates of every cell of the grid u x v, flattened."""
    return np.repeat(u, len(v)), np.tile(v, len(u))


def surface(problem: Problem, u: Array, v: Array) -> Surface:
    """SSE over the grid u x v, everything else solved exactly."""
    # Cells along the rows, which are long: a row for each point's few cells takes twice the time.
    g = problem.family.basis(problem.log_compute[:, None], *cells_of(u, v)).T
    sse = least_sse(normal_equations(problem, g), problem)
    return Surface(u, v, sse.reshape(len(u), len(v)))


def evaluate(problem: Problem, u: float, v: float) -> tuple[Optimum, Array, Array]:
    """The linear solution at one (u, v), with residuals formed directly (no cancellation).

    Returns:
        The solution, the residuals (n,) and g (n,).
    """
    g = problem.basis(np.array([u]), np.array([v]))
    r0, a, offset, residual = _linear_at(problem, g)
    sse = float(problem.weight @ residual[0] ** 2 + problem.ridge * (offset[0] @ offset[0]))
    return Optimum(u, v, r0[0], a[0], sse, offset[0]), residual[0], g[0]


def _linear_at(problem: Problem, g: Array) -> tuple[list[float], list[float], Array, Array]:
    """The best R0 and A within their bounds at a few bases g (k, n), offsets (k, S) and residuals (k, n)."""
    q = normal_equations(problem, g)
    # In plain floats: of few cells that takes less time than arrays do.
    rows = zip(*(x.tolist() for x in (q.h0, q.h1, q.H00, q.H01, q.H11)), strict=True)
    found = [_linear_one(problem.bounds, *row) for row in rows]
    r0, a = ([pair[i] + problem.centre for pair in found] for i in (0, 1))
    base, gain = np.array(r0)[:, None], np.array([y - x for x, y in zip(r0, a, strict=True)])[:, None]
    residual = problem.reward - base - gain * g
    offset = np.zeros((len(g), problem.seeds))
    if problem.seeds > 1:
        one = problem.by_seed[0].T
        q_s = (g * residual) @ one
        k = problem.loose / ((g * g) @ one + problem.ridge)
        offset = k * (q_s - ((k * q_s).sum(1) / k.sum(1))[:, None])
        residual = residual - offset[:, problem.seed] * g
    return r0, a, offset, residual


def _linear_one(
    bounds: tuple[float, float, float, float], h0: float, h1: float, H00: float, H01: float, H11: float
) -> tuple[float, float]:
    """The best (R0, A) of a single cell within bounds and A >= R0, as `least_sse` finds it for many."""
    r_lo, r_hi, a_lo, a_hi = bounds

    def best_a(r0: float) -> float:
        return min(max((h1 - H01 * r0) / H11 if H11 > 1e-300 else 0.0, a_lo, r0), a_hi)

    def best_r0(a: float) -> float:
        return max(min((h0 - H01 * a) / H00 if H00 > 1e-300 else 0.0, r_hi, a), r_lo)

    if r_lo == r_hi:
        return r_lo, best_a(r_lo)
    if a_lo == a_hi:
        return best_r0(a_lo), a_lo
    det = H00 * H11 - H01 * H01
    if det > 1e-12 * H00 * H11:
        r0, a = (h0 * H11 - h1 * H01) / det, (h1 * H00 - h0 * H01) / det
        if r_lo <= r0 <= r_hi and max(a_lo, r0) <= a <= a_hi:
            return r0, a
    faces = [(r_lo, best_a(r_lo)), (r_hi, best_a(r_hi)), (best_r0(a_lo), a_lo), (best_r0(a_hi), a_hi)]
    if r_hi >= a_lo:
        level = min(max((h0 + h1) / max(H00 + 2 * H01 + H11, 1e-300), a_lo, r_lo), r_hi, a_hi)
        faces.append((level, level))
    return min(faces, key=lambda p: p[0] * (p[0] * H00 - 2 * h0 + 2 * H01 * p[1]) + p[1] * (p[1] * H11 - 2 * h1))


@dataclass(frozen=True)
class _Step:
    """What a descent knows of a point: the solution there, and half its SSE's gradient and curvature by (u, v).

    Of the coordinates that are searched alone, one to two.
    """

    best: Optimum
    at: tuple[float, ...]
    gradient: list[float]
    curvature: list[list[float]]


def polish(problem: Problem, u: float, v: float, tolerance: float = 1e-12) -> Optimum:
    """Descend from a grid point to the nearby minimum by Levenberg-Marquardt on (u, v), R0 and A projected out.

    Derivatives are differences: the linear solution changes its face at bounds, where formulas would mislead.
    """
    box = problem.box
    sides = [(box[i], box[i + 1]) for i in (0, 2)]
    start = tuple(min(max(x, low), high) for x, (low, high) in zip((u, v), sides, strict=True))
    free = [i for i, (low, high) in enumerate(sides) if high > low]
    step = _step(problem, start, free, sides)
    damping = 1e-3
    for _ in range(_ITERATIONS if free else 0):
        # A coordinate that is pressed against an edge of the search takes no part in the step.
        moving = [
            k for k, i in enumerate(free)
            if not (step.at[i] <= sides[i][0] and step.gradient[k] > 0)
            and not (step.at[i] >= sides[i][1] and step.gradient[k] < 0)
        ]  # fmt: skip
        gradient = [step.gradient[k] for k in moving]
        curvature = [[step.curvature[k][m] for m in moving] for k in moving]
        improved = False
        for _ in range(12 if moving else 0):
            move = _damped(curvature, gradient, damping)
            if move is None:
                return step.best
            trial = list(step.at)
            limited = []
            for k, by in zip(moving, move, strict=True):
                low, high = sides[free[k]]
                limited.append(min(max(by, -_REACH * (high - low)), _REACH * (high - low)))
                trial[free[k]] = min(max(trial[free[k]] + limited[-1], low), high)
            found = _step(problem, tuple(trial), free, sides)
            gain = step.best.sse - found.best.sse
            if gain > 0:
                # A step that brings much less than foretold has overshot: the curvature left out is not small.
                foretold = -sum(
                    by * (2 * slope + sum(c * other for c, other in zip(row, limited, strict=True)))
                    for by, slope, row in zip(limited, gradient, curvature, strict=True)
                )
                damping = max(damping / 10, 1e-12) if gain > 0.25 * foretold else 10 * damping
                step, improved = found, True
                break
            damping *= 10
            if damping > 1e8:
                break
        if not improved or gain <= tolerance * (step.best.sse + gain):
            break
    return step.best


def _step(problem: Problem, at: tuple[float, ...], free: list[int], sides: list[tuple[float, float]]) -> _Step:
    """Solve at (u, v) and a little beside it, all at once."""
    points = [at]
    for i in free:
        low, high = sides[i]
        by = _BESIDE * (high - low)
        # Away from the nearer edge of the search.
        beside = at[i] + by if at[i] + by <= high else at[i] - by
        points.append((*at[:i], beside, *at[i + 1 :]))
    where = np.array(points)
    r0, a, offset, residual = _linear_at(problem, problem.basis(where[:, 0], where[:, 1]))
    left = problem.root * residual
    if problem.seeds > 1:
        left = np.concatenate([left, np.sqrt(problem.ridge) * offset], axis=1)
    own = left[0]
    sse = float(own @ own)
    moved = np.array([points[1 + k][i] - at[i] for k, i in enumerate(free)])
    slopes = (left[1:] - own) / moved[:, None]
    best = Optimum(at[0], at[1], r0[0], a[0], sse, offset[0])
    return _Step(best, at, (slopes @ own).tolist(), (slopes @ slopes.T).tolist())


def _damped(curvature: list[list[float]], gradient: list[float], damping: float) -> tuple[float, ...] | None:
    """The step of Levenberg and Marquardt (1963) in one or two coordinates; None where nothing depends on them.

    Scaled by the diagonal, so that damping does not depend on the units of u and v.
    """
    if len(gradient) == 1:
        ((c,),), (slope,) = curvature, gradient
        return None if c <= 0 else (-slope / (c * (1 + damping)),)
    (c00, c01), (_, c11) = curvature
    c00, c11 = c00 * (1 + damping), c11 * (1 + damping)
    det = c00 * c11 - c01 * c01
    if det <= 0:
        return None
    return (c01 * gradient[1] - c11 * gradient[0]) / det, (c01 * gradient[0] - c00 * gradient[1]) / det


def axes_of(problem: Problem, box: Box, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Grid lines of a box; a coordinate without width has one."""
    (u_lo, u_hi, v_lo, v_hi), (rows, columns) = box, shape
    return (
        np.linspace(u_lo, u_hi, rows) if u_hi > u_lo else np.array([u_lo]),
        np.linspace(v_lo, v_hi, columns) if v_hi > v_lo else np.array([v_lo]),
    )


def solve(problem: Problem, tolerance: float = 1e-12) -> Optimum:
    """Find the global least-squares solution by polishing the best minima of its search grids.

    `tests/sweeps/fit/test_fit.py` holds it to grids of thirteen to forty times the cells.
    """
    starts = _minima(surface(problem, *axes_of(problem, problem.box, _COARSE)), _MINIMA[0])
    if problem.family.shape == 2:
        starts += _minima(_steep(problem), _MINIMA[1])
    rough = sorted((polish(problem, u, v, max(tolerance, _ROUGH)) for u, v in starts), key=lambda o: o.sse)
    best = polish(problem, rough[0].u, rough[0].v, tolerance)
    others = [o for o in rough[1:] if o.sse <= rough[0].sse * (1 + _ROUGH) and not _near(problem, o, rough[0])]
    best = min([best, *(polish(problem, o.u, o.v, tolerance) for o in others)], key=lambda o: o.sse)
    # Where R0 or A meets a bound the SSE has a crease, on which the descent may stick until it starts afresh.
    for _ in range(_RESTARTS if _at_crease(problem, best) else 0):
        again = polish(problem, best.u, best.v, tolerance)
        if again.sse >= best.sse * (1 - 1e-9):
            break
        best = again
    return best


def _near(problem: Problem, one: Optimum, other: Optimum) -> bool:
    """Return whether two descents have come to the same minimum, as far as they went."""
    u_low, u_high, v_low, v_high = problem.box
    same = abs(one.u - other.u) <= _SAME * (u_high - u_low), abs(one.v - other.v) <= _SAME * (v_high - v_low)
    return all(same)


def _minima(grid: Surface, most: int) -> list[tuple[float, float]]:
    """(u, v) of the best local minima of a grid."""
    rows, columns = grid.sse.shape
    padded = np.full((rows + 2, columns + 2), np.inf)
    padded[1:-1, 1:-1] = grid.sse
    least = grid.sse.copy()
    for i, j in _NEIGHBOURS:
        np.minimum(least, padded[i : i + rows, j : j + columns], out=least)
    minima = np.argwhere(grid.sse <= least)
    value = grid.sse[minima[:, 0], minima[:, 1]]
    order = np.argsort(value, kind="stable")[:most]
    return [(float(grid.u[i]), float(grid.v[j])) for i, j in minima[order[value[order] <= _HOPELESS * value.min()]]]


def _steep(problem: Problem) -> Surface:
    """The SSE of nearly stepwise curves, whose basins between two points are narrower than the coarse grid."""
    _, u_high, v_low, v_high = problem.box
    seen = problem.log_compute[np.isfinite(problem.log_compute)]
    if problem.family.name == "logistic":
        # v of a logistic is compute itself, not its logarithm.
        seen = np.exp(seen)
    u_low = u_high - _STEEP_SPAN
    last = float(seen.max()) + _STEEP_BEYOND * float(np.exp(-u_low))
    lines = np.linspace(max(v_low, float(seen.min())), min(v_high, last), _STEEP[1])
    return surface(problem, np.linspace(u_low, u_high, _STEEP[0]), lines)


def _at_crease(problem: Problem, best: Optimum) -> bool:
    """Return whether R0 or A lies close to one of its bounds and is not fixed."""
    return any(
        low < high and min(value - low, high - value) < 1e-3 * (high - low)
        for value, (low, high) in ((best.r0, problem.r0_bounds), (best.a, problem.a_bounds))
    )
