"""CISPO: REINFORCE weighted by a truncated, detached importance ratio."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_scalerl.axes.loss.base import Loss, importance_ratio, masked_inputs
from lightning_scalerl.checks import positive


def cispo(trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, max_ratio: float) -> Tensor:
    """Return loss_t = -sg(min(r_t, max_ratio)) * A_t * log pi(y_t), where sg stops the gradient.

    Clipped tokens keep their gradient; only its weight is bounded. `max_ratio` is an absolute cap on the ratio, not
    1 + epsilon, and there is no lower bound. Shapes: all (R, T); unreduced.
    Source: MiniMax-M1, arXiv 2506.13585, eq. 4-5 (upper bound only), as used by arXiv 2510.13786.
    """
    # Detach the ratio: it only weights the gradient of the log-probability.
    ratio = importance_ratio(trainer_logprobs, anchor_logprobs).detach()
    return -ratio.clamp(max=max_ratio) * advantages * trainer_logprobs


class CISPO(Loss):
    """CISPO with an absolute cap `max_ratio` on the importance ratio (the paper tried 4, 5 and 8)."""

    def __init__(self, max_ratio: float = 5.0) -> None:
        self.max_ratio = positive("loss.max_ratio", max_ratio)

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `cispo`; 0 outside the mask."""
        return cispo(*masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask), self.max_ratio)

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return where the ratio exceeds the cap (R, T, bool); these tokens keep their gradient."""
        return importance_ratio(trainer_logprobs, anchor_logprobs) > self.max_ratio

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus the bounds of the ratio and whether clipped tokens keep their gradient."""
        return {**super().semantics(), "ratio_interval": [0.0, self.max_ratio], "gradient_of_clipped": "kept"}
