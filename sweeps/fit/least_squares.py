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

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.fit.family import SIGMOID, Box, Family

Array = NDArray[np.float64]
_COARSE = (30, 48)
# Lines of the grid for steep curves, and how far down in u it goes: to a fifth of the steepest.
_STEEP, _STEEP_SPAN = (10, 160), 1.8
# How far past the last point its midpoints go, in widths of its least steep curve: the window may cut off a rise.
_STEEP_BEYOND = 6.0
_RESTARTS = 8
# A minimum of a grid that is worse than its best by this factor is not polished.
_HOPELESS = 10.0
_ITERATIONS = 60
# To what share of its SSE a minimum is worked out that is only compared with others.
_ROUGH = 1e-3


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
    def centred(self) -> Array:
        """Rewards about their centre, (n,)."""
        return self.reward - self.centre

    @cached_property
    def totals(self) -> tuple[float, float]:
        """Sum of the weights, and of the weighted centred rewards."""
        return float(self.weight.sum()), float(self.weight @ self.centred)

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

    def at(self, r0: Array, a: Array) -> Array:
        """SSE at (R0, A), broadcast over cells; rounding never makes it negative."""
        value = self.c - 2 * (self.h0 * r0 + self.h1 * a)
        value += self.H00 * r0 * r0 + 2 * self.H01 * r0 * a + self.H11 * a * a
        return np.maximum(value, 0.0)

    def take(self, mask: NDArray[np.bool_] | NDArray[np.intp]) -> Quadratic:
        """The same for some of the cells, of flattened arrays."""
        return Quadratic(*(np.broadcast_to(x, self.h0.shape).ravel()[mask] for x in self._fields()))

    def _fields(self) -> tuple[Array, ...]:
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


def divide(top: Array, bottom: Array) -> Array:
    """top / bottom, and 0 where the data say nothing (bottom is 0)."""
    known = bottom > 1e-300
    return np.where(known, top / np.where(known, bottom, 1.0), 0.0)


def normal_equations(problem: Problem, g: Array) -> Quadratic:
    """SSE by (R0, A) of cells with basis g (cells, n), the seeds' offsets eliminated; (cells,)."""
    member, weight = problem.member, problem.weight
    # With w the weights: H11 = sum w g^2, H01 = sum w g (1 - g), H00 = sum w (1 - g)^2, h1 = sum w y g,
    # h0 = sum w y (1 - g); per seed first, then summed.
    one = (weight[:, None] * member).T
    y = one * problem.reward
    gg, g1, gy = one @ (g * g).T, one @ g.T, y @ g.T
    e, p = g1 - gg, gy
    H11, H01, h1 = gg.sum(0), e.sum(0), p.sum(0)
    H00 = weight.sum() - H11 - 2 * H01
    h0, c = y.sum() - h1, np.full_like(H11, float((y @ problem.reward).sum()))
    if problem.seeds > 1:
        # min over d_s with sum(d_s) = 0 of sum gg_s d_s^2 + ridge d_s^2 - 2 q_s d_s, q = gy - R0 e - A gg.
        k = problem.loose[:, None] / (gg + problem.ridge)
        ksum = k.sum(0)
        k_e, k_a, k_p = ((k * x).sum(0) for x in (e, gg, p))
        H00 = H00 - (k * e * e).sum(0) + k_e * k_e / ksum
        H01 = H01 - (k * e * gg).sum(0) + k_e * k_a / ksum
        H11 = H11 - (k * gg * gg).sum(0) + k_a * k_a / ksum
        h0 = h0 - (k * p * e).sum(0) + k_p * k_e / ksum
        h1 = h1 - (k * p * gg).sum(0) + k_p * k_a / ksum
        c = c - (k * p * p).sum(0) + k_p * k_p / ksum
    return Quadratic(c, h0, h1, H00, H01, H11)


