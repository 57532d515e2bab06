"""Compute needed to reach a target reward, and how much of the gain up to its asymptote a run has made.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)            arXiv 2510.13786, eq. 1
    C(R) = C_mid ((R - R0) / (A - R))^(1/B)               its inverse, for R0 < R < A; never for R >= A

Both answers are computed from a fit's joint draws, so their bounds include all uncertainty that the data leave. Where A
is not identifiable, the curve may still be used within the observed compute and somewhat beyond
(`sweeps.fit.predict.forecast_limit`): a target that was observed needs no asymptote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import forecast_limit, offset_growth, paths, quantiles, seed_offsets
from sweeps.fit.verdict import chance

# A run is near its asymptote if it has gained this fraction of A - R0. With A - R0 = 0.3, the missing 0.015 equals the
# spread between seeds.
NEAR = 0.95
# A target counts as out of reach if the probability of never reaching it is at least this.
_NEVER = 0.9
# The common reward is at this fraction of the slowest recipe's gain. The full gain is not used, because the compute to
# reach a reward near a plateau is uncertain.
_COMMON_SHARE = 0.8
_UNKNOWN = Interval(None, None, None)
# Number of computes at which a curve is evaluated, within the evaluated compute and beyond.
_POINTS_WITHIN, _POINTS_BEYOND = 241, 160
_RISING = ("identifiable", "open", "at_bound", "pre_inflection")


@dataclass(frozen=True)
class Reach(AsJson):
    """Compute that a recipe needs to reach a target reward.

    Attributes:
        compute: compute at which the given runs, if continued, pass the target; None if they do not.
        new_run: the same for a run with a new seed, which differs by the spread between seeds.
        p_never: probability that the runs do not reach the target in the range in which the fit may be used; None
            without a fit.
        reached: whether the curve passed the target within the evaluated compute, with probability 97.5% or more.
    """

    recipe: str
    target: float
    compute: Interval | None
    reason: str
    new_run: Interval | None = None
    p_never: float | None = None
    reached: bool = False

    JSON: ClassVar = {"target": None}


@dataclass(frozen=True)
class AsymptoteProgress(AsJson):
    """Fraction of the way from R0 to the asymptote that a recipe has gained, and whether that is near the asymptote.

    Attributes:
        verdict: `near` (97.5% sure that `share` is at least `NEAR`), `not near` (97.5% sure that it is less),
            `unknown`.
        share: fraction of A - R0 gained at the largest evaluated compute.
        gain_2x: reward gained by doubling the compute.
    """

    recipe: str
    verdict: str
    share: Interval
    gain_2x: Interval
    reason: str

    JSON: ClassVar = {"recipe": None}


def compute_to_reach(fit: Fit, target: float) -> Reach:
    """Return the compute at which the curve passes a reward, with a 95% interval.

    The value is the median over draws, and the bounds are quantiles of the draws. A bound is open (None) where more
    than 2.5% of the draws do not reach the target within `forecast_limit`. The value is None where more than half do
    not. The reason then says "never" if at least 90% do not, else "unlikely".

    Args:
        fit: fit of one recipe, under any verdict: no identifiable asymptote is needed.
        target: reward to reach, within the reward's bounds.

    Raises:
        UserError: the target is not a number, or outside the reward's bounds.
    """
    _check_target(target, fit.bounds)
    limit = forecast_limit(fit)
    if limit is None or fit.window is None:
        return Reach(recipe=fit.recipe, target=target, compute=None, reason=f"{fit.verdict}: {fit.reason}")
    end = fit.window[1]
    grid = np.concatenate(
        [[0.0], np.linspace(0, end, _POINTS_WITHIN)[1:], np.geomspace(end, limit, _POINTS_BEYOND)[1:]]
    )
    rewards = paths(fit, grid)
    computes = first_compute_above(rewards, grid, target)
    computes_of_new_run = first_compute_above(
        rewards + seed_offsets(fit, new_run=True)[:, None] * offset_growth(grid / end), grid, target
    )
    p_never = float(np.isinf(computes).mean())
    interval = quantiles(computes)
    compute, reached = none_if_unreached(interval), interval.high is not None and interval.high <= end
    if interval.value == 0.0:
        compute, reached = Interval(0.0, 0.0, interval.high), True
        reason = f"reached before training (R0 {float(np.median(rewards[:, 0])):.3f})"
    elif compute is not None:
        reason = _reach_reason(fit, compute, p_never, reached)
    elif p_never >= _NEVER:
        reason = f"never: {chance(p_never)} that its runs do not reach it within {limit / end:g} x their compute"
    else:
        reason = f"its runs are unlikely ({chance(1 - p_never)}) to reach it within {limit / end:g} x their compute"
    return Reach(
        fit.recipe, target, compute, reason, none_if_unreached(quantiles(computes_of_new_run)), p_never, reached
    )


def first_compute_above(rewards: Array, grid: Array, target: float) -> Array:
    """Return the compute at which each path first passes a reward, infinite if it never does; (K, m), (m,) -> (K,)."""
    is_above = rewards >= target
    index = is_above.argmax(1)
    rows = np.arange(len(rewards))
    left_index = np.maximum(index - 1, 0)
    low, high = rewards[rows, left_index], rewards[rows, index]
    fraction = np.clip((target - low) / np.where(high > low, high - low, 1.0), 0.0, 1.0)
    crossing = np.where(index > 0, grid[left_index] + fraction * (grid[index] - grid[left_index]), 0.0)
    return np.where(is_above.any(1), crossing, np.inf)


def common_reward(starts: Sequence[Array], ends: Sequence[Array]) -> float | None:
    """Return a reward that all recipes have reached; None if the slowest recipe gained nothing.

    Args:
        starts, ends: draws of each recipe's reward at compute 0 and at the largest compute that all recipes reached.
    """
    start = max(float(np.median(draws)) for draws in starts)
    end = min(float(np.median(draws)) for draws in ends)
    return start + _COMMON_SHARE * (end - start) if end > start else None


def _check_target(target: float, bounds: tuple[float, float]) -> None:
    if not np.isfinite(target) or not bounds[0] <= target <= bounds[1]:
        raise UserError(f"--target {target:g}: outside the reward's range {bounds[0]:g}..{bounds[1]:g}; give a reward")


def none_if_unreached(interval: Interval | None) -> Interval | None:
    """Return the interval of computes; None if its median is None, because most draws do not reach the target."""
    return None if interval is None or interval.value is None else interval


def _reach_reason(fit: Fit, compute: Interval, p_never: float, reached: bool) -> str:
    assert compute.value is not None and fit.window is not None
    end = fit.window[1]
    if reached:
        text = f"already reached, at compute {compute.value:.4g}"
    elif compute.value <= end:
        text = "the fitted curve reaches it within the window, but not with certainty"
    else:
        text = f"{compute.value / end:.2g} x the compute spent so far"
    if not fit.identifiable:
        text += f"; A is not identifiable ({fit.verdict}), "
        text += "but the target is reached within the window" if reached else "so this is only a forecast"
    if not reached and p_never >= 0.005:
        text += f"; {chance(p_never)} that its runs never reach it"
    return text


def asymptote_progress(fit: Fit) -> AsymptoteProgress:
    """Judge whether a recipe's runs have gained at least the fraction `NEAR` of A - R0.

    The fraction gained is (R(C_end) - R0) / (A - R0) = 1 / (1 + (C_mid / C_end)^B), where C_end is the largest
    evaluated compute. The verdict `near` needs an identifiable A; `not near` does not.
    """
    if fit.draws is None or fit.window is None or fit.verdict not in _RISING:
        return AsymptoteProgress(
            recipe=fit.recipe,
            verdict="unknown",
            share=_UNKNOWN,
            gain_2x=_UNKNOWN,
            reason=f"{fit.verdict}: {fit.reason}",
        )
    end, draws = fit.window[1], fit.draws
    assert fit.outlook is not None
    shares = draws.gain_fraction(np.array([end]))[:, 0]
    now, later = fit.outlook.at(np.array([end, 2 * end])).T
    share, gain = quantiles(shares), quantiles(later - now)
    assert share.low is not None and share.high is not None and share.value is not None and gain.value is not None
    verdict = "unknown"
    if share.high < NEAR:
        verdict = "not near"
    elif fit.identifiable and share.low >= NEAR:
        verdict = "near"
    reason = f"{share.value:.0%} of the gain from R0 to A is reached; doubling the compute adds {gain.value:+.3f}"
    if not fit.identifiable:
        reason = f"A is not identifiable ({fit.verdict}); doubling the compute adds about {gain.value:+.3f}"
        if fit.verdict == "pre_inflection":
            reason, gain = f"{fit.verdict}: {fit.reason}", _UNKNOWN
        share = Interval(None, share.low, None if share.high >= 1 - 1e-6 else share.high)
    return AsymptoteProgress(recipe=fit.recipe, verdict=verdict, share=share, gain_2x=gain, reason=reason)


def check_budget(budget: float | None) -> None:
    """Refuse an invalid budget; None, for no budget, is valid.

    Raises:
        UserError: the budget is not a positive number.
    """
    if budget is not None and not (np.isfinite(budget) and budget > 0):
        raise UserError(f"--budget {budget:g}: must be positive, in the unit of the compute axis")


def check_target(fits: Sequence[Fit], target: float) -> None:
    """Refuse a target reward that cannot be planned for.

    Raises:
        UserError: the target is outside the reward's bounds, or every recipe meets it before training.
    """
    _check_target(target, (min(fit.bounds[0] for fit in fits), max(fit.bounds[1] for fit in fits)))
    starts = [fit.R0 for fit in fits if fit.R0 is not None]
    if starts and target <= min(starts):
        raise UserError(f"--target {target:g}: not above the reward before training, R0 {min(starts):.3f}; give more")
