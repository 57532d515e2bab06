"""DAPO: PPO's pessimistic clipped surrogate with an asymmetric interval."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_scalerl.axes.loss.base import (
    Loss,
    clip_bounds,
    clipped_loss,
    clipped_tokens,
    importance_ratio,
    masked_inputs,
)


def dapo(
    trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Return loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    Shapes: all (R, T); unreduced. Source: DAPO, arXiv 2503.14476, eq. 8 (its token average belongs to axis
    `aggregation`).
    """
    return clipped_loss(importance_ratio(trainer_logprobs, anchor_logprobs), advantages, clip_low, clip_high)


class DAPO(Loss):
    """PPO's surrogate with an asymmetric clip. Defaults as in the recipes that the ScaleRL paper compares."""

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.26) -> None:
        self.clip_low, self.clip_high = clip_bounds(clip_low, clip_high)

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `dapo`; 0 outside the mask."""
        return dapo(*masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask), self.clip_low, self.clip_high)

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return where the clip removes the gradient (R, T, bool)."""
        ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
        return clipped_tokens(ratio, advantages, self.clip_low, self.clip_high)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus the bounds of the ratio and whether clipped tokens keep their gradient."""
        return {
            **super().semantics(),
            "ratio_interval": [1 - self.clip_low, 1 + self.clip_high],
            "gradient_of_clipped": "dropped",
        }
