"""Axis `credit`: whether the rollouts of a group are compared by their outcome, or turn by turn.

Turns matter only with an environment; a completion of one turn has the same advantages under both choices.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Group, Rollout


@dataclass(frozen=True)
class Comparison:
    """Values of one group that are compared with each other to get advantages.

    Attributes:
        values: rewards or returns, (N,), in float64.
        rows: for each value, the index of its rollout in the group.
        turn: number of the turn whose tokens get the advantages; None for all tokens.
    """

    values: Tensor
    rows: tuple[int, ...]
    turn: int | None = None


class Credit(DesignChoice):
    """Decides which values of a group's rollouts are compared, and which tokens get the result."""

    axis: ClassVar[str] = "credit"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "OutcomeCredit"}

    @abstractmethod
    def comparisons(self, group: Group) -> list[Comparison]:
        """Return the comparisons of a group. Axes `advantage` and `normalization` treat each of them like a group."""


class OutcomeCredit(Credit):
    """Every token of a rollout, in any turn, gets the advantage of the rollout's reward (GRPO).

    Source: arXiv 2402.03300, section 4.1.
    """

    def comparisons(self, group: Group) -> list[Comparison]:
        """Return a single comparison, in which the rollouts' rewards are compared."""
        return [Comparison(group.rewards, tuple(range(len(group.rollouts))))]


class TurnCredit(Credit):
    """Each turn has an advantage: its discounted return compared with the group's returns at the same turn.

    R_t = sum over u >= t of discount^(u - t) r_u, with r_u the reward of turn u. At turn t, the rollouts of the group
    that have such a turn are compared. The environment's rewards are scaled like the training reward (axis `reward`),
    unless a verifier grades the rollout. Any part of the training reward that does not come from the environment is
    added to the last turn: a verifier's reward, the constant of the reward scale, length control and user-defined axes.

    Args:
        discount: gamma, the discount factor per turn.

    Source: turn-level credit of multi-turn GRPO (arXiv 2505.11821) with the returns of REINFORCE.
    """

    def __init__(self, discount: float = 1.0) -> None:
        if isinstance(discount, bool) or not isinstance(discount, int | float) or not 0 <= discount <= 1:
            raise ConfigurationError(f"credit.discount: {discount!r} must be in [0, 1]")
        self.discount = discount

    def comparisons(self, group: Group) -> list[Comparison]:
        """Return one comparison per turn, in which the returns from that turn on are compared."""
        returns = [turn_returns(turn_rewards(rollout), self.discount) for rollout in group.rollouts]
        comparisons = []
        for turn in range(max(map(len, returns), default=0)):
            rows = tuple(row for row, values in enumerate(returns) if len(values) > turn)
            values = torch.tensor([returns[row][turn] for row in rows], dtype=torch.float64)
            comparisons.append(Comparison(values, rows, turn))
        return comparisons

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if another choice is defined for rollouts or tokens, not for turns."""
        if getattr(others["advantage"], "after_forward", False):
            name = type(others["advantage"]).__name__
            return f"credit: turn (TurnCredit) needs advantages of groups, and advantage={name} gives them per token"
        for choice in others.values():
            if type(choice).adjust_advantages is not DesignChoice.adjust_advantages:
                return (
                    f"{choice.axis}: {type(choice).__name__} adjusts the advantages of rollouts, and credit=turn "
                    "(TurnCredit) gives advantages to turns"
                )
        return None


def turn_rewards(rollout: Rollout) -> list[float]:
    """Return the rewards of all turns, which add up to the rollout's reward.

    A completion without a conversation has one turn.
    """
    conversation = rollout.conversation
    if conversation is None:
        return [rollout.reward]
    scale = conversation.scale if conversation.rewarded else 0.0
    rewards = [scale * reward for reward in conversation.rewards]
    # The remainder comes from a verifier, the constant of the reward scale, a length penalty or user-defined axes.
    # Without these it is zero, and the last reward stays exact.
    if (remainder := rollout.reward - math.fsum(rewards)) != 0:
        rewards[-1] += remainder
    return rewards


def turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return for each turn the discounted sum of its own and all later rewards."""
    # Equal sums must be equal exactly: normalization would magnify a difference by rounding.
    return [
        math.fsum(discount**later * reward for later, reward in enumerate(rewards[turn:]))
        for turn in range(len(rewards))
    ]


def turn_of_tokens(rollout: Rollout) -> list[int]:
    """Return the turn to which each token belongs, from 0; an observation belongs to the turn before it."""
    starts = rollout.conversation.starts if rollout.conversation is not None else (0,)
    bounds = [*starts[1:], len(rollout.tokens)]
    # The tokens between the end of a turn and the start of the next one are the observation; they are not in the loss.
    turns: list[int] = []
    for turn, bound in enumerate(bounds):
        turns += [turn] * (bound - len(turns))
    return turns
