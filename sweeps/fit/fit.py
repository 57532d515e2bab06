"""Fitting the compute curve of a recipe: A, B, C_mid and R0 with intervals, a verdict and predictions.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)            arXiv 2510.13786, eq. 1

or another family of `fit.family`. Estimates are least squares; intervals are 95% of the law's posterior (`fit.law`),
for the runs given, and allow for a policy that wanders (`fit.wander`). Only arrays come in here: no files, no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from sweeps.as_json import AsJson, as_json
from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.fit import least_squares as profile
from sweeps.fit import verdict
from sweeps.fit.bad_seeds import BadSeed, without_bad_seeds
from sweeps.fit.checks import Checks, R0Effect
from sweeps.fit.collapse import death
from sweeps.fit.constants import OTHERS, PLATEAU, RULED_OUT
from sweeps.fit.forecast import DRAWS, Lookout, Outlook, lookout
from sweeps.fit.law import Draws, Law, law_of
from sweeps.fit.least_squares import Array, Optimum, Problem
from sweeps.fit.points import FitOptions as FitOptions
from sweeps.fit.points import Points, fits_r0, pooled, pulled_in, select, weighted
from sweeps.fit.schedule import Schedule, schedule_of
from sweeps.fit.seeds import BORROWED_SEED_SD, SeedExcess, SeedSpread, pooled_seed_spread, seed_excess
from sweeps.fit.wander import Noise
from sweeps.parallel import mapped


@dataclass(frozen=True)
class Interval(AsJson):
    """An estimate with its 95% bounds; None is an open bound, or an estimate that may not be named."""

    value: float | None
    low: float | None
    high: float | None


def shown(interval: Interval | None, form: str) -> str:
    """Format an estimate with its bounds; `-` for none, `open` for an open bound."""
    if interval is None or interval.value is None:
        return "-"
    low, high = ("open" if bound is None else format(bound, form) for bound in (interval.low, interval.high))
    return f"{interval.value:{form}} [{low}, {high}]"


@dataclass(frozen=True, eq=False)
class Fit(AsJson):
    """The fitted curve of one recipe with its verdict, intervals and posterior draws.

    Attributes:
        A, B, C_mid: estimates with 95% bounds; all three values of each are None where the verdict lets none be named.
        A_total: A's bounds widened by the spread between seeds, in reward; None for an open bound.
        R0: reward at compute 0; None without a fit, and for a constant. R0_source is `given`, `first` or `free`.
        rmse, r2: of the rewards about the least-squares curve; None without a fit.
        window: smallest and largest compute that was fitted, in the curve's unit; None if no point lies in the window.
        bounds: lowest and highest value that R0 and A may take, in reward.
        draws, noise, law: posterior draws, the noise about the curve, and the grid posterior that the intervals are
            read from; None where no fit was possible (law also where `fit_curves` was told to drop it).
        shape: the family's shape parameters by name: B and C_mid of a sigmoid, B alone of a power law.
        informing: number of seeds with enough points to have an asymptote of their own.
        bad_seeds: outlier seeds, which are left out of the curve.
        checks: further fits of the same points, by which a reader judges this one; None without a fit.
        lookout: inputs of the forecasts; None with too few points.
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
    warnings: tuple[str, ...]
    bounds: tuple[float, float]
    draws: Draws | None = None
    noise: Noise | None = None
    seed_excess: SeedExcess = field(default_factory=SeedExcess)
    shape: dict[str, Interval] = field(default_factory=dict)
    informing: int = 1
    law: Law | None = None
    bad_seeds: tuple[BadSeed, ...] = ()
    checks: Checks | None = None
    lookout: Lookout | None = None

    @property
    def outlook(self) -> Outlook | None:
        """Forecasts under any verdict, computed at first use, which is slow; None where there are too few points."""
        return None if self.lookout is None else self.lookout.outlook

    @property
    def extrapolation_error(self) -> float | None:
        """See `Checks.extrapolation_error`; None also without a fit."""
        return None if self.checks is None else self.checks.extrapolation_error

    @property
    def R0_effect(self) -> R0Effect | None:
        """See `Checks.R0_effect`; None also where the verdict lets no A be named."""
        return None if self.checks is None or self.A.value is None else self.checks.R0_effect

    @property
    def recipe(self) -> str:
        """Label of the fitted curve's recipe."""
        return self.curve.recipe

    @property
    def family(self) -> str:
        """Name of the fitted curve family."""
        return self.options.family

    @property
    def identifiable(self) -> bool:
        """Return whether the verdict lets the recipe be ranked on A."""
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
            "R0_effect": as_json(self.R0_effect),
            "family": self.family,
            "shape": as_json(self.shape),
            "rmse": self.rmse,
            "r2": self.r2,
            "n": self.n,
            "seeds": self.seeds,
            "window": as_json(self.window),
            "extrapolation_error": self.extrapolation_error,
            "compute_axis": self.curve.axis,
            "metric": self.curve.metric,
            "bad_seeds": as_json(self.bad_seeds),
            "warnings": list(self.warnings),
        }


