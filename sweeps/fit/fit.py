"""Fit the compute curve of a recipe: A, B, C_mid and R0 with intervals, a verdict and forecasts.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)            arXiv 2510.13786, eq. 1

or another family of `fit.family`. All results are read from the draws of one posterior (`fit.posterior`): estimates are
medians, and 95% intervals are for the given runs, not for new seeds. This module takes arrays only: no files, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from sweeps.as_json import AsJson, as_json
from sweeps.curve import Array, Curve
from sweeps.errors import UserError
from sweeps.fit import verdict
from sweeps.fit.bad_seeds import BadSeed, without_bad_seeds
from sweeps.fit.checks import R0_STEP, Checks, R0Effect
from sweeps.fit.collapse import collapse_probability
from sweeps.fit.constants import HUBER, PLATEAU
from sweeps.fit.forecast import Draws, Outlook, OutlookInputs, outlook_inputs
from sweeps.fit.points import FitOptions as FitOptions
from sweeps.fit.points import Points, fits_r0, select
from sweeps.fit.pooling import POOLED_FROM, Pool, make_pools
from sweeps.fit.schedule import Schedule, schedule_of
from sweeps.fit.seeds import BORROWED_SEED_SD, SPREAD_DOF, SeedScatter, SeedSpread, pooled_seed_spread, seed_scatter
from sweeps.parallel import parallel_map

# Number of rounds in which `FitOptions.robust` moves outliers towards the fitted line.
_ROBUST_ROUNDS = 3


@dataclass(frozen=True)
class Interval(AsJson):
    """An estimate with its 95% bounds.

    An open bound is None; the value is None if it is unknown or may not be reported.
    """

    value: float | None
    low: float | None
    high: float | None


UNKNOWN = Interval(None, None, None)


def format_interval(interval: Interval | None, form: str) -> str:
    """Format an estimate with its bounds in the number format `form`.

    Without a value return `-`; an open bound is `open`.
    """
    if interval is None or interval.value is None:
        return "-"
    low, high = ("open" if bound is None else format(bound, form) for bound in (interval.low, interval.high))
    return f"{interval.value:{form}} [{low}, {high}]"


@dataclass(frozen=True, eq=False)
class Fit(AsJson):
    """The fitted curve of one recipe with its verdict, intervals and posterior draws.

    Attributes:
        A, B, C_mid: estimates with 95% bounds, all None where the verdict allows no estimate.
        A_total: A's bounds widened by the spread between seeds, in reward; None for an open bound.
        R0: reward at compute 0; None without a fit, and for a constant. R0_source: how R0 was obtained (`given`,
            `first` or `free`, see `sweeps.fit.points`).
        rmse, r2: root mean squared error and R^2 of the rewards about the fitted line; None without a fit.
        window: smallest and largest fitted compute, in the curve's unit; None if no point is within the options'
            limits.
        bounds: lowest and highest value that R0 and A may take, in reward.
        draws: posterior draws of the parameters, from which the intervals are read; None where no fit was possible.
        shape: the family's shape parameters by name: B and C_mid of a sigmoid, B alone of a power law.
        informative_seeds: number of seeds that ran far enough to inform on their asymptote.
        bad_seeds: outlier seeds, which are left out of the curve.
        checks: further fits of the same points, for judging this one; None without a fit.
        outlook_inputs: inputs of the posterior; None with too few points.
        pool: information from the study's other recipes on the size of the random walk, which the draws use; None
            without pooling.
    """

    curve: Curve
    options: FitOptions
    bounds: tuple[float, float]
    warnings: tuple[str, ...]
    verdict: str = ""
    reason: str = ""
    A: Interval = UNKNOWN
    A_total: tuple[float | None, float | None] = (None, None)
    B: Interval = UNKNOWN
    C_mid: Interval = UNKNOWN
    R0: float | None = None
    R0_source: str = "given"
    seed_spread: SeedSpread = field(default_factory=SeedSpread)
    rmse: float | None = None
    r2: float | None = None
    n: int = 0
    seeds: int = 0
    window: tuple[float, float] | None = None
    draws: Draws | None = None
    seed_excess: SeedScatter = field(default_factory=SeedScatter)
    shape: dict[str, Interval] = field(default_factory=dict)
    informative_seeds: int = 1
    bad_seeds: tuple[BadSeed, ...] = ()
    checks: Checks | None = None
    outlook_inputs: OutlookInputs | None = None
    pool: Pool | None = None

    @property
    def outlook(self) -> Outlook | None:
        """Forecasts under any verdict; None where there are too few points. Computed when first read, which is slow."""
        return None if self.outlook_inputs is None else self.outlook_inputs.outlook

    @property
    def extrapolation_error(self) -> float | None:
        """The same as `Checks.extrapolation_error`; None without a fit."""
        return None if self.checks is None else self.checks.extrapolation_error

    @cached_property
    def R0_effect(self) -> R0Effect | None:
        """A and B, refitted with R0 lower and higher by `R0_STEP` of the reward's scale.

        None if the fit has no A, or is not a sigmoid with A free.
        """
        if self.checks is None or self.A.value is None or self.R0 is None or not self.options.is_free_sigmoid:
            return None
        step = R0_STEP * self.curve.scale
        refits = [
            fit_curve(self.curve, replace(self.options, r0=r0), pool=self.pool)
            if self.bounds[0] <= r0 < self.A.value
            else None
            for r0 in (self.R0 - step, self.R0 + step)
        ]
        A, B = zip(*((None, None) if fit is None else (fit.A.value, fit.B.value) for fit in refits), strict=True)
        return R0Effect(step, A, B)

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
        """True if the verdict lets the recipe be ranked on A."""
        return self.verdict == "identifiable"

    def to_json(self) -> dict[str, Any]:
        """Return the fit as printed by `scalerl fit --json`. NaN, infinity and open bounds are None."""
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


def fit_curve(
    curve: Curve,
    options: FitOptions | None = None,
    seed_spread: SeedSpread | None = None,
    pool: Pool | None = None,
) -> Fit:
    """Fit the curve of one recipe to its evaluations.

    Args:
        curve: evaluations of all seeds; the result does not depend on their order or on the unit of compute.
        options: how R0 is treated, range of compute, family and fixed asymptote; None for `FitOptions()`.
        seed_spread: spread of A between seeds, for `A_total`; None for the published spread (arXiv 2510.13786, A.7).
        pool: `Fit.pool` of an earlier fit, to refit a recipe of a study that `fit_curves` has pooled; None for no
            pooling.

    Raises:
        UserError: r0 is outside the rewards' bounds, or no evaluation is within the options' range of compute.
    """
    options = options or FitOptions()
    spread = seed_spread or SeedSpread(BORROWED_SEED_SD * curve.scale)
    agreeing, bad_seeds = without_bad_seeds(curve, options.max_compute)
    points = select(agreeing, options)
    schedule = schedule_of(agreeing, options.max_compute)
    empty = Fit(curve=curve, options=options, bounds=curve.bounds, warnings=curve.notes, seed_spread=spread)
    if not len(points.reward):
        if options.min_compute is None and options.max_compute is None:
            # Not an error: the run has only its evaluation at compute 0 so far.
            at_start = f"{len(curve.reward)} evaluation{'s' * (len(curve.reward) != 1)}"
            reason = f"no evaluation above compute 0 yet; --r0 or the family leaves out {at_start} at compute 0"
            return replace(empty, verdict="too_few_points", reason=f"{reason}; continue the run")
        raise UserError(
            f"recipe {curve.recipe!r}: no points in the window; compute ({curve.axis}) runs from "
            f"{curve.compute.min():.4g} to {curve.compute.max():.4g}: change --min-compute or --max-compute"
        )
    low, high = curve.bounds
    if not isinstance(options.r0, str) and not low <= options.r0 <= high:
        raise UserError(
            f"--r0 {options.r0:g}: outside the reward's range {low:g}..{high:g}; give a reward (of a metric that is "
            "better if lower, minus its value)"
        )
    start = 0.0 if options.min_compute is None else options.min_compute
    if schedule is not None:
        # Points are in compute at the peak learning rate, so convert the lower limit of compute too.
        start = float(schedule.effective_compute(np.array(start)))
    # A first evaluation below the lower limit informs R0 only.
    in_window = points.compute >= start
    window = (
        (float(points.compute[in_window].min()), float(points.compute[in_window].max())) if in_window.any() else None
    )
    if schedule is not None and window is not None:
        window = (float(schedule.compute_at(np.array(window[0]))), float(schedule.compute[-1]))
    inputs = outlook_inputs(curve.recipe, points, curve.range, schedule, options)
    zero = options.family == "sigmoid_zero"
    empty = replace(
        empty,
        R0=0.0 if zero else None if isinstance(options.r0, str) else float(options.r0),
        R0_source=options.r0 if isinstance(options.r0, str) and not zero else "given",
        n=len(points.reward),
        seeds=points.seeds,
        window=window,
        warnings=(*curve.notes, *_notes(curve, agreeing, options, schedule, inputs, bad_seeds)),
        bad_seeds=bad_seeds,
        outlook_inputs=inputs,
    )
    if window is None:
        until = "" if options.max_compute is None else f" to {options.max_compute:.4g}"
        reason = (
            f"no point lies in the window from compute {options.min_compute or 0:.4g}{until}: compute ({curve.axis}) "
            f"runs from {curve.compute.min():.4g} to {curve.compute.max():.4g}; change --min-compute or --max-compute"
        )
        return replace(empty, verdict="too_few_points", reason=reason)
    parameters = options.curve_family.shape + (options.asymptote is None) + fits_r0(options) + (points.seeds - 1)
    refusal = verdict.refuse_points(
        points.compute[in_window], points.reward[in_window], points.seed[in_window], parameters
    )
    if refusal is not None or inputs is None:
        assert refusal is not None, "points that vary, and are enough, have an outlook"
        return replace(empty, verdict=refusal.name, reason=refusal.reason)
    if options.robust:
        inputs = _refit_robustly(points, inputs)
    if pool is not None:
        inputs = inputs.resample(pool.weights)
    return replace(_with_estimates(empty, points, inputs, parameters), pool=pool)


def _notes(
    curve: Curve,
    without_outliers: Curve,
    options: FitOptions,
    schedule: Schedule | None,
    inputs: OutlookInputs | None,
    bad_seeds: Sequence[BadSeed],
) -> Iterator[str]:
    """Yield warnings about the data of the fit. `without_outliers` is the curve without its outlier seeds."""
    if schedule is not None:
        yield (
            f"the learning rate decays: at the end, compute counts {schedule.rate:.0%}; A, B and C_mid hold at the "
            "peak rate, and forecasts hold for these runs; a longer schedule is a different run"
        )
    if options.r0 == "first" and options.curve_family.from_zero and not (curve.compute == 0).any():
        yield "no evaluation at compute 0: R0 is inferred from the curve; give --r0 if it is known"
    others = ", ".join(str(label) for label in np.unique(without_outliers.seed))
    for seed in bad_seeds:
        yield (
            f"seed {seed.seed} departs from the others ({others}) at compute {seed.since:.4g}, by {abs(seed.by):.3g} "
            f"{'downwards' if seed.by < 0 else 'upwards'}: it is left out of the curve; inspect its run before you "
            "trust the recipe"
        )
    if inputs is None:
        return
    if inputs.evaluations_per_point > 1:
        total = round(inputs.evaluations_per_point * len(inputs.points.x))
        yield f"{total} points were averaged into {len(inputs.points.x)} means of neighbours"
    p, died = collapse_probability(inputs.points)
    if p > 0:
        since_at_peak = inputs.end * np.array(died)
        since = float(since_at_peak if schedule is None else schedule.compute_at(since_at_peak))
        yield (
            f"the reward is exactly {inputs.bottom:g} from compute {since:.4g} on, where nothing more can be learned: "
            f"it stays there with P = {p:.3f}"
        )


def _with_estimates(empty: Fit, points: Points, inputs: OutlookInputs, parameters: int) -> Fit:
    """Add estimates, intervals and verdict, from the draws of the posterior.

    Args:
        empty: the fit so far, with its options, bounds and warnings.
        points: the fitted points.
        inputs: inputs of the posterior.
        parameters: number of fitted parameters.
    """
    options, outlook = empty.options, inputs.outlook
    draws, line = outlook.draws, outlook.fitted_line_at(points.compute)
    excluded = {bad.seed for bad in empty.bad_seeds}
    labels = [str(label) for label in np.unique(empty.curve.seed) if str(label) not in excluded]
    excess, informing = seed_scatter(points, line, outlook, labels)
    uninformative = [label for label, informs in zip(labels, informing, strict=False) if not informs]
    if uninformative and len(labels) == points.seeds:
        one = len(uninformative) == 1
        note = f"seed{'' if one else 's'} {', '.join(uninformative)} ended too early to inform the asymptote; "
        note += f"{'its' if one else 'their'} points are used"
        empty = replace(empty, warnings=tuple(dict.fromkeys([*empty.warnings, note])))
    empty = replace(empty, outlook_inputs=inputs)
    A = interval_of(draws.A)
    if options.asymptote is not None:
        A = Interval(options.asymptote, options.asymptote, options.asymptote)
    A = Interval(A.value, *_a_bounds(points, A, empty.curve.range))
    shape = {
        name: interval_of(values)
        for name, values in zip(options.curve_family.names, (draws.B, draws.C_mid), strict=False)
    }
    r0 = options.r0 if isinstance(options.r0, float | int) else float(np.median(draws.R0))
    residual = points.reward - line
    variance = float(points.reward.var())
    half_gain_computes = draws.family.compute_at(0.5, draws.B, draws.C_mid) if draws.family.names else None
    evidence = verdict.Evidence(
        compute=points.compute,
        reward=points.reward,
        A=(float(np.median(draws.A)) if A.value is None else A.value, A.low, A.high),
        half_gain=None
        if half_gain_computes is None
        else (float(np.median(half_gain_computes)), float((half_gain_computes > outlook.end).mean())),
        half_name={"exponential": "tau ln 2", "logistic": "c"}.get(options.family, "C_mid"),
        R0=r0,
        reward_range=empty.curve.scale,
        laws=_law_evidence(empty, A),
    )
    judgement = verdict.judge_fit(evidence)
    without_asymptote = judgement.name in ("flat", "decreasing")
    fit = replace(
        empty,
        verdict=judgement.name,
        reason=judgement.reason,
        A=UNKNOWN if without_asymptote else A,
        B=UNKNOWN if without_asymptote else shape.get("B", UNKNOWN),
        C_mid=UNKNOWN if without_asymptote else shape.get("C_mid", UNKNOWN),
        shape={} if without_asymptote else shape,
        R0=None if options.family == "constant" else r0,
        rmse=float(np.sqrt(np.mean(residual**2))),
        r2=None if variance <= 0 else 1 - float(np.mean(residual**2)) / variance,
        checks=Checks(points, inputs, parameters),
        draws=draws,
        informative_seeds=int(informing.sum()),
        # Asymptotes of seeds can only be compared if A is identifiable.
        seed_excess=excess if judgement.identifiable else SeedScatter(),
    )
    return with_seed_spread(fit, empty.seed_spread)


def interval_of(draws: Array) -> Interval:
    """Return the median of draws (K,) with their central 95% interval."""
    low, value, high = np.quantile(draws, [0.025, 0.5, 0.975]).tolist()
    return Interval(value, low, high)


def _refit_robustly(points: Points, inputs: OutlookInputs) -> OutlookInputs:
    """Move outliers towards the fitted line and fit again. This approximates Huber's robust fit (1964)."""
    for _ in range(_ROBUST_ROUNDS):
        line = inputs.outlook.fitted_line_at(points.compute)
        residual = points.reward - line
        # 1.4826 x the median absolute residual is a standard deviation that outliers do not affect.
        limit = HUBER * max(1.4826 * float(np.median(np.abs(residual))), 1e-7 * inputs.width)
        clipped = replace(points, reward=line + np.clip(residual, -limit, limit))
        refitted = outlook_inputs(inputs.recipe, clipped, inputs.limits, inputs.schedule, inputs.options)
        if refitted is None:
            break
        inputs = refitted
    return inputs


