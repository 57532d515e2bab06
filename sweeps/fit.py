"""Fitting the compute curve of a recipe: A, B, C_mid and R0 with intervals, a verdict and predictions.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)            arXiv 2510.13786, eq. 1

Intervals are 95% profile likelihood with an F cut-off, for the runs given, at the effective number of points
(`sweeps.noise`). Only arrays come in here: no files, no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import fdtri

from sweeps import interval, noise, profile, verdict
from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.interval import Draws
from sweeps.points import FitOptions as FitOptions
from sweeps.points import Points, bounds_of, select, weighted
from sweeps.profile import Array, Optimum, Problem
from sweeps.seeds import SeedExcess, SeedSpread, pooled_seed_spread, seed_excess

_DRAWS = 2000
_MIN_DOF = 3.0


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95% bounds; None is an open bound, or an estimate that may not be named."""

    value: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        """As printed by `scalerl fit --json`."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class Fit:
    """One recipe's fitted curve.

    A, B, C_mid hold None where the verdict lets nothing be named; draws and noise are None if no fit was
    possible. dof: effective points less parameters. bounds: of R0 and A.
    """

    curve: Curve
    options: FitOptions
    verdict: str
    reason: str
    A: Interval
    A_total: tuple[float | None, float | None]
    B: Interval
    C_mid: Interval
    R0: float | None
    R0_source: str
    seed_spread: SeedSpread
    rmse: float | None
    r2: float | None
    n: int
    seeds: int
    window: tuple[float, float] | None
    extrapolation_error: float | None
    warnings: tuple[str, ...]
    bounds: tuple[float, float]
    draws: Draws | None = None
    noise: noise.Noise | None = None
    dof: float = 0.0
    seed_excess: SeedExcess = field(default_factory=SeedExcess)
    family: str = "sigmoid"

    @property
    def recipe(self) -> str:
        """The recipe's label."""
        return self.curve.recipe

    @property
    def identifiable(self) -> bool:
        """Whether the recipe may be ranked on A."""
        return self.verdict == "identifiable"

    def to_json(self) -> dict[str, Any]:
        """The object of `scalerl fit --json`: no NaN, no infinity; an open bound is None."""
        return {
            "recipe": self.recipe,
            "verdict": self.verdict,
            "reason": self.reason,
            "A": self.A.to_json(),
            "A_total": {
                "low": self.A_total[0],
                "high": self.A_total[1],
                "seed_sd": self.seed_spread.sd,
                "seed_sd_source": self.seed_spread.source,
            },
            "B": self.B.to_json(),
            "C_mid": self.C_mid.to_json(),
            "R0": {"value": self.R0, "source": self.R0_source},
            "family": self.family,
            "rmse": self.rmse,
            "r2": self.r2,
            "n": self.n,
            "seeds": self.seeds,
            "window": None if self.window is None else list(self.window),
            "extrapolation_error": self.extrapolation_error,
            "compute_axis": self.curve.axis,
            "metric": self.curve.metric,
            "warnings": list(self.warnings),
        }


def _jacobian(problem: Problem, best: Optimum, g: Array) -> Array:
    """Derivatives of the curve by what was fitted: ln B, ln C_mid, A, R0, offsets between seeds; (n, p)."""
    with np.errstate(invalid="ignore"):
        z = np.where(g > 0, problem.log_compute - best.ln_c, 0.0)
    slope = (best.a - best.r0) * g * (1 - g)
    columns = [slope * z, slope]
    if problem.a_bounds[0] < problem.a_bounds[1]:
        columns.append(g)
    if problem.r0_bounds[0] < problem.r0_bounds[1]:
        columns.append(1 - g)
    seeds = len(best.seed_offset)
    columns += [np.where(problem.seed == s, g, 0.0) - g / seeds for s in range(1, seeds)]
    return np.stack(columns, axis=1)


