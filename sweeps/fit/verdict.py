"""Verdicts on whether a fit's asymptote is identifiable, each with a reason and a remedy.

Only `identifiable` lets a recipe be ranked on A. The refusals are, in the order tested: `too_few_points`, `degenerate`,
`decreasing`, `flat`, `misfit`, `pre_inflection`, `open`. `at_bound` comes only from the fit of the paper
(`sweeps.fit.published`). Verdicts concern the asymptote only: forecasts are available under any verdict
(`sweeps.fit.forecast`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from sweeps.curve import Array
from sweeps.fit.constants import (
    AGREED,
    BEND,
    COLLAPSE,
    MAX_WIDTH,
    MIN_COMPUTES,
    MIN_RIVAL_LEAD,
    MIN_SPAN,
    P_FLAT,
    PLATEAU,
)

# The best reward so far is the highest mean of this many consecutive evaluations.
_SMOOTHED = 5


def chance(p: float) -> str:
    """Format a probability. The ends are `P > 0.99` and `P < 0.01`, because 2000 draws cannot resolve more."""
    return f"P = {p:.2f}" if 0.01 <= p <= 0.99 else "P > 0.99" if p > 0.5 else "P < 0.01"


@dataclass(frozen=True)
class Verdict:
    """A verdict: one of the names in the module's docstring, and a reason in one sentence."""

    name: str
    reason: str

    @property
    def identifiable(self) -> bool:
        """True if A may be reported, ranked and used to stop a run."""
        return self.name == "identifiable"


@dataclass(frozen=True)
class LawEvidence:
    """Evidence for and against the sigmoid from all laws (forms of the curve, `sweeps.fit.posterior`).

    Attributes:
        p_rise: probability that the reward rises by more than `PLATEAU` times its scale between compute 0 and twice the
            largest evaluated compute.
        p_none: posterior probability of "no law": the reward does not grow with compute.
        rival: name of the law, other than the sigmoid, with the most evidence.
        rival_lead: log evidence of the rival minus that of the sigmoid.
        agreement: posterior probability, over all laws, that the ceiling is within A's interval.
    """

    p_rise: float
    p_none: float
    rival: str
    rival_lead: float
    agreement: float


@dataclass(frozen=True)
class Evidence:
    """Inputs of a verdict: the points, the estimates with their intervals, and the evidence from all laws.

    Attributes:
        compute, reward: the fitted points, (n,).
        A: (value, low, high); an open bound is None.
        half_gain: compute at which half of A - R0 is gained (C_mid of a sigmoid), and the probability that it is beyond
            the evaluated compute; None for a family without such a point.
        R0: fitted or given reward at compute 0.
        reward_range: width of the reward's scale.
        laws: evidence from all laws.
        half_name: name of the compute in `half_gain`, in terms of the family's parameters, such as `tau ln 2`.
    """

    compute: Array
    reward: Array
    A: tuple[float, float | None, float | None]
    half_gain: tuple[float, float] | None
    R0: float
    reward_range: float
    laws: LawEvidence
    half_name: str = "C_mid"


def plateau_observed(compute: Array, reward: Array, bound: float, reward_range: float) -> bool:
    """Return whether the mean reward of the last quarter is within `PLATEAU` of a bound, such as a pass rate of 1."""
    tail = reward[compute >= 0.75 * compute.max()]
    return bool(tail.mean() >= bound - PLATEAU * reward_range)


def refuse_points(compute: Array, reward: Array, seed: NDArray[np.intp], parameters: int) -> Verdict | None:
    """Return the verdict that refuses the points (n,) before any fit; None if a fit is possible.

    A single run must show the curve's shape: more seeds at the same computes add precision, but no shape.
    """
    distinct = np.unique(compute[compute > 0])
    most_computes = max((len(np.unique(compute[(compute > 0) & (seed == s)])) for s in np.unique(seed)), default=0)
    if most_computes < MIN_COMPUTES or len(compute) < parameters + 3:
        return Verdict(
            "too_few_points",
            f"{parameters} parameters cannot be fitted to {len(compute)} point{'s' * (len(compute) != 1)} with at most "
            f"{most_computes} distinct positive compute values in one run; evaluate more often or run longer (at least "
            f"{parameters + 3} points, and in one run {MIN_COMPUTES} distinct values of compute above 0)",
        )
    # Capped, because the exponential overflows above about 709.
    span = float(np.exp(min(np.log(distinct[-1]) - np.log(distinct[0]), 700.0)))
    if span < MIN_SPAN:
        return Verdict(
            "degenerate",
            f"all compute values are within a factor of {span:.3g}, which shows no curve; "
            f"include points that span at least a factor of {MIN_SPAN:g}",
        )
    if float(np.ptp(reward)) <= 1e-12 * max(1.0, float(np.abs(reward).max())):
        return Verdict("flat", f"every reward is {reward[0]:.4g}: nothing rises, so no asymptote can be named")
    return None


def _fit_line(reward: Array) -> tuple[float, float, Array]:
    """Fit a line to equally spaced rewards. Return slope, sum of squared positions and residuals (n,)."""
    x = np.arange(len(reward)) - (len(reward) - 1) / 2
    slope = float(x @ reward / (x @ x))
    return slope, float(x @ x), reward - reward.mean() - slope * x


