"""Axis `allocation`: how many rollouts a prompt gets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lightning_scalerl.choice import DesignChoice


class Allocation(DesignChoice):
    """Divides the rollouts of a step, `batch.completions` a prompt on average, among its prompts."""

    axis: ClassVar[str] = "allocation"

    @abstractmethod
    def completions(self, average: int, pass_rates: Sequence[float]) -> int:
        """Rollouts for a prompt whose groups so far had these pass rates."""


class FixedAllocation(Allocation):
    """The same number for every prompt."""

    def completions(self, average: int, pass_rates: Sequence[float]) -> int:
        """The average."""
        return average