def linear_solution(q: Quadratic, problem: Problem) -> tuple[Array, Array, Array]:
    """The best (R0, A) of each cell within bounds and A >= R0: exact, by trying each face of the region."""
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds
    r_hi = min(r_hi, a_hi)
    a_lo = max(a_lo, r_lo)

    def best_a(r0: Array) -> Array:
        return np.clip(divide(q.h1 - q.H01 * r0, q.H11), np.maximum(a_lo, r0), a_hi)

    def best_r0(a: Array) -> Array:
        return np.clip(divide(q.h0 - q.H01 * a, q.H00), r_lo, np.minimum(r_hi, a))

    if r_lo == r_hi:
        r0 = np.full_like(q.h0, r_lo)
        a = best_a(r0)
        return r0, a, q.at(r0, a)
    if a_lo == a_hi:
        a = np.full_like(q.h0, a_lo)
        r0 = best_r0(a)
        return r0, a, q.at(r0, a)
    det = q.H00 * q.H11 - q.H01**2
    inner_r0 = divide(q.h0 * q.H11 - q.h1 * q.H01, det)
    inner_a = divide(q.h1 * q.H00 - q.h0 * q.H01, det)
    # 0 <= det <= H00 H11 (Cauchy-Schwarz); where it vanishes g is constant, and R0 and A are not told apart.
    inside = (det > 1e-12 * q.H00 * q.H11) & (inner_r0 >= r_lo) & (inner_r0 <= r_hi)
    inside &= (inner_a >= np.maximum(a_lo, inner_r0)) & (inner_a <= a_hi)
    r0, a, sse = inner_r0, inner_a, q.at(inner_r0, inner_a)
    outside = np.flatnonzero(~inside)
    if not len(outside):
        return r0, a, sse
    q = q.take(outside)
    r0_, a_ = np.full(len(outside), r_lo), best_a(np.full(len(outside), r_lo))
    sse_ = q.at(r0_, a_)
    faces = [(np.full_like(r0_, r_hi), best_a(np.full_like(r0_, r_hi)))]
    faces += [(best_r0(np.full_like(r0_, top)), np.full_like(r0_, top)) for top in (a_lo, a_hi)]
    # The face A = R0, a level curve.
    level = divide(q.h0 + q.h1, q.H00 + 2 * q.H01 + q.H11)
    if r_hi >= a_lo:
        level = np.clip(level, max(a_lo, r_lo), min(r_hi, a_hi))
        faces.append((level, level))
    for face_r0, face_a in faces:
        value = q.at(face_r0, face_a)
        better = value < sse_
        r0_, a_, sse_ = np.where(better, face_r0, r0_), np.where(better, face_a, a_), np.where(better, value, sse_)
    for whole, part in ((r0, r0_), (a, a_), (sse, sse_)):
        whole.ravel()[outside] = part
    return r0, a, sse


def shifted(problem: Problem, by: float) -> Problem:
    """The same problem with the reward's origin moved."""
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds
    return replace(
        problem,
        reward=problem.reward + by,
        r0_bounds=(r_lo + by, r_hi + by),
        a_bounds=(a_lo + by, a_hi + by),
    )


def cells_of(u: Array, v: Array) -> tuple[Array, Array]:
    """Coordinates of every cell of the grid u x v, flattened."""
    return np.repeat(u, len(v)), np.tile(v, len(u))


def surface(problem: Problem, u: Array, v: Array) -> Surface:
    """SSE over the grid u x v, everything else solved exactly."""
    centred = shifted(problem, -problem.centre)
    _, _, sse = linear_solution(normal_equations(centred, problem.basis(*cells_of(u, v))), centred)
    return Surface(u, v, sse.reshape(len(u), len(v)))


def evaluate(problem: Problem, u: float, v: float) -> tuple[Optimum, Array, Array]:
    """The linear solution at one (u, v), with residuals formed directly (no cancellation).

    Returns:
        The solution, the residuals (n,) and g (n,).
    """
    g = problem.family.at(problem.log_compute, u, v)
    r0, a = _linear_at(problem, g)
    residual = problem.reward - r0 * (1 - g) - a * g
    offset = np.zeros(problem.seeds)
    if problem.seeds > 1:
        w = problem.weight
        q_s = np.bincount(problem.seed, w * g * residual, problem.seeds)
        k = problem.loose / (np.bincount(problem.seed, w * g * g, problem.seeds) + problem.ridge)
        offset = k * (q_s - (k @ q_s) / k.sum())
        residual = residual - offset[problem.seed] * g
    sse = float(problem.weight @ residual**2 + problem.ridge * (offset @ offset))
    return Optimum(u, v, r0, a, sse, offset), residual, g


