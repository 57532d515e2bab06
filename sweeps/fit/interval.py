"""What the data allow: profile-likelihood intervals of A and of the shape parameters, and joint draws to match.

Under a known autocorrelation rho of the noise, a parameter's profile likelihood gives a confidence distribution: at
a trial value the sum of squares exceeds its minimum by D estimated variances, and the signed root of D is a t
statistic. rho being unknown, the distributions are averaged with its weights (`sweeps.fit.noise`), and a bound is where
the average passes 2.5% or 97.5%; a bound that the average never passes is open. It does not depend on how a
parameter is written, and has tails as heavy as the uncertainty of rho makes them. With few points it is never taken
to be much sharper than under independent noise (`noise.least_stretch`).

Everything is read off a grid over (u, v) that is zoomed to the region the data allow; within a cell the SSE is an
exact quadratic in (R0, A), so A's interval needs no grid of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from sweeps.fit import noise
from sweeps.fit.family import SIGMOID, Family
from sweeps.fit.least_squares import (
    Array,
    Optimum,
    Problem,
    Quadratic,
    Surface,
    axes_of,
    cells_of,
    divide,
    linear_solution,
    shifted,
    sums,
)
from sweeps.fit.noise import Noise

_FINE = (30, 40)
_ZOOMS = 6
_TAIL = 0.025
# A zoom covers this deviance: what the draws need of the tails of four parameters; and that of an interval.
_REACH = 12.0
# An autocorrelation with less weight than this has no say in where to look.
_NEGLIGIBLE = 0.01
# A minimum between grid points is looked for up to this many cells away.
_FAR = 4.0


@dataclass(frozen=True)
class Allowed:
    """The region the data allow, under every rho.

    Shapes: u (I,), v (J,); sse, r0, a (r, I * J) and least (r,) under each rho; scale (r,): a point's variance
    relative to the weights; share (r,): weight of each rho. centre is the reward's origin in `quadratic`.
    """

    problem: Problem
    best: Optimum
    u: Array
    v: Array
    sse: Array
    r0: Array
    a: Array
    quadratic: Quadratic
    least: Array
    scale: Array
    share: Array
    noise: Noise
    dof: int
    centre: float

    @property
    def dofs(self) -> Array:
        """Degrees of freedom under each rho, (r,)."""
        return noise.degrees_of_freedom(self.dof)

    @property
    def stretch(self) -> float:
        """The least stretch of an interval beyond that of independent points."""
        return noise.least_stretch(len(self.problem.reward))


def explore(
    problem: Problem, best: Optimum, coarse: Surface, jacobian: Array, dof: int, known: Array | None = None
) -> Allowed:
    """Zoom a grid to the region within reach of a 95% interval under any rho of weight, inwards or outwards.

    Args:
        problem: the fit's.
        best: its solution, and `coarse` the surface it was found on.
        coarse: see above.
        jacobian: of the curve by every fitted parameter at the solution, (n, p).
        dof: points less parameters.
        known: sampling variance of each point, (n,), if there is one.
    """
    box = np.array(problem.box)
    lines = [coarse.u, coarse.v]
    step = np.array([line[1] - line[0] if len(line) > 1 else 0.0 for line in lines])
    centre = np.array([best.u, best.v])
    independent = max(best.sse / dof, noise.least_variance(problem, known))
    reach = np.maximum(_REACH, 1.15 * stdtrit(noise.degrees_of_freedom(dof), 1 - _TAIL) ** 2)
    low, high = _around(lines, coarse.sse <= best.sse + 4 * reach[0] * independent, centre, step)
    found: Allowed | None = None
    for _ in range(_ZOOMS):
        low, high = np.maximum(low, box[0::2]), np.minimum(high, box[1::2])
        if found is not None:
            covered = np.array([found.u[-1] - found.u[0], found.v[-1] - found.v[0]])
            fits = (low >= [found.u[0] - 1e-12 * abs(box[0]), found.v[0] - 1e-12 * abs(box[2])]).all()
            fits &= (high <= [found.u[-1] + 1e-12 * abs(box[1]), found.v[-1] + 1e-12 * abs(box[3])]).all()
            if fits and ((high - low) >= 0.5 * covered).all():
                break
        u, v = axes_of(problem, (low[0], high[0], low[1], high[1]), _FINE)
        found = _allowed(problem, best, u, v, jacobian, dof, known)
        step = np.array([line[1] - line[0] if len(line) > 1 else 0.0 for line in (u, v)])
        weighty = found.share > _NEGLIGIBLE
        weighty[0] = True
        limit = (found.least + reach * found.scale)[weighty, None]
        inside = (found.sse[weighty] <= limit).any(0).reshape(len(u), len(v))
        low, high = _around([u, v], inside, centre, step)
    assert found is not None
    return found


def _around(lines: list[Array], inside: NDArray[np.bool_], centre: Array, step: Array) -> tuple[Array, Array]:
    """A box around the cells inside, wider where they reach the grid's edge: the region goes on beyond it."""
    low, high = centre - step, centre + step
    for axis, line in enumerate(lines):
        hit = np.flatnonzero(inside.any(1 - axis))
        if not len(hit) or len(line) == 1:
            continue
        low[axis] = min(low[axis], line[hit[0]] - step[axis])
        high[axis] = max(high[axis], line[hit[-1]] + step[axis])
        span = high[axis] - low[axis]
        low[axis] -= 0.5 * span * (hit[0] == 0)
        high[axis] += 0.5 * span * (hit[-1] == len(line) - 1)
    return low, high


