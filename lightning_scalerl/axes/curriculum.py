"""Axis `curriculum`: prompt pool, completion limit and reward weights as functions of training progress."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import ConfigurationError, not_negative, whole_number
from lightning_scalerl.rollouts.prompt import Prompt


def difficulty(prompt: Prompt) -> float:
    """Return the first number in the prompt's difficulty label, such as 3 in "Level 3".

    Raises:
        ConfigurationError: the label has no number.
    """
    # A minus after a letter or digit is a hyphen: "Level-3" is 3, "level -1.5" is -1.5.
    number = re.search(r"(?:(?<!\w)-)?\d+(?:\.\d+)?", prompt.difficulty)
    if number is None:
        raise ConfigurationError(
            f"curriculum: prompt {prompt.prompt_id!r} has no number in its difficulty ({prompt.difficulty!r}); an "
            "order from easy to hard needs one on every prompt of the task, or choose curriculum=none"
        )
    return float(number[0])


# Key in a stage for the reward that decides a pass, whatever the task calls that reward.
PASS_REWARD_KEY = "first"


def staged_factors(
    progress: float, begins: Sequence[float], stages: Sequence[Mapping[str, float]], sums: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return the factors on a task's weighted rewards at a given progress of the run.

    Args:
        progress: completed steps / steps of the budget, 0 or more.
        begins: the progress at which each stage begins, rising from 0.
        stages: for each stage, factors by reward name; the key `first` means the first reward of every sum.
        sums: the reward names in each weighted sum of the task (`Task.reward_sums`).

    Returns:
        Factors by reward name. A reward without a factor keeps the task's weight.
    """
    stage = stages[bisect_right(begins, progress) - 1]
    factors = {names[0]: stage[PASS_REWARD_KEY] for names in sums} if PASS_REWARD_KEY in stage else {}
    return factors | {name: factor for name, factor in stage.items() if name != PASS_REWARD_KEY}