def _law_evidence(fit: Fit, A: Interval) -> verdict.LawEvidence:
    """Collect the evidence of all laws (forms of the curve) for and against the fitted family, whose asymptote is A."""
    assert fit.outlook is not None and fit.window is not None
    outlook, scale = fit.outlook, fit.curve.scale
    evidence = dict(outlook.log_evidence)
    fitted = evidence.pop(fit.family)
    rival = max(evidence, key=lambda name: evidence[name])
    start, later = outlook.at(np.array([0.0, 2 * fit.window[1]])).T
    # A ceiling outside A's interval by no more than the margin of a tie counts as inside.
    margin = PLATEAU * scale
    low = (fit.bounds[0] if A.low is None else A.low) - margin
    high = (fit.bounds[1] if A.high is None else A.high) + margin
    compares_laws = fit.options.is_free_sigmoid
    return verdict.LawEvidence(
        p_rise=float((later - start > margin).mean()),
        p_none=outlook.weights["none"],
        rival=rival,
        rival_lead=evidence[rival] - fitted if compares_laws else 0.0,
        agreement=float(((outlook.ceiling >= low) & (outlook.ceiling <= high)).mean()) if compares_laws else 1.0,
    )


def _a_bounds(points: Points, A: Interval, limits: tuple[float, float] | None) -> tuple[float | None, float | None]:
    """Return A's bounds; None at a limit of the reward, except at the upper limit after an observed plateau."""
    low, high = A.low, A.high
    if limits is None:
        return low, high
    bottom, top = limits
    tolerance = 1e-9 * (top - bottom)
    if low is not None and low <= bottom + tolerance:
        low = None
    if high is not None and high >= top - tolerance:
        high = top if verdict.plateau_observed(points.compute, points.reward, top, top - bottom) else None
    return low, high


