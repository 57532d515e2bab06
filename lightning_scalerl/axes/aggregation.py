"""Axis `aggregation`: how per-token losses become one number.

Each choice is one weight per token: loss = sum(per_token_loss * weight). The weights depend only on token and rollout
counts of the global batch, which are passed in. Any split into ranks and micro-batches, padded or packed, therefore
sums to the same loss and gradient.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.results import check_shape
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.rollout import Denominators, TrainBatch, zero_outside


def prompt_weights(mask: Tensor, group_tokens: Tensor, prompts: float) -> Tensor:
    """Return weights (R, T) of 1 / (prompts * tokens of the group): every prompt counts the same.

    Within a prompt the tokens of all its rollouts are pooled. Shapes: mask (R, T), group_tokens (R,).
    Source: DAPO's token average (arXiv 2503.14476) taken per prompt; arXiv 2510.13786, section 5.1.
    """
    # A group in which every token is forced has a count of 0. Without the clamp its weights would be 0 / 0 = NaN.
    return mask / (prompts * group_tokens.clamp(min=1)).unsqueeze(1)


def sample_weights(mask: Tensor, sample_tokens: Tensor, samples: float) -> Tensor:
    """Return GRPO's weights (R, T) of 1 / (samples * tokens of the rollout): every rollout counts the same.

    Shapes: mask (R, T), sample_tokens (R,).
    """
    return mask / (samples * sample_tokens.clamp(min=1)).unsqueeze(1)


def token_weights(mask: Tensor, tokens: float) -> Tensor:
    """Return weights (R, T) of 1 / tokens: every token of the batch counts the same. Shape: mask (R, T)."""
    # A batch without tokens in the loss has a loss of 0, not NaN.
    return mask / max(tokens, 1.0)


def constant_weights(mask: Tensor, scored_rollouts: float, max_tokens: float) -> Tensor:
    """Return the constant weight 1 / (rollouts of the step * completion limit), which has no length bias.

    All rollouts of the step count, in the loss or not; otherwise the divisor would depend on the filter.
    Shape: mask (R, T). Source: Dr.GRPO, arXiv 2503.20783, listing 1.
    """
    return mask / max(scored_rollouts * max_tokens, 1.0)


class Aggregation(DesignChoice):
    """Reduces per-token losses to one number, with one weight per token.

    Attributes:
        divisor: description of the divisor of a token's loss. The counts in it are recorded as `train/credited_*`.
    """

    axis: ClassVar[str] = "aggregation"
    divisor: ClassVar[str] = ""

    @abstractmethod
    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return the weight (R, T) of each token's loss; zero where the loss mask is zero."""

    def semantics(self) -> dict[str, Any]:
        """Return the parameters and, if it is set, the description of the divisor."""
        return {**super().semantics(), **({"divisor": self.divisor} if self.divisor else {})}

    def reduce(self, per_token_loss: Tensor, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return the (micro-)batch's share of the global loss, a scalar; the shares add up to the loss."""
        # Clear masked losses before the product: 0 * NaN is NaN, so a weight of 0 would not stop a masked token's NaN.
        weights = check_shape(self, "weights", self.weights(batch, denominators), batch.loss_mask.shape)
        return (zero_outside(batch.loss_mask, per_token_loss) * weights).sum()


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
    """Sum over all tokens without a divisor: the gradient grows with the batch."""

    divisor: ClassVar[str] = "1"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return the loss mask (R, T) itself: every token in the loss weighs 1."""
        return batch.loss_mask


class ConstantAggregation(Aggregation):
    """Sum over all tokens, divided by the largest possible number of tokens (Dr.GRPO)."""

    divisor: ClassVar[str] = "rollouts sampled for the step * context.max_new_tokens"

    def weights(self, batch: TrainBatch, denominators: Denominators) -> Tensor:
        """Return 1 / (rollouts of the step * completion limit) inside the mask, (R, T)."""
        return constant_weights(batch.loss_mask, denominators.scored_samples, denominators.max_tokens)


BY_NAME: Mapping[str, type[Aggregation]] = {
    "prompt": PromptAggregation,
    "sample": SampleAggregation,
    "token": TokenAggregation,
    "sum": SumAggregation,
    "constant": ConstantAggregation,
}


def named_aggregation(field: str, name: str | None) -> Aggregation | None:
    """Build the aggregation of one term of the loss (KL, entropy, value); return None if `name` is None.

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