def fit_curve(curve: Curve, options: FitOptions | None = None, seed_spread: SeedSpread | None = None) -> Fit:
    """Fit one recipe's curve.

    Args:
        curve: its points; nothing but the points matters, not their order or the unit of compute.
        options: R0, window, a fixed asymptote.
        seed_spread: spread of A between seeds, for `A_total`; the published one if not given.

    Raises:
        UserError: r0 is outside the rewards' bounds, or the window is empty.
    """
    options = options or FitOptions()
    spread = seed_spread or SeedSpread()
    points = select(curve, options)
    if not len(points.reward):
        raise UserError(
            f"recipe {curve.recipe!r}: no points in the window; compute ({curve.axis}) runs from "
            f"{curve.compute.min():.4g} to {curve.compute.max():.4g}: change --min-compute or --max-compute"
        )
    bounds = bounds_of(points.reward)
    if not isinstance(options.r0, str) and not bounds[0] <= options.r0 <= bounds[1]:
        raise UserError(f"--r0 {options.r0:g}: outside the reward's range {bounds[0]:g}..{bounds[1]:g}; give a reward")
    seeds = int(points.seed.max()) + 1
    parameters = 2 + (options.asymptote is None) + isinstance(options.r0, str) + (seeds - 1)
    low = 0.0 if options.min_compute is None else options.min_compute
    inside = points.compute[points.compute >= low]
    window = (float(inside.min()), float(inside.max())) if len(inside) else None
    warnings = list(curve.warnings)
    if options.r0 == "first" and not (points.compute == 0).any():
        warnings.append("no evaluation at compute 0: R0 is inferred from the curve; give --r0 if it is known")
    nothing = Interval(None, None, None)
    empty = Fit(
        curve, options, "", "", nothing, (None, None), nothing, nothing,
        None if isinstance(options.r0, str) else float(options.r0),
        options.r0 if isinstance(options.r0, str) else "given",
        spread, None, None, len(points.reward), seeds, window, None, tuple(warnings), bounds,
    )  # fmt: skip
    refused = verdict.before_fit(points.compute, points.reward, points.seed, parameters)
    if refused is not None:
        return replace(empty, verdict=refused.name, reason=refused.reason)
    return _fit_points(empty, points, parameters)


def _fit_points(empty: Fit, points: Points, parameters: int) -> Fit:
    """The fit proper: solution, noise, intervals, draws, verdict."""
    options, bounds = empty.options, empty.bounds
    problem = weighted(points, options, bounds)
    best, coarse = profile.solve(problem)
    _, residual, g = profile.evaluate(problem, best.ln_b, best.ln_c)
    targets = 2 + (options.asymptote is None)
    jacobian = _jacobian(problem, best, g)
    measured = noise.estimate(residual, problem.weight, problem.seed, jacobian, targets, points.variance)
    n = len(points.reward)
    dof = max(n / measured.inflation - parameters, _MIN_DOF)
    deviance = measured.scale * float(fdtri(1, dof, 0.95))
    grid = interval.zoom(problem, best, coarse, deviance)
    ends = interval.intervals(problem, best, grid, deviance)
    rng = np.random.default_rng(zlib.crc32(empty.recipe.encode()))
    draws = interval.draw(problem, best, grid, measured.scale, dof, _DRAWS, rng)

    a_low, a_high = _a_ends(points, best, ends["A"], bounds)
    A = Interval(best.a, a_low, a_high)
    B = Interval(float(np.exp(best.ln_b)), *(None if e is None else float(np.exp(e)) for e in ends["ln_b"]))
    C_mid = Interval(float(np.exp(best.ln_c)), *(None if e is None else float(np.exp(e)) for e in ends["ln_c"]))
    about_curve = points.reward - best.r0 * (1 - g) - best.a * g
    w = problem.weight
    mean = float(w @ points.reward / w.sum())
    variance = float((points.reward - points.reward.mean()) @ (points.reward - points.reward.mean()))
    evidence = verdict.Evidence(
        compute=points.compute, reward=points.reward,
        A=(best.a, A.low, A.high), B=(float(np.exp(best.ln_b)), B.low, B.high),
        C_mid=(float(np.exp(best.ln_c)), C_mid.low, C_mid.high),
        R0=best.r0, reward_range=bounds[1] - bounds[0],
        at_edge=_edge(problem, best, points, bounds),
        point_variance=measured.sd**2,
        flat_excess=(float(w @ (points.reward - mean) ** 2) - best.sse) / measured.scale,
        parameters=max(parameters - 1, 1), dof=dof,
    )  # fmt: skip
    judged = verdict.after_fit(evidence)
    unnamed = judged.name in ("flat", "decreasing")
    nothing = Interval(None, None, None)
    fit = replace(
        empty,
        verdict=judged.name,
        reason=judged.reason,
        A=nothing if unnamed else A,
        B=nothing if unnamed else B,
        C_mid=nothing if unnamed else C_mid,
        R0=best.r0,
        rmse=float(np.sqrt(np.mean(about_curve**2))),
        r2=None if variance <= 0 else 1 - float(about_curve @ about_curve) / variance,
        extrapolation_error=_extrapolation_error(points, options, bounds, parameters),
        draws=draws,
        noise=measured,
        dof=dof,
        seed_excess=seed_excess(problem, best, g, measured.scale) if judged.identifiable else SeedExcess(),
    )
    return with_seed_spread(fit, empty.seed_spread)