def with_seed_spread(fit: Fit, spread: SeedSpread) -> Fit:
    """Return the fit with another spread between seeds, and `A_total`: A's interval widened by this spread."""
    value, low, high = fit.A.value, fit.A.low, fit.A.high
    if value is None:
        return replace(fit, seed_spread=spread, A_total=(None, None))
    # The errors of the fit and of the mean over seeds are independent, so their half-widths add in quadrature.
    half_width = spread.quantile() * spread.sd / np.sqrt(fit.informative_seeds)
    bottom = None if low is None else float(max(value - np.hypot(value - low, half_width), fit.bounds[0]))
    top = None if high is None else float(min(value + np.hypot(high - value, half_width), fit.bounds[1]))
    return replace(fit, seed_spread=spread, A_total=(bottom, top))


def fit_curves(curves: Sequence[Curve], options: FitOptions | None = None, workers: int = 1) -> list[Fit]:
    """Fit every recipe of a study.

    The spread between seeds is measured on the recipe's seeds if there are 3 or more, else pooled over recipes, else
    taken from the paper.

    Args:
        curves: one curve per recipe.
        options: options of every fit; None for `FitOptions()`.
        workers: number of processes that share the work, see `sweeps.parallel`.
    """
    return pool_over_recipes(parallel_map(partial(fit_curve, options=options), curves, workers), curves)


