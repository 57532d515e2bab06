"""Comparison of model sizes: when a larger one overtakes, which is best for a budget, and which law to trust.

Two laws of reward against size and compute are fitted: the power law of `sweeps.decide.power_law`, and a sigmoid whose
parameters depend on size (`sweeps.decide.across_sizes`; arXiv 2510.13786, eq. 1). They disagree far beyond the data,
because the power law has no ceiling below R = 1. Every answer names the law that better predicts the last quarter of
every size's compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.across_sizes import AcrossSizes, Frontier, fit_across
from sweeps.decide.power_law import PowerLaw, fit_power_law
from sweeps.decide.reach import check_budget, check_target, first_compute_above, none_if_unreached
from sweeps.decide.standing import CONFIDENCE
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval, fit_curve
from sweeps.fit.predict import FAR, quantiles
from sweeps.fit.verdict import chance
from sweeps.terminal import counted

_HELD_OUT = 0.25
_GRID = 400


@dataclass(frozen=True)
class Crossover(AsJson):
    """The compute from which the larger of two sizes has the lower loss, by both laws.

    A law's entry is None where the law could not be fitted, or where more than half of its draws have no such compute
    up to `FAR` times the largest evaluated compute.
    """

    smaller: float
    larger: float
    power_law: Interval | None
    sigmoid: Interval | None
    reason: str


@dataclass(frozen=True)
class HeldOut(AsJson):
    """Errors of both laws on the held-out last quarter of every size's compute.

    Attributes:
        power_law, sigmoid: root mean square, over runs, of a run's mean error, in reward; None if a law cannot be
            fitted.
        better: `power_law` or `sigmoid`; `neither` where the errors differ by no more than the evaluations' noise;
            `unknown` without errors.
        runs: number of runs with held-out evaluations.
    """

    power_law: float | None
    sigmoid: float | None
    better: str
    runs: int


@dataclass(frozen=True)
class SizeChoice(AsJson):
    """Forecast for one size at a budget.

    Attributes:
        size: model size in parameters.
        extrapolation: whether the size was not run.
        R, p_best: reward, and probability that this size is best, by the power law.
        R_sigmoid, p_best_sigmoid: the same by the joint sigmoids; None if they could not be fitted.
    """

    size: float
    extrapolation: bool
    R: Interval
    p_best: float
    R_sigmoid: Interval | None
    p_best_sigmoid: float | None

    def to_json(self) -> dict[str, Any]:
        """Return one entry of the list `best_size` in `scalerl plan --size --budget --json`."""
        return {
            "size": self.size,
            "extrapolation": self.extrapolation,
            "power_law": {"R": self.R.to_json(), "p_best": self.p_best},
            "sigmoid": None
            if self.R_sigmoid is None
            else {"R": self.R_sigmoid.to_json(), "p_best": self.p_best_sigmoid},
        }


@dataclass(frozen=True)
class SizeReach(AsJson):
    """Compute at which one size reaches a target, by each law; None beyond `FAR` times the evaluated compute."""

    size: float
    extrapolation: bool
    power_law: Interval | None
    sigmoid: Interval | None


@dataclass(frozen=True)
class Sizes(AsJson):
    """One recipe compared across its model sizes, by a power law and by joint sigmoids.

    Attributes:
        law: the power law across sizes.
        joint: the joint sigmoids; None if they could not be fitted.
        frontier: the best size at each of a range of computes; empty if `joint` is None.
        choices: forecasts of all sizes at the budget; empty without a budget.
        reach: compute of each size to the target; empty without a target.
    """

    recipe: str
    law: PowerLaw
    joint: AcrossSizes | None
    frontier: tuple[Frontier, ...]
    crossovers: tuple[Crossover, ...]
    held_out: HeldOut
    choices: tuple[SizeChoice, ...]
    reach: tuple[SizeReach, ...]
    sentence: str
    warnings: tuple[str, ...]

    JSON: ClassVar = {"law": None, "choices": "best_size"}

    def to_json(self) -> dict[str, Any]:
        """Return one entry of the list `sizes` in `scalerl plan --size --json`."""
        law = self.law
        all_sizes = [*map(float, law.sizes), *(choice.size for choice in self.choices if choice.extrapolation)]
        all_sizes += [reach.size for reach in self.reach if reach.extrapolation]
        return {
            "recipe": self.recipe,
            "k_max": law.k_max.to_json(),
            "N_0": law.N_0.to_json(),
            "points": law.points,
            "left_out": law.left_out,
            "rmse_log_loss": law.rmse,
            "lines": [line(law, size) for size in all_sizes],
            **super().to_json(),
        }


def line(law: PowerLaw, size: float) -> dict[str, Any]:
    """Return exponent k, intercept E and loss at the reference compute for one size, as JSON."""
    # Far from the sizes that were run exp may overflow. Infinite draws become open bounds.
    with np.errstate(over="ignore"):
        at_reference = np.exp(law.level(size))
    return {
        "size": size,
        "extrapolation": not law.was_run(size),
        "k": quantiles(law.exponent(size)).to_json(),
        "E": quantiles(law.level(size) + law.exponent(size) * np.log(law.reference)).to_json(),
        "loss_at_reference": quantiles(at_reference).to_json(),
        "reference": law.reference,
    }


def compare_sizes(
    by_size: Mapping[float, Fit],
    recipe: str,
    budget: float | None = None,
    target: float | None = None,
    more: Sequence[float] = (),
) -> Sizes:
    """Compare model sizes of one recipe: laws, crossovers, the best size for a budget or the compute to a target.

    Args:
        by_size: fits by model size in parameters, ascending, as `sweeps.decide.power_law.group_by_size` returns them.
        recipe: name of the recipe.
        budget: compute of one run at which sizes are compared, in the curves' unit; None for no such comparison.
        target: reward to reach; None without a target.
        more: further sizes, in parameters, for which to predict; they count as extrapolation if they were not run.

    Raises:
        UserError: fewer than two sizes, rewards that are not pass rates, or an invalid budget or target.
    """
    check_budget(budget)
    if target is not None:
        check_target(list(by_size.values()), target)
        if target >= 1:
            raise UserError(f"--target {target:g}: a power law in 1 - R never reaches it; give less than 1")
    law, joint = fit_power_law(dict(by_size), recipe), fit_across(by_size, recipe)
    frontier = () if joint is None else joint.frontier(_first_compute(by_size), _last_compute(by_size))
    test_errors = held_out(by_size)
    new_sizes = sorted({size for size in more if not law.was_run(size)})
    choices = () if budget is None else best_size(law, joint, list(by_size), budget, new_sizes)
    return Sizes(
        recipe=recipe,
        law=law,
        joint=joint,
        frontier=frontier,
        crossovers=crossovers(law, joint, by_size),
        held_out=test_errors,
        choices=choices,
        reach=() if target is None else _compute_to_target(law, joint, by_size, target, new_sizes),
        sentence=_sentence(choices, budget, test_errors) if choices else "",
        warnings=_warnings(law, joint, by_size, test_errors, budget, new_sizes),
    )


def _last_compute(by_size: Mapping[float, Fit]) -> float:
    return max(float(fit.curve.compute.max()) for fit in by_size.values())


def _first_compute(by_size: Mapping[float, Fit]) -> float:
    return min(float(fit.curve.compute[fit.curve.compute > 0].min()) for fit in by_size.values())


def crossovers(law: PowerLaw, joint: AcrossSizes | None, by_size: Mapping[float, Fit]) -> tuple[Crossover, ...]:
    """Return, for every pair of sizes, the compute from which the larger size has the lower loss.

    From there on the larger size must stay ahead, up to `FAR` times the largest evaluated compute.
    """
    sizes, crossings = list(by_size), []
    start = _first_compute(by_size)
    grid = np.geomspace(start, FAR * _last_compute(by_size), _GRID)
    for i, smaller in enumerate(sizes):
        for larger in sizes[i + 1 :]:
            law_at = overtaking_compute(law.log_loss(smaller, grid) - law.log_loss(larger, grid), grid)
            power_law, by_sigmoid = _open_low_bound(quantiles(law_at), start), None
            if joint is not None:
                small, large = (joint.curve(size, grid) for size in (smaller, larger))
                by_sigmoid = _open_low_bound(quantiles(overtaking_compute(large - small, grid)), start)
            crossings.append(
                Crossover(
                    smaller=smaller,
                    larger=larger,
                    power_law=none_if_unreached(power_law),
                    sigmoid=none_if_unreached(by_sigmoid),
                    reason=_crossing_reason(power_law, by_sigmoid, grid),
                )
            )
    return tuple(crossings)


def _open_low_bound(crossing: Interval, start: float) -> Interval:
    """Set the lower bound of a crossing to None if the larger size may have been ahead from the start."""
    return replace(crossing, low=None) if crossing.low is not None and crossing.low <= start * 1.001 else crossing


def overtaking_compute(lead: Array, grid: Array) -> Array:
    """Return the compute from which `lead` (K, m) stays positive to the grid's end, (K,); infinite without one."""
    is_behind = lead <= 0
    # Index of the last grid point without a lead, because earlier crossings do not last; -1 if there is none.
    last_behind = np.where(is_behind.any(1), lead.shape[1] - 1 - is_behind[:, ::-1].argmax(1), -1)
    index = np.clip(last_behind, 0, lead.shape[1] - 2)
    rows = np.arange(len(lead))
    lead_before, lead_after = lead[rows, index], lead[rows, index + 1]
    fraction = np.where(
        lead_after > lead_before, -lead_before / np.where(lead_after > lead_before, lead_after - lead_before, 1.0), 0.0
    )
    log_grid = np.log(grid)
    # The lead is nearly linear in log compute, so interpolate there.
    crossing = np.exp(log_grid[index] + np.clip(fraction, 0, 1) * (log_grid[index + 1] - log_grid[index]))
    result = np.where(last_behind < 0, grid[0], crossing)
    return np.asarray(np.where(last_behind == lead.shape[1] - 1, np.inf, result))


