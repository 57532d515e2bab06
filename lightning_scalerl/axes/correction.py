"""Axis `correction`: the log-probabilities in the denominator of the importance ratio (its anchor).

The ratio is exp(trainer_logprobs - anchor). With `behaviour` the anchor is what the generator recorded while sampling.
One ratio then covers both staleness and the mismatch between engine and trainer (ScaleRL). With `proximal` the trainer
recomputes the anchor before the update, and an importance weight corrects for the gap between anchor and generator.
`behaviour` has no such weight, because the mismatch would be counted twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO, DesignChoice
from lightning_scalerl.checks import ConfigurationError, not_negative, positive
from lightning_scalerl.rollouts.rollout import TrainBatch

LEVELS = ("token", "sequence")
MODES = ("truncate", "mask", "none")


class Correction(DesignChoice):
    """Selects the anchor of the importance ratio: the log-probabilities in its denominator."""

    axis: ClassVar[str] = "correction"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Behaviour"}

    # Whether the anchor needs a forward pass of the trainer before the update (`TrainBatch.anchor_logprobs`).
    recomputes: ClassVar[bool] = False

    @abstractmethod
    def anchor(self, batch: TrainBatch) -> Tensor:
        """Return the log-probabilities (R, T) in the ratio's denominator, without gradient."""

    def weights(self, batch: TrainBatch) -> Tensor | None:
        """Return factors (R, T) on the policy's loss of each token, without gradient; None for 1 everywhere."""
        return None


class Behaviour(Correction):
    """Ratio against the generator: pi_trainer / pi_generator. Source: arXiv 2510.13786, section 2."""

    def anchor(self, batch: TrainBatch) -> Tensor:
        """Return the log-probabilities (R, T) that the generator recorded while sampling."""
        return batch.generator_logprobs

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and the policy in the ratio's denominator: the generator while it sampled."""
        return {**super().semantics(), "anchor": "the generator, at sampling time"}


def importance_weights(
    anchor_logprobs: Tensor, generator_logprobs: Tensor, mask: Tensor, level: str, mode: str, low: float, high: float
) -> Tensor:
    """Return w = pi_anchor / pi_generator of each token, or of its whole sequence (the product), bounded.

    Mode "truncate" clamps w to [low, high]; "mask" sets w outside these bounds to 0. Tokens outside `mask` are not
    read. Shapes: all (R, T) -> (R, T). Source: truncated importance sampling (Yao et al. 2025) and its masked form, as
    in TRL's `vllm_importance_sampling_mode`.
    """
    # Use `where`, not a product with the mask: 0 * NaN is NaN.
    gap = torch.where(mask > 0, anchor_logprobs - generator_logprobs, 0.0)
    if level == "sequence":
        # Sum logarithms and clamp the sum before exp: the product of a long sequence's ratios would overflow FP32.
        gap = gap.sum(1, keepdim=True).expand_as(gap)
    weights = torch.exp(gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if mode == "truncate":
        return weights.clamp(low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


class Proximal(Correction):
    """Ratio against the trainer's policy before the update; the loss is weighted by a bounded pi_anchor / pi_generator.

    The trainer recomputes the anchor on every batch, with the weights at the start of its first pass, so the ratio is 1
    in that pass. The weight accounts for staleness and for the mismatch between engine and trainer.

    Args:
        level: "token" for a weight per token, "sequence" for the product over a rollout's sampled tokens.
        mode: "truncate" clamps the weight to [min_weight, max_weight]; "mask" sets it to 0 outside these bounds; "none"
            uses no weight, and the other settings must then keep their defaults.
        min_weight, max_weight: bounds of the weight pi_anchor / pi_generator.

    Source: decoupled PPO, arXiv 2505.24298 (AReaL), section 5.2; the weight as in TRL and verl.
    """

    recomputes: ClassVar[bool] = True

    def __init__(
        self, level: str = "token", mode: str = "truncate", min_weight: float = 0.0, max_weight: float = 2.0
    ) -> None:
        for field, value, valid in (("level", level, LEVELS), ("mode", mode, MODES)):
            if value not in valid:
                raise ConfigurationError(f"correction.{field}: {value!r} is unknown; valid: {', '.join(valid)}")
        self.level = level
        self.mode = mode
        self.max_weight = positive("correction.max_weight", max_weight)
        self.min_weight = not_negative("correction.min_weight", min_weight)
        if min_weight > max_weight:
            raise ConfigurationError(
                f"correction.min_weight: {min_weight!r} exceeds correction.max_weight, {max_weight!r}"
            )
        defaults = {name: parameter.default for name, parameter in self._constructor().items() if name != "mode"}
        changed = [name for name, default in defaults.items() if getattr(self, name) != default]
        if mode == "none" and changed:
            raise ConfigurationError(
                f"correction.{changed[0]}: {getattr(self, changed[0])!r} has no effect with correction.mode 'none', "
                "which uses no weight; leave it out, or choose mode truncate or mask"
            )

    def anchor(self, batch: TrainBatch) -> Tensor:
        """Return the log-probabilities (R, T) that the trainer computed before the update."""
        assert batch.anchor_logprobs is not None, "run_forward_passes sets it if `recomputes`"
        return batch.anchor_logprobs

    def weights(self, batch: TrainBatch) -> Tensor | None:
        """Return `importance_weights` (R, T); None with mode "none" or without recomputed log-probabilities."""
        if self.mode == "none" or batch.anchor_logprobs is None:
            return None
        return importance_weights(
            batch.anchor_logprobs,
            batch.generator_logprobs,
            batch.loss_mask,
            self.level,
            self.mode,
            self.min_weight,
            self.max_weight,
        )

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and the policy in the ratio's denominator: the trainer before its first pass."""
        return {**super().semantics(), "anchor": "the trainer, before the first pass over the batch"}
