"""How much compute a target takes, and how near a live run is to its asymptote.

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)            arXiv 2510.13786, eq. 1
    C(R) = C_mid ((R - R0) / (A - R))^(1/B)               its inverse, for R0 < R < A; never for R >= A

Both are read off a fit's joint draws, so every bound carries all that the data leave open. Where A is not
identifiable the curve may still be read inside the window and a little beyond (`support`): a target that was
observed needs no asymptote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.least_squares import Array
from sweeps.fit.predict import _REACH, FAR, SUPPORT, chance, quantiles, support, total_draws

# A run is near its asymptote with this share of A - R0 gained: of a gain of 0.3 that leaves 0.015, the spread
# between seeds.
NEAR = 0.95
_NOTHING = Interval(None, None, None)


@dataclass(frozen=True)
class Reach(AsJson):
    """Compute to reach a target.

    compute: for the runs given, continued; None where it may not be named. new_run: the same for another seed,
    whose A differs by the spread between seeds. p_never: probability that the runs do not get there within
    `FAR` times the window. reached: the fitted curve passed it within the window, with 97.5%.
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
class Asymptote(AsJson):
    """How near a run is to its asymptote.

    verdict: `near` (97.5% sure that the share is `NEAR` or more), `not near` (97.5% sure that it is less),
    `unknown`. share: of A - R0, gained at the window's end. gain_2x: reward that as much compute again brings.
    """

    recipe: str
    verdict: str
    share: Interval
    gain_2x: Interval
    reason: str

    JSON: ClassVar = {"recipe": None}


def compute_to_reach(fit: Fit, target: float) -> Reach:
    """Compute at which the fitted curve passes a reward, with a 95% interval.

    Args:
        fit: one recipe's fit.
        target: reward.

    The value is the median over draws and the bounds their quantiles; a bound is open (None) where more than
    2.5% of the draws do not get there within `FAR` times the window, and the value is None ("never") where
    more than half do not.

    Raises:
        UserError: the target is no number, or outside the reward's bounds.
    """
    _check_target(target, fit.bounds)
    limit = support(fit)
    if limit is None or fit.draws is None or fit.window is None:
        return Reach(fit.recipe, target, None, f"{fit.verdict}: {fit.reason}")
    end = fit.window[1]
    times = _inverse(fit, fit.draws.A, target, FAR * end)
    fresh = _inverse(fit, total_draws(fit, new_run=True), target, FAR * end)
    p_never = float(np.isinf(times).mean())
    raw = quantiles(times)
    reached = raw.high is not None and raw.high <= end
    if raw.value == 0.0:
        met = f"met before training (R0 {fit.R0:.3f})"
        return Reach(fit.recipe, target, Interval(0.0, 0.0, raw.high), met, quantiles(fresh), p_never, True)
    if not fit.identifiable and (raw.value is None or raw.value > limit):
        where = "within the window" if limit <= end else f"by {SUPPORT:g} x its end"
        reason = f"not reached {where} ({limit:.4g}), and A is not identifiable ({fit.verdict}): {fit.reason}"
        return Reach(fit.recipe, target, None, reason)
    if raw.value is None:
        reason = f"never: {chance(p_never)} that its runs do not reach it within {FAR:g} x their compute"
        return Reach(fit.recipe, target, None, reason, _named(quantiles(fresh)), p_never)
    compute, new_run = _within(raw, fit, limit), _within(quantiles(fresh), fit, limit)
    reason = _reach_reason(fit, compute, p_never, reached)
    return Reach(fit.recipe, target, compute, reason, _named(new_run), p_never, reached)


def _check_target(target: float, bounds: tuple[float, float]) -> None:
    if not np.isfinite(target) or not bounds[0] <= target <= bounds[1]:
        raise UserError(f"--target {target:g}: outside the reward's range {bounds[0]:g}..{bounds[1]:g}; give a reward")


