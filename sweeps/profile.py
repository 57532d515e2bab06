"""The least-squares core of a fit: variable projection of the compute curve.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B) = R0 (1 - g) + A g,   g = logistic(B (ln C - ln C_mid))

Given (ln B, ln C_mid) the rest is linear and solved exactly within its bounds, so only two dimensions are
searched, on a grid that is the same whatever the data's units: nothing depends on a starting value.

Several seeds of a recipe share the curve and differ in their asymptote, A_s = A + d_s with sum(d_s) = 0 and a
ridge on d_s (a random effect). A is then the mean over the runs given, and a lasting offset between two seeds
is neither taken for noise nor for independent evidence. All weights are 1 / variance.

Source: arXiv 2510.13786, eq. 1; variable projection as in arXiv 2603.22339.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import expit

Array = NDArray[np.float64]

# The search: B from almost a constant to a step; C_mid from well below the data to far beyond it.
B_RANGE = (0.1, 20.0)
C_MID_BELOW, C_MID_ABOVE = 20.0, 100.0
_COARSE = (40, 72)


@dataclass(frozen=True)
class Problem:
    """One recipe's weighted least-squares problem.

    Shapes: log_compute, reward, weight, seed are (n,); log_compute is -inf at compute 0; seed counts from 0.
    ridge is 1 / (variance of the seeds' asymptotes). Bounds are inclusive; equal bounds fix a parameter.
    """

    log_compute: Array
    reward: Array
    weight: Array
    seed: NDArray[np.intp]
    ridge: float
    r0_bounds: tuple[float, float]
    a_bounds: tuple[float, float]

    def search_box(self) -> tuple[float, float, float, float]:
        """Limits of the search: ln B low, high, ln C_mid low, high."""
        positive = self.log_compute[np.isfinite(self.log_compute)]
        return (
            float(np.log(B_RANGE[0])),
            float(np.log(B_RANGE[1])),
            float(positive.min() - np.log(C_MID_BELOW)),
            float(positive.max() + np.log(C_MID_ABOVE)),
        )


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
        """The same for some of the cells."""
        return Quadratic(self.c[mask], self.h0[mask], self.h1[mask], self.H00[mask], self.H01[mask], self.H11[mask])


@dataclass(frozen=True)
class Surface:
    """The SSE over a grid with everything linear solved. Shapes: ln_b (I,), ln_c (J,), the rest (I, J)."""

    ln_b: Array
    ln_c: Array
    sse: Array
    r0: Array
    a: Array
    quadratic: Quadratic


@dataclass(frozen=True)
class Optimum:
    """The least-squares solution. sse is weighted and includes the penalty on seeds; seed_offset is (S,)."""

    ln_b: float
    ln_c: float
    r0: float
    a: float
    sse: float
    seed_offset: Array


def divide(top: Array, bottom: Array) -> Array:
    """top / bottom, and 0 where the data say nothing (bottom is 0)."""
    safe = np.where(bottom > 1e-300, bottom, 1.0)
    return np.where(bottom > 1e-300, top / safe, 0.0)


def _quadratic(problem: Problem, g: Array) -> Quadratic:
    """Normal equations of (R0, A) with the seeds' offsets eliminated. Shapes: g (cells, n) -> (cells,)."""
    w, y = problem.weight, problem.reward
    seeds = int(problem.seed.max()) + 1
    member = (problem.seed[:, None] == np.arange(seeds)[None, :]).astype(float)
    weighted = member * w[:, None]
    a_s = (g * g) @ weighted
    b_s = g @ weighted
    d_s = g @ (weighted * y[:, None])
    e_s = b_s - a_s
    a, e, d = a_s.sum(1), e_s.sum(1), d_s.sum(1)
    total = float(w.sum())
    H00, H01, H11 = total - a - 2 * e, e, a
    h0, h1, c = float(w @ y) - d, d, np.full(len(g), float(w @ (y * y)))
    if seeds > 1:
        # min over d_s with sum(d_s) = 0 of sum a_s d_s^2 + ridge d_s^2 - 2 q_s d_s, q = d - R0 e - A a.
        k = 1.0 / (a_s + problem.ridge)
        ksum = k.sum(1)

        def lost(u: Array, v: Array) -> Array:
            taken: Array = (k * u * v).sum(1) - (k * u).sum(1) * (k * v).sum(1) / ksum
            return taken

        H00, H01, H11 = H00 - lost(e_s, e_s), H01 - lost(e_s, a_s), H11 - lost(a_s, a_s)
        h0, h1, c = h0 - lost(d_s, e_s), h1 - lost(d_s, a_s), c - lost(d_s, d_s)
    return Quadratic(c, h0, h1, H00, H01, H11)


def _solve(q: Quadratic, problem: Problem) -> tuple[Array, Array, Array]:
    """The best (R0, A) of each cell within bounds and A >= R0: exact, by trying each face of the region."""
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds
    r_hi = min(r_hi, a_hi)
    a_lo = max(a_lo, r_lo)

    def best_a(r0: Array) -> Array:
        return np.clip(divide(q.h1 - q.H01 * r0, q.H11), np.maximum(a_lo, r0), a_hi)

    def best_r0(a: Array) -> Array:
        return np.clip(divide(q.h0 - q.H01 * a, q.H00), r_lo, np.minimum(r_hi, a))

    det = q.H00 * q.H11 - q.H01**2
    inner_r0 = divide(q.h0 * q.H11 - q.h1 * q.H01, det)
    inner_a = divide(q.h1 * q.H00 - q.h0 * q.H01, det)
    inside = (det > 1e-12 * q.H00 * q.H11) & (inner_r0 >= r_lo) & (inner_r0 <= r_hi)
    inside &= (inner_a >= np.maximum(a_lo, inner_r0)) & (inner_a <= a_hi)
    r0 = np.where(inside, inner_r0, r_lo)
    a = np.where(inside, inner_a, best_a(r0))
    sse = q.at(r0, a)
    if bool(inside.all()):
        return r0, a, sse
    faces = [(np.full_like(det, r), best_a(np.full_like(det, r))) for r in (r_lo, r_hi)]
    faces += [(best_r0(np.full_like(det, top)), np.full_like(det, top)) for top in (a_lo, a_hi)]
    level = divide(q.h0 + q.h1, q.H00 + 2 * q.H01 + q.H11)
    if r_hi >= a_lo:
        level = np.clip(level, max(a_lo, r_lo), min(r_hi, a_hi))
        faces.append((level, level))
    for face_r0, face_a in faces:
        value = q.at(face_r0, face_a)
        better = ~inside & (value < sse)
        r0, a, sse = np.where(better, face_r0, r0), np.where(better, face_a, a), np.where(better, value, sse)
    return r0, a, sse


def surface(problem: Problem, ln_b: Array, ln_c: Array) -> Surface:
    """SSE over the grid ln_b x ln_c, everything else solved exactly."""
    # Rewards are centred: the sums of squares below would otherwise lose digits to the mean.
    centre = float(np.average(problem.reward, weights=problem.weight))
    centred = shifted(problem, -centre)
    shape = (len(ln_b), len(ln_c))
    slope = np.exp(ln_b)[:, None, None]
    g = expit(slope * (problem.log_compute - ln_c[:, None])[None]).reshape(-1, len(problem.reward))
    q = _quadratic(centred, g)
    r0, a, sse = _solve(q, centred)
    return Surface(ln_b, ln_c, sse.reshape(shape), (r0 + centre).reshape(shape), (a + centre).reshape(shape), q)


def shifted(problem: Problem, by: float) -> Problem:
    """The same problem with the reward's origin moved."""
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds
    return replace(
        problem,
        reward=problem.reward + by,
        r0_bounds=(r_lo + by, r_hi + by),
        a_bounds=(a_lo + by, a_hi + by),
    )


def evaluate(problem: Problem, ln_b: float, ln_c: float) -> tuple[Optimum, Array, Array]:
    """The linear solution at one (ln B, ln C_mid), with residuals formed directly (no cancellation).

    Returns:
        The solution, the residuals (n,) and g (n,).
    """
    g = expit(np.exp(ln_b) * (problem.log_compute - ln_c))
    r0_, a_, _ = _solve(_quadratic(problem, g[None]), problem)
    r0, a = float(r0_[0]), float(a_[0])
    residual = problem.reward - r0 * (1 - g) - a * g
    seeds = int(problem.seed.max()) + 1
    offset = np.zeros(seeds)
    if seeds > 1:
        w = problem.weight
        q_s = np.bincount(problem.seed, w * g * residual, seeds)
        k = 1.0 / (np.bincount(problem.seed, w * g * g, seeds) + problem.ridge)
        offset = k * (q_s - (k @ q_s) / k.sum())
        residual = residual - offset[problem.seed] * g
    sse = float(problem.weight @ residual**2 + problem.ridge * (offset @ offset if seeds > 1 else 0.0))
    return Optimum(ln_b, ln_c, r0, a, sse, offset), residual, g


def _polish(problem: Problem, ln_b: float, ln_c: float, tolerance: float) -> Optimum:
    """Gauss-Newton on the two searched parameters, within the search box."""
    box = problem.search_box()
    root = np.sqrt(problem.weight)

    def residuals(x: Array) -> Array:
        solution, residual, _ = evaluate(problem, float(x[0]), float(x[1]))
        return np.concatenate([root * residual, np.sqrt(problem.ridge) * solution.seed_offset])

    low, high = np.array([box[0], box[2]]), np.array([box[1], box[3]])
    start = np.clip([ln_b, ln_c], low + 1e-9, high - 1e-9)
    found = least_squares(
        residuals, start, bounds=(low, high), xtol=tolerance, ftol=tolerance, gtol=tolerance, max_nfev=40
    )
    return evaluate(problem, float(found.x[0]), float(found.x[1]))[0]


def solve(problem: Problem, polished: int = 3, tolerance: float = 1e-15) -> tuple[Optimum, Surface]:
    """The global least-squares solution and the coarse surface it was found on.

    The best few local minima of the grid are polished: a curve that is poorly determined has several.
    """
    box = problem.search_box()
    grid = surface(problem, np.linspace(box[0], box[1], _COARSE[0]), np.linspace(box[2], box[3], _COARSE[1]))
    padded = np.pad(grid.sse, 1, constant_values=np.inf)
    rows, columns = grid.sse.shape
    neighbours = [padded[i : i + rows, j : j + columns] for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    minima = np.argwhere(grid.sse <= np.min(neighbours, axis=0))
    order = np.argsort(grid.sse[minima[:, 0], minima[:, 1]], kind="stable")[:polished]
    found = [_polish(problem, float(grid.ln_b[i]), float(grid.ln_c[j]), tolerance) for i, j in minima[order]]
    return min(found, key=lambda o: o.sse), grid