def pool_over_recipes(fits: Sequence[Fit], curves: Sequence[Curve]) -> list[Fit]:
    """Share information between a study's recipes, each fitted alone by `fit_curve`. `fit_curves` includes this step.

    The size of the random walks (`sweeps.fit.pooling`) and the spread between seeds are pooled.
    """
    scale = max((curve.scale for curve in curves), default=1.0)
    fits = _pool_walks(fits)
    study_spread = pooled_seed_spread([fit.seed_excess for fit in fits], scale)
    result = []
    for fit, curve in zip(fits, curves, strict=True):
        recipe_spread = pooled_seed_spread([fit.seed_excess], scale)
        spread = recipe_spread or study_spread or SeedSpread(BORROWED_SEED_SD * fit.curve.scale)
        result.append(with_seed_spread(replace(fit, curve=curve), spread))
    return result


def warnings_of(fits: Sequence[Fit]) -> list[str]:
    """Return all warnings of fits, each with its recipe.

    A warning that the spread between seeds is assumed comes first.

    Fits without draws, such as fits by the published procedure, use no spread between seeds.
    """
    assumed = [fit for fit in fits if fit.draws is not None and fit.seed_spread.assumed]
    notes = [f"{fit.recipe}: {note}" for fit in fits for note in fit.warnings]
    if not assumed:
        return notes
    spread = ", ".join(dict.fromkeys(f"{fit.seed_spread.sd:.3g}" for fit in assumed))
    statement = f"the spread between seeds is assumed ({spread}), not measured"
    if sum(fit.seeds - 1 for fit in assumed) >= SPREAD_DOF:
        return [f"{statement}: too few recipes have an identifiable asymptote; run longer", *notes]
    seeds = "one seed per recipe" if all(fit.seeds == 1 for fit in assumed) else "too few seeds"
    return [f"{seeds}: {statement}; add seeds", *notes]


def _pool_walks(fits: Sequence[Fit]) -> list[Fit]:
    """Reweight each fit's draws by the size of the other recipes' random walks, and recompute the estimates."""
    numbers = sorted((i for i, fit in enumerate(fits) if fit.draws is not None), key=lambda i: fits[i].recipe)
    if len(numbers) < POOLED_FROM:
        return list(fits)
    walks = [outlook.futures.log_walk for i in numbers if (outlook := fits[i].outlook) is not None]
    result = list(fits)
    for i, pool in zip(numbers, make_pools(walks), strict=True):
        fit = fits[i]
        assert fit.checks is not None and fit.outlook_inputs is not None
        inputs = fit.outlook_inputs.resample(pool.weights)
        result[i] = replace(_with_estimates(fit, fit.checks.points, inputs, fit.checks.parameters), pool=pool)
    return result