def _trend(e: Evidence) -> Verdict | None:
    """Return `decreasing` if the reward falls overall, or rose and then fell; else None."""
    order = np.argsort(e.compute, kind="stable")
    reward = e.reward[order]
    n = len(reward)
    # The noise is about this line, not about the sigmoid, for which a steady fall would count as noise.
    slope, xx, residual = _fit_line(reward)
    squares = max(float(residual @ residual), 1e-300)
    lag_1 = float(residual[1:] @ residual[:-1]) / squares
    # The lag-1 autocorrelation of residuals is biased low by (1 + 4 r) / n (Kendall 1954); n correlated points count
    # as n (1 - r) / (1 + r) independent ones.
    r = float(np.clip(lag_1 + (1 + 4 * lag_1) / n, 0.0, 0.95))
    inflation = (1 + r) / (1 - r)
    quantile = float(stdtrit(max(n / inflation - 2, 3.0), 0.975))
    if slope < -quantile * np.sqrt(squares / (n - 2) * inflation / xx):
        return Verdict(
            "decreasing",
            f"reward falls by {-slope * (n - 1):.3g} over the window; look at the run's health "
            "(entropy, truncation, KL) or fit the part before the fall with --max-compute",
        )
    blocks = np.array_split(reward, 5)
    if len(blocks[-1]) < 3:
        return None
    means = np.array([block.mean() for block in blocks])
    top = int(means.argmax())
    fall, gain = means[top] - means[-1], means[top] - means[0]
    if fall <= COLLAPSE * max(gain, 0.0):
        return None
    # Variance of the noise about a line in each block. Blocks are too short to measure its autocorrelation: the value
    # of a drifting policy (r = 0.6) is assumed.
    noise_variance = sum(float(deviation @ deviation) for _, _, deviation in map(_fit_line, blocks)) / (
        n - 2 * len(blocks)
    )
    block_error = np.sqrt(2 * noise_variance * (1 + 0.6) / (1 - 0.6) / len(blocks[-1]))
    if fall > 3 * block_error:
        at = float(e.compute[order][sum(len(block) for block in blocks[: top + 1]) - 1])
        return Verdict(
            "decreasing",
            f"reward fell by {fall:.3g} after compute {at:.4g}: the run went bad; "
            f"fit the part before it with --max-compute {at:.4g}",
        )
    return None


def judge_fit(e: Evidence) -> Verdict:
    """Judge a fitted curve: return the first refusal that applies, else `identifiable`."""
    trend = _trend(e)
    if trend is not None:
        return trend
    a, a_low, a_high = e.A
    gain = a - e.R0
    if e.laws.p_none > 0.5 and e.laws.p_rise < P_FLAT:
        return Verdict(
            "flat",
            f"the reward does not rise: {chance(e.laws.p_rise)} of a rise by more than "
            f"{PLATEAU * e.reward_range:.2g} within twice the compute; run longer, or evaluate on more prompts",
        )
    end = float(e.compute.max())
    misfit = _misfit(e)
    if misfit is not None:
        return misfit
    seen_range = ""
    if e.half_gain is not None:
        c, p_beyond = e.half_gain
        if p_beyond > BEND:
            return Verdict(
                "pre_inflection",
                f"the window ends at compute {end:.4g} and may not have reached the bend ({e.half_name} about {c:.4g}, "
                f"beyond the window with {chance(p_beyond)}); needs about {2 * max(c, end) / end:.2g}x the compute",
            )
        if c > 0:
            seen_range = f" in a window up to {end / c:.2g} x {e.half_name}"
    remedy = "add seeds or evaluate on more prompts"
    if e.half_gain is not None and end < 4 * e.half_gain[0]:
        remedy = f"needs about {4 * e.half_gain[0] / end:.2g}x the compute (to 4 x {e.half_name}), or more seeds"
    if a_low is None or a_high is None:
        side = "above" if a_high is None else "below"
        return Verdict("open", f"the data do not bound A {side} (best {a:.3f}){seen_range}; {remedy}")
    width, allowed = a_high - a_low, min(MAX_WIDTH * e.reward_range, gain)
    if width > allowed:
        return Verdict(
            "open",
            f"A is only known to be in {a_low:.3f}..{a_high:.3f} (allowed width: at most {allowed:.2g})"
            f"{seen_range}; {remedy}",
        )
    if e.laws.agreement < AGREED:
        return Verdict(
            "open",
            f"other laws fit equally well and put the ceiling elsewhere: {e.laws.agreement:.0%} of their ceilings are "
            f"within A's {a_low:.3f}..{a_high:.3f}{seen_range}; {remedy}",
        )
    return Verdict("identifiable", f"A is known within {width:.3f}{seen_range}")


# Words for each law that may explain the points better than a sigmoid.
_WORDING = {
    "none": "no law: the reward wanders, and its last value predicts the next better than any curve",
    "weibull": "another law: a Weibull curve",
}


def _misfit(e: Evidence) -> Verdict | None:
    """Return `misfit` if another law explains the points far better than a sigmoid; else None."""
    laws = e.laws
    # If the better law has the same ceiling, A still holds.
    if laws.rival_lead <= MIN_RIVAL_LEAD or (laws.rival != "none" and laws.agreement >= AGREED):
        return None
    order = np.argsort(e.compute, kind="stable")
    smooth = np.convolve(e.reward[order], np.ones(_SMOOTHED) / _SMOOTHED, mode="valid")
    best = float(e.compute[order][int(smooth.argmax()) + _SMOOTHED // 2])
    return Verdict(
        "misfit",
        f"{_WORDING[laws.rival]}; it explains the evaluations e^{laws.rival_lead:.1f} times better than a sigmoid, "
        f"so A is not named; the best so far is {smooth.max():.3f} at about compute {best:.4g}; rewards in the "
        "window and forecasts are valid without A (scalerl plan, scalerl rank --budget)",
    )
