"""Comparison of curve families on one recipe's evaluations, by fit and by forecast error.

Families are compared by AICc on the points that all of them can use (positive compute), and by their error on later
points that the fit has not seen (rolling origin). For origins at 50% to 90% of the largest compute, each family is
fitted to the points up to the origin, and predicts the points from there to twice the origin's compute. Its rival is
the last value: the prediction that each seed keeps its last reward before the origin. Where no family beats the last
value, the curve supports no forecast, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array, Curve
from sweeps.fit import verdict
from sweeps.fit.family import FAMILIES, Family
from sweeps.fit.points import FitOptions, Points, average_neighbours, fits_r0, select

ORIGINS = (0.5, 0.6, 0.7, 0.8, 0.9)
# With more points than this, neighbouring points are averaged.
_MAX_POINTS = 1000
# With fewer held-out points, forecast skill is not judged.
_MIN_HELD_OUT = 5
# Grid search for a family's shape parameters, in `_ROUNDS` rounds with `_STEPS` values per parameter. The first round
# covers `_REACH` prior standard deviations on either side of the prior mean. Each further round is centred on the best
# cell so far, and its grid is `_REFINEMENT` times finer.
_STEPS, _REACH, _ROUNDS, _REFINEMENT = 15, 3.0, 5, 2.8
# Ridge penalty on each seed's offset, where a point has weight 1.
_RIDGE = 1.0


@dataclass(frozen=True)
class FamilyRow(AsJson):
    """Fit and forecast error of one family on one recipe's points.

    Attributes:
        parameters: number of fitted parameters, without the seeds' offsets.
        A, sse, r2: asymptote, weighted sum of squared errors and R^2 on all points of positive compute.
        aicc, delta_aicc: Akaike's criterion corrected for few points, and by how much it exceeds the best family's.
        held_out: mean absolute error in reward on later, unseen compute; None where too little can be held out.
    """

    family: str
    parameters: int
    A: float | None
    sse: float
    aicc: float
    delta_aicc: float
    held_out: float | None
    r2: float | None


@dataclass(frozen=True)
class Comparison(AsJson):
    """Comparison of all families on one recipe.

    Attributes:
        rows: one per family; empty with too few points.
        last_value: mean absolute error, in reward, of predicting that each seed keeps its last reward; None where too
            little is held out.
        beats_last: whether some family other than the constant has a smaller error than that; None where too little is
            held out.
        sentence: the outcome in words.
    """

    recipe: str
    rows: tuple[FamilyRow, ...]
    last_value: float | None
    beats_last: bool | None
    sentence: str

    JSON: ClassVar = {"rows": "families"}


def compare(curve: Curve, options: FitOptions | None = None) -> Comparison:
    """Compare the families on one recipe's evaluations within the range of compute of `options`.

    Args:
        curve: evaluations of one recipe.
        options: how R0 is treated, for families that have it, the range of compute, and the family that the sentence
            names; None for `FitOptions()`.

    Raises:
        UserError: as for `sweeps.fit.fit.fit_curve`.
    """
    options = options or FitOptions()
    curve = _drop_unstarted_seeds(curve)
    options_by_name = {name: replace(options, family=name, asymptote=None) for name in FAMILIES}
    reason = "too few points, or no change in reward, to compare families"
    no_comparison = Comparison(curve.recipe, (), None, None, reason)
    if not len(curve.reward) or not len(select(curve, options_by_name["power_law"]).reward):
        return no_comparison
    points = {
        name: average_neighbours(select(curve, family_options), _MAX_POINTS)
        for name, family_options in options_by_name.items()
    }
    common = points["sigmoid"].take(points["sigmoid"].compute > 0)
    if verdict.refuse_points(common.compute, common.reward, common.seed, 4) is not None:
        return no_comparison
    held_out, last_error = _hold_out(points["sigmoid"])
    errors = (
        {name: _error(points[name], options_by_name[name], held_out, curve.bounds) for name in points}
        if held_out
        else {}
    )
    rows = [_row(name, common, options_by_name[name], curve.bounds, errors.get(name)) for name in FAMILIES]
    lowest_aicc = min(row.aicc for row in rows)
    rows = [replace(row, delta_aicc=row.aicc - lowest_aicc) for row in rows]
    scored = [row for row in rows if row.held_out is not None and row.family != "constant"]
    beats_last = None
    sentence = "too little later compute to judge forecasts"
    if last_error is not None and scored:
        best = min(scored, key=lambda row: row.held_out or 0.0)
        assert best.held_out is not None
        beats_last = best.held_out < last_error
        family_error = next((row.held_out for row in scored if row.family == options.family), None)
        sentence = (
            f"{best.family} predicts later rewards best (error {best.held_out:.4f}; last value {last_error:.4f}"
            + (
                f", {options.family} {family_error:.4f})"
                if family_error is not None and best.family != options.family
                else ")"
            )
        )
        if not beats_last:
            sentence = (
                f"no family predicts later rewards better than the last value does (error {last_error:.4f}, "
                f"{best.family} {best.held_out:.4f})"
            )
    return Comparison(curve.recipe, tuple(rows), last_error, beats_last, sentence)


def _drop_unstarted_seeds(curve: Curve) -> Curve:
    """Drop seeds that have no evaluation above compute 0, because a power law cannot use their points."""
    return curve.take(np.isin(curve.seed, curve.seed[curve.compute > 0]))


@dataclass(frozen=True, eq=False)
class _Solution:
    """Least-squares curve of a family.

    Attributes:
        end: largest compute, which is the unit of the other computes.
        first: smallest positive compute, in units of `end`.
        shape: coordinates u and v of the shape parameters, see `Family.basis`.
        r0, a: R0 and the common asymptote.
        offset: each seed's asymptote minus the common one, (S,); empty for one seed.
        sse: weighted sum of squared errors.
    """

    family: Family
    end: float
    first: float
    shape: Array
    r0: float
    a: float
    offset: Array
    sse: float

    def gain_fraction(self, compute: Array) -> Array:
        """Return g, the fraction of A - R0 that is gained, at computes (m,)."""
        return _gain_fraction(self.family, compute / self.end, self.first, *self.shape)


def _weights(points: Points) -> Array:
    """Return the mean variance divided by each point's variance, (n,); 1 where variances are unknown."""
    return np.ones(len(points.reward)) if points.variance is None else points.variance.mean() / points.variance


