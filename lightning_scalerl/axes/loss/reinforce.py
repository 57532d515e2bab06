"""REINFORCE: the plain policy gradient, with no importance ratio."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.loss.base import Loss
from lightning_scalerl.rollouts.rollout import zero_outside


def reinforce(trainer_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return loss_t = -A_t * log pi(y_t). Shapes: all (R, T); unreduced. Source: Williams 1992, eq. 11."""
    return -advantages * trainer_logprobs


class Reinforce(Loss):
    """REINFORCE without a ratio: it ignores that older weights or another engine sampled the tokens."""

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `reinforce`; 0 outside the mask."""
        return reinforce(zero_outside(mask, trainer_logprobs), zero_outside(mask, advantages))

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return False for every token (R, T): there is no ratio to clip."""
        return torch.zeros_like(mask, dtype=torch.bool)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus entries which say that every token has the weight 1 instead of a ratio."""
        return {**super().semantics(), "ratio_interval": [1.0, 1.0], "ratio": "none: every token weighs 1"}
