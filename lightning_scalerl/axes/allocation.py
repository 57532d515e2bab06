"""Axis `allocation`: how many rollouts a prompt gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import positive, whole_number


class Allocation(DesignChoice):
    """Divides the rollouts of a step among its prompts; the average per prompt is `batch.completions`."""

    axis: ClassVar[str] = "allocation"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "FixedAllocation"}

    @abstractmethod
    def completions(self, average: int, pass_rates: Sequence[float], surplus: int = 0) -> int:
        """Return the number of rollouts for a prompt whose groups so far had these pass rates.

        Args:
            average: average number of rollouts per prompt, `batch.completions`.
            pass_rates: pass rates of the prompt's earlier groups, oldest first; empty for a new prompt.
            surplus: rollouts given to all earlier prompts in excess of the average. A choice that gives unequal numbers
                must bring this total back towards 0.
        """

    def check_average(self, average: int) -> str | None:
        """Return a one-line error if this choice cannot work with this average number of rollouts, else None."""
        return None

    def differs(self, other: Allocation, step: ObservedStep) -> bool:
        """Return whether a group of the batch would have had another size under `other`."""
        # Compare without a surplus, because the surplus at the start of a group is not recorded.
        return any(
            len(group.sampled) != other.completions(step.completions, group.history) for group in step.batch.groups
        )


class FixedAllocation(Allocation):
    """Gives every prompt the same number of rollouts."""

    def completions(self, average: int, pass_rates: Sequence[float], surplus: int = 0) -> int:
        """Return `average` for every prompt."""
        return average


class AllocationByDifficulty(Allocation):
    """Gives more rollouts to prompts that are rarely solved, and fewer to prompts that are often solved.

    A prompt gets average * (hard + (easy - hard) * p), where p is the pass rate of its last group. A new prompt gets
    the average. The total so far differs from the total of `FixedAllocation` by at most `average` rollouts.

    Args:
        hard: factor on the average at a pass rate of 0.
        easy: factor on the average at a pass rate of 1.
        least: smallest number of rollouts that a prompt should get.
    """

    def __init__(self, hard: float = 1.5, easy: float = 0.5, least: int = 2) -> None:
        self.hard = positive("allocation.hard", hard)
        self.easy = positive("allocation.easy", easy)
        self.least = whole_number("allocation.least", least)

    def check_average(self, average: int) -> str | None:
        """Return a one-line error if `least` exceeds the average, because the step would have too few rollouts."""
        if self.least <= average:
            return None
        return f"allocation.least: {self.least} for every prompt is more than the average, batch.completions, {average}"

    def completions(self, average: int, pass_rates: Sequence[float], surplus: int = 0) -> int:
        """Return the number of rollouts for the last pass rate, bounded so that the surplus stays small."""
        factor = self.hard + (self.easy - self.hard) * pass_rates[-1] if pass_rates else 1.0
        unbounded = max(self.least, round(average * factor))
        # The bounds keep the surplus after this prompt, surplus + count - average, in [-average, average].
        return max(1, min(max(unbounded, -surplus), 2 * average - surplus))
