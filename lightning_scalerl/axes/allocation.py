"""Axis `allocation`: how many rollouts a prompt gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.choice import DesignChoice, ObservedStep


class Allocation(DesignChoice):
    """Divides the rollouts of a step, `batch.completions` a prompt on average, among its prompts."""

    axis: ClassVar[str] = "allocation"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "FixedAllocation"}

    @abstractmethod
    def completions(self, average: int, pass_rates: Sequence[float]) -> int:
        """Rollouts for a prompt whose groups so far had these pass rates."""

    def differs(self, theirs: Allocation, step: ObservedStep) -> bool:
        """Whether a group of the batch has another size."""
        return any(
            len(group.rollouts) != theirs.completions(step.completions, group.history) for group in step.batch.groups
        )


class FixedAllocation(Allocation):
    """The same number for every prompt."""

    def completions(self, average: int, pass_rates: Sequence[float]) -> int:
        """The average."""
        return average
