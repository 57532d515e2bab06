"""Axis `truncated`: whether completions that hit the token limit are learned from.

Either way their reward counts in the baseline of their group: they are outcomes of the policy. What `mask`
takes away are their tokens, from the loss and from everything it is divided by.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.rollout import Rollout


class Truncated(DesignChoice):
    """Decides which rollouts carry credit."""

    axis: ClassVar[str] = "truncated"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "KeepTruncated"}

    @abstractmethod
    def credits(self, rollout: Rollout) -> bool:
        """True if the rollout's tokens enter the loss and its denominators."""

    def semantics(self) -> dict[str, Any]:
        """With where a truncated rollout still counts."""
        return {**super().semantics(), "truncated_reward_in_baseline": True}


class MaskTruncated(Truncated):
    """Leave truncated completions out of the loss.

    Source: the "effective batch" of arXiv 2510.13786, A.6 and A.15, by inference from their wording.
    """

    def credits(self, rollout: Rollout) -> bool:
        """True if it ended by itself."""
        return not rollout.truncated


class KeepTruncated(Truncated):
    """Learn from truncated completions as from any other."""

    def credits(self, rollout: Rollout) -> bool:
        """Always true."""
        return True
