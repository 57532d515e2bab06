"""Axis `correction`: what the importance ratio is anchored on.

The ratio is exp(trainer_logprobs - anchor). With `behaviour` the anchor is what the generator recorded, so one
ratio covers both staleness and the mismatch between engine and trainer (ScaleRL). Recomputing an anchor with
the trainer and correcting the rest by importance sampling is another choice; stacking that correction on the
behaviour anchor would count the mismatch twice.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.rollout import TrainBatch


class Correction(DesignChoice):
    """Names the log-probabilities that the ratio is taken against."""

    axis: ClassVar[str] = "correction"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Behaviour"}

    @abstractmethod
    def anchor(self, batch: TrainBatch) -> Tensor:
        """Log-probabilities (R, T) below the ratio's fraction bar; no gradient."""


class Behaviour(Correction):
    """ratio = trainer / generator. Source: arXiv 2510.13786, section 2."""

    def anchor(self, batch: TrainBatch) -> Tensor:
        """What the generator recorded as it sampled."""
        return batch.generator_logprobs