def fit_curve(curve: Curve, options: FitOptions | None = None, seed_spread: SeedSpread | None = None) -> Fit:
    """Fit the curve of one recipe to its evaluations.

    Args:
        curve: evaluations of all seeds; the result does not depend on their order or on the unit of compute.
        options: how R0 enters, the compute window, a fixed asymptote; the defaults if None.
        seed_spread: spread of A between seeds, for `A_total`; None for the published one (arXiv 2510.13786, A.7).

    Raises:
        UserError: r0 is outside the rewards' bounds, or the window is empty.
    """
    options = options or FitOptions()
    spread = seed_spread or SeedSpread(BORROWED_SEED_SD * curve.scale)
    kept, bad = without_bad_seeds(curve, options.max_compute)
    points = select(kept, options)
    schedule = schedule_of(kept, options.max_compute)
    # No mistake of the user's, as an empty window is: the run has but its evaluation at compute 0 so far.
    if not len(points.reward) and options.min_compute is None and options.max_compute is None:
        reason = f"no evaluation above compute 0, which --r0 or the family leaves out of {len(curve.reward)}; run on"
        nothing = Interval(None, None, None)
        return Fit(
            curve, options, "too_few_points", reason, nothing, (None, None), nothing, nothing, None, "given",
            spread, None, None, 0, 0, None, tuple(curve.warnings), curve.bounds,
        )  # fmt: skip
    if not len(points.reward):
        raise UserError(
            f"recipe {curve.recipe!r}: no points in the window; compute ({curve.axis}) runs from "
            f"{curve.compute.min():.4g} to {curve.compute.max():.4g}: change --min-compute or --max-compute"
        )
    total = len(points.reward)
    points, block = pooled(points)
    raw = points.reward
    if options.robust:
        points = pulled_in(points, options, curve.bounds)
    bounds = curve.bounds
    if not isinstance(options.r0, str) and not bounds[0] <= options.r0 <= bounds[1]:
        raise UserError(f"--r0 {options.r0:g}: outside the reward's range {bounds[0]:g}..{bounds[1]:g}; give a reward")
    seeds = points.seeds
    parameters = options.shape.shape + (options.asymptote is None) + fits_r0(options) + (seeds - 1)
    low = 0.0 if options.min_compute is None else options.min_compute
    warnings = list(curve.warnings)
    if schedule is not None:
        # Points are in compute at the peak learning rate, so the start of the window is converted as well.
        low = float(schedule.count(np.array(low)))
        warnings.append(_decays(schedule))
    inside = points.compute[points.compute >= low]
    window = (float(inside.min()), float(inside.max())) if len(inside) else None
    if schedule is not None and window is not None:
        window = (float(schedule.compute_at(np.array(window[0]))), float(schedule.compute[-1]))
    if options.r0 == "first" and options.shape.from_zero and not (curve.compute == 0).any():
        warnings.append("no evaluation at compute 0: R0 is inferred from the curve; give --r0 if it is known")
    warnings += [_left_out(seed, kept) for seed in bad]
    if block > 1:
        warnings.append(f"{total} points were averaged in blocks of {block} neighbours")
    ahead = lookout(curve.recipe, points, curve.range, schedule, total)
    if ahead is not None and (gone := death(ahead.seen))[0] > 0:
        at = ahead.end * np.array(gone[1])
        since = float(at if schedule is None else schedule.compute_at(at))
        warnings.append(
            f"the reward is exactly {ahead.bottom:g} from compute {since:.4g} on, where nothing is learned any more: "
            f"it stays there with P = {gone[0]:.3f}"
        )
    nothing = Interval(None, None, None)
    zero = options.family == "sigmoid_zero"
    empty = Fit(
        curve, options, "", "", nothing, (None, None), nothing, nothing,
        0.0 if zero else None if isinstance(options.r0, str) else float(options.r0),
        options.r0 if isinstance(options.r0, str) and not zero else "given",
        spread, None, None, total, seeds, window, tuple(warnings), bounds, bad_seeds=bad,
        lookout=ahead,
    )  # fmt: skip
    # A first evaluation from before the window observes R0; it shows nothing of the curve's shape.
    shown = points.compute >= low
    refused = verdict.before_fit(points.compute[shown], points.reward[shown], points.seed[shown], parameters)
    if refused is not None:
        return replace(empty, verdict=refused.name, reason=refused.reason)
    return _fit_points(empty, points, raw, parameters)


