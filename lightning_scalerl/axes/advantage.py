"""Axis `advantage`: from the rewards of a group to credit."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from lightning_scalerl.choice import DesignChoice


def group_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the group's mean. Shapes: (G,) -> (G,)."""
    return rewards - rewards.mean()


class Advantage(DesignChoice):
    """Estimates each rollout's advantage before normalization."""

    axis: ClassVar[str] = "advantage"

    @abstractmethod
    def estimate(self, rewards: Tensor) -> Tensor:
        """Advantages (G,) of one group from its rewards (G,)."""

    def check_group_size(self, completions: int) -> str | None:
        """One line if the estimator cannot work with groups of this size, else None."""
        return None


class GroupAdvantage(Advantage):
    """Reward minus group mean: GRPO's baseline, without its division by the standard deviation.

    Source: arXiv 2510.13786, section 2 (A_i = r_i - mean).
    """

    def estimate(self, rewards: Tensor) -> Tensor:
        """Advantages (G,) that sum to zero."""
        return group_advantages(rewards)

    def check_group_size(self, completions: int) -> str | None:
        """A group of one has no baseline but itself: every advantage would be zero."""
        if completions < 2:
            return (
                f"batch.completions: {completions} leaves nothing to compare a rollout with; "
                "advantage=group (GroupAdvantage) needs at least 2"
            )
        return None
