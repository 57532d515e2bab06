"""Axis `filter`: which sampled groups enter the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_scalerl.choice import DesignChoice
from lightning_scalerl.rollout import Group


def has_variance(rewards: Tensor) -> bool:
    """Whether rewards (G,) differ at all; compared exactly, so a constant continuous reward counts as constant."""
    return bool((rewards != rewards[0]).any())


class Filter(DesignChoice):
    """Decides for each completed group whether it carries credit."""

    axis: ClassVar[str] = "filter"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoFilter"}

    @abstractmethod
    def keep(self, group: Group) -> bool:
        """True if the group enters the loss and its denominators."""


class ZeroVariance(Filter):
    """Drop groups whose rewards are all equal, without refilling: the batch gets smaller ("effective batch").

    Their advantages are zero either way; what changes is what the loss is divided by.
    Source: ScaleRL, arXiv 2510.13786, section 3.2.
    """

    def keep(self, group: Group) -> bool:
        """True if the rewards differ."""
        return has_variance(group.rewards)


class NoFilter(Filter):
    """Keep every group."""

    def keep(self, group: Group) -> bool:
        """Always true."""
        return True