def _decays(schedule: Schedule) -> str:
    """Return the warning that a decaying learning rate changes the meaning of the fit and its forecasts."""
    return (
        f"the learning rate decays: compute counts {schedule.rate:.0%} at the end, A, B and C_mid are the peak's, "
        "and forecasts are of these runs; a longer schedule is another run"
    )


def _left_out(bad: BadSeed, kept: Curve) -> str:
    """Return the warning about a seed that was left out of the curve."""
    side = "below" if bad.by < 0 else "above"
    others = ", ".join(str(label) for label in np.unique(kept.seed))
    return (
        f"seed {bad.seed} went its own way from compute {bad.since:.4g} on, {abs(bad.by):.3g} {side} the others "
        f"({others}): it is left out of the curve; look at its run before you trust the recipe"
    )


def _fit_points(empty: Fit, points: Points, raw: Array, parameters: int) -> Fit:
    """Complete a fit with solution, posterior, draws and verdict. raw (n,): rewards before outliers were pulled in."""
    options, bounds = empty.options, empty.bounds
    assert empty.lookout is not None
    problem = weighted(points, options, bounds)
    best = profile.solve(problem)
    _, _, g = profile.evaluate(problem, best.u, best.v)
    informing = int(problem.loose.sum())
    # A seed that ended too early has no offset of its own, so it is no parameter.
    parameters -= problem.seeds - informing
    ahead = empty.lookout
    law = law_of(ahead, problem, best)
    gone = {bad.seed for bad in empty.bad_seeds}
    labels = [str(label) for label in np.unique(empty.curve.seed) if str(label) not in gone]
    silent = [label for label, own in zip(labels, problem.loose, strict=False) if not own]
    if silent and len(labels) == problem.seeds:
        note = f"seed {', '.join(silent)} ended too early to say anything of its asymptote; its points are used"
        empty = replace(empty, warnings=(*empty.warnings, note))
    # crc32 of the name: the same draws in every process, where `hash` of a string is salted.
    draws = law.draw(DRAWS, np.random.default_rng(zlib.crc32(empty.recipe.encode())))
    low, high = law.asymptote_interval()
    if options.sigmoid and _weibull_is_possible(ahead.outlook):
        high = best.a + OTHERS * (high - best.a)
    A = Interval(best.a, *_a_ends(points, (low, high), bounds))
    shape = _shape(law)
    nothing = Interval(None, None, None)
    B = shape.get("B", nothing)
    C_mid = shape.get("C_mid", nothing)
    # RMSE and R^2 are of the rewards as measured, not as pulled in by `robust`.
    about_curve = raw - best.r0 * (1 - g) - best.a * g
    variance = float((raw - raw.mean()) @ (raw - raw.mean()))
    half = _half_gain(options.family, shape, points)
    doubt = _doubt(empty, A)
    evidence = verdict.Evidence(
        compute=points.compute, reward=points.reward,
        A=(best.a, A.low, A.high),
        B=(B.value or 0.0, B.low, B.high) if B.value is not None else None,
        half_gain=half, half_name={"exponential": "tau ln 2", "logistic": "c"}.get(options.family, "C_mid"),
        R0=best.r0, reward_range=empty.curve.scale,
        at_edge=_edge(problem, best, points, bounds),
        point_sd=law.noise.sd, doubt=doubt,
    )  # fmt: skip
    judged = verdict.after_fit(evidence)
    unnamed = judged.name in ("flat", "decreasing")
    fit = replace(
        empty,
        verdict=judged.name,
        reason=judged.reason,
        A=nothing if unnamed else A,
        B=nothing if unnamed else B,
        C_mid=nothing if unnamed else C_mid,
        shape={} if unnamed else shape,
        R0=None if options.family == "constant" else best.r0,
        rmse=float(np.sqrt(np.mean(about_curve**2))),
        r2=None if variance <= 0 else 1 - float(about_curve @ about_curve) / variance,
        checks=Checks(points, options, bounds, empty.curve.scale, best, parameters),
        draws=draws,
        noise=law.noise,
        informing=informing,
        # Only asymptotes that are known tell how far those of seeds lie apart.
        seed_excess=seed_excess(problem, best, g, law.noise, labels) if judged.identifiable else SeedExcess(),
        law=law,
    )
    return with_seed_spread(fit, empty.seed_spread)


