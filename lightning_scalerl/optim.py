"""Optimizer and learning-rate schedules of the policy. `module` handles clipping and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_scalerl.checks import ConfigurationError, positive, whole_number


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
        clip_norm: bound on the norm of the whole gradient. With None it is not clipped, but still measured.
        dropout: whether the model's own dropout acts in training. Off by default: the trained policy would otherwise
            differ in every step from the policy that sampled.
    """

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
        if not 0 <= self.lr < float("inf"):
            raise ConfigurationError(f"optimizer.lr: {self.lr!r} must be 0 or more")
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

    def build(self, parameters: Iterable[nn.Parameter] | list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer for parameters, or for parameter groups with their own learning rates."""
        return torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
        )


@dataclass(frozen=True)
class ConstantSchedule:
    """Linear warm-up over `warmup_steps` steps, then constant (ScaleRL: 100 steps)."""

    warmup_steps: int

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigurationError(f"schedule.warmup_steps: {self.warmup_steps!r} must be 0 or more")

    def factor(self, completed_steps: int) -> float:
        """Return the factor on the learning rate for the next step."""
        return min(1.0, (completed_steps + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True)
class CosineSchedule(ConstantSchedule):
    """Linear warm-up over `warmup_steps`, then half a cosine down to `final` times the rate at `total_steps`.

    The learning curve depends on `total_steps`, so it is part of the run's identity. Unlike with a constant rate, a
    run with a larger budget is another run.
    """

    total_steps: int
    final: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.total_steps > self.warmup_steps:
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
    """Warm-up, then constant, times sqrt(rollouts per step / `reference`): one `optimizer.lr` for all batch sizes.

    Args:
        warmup_steps: steps of the linear warm-up.
        prompts, completions: prompts per step and rollouts per prompt; their product is the rollouts per step.
        reference: rollouts per step at which the factor is 1.
        rollouts: rollouts per step if the batch is given that way; it overrides the product.
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
