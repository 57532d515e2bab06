"""Optimizer and learning-rate schedule. Clipping and micro-batches are ours: optimisation is manual."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_scalerl.checks import ConfigurationError, positive


@dataclass(frozen=True)
class AdamW:
    """AdamW and the gradient-norm clip that goes before it.

    The paper's rate is 5e-7 for 8 billion parameters, with eps 1e-15 and weight decay 0.01; betas and clip are
    not stated there.

    `dropout` lets the model's own dropout act in training. It is off: the policy that is trained would be another one
    than the policy that sampled, in every step.
    """

    added: ClassVar[Mapping[str, Any]] = {"dropout": False}

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip_norm: float
    dropout: bool = False

    def __post_init__(self) -> None:
        # A learning rate of 0 is a control experiment: everything runs, nothing is learned.
        if not 0 <= self.lr < float("inf"):
            raise ConfigurationError(f"optimizer.lr: {self.lr!r} must be 0 or more")
        if not isinstance(self.dropout, bool):
            raise ConfigurationError(f"optimizer.dropout: {self.dropout!r} must be true or false")
        positive("optimizer.eps", self.eps)
        positive("optimizer.clip_norm", self.clip_norm)
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigurationError(f"optimizer.{field}: {getattr(self, field)!r} must be in [0, 1)")

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer."""
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
        """What the learning rate is multiplied with in the next step."""
        return min(1.0, (completed_steps + 1) / (self.warmup_steps + 1))