def _gain_fraction(family: Family, x: Array, first: float, u: Array | float, v: Array | float) -> Array:
    """Return g at computes x (n,), relative to the largest, for shapes that broadcast with x.

    A power law begins at `first`.
    """
    u, v = np.asarray(u), np.asarray(v)
    with np.errstate(divide="ignore", over="ignore"):
        return family.basis(np.log(x), u, np.full_like(v, np.log(first)) if family.name == "power_law" else v)


def _solve(points: Points, options: FitOptions, bounds: tuple[float, float]) -> _Solution:
    """Fit a family by least squares: search a grid over its shape parameters, and solve for R0 and A at the best cell.

    Each seed has its own asymptote, shrunk towards the common one by a ridge penalty.
    """
    family = options.curve_family
    end, first = float(points.compute.max()), float(points.compute[points.compute > 0].min())
    x, first = points.compute / end, first / end
    weight = _weights(points)
    fixed = 0.0 if options.family == "sigmoid_zero" else None if isinstance(options.r0, str) else float(options.r0)
    root_weight = np.sqrt(weight)
    is_seed = points.seed[:, None] == np.arange(points.seeds) if points.seeds > 1 else np.zeros((len(x), 0))
    ridge = np.eye(is_seed.shape[1]) * _RIDGE

    def linear(shape: Array) -> tuple[Array, Array]:
        """Solve for R0 (unless fixed), A and the seeds' offsets. Return these and the weighted residuals."""
        g = _gain_fraction(family, x, first, *shape)
        # A fixed R0 is subtracted from the rewards; a free one gets a column of the design matrix.
        columns, target = [g, *(is_seed * g[:, None]).T], points.reward - (0.0 if fixed is None else fixed * (1 - g))
        if fixed is None:
            columns = [1 - g, *columns]
        design = np.stack(columns, axis=1) * root_weight[:, None]
        penalty = np.zeros((len(ridge), design.shape[1]))
        penalty[:, design.shape[1] - len(ridge) :] = ridge
        stacked, targets = np.concatenate([design, penalty]), np.append(target * root_weight, np.zeros(len(ridge)))
        theta = np.linalg.lstsq(stacked, targets)[0]
        levels = np.arange(1 if fixed is not None else 2)
        out_of_bounds = levels[(theta[levels] < bounds[0]) | (theta[levels] > bounds[1])]
        if len(out_of_bounds):
            # Move a level (R0 or A) that is outside the bounds to the nearest bound, and solve again for the other
            # parameters.
            theta[out_of_bounds] = np.clip(theta[out_of_bounds], *bounds)
            free = np.setdiff1d(np.arange(len(theta)), out_of_bounds)
            theta[free] = np.linalg.lstsq(stacked[:, free], targets - stacked[:, out_of_bounds] @ theta[out_of_bounds])[
                0
            ]
            theta[levels] = np.clip(theta[levels], *bounds)
        return theta, stacked @ theta - targets

    (best_u, sd_u), (best_v, sd_v) = family.prior
    steps = np.linspace(-1, 1, _STEPS)
    for round_ in range(_ROUNDS):
        # All cells are evaluated at once without the seeds' offsets. Only the best cell is solved with them.
        width = _REACH * _REFINEMENT**-round_
        u = best_u + width * sd_u * (steps if family.shape > 0 else np.zeros(1))
        v = best_v + width * sd_v * (steps if family.shape > 1 else np.zeros(1))
        u, v = np.repeat(u, len(v)), np.tile(v, len(u))
        g = _gain_fraction(family, x, first, u[:, None], v[:, None])
        best_cell = int(_sum_of_squares(g, points.reward, weight, fixed, bounds).argmin())
        best_u, best_v = float(u[best_cell]), float(v[best_cell])
    best = np.array([best_u, best_v])
    theta, residual = linear(best)
    r0, (a, *offset) = (fixed, theta) if fixed is not None else (float(theta[0]), theta[1:])
    point_residual = residual[: len(x)]
    return _Solution(
        family=family,
        end=end,
        first=first,
        shape=best,
        r0=r0,
        a=float(a),
        offset=np.array(offset),
        sse=float(point_residual @ point_residual),
    )


