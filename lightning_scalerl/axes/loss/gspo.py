"""GSPO: PPO's pessimistic clipped surrogate with one importance ratio per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO, DesignChoice
from lightning_scalerl.axes.loss.base import (
    Loss,
    clip_bounds,
    clipped_loss,
    clipped_tokens,
    masked_inputs,
    per_token_advantage_error,
)


def sequence_ratio(trainer_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return s_i = exp(mean over the mask of log(pi_trainer / pi_anchor)), (R, 1), with gradient.

    It is 1 for a sequence without tokens inside the mask. Values outside the mask are not read. Shapes: all (R, T).
    Source: GSPO, arXiv 2507.18071.
    """
    log_ratio = torch.where(mask > 0, trainer_logprobs - anchor_logprobs, 0.0)
    # Geometric mean of the tokens' ratios in log space: their product would overflow FP32 over a long sequence.
    mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.exp(mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def gspo(
    trainer_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
) -> Tensor:
    """Return loss_t = -min(s_i A_t, clip(s_i, 1 - clip_low, 1 + clip_high) A_t) at every token t of sequence i.

    `advantages` must be constant along a sequence: A_t = A_i for all t. Then a sequence is clipped as a whole, and the
    average over its tokens is the paper's loss of that sequence. Advantages that vary along a sequence would be clipped
    token by token with a shared ratio, which no paper defines.
    Shapes: all (R, T), one sequence per row; unreduced. Source: GSPO, arXiv 2507.18071.
    """
    # The ratio (R, 1) broadcasts over the tokens of its row.
    return clipped_loss(sequence_ratio(trainer_logprobs, anchor_logprobs, mask), advantages, clip_low, clip_high)


class GSPO(Loss):
    """PPO's surrogate on the sequence's ratio, with far tighter clip bounds than a token's ratio needs.

    In the ScaleRL paper clip_low 3e-3 with clip_high 5e-3 was slightly better than 4e-3, and bounds of 1e-4 did not
    work. GSPO is defined with the aggregation `sample`. Other aggregations weight a sequence by its length, which is
    another objective; they are allowed, and `semantics` records the aggregation that GSPO is defined with.
    """

    def __init__(self, clip_low: float = 3e-3, clip_high: float = 5e-3) -> None:
        self.clip_low, self.clip_high = clip_bounds(clip_low, clip_high)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if advantages are per token: a sequence that is clipped as a whole has only one."""
        return per_token_advantage_error("gspo clips the ratio of a sequence", others)

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T) of `gspo`; 0 outside the mask."""
        tables = masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask)
        return gspo(*tables, mask, self.clip_low, self.clip_high)

    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return all tokens of the sequences whose gradient the clip removes (R, T, bool)."""
        ratio = sequence_ratio(trainer_logprobs, anchor_logprobs, mask)
        return clipped_tokens(ratio, advantages, self.clip_low, self.clip_high)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, the ratio and its bounds, and the aggregation that GSPO is defined with."""
        return {
            **super().semantics(),
            "ratio": "sequence, length-normalised",
            "ratio_interval": [1 - self.clip_low, 1 + self.clip_high],
            "gradient_of_clipped": "dropped",
            "defined_with": "sample",
            "under_other_aggregations": "sequences length-weighted",
        }
