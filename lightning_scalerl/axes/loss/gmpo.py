"""GMPO: the geometric mean of a sequence's clipped importance ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO, DesignChoice
from lightning_scalerl.axes.loss.base import Loss, clipped_tokens, masked_inputs, per_token_advantage_error
from lightning_scalerl.checks import positive


def gmpo(
    trainer_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return loss_t = -s_i A_t at every token t of sequence i, with s_i = exp(mean over the mask of l_t).

    l_t is the log-ratio log(pi_trainer / pi_anchor) after a one-sided clip: at most clip_high where A_t > 0, at least
    -clip_low where A_t < 0. `advantages` must be constant along a sequence. Then the average over a sequence's tokens
    is the paper's loss of that sequence.
    Shapes: all (R, T), one sequence per row; unreduced.

    Source: GMPO, arXiv 2507.20673. TRL (`trl.experimental.gmpo`) and verl (`geo_mean`) compute the same gradient. Both
    average over all sequences of a micro-batch, also over sequences without a token in the mask. For such a sequence
    TRL's loss adds the constant -A_i.
    """
    log_ratio = trainer_logprobs - anchor_logprobs
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    # Average logarithms: a product of the tokens' ratios would overflow FP32 over a long sequence.
    mean = torch.where(mask > 0, bounded, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) * advantages


class GMPO(Loss):
    """Geometric mean of a sequence's clipped token ratios, with wider clip bounds than an arithmetic mean needs.

    A clipped token loses its gradient but stays in the mean, so the other tokens of its sequence keep their gradients.

    Args:
        clip_low: ratios below exp(-clip_low) are clipped where the advantage is negative. The paper has 0.4.
        clip_high: ratios above exp(clip_high) are clipped where the advantage is positive. The paper has 0.4.
    """

    def __init__(self, clip_low: float = 0.4, clip_high: float = 0.4) -> None:
        self.clip_low = positive("loss.clip_low", clip_low)
        self.clip_high = positive("loss.clip_high", clip_high)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if advantages are per token: a sequence that is weighted as a whole has only one."""
        return per_token_advantage_error("gmpo takes the geometric mean of a sequence", others)

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `gmpo`; 0 outside the mask."""
        tables = masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask)
        return gmpo(*tables, mask, self.clip_low, self.clip_high)

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens whose gradient the clip removes (R, T, bool)."""
        # `clipped_tokens` compares its argument with 1 - low and 1 + high, so the log-ratio is shifted by 1.
        log_ratio = trainer_logprobs - anchor_logprobs
        return clipped_tokens(1 + log_ratio, advantages, self.clip_low, self.clip_high)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, the ratio and its bounds, and the aggregation that GMPO is defined with."""
        return {
            **super().semantics(),
            "ratio": "sequence, geometric mean of clipped token ratios",
            "ratio_interval": [math.exp(-self.clip_low), math.exp(self.clip_high)],
            "gradient_of_clipped": "dropped",
            "defined_with": "sample",
            "under_other_aggregations": "sequences length-weighted",
        }