def _row(
    name: str, points: Points, options: FitOptions, bounds: tuple[float, float], held_out: float | None
) -> FamilyRow:
    """Fit a family to all points and return its row; `delta_aicc` is filled in later."""
    solution = _solve(points, options, bounds)
    n = len(points.reward)
    parameters = FAMILIES[name].shape + 1 + fits_r0(options)
    # k counts, besides the curve's parameters, S for S seeds: S - 1 free offsets, and the variance of the noise.
    k = parameters + points.seeds
    # AICc = n ln(SSE / n) + 2 k + 2 k (k + 1) / (n - k - 1). Its last term is undefined for n <= k + 1: a large
    # constant replaces it. `floor` avoids ln 0 on noise-free data.
    floor = n * (1e-7 * max(1.0, float(np.abs(points.reward).max()))) ** 2
    correction = 2 * k * (k + 1) / (n - k - 1) if n > k + 1 else 1e6
    aicc = n * float(np.log((solution.sse + floor) / n)) + 2 * k + correction
    weight = _weights(points)
    spread = float(weight @ (points.reward - np.average(points.reward, weights=weight)) ** 2)
    r2 = 1 - solution.sse / spread if spread > 0 else None
    return FamilyRow(
        family=name,
        parameters=parameters,
        A=solution.a,
        sse=solution.sse,
        aicc=aicc,
        delta_aicc=0.0,
        held_out=held_out,
        r2=r2,
    )