def _crossing_reason(law: Interval, sigmoid: Interval | None, grid: Array) -> str:
    words = []
    for name, crossing in (("power law", law), ("sigmoid", sigmoid)):
        if crossing is None:
            words.append(f"{name}: not fitted for both sizes")
        elif crossing.value is None:
            words.append(f"{name}: never within {FAR:g} x the data")
        elif crossing.high is not None and crossing.high <= grid[0] * 1.001:
            words.append(f"{name}: ahead from the start")
        elif crossing.value > grid[-1] / FAR:
            words.append(f"{name}: beyond the data ({crossing.value / (grid[-1] / FAR):.2g} x)")
        else:
            words.append(f"{name}: within the data")
    return "; ".join(words)


def held_out(by_size: Mapping[float, Fit]) -> HeldOut:
    """Fit both laws to the first three quarters of every size's compute, and compare their errors on the last quarter.

    Each run contributes one error: that of the mean of its held-out rewards. If a law cannot be fitted, the result is
    `unknown`.
    """
    early_fits: dict[float, Fit] = {}
    for size, fit in by_size.items():
        cut = (1 - _HELD_OUT) * (fit.window[1] if fit.window else float(fit.curve.compute.max()))
        try:
            early_fits[size] = fit_curve(fit.curve, replace(fit.options, max_compute=cut), fit.seed_spread)
        except UserError:
            return HeldOut(None, None, "unknown", 0)
    joint = fit_across(early_fits)
    try:
        law = fit_power_law(early_fits)
    except UserError:
        joint = None
    if joint is None:
        return HeldOut(None, None, "unknown", 0)
    k_max, n_0, level = law.best
    errors: list[tuple[float, float]] = []
    noise: list[float] = []
    for s, (size, fit) in enumerate(by_size.items()):
        early_fit = early_fits[size]
        cut = early_fit.options.max_compute or 0.0
        end = np.inf if fit.options.max_compute is None else fit.options.max_compute
        if fit.outlook is None:
            continue
        curve = fit.curve
        for label in np.unique(curve.seed):
            late = (curve.seed == label) & (curve.compute > cut) & (curve.compute <= end)
            if not late.any():
                continue
            c, actual = curve.compute[late], float(curve.reward[late].mean())
            by_law = 1 - np.exp(level[s] - k_max / (1 + n_0 / size) * np.log(c / law.reference))
            errors.append((float(by_law.mean()) - actual, float(joint.curve(size, c).mean()) - actual))
            noise.append(float(np.mean(fit.outlook.noise**2)) / len(c))
    if not errors:
        return HeldOut(None, None, "unknown", 0)
    law_error, sigmoid_error = (float(v) for v in np.sqrt(np.mean(np.square(errors), axis=0)))
    # Noise of evaluations alone, as the standard error of the mean over the held-out runs.
    resolution = float(np.sqrt(np.mean(noise) / len(noise)))
    better_law = "power_law" if law_error < sigmoid_error else "sigmoid"
    if abs(law_error - sigmoid_error) <= resolution:
        better_law = "neither"
    return HeldOut(law_error, sigmoid_error, better_law, len(errors))