def weighted_sum(reward: float, terms: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Return the sum of factor * term. If all factors are 1, return `reward`, the plain sum of the terms, exactly."""
    # This branch also covers a single reward, which has no terms (`Grade.terms`).
    if all(factors.get(name, 1.0) == 1.0 for name in terms):
        return reward
    return math.fsum(factors.get(name, 1.0) * term for name, term in terms.items())


class Curriculum(DesignChoice):
    """Widens the prompt pool, the completion limit or the set of rewards step by step during training.

    Attributes:
        by_difficulty: whether every prompt needs a number in its difficulty label.
        weighs_rewards: whether the choice changes the weights that the task gives its rewards.
    """

    axis: ClassVar[str] = "curriculum"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoCurriculum"}
    by_difficulty: ClassVar[bool] = False
    weighs_rewards: ClassVar[bool] = False

    def share(self, completed_steps: int) -> float:
        """Return the fraction of the pool, easiest first, that prompts may be drawn from; 1 is the whole pool."""
        return 1.0

    def max_new_tokens(self, limit: int, completed_steps: int) -> int:
        """Return the token limit for completions that start now; `limit` is `context.max_new_tokens`."""
        return limit

    def reward_factors(self, sums: Sequence[Sequence[str]], completed_steps: int) -> Mapping[str, float]:
        """Return factors on the task's weighted rewards, by reward name, for groups that start now."""
        return {}

    def check_rewards(self, sums: Sequence[Sequence[str]]) -> str | None:
        """Return a one-line error if this choice does not fit these rewards (`Task.reward_sums`), else None."""
        return None

    def places(self, pool: Sequence[Prompt]) -> list[int]:
        """Return each prompt's rank from easy to hard (0 is the easiest); ties keep the order of the pool.

        Raises:
            ConfigurationError: a prompt has no number in its difficulty label.
        """
        if not self.by_difficulty:
            return [0] * len(pool)
        # The sort is stable, so prompts of equal difficulty keep their order.
        order = sorted(range(len(pool)), key=lambda number: difficulty(pool[number]))
        ranks = [0] * len(pool)
        for rank, number in enumerate(order):
            ranks[number] = rank
        return ranks

    def differs(self, other: Curriculum, step: ObservedStep) -> bool:
        """Return whether the two choices differ at this step in prompts, length limit, or a rollout's reward."""
        # Compare at a very long limit: at a short limit, rounding to whole tokens could hide a difference between the
        # shares.
        steps, long_limit = step.completed_steps, 10**6
        limits = self.max_new_tokens(long_limit, steps), other.max_new_tokens(long_limit, steps)
        if self.share(steps) != other.share(steps) or limits[0] != limits[1]:
            return True
        if not (self.weighs_rewards or other.weighs_rewards):
            return False
        both_factors = [choice.reward_factors(step.reward_sums, steps) for choice in (self, other)]
        rollouts = [rollout for group in step.batch.groups for rollout in group.rollouts]
        return any(
            len({weighted_sum(rollout.grade, rollout.terms, factors) for factors in both_factors}) > 1
            for rollout in rollouts
        )


class NoCurriculum(Curriculum):
    """No curriculum: all prompts and the whole length from the first step."""


class _PoolCurriculum(Curriculum):
    """Starts with the easiest prompts (the share `start` of the pool), and uses all after `over_steps` steps."""

    by_difficulty: ClassVar[bool] = True

    def __init__(self, start: float, over_steps: int) -> None:
        if isinstance(start, bool) or not isinstance(start, int | float) or not 0 < start <= 1:
            raise ConfigurationError(f"curriculum.start: {start!r} must be above 0 and at most 1")
        self.start = start
        self.over_steps = whole_number("curriculum.over_steps", over_steps)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus an entry which says what `start` is a share of."""
        return {**super().semantics(), "share_of": "prompts of the pool, easiest first"}


class LinearCurriculum(_PoolCurriculum):
    """Starts with the easiest prompts; the share of the pool in use grows linearly to 1.

    Args:
        start: share of the pool at the first step.
        over_steps: optimizer steps until the whole pool is in use.
    """

    def __init__(self, start: float = 0.2, over_steps: int = 100) -> None:
        super().__init__(start, over_steps)

    def share(self, completed_steps: int) -> float:
        """Return start + (1 - start) * progress: linear growth up to 1."""
        return self.start + (1 - self.start) * min(1.0, completed_steps / self.over_steps)


class ExponentialCurriculum(_PoolCurriculum):
    """Starts with the easiest prompts; the share of the pool in use grows by the same factor every step.

    Args:
        start, over_steps: as `LinearCurriculum`.
    """

    def __init__(self, start: float = 0.2, over_steps: int = 100) -> None:
        super().__init__(start, over_steps)

    def share(self, completed_steps: int) -> float:
        """Return start ** (1 - progress): growth by the same factor per step, up to 1."""
        return float(self.start ** (1 - min(1.0, completed_steps / self.over_steps)))


class StagedLength(Curriculum):
    """Short completions first: the token limit grows in stages up to `context.max_new_tokens`.

    The points at which axis `length_control` interrupts thinking are scaled by the same share. A length penalty is not
    scaled: it applies to completions close to the whole limit, and therefore often to none in early stages.

    Args:
        shares: the share of `context.max_new_tokens` in each stage, rising; the last is 1.
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
        # Round before `ceil`: in floating point, a share such as 0.7 can give a product just above a whole number.
        return max(1, math.ceil(round(limit * self.shares[stage], 6)))

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus entries for the length in evaluation and for the interruption points."""
        return {**super().semantics(), "evaluation": "whole length", "interruption": "at the same share of the limit"}


# The first reward decides a pass and is the hardest to earn. Stage 0 leaves it out, stage 1 halves it, and stage 2 uses
# the task's own weights.
SIMPLE_TO_COMPLEX: tuple[Mapping[str, float], ...] = ({PASS_REWARD_KEY: 0.0}, {PASS_REWARD_KEY: 0.5}, {})


class StagedRewards(Curriculum):
    """Simple rewards first: the weights of a task's rewards change in stages, ending with the task's own weights.

    All rollouts of a group are rewarded by the stage in which the group started. The definition of a pass never
    changes.

    Args:
        stages: for each stage, factors on the task's own weights by reward name. `first` is the reward that decides a
            pass. A reward that is not named has the factor 1.
        begins: the share of the budget at which each stage begins; the first is 0.
        total_steps: the budget in optimizer steps. The learning curve depends on it, so it is part of the run's
            identity.
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
        """Return the factors of the current stage (`staged_factors`)."""
        return staged_factors(completed_steps / self.total_steps, self.begins, self.stages, sums)

    def check_rewards(self, sums: Sequence[Sequence[str]]) -> str | None:
        """Return a one-line error if the stages do not fit the task's rewards, else None.

        They do not fit if the task has only one reward, if a stage names a reward that the task lacks, or if a stage
        sets all rewards of a sum to zero.
        """
        if not any(len(names) > 1 for names in sums):
            return (
                "curriculum: StagedRewards weighs several rewards of a task by stage, and this task has one; give "
                "task.rewards two or more (docs/reference/rewards.md), or choose curriculum=none"
            )
        known = [name for names in sums for name in names]
        for number, (begin, stage) in enumerate(zip(self.begins, self.stages, strict=True)):
            unknown = sorted(stage.keys() - {PASS_REWARD_KEY, *known})
            if unknown:
                return (
                    f"curriculum.stages: stage {number} names {unknown[0]!r}, which is no reward of the task; its "
                    f"rewards: {', '.join(known)}; or {PASS_REWARD_KEY}, the one that decides a pass"
                )
            # A reward without a factor has the factor 1, so a sum is empty only if all its rewards have the factor 0.
            factors = staged_factors(begin, self.begins, self.stages, sums)
            empty = [names for names in sums if not any(factors.get(name, 1.0) for name in names)]
            if empty:
                return (
                    f"curriculum.stages: stage {number} leaves nothing of {', '.join(empty[0])}; give one of them a "
                    "factor above 0"
                )
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus what the factors multiply and how a pass is defined."""
        return {**super().semantics(), "factors_on": "the task's own weights", "pass": "as without a curriculum"}


def _stage(factors: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(factors, Mapping):
        raise ConfigurationError(
            f"curriculum.stages: {factors!r} must give factors by the rewards' names, such as {{}}"
        )
    return {str(name): float(not_negative(f"curriculum.stages.{name}", factor)) for name, factor in factors.items()}
