"""Optimizers and learning-rate schedules of the policy. `module` handles clipping and micro-batches.

This module has the settings of the optimizers. Their steps are computed by torch or in `update`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_scalerl.checks import ConfigurationError, not_negative, positive, shown, whole_number
from lightning_scalerl.compat.imports import has_torchao


@dataclass(frozen=True)
class AdamW:
    """AdamW and the gradient clipping that precedes it.

    The ScaleRL paper uses a rate of 5e-7 for 8 billion parameters, with eps 1e-15 and weight decay 0.01. It does not
    state betas and clipping.

    Attributes:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        clip_norm: bound on the norm of the whole gradient. None to measure the norm without clipping.
        dropout: whether the model's own dropout acts in training. Off by default: the trained policy would otherwise
            differ in every step from the policy that sampled.
        storage: type of the values that the weights keep between steps: "fp32" or "bf16".
        states: type of each optimizer state, by torch's name of the state.
        state_bytes: bytes of all optimizer states per trained parameter.
        shards: whether a step on parts of the weights (FSDP2) equals the step on whole weights.
    """

    storage: ClassVar[str] = "fp32"
    states: ClassVar[Mapping[str, str]] = {"exp_avg": "fp32", "exp_avg_sq": "fp32"}
    state_bytes: ClassVar[int] = 8
    shards: ClassVar[bool] = True
    added: ClassVar[Mapping[str, Any]] = {"dropout": False}

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float | None
    dropout: bool = False

    def __post_init__(self) -> None:
        # A learning rate of 0 is a control experiment: everything runs, nothing is learned.
        not_negative("optimizer.lr", self.lr)
        not_negative("optimizer.weight_decay", self.weight_decay)
        if not isinstance(self.dropout, bool):
            raise ConfigurationError(f"optimizer.dropout: {self.dropout!r} must be true or false")
        positive("optimizer.eps", self.eps)
        clip = self.clip_norm
        if clip is not None and (
            isinstance(clip, bool) or not isinstance(clip, int | float) or not 0 < clip < math.inf
        ):
            raise ConfigurationError(f"optimizer.clip_norm: {clip!r} must be a number above 0, or null for no clipping")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigurationError(f"optimizer.{field}: {getattr(self, field)!r} must be in [0, 1)")

    def types(self) -> dict[str, Any]:
        """Return the types of stored weights and states, for `semantics.json`."""
        return {"storage": self.storage, "states": dict(self.states), "gradients": "fp32"}

    def build(
        self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]], hidden: Container[int] = frozenset()
    ) -> torch.optim.Optimizer:
        """Build the optimizer.

        Args:
            parameters: parameters, or parameter groups with their own learning rates.
            hidden: `id`s of the parameters that are matrices of the model's blocks; only Muon distinguishes them.
        """
        return torch.optim.AdamW(parameters, **self._common)

    @property
    def _betas(self) -> tuple[float, float]:
        """Both decays as floats: torch refuses a pair of an int and a float, such as (0, 0.95)."""
        return float(self.beta1), float(self.beta2)

    @property
    def _common(self) -> dict[str, Any]:
        """Arguments that all implementations of AdamW take."""
        return {
            "lr": self.lr,
            "betas": self._betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


@dataclass(frozen=True)
class AdamWBF16(AdamW):
    """AdamW that rounds weights and moments to BF16 after each step; it has one attribute more than `AdamW`.

    Without Kahan summation, a weight does not move if its update is below 1/512 to 1/256 of its size. The types of
    forward pass and gradients are set by axis `precision`, as with the other optimizers. The rounded values are stored
    in FP32 tensors: this shows the effect of BF16 storage on learning, but saves no memory for weights.

    Attributes:
        kahan: whether to keep the part of each update that rounding loses, in a third BF16 state.

    Source: arXiv 2010.06192.
    """

    storage: ClassVar[str] = "bf16"

    kahan: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.kahan, bool):
            raise ConfigurationError(f"optimizer.kahan: {shown(self.kahan)} must be true or false")

    @property
    def states(self) -> Mapping[str, str]:  # type: ignore[override]
        """Type of each state by name."""
        return dict.fromkeys(("exp_avg", "exp_avg_sq", *(("compensation",) if self.kahan else ())), "bf16")

    @property
    def state_bytes(self) -> int:  # type: ignore[override]
        """Bytes of all states per trained parameter."""
        return 2 * len(self.states)

    def build(
        self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]], hidden: Container[int] = frozenset()
    ) -> torch.optim.Optimizer:
        """Build the optimizer; see `AdamW.build`."""
        from lightning_scalerl.update.adamw_bf16 import StoredInBF16

        return StoredInBF16(parameters, **self._common, kahan=self.kahan)


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """torchao's AdamW with 8-bit moments and FP32 weights. It has the attributes of `AdamW`.

    The moments of a tensor stay FP32 if it has fewer than 4096 values, or if their number is not divisible by 256.

    Source: arXiv 2110.02861.

    Raises:
        ConfigurationError: torchao is not installed.
    """

    states: ClassVar[Mapping[str, str]] = {"exp_avg": "8 bits, blocks of 256", "exp_avg_sq": "8 bits, blocks of 256"}
    state_bytes: ClassVar[int] = 2
    shards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not has_torchao():
            raise ConfigurationError(
                "optimizer: AdamW8bit needs torchao; install lightning-scalerl[8bit], or choose optimizer=adamw"
            )

    def build(
        self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]], hidden: Container[int] = frozenset()
    ) -> torch.optim.Optimizer:
        """Build the optimizer; see `AdamW.build`."""
        from lightning_scalerl.update.adamw_8bit import EagerAdamW8bit

        return EagerAdamW8bit(parameters, **self._common)


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the matrices of the model's blocks, AdamW for all other parameters.

    `lr`, `weight_decay` and clipping are for both, `beta1`, `beta2` and `eps` for AdamW's parameters: embeddings,
    output head, norms, biases, and weights with more than two dimensions such as fused experts.

    Attributes:
        momentum: decay of Muon's Nesterov momentum.
        ns_steps: Newton-Schulz iterations of a step.
        adjust_lr_fn: how the rate depends on a matrix's size: "match_rms_adamw" scales updates to the size of AdamW's,
            so that AdamW's rate can be used; "original" is sqrt(max(1, rows / columns)).
        adamw_ratio: rate of AdamW's parameters as a multiple of `lr`.

    Source: Jordan et al. 2024, Muon; arXiv 2502.16982.
    """

    states: ClassVar[Mapping[str, str]] = {"momentum_buffer": "fp32", **AdamW.states}

    momentum: float = 0.95
    ns_steps: int = 5
    adjust_lr_fn: str = "match_rms_adamw"
    adamw_ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"optimizer.momentum: {self.momentum!r} must be in [0, 1)")
        if whole_number("optimizer.ns_steps", self.ns_steps) >= 100:
            raise ConfigurationError(f"optimizer.ns_steps: {self.ns_steps} must be below 100")
        if self.adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ConfigurationError(
                f"optimizer.adjust_lr_fn: {shown(self.adjust_lr_fn)} is unknown; valid: match_rms_adamw, original"
            )
        positive("optimizer.adamw_ratio", self.adamw_ratio)

    def types(self) -> dict[str, Any]:
        """Return the types of stored weights and states, and which optimizer each parameter has."""
        matrices = {"muon": "matrices of the blocks", "adamw": "all other parameters"}
        return {**super().types(), "orthogonalized_in": "bf16", "parameters": matrices}

    def build(
        self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]], hidden: Container[int] = frozenset()
    ) -> torch.optim.Optimizer:
        """Build the optimizer: first the groups of Muon, then those of AdamW; see `AdamW.build`."""
        from lightning_scalerl.update.muon import MuonAndAdamW

        listed = list(parameters)
        groups: list[dict[str, Any]] = [
            group if isinstance(group, dict) else {"params": [group], "lr": self.lr} for group in listed
        ]
        matrices, others = [], []
        for group in groups:
            lr, members = group.get("lr", self.lr), list(group["params"])
            matrices.append({"params": [each for each in members if id(each) in hidden], "lr": lr})
            others.append({"params": [each for each in members if id(each) not in hidden], "lr": lr * self.adamw_ratio})
        return MuonAndAdamW(
            [group for group in matrices if group["params"]],
            [group for group in others if group["params"]],
            self.momentum,
            self.ns_steps,
            self.adjust_lr_fn,
            self.weight_decay,
            self._betas,
            self.eps,
        )


