"""Comparisons without an asymptote: of rewards at a common compute, and of compute to a common reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.decide.efficiency import Ratio, bonferroni_tail
from sweeps.decide.reach import common_reward, first_compute_above
from sweeps.decide.standing import chances_of_being_best
from sweeps.decide.wording import multiple
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import can_forecast, can_forecast_at, quantiles, reward_draws_over_seeds
from sweeps.fit.verdict import chance

_GRID_SIZE = 201


@dataclass(frozen=True)
class RewardRow(AsJson):
    """A recipe's reward at the common compute, and its compute to the common reward.

    Attributes:
        R, p_best: reward at the common compute, and probability that it is the highest there.
        C: compute to the common reward; None where there is no such reward.
        ratio: C divided by the C of the fastest recipe, with bounds that hold for all pairs of recipes at once; None
            for the fastest itself, and where no recipe is known to be the fastest.
        p_neither: fraction of the draws in which neither this recipe nor the fastest reaches the common reward; `ratio`
            leaves these draws out.
        R_at_budget, p_best_at_budget: like R and p_best, forecast at the budget; None without a budget, or if the
            budget is too far beyond the data.
    """

    recipe: str
    R: Interval
    p_best: float
    C: Interval | None
    ratio: Interval | None
    R_at_budget: Interval | None
    p_best_at_budget: float | None
    p_neither: float | None = None


@dataclass(frozen=True)
class Rewards(AsJson):
    """Comparison of all recipes at common compute and to a common reward.

    Attributes:
        compute: largest compute that every recipe has spent.
        reward: a reward that every recipe has reached; None if there is none.
        budget: as passed to `rewards`.
        rows: the recipes, the highest reward at `compute` first.
        fastest: the recipe that reaches `reward` with the least compute; None where unknown.
    """

    compute: float
    reward: float | None
    budget: float | None
    sentence: str
    rows: tuple[RewardRow, ...]
    fastest: str | None = None

    JSON: ClassVar = {"compute": "common_compute", "reward": "common_reward", "fastest": None}


def rewards(fits: Sequence[Fit], budget: float | None = None) -> Rewards | None:
    """Compare recipes at common compute and common reward; None if no recipe has a forecast.

    Args:
        fits: one fit per recipe.
        budget: compute at which to forecast as well, in the curves' unit; None for no forecast.
    """
    readable_fits = [fit for fit in fits if can_forecast(fit) and fit.window is not None]
    if not readable_fits:
        return None
    compute = min(fit.window[1] for fit in readable_fits if fit.window is not None)
    start_and_end = [reward_draws_over_seeds(fit, [0.0, compute]) for fit in readable_fits]
    at_end = [np.asarray(end[:, 1]) for end in start_and_end]
    p_best = chances_of_being_best(at_end)
    reward = common_reward([end[:, 0] for end in start_and_end], at_end)
    computes = np.linspace(0, compute, _GRID_SIZE)
    # Process one recipe at a time: the paths of a thousand recipes would take gigabytes.
    times = (
        []
        if reward is None
        else [first_compute_above(reward_draws_over_seeds(fit, computes), computes, reward) for fit in readable_fits]
    )
    fastest = min(range(len(times)), key=lambda i: float(np.median(times[i])), default=None)
    at_budget = [_draw_at_budget(fit, budget) for fit in readable_fits]
    forecasts = [values for values in at_budget if values is not None]
    p_best_at_budget = dict(
        zip((i for i, v in enumerate(at_budget) if v is not None), chances_of_being_best(forecasts), strict=True)
    )
    # If most draws of even the fastest recipe do not reach the reward, no recipe is known to need the least compute.
    has_fastest = fastest is not None and quantiles(times[fastest]).value is not None
    rows, tail = [], bonferroni_tail(len(times))
    for i, fit in enumerate(readable_fits):
        ratio = Ratio.of(times[i], times[fastest]) if fastest is not None and i != fastest else None
        values = at_budget[i]
        rows.append(
            RewardRow(
                recipe=fit.recipe,
                R=quantiles(at_end[i]),
                p_best=p_best[i],
                C=quantiles(times[i]) if times else None,
                ratio=ratio.interval(tail) if ratio is not None and has_fastest else None,
                R_at_budget=None if values is None else quantiles(values),
                p_best_at_budget=p_best_at_budget.get(i),
                p_neither=None if ratio is None else ratio.p_neither,
            )
        )
    order = sorted(range(len(rows)), key=lambda i: (-(rows[i].R.value or 0.0), rows[i].recipe))
    ordered = tuple(rows[i] for i in order)
    first = readable_fits[fastest].recipe if fastest is not None and has_fastest else None
    with_row = {row.recipe for row in ordered}
    left_out = [fit.recipe for fit in fits if fit.recipe not in with_row]
    return Rewards(compute, reward, budget, _sentence(ordered, left_out, compute, reward, first), ordered, first)


def _draw_at_budget(fit: Fit, budget: float | None) -> Array | None:
    """Return draws of the reward at the budget, (K,); None without a budget, or if it is too far beyond the data."""
    if budget is None or not can_forecast_at(fit, budget):
        return None
    return np.asarray(reward_draws_over_seeds(fit, [budget])[:, 0])


def _sentence(
    rows: Sequence[RewardRow], left_out: Sequence[str], compute: float, reward: float | None, fastest: str | None
) -> str:
    """Describe the rows. `left_out` names recipes without a forecast, which have no row."""
    best = rows[0]
    reached = "all recipes reached"
    if left_out:
        named = ", ".join(left_out) if len(left_out) < 4 else f"{len(left_out)} recipes"
        reached = f"all recipes with a forecast reached (left out: {named})"
    text = f"at compute {compute:.4g}, which {reached}, {best.recipe} is ahead with reward {best.R.value:.3f}"
    text += f" (highest with {chance(best.p_best)})" if len(rows) > 1 else ""
    slower = [(row.ratio, row.recipe) for row in rows if row.ratio is not None and (row.ratio.low or 0.0) > 1]
    if fastest is not None and slower:
        ratio, slowest = max(slower, key=lambda each: each[0].value or np.inf)
        bounds = " to ".join("open" if end is None else f"{end:.2g}" for end in (ratio.low, ratio.high))
        text += f"; {slowest} needs {multiple(ratio)}x the compute of {fastest} to reach {reward:.3f}"
        text += f" (95% interval {bounds})"
    elif fastest is not None and len(rows) > 1:
        text += f"; no recipe surely needs more compute to reach {reward:.3f} than {fastest}, the fastest"
    neither = max((row.p_neither or 0.0 for row in rows), default=0.0)
    if fastest is not None and neither >= 0.01:
        text += f"; ratios leave out up to {neither:.0%} of the draws, in which neither of two recipes reaches it"
    return text
