"""Axis `advantage`: how rewards become the credit of rollouts or tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choice import DesignChoice, ObservedStep


def group_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the group's mean; exactly 0 for equal rewards. Shapes: (G,) -> (G,)."""
    # Three rewards of 0.1 have a mean that rounding takes off 0.1; a normalization would make the rest large.
    return torch.zeros_like(rewards) if bool((rewards == rewards[:1]).all()) else rewards - rewards.mean()


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns a token: A_t = d_t + discount trace A_t', d_t = r_t + discount V_t' - V_t.

    t' is the next token inside the mask; beyond the last one value and advantage are 0. Tokens outside the mask
    (forced, padding) are no actions: they are skipped, and are 0 in both results. Returns are A + V.
    Shapes: all (R, T). Source: GAE, arXiv 1506.02438, eq. 16.
    """
    taken = mask > 0
    advantages = torch.zeros_like(values)
    # Backwards, since A_t needs A_t'. Zero beyond the last token: the episode ends there, nothing is bootstrapped.
    next_value, following = torch.zeros_like(values[:, 0:1]), torch.zeros_like(values[:, 0:1])
    for token in reversed(range(values.shape[1])):
        at, here = slice(token, token + 1), taken[:, token : token + 1]
        change = rewards[:, at] + discount * next_value - values[:, at]
        following = torch.where(here, change + discount * trace * following, following)
        next_value = torch.where(here, values[:, at], next_value)
        advantages[:, at] = torch.where(here, following, 0.0)
    return advantages, torch.where(taken, advantages + values, 0.0)


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return rewards (R, T): a rollout's reward (R,) on its last token inside the mask, 0 elsewhere."""
    spread = torch.zeros_like(mask)
    if not mask.numel():  # a rank without rows
        return spread
    # -1 for a rollout without a token inside the mask: there is none to carry its reward.
    place = torch.where(mask > 0, torch.arange(mask.shape[1], device=mask.device), -1).amax(1)
    there = place >= 0
    spread[there, place[there]] = rewards[there].to(mask.dtype)
    return spread


class Advantage(DesignChoice):
    """Estimates advantages before normalization: a rollout's from the rewards of its group, or a token's from values.

    Attributes:
        after_forward: whether `estimate_tokens` is called, after the critic's forward pass, in place of `estimate`.
    """

    axis: ClassVar[str] = "advantage"
    after_forward: ClassVar[bool] = False

    @abstractmethod
    def estimate(self, rewards: Tensor) -> Tensor:
        """Return the advantages (G,) of one group from its rewards (G,)."""

    def estimate_tokens(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and returns (R, T) of tokens, from their rewards and the critic's values (R, T)."""
        raise NotImplementedError

    def check_group_size(self, completions: int) -> str | None:
        """Return one line if the estimator cannot work with groups of this size, else None."""
        return None


class GroupAdvantage(Advantage):
    """Reward minus group mean: GRPO's baseline, without its division by the standard deviation.

    Source: arXiv 2510.13786, section 2 (A_i = r_i - mean).
    """

    def estimate(self, rewards: Tensor) -> Tensor:
        """Return advantages (G,) that sum to zero: reward minus the group's mean."""
        return group_advantages(rewards)

    def check_group_size(self, completions: int) -> str | None:
        """Return one line for groups of one: without another rollout as baseline every advantage would be zero."""
        if completions < 2:
            return (
                f"batch.completions: {completions} leaves nothing to compare a rollout with; "
                "advantage=group (GroupAdvantage) needs at least 2"
            )
        return None


class GAE(Advantage):
    """Generalized advantage estimation on the values of a critic, token by token.

    The reward stands on the last sampled token; a truncated completion that is kept ends there as any other, without
    bootstrapping: the limit is part of the task.

    Args:
        discount: gamma, the discount factor per token.
        trace: lambda; 1 takes the whole return less the critic's value, 0 the critic's one-step error alone.

    Source: arXiv 1506.02438; 1 for both is usual for language models.
    """

    after_forward: ClassVar[bool] = True

    def __init__(self, discount: float = 1.0, trace: float = 0.95) -> None:
        for field, value in (("discount", discount), ("trace", trace)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigurationError(f"advantage.{field}: {value!r} must be in [0, 1]")
        self.discount = discount
        self.trace = trace

    def estimate(self, rewards: Tensor) -> Tensor:
        """Return zeros (G,): credit comes from `estimate_tokens`, once the critic's values are known."""
        return torch.zeros_like(rewards)

    def estimate_tokens(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and returns (R, T), computed by `generalized_advantages`."""
        return generalized_advantages(rewards, values, mask, self.discount, self.trace)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return one line if there is no critic, or if another choice is defined for the advantages of groups only."""
        if not getattr(others["critic"], "has_values", False):
            return "advantage: gae (GAE) needs values; choose critic=value_network, or advantage=group"
        normalization = others["normalization"]
        if not getattr(normalization, "scales_tokens", False):
            return (
                f"normalization: {type(normalization).__name__} is defined for groups, and advantage=gae (GAE) gives "
                "advantages a token; choose normalization=batch, running or none"
            )
        for choice in others.values():
            if type(choice).adjust_advantages is not DesignChoice.adjust_advantages:
                return (
                    f"{choice.axis}: {type(choice).__name__} adjusts the advantages of groups, and advantage=gae (GAE) "
                    "gives advantages a token"
                )
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and how GAE treats rewards, truncated completions and forced tokens."""
        return {
            **super().semantics(),
            "reward": "on the last sampled token",
            "truncated": "ends there, no bootstrap",
            "forced_tokens": "skipped",
        }

    def differs(self, theirs: Advantage, step: ObservedStep) -> bool:
        """Return whether the loss weights of the batch's tokens would differ under `theirs`."""
        return step.loss_weights_differ(theirs)