def _shape(law: Law) -> dict[str, Interval]:
    """The family's shape parameters with their intervals."""
    family = law.family
    value = family.natural_at(law.best.u, law.best.v)
    found = {}
    for axis, name in enumerate(family.names):
        ends = law.shape_interval(axis)
        own = [None if e is None else family.natural_at(e, e)[axis] for e in ends]
        found[name] = Interval(value[axis], own[0], own[1])
    return found


def _half_gain(
    family: str, shape: dict[str, Interval], points: Points
) -> tuple[float, float | None, float | None] | None:
    """Compute at which half of A - R0 is gained, with its interval; None for a family without such a point."""
    # 1 - exp(-C / tau) is 1/2 at C = tau ln 2; a sigmoid and a logistic are there at their midpoints.
    name, factor = {"exponential": ("tau", np.log(2)), "logistic": ("c", 1.0)}.get(family, ("C_mid", 1.0))
    if name not in shape:
        return None
    value, low, high = shape[name].value, shape[name].low, shape[name].high
    assert value is not None
    return value * factor, None if low is None else low * factor, None if high is None else high * factor


def _weibull_is_possible(outlook: Outlook) -> bool:
    """Return whether a Weibull curve, which saturates later than a sigmoid, is not ruled out."""
    return outlook.log_evidence["sigmoid"] - outlook.log_evidence["weibull"] <= RULED_OUT


def _doubt(fit: Fit, A: Interval) -> verdict.Doubt:
    """Return the evidence against the sigmoid; none on A if another family is fitted or A is fixed."""
    assert fit.outlook is not None and fit.window is not None
    outlook, scale = fit.outlook, fit.curve.scale
    evidence = dict(outlook.log_evidence)
    ours = evidence.pop("sigmoid")
    rival = max(evidence, key=lambda name: evidence[name])
    start, later = outlook.at(np.array([0.0, 2 * fit.window[1]])).T
    # A ceiling within the margin of a tie is the same one.
    near = PLATEAU * scale
    low = (fit.bounds[0] if A.low is None else A.low) - near
    high = (fit.bounds[1] if A.high is None else A.high) + near
    asked = fit.options.sigmoid
    return verdict.Doubt(
        p_rise=float((later - start > near).mean()),
        p_none=outlook.weights["none"],
        rival=rival,
        ahead=evidence[rival] - ours if asked else 0.0,
        agreed=float(((outlook.ceiling >= low) & (outlook.ceiling <= high)).mean()) if asked else 1.0,
    )


