"""Axis `precision`: the policy's data type, and the components that stay in FP32.

Master weights are always FP32. The policy's forward pass runs under autocast in the policy's type, and the generator
holds a copy cast to that type. The language-model head can be kept in FP32 on either side, because most of the
difference between the log-probabilities of trainer and generator arises there. Source: arXiv 2510.13786, section 3.2
(from MiniMax-M1, 2506.13585).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import ConfigurationError

# Smallest difference of log-probabilities at which `differs` is true: above FP32's rounding error, and below FP16's
# rounding error on an untrained model.
LOGPROB_THRESHOLD = 2e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest allowed gap in log-probability between trainer and generator with the same weights: mean and 99th percentile.
# benchmarks/precision_gap.py measured 1e-7 and 1e-6 in FP32. In BF16 it measured 0.002 and 0.03 on tokens sampled by
# the same weights, and up to 0.01 and 0.15 on tokens sampled by older weights. FP16 is not measured. Its rounding error
# is an eighth of BF16's (three more mantissa bits), so a quarter of BF16's bounds leaves a margin.
PROBE_BOUNDS = {"fp32": (1e-4, 1e-4), "bf16": (0.05, 0.75), "fp16": (0.0125, 0.19)}


class Precision(DesignChoice):
    """Data types of the policy, its head, the critic, the advantages and the KL term.

    Args:
        policy: type of the policy's forward pass and of the generator's weights: "bf16", "fp16" (with loss scaling) or
            "fp32".
        fp32_head_trainer: compute the trainer's logits in FP32 even if the policy is not.
        fp32_head_generator: compute the generator's logits in FP32 even if the policy is not.
        fp32_value: run the critic in FP32 even if the policy is not.
        fp32_advantage: keep advantages in FP32; otherwise they are rounded to the policy's type.
        fp32_kl: compute the KL to the reference in FP32; otherwise its log-probabilities are rounded to the policy's
            type.
    """

    axis: ClassVar[str] = "precision"
    added: ClassVar[Mapping[str, Any]] = {"fp32_value": True, "fp32_advantage": True, "fp32_kl": True}

    def __init__(
        self,
        policy: str = "bf16",
        fp32_head_trainer: bool = True,
        fp32_head_generator: bool = True,
        fp32_value: bool = True,
        fp32_advantage: bool = True,
        fp32_kl: bool = True,
    ) -> None:
        if policy not in DTYPES:
            raise ConfigurationError(f"precision.policy: {policy!r} is unknown; valid: {', '.join(DTYPES)}")
        self.policy = policy
        self.fp32_head_trainer = fp32_head_trainer
        self.fp32_head_generator = fp32_head_generator
        self.fp32_value = fp32_value
        self.fp32_advantage = fp32_advantage
        self.fp32_kl = fp32_kl

    @property
    def policy_dtype(self) -> torch.dtype:
        """Type of the policy's matrix products and of the generator's weights."""
        return DTYPES[self.policy]

    @property
    def probe_bounds(self) -> tuple[float, float]:
        """Bounds on mean and 99th percentile of the log-probability gap; above a bound `measure.probe` fails."""
        return PROBE_BOUNDS[self.policy]

    def head_dtype(self, fp32_head: bool) -> torch.dtype:
        """Return the type in which logits are computed."""
        return torch.float32 if fp32_head else self.policy_dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """Type of the critic's matrix products."""
        return torch.float32 if self.fp32_value else self.policy_dtype

    def round_to_policy(self, values: Tensor, fp32: bool) -> Tensor:
        """Return `values`, rounded to the policy's type unless `fp32` is true. The tensor's dtype stays the same."""
        return values if fp32 else values.to(self.policy_dtype).to(values.dtype)

    def components(self) -> dict[str, str]:
        """Return the effective type of every component: FP32 for all if the policy is FP32, whatever `fp32_*` says."""
        parts = {
            "head_trainer": self.fp32_head_trainer,
            "head_generator": self.fp32_head_generator,
            "value": self.fp32_value,
            "advantage": self.fp32_advantage,
            "kl": self.fp32_kl,
        }
        return {name: "fp32" if fp32 else self.policy for name, fp32 in parts.items()}

    def differs(self, other: Precision, step: ObservedStep) -> bool:
        """Return whether log-probabilities, values, or rounded token weights differ between the two choices."""
        batch, (our_types, their_types) = step.batch, (self.components(), other.components())
        changed = {part for part in ("value", "advantage", "kl") if our_types[part] != their_types[part]}
        # A new critic's values are all zero in every type, so they cannot differ.
        if "value" in changed and batch.values is not None and bool((batch.values != 0).any()):
            return True
        if changed & {"advantage", "kl"} and step.loss_weights_differ(other, rounding=True):
            return True
        our_logprobs, their_logprobs = step.probe_logprobs(self), step.probe_logprobs(other)
        return bool(((our_logprobs - their_logprobs).abs() > LOGPROB_THRESHOLD).any())

    def semantics(self) -> dict[str, Any]:
        """Return the effective type of every component, including master weights and loss scaling."""
        # Without loss scaling, small FP16 gradients would be rounded to zero (`update.loss_scale`).
        scaling = {"loss_scaling": "dynamic"} if self.policy == "fp16" else {}
        return {"choice": "Precision", "master_weights": "fp32", "policy": self.policy, **self.components(), **scaling}