def _linear_at(problem: Problem, g: Array) -> tuple[float, float]:
    """Return the best (R0, A) within their bounds at one basis g (n,), the seeds' offsets eliminated."""
    centre = problem.centre
    # In plain floats: this is evaluated thousands of times.
    wg = problem.weight * g
    one, ys = problem.totals
    if problem.seeds == 1:
        gg, g1, gy = float(wg @ g), float(wg.sum()), float(wg @ problem.centred)
        H00, H01, H11, h0, h1 = one - 2 * g1 + gg, g1 - gg, gg, ys - gy, gy
    else:
        # The seeds' offsets eliminated, as in `normal_equations`.
        a_s, b_s, p_s = (np.bincount(problem.seed, x, problem.seeds) for x in (wg * g, wg, wg * problem.centred))
        e_s = b_s - a_s
        k = problem.loose / (a_s + problem.ridge)
        three = np.stack([e_s, a_s, p_s])
        cross, lean = (three * k) @ three.T, three @ k
        (ee, ea, ep), (_, aa, ap), _ = (cross - np.outer(lean, lean) / k.sum()).tolist()
        gg, e, gy = float(a_s.sum()), float(e_s.sum()), float(p_s.sum())
        H00, H01, H11 = one - gg - 2 * e - ee, e - ea, gg - aa
        h0, h1 = ys - gy - ep, gy - ap
    r_lo, r_hi, a_lo, a_hi = (x - centre for x in (*problem.r0_bounds, *problem.a_bounds))
    r_hi, a_lo = min(r_hi, a_hi), max(a_lo, r_lo)

    def best_a(r0: float) -> float:
        return min(max((h1 - H01 * r0) / H11 if H11 > 1e-300 else 0.0, a_lo, r0), a_hi)

    def best_r0(a: float) -> float:
        return max(min((h0 - H01 * a) / H00 if H00 > 1e-300 else 0.0, r_hi, a), r_lo)

    if r_lo == r_hi:
        return r_lo + centre, best_a(r_lo) + centre
    if a_lo == a_hi:
        return best_r0(a_lo) + centre, a_lo + centre
    det = H00 * H11 - H01 * H01
    if det > 1e-12 * H00 * H11:
        r0, a = (h0 * H11 - h1 * H01) / det, (h1 * H00 - h0 * H01) / det
        if r_lo <= r0 <= r_hi and max(a_lo, r0) <= a <= a_hi:
            return r0 + centre, a + centre
    faces = [(r_lo, best_a(r_lo)), (r_hi, best_a(r_hi)), (best_r0(a_lo), a_lo), (best_r0(a_hi), a_hi)]
    if r_hi >= a_lo:
        level = min(max((h0 + h1) / max(H00 + 2 * H01 + H11, 1e-300), a_lo, r_lo), r_hi, a_hi)
        faces.append((level, level))
    r0, a = min(faces, key=lambda p: p[0] * (p[0] * H00 - 2 * h0 + 2 * H01 * p[1]) + p[1] * (p[1] * H11 - 2 * h1))
    return r0 + centre, a + centre


