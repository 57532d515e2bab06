"""Axis `aggregation`: how per-token losses become one number.

Each choice is a weight a token: loss = sum(per_token_loss * weight). The weights need only counts over the
global batch, which arrive as an argument, so any split into ranks, micro-batches, padding or packing sums to
the same loss and gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.rollout import Denominators, TrainBatch


def prompt_weights(mask: Tensor, group_tokens: Tensor, prompts: float) -> Tensor:
    """Every prompt counts the same; inside a prompt all tokens of its rollouts are pooled.

    1 / (prompts * tokens of the group). Shapes: mask (R, T), group_tokens (R,). Source: arXiv 2503.14476 (DAPO)
    per prompt; arXiv 2510.13786, section 5.1.
    """
    return mask / (prompts * group_tokens.clamp(min=1)).unsqueeze(1)


def sample_weights(mask: Tensor, sample_tokens: Tensor, samples: float) -> Tensor:
    """Every rollout counts the same: 1 / (samples * its tokens), GRPO's. Shapes: mask (R, T), sample_tokens (R,)."""
    return mask / (samples * sample_tokens.clamp(min=1)).unsqueeze(1)


def token_weights(mask: Tensor, tokens: float) -> Tensor:
    """Every token of the batch counts the same: 1 / tokens. Shape: mask (R, T)."""
    return mask / max(tokens, 1.0)


class Aggregation(DesignChoice):
    """Weights tokens by counts over the global batch."""

    axis: ClassVar[str] = "aggregation"

    @abstractmethod
    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Weight (R, T) of each token's loss; zero where the loss mask is."""

    def reduce(self, per_token_loss: Tensor, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """The (micro-)batch's share of the global loss; a scalar. Shares add up to the loss."""
        return (per_token_loss * self.weights(batch, denominators)).sum()


class PromptAggregation(Aggregation):
    """Prompt average (ScaleRL, DAPO per prompt)."""

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """1 / (prompts * tokens of the group)."""
        return prompt_weights(batch.loss_mask, batch.group_tokens, denominators.prompts)


class SampleAggregation(Aggregation):
    """Sample average (GRPO)."""

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """1 / (samples * tokens of the rollout)."""
        return sample_weights(batch.loss_mask, batch.sample_tokens, denominators.samples)


class TokenAggregation(Aggregation):
    """Token average over the whole batch."""

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """1 / tokens of the batch."""
        return token_weights(batch.loss_mask, denominators.tokens)
