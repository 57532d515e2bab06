"""Axis `curriculum`: which prompts, how long completions and which rewards count as training goes on."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, not_negative, whole_number
from lightning_scalerl.choice import DesignChoice, ObservedStep
from lightning_scalerl.prompt import Prompt


def difficulty(prompt: Prompt) -> float:
    """Return the first number in the prompt's label of difficulty, such as 3 in "Level 3".

    Raises:
        ConfigurationError: there is none.
    """
    # A minus behind a letter or digit is a hyphen: "Level-3" is 3, "level -1.5" is -1.5.
    found = re.search(r"(?:(?<!\w)-)?\d+(?:\.\d+)?", prompt.difficulty)
    if found is None:
        raise ConfigurationError(
            f"curriculum: prompt {prompt.prompt_id!r} has no number in its difficulty ({prompt.difficulty!r}); an "
            "order from easy to hard needs one on every prompt of the task, or choose curriculum=none"
        )
    return float(found[0])


# Key of a stage for the reward that decides whether a completion passes, whatever the task calls it.
FIRST = "first"


def staged_factors(
    progress: float, begins: Sequence[float], stages: Sequence[Mapping[str, float]], sums: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return the factors on the terms of a task's weighted rewards at a share of the budget.

    Args:
        progress: share of the budget that is done, 0 or more.
        begins: the share at which each stage begins, rising from 0.
        stages: for each stage, factors by the rewards' names; the key `first` means the first reward of every sum.
        sums: the names of the rewards in each weighted sum of the task, see `Task.reward_sums`.

    Returns:
        Factors by name; a term that is not named counts as the task weighs it.
    """
    stage = stages[bisect_right(begins, progress) - 1]
    factors = {names[0]: stage[FIRST] for names in sums} if FIRST in stage else {}
    return factors | {name: factor for name, factor in stage.items() if name != FIRST}