@dataclass(frozen=True)
class ConstantSchedule:
    """Linear warm-up over `warmup_steps` steps, then constant (ScaleRL: 100 steps)."""

    warmup_steps: int

    def __post_init__(self) -> None:
        whole_number("schedule.warmup_steps", self.warmup_steps, least=0)

    def factor(self, completed_steps: int) -> float:
        """Return the factor on the learning rate for the next step."""
        return min(1.0, (completed_steps + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True)
class CosineSchedule(ConstantSchedule):
    """Linear warm-up over `warmup_steps`, then half a cosine down to `final` times the rate after `total_steps`.

    The last step has a slightly larger rate than `final` times the rate, because a step's rate depends on the number of
    steps before it, as in transformers.
    The learning curve depends on `total_steps`, so it is part of the run's identity. Unlike with a constant rate, a
    run with a larger budget is another run.
    """

    total_steps: int
    final: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if whole_number("schedule.total_steps", self.total_steps) <= self.warmup_steps:
            raise ConfigurationError(
                f"schedule.total_steps: {self.total_steps!r} must be more than schedule.warmup_steps, "
                f"{self.warmup_steps}"
            )
        if not 0 <= self.final <= 1:
            raise ConfigurationError(f"schedule.final: {self.final!r} must be in [0, 1]")

    def factor(self, completed_steps: int) -> float:
        """Return the factor on the learning rate for the next step: warm-up times cosine decay."""
        progress = (completed_steps - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
        return super().factor(completed_steps) * (self.final + (1 - self.final) * decay)


@dataclass(frozen=True)
class SqrtBatchSchedule(ConstantSchedule):
    """Warm-up, then constant, both scaled by sqrt(rollouts per step / `reference`).

    With this factor, one value of `optimizer.lr` serves all batch sizes.

    Args:
        warmup_steps: steps of the linear warm-up.
        prompts, completions: prompts per step and rollouts per prompt; their product is the rollouts per step.
        reference: rollouts per step at which the factor is 1.
        rollouts: `batch.rollouts`, which overrides the product of `prompts` and `completions`; None if it is not set.
    """

    prompts: int
    completions: int
    reference: int
    rollouts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("prompts", "completions", "reference"):
            whole_number(f"schedule.{field}", getattr(self, field))
        if self.rollouts is not None:
            whole_number("schedule.rollouts", self.rollouts)

    def factor(self, completed_steps: int) -> float:
        """Return the factor on the learning rate for the next step: warm-up times the batch-size factor."""
        rollouts = self.prompts * self.completions if self.rollouts is None else self.rollouts
        return super().factor(completed_steps) * math.sqrt(rollouts / self.reference)
