"""The profile likelihood of a fitted curve: intervals of A, B and C_mid, and joint draws to match.

Everything is read off a grid over (ln B, ln C_mid) that is zoomed to the region the data allow; within a cell
the SSE is an exact quadratic in (R0, A), so A's interval needs no grid of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from sweeps.profile import Array, Optimum, Problem, Quadratic, Surface, divide, shifted, surface

_FINE = (40, 56)
_ZOOMS = 6
# A zoom covers this many times the deviance of a 95% interval: what the draws need of the tails.
_TAILS = 3.0


def zoom(problem: Problem, best: Optimum, coarse: Surface, deviance: float) -> Surface:
    """A grid fitted to the region whose SSE exceeds the minimum by at most `_TAILS` times `deviance`.

    Starts from what the coarse grid shows of that region and follows it, inwards or outwards.
    """
    box = np.array(problem.search_box())
    limit = best.sse + _TAILS * deviance
    step = np.array([coarse.ln_b[1] - coarse.ln_b[0], coarse.ln_c[1] - coarse.ln_c[0]])
    centre = np.array([best.ln_b, best.ln_c])
    grid, shape = coarse, np.array(_FINE)
    low, high = centre - step, centre + step
    for _ in range(_ZOOMS):
        rows, columns = np.nonzero(grid.sse <= limit)
        if len(rows):
            near, far = rows.min(), rows.max()
            left, right = columns.min(), columns.max()
            low = np.minimum(centre, [grid.ln_b[near], grid.ln_c[left]]) - step
            high = np.maximum(centre, [grid.ln_b[far], grid.ln_c[right]]) + step
            # A region cut off by the grid's own edge goes on beyond it.
            span = high - low
            low -= 0.5 * span * np.array([near == 0, left == 0])
            high += 0.5 * span * np.array([far == len(grid.ln_b) - 1, right == len(grid.ln_c) - 1])
        elif grid is not coarse:
            low, high = centre - step, centre + step
        low, high = np.maximum(low, box[[0, 2]]), np.minimum(high, box[[1, 3]])
        if grid is not coarse:
            covered = np.array([grid.ln_b[-1] - grid.ln_b[0], grid.ln_c[-1] - grid.ln_c[0]])
            fits = (low >= [grid.ln_b[0] - 1e-12, grid.ln_c[0] - 1e-12]).all()
            fits &= (high <= [grid.ln_b[-1] + 1e-12, grid.ln_c[-1] + 1e-12]).all()
            if fits and ((high - low) > 0.6 * covered).all():
                break
        grid = surface(problem, np.linspace(low[0], high[0], shape[0]), np.linspace(low[1], high[1], shape[1]))
        step = np.array([grid.ln_b[1] - grid.ln_b[0], grid.ln_c[1] - grid.ln_c[0]])
    return grid


def _crossing(axis: Array, profile: Array, cut: float, best: float, edges: tuple[float, float]) -> list[float | None]:
    """Where a profile crosses the cut on both sides; None where it has not by the edge of the search."""
    inside = np.flatnonzero(profile <= cut)
    if not len(inside):
        return [best, best]
    ends: list[float | None] = []
    for at, out, edge in ((int(inside[0]), -1, edges[0]), (int(inside[-1]), 1, edges[1])):
        if not 0 <= at + out < len(axis):
            ends.append(None if abs(axis[at] - edge) < 1e-9 else float(axis[at]))
            continue
        rise = profile[at + out] - profile[at]
        share = 1.0 if rise <= 0 else float(np.clip((cut - profile[at]) / rise, 0.0, 1.0))
        ends.append(float(axis[at] + share * (axis[at + out] - axis[at])))
    return ends


def intervals(problem: Problem, best: Optimum, grid: Surface, deviance: float) -> dict[str, list[float | None]]:
    """Profile-likelihood intervals [low, high] of A, ln B and ln C_mid: SSE within `deviance` of the minimum.

    None is an open end: the search ran out, not the likelihood. A's ends may lie on its bounds; whether that
    is a plateau or an open end is for the verdict.
    """
    cut = best.sse + deviance
    box = problem.search_box()
    ends = {
        "ln_b": _crossing(grid.ln_b, grid.sse.min(1), cut, best.ln_b, box[:2]),
        "ln_c": _crossing(grid.ln_c, grid.sse.min(0), cut, best.ln_c, box[2:]),
    }
    inside = (grid.sse <= cut).ravel()
    low = high = best.a
    if inside.any():
        centre = float(np.average(problem.reward, weights=problem.weight))
        a_low, a_high = _a_range(grid.quadratic.take(inside), shifted(problem, -centre), cut)
        low, high = min(low, a_low + centre), max(high, a_high + centre)
    ends["A"] = [low, high]
    return ends


def _a_range(q: Quadratic, problem: Problem, cut: float) -> tuple[float, float]:
    """Smallest and largest A over cells with SSE <= cut, R0 at its best within its bounds."""
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds

    def roots(curvature: Array, slope: Array, rest: Array) -> tuple[Array, Array]:
        """Where rest - 2 slope A + curvature A^2 = cut; NaN where it never is."""
        with np.errstate(invalid="ignore"):
            # Where the data say nothing on A the floor makes the range huge, to be clipped to A's bounds.
            middle = slope / np.maximum(curvature, floor)
            half = np.sqrt((cut - rest) / np.maximum(curvature, floor) + middle**2)
        return middle - half, middle + half

    floor = 1e-12 * float(problem.weight.sum())
    found: list[Array] = []
    # R0 free: minimised over R0 the SSE is a quadratic in A with the Schur complement as curvature.
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = q.H01 / q.H00
        free = roots(q.H11 - q.H01 * ratio, q.h1 - q.h0 * ratio, q.c - q.h0**2 / q.H00)
        for end in free:
            r0 = (q.h0 - q.H01 * end) / q.H00
            found.append(end[(r0 >= r_lo) & (r0 <= np.minimum(r_hi, end))])
    for r0_edge in {r_lo, r_hi}:
        for end in roots(q.H11, q.h1 - q.H01 * r0_edge, q.c - 2 * q.h0 * r0_edge + q.H00 * r0_edge**2):
            found.append(end[end >= r0_edge])
    values = np.concatenate(found)
    values = np.clip(values[~np.isnan(values)], max(a_lo, r_lo), a_hi)
    return (float(values.min()), float(values.max())) if len(values) else (np.inf, -np.inf)


@dataclass(frozen=True)
class Draws:
    """Joint draws of a curve's parameters; each (K,)."""

    A: Array
    B: Array
    C_mid: Array
    R0: Array

    def curve(self, compute: Array) -> Array:
        """R at `compute` for each draw. Shapes: (m,) -> (K, m)."""
        with np.errstate(divide="ignore"):
            log_compute = np.log(compute)
        g = expit(self.B[:, None] * (log_compute[None] - np.log(self.C_mid)[:, None]))
        result: Array = self.R0[:, None] * (1 - g) + self.A[:, None] * g
        return result