def _a_ends(
    points: Points, best: Optimum, ends: list[float | None], bounds: tuple[float, float]
) -> tuple[float | None, float | None]:
    """A's interval: open where only a bound ends it, unless a plateau was observed on that bound."""
    low, high = ends
    tolerance = 1e-9 * (bounds[1] - bounds[0])
    if low is not None and low <= bounds[0] + tolerance:
        low = None
    if high is not None and high >= bounds[1] - tolerance:
        seen = verdict.plateau_observed(points.compute, points.reward, bounds[1], bounds[1] - bounds[0])
        high = bounds[1] if seen else None
    return low, high


def _edge(problem: Problem, best: Optimum, points: Points, bounds: tuple[float, float]) -> str | None:
    """Which edge of the search the solution lies on, if any."""
    box = problem.search_box()
    for name, value, low, high in (("B", best.ln_b, *box[:2]), ("C_mid", best.ln_c, *box[2:])):
        if not low + 1e-3 < value < high - 1e-3:
            return f"{name} = {np.exp(value):.4g}"
    at_top = best.a >= bounds[1] - 1e-9 * (bounds[1] - bounds[0])
    if at_top and not verdict.plateau_observed(points.compute, points.reward, bounds[1], bounds[1] - bounds[0]):
        return f"A = {bounds[1]:.4g}"
    return None


def _extrapolation_error(
    points: Points, options: FitOptions, bounds: tuple[float, float], parameters: int
) -> float | None:
    """Fit the first half of the window, predict the mean of the last quarter: the absolute error, or None."""
    end = float(points.compute.max())
    first, last = points.compute <= 0.5 * end, points.compute >= 0.75 * end
    _, index = np.unique(points.seed[first], return_inverse=True)
    half = Points(
        points.compute[first],
        points.reward[first],
        None if points.variance is None else points.variance[first],
        index.astype(np.intp),
    )
    if not len(half.reward) or verdict.before_fit(half.compute, half.reward, half.seed, parameters) is not None:
        return None
    best, _ = profile.solve(weighted(half, options, bounds), polished=2, tolerance=1e-8)
    g = 1 / (1 + (np.exp(best.ln_c) / points.compute[last]) ** np.exp(best.ln_b))
    return abs(float((best.r0 + (best.a - best.r0) * g).mean() - points.reward[last].mean()))


def with_seed_spread(fit: Fit, spread: SeedSpread) -> Fit:
    """The same fit with another spread between seeds: `A_total` is A's interval widened by their mean."""
    value, low, high = fit.A.value, fit.A.low, fit.A.high
    if value is None:
        return replace(fit, seed_spread=spread, A_total=(None, None))
    reach = spread.quantile() * spread.sd / np.sqrt(fit.seeds)
    bottom = None if low is None else float(max(value - np.hypot(value - low, reach), fit.bounds[0]))
    top = None if high is None else float(min(value + np.hypot(high - value, reach), fit.bounds[1]))
    return replace(fit, seed_spread=spread, A_total=(bottom, top))


def fit_curves(curves: Sequence[Curve], options: FitOptions | None = None) -> list[Fit]:
    """Fit every recipe; the spread between seeds is measured on a recipe's own seeds (3 or more), else pooled
    over recipes, else borrowed from the paper.
    """
    fits = [fit_curve(curve, options) for curve in curves]
    pooled = pooled_seed_spread([fit.seed_excess for fit in fits])
    result = []
    for fit in fits:
        own = pooled_seed_spread([fit.seed_excess])
        result.append(with_seed_spread(fit, own or pooled or SeedSpread()))
    return result


def refit(fit: Fit, asymptote: float) -> Fit:
    """The same data and window with A fixed: how the paper compares B (arXiv 2510.13786, A.7)."""
    return fit_curve(fit.curve, replace(fit.options, asymptote=asymptote), fit.seed_spread)