def weighed_sum(reward: float, terms: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Return the sum of the terms, each times its factor; `reward`, their plain sum, where no factor changes any."""
    # Also where `terms` is empty: a single reward has none (`Grade.terms`).
    if all(factors.get(name, 1.0) == 1.0 for name in terms):
        return reward
    return float(sum(factors.get(name, 1.0) * term for name, term in terms.items()))


class Curriculum(DesignChoice):
    """Widens the prompt pool, the completion limit or the rewards step by step as training goes on.

    Attributes:
        by_difficulty: whether prompts need a number as their difficulty.
        weighs_rewards: whether rewards may count otherwise than the task weighs them.
    """

    axis: ClassVar[str] = "curriculum"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoCurriculum"}
    by_difficulty: ClassVar[bool] = False
    weighs_rewards: ClassVar[bool] = False

    def share(self, completed_steps: int) -> float:
        """Return the share of the pool, from its easy end, that prompts may be drawn from; 1 is all of it."""
        return 1.0

    def max_new_tokens(self, limit: int, completed_steps: int) -> int:
        """Return the token limit for completions that are begun now; `limit` is the context's."""
        return limit

    def reward_factors(self, sums: Sequence[Sequence[str]], completed_steps: int) -> Mapping[str, float]:
        """Return factors on the terms of a task's weighted rewards, by name, for groups that are begun now."""
        return {}

    def check_rewards(self, sums: Sequence[Sequence[str]]) -> str | None:
        """Return one line if a task with these weighted rewards (`Task.reward_sums`) has none to stage, else None."""
        return None

    def places(self, pool: Sequence[Prompt]) -> list[int]:
        """Return each prompt's place from easy to hard; prompts of one difficulty in the order of the pool.

        Raises:
            ConfigurationError: a prompt without a difficulty.
        """
        if not self.by_difficulty:
            return [0] * len(pool)
        order = sorted(range(len(pool)), key=lambda number: difficulty(pool[number]))
        places = [0] * len(pool)
        for place, number in enumerate(order):
            places[number] = place
        return places

    def differs(self, theirs: Curriculum, step: ObservedStep) -> bool:
        """Return whether the two allow other prompts, other lengths, or reward a rollout otherwise at this step."""
        # A limit so long that rounding to whole tokens makes no two shares of it equal.
        at, whole = step.completed_steps, 10**6
        limits = self.max_new_tokens(whole, at), theirs.max_new_tokens(whole, at)
        if self.share(at) != theirs.share(at) or limits[0] != limits[1]:
            return True
        if not (self.weighs_rewards or theirs.weighs_rewards):
            return False
        both = [choice.reward_factors(step.reward_sums, at) for choice in (self, theirs)]
        rollouts = [rollout for group in step.batch.groups for rollout in group.rollouts]
        return any(len({weighed_sum(each.grade, each.terms, factors) for factors in both}) > 1 for each in rollouts)


class NoCurriculum(Curriculum):
    """No curriculum: every prompt and the whole length, from the first step."""


class _Opening(Curriculum):
    """Opens the pool by difficulty: its easiest share `start` first, all of it after `over_steps` optimizer steps."""

    by_difficulty: ClassVar[bool] = True

    def __init__(self, start: float, over_steps: int) -> None:
        if isinstance(start, bool) or not isinstance(start, int | float) or not 0 < start <= 1:
            raise ConfigurationError(f"curriculum.start: {start!r} must be above 0 and at most 1")
        self.start = start
        self.over_steps = whole_number("curriculum.over_steps", over_steps)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and that the share is of the pool's prompts, easiest first."""
        return {**super().semantics(), "share_of": "prompts of the pool, easiest first"}


class LinearCurriculum(_Opening):
    """Starts with the easiest prompts; the share that may be drawn grows linearly to all of them.

    Args:
        start: share of the pool at the first step.
        over_steps: optimizer steps until all are in.
    """

    def __init__(self, start: float = 0.2, over_steps: int = 100) -> None:
        super().__init__(start, over_steps)

    def share(self, completed_steps: int) -> float:
        """Return start + (1 - start) * progress: linear growth up to 1."""
        return self.start + (1 - self.start) * min(1.0, completed_steps / self.over_steps)


class ExponentialCurriculum(_Opening):
    """Starts with the easiest prompts; the share that may be drawn grows by the same factor every step.

    Args:
        start, over_steps: as `LinearCurriculum`.
    """

    def __init__(self, start: float = 0.2, over_steps: int = 100) -> None:
        super().__init__(start, over_steps)

    def share(self, completed_steps: int) -> float:
        """Return start ** (1 - progress): growth by one factor a step, up to 1."""
        return float(self.start ** (1 - min(1.0, completed_steps / self.over_steps)))


class StagedLength(Curriculum):
    """Short completions first: the limit grows in stages to the context's, and the points of interruptions with it.

    Args:
        shares: for each stage its share of `context.max_new_tokens`, rising; the last is 1.
        steps: length of a stage in optimizer steps.
    """

    def __init__(self, shares: Sequence[float] = (0.5, 0.75, 1.0), steps: int = 50) -> None:
        self.shares = [float(share) for share in shares]
        rising = all(low < high for low, high in zip(self.shares, self.shares[1:], strict=False))
        if not self.shares or not rising or not self.shares[0] > 0 or self.shares[-1] != 1:
            raise ConfigurationError(f"curriculum.shares: {list(shares)!r} must rise from above 0 to 1")
        self.steps = whole_number("curriculum.steps", steps)

    def max_new_tokens(self, limit: int, completed_steps: int) -> int:
        """Return the stage's share of `limit`, rounded up to whole tokens and at least 1."""
        stage = min(completed_steps // self.steps, len(self.shares) - 1)
        # Rounded before `ceil`: a decimal share such as 0.7 may give a product just above the whole number it means.
        return max(1, math.ceil(round(limit * self.shares[stage], 6)))

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and that evaluation has the whole length while interruption points shrink along."""
        return {**super().semantics(), "evaluation": "whole length", "interruption": "at the same share of the limit"}


# The first reward decides a pass, and is the hard one to earn: the others alone, both, and all as the task weighs them.
SIMPLE_TO_COMPLEX: tuple[Mapping[str, float], ...] = ({FIRST: 0.0}, {FIRST: 0.5}, {})


class StagedRewards(Curriculum):
    """Simple rewards first: the weights of a task's rewards change in stages, up to those that the task gives them.

    All rollouts of a group are rewarded by the stage in which the group was begun. What counts as a pass never changes.

    Args:
        stages: for each stage, factors on the task's own weights by the rewards' names; `first` is the reward that
            decides a pass, and a reward that is not named has the factor 1.
        begins: for each stage the share of the budget at which it begins, the first at 0.
        total_steps: the budget in optimizer steps. The curve depends on it, so it belongs to the run's identity.
    """

    weighs_rewards: ClassVar[bool] = True

    def __init__(
        self,
        stages: Sequence[Mapping[str, float]] = SIMPLE_TO_COMPLEX,
        begins: Sequence[float] = (0.0, 0.3, 0.6),
        total_steps: int = 320,
    ) -> None:
        self.stages = [_stage(stage) for stage in stages]
        self.begins = [not_negative("curriculum.begins", begin) for begin in begins]
        self.total_steps = whole_number("curriculum.total_steps", total_steps)
        rising = all(low < high for low, high in zip(self.begins, self.begins[1:], strict=False))
        if not self.begins or self.begins[0] != 0 or not rising or self.begins[-1] >= 1:
            raise ConfigurationError(f"curriculum.begins: {list(begins)!r} must rise from 0 to below 1")
        if len(self.begins) != len(self.stages):
            raise ConfigurationError(
                f"curriculum.begins: {list(begins)!r} must name the beginning of each of the {len(self.stages)} "
                "curriculum.stages"
            )

    def reward_factors(self, sums: Sequence[Sequence[str]], completed_steps: int) -> Mapping[str, float]:
        """Return the factors of the stage that this step falls into, by `staged_factors`."""
        return staged_factors(completed_steps / self.total_steps, self.begins, self.stages, sums)

    def check_rewards(self, sums: Sequence[Sequence[str]]) -> str | None:
        """Return one line if the task has one reward only, lacks one that is named, or is left with none in a stage."""
        if not any(len(names) > 1 for names in sums):
            return (
                "curriculum: StagedRewards weighs several rewards of a task by stage, and this task has one; give "
                "task.rewards two or more (docs/reference/rewards.md), or choose curriculum=none"
            )
        known = [name for names in sums for name in names]
        for number, (begin, stage) in enumerate(zip(self.begins, self.stages, strict=True)):
            unknown = sorted(stage.keys() - {FIRST, *known})
            if unknown:
                return (
                    f"curriculum.stages: stage {number} names {unknown[0]!r}, which is no reward of the task; its "
                    f"rewards: {', '.join(known)}; or {FIRST}, the one that decides a pass"
                )
            factors = staged_factors(begin, self.begins, self.stages, sums)
            empty = [names for names in sums if not any(factors.get(name, 1.0) for name in names)]
            if empty:
                return (
                    f"curriculum.stages: stage {number} leaves nothing of {', '.join(empty[0])}; give one of them a "
                    "factor above 0"
                )
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters with what the factors are on, and what no stage changes."""
        return {**super().semantics(), "factors_on": "the task's own weights", "pass": "as without a curriculum"}


def _stage(given: Mapping[str, float]) -> dict[str, float]:
    """Return a stage's factors as plain numbers, by the rewards' names.

    Raises:
        ConfigurationError: no mapping of names to numbers of 0 or more.
    """
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"curriculum.stages: {given!r} must give factors by the rewards' names, such as {{}}")
    return {str(name): float(not_negative(f"curriculum.stages.{name}", factor)) for name, factor in given.items()}
