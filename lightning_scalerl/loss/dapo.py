"""DAPO: PPO's pessimistic clipped surrogate with an asymmetric interval."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.choice import ConfigurationError, positive
from lightning_scalerl.loss.base import Loss, importance_ratio


def dapo(
    trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t).

    Shapes: all (R, T); unreduced. Source: DAPO, arXiv 2503.14476, eq. 8 (its token average is another axis).
    """
    ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


class DAPO(Loss):
    """Asymmetric clip; the compared recipes of ScaleRL used clip_low 0.2 and clip_high 0.26."""

    def __init__(self, clip_low: float, clip_high: float) -> None:
        self.clip_low = positive("loss.clip_low", clip_low)
        self.clip_high = positive("loss.clip_high", clip_high)
        if clip_low > 1:
            raise ConfigurationError(f"loss.clip_low: {clip_low!r} must be at most 1, the ratio is never negative")

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """See `dapo`."""
        return dapo(trainer_logprobs, anchor_logprobs, advantages, self.clip_low, self.clip_high)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Where the clip takes the gradient away: above for positive, below for negative advantages."""
        above = (ratio > 1 + self.clip_high) & (advantages > 0)
        below = (ratio < 1 - self.clip_low) & (advantages < 0)
        return above | below

    def semantics(self) -> dict[str, Any]:
        """With the effective interval of the ratio."""
        return {
            **super().semantics(),
            "ratio_interval": [1 - self.clip_low, 1 + self.clip_high],
            "gradient_of_clipped": "dropped",
        }