def _a_ends(
    points: Points, ends: tuple[float, float], bounds: tuple[float, float]
) -> tuple[float | None, float | None]:
    """Return A's bounds: None where only the reward's bound ends it, unless a plateau was observed there."""
    low: float | None
    high: float | None
    low, high = ends
    tolerance = 1e-9 * (bounds[1] - bounds[0])
    if low <= bounds[0] + tolerance:
        low = None
    if high >= bounds[1] - tolerance:
        seen = verdict.plateau_observed(points.compute, points.reward, bounds[1], bounds[1] - bounds[0])
        high = bounds[1] if seen else None
    return low, high


def _edge(problem: Problem, best: Optimum, points: Points, bounds: tuple[float, float]) -> str | None:
    """Name the edge of the search that the solution lies on, such as "B = 20"; None if it lies inside."""
    at = (best.u, best.v)
    for axis, name in enumerate(problem.family.names):
        low, high = problem.box[2 * axis], problem.box[2 * axis + 1]
        margin = 2e-4 * (high - low)
        if not low + margin < at[axis] < high - margin:
            return f"{name} = {problem.family.natural_at(best.u, best.v)[axis]:.4g}"
    at_top = best.a >= bounds[1] - 1e-9 * (bounds[1] - bounds[0])
    if at_top and not verdict.plateau_observed(points.compute, points.reward, bounds[1], bounds[1] - bounds[0]):
        return f"A = {bounds[1]:.4g}"
    return None


def with_seed_spread(fit: Fit, spread: SeedSpread) -> Fit:
    """Return the fit with another spread between seeds; `A_total` is A's interval widened by that of their mean."""
    value, low, high = fit.A.value, fit.A.low, fit.A.high
    if value is None:
        return replace(fit, seed_spread=spread, A_total=(None, None))
    # Error of the fit and of the mean over seeds are independent: their half-widths add in quadrature.
    reach = spread.quantile() * spread.sd / np.sqrt(fit.informing)
    bottom = None if low is None else float(max(value - np.hypot(value - low, reach), fit.bounds[0]))
    top = None if high is None else float(min(value + np.hypot(high - value, reach), fit.bounds[1]))
    return replace(fit, seed_spread=spread, A_total=(bottom, top))


def fit_curves(
    curves: Sequence[Curve], options: FitOptions | None = None, workers: int = 1, regions: bool = True
) -> list[Fit]:
    """Fit every recipe; the spread between seeds is measured on a recipe's own seeds (3 or more), else pooled
    over recipes, else borrowed from the paper.

    Args:
        curves: one curve per recipe.
        options: how R0 enters, the window, the family; the defaults if None.
        workers: number of processes that share the work, see `sweeps.parallel`.
        regions: keep `Fit.law`, about half a megabyte per recipe, which figures are drawn from.
    """
    return with_shared(mapped(partial(_fit_one, options=options, regions=regions), curves, workers), curves)


def with_shared(fits: Sequence[Fit], curves: Sequence[Curve]) -> list[Fit]:
    """Return fits of single curves, as `fit_curve` makes them, with the spread between seeds that a study shares.

    `fit_curves` does this too.
    """
    scale = max((curve.scale for curve in curves), default=1.0)
    pooled = pooled_seed_spread([fit.seed_excess for fit in fits], scale)
    result = []
    for fit, curve in zip(fits, curves, strict=True):
        own = pooled_seed_spread([fit.seed_excess], scale)
        spread = own or pooled or SeedSpread(BORROWED_SEED_SD * fit.curve.scale)
        result.append(with_seed_spread(replace(fit, curve=curve), spread))
    return result


def _fit_one(curve: Curve, options: FitOptions | None, regions: bool) -> Fit:
    fit = fit_curve(curve, options)
    return fit if regions else replace(fit, law=None)


def refit(fit: Fit, asymptote: float) -> Fit:
    """Refit the same data and window with A fixed, as the paper compares B (arXiv 2510.13786, A.7)."""
    return fit_curve(fit.curve, replace(fit.options, asymptote=asymptote), fit.seed_spread)
