"""Axis `critic`: the value network for per-token advantages, if any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import positive


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), per token.

    Shapes: all (R, T); unreduced. Source: PPO's reference implementation (arXiv 1707.06347), without the factor 1/2 of
    some implementations: the coefficient can include it.
    """
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    # The larger error is used: moving past the clip gains nothing, and moving back towards the return is never blocked.
    return torch.maximum((values - returns).square(), (bounded - returns).square())


class Critic(DesignChoice):
    """An optional value network that estimates the return at each token.

    Attributes:
        has_values: whether there is a value network.
    """

    axis: ClassVar[str] = "critic"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoCritic"}
    has_values: ClassVar[bool] = False

    def differs(self, other: Critic, step: ObservedStep) -> bool:
        """Return whether any token's advantage was computed from values, or would have been under `other`."""
        uses_values = self.has_values != other.has_values or step.batch.values is not None
        return uses_values and step.batch.denominators.tokens > 0


class NoCritic(Critic):
    """No value network: advantages come from rewards alone."""


class ValueNetwork(Critic):
    """A copy of the policy's body with a linear head, trained on the returns with a clipped squared error.

    The head starts at zero, so the first advantages are the returns.

    Args:
        coefficient: weight of the value loss in the total loss (c_1).
        clip: largest change from the value before the update that can lower the loss, in units of reward.
        lr: the critic's learning rate, to which the policy's schedule applies; None for the policy's rate.
        aggregation: name of the value loss's aggregation; None for the one of axis `aggregation`.

    Source: arXiv 1707.06347, section 5 (c_1).
    """

    has_values: ClassVar[bool] = True

    def __init__(
        self, coefficient: float = 0.5, clip: float = 0.2, lr: float | None = None, aggregation: str | None = None
    ) -> None:
        self.coefficient = positive("critic.coefficient", coefficient)
        self.clip = positive("critic.clip", clip)
        self.lr = None if lr is None else positive("critic.lr", lr)
        self.aggregation = aggregation

    def per_token(self, values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        """Return the critic's loss (R, T), unreduced, by `clipped_value_loss`."""
        return clipped_value_loss(values, old_values, returns, self.clip)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if the advantage estimator never uses values, else None."""
        if not getattr(others["advantage"], "after_forward", False):
            name = type(others["advantage"]).__name__
            return f"critic: value_network (ValueNetwork) is not asked by advantage {name}; choose advantage=gae"
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus the critic's architecture and the type of its weights."""
        return {**super().semantics(), "model": "copy of the policy's body, linear head from zero", "weights": "fp32"}
