"""Axis `truncated`: whether completions that hit the token limit are trained on.

Under every choice, the reward of a truncated completion counts in its group's baseline, because it is an outcome of the
policy. `mask` only removes the tokens from the loss and its denominators.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.rollouts.rollout import Rollout


class Truncated(DesignChoice):
    """Decides whether truncated rollouts enter the loss."""

    axis: ClassVar[str] = "truncated"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "KeepTruncated"}

    @abstractmethod
    def credits(self, rollout: Rollout) -> bool:
        """Return True if the rollout's tokens enter the loss and its denominators."""

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus an entry which says that truncated rollouts count in the group's baseline."""
        return {**super().semantics(), "truncated_reward_in_baseline": True}


class MaskTruncated(Truncated):
    """Leave truncated completions out of the loss.

    Source: our reading of the "effective batch" in arXiv 2510.13786, A.6 and A.15.
    """

    def credits(self, rollout: Rollout) -> bool:
        """Return True if the completion ended by itself."""
        return not rollout.truncated


class KeepTruncated(Truncated):
    """Train on truncated completions like on any others."""

    def credits(self, rollout: Rollout) -> bool:
        """Return True: truncated or not, a rollout is trained on."""
        return True