def _allowed(
    problem: Problem, best: Optimum, u: Array, v: Array, jacobian: Array, dof: int, known: Array | None
) -> Allowed:
    """The surfaces of every rho over one grid."""
    centre = problem.centre
    centred = shifted(problem, -centre)
    cells = cells_of(u, v)
    together = sums(centred, problem.basis(*cells))
    q = together.mixed(noise.RHOS)
    r0, a, sse = linear_solution(q, centred)
    least = _lowest(sse, len(u), len(v))
    share = noise.shares(problem, jacobian, least, dof)
    scale = np.maximum(least / dof, noise.least_variance(problem, known))
    measured = noise.summary(problem, share, scale)
    return Allowed(problem, best, u, v, sse, r0, a, q, least, scale, share, measured, dof, centre)


def _lowest(sse: Array, rows: int, columns: int) -> Array:
    """The minimum over each grid, between its points: a paraboloid through the lowest cell and its neighbours.

    The valley of a poorly determined curve is narrow and oblique, and grid points seldom meet its floor.
    Shapes: (r, rows * columns) -> (r,).
    """
    floor: Array = sse.min(1)
    at = sse.argmin(1)
    every = np.arange(len(sse))
    if rows < 3 or columns < 3:
        if max(rows, columns) < 3:
            return floor
        j = np.clip(at, 1, sse.shape[1] - 2)
        return _parabola(sse[every, j - 1], sse[every, j], sse[every, j + 1], floor)
    i, j = np.clip(at // columns, 1, rows - 2), np.clip(at % columns, 1, columns - 2)

    def cell(down: int, across: int) -> Array:
        found: Array = sse[every, (i + down) * columns + j + across]
        return found

    middle = cell(0, 0)
    gu, gv = 0.5 * (cell(1, 0) - cell(-1, 0)), 0.5 * (cell(0, 1) - cell(0, -1))
    huu, hvv = cell(1, 0) - 2 * middle + cell(-1, 0), cell(0, 1) - 2 * middle + cell(0, -1)
    huv = 0.25 * (cell(1, 1) - cell(1, -1) - cell(-1, 1) + cell(-1, -1))
    det = huu * hvv - huv * huv
    su, sv = divide(gv * huv - gu * hvv, det), divide(gu * huv - gv * huu, det)
    bowl = (det > 1e-9 * huu * hvv) & (huu > 0) & (np.abs(su) <= _FAR) & (np.abs(sv) <= _FAR)
    inner = middle + 0.5 * (gu * su + gv * sv)
    return np.where(bowl, np.clip(np.minimum(inner, floor), 0.0, None), floor)


def _parabola(left: Array, middle: Array, right: Array, floor: Array) -> Array:
    """The minimum of parabolas through three neighbours each, where it lies between them."""
    inner = (middle <= left) & (middle <= right)
    return np.where(inner, middle - divide((left - right) ** 2, 8 * (left - 2 * middle + right)), floor)


def _confidence(allowed: Allowed, excess: Array, below: NDArray[np.bool_]) -> Array:
    """The averaged confidence distribution at a trial value.

    Args:
        allowed: the region.
        excess: least SSE at the trial value less the minimum, (r, ...).
        below: whether the value lies below the best one under each rho, (r, ...).
    """
    extra = (1,) * (excess.ndim - 1)
    t = np.sqrt(np.maximum(excess, 0.0) / allowed.scale.reshape(-1, *extra)) * np.where(below, -1.0, 1.0)
    return _averaged(t, allowed.share, allowed.dofs.reshape(-1, *extra), allowed)


def _averaged(t: Array, share: Array, dofs: Array, allowed: Allowed) -> Array:
    """The t statistics of every rho as one distribution; (r, ...) -> (...). The first rho is 0."""
    chance = np.tensordot(share, stdtr(dofs, t), 1)
    floor = stdtr(dofs[0], t[0] / allowed.stretch)
    result: Array = np.where(t[0] < 0, np.maximum(chance, floor), np.minimum(chance, floor))
    return result


def shape_interval(allowed: Allowed, axis: int) -> list[float | None]:
    """95% interval of u (axis 0) or v (axis 1); None is an open end: the search ran out, not the likelihood."""
    line = allowed.v if axis else allowed.u
    value = allowed.best.v if axis else allowed.best.u
    if len(line) == 1:
        return [value, value]
    sse = allowed.sse.reshape(-1, len(allowed.u), len(allowed.v))
    profile = _least_along(sse if axis == 0 else sse.transpose(0, 2, 1))
    least = profile.min(1)
    # The minimum under each rho lies between grid lines: a parabola through the lowest three finds it.
    at, least = _vertex(line, profile, least)
    chance = _confidence(allowed, profile - least[:, None], line[None, :] < at[:, None])
    chance = np.maximum.accumulate(np.asarray(chance))
    edges = allowed.problem.box[2:] if axis else allowed.problem.box[:2]
    ends: list[float | None] = []
    for tail, edge, last in ((_TAIL, edges[0], 0), (1 - _TAIL, edges[1], -1)):
        end = _cross(line, chance, tail)
        if end is None:
            end = None if abs(line[last] - edge) < 1e-9 * max(abs(edge), 1.0) else float(line[last])
        ends.append(end)
    low, high = ends
    return [None if low is None else min(low, value), None if high is None else max(high, value)]


def _least_along(sse: Array) -> Array:
    """The minimum over the last axis, by a parabola through the lowest three; (r, I, J) -> (r, I)."""
    if sse.shape[-1] < 3:
        return np.asarray(sse.min(-1))
    j = np.clip(sse.argmin(-1), 1, sse.shape[-1] - 2)[..., None]
    left, middle, right = (np.take_along_axis(sse, j + k, -1)[..., 0] for k in (-1, 0, 1))
    return _parabola(left, middle, right, np.asarray(sse.min(-1)))


def _vertex(line: Array, profile: Array, least: Array) -> tuple[Array, Array]:
    """Where each profile is least and how low; (r, I) -> (r,), (r,)."""
    j = np.clip(profile.argmin(1), 1, len(line) - 2)
    rows = np.arange(len(profile))
    left, middle, right = (profile[rows, j + k] for k in (-1, 0, 1))
    bend = left - 2 * middle + right
    inner = (middle <= left) & (middle <= right)
    offset = np.where(inner, divide(0.5 * (left - right), bend), 0.0)
    lowest = _parabola(left, middle, right, least)
    at = np.where(inner, line[j] + offset * (line[1] - line[0]), line[profile.argmin(1)])
    return at, lowest


def _cross(line: Array, chance: Array, level: float) -> float | None:
    """Where a rising confidence distribution passes a level; on the scale of t, where it is nearly straight."""
    if not chance[0] <= level <= chance[-1]:
        return None
    at = int(np.searchsorted(chance, level))
    if at == 0:
        return float(line[0])
    z = stdtrit(10.0, np.clip(np.array([chance[at - 1], chance[at], level]), 1e-9, 1 - 1e-9))
    share = 1.0 if z[1] <= z[0] else float((z[2] - z[0]) / (z[1] - z[0]))
    return float(line[at - 1] + share * (line[at] - line[at - 1]))


def asymptote_interval(allowed: Allowed, guess: tuple[float, float] | None = None) -> list[float]:
    """95% interval of A, clipped to its bounds; whether an end there is a plateau is for the verdict.

    guess: where the ends may be, to save looks; it does not change the answer.
    """
    low, high = allowed.problem.a_bounds
    best = allowed.best.a
    if low == high:
        return [low, low]
    profile = _AsymptoteProfile(allowed)
    near = guess or (best - 0.05 * (high - low), best + 0.05 * (high - low))
    return [
        _solve_level(profile, best, at, end, tail)
        for at, end, tail in ((near[0], low, _TAIL), (near[1], high, 1 - _TAIL))
    ]


class _AsymptoteProfile:
    """The confidence distribution of A: least SSE over every cell and R0 at a fixed A."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed
        weighty = allowed.share > 1e-6
        weighty[0] = True
        self.dofs = allowed.dofs[weighty]
        self.share = allowed.share[weighty] / allowed.share[weighty].sum()
        self.scale, self.least = allowed.scale[weighty], allowed.least[weighty]
        q = allowed.quadratic
        rows = [x[weighty] for x in (q.c, q.h0, q.h1, q.H00, q.H01, q.H11)]
        self.quadratic = Quadratic(*rows)
        at = allowed.sse[weighty].argmin(1)
        self.at = allowed.a[weighty, :][np.arange(len(at)), at] + allowed.centre
        (self.r_lo, self.r_hi) = (x - allowed.centre for x in allowed.problem.r0_bounds)

    def __call__(self, value: float) -> float:
        a = value - self.allowed.centre
        q = self.quadratic
        high = min(self.r_hi, a)
        if high < self.r_lo:
            return 0.0
        if self.r_lo == self.r_hi:
            sse = q.at(np.array(self.r_lo), np.array(a))
        else:
            sse = q.at(np.clip(divide(q.h0 - q.H01 * a, q.H00), self.r_lo, high), np.array(a))
        lowest = _lowest(sse, len(self.allowed.u), len(self.allowed.v))
        t = np.sqrt(np.maximum(lowest - self.least, 0.0) / self.scale) * np.where(value < self.at, -1.0, 1.0)
        return float(_averaged(t, self.share, self.dofs, self.allowed))


def _solve_level(profile: _AsymptoteProfile, start: float, guess: float, bound: float, level: float) -> float:
    """Where the distribution passes the level between `start` and `bound`; the bound if it does not."""
    wanted = float(stdtrit(10.0, level))

    def gap(value: float) -> float:
        """How far beyond the level, on the scale of t, where the distribution is nearly straight."""
        return sign * (float(stdtrit(10.0, min(max(profile(value), 1e-12), 1 - 1e-12))) - wanted)

    sign = 1.0 if bound > start else -1.0
    near, gap_near = start, -abs(wanted)
    far = guess if sign * (guess - start) > 1e-9 * abs(bound - start) else start + 0.1 * (bound - start)
    while True:
        far = min(far, bound) if sign > 0 else max(far, bound)
        gap_far = gap(far)
        if gap_far > 0:
            break
        if far == bound:
            return bound
        near, gap_near, far = far, gap_far, start + 2 * (far - start)
    if near == start:
        # Under autocorrelation the distribution's middle need not lie at the solution.
        gap_near = gap(start)
        if gap_near >= 0:
            return start
    tolerance = 1e-5 * abs(bound - start)
    # False position (Illinois): the distribution is smooth and monotone, and each look costs a pass over the grid.
    middle = far
    for _ in range(40):
        share = gap_near / (gap_near - gap_far)
        middle = near + min(max(share, 0.02), 0.98) * (far - near)
        value = gap(middle)
        if abs(value) < 5e-3 or abs(far - near) < tolerance:
            break
        if value > 0:
            far, gap_far = middle, value
            gap_near *= 0.5
        else:
            near, gap_near = middle, value
            gap_far *= 0.5
    return middle


@dataclass(frozen=True)
class Draws:
    """Joint draws of a curve's parameters; each (K,).

    For a family other than the sigmoid, B and C_mid hold its first and second shape parameter.
    """

    A: Array
    B: Array
    C_mid: Array
    R0: Array
    family: Family = SIGMOID

    def curve(self, compute: Array) -> Array:
        """R at `compute` for each draw. Shapes: (m,) -> (K, m)."""
        with np.errstate(divide="ignore"):
            log_compute = np.log(compute)
        u, v = self.family.search(self.B, self.C_mid)
        g = self.family.basis(log_compute[None], u[:, None], v[:, None])
        result: Array = self.R0[:, None] * (1 - g) + self.A[:, None] * g
        return result


def draw(allowed: Allowed, count: int, rng: np.random.Generator) -> Draws:
    """Draws whose density is the profile likelihood with a Student-t tail, averaged over rho.

    A rho and a cell of the grid are drawn by their weights, a point within the cell evenly, and (R0, A) from
    their conditional distribution there, clipped to the bounds.
    """
    problem, dofs = allowed.problem, allowed.dofs
    scale = allowed.scale.copy()
    scale[0] *= allowed.stretch**2
    excess = np.maximum(allowed.sse - allowed.least[:, None], 0.0)
    log_weight = -0.5 * (dofs[:, None] + 2) * np.log1p(excess / (scale * dofs)[:, None])
    weight = np.exp(log_weight)
    weight *= (allowed.share / weight.sum(1))[:, None]
    # Systematic sampling: the spread over cells is that of the weights, without the noise of drawing them.
    position = (np.arange(count) + rng.random()) / count
    chosen = np.searchsorted(np.cumsum(weight) / weight.sum(), position).clip(max=weight.size - 1)
    rng.shuffle(chosen)
    under, cell = np.divmod(chosen, weight.shape[1])
    row, column = np.divmod(cell, len(allowed.v))

    def within(line: Array, index: NDArray[np.intp]) -> Array:
        jitter = rng.random(count) - 0.5
        if len(line) == 1:
            return np.full(count, line[0])
        found: Array = np.clip(line[index] + (line[1] - line[0]) * jitter, line[0], line[-1])
        return found

    u, v = within(allowed.u, row), within(allowed.v, column)
    q = allowed.quadratic.take(chosen)
    dof = dofs[under]
    spread = np.sqrt((scale[under] * dof + excess.ravel()[chosen]) / rng.chisquare(dof + 2, count))
    (r_lo, r_hi), (a_lo, a_hi) = problem.r0_bounds, problem.a_bounds
    free_r0, free_a = float(r_lo < r_hi), float(a_lo < a_hi)
    cross = q.H01 * free_r0 * free_a
    best_a = allowed.a.ravel()[chosen] + allowed.centre
    best_r0 = allowed.r0.ravel()[chosen] + allowed.centre
    # Marginal of A, then R0 given A; a fixed parameter has no share in either.
    var_a = divide(np.ones(count), np.maximum(q.H11 - divide(cross**2, q.H00), 1e-12 * q.H11))
    a = np.clip(best_a + free_a * spread * np.sqrt(var_a) * rng.standard_normal(count), a_lo, a_hi)
    spread_r0 = spread * np.sqrt(divide(np.ones(count), q.H00)) * rng.standard_normal(count)
    r0 = np.clip(best_r0 + free_r0 * (spread_r0 - divide(cross, q.H00) * (a - best_a)), r_lo, r_hi)
    if free_r0:
        r0 = np.minimum(r0, a)
    first, second = problem.family.natural(u, v)
    tiny = np.finfo(float).tiny
    return Draws(
        A=np.maximum(a, r0) if free_a else a,
        B=first,
        C_mid=second if problem.family.name == "logistic" else np.maximum(second, tiny),
        R0=r0,
        family=problem.family,
    )


def asymptote_confidence(allowed: Allowed, values: Array) -> Array:
    """The two-sided p value at each trial value of A; it falls to 0.05 at the ends of the 95% interval.

    Shapes: (k,), increasing -> (k,).

    Raises:
        ValueError: A is fixed, or the values do not increase or lie outside its bounds.
    """
    low, high = allowed.problem.a_bounds
    if low == high:
        raise ValueError(f"A is fixed at {low:g}: it has no confidence curve")
    if len(values) and not ((np.diff(values) > 0).all() and low <= values[0] and values[-1] <= high):
        raise ValueError(f"values of A must increase and lie within its bounds, {low:g} to {high:g}")
    profile = _AsymptoteProfile(allowed)
    chance = np.array([profile(float(value)) for value in values])
    # It rises with A but for the grid's coarseness around the estimate: the middle of the nearest rising curves.
    chance = 0.5 * (np.maximum.accumulate(chance) + np.minimum.accumulate(chance[::-1])[::-1])
    return np.asarray(2 * np.minimum(chance, 1 - chance))