def best_size(
    law: PowerLaw, joint: AcrossSizes | None, run_sizes: Sequence[float], budget: float, new_sizes: Sequence[float] = ()
) -> tuple[SizeChoice, ...]:
    """Return every size's reward at a budget and its probability of being best, by each law; sizes are ascending.

    A size's `p_best` is relative to the sizes that were run.
    """
    at = np.array([budget])
    # Minus the log loss is higher for a better size, like a reward.
    by_law = [-law.log_loss(size, at)[:, 0] for size in run_sizes]
    by_sigmoid = [] if joint is None else [joint.curve(size, at)[:, 0] for size in run_sizes]
    choices = []
    for size in sorted([*run_sizes, *new_sizes]):
        own_law, own_sigmoid = -law.log_loss(size, at)[:, 0], None if joint is None else joint.curve(size, at)[:, 0]
        choices.append(
            SizeChoice(
                size=size,
                extrapolation=size in new_sizes,
                R=law.reward(size, budget),
                p_best=_p_best(own_law, by_law),
                R_sigmoid=None if own_sigmoid is None else quantiles(own_sigmoid),
                p_best_sigmoid=None if own_sigmoid is None else _p_best(own_sigmoid, by_sigmoid),
            )
        )
    return tuple(choices)


def _p_best(values: Array, values_of_run_sizes: Sequence[Array]) -> float:
    """Return the fraction of draws in which a size is at least as good as the best of the sizes that were run."""
    return float((values >= np.max(values_of_run_sizes, axis=0)).mean())


