"""Axis `filter`: which sampled groups enter the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import whole_number
from lightning_scalerl.rollouts.rollout import Group


def has_variance(rewards: Tensor) -> bool:
    """Return whether the rewards (G,) of a group differ."""
    # Compare exactly: because of rounding, the standard deviation of equal rewards such as 0.1 can be above 0.
    return bool((rewards != rewards[:1]).any())


class Filter(DesignChoice):
    """Decides for each completed group whether it enters the loss.

    Attributes:
        refills: whether a dropped group is replaced at once by a group of another prompt.
        most_dropped: with `refills`, the largest number of dropped groups as a multiple of the batch's groups; above it
            the run stops.
        by_variance: whether the filter drops a group because all its rewards are equal. Such a group is kept
            nevertheless if the values that axis `credit` compares differ (`stream.credit.carries_credit`).
    """

    axis: ClassVar[str] = "filter"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoFilter"}
    refills: ClassVar[bool] = False
    most_dropped: int = 0
    by_variance: ClassVar[bool] = False

    @abstractmethod
    def keep(self, group: Group) -> bool:
        """Return True if the group enters the loss and its denominators."""

    def check_group_size(self, completions: int) -> str | None:
        """Return a one-line error if the filter cannot work with groups of this size, else None."""
        return None

    def differs(self, other: Filter, step: ObservedStep) -> bool:
        """Return whether the tokens' weights in the loss differ between the two choices.

        If only one of the two choices refills, return whether it replaces a group of the batch.
        """
        if self.refills == other.refills:
            return step.loss_weights_differ(other)
        return step.dropped > 0 or (other.refills and not all(map(other.keep, step.batch.groups)))


def _groups_of_one_error(choice: str, completions: int) -> str | None:
    if completions > 1:
        return None
    return (
        f"batch.completions: {completions} makes groups that never differ, and filter={choice} drops every one; "
        "choose filter=none, or 2 and more"
    )


class ZeroVariance(Filter):
    """Drop groups whose rewards are all equal, without replacement: the batch gets smaller ("effective batch").

    Advantages within the group are zero either way, so the filter only changes the divisor of the loss. With a critic
    (`advantage=gae`) they are not zero, and the filter also removes the gradient of these groups.
    Source: ScaleRL, arXiv 2510.13786, section 3.2.
    """

    by_variance: ClassVar[bool] = True

    def keep(self, group: Group) -> bool:
        """Return True if the rewards differ within the group."""
        return has_variance(group.rewards)

    def check_group_size(self, completions: int) -> str | None:
        """Return a one-line error for groups of one: their rewards never differ, so all would be dropped."""
        return _groups_of_one_error("zero_variance", completions)


class DynamicSampling(Filter):
    """Drop groups whose rewards are all equal and sample other prompts instead, so that every batch is full.

    In every async mode, one more group is started for each dropped group. Its pass rate still counts in the prompt's
    history.

    Args:
        most_dropped: largest number of dropped groups per group of a batch. Above it the run stops, because the pool
            has nothing left to learn from.

    Source: DAPO, arXiv 2503.14476, section 3.2; its code also stops after a number of batches.
    """

    refills: ClassVar[bool] = True
    by_variance: ClassVar[bool] = True

    def __init__(self, most_dropped: int = 20) -> None:
        self.most_dropped = whole_number("filter.most_dropped", most_dropped)

    def keep(self, group: Group) -> bool:
        """Return True if the rewards differ within the group."""
        return has_variance(group.rewards)

    def check_group_size(self, completions: int) -> str | None:
        """Return a one-line error for groups of one: their rewards never differ, so all would be dropped."""
        return _groups_of_one_error("dynamic_sampling", completions)


class NoFilter(Filter):
    """Keep every group, including those whose rewards are all equal."""

    def keep(self, group: Group) -> bool:
        """Return True: every group enters the loss."""
        return True
