"""Axis `normalization`: the scale of the advantages.

Systems disagree under one name, so each choice states its `ddof` and `eps`, and `batch` (ScaleRL: standard
deviation of the *advantages*) is another choice than TRL's (of the raw rewards). The batch is what the filter
has left; the paper does not say whether before or after.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choice import DesignChoice


def scale_by_batch(advantages: list[Tensor], ddof: int, eps: float) -> list[Tensor]:
    """Divide by the standard deviation of all advantages of the batch.

    Shapes: a list of (G,), one a group. Source: arXiv 2510.13786, section 5.1.
    """
    if not advantages:
        return []
    everything = torch.cat(advantages)
    if everything.numel() <= ddof:
        return advantages
    scale = everything.std(correction=ddof) + eps
    return [group / scale for group in advantages]


def scale_by_prompt(advantages: list[Tensor], rewards: list[Tensor], ddof: int, eps: float) -> list[Tensor]:
    """Divide each group by the standard deviation of its own rewards, as GRPO does. Shapes: lists of (G,)."""
    return [
        group if group.numel() <= ddof else group / (reward.std(correction=ddof) + eps)
        for group, reward in zip(advantages, rewards, strict=True)
    ]


class Normalization(DesignChoice):
    """Rescales the advantages of one optimizer step's batch."""

    axis: ClassVar[str] = "normalization"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoNormalization"}

    @abstractmethod
    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Scaled advantages; both lists hold one (G,) tensor a group that passed the filter."""


class _Scaled(Normalization):
    def __init__(self, ddof: int = 1, eps: float = 1e-6) -> None:
        if ddof not in (0, 1):
            raise ConfigurationError(f"normalization.ddof: {ddof!r} is not valid; 0 (population) or 1 (unbiased)")
        if not eps >= 0:
            raise ConfigurationError(f"normalization.eps: {eps!r} must be 0 or more")
        self.ddof = ddof
        self.eps = eps


class BatchNormalization(_Scaled):
    """Advantages over the standard deviation of all advantages in the batch (ScaleRL)."""

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """One scale for the whole batch."""
        return scale_by_batch(advantages, self.ddof, self.eps)


class PromptNormalization(_Scaled):
    """Advantages over the standard deviation of their group's rewards (GRPO)."""

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """One scale a group."""
        return scale_by_prompt(advantages, rewards, self.ddof, self.eps)


class NoNormalization(Normalization):
    """Advantages as they are (Dr.GRPO)."""

    def scale(self, advantages: list[Tensor], rewards: list[Tensor]) -> list[Tensor]:
        """Unchanged."""
        return advantages