def _inverse(fit: Fit, asymptote: Array, target: float, far: float) -> Array:
    """C(target) per draw: 0 where R0 is past it already, infinite where not reached by `far`. (K,)."""
    draws = fit.draws
    assert draws is not None
    gap = asymptote - target
    with np.errstate(divide="ignore", invalid="ignore"):
        # In logs: 1/B up to 10 would overflow close to A.
        log_c = np.log(draws.C_mid) + (np.log(target - draws.R0) - np.log(gap)) / draws.B
    met, short = target <= draws.R0, gap <= 0
    log_c = np.where(met, -np.inf, np.where(short, np.inf, log_c))
    result: Array = np.where(log_c <= np.log(far), np.exp(np.minimum(log_c, np.log(far))), np.inf)
    return result


def _within(compute: Interval, fit: Fit, limit: float) -> Interval:
    """Without bounds that lie where the fit may not be read."""
    if fit.identifiable:
        return compute
    value, low, high = (None if v is None or v > limit else v for v in (compute.value, compute.low, compute.high))
    return Interval(value, low, high)


def _named(interval: Interval) -> Interval | None:
    return None if interval.value is None else interval


def _reach_reason(fit: Fit, compute: Interval, p_never: float, reached: bool) -> str:
    assert compute.value is not None and fit.window is not None
    end = fit.window[1]
    if reached:
        text = f"reached already, at compute {compute.value:.4g}"
    elif compute.value <= end:
        text = "the fitted curve passes it within the window, without certainty"
    else:
        text = f"{compute.value / end:.2g} x the compute spent so far"
    if not fit.identifiable:
        text += f"; A is not identifiable ({fit.verdict}), but the curve is known there"
    if not reached and p_never >= 0.005:
        text += f"; {chance(p_never)} that its runs never get there"
    return text


def near_asymptote(fit: Fit) -> Asymptote:
    """Whether the runs given have gained almost all that the recipe has to give.

    share = (R(C_end) - R0) / (A - R0) = 1 / (1 + (C_mid / C_end)^B), C_end the window's end. `near` needs an
    identifiable A; that a run is not near can be sure without one.
    """
    if fit.draws is None or fit.window is None or fit.verdict not in _REACH:
        return Asymptote(fit.recipe, "unknown", _NOTHING, _NOTHING, f"{fit.verdict}: {fit.reason}")
    end, draws = fit.window[1], fit.draws
    shares = 1 / (1 + np.exp(np.clip(draws.B * (np.log(draws.C_mid) - np.log(end)), -700, 700)))
    now, later = draws.curve(np.array([end, 2 * end])).T
    share, gain = quantiles(shares), quantiles(later - now)
    assert share.low is not None and share.high is not None and share.value is not None and gain.value is not None
    verdict = "unknown"
    if share.high < NEAR:
        verdict = "not near"
    elif fit.identifiable and share.low >= NEAR:
        verdict = "near"
    reason = f"{share.value:.0%} of the gain from R0 to A is in; as much compute again brings {gain.value:+.3f}"
    if not fit.identifiable:
        reason = f"A is not identifiable ({fit.verdict}); as much compute again brings about {gain.value:+.3f}"
        if fit.verdict == "pre_inflection":
            reason, gain = f"{fit.verdict}: {fit.reason}", _NOTHING
        share = Interval(None, share.low, None if share.high >= 1 - 1e-6 else share.high)
    return Asymptote(fit.recipe, verdict, share, gain, reason)


def check_target(fits: Sequence[Fit], target: float) -> None:
    """Raises:
    UserError: the target is outside the reward's bounds, or every recipe meets it before training.
    """
    _check_target(target, (min(fit.bounds[0] for fit in fits), max(fit.bounds[1] for fit in fits)))
    starts = [fit.R0 for fit in fits if fit.R0 is not None]
    if starts and target <= min(starts):
        raise UserError(f"--target {target:g}: not above the reward before training, R0 {min(starts):.3f}; give more")
