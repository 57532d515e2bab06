"""KL-Cov: an importance-weighted surrogate with a KL penalty on the tokens of the highest covariance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.loss.base import importance_ratio, masked_inputs
from lightning_scalerl.axes.loss.covariance import CovarianceLoss
from lightning_scalerl.checks import not_negative


class KLCov(CovarianceLoss):
    """loss_t = -r_t A_t, plus coefficient * |log r_t| for the tokens with the highest covariance.

    Source: arXiv 2505.22617, eq. 10, 13 and 14. The paper penalizes KL(pi_anchor || pi_trainer); its code, verl
    (`kl_cov`) and SkyRL estimate it by |log r_t|, which is used here. The derivative of |log r_t| with respect to log
    r_t is the sign of log r_t, and 0 at a ratio of exactly 1. With `correction=proximal` the ratio is exactly 1 in the
    first pass over a batch, so the penalty acts from the second update on. With `correction=behaviour`, in the first
    pass on fresh rollouts, log r_t is a rounding error, so the penalty adds noise. The coefficient is 1 in the paper
    and 0.1 in verl's configuration. The share is 2e-4 for the paper's 32B model and 2e-3 for its 7B model.

    The docstring of `CovarianceLoss` says when tokens are selected.

    Args:
        share: share of the step's tokens that are penalized, at least one. Ties are broken by the batch's order.
        coefficient: weight of the penalty.
    """

    configured_as: ClassVar[str] = "kl_cov"

    def __init__(self, share: float = 2e-4, coefficient: float = 1.0) -> None:
        super().__init__(share)
        self.coefficient = not_negative("loss.coefficient", coefficient)

    def choose(self, covariance: Tensor, count: int, key: Sequence[int]) -> Tensor:
        """Return the `count` tokens of the highest covariance."""
        # The sort is stable, unlike `topk`: confident models have many tokens of exactly equal covariance.
        return torch.sort(covariance, descending=True, stable=True).indices[:count]

    def per_token(
        self,
        trainer_logprobs: Tensor,
        anchor_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return the surrogate (R, T), with the penalty for the tokens `selected`; 0 outside the mask."""
        trainer_logprobs, anchor_logprobs, advantages = masked_inputs(
            trainer_logprobs, anchor_logprobs, advantages, mask
        )
        loss = -importance_ratio(trainer_logprobs, anchor_logprobs) * advantages
        if selected is None:
            return loss
        return loss + torch.where(selected, self.coefficient * (trainer_logprobs - anchor_logprobs).abs(), 0.0)

    def clipped(
        self,
        trainer_logprobs: Tensor,
        anchor_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return False for every token (R, T): penalized tokens keep their gradient."""
        return torch.zeros_like(mask, dtype=torch.bool)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, when tokens are selected, and the form of the penalty."""
        return {**super().semantics(), "penalty": "|log ratio|"}
