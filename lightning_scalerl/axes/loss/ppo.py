"""PPO: the pessimistic clipped surrogate with a symmetric interval, which GRPO uses as well."""

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


def ppo(trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return loss_t = -min(r_t A_t, clip(r_t, 1 - clip, 1 + clip) A_t).

    Shapes: all (R, T); unreduced. Source: PPO, arXiv 1707.06347, eq. 7; GRPO, arXiv 2402.03300, eq. 3, without its KL.
    """
    return clipped_loss(importance_ratio(trainer_logprobs, anchor_logprobs), advantages, clip, clip)


class PPO(Loss):
    """PPO's surrogate with a symmetric clip, 0.2 in PPO and GRPO."""

    def __init__(self, clip: float = 0.2) -> None:
        self.clip, _ = clip_bounds(clip, clip, names=("clip", "clip"))

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `ppo`; 0 outside the mask."""
        return ppo(*masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask), self.clip)

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return where the clip removes the gradient (R, T, bool)."""
        ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
        return clipped_tokens(ratio, advantages, self.clip, self.clip)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus the bounds of the ratio and whether clipped tokens keep their gradient."""
        return {
            **super().semantics(),
            "ratio_interval": [1 - self.clip, 1 + self.clip],
            "gradient_of_clipped": "dropped",
        }