def draw(
    problem: Problem,
    best: Optimum,
    grid: Surface,
    scale: float,
    dof: float,
    count: int,
    rng: np.random.Generator,
) -> Draws:
    """Draws whose density is the profile likelihood with a Student-t tail of `dof` degrees of freedom.

    A cell of the grid is drawn by its profile likelihood, a point within the cell evenly, and (R0, A) from
    their conditional distribution there, clipped to the bounds. `scale` is an effective point's variance.
    """
    excess = np.maximum(grid.sse - best.sse, 0.0).ravel()
    log_weight = -0.5 * (dof + 2) * np.log1p(excess / (scale * dof))
    weight = np.exp(log_weight - log_weight.max())
    # Systematic sampling: the spread over cells is that of the weights, without the noise of drawing them.
    position = (np.arange(count) + rng.random()) / count
    cell = np.searchsorted(np.cumsum(weight) / weight.sum(), position).clip(max=weight.size - 1)
    rng.shuffle(cell)
    row, column = np.unravel_index(cell, grid.sse.shape)
    step_b, step_c = grid.ln_b[1] - grid.ln_b[0], grid.ln_c[1] - grid.ln_c[0]
    ln_b = grid.ln_b[row] + step_b * (rng.random(count) - 0.5)
    ln_c = grid.ln_c[column] + step_c * (rng.random(count) - 0.5)

    q = grid.quadratic.take(cell)
    spread = np.sqrt((scale * dof + excess[cell]) / rng.chisquare(dof + 2, count))
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds
    free_r0, free_a = float(r_lo < r_hi), float(a_lo < a_hi)
    cross = q.H01 * free_r0 * free_a
    # Marginal of A, then R0 given A; a fixed parameter has no share in either.
    var_a = divide(np.ones(count), np.maximum(q.H11 - divide(cross**2, q.H00), 1e-12 * q.H11))
    shift = free_a * spread * np.sqrt(var_a) * rng.standard_normal(count)
    a = np.clip(grid.a.ravel()[cell] + shift, a_lo, a_hi)
    spread_r0 = spread * np.sqrt(divide(np.ones(count), q.H00)) * rng.standard_normal(count)
    r0 = grid.r0.ravel()[cell] + free_r0 * (spread_r0 - divide(cross, q.H00) * (a - grid.a.ravel()[cell]))
    r0 = np.clip(r0, r_lo, r_hi)
    if free_r0:
        r0 = np.minimum(r0, a)
    return Draws(
        A=np.maximum(a, r0) if free_a else a,
        B=np.exp(ln_b),
        C_mid=np.maximum(np.exp(ln_c), np.finfo(float).tiny),
        R0=r0,
    )
