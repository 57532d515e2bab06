"""Best number of rollouts per prompt for a budget, from a study that varied it; optionally by difficulty.

The reward at the budget comes from a fitted curve for each number of rollouts. Only numbers that were run are proposed.
In arXiv 2603.12151 the best number grows with the budget and saturates; the study has to show whether it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.as_json import AsJson
from sweeps.decide.reach import check_budget
from sweeps.decide.standing import CONFIDENCE, chances_of_being_best
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import forecast_limit, quantiles, reward_draws_over_seeds
from sweeps.fit.verdict import chance


@dataclass(frozen=True)
class RolloutChoice(AsJson):
    """One number of rollouts per prompt, at the budget. R and p_best are None if the fit may not be used there."""

    rollouts: int
    R: Interval | None
    p_best: float | None
    reason: str


@dataclass(frozen=True)
class RolloutPlan(AsJson):
    """Comparison of numbers of rollouts for one recipe and difficulty.

    Attributes:
        difficulty: difficulty of the prompts; None if prompts are not divided by difficulty.
        best: best number of rollouts per prompt; None if undecided.
        values: the numbers that were run.
    """

    recipe: str
    difficulty: str | None
    best: int | None
    values: tuple[RolloutChoice, ...]
    sentence: str


def parse_rollouts(text: str) -> int:
    """Parse a number of rollouts per prompt.

    Raises:
        UserError: the text is not a whole number above 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value) or value < 1 or value != round(value):
        raise UserError(f"rollouts {text!r}: not a whole number above 0; name the column of rollouts per prompt")
    return int(value)


def best_rollouts(
    fits: Sequence[Fit], budget: float, column: str = "rollouts", difficulty: str | None = None
) -> list[RolloutPlan]:
    """Find the best number of rollouts per prompt at a budget, for each recipe and difficulty.

    Args:
        fits: fits of curves whose `factors` contain `column`, and `difficulty` if it is given.
        budget: compute of one run, in the curves' unit.
        column: name of the factor with the number of rollouts per prompt.
        difficulty: name of the factor with the prompts' difficulty (any text); None if prompts are not divided.

    Rewards at the budget include the spread between seeds. A result is undecided if no number is best with a
    probability of at least 95%, or if the reward of some number cannot be forecast at the budget.

    Raises:
        UserError: a factor is missing, rollouts are not whole numbers, or only one value was run.
    """
    check_budget(budget)
    groups: dict[tuple[str, str | None], dict[int, Fit]] = {}
    for fit in fits:
        names = [column] if difficulty is None else [column, difficulty]
        recipe = fit.recipe
        for name, option in zip(names, ("--rollouts", "--difficulty"), strict=False):
            if name not in fit.curve.factors:
                raise UserError(f"{option} {name}: recipe {fit.recipe!r} has no {name}; name the column that holds it")
            recipe = recipe.replace(f" {name}={fit.curve.factors[name]}", "")
        key = (recipe, None if difficulty is None else fit.curve.factors[difficulty])
        value = parse_rollouts(fit.curve.factors[column])
        if value in groups.setdefault(key, {}):
            raise UserError(f"--rollouts {column}: recipe {recipe!r} has {value} twice; write it one way")
        groups[key][value] = fit
    if all(len(by_value) == 1 for by_value in groups.values()):
        raise UserError(f"--rollouts {column}: one value only; a study that varied it is needed")
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    return [_compare_counts(recipe, level, dict(sorted(group.items())), budget) for (recipe, level), group in ordered]


def _compare_counts(recipe: str, difficulty: str | None, by_value: dict[int, Fit], budget: float) -> RolloutPlan:
    readable_values = [value for value, fit in by_value.items() if (forecast_limit(fit) or 0.0) >= budget]
    draws = {value: reward_draws_over_seeds(by_value[value], [budget])[:, 0] for value in readable_values}
    p_best = dict(zip(readable_values, chances_of_being_best(list(draws.values())), strict=True))
    values = tuple(
        RolloutChoice(
            value,
            quantiles(draws[value]) if value in draws else None,
            p_best.get(value),
            "" if value in draws else f"cannot be forecast at {budget:.4g}: {fit.verdict}, {fit.reason}",
        )
        for value, fit in by_value.items()
    )
    best = max(draws, key=lambda value: p_best[value], default=None)
    settled = best is not None and len(draws) == len(by_value) > 1 and p_best[best] >= CONFIDENCE
    if best is None:
        sentence = f"undecided: no recipe can be forecast at {budget:.4g}"
    elif len(by_value) == 1:
        sentence = f"undecided: only {best} was run"
    elif len(draws) < len(by_value):
        missing = ", ".join(str(value) for value in by_value if value not in draws)
        sentence = f"undecided: {missing} cannot be forecast at {budget:.4g}; "
        sentence += f"the best of the others is {best} ({chance(p_best[best])})"
    elif settled:
        sentence = f"{best} rollouts per prompt ({chance(p_best[best])} among those run)"
    else:
        sentence = f"undecided: {best} is most likely the best ({chance(p_best[best])}), but the intervals overlap"
    return RolloutPlan(recipe, difficulty, best if settled else None, values, sentence)