def polish(problem: Problem, u: float, v: float, tolerance: float = 1e-12) -> Optimum:
    """Descend from a grid point to the nearby minimum by Levenberg-Marquardt on (u, v), R0 and A projected out.

    Derivatives are differences: the linear solution changes its face at bounds, where formulas would mislead.
    """
    low, high = np.array(problem.box[0::2]), np.array(problem.box[1::2])
    free = np.flatnonzero(high > low)
    x = np.clip(np.array([u, v]), low, high)
    best, residual = _residuals(problem, x)
    if not len(free):
        return best
    damping = 1e-3
    step, reach = 1e-7 * (high - low), 0.25 * (high - low)
    for _ in range(_ITERATIONS):
        columns = []
        for i in free:
            moved = x.copy()
            # Away from the nearer edge of the search.
            moved[i] += step[i] if x[i] + step[i] <= high[i] else -step[i]
            columns.append((_residuals(problem, moved)[1] - residual) / (moved[i] - x[i]))
        J = np.stack(columns, axis=1)
        gradient = J.T @ residual
        # A coordinate that is pressed against an edge of the search takes no part in the step.
        loose = ~(((x[free] <= low[free]) & (gradient > 0)) | ((x[free] >= high[free]) & (gradient < 0)))
        moving, gradient, J = free[loose], gradient[loose], J[:, loose]
        if not len(moving):
            return best
        curvature = J.T @ J
        improved = False
        for _ in range(12):
            # Scaled by the diagonal (Marquardt 1963), so that damping does not depend on the units of u and v.
            scaled = curvature + damping * np.diag(np.diag(curvature) + 1e-300)
            try:
                move = np.linalg.solve(scaled, -gradient)
            except np.linalg.LinAlgError:
                return best
            trial = x.copy()
            limited = np.clip(move, -reach[moving], reach[moving])
            trial[moving] = np.clip(x[moving] + limited, low[moving], high[moving])
            found, trial_residual = _residuals(problem, trial)
            if found.sse < best.sse:
                gain = best.sse - found.sse
                x, best, residual, improved = trial, found, trial_residual, True
                # A step that brings much less than foretold has overshot: the curvature left out is not small.
                foretold = -(2 * gradient @ limited + limited @ curvature @ limited)
                damping = max(damping / 10, 1e-12) if gain > 0.25 * foretold else 10 * damping
                break
            damping *= 10
            if damping > 1e8:
                break
        if not improved or gain <= tolerance * best.sse:
            return best
    return best


def _residuals(problem: Problem, x: Array) -> tuple[Optimum, Array]:
    """The solution at (u, v) and the weighted residuals with the seeds' penalty, whose squares sum to its SSE."""
    solution, residual, _ = evaluate(problem, float(x[0]), float(x[1]))
    weighted = problem.root * residual
    if problem.seeds > 1:
        weighted = np.concatenate([weighted, np.sqrt(problem.ridge) * solution.seed_offset])
    return solution, weighted


def axes_of(problem: Problem, box: Box, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Grid lines of a box; a coordinate without width has one."""
    (u_lo, u_hi, v_lo, v_hi), (rows, columns) = box, shape
    return (
        np.linspace(u_lo, u_hi, rows) if u_hi > u_lo else np.array([u_lo]),
        np.linspace(v_lo, v_hi, columns) if v_hi > v_lo else np.array([v_lo]),
    )


def solve(problem: Problem, polished: int = 3, tolerance: float = 1e-12) -> Optimum:
    """Find the global least-squares solution by polishing the best minima of its search grids.

    The best few local minima of each grid are polished: a curve that is poorly determined has several.
    """
    starts = _minima(surface(problem, *axes_of(problem, problem.box, _COARSE)), polished)
    if problem.family.shape == 2:
        starts += _minima(_steep(problem), 2 * polished)
    found = [polish(problem, u, v, max(tolerance, _ROUGH)) for u, v in starts]
    close = min(o.sse for o in found) * (1 + _ROUGH)
    best = min((polish(problem, o.u, o.v, tolerance) for o in found if o.sse <= close), key=lambda o: o.sse)
    # Where R0 or A meets a bound the SSE has a crease, on which the descent may stick until it starts afresh.
    for _ in range(_RESTARTS if _at_crease(problem, best) else 0):
        again = polish(problem, best.u, best.v, tolerance)
        if again.sse >= best.sse * (1 - 1e-9):
            break
        best = again
    return best


def _minima(grid: Surface, most: int) -> list[tuple[float, float]]:
    """(u, v) of the best local minima of a grid."""
    padded = np.pad(grid.sse, 1, constant_values=np.inf)
    rows, columns = grid.sse.shape
    neighbours = [padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    minima = np.argwhere(grid.sse <= np.min(neighbours, axis=0))
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
