"""Axis `advantage`: how the advantages of rollouts or tokens are computed from rewards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import ConfigurationError


def group_advantages(rewards: Tensor) -> Tensor:
    """Return the reward minus the group's mean; exactly 0 for equal rewards. Shapes: (G,) -> (G,)."""
    # Handle equal rewards separately: the mean of three rewards of 0.1 is not exactly 0.1, and dividing the rounding
    # error by a tiny deviation would turn it into a large advantage.
    return torch.zeros_like(rewards) if bool((rewards == rewards[:1]).all()) else rewards - rewards.mean()


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Return per-token advantages and returns: A_t = d_t + discount trace A_t', d_t = r_t + discount V_t' - V_t.

    t' is the next token inside the mask; after the last one, value and advantage are 0. Tokens outside the mask
    (forced, padding) are not actions: they are skipped, and both results are 0 there. Returns are A + V.
    Shapes: all (R, T). Source: GAE, arXiv 1506.02438, eq. 16.
    """
    is_action = mask > 0
    advantages = torch.zeros_like(values)
    # Go backwards, because A_t needs A_t'. Start from zero: the episode ends at the last token, so nothing is
    # bootstrapped.
    next_value, next_advantage = torch.zeros_like(values[:, 0:1]), torch.zeros_like(values[:, 0:1])
    for token in reversed(range(values.shape[1])):
        at, acts = slice(token, token + 1), is_action[:, token : token + 1]
        td_error = rewards[:, at] + discount * next_value - values[:, at]
        # A row whose token is not an action keeps next_value and next_advantage unchanged for the token before it.
        next_advantage = torch.where(acts, td_error + discount * trace * next_advantage, next_advantage)
        next_value = torch.where(acts, values[:, at], next_value)
        advantages[:, at] = torch.where(acts, next_advantage, 0.0)
    return advantages, torch.where(is_action, advantages + values, 0.0)


def terminal_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return token rewards (R, T): each rollout's reward (R,) on its last token inside the mask, 0 elsewhere."""
    token_rewards = torch.zeros_like(mask)
    if not mask.numel():  # a rank without rows
        return token_rewards
    # -1 marks a rollout without any token inside the mask: no token can carry its reward.
    last_token = torch.where(mask > 0, torch.arange(mask.shape[1], device=mask.device), -1).amax(1)
    has_token = last_token >= 0
    token_rewards[has_token, last_token[has_token]] = rewards[has_token].to(mask.dtype)
    return token_rewards


class Advantage(DesignChoice):
    """Estimates advantages before normalization, per rollout from its group's rewards or per token from values.

    Attributes:
        after_forward: whether `estimate_tokens` is called after the critic's forward pass, instead of `estimate`.
    """

    axis: ClassVar[str] = "advantage"
    after_forward: ClassVar[bool] = False

    @abstractmethod
    def estimate(self, rewards: Tensor) -> Tensor:
        """Return the advantages (G,) of one group from its rewards (G,)."""

    def estimate_tokens(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return per-token advantages and returns (R, T) from token rewards (R, T) and the critic's values (R, T)."""
        raise NotImplementedError

    def check_group_size(self, completions: int) -> str | None:
        """Return a one-line error if the estimator cannot work with groups of this size, else None."""
        return None


class GroupAdvantage(Advantage):
    """Reward minus group mean: GRPO's baseline, without its division by the standard deviation.

    Source: arXiv 2510.13786, section 2 (A_i = r_i - mean).
    """

    def estimate(self, rewards: Tensor) -> Tensor:
        """Return advantages (G,) that sum to zero: reward minus the group's mean."""
        return group_advantages(rewards)

    def check_group_size(self, completions: int) -> str | None:
        """Return a one-line error for groups of one: with no other rollout as baseline, every advantage is zero."""
        if completions < 2:
            return (
                f"batch.completions: {completions} leaves nothing to compare a rollout with; "
                "advantage=group (GroupAdvantage) needs at least 2"
            )
        return None


class GAE(Advantage):
    """Generalized advantage estimation per token, with the values of a critic.

    The reward is on the last sampled token. A truncated completion also ends there, without bootstrapping, because the
    token limit is part of the task.

    Args:
        discount: gamma, the discount factor per token.
        trace: lambda. 1 uses the whole return minus the critic's value, 0 only the critic's one-step
            temporal-difference error.

    Source: arXiv 1506.02438. For language models both are usually 1.
    """

    after_forward: ClassVar[bool] = True

    def __init__(self, discount: float = 1.0, trace: float = 0.95) -> None:
        for field, value in (("discount", discount), ("trace", trace)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ConfigurationError(f"advantage.{field}: {value!r} must be in [0, 1]")
        self.discount = discount
        self.trace = trace

    def estimate(self, rewards: Tensor) -> Tensor:
        """Return zeros (G,): `estimate_tokens` gives the advantages, once the critic's values are known."""
        return torch.zeros_like(rewards)

    def estimate_tokens(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and returns (R, T), computed by `generalized_advantages`."""
        return generalized_advantages(rewards, values, mask, self.discount, self.trace)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if there is no critic, or if another choice is defined for group advantages only."""
        if not getattr(others["critic"], "has_values", False):
            return "advantage: gae (GAE) needs values; choose critic=value_network, or advantage=group"
        normalization = others["normalization"]
        if not getattr(normalization, "scales_tokens", False):
            return (
                f"normalization: {type(normalization).__name__} is defined for groups, and advantage=gae (GAE) gives "
                "advantages per token; choose normalization=batch, running or none"
            )
        # A user's own axis may override `adjust_advantages`, which is called with the advantages of groups.
        for choice in others.values():
            if type(choice).adjust_advantages is not DesignChoice.adjust_advantages:
                return (
                    f"{choice.axis}: {type(choice).__name__} adjusts the advantages of groups, and advantage=gae (GAE) "
                    "gives advantages per token"
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

    def differs(self, other: Advantage, step: ObservedStep) -> bool:
        """Return whether the loss weights of the batch's tokens would differ under `other`."""
        return step.loss_weights_differ(other)
