"""Axis `loss`: the policy surrogate, per token and unreduced. How tokens are averaged is another axis."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_scalerl.choice import DesignChoice

# exp(20) is far outside every clip interval; beyond it float32 would overflow to inf and poison the gradient.
MAX_LOG_RATIO = 20.0


def importance_ratio(trainer_logprobs: Tensor, anchor_logprobs: Tensor) -> Tensor:
    """pi_trainer / pi_anchor per token, with gradient. Shapes: all (R, T)."""
    return torch.exp((trainer_logprobs - anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


class Loss(DesignChoice):
    """A policy surrogate."""

    axis: ClassVar[str] = "loss"

    @abstractmethod
    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Loss of each token, unreduced; values outside the mask are ignored later. Shapes: all (R, T).

        `mask` is for surrogates whose ratio spans a sequence.
        """

    @abstractmethod
    def clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Where the surrogate clips (R, T, bool), for the metric `train/clip_fraction`."""