def _compute_to_target(
    law: PowerLaw, joint: AcrossSizes | None, by_size: Mapping[float, Fit], target: float, new_sizes: Sequence[float]
) -> tuple[SizeReach, ...]:
    far = FAR * _last_compute(by_size)
    grid = np.concatenate([[0.0], np.geomspace(_first_compute(by_size) / 10, far, _GRID)])
    rows = []
    for size in sorted([*by_size, *new_sizes]):
        times = law.compute_to_reach(size, target)
        by_law = quantiles(np.where(times > far, np.inf, times))
        curves = None if joint is None else joint.curve(size, grid)
        by_sigmoid = None if curves is None else quantiles(first_compute_above(curves, grid, target))
        rows.append(SizeReach(size, size not in by_size, none_if_unreached(by_law), none_if_unreached(by_sigmoid)))
    return tuple(rows)


def _sentence(choices: Sequence[SizeChoice], budget: float | None, test_errors: HeldOut) -> str:
    run_sizes = [choice for choice in choices if not choice.extrapolation]
    by_law = max(run_sizes, key=lambda choice: choice.p_best)
    answers = {"power law": (by_law.size, by_law.p_best)}
    readable = [choice for choice in run_sizes if choice.p_best_sigmoid is not None]
    if readable:
        top = max(readable, key=lambda choice: choice.p_best_sigmoid or 0.0)
        answers["sigmoid"] = (top.size, top.p_best_sigmoid or 0.0)
    if test_errors.better == "power_law" or "sigmoid" not in answers:
        answers.pop("sigmoid", None)
    elif test_errors.better == "sigmoid":
        answers.pop("power law")
    sizes = {size for size, _ in answers.values()}
    sure_by = ", ".join(f"{name} {chance(p)}" for name, (_, p) in answers.items())
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {size:.4g} ({chance(p)})" for name, (size, p) in answers.items())
        return f"undecided: at {budget:.4g} the laws disagree on the best of the sizes run: {listed}"
    sure = min(p for _, p in answers.values()) >= CONFIDENCE
    word = "best of the sizes run" if sure else "undecided; most likely the best of the sizes run"
    return f"{word} at {budget:.4g}: {sizes.pop():.4g} ({sure_by})"


def _warnings(
    law: PowerLaw,
    joint: AcrossSizes | None,
    by_size: Mapping[float, Fit],
    test_errors: HeldOut,
    budget: float | None,
    new_sizes: Sequence[float],
) -> tuple[str, ...]:
    notes = []
    if law.left_out:
        notes.append(
            f"the power law leaves out {counted(law.left_out, 'point')}, because compute 0 or loss 0 has no logarithm"
        )
    if len(law.sizes) == 2:
        notes.append("two sizes determine k_max and N_0 exactly: the saturation of k is assumed, not tested")
    if new_sizes and len(law.sizes) < 4:
        notes.append(
            f"the intercept of a size that was not run comes from a line through {len(law.sizes)} sizes: "
            + (
                "its interval does not cover the scatter of sizes around the line"
                if len(law.sizes) == 2
                else "the data hardly test this line"
            )
        )
    ceilings = [] if joint is None else [high for size in by_size if (high := joint.ceiling(size).high) is not None]
    text = "a power law in 1 - R has no ceiling below 1"
    if ceilings:
        text += f"; the sigmoids put the ceiling of the sizes run at {max(ceilings):.3f} or less"
    if test_errors.better == "sigmoid":
        text += "; the sigmoids predict the held-out quarter better, so trust them"
    notes.append(text)
    if budget is not None and budget > _last_compute(by_size):
        factor = budget / _last_compute(by_size)
        notes.append(f"the budget is {factor:.2g} x the largest compute of any run: rewards there are extrapolated")
    return tuple(notes)
