"""Axis `aggregation`: how per-token losses become one number.

Each choice is a weight a token: loss = sum(per_token_loss * weight). The weights need only counts over the
global batch, which arrive as an argument, so any split into ranks, micro-batches, padding or packing sums to
the same loss and gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.rollout import Denominators, TrainBatch, inside


def prompt_weights(mask: Tensor, group_tokens: Tensor, prompts: float) -> Tensor:
    """Return weights (R, T) under which prompts count the same; inside a prompt all its rollouts' tokens are pooled.

    1 / (prompts * tokens of the group). Shapes: mask (R, T), group_tokens (R,). Source: arXiv 2503.14476 (DAPO)
    per prompt; arXiv 2510.13786, section 5.1.
    """
    # A group whose credited tokens are all forced has none to count: 0 / 1 then, where 0 / 0 would be NaN.
    return mask / (prompts * group_tokens.clamp(min=1)).unsqueeze(1)


def sample_weights(mask: Tensor, sample_tokens: Tensor, samples: float) -> Tensor:
    """Return weights 1 / (samples * tokens of the rollout), GRPO's: rollouts count the same.

    Shapes: mask (R, T), sample_tokens (R,).
    """
    return mask / (samples * sample_tokens.clamp(min=1)).unsqueeze(1)


def token_weights(mask: Tensor, tokens: float) -> Tensor:
    """Return weights 1 / tokens, under which all tokens of the batch count the same. Shape: mask (R, T)."""
    # A batch without credited tokens has a loss of 0, not NaN.
    return mask / max(tokens, 1.0)


def constant_weights(mask: Tensor, sampled: float, max_tokens: float) -> Tensor:
    """Return the constant weight 1 / (rollouts of the step * completion limit), so that length biases nothing.

    All rollouts of the step count, with credit or without: else the divisor would vary with the filter.
    Shape: mask (R, T). Source: Dr.GRPO, arXiv 2503.20783, listing 1.
    """
    return mask / max(sampled * max_tokens, 1.0)


class Aggregation(DesignChoice):
    """Turns per-token losses into one number, by a weight a token that needs only counts over the global batch.

    Attributes:
        divisor: divisor of a token's loss, in words; its counts are recorded (`train/credited_*`).
    """

    axis: ClassVar[str] = "aggregation"
    divisor: ClassVar[str] = ""

    @abstractmethod
    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return the weight (R, T) of each token's loss; zero where the loss mask is."""

    def semantics(self) -> dict[str, Any]:
        """Return the parameters and, where one is set, the divisor in words."""
        return {**super().semantics(), **({"divisor": self.divisor} if self.divisor else {})}

    def reduce(self, per_token_loss: Tensor, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return the (micro-)batch's share of the global loss, a scalar; the shares add up to the loss."""
        # Cleared before the product: 0 * NaN is NaN, so a weight of 0 alone would let a masked token's NaN through.
        return (inside(batch.loss_mask, per_token_loss) * self.weights(batch, denominators)).sum()


class PromptAggregation(Aggregation):
    """Average over prompts; within a prompt all tokens are pooled (ScaleRL, DAPO per prompt)."""

    divisor: ClassVar[str] = "credited prompts * credited tokens of the group"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return 1 / (prompts * tokens of the group) inside the mask, (R, T)."""
        return prompt_weights(batch.loss_mask, batch.group_tokens, denominators.prompts)


class SampleAggregation(Aggregation):
    """Average over rollouts of each rollout's token average (GRPO)."""

    divisor: ClassVar[str] = "credited rollouts * credited tokens of the rollout"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return 1 / (samples * tokens of the rollout) inside the mask, (R, T)."""
        return sample_weights(batch.loss_mask, batch.sample_tokens, denominators.samples)


class TokenAggregation(Aggregation):
    """Token average over the whole batch."""

    divisor: ClassVar[str] = "credited tokens of the batch"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return 1 / tokens of the global batch inside the mask, (R, T)."""
        return token_weights(batch.loss_mask, denominators.tokens)


class SumAggregation(Aggregation):
    """Sum over all tokens, divided by nothing: the step grows with the batch."""

    divisor: ClassVar[str] = "1"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return the loss mask (R, T) itself: every credited token weighs 1."""
        return batch.loss_mask


class ConstantAggregation(Aggregation):
    """Sum over all tokens, divided by their largest possible number (Dr.GRPO)."""

    divisor: ClassVar[str] = "rollouts sampled for the step * context.max_new_tokens"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return 1 / (rollouts of the step * completion limit) inside the mask, (R, T)."""
        return constant_weights(batch.loss_mask, denominators.sampled, denominators.max_tokens)


BY_NAME: Mapping[str, type[Aggregation]] = {
    "prompt": PromptAggregation,
    "sample": SampleAggregation,
    "token": TokenAggregation,
    "sum": SumAggregation,
    "constant": ConstantAggregation,
}


def named_aggregation(field: str, name: str | None) -> Aggregation | None:
    """Return the aggregation of one term of the loss (KL, entropy, value); None if it has none of its own.

    Args:
        field: configuration key, for the error message.
        name: key of `BY_NAME`, or None to use the axis `aggregation`.

    Raises:
        ConfigurationError: an unknown name.
    """
    if name is None:
        return None
    if name not in BY_NAME:
        raise ConfigurationError(
            f"{field}: {name!r} is no aggregation; valid: {', '.join(BY_NAME)}, or null for the axis aggregation's"
        )
    return BY_NAME[name]()
