"""Axis `loss`: the policy surrogate, per token and unreduced. Averaging over tokens is axis `aggregation`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO, DesignChoice
from lightning_scalerl.checks import ConfigurationError, positive
from lightning_scalerl.rollouts.rollout import zero_outside


def importance_ratio(trainer_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """Return the ratio pi_trainer / pi_anchor of each token, with gradient. Shapes: all (R, T)."""
    # Clamp before exp: an infinite ratio would make the gradient NaN (`MAX_LOG_RATIO`).
    return torch.exp((trainer_logprobs - anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


Tables = tuple[Tensor, Tensor, Tensor]


def masked_inputs(trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tables:
    """Return log-probabilities, anchor and advantages, each with 0 outside the mask. Shapes: all (R, T)."""
    return zero_outside(mask, trainer_logprobs), zero_outside(mask, anchor_logprobs), zero_outside(mask, advantages)


def clipped_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return PPO's loss: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A). Shapes: broadcast to (R, T)."""
    # The minimum makes the clip one-sided: the clip has an effect only where it lowers the objective.
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def clipped_tokens(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return where `clipped_loss` has no gradient: ratio above the clip and A > 0, or below it and A < 0."""
    above = (ratio > 1 + clip_high) & (advantages > 0)
    below = (ratio < 1 - clip_low) & (advantages < 0)
    return above | below


def clip_bounds(
    clip_low: float, clip_high: float, names: tuple[str, str] = ("clip_low", "clip_high")
) -> tuple[float, float]:
    """Return both bounds if they are valid for `clipped_loss`; `names` are their parameter names, for errors.

    Raises:
        ConfigurationError: a bound is not positive, or `clip_low` exceeds 1.
    """
    low, high = names
    positive(f"loss.{low}", clip_low)
    positive(f"loss.{high}", clip_high)
    if clip_low > 1:
        raise ConfigurationError(f"loss.{low}: {clip_low!r} must be at most 1, the ratio is never negative")
    return clip_low, clip_high


def per_token_advantage_error(description: str, others: Mapping[str, DesignChoice]) -> str | None:
    """Return a one-line error if advantages are per token, for a loss that weights a sequence as a whole.

    Args:
        description: the loss's name and what it does, for the error.
        others: the run's choices, by axis.
    """
    if (problem := per_token_kl_error(description, others)) is not None:
        return problem
    if not getattr(others["advantage"], "after_forward", False):
        return None
    return (
        f"loss: {description}, and advantage=gae (GAE) gives advantages per token; no definition combines them; choose "
        "loss=ppo, or advantage=group"
    )


def per_token_kl_error(description: str, others: Mapping[str, DesignChoice]) -> str | None:
    """Return a one-line error if axis `kl` gives advantages per token, which the loss cannot use.

    Args:
        description: the loss's name and what it does, for the error.
        others: the run's choices, by axis.
    """
    kl = others["kl"]
    if getattr(kl, "where", "") != "loss" or getattr(kl, "estimate", "") != "k1":
        return None
    return (
        f"kl.estimate: k1 gives each token an advantage of its own, and loss={description}; choose kl.estimate=k2, "
        "which has the same gradient without a ratio"
    )


class Loss(DesignChoice):
    """A surrogate of the policy's objective, as one loss per token. Aggregation is another axis.

    At a ratio of 1 its gradient is REINFORCE's: -A_t times the gradient of the log-probability. `semantics` may add
    `ratio_interval`, the bounds that clip the ratio, and `gradient_of_clipped`, which is "kept" or "dropped".
    """

    axis: ClassVar[str] = "loss"

    def select(self, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor, key: Sequence[int]) -> Tensor | None:
        """Return the tokens (R, T, bool) that the surrogate treats differently; None if it treats all alike.

        It is called once per step on the whole batch, before the first update, so the selection does not depend on
        micro-batches or the number of ranks. The rows of a micro-batch are passed to `per_token` and `clipped` as the
        argument `selected`, if `select` returns a table. It must be a pure function, because mechanism counters call it
        again.

        Args:
            anchor_logprobs: (R, T), the denominator of the ratio (axis `correction`).
            advantages: (R, T), the advantages that are trained on.
            mask: (R, T), the tokens in the loss. Outside it, the values of the other two tables are undefined.
            key: seed of random choices; it differs in each step.
        """
        return None

    @abstractmethod
    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of each token, unreduced; values outside the mask are ignored later. Shapes: all (R, T).

        Losses whose ratio spans a sequence need `mask`. In training, all inputs are 0 outside the mask, but this
        project's losses do not rely on it.
        """

    @abstractmethod
    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens that the surrogate clips (R, T, bool), for the metric `train/clip_fraction`."""