def _sum_of_squares(g: Array, y: Array, weight: Array, fixed: float | None, bounds: tuple[float, float]) -> Array:
    """Return the weighted sum of squares of rewards y (n,) about the best R0 (1 - g) + A g; g (k, n) -> (k,).

    R0 and A are kept within the bounds. `fixed` is the value of a fixed R0, None to solve for it.
    """
    h = 1 - g
    gg, gh, hh, gy, hy = (g * g) @ weight, (g * h) @ weight, (h * h) @ weight, g @ (weight * y), h @ (weight * y)

    def level(product: Array, square: Array, other: Array | float) -> Array:
        return np.asarray(np.clip((product - gh * other) / np.maximum(square, 1e-12), *bounds))

    if fixed is not None:
        r0: Array | float = fixed
        a = level(gy, gg, fixed)
    else:
        a = np.clip((gy * hh - hy * gh) / np.maximum(gg * hh - gh**2, 1e-12), *bounds)
        r0 = level(hy, hh, a)
        a = level(gy, gg, r0)
    return np.asarray(weight @ y**2 - 2 * (a * gy + r0 * hy) + a * a * gg + 2 * a * r0 * gh + r0 * r0 * hh)


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """Evaluations after the compute `origin`, held out of the fit; (m,) each."""

    origin: float
    compute: Array
    reward: Array
    seed: Any


def _hold_out(points: Points) -> tuple[list[_HeldOut], float | None]:
    """Return the evaluations held out after each origin, and the mean absolute error of the last value on these.

    The last value is each seed's own last reward before the origin, so that seeds that ended earlier do not distort the
    error. If too few evaluations can be held out, the result is an empty list and None.
    """
    end = float(points.compute.max())
    parts: list[_HeldOut] = []
    last_errors: list[Array] = []
    for fraction in ORIGINS:
        origin = fraction * end
        early = points.compute <= origin
        later = (points.compute > origin) & (points.compute <= 2 * origin) & np.isin(points.seed, points.seed[early])
        early_points = points.take(early)
        if (
            not later.any()
            or verdict.refuse_points(early_points.compute, early_points.reward, early_points.seed, 4) is not None
        ):
            continue
        part = _HeldOut(origin, points.compute[later], points.reward[later], points.seed[later])
        last_rewards = {s: float(points.reward[early & (points.seed == s)][-1]) for s in np.unique(part.seed)}
        last_errors.append(np.abs(part.reward - np.array([last_rewards[s] for s in part.seed])))
        parts.append(part)
    if not last_errors or sum(len(part) for part in last_errors) < _MIN_HELD_OUT:
        return [], None
    return parts, float(np.concatenate(last_errors).mean())


def _error(points: Points, options: FitOptions, parts: Sequence[_HeldOut], bounds: tuple[float, float]) -> float:
    errors = []
    for part in parts:
        # `take` renumbers the seeds. Map held-out seeds to the new numbers, and seeds not seen before the origin to -1.
        seeds_before = np.unique(points.seed[points.compute <= part.origin])
        number = np.where(np.isin(part.seed, seeds_before), np.searchsorted(seeds_before, part.seed), -1)
        early_points = points.take(points.compute <= part.origin)
        solution = _solve(early_points, options, bounds)
        # The appended 0 is the offset of seeds not seen before the origin.
        offset = np.append(solution.offset if len(solution.offset) else np.zeros(early_points.seeds), 0.0)[number]
        g = solution.gain_fraction(part.compute)
        predicted = solution.r0 * (1 - g) + (solution.a + offset) * g
        errors.append(np.abs(part.reward - predicted))
    return float(np.concatenate(errors).mean())
