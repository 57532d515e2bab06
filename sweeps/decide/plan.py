"""The plan for a target or a budget as one object: compute, next runs, comparisons of model sizes and of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sweeps.as_json import AsJson, as_json
from sweeps.decide.next_run import (
    BudgetSplit,
    NextSteps,
    Step,
    find_next_steps,
    group_alternatives,
    make_choice,
    split_budget,
)
from sweeps.decide.power_law import group_by_size, parse_size
from sweeps.decide.reach import (
    AsymptoteProgress,
    Reach,
    asymptote_progress,
    check_budget,
    check_target,
    compute_to_reach,
)
from sweeps.decide.rollout_counts import RolloutPlan, best_rollouts
from sweeps.decide.sizes import Sizes, compare_sizes
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import reward_at


@dataclass(frozen=True)
class FactorColumns:
    """Names of the columns of what a study varied besides the recipe.

    Attributes:
        size: column of the model size.
        rollouts: column of the number of rollouts per prompt.
        difficulty: column of the prompts' difficulty.
        more_sizes: model sizes that were not run but are predicted as well, such as `7B`.
    """

    size: str | None = None
    rollouts: str | None = None
    difficulty: str | None = None
    more_sizes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row(AsJson):
    """One recipe of a plan.

    Attributes:
        compute: compute to the target, or what the recipe gets of the budget; None where the target is not reached.
        R: for a budget, the reward at `to`; None for a target, or where the fit may not be used there.
        reason: explanation in words.
        asymptote: how near the recipe's runs are to their asymptote.
        reach: the full answer for a target; None for a budget.
        to: for a budget, the compute that a run of the recipe then reaches; None for a target, or if nothing is added.
    """

    recipe: str
    compute: Interval | None
    R: Interval | None
    reason: str
    asymptote: AsymptoteProgress
    reach: Reach | None = None
    to: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return one entry of the list `recipes` in `scalerl plan --json`."""
        if self.reach is not None:
            return {**self.reach.to_json(), "asymptote": self.asymptote.to_json()}
        names = ("recipe", "compute", "reason", "asymptote", "to", "R")
        return {name: as_json(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Plan(AsJson):
    """The result of `scalerl plan`. Either target or budget is None, or both if only the next runs were requested."""

    target: float | None
    budget: float | None
    unit: str
    rows: tuple[Row, ...]
    next: tuple[Step, ...]
    settlements: tuple[NextSteps, ...]
    split: BudgetSplit | None
    sizes: tuple[Sizes, ...]
    rollouts: tuple[RolloutPlan, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object printed by `scalerl plan --json`."""
        goals = {"target": self.target, "budget": self.budget}
        entry: dict[str, Any] = {name: goal for name, goal in goals.items() if goal is not None}
        entry["unit"] = self.unit
        entry["recipes"] = as_json(self.rows)
        entry["next"] = as_json(self.next)
        entry["choice"] = [
            {"leader": s.leader, "p_wrong": s.p_wrong, "margin": s.margin, "sentence": s.sentence}
            for s in self.settlements
        ]
        if self.split is not None:
            commit = self.split.commit
            entry["commit"] = {
                "recipe": None if commit is None else self.split.winner,
                "from": None if commit is None else commit[0],
                "to": None if commit is None else commit[1],
                "sentence": self.split.sentence,
            }
        if self.sizes:
            entry["sizes"] = as_json(self.sizes)
        if self.rollouts:
            entry["rollouts"] = as_json(self.rollouts)
        return entry


def make_plan(
    fits: Sequence[Fit],
    target: float | None = None,
    budget: float | None = None,
    margin: float | None = None,
    factors: FactorColumns | None = None,
) -> Plan:
    """Plan for a target or a budget; with neither, propose the next runs.

    Args:
        fits: fits of curves that are grouped by the factors, as `fit_curves` returns them.
        target: reward to reach; None without a target.
        budget: compute in the curves' unit; None without a budget. Without factors it is the compute still to spend
            over all recipes, with factors the compute of one run.
        margin: shortfall from the best A, in reward, up to which choosing a recipe is not an error; None for 0.02 of
            the reward's scale.
        factors: factors that the study varied besides the recipe; None for none.

    Raises:
        UserError: both target and budget are given, one is out of range, or the factors do not match the curves.
    """
    factors = factors or FactorColumns()
    if not fits:
        raise UserError("nothing to plan: give at least one recipe")
    if target is not None and budget is not None:
        raise UserError("give one of --target and --budget")
    if factors.size is not None and target is None and budget is None:
        raise UserError("--size: which size is best depends on what it is for; give --budget or --target")
    if factors.more_sizes and factors.size is None:
        raise UserError("--sizes: name the column of sizes with --size")
    if factors.difficulty is not None and factors.rollouts is None:
        raise UserError("--difficulty: name the column of rollouts per prompt with --rollouts")
    if factors.rollouts is not None and budget is None:
        raise UserError("--rollouts: the best number depends on the budget; give --budget")
    if target is not None:
        check_target(fits, target)
    check_budget(budget)
    sizes: tuple[Sizes, ...] = ()
    if factors.size is not None:
        more_sizes = [parse_size(text) for text in factors.more_sizes]
        by_recipe = group_by_size(fits, factors.size)
        sizes = tuple(
            compare_sizes(by_size=group, recipe=recipe, budget=budget, target=target, more=more_sizes)
            for recipe, group in by_recipe.items()
        )
    rollouts: tuple[RolloutPlan, ...] = ()
    if factors.rollouts is not None and budget is not None:
        rollouts = tuple(best_rollouts(fits, budget, factors.rollouts, factors.difficulty))
    # Curves that differ in a factor (model size, rollouts) are not alternatives: a budget cannot be split between them.
    split = None
    if budget is not None and not any(fit.curve.factors for fit in fits):
        choice = make_choice(fits, margin)
        split = split_budget(choice, budget)
        settlements: tuple[NextSteps, ...] = (find_next_steps(choice, budget),)
    else:
        settlements = tuple(
            find_next_steps(make_choice(group, margin))
            for group in group_alternatives(fits, ignored_factor=factors.rollouts)
        )
    steps = tuple(step for settlement in settlements for step in settlement.steps)
    return Plan(
        target=target,
        budget=budget,
        unit=fits[0].curve.unit,
        rows=tuple(_row(fit, target, budget, split) for fit in fits),
        next=steps if split is None else split.steps,
        settlements=settlements,
        split=split,
        sizes=sizes,
        rollouts=rollouts,
    )


def _row(fit: Fit, target: float | None, budget: float | None, split: BudgetSplit | None) -> Row:
    """Return a recipe's row for the target, the split of the budget, one run with the budget, or none of these."""
    distance = asymptote_progress(fit)
    if target is not None:
        reach = compute_to_reach(fit, target)
        return Row(fit.recipe, reach.compute, None, reach.reason, distance, reach)
    if split is not None:
        share = next(share for share in split.shares if share.recipe == fit.recipe)
        amount = Interval(share.compute, share.compute, share.compute)
        return Row(fit.recipe, amount, share.R, share.reason, distance, to=share.to)
    if budget is None:
        return Row(fit.recipe, None, None, fit.reason, distance)
    reward = reward_at(fit, budget)
    reason = "one run with this budget"
    if reward is None:
        reason += f"; its reward cannot be forecast there ({fit.verdict}): {fit.reason}"
    return Row(fit.recipe, Interval(budget, budget, budget), reward, reason, distance, to=budget)
