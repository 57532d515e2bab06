"""SAPO: a soft gate on the importance ratio in place of a clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.loss.base import Loss, importance_ratio, masked_inputs
from lightning_scalerl.checks import positive


def sapo(
    trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float
) -> Tensor:
    """Return loss_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with tau_pos where A_t > 0 and tau_neg elsewhere.

    The gradient of a token is that of -r_t A_t times 4 p (1 - p), with p = sigmoid(tau (r_t - 1)). This factor is 1 at
    a ratio of 1, falls with the ratio's distance from 1, and is never exactly 0. Shapes: all (R, T); unreduced.
    Source: SAPO, arXiv 2511.20347; TRL (`loss_type="sapo"`), verl and SkyRL compute the same loss per token.
    """
    ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


class SAPO(Loss):
    """Soft adaptive gate with one temperature per sign of the advantage; a larger temperature attenuates sooner.

    SAPO is defined with the aggregation `sample`, which TRL and verl use regardless of their configuration. Other
    aggregations are allowed, as in SkyRL, and `semantics` records the one that SAPO is defined with.
    """

    def __init__(self, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        self.tau_pos = positive("loss.tau_pos", tau_pos)
        self.tau_neg = positive("loss.tau_neg", tau_neg)

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `sapo`; 0 outside the mask."""
        return sapo(*masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask), self.tau_pos, self.tau_neg)

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return False for every token (R, T): the gate attenuates and never clips."""
        return torch.zeros_like(mask, dtype=torch.bool)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus how the ratio enters and the aggregation that SAPO is defined with."""
        return {**super().semantics(), "ratio": "token, through a sigmoid", "defined_with": "sample"}
