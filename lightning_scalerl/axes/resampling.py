"""Axis `resampling`: which prompts are sampled again in later epochs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import ConfigurationError


class Resampling(DesignChoice):
    """Decides from a prompt's pass rates whether it is retired, that is, never sampled again."""

    axis: ClassVar[str] = "resampling"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "UniformResampling"}

    @abstractmethod
    def retires(self, pass_rates: Sequence[float]) -> bool:
        """Return whether a prompt with these pass rates (one per group so far) leaves the pool for good."""

    def differs(self, other: Resampling, step: ObservedStep) -> bool:
        """Return whether the two choices differ on the prompts drawn so far.

        They do if this choice alone has retired a prompt, or if a prompt was drawn that `other` alone had retired.
        """
        # Prompts of earlier batches count as well: retiring one of them changes which prompts are drawn now.
        if any(self.retires(rates) and not other.retires(rates) for rates in step.histories()):
            return True
        # Compare at the draw, where the two choices first differ. The group is trained on up to `max_staleness` steps
        # later, or never if a filter drops it.
        return any(other.retires(rates) and not self.retires(rates) for rates in step.drawn_histories())


class NoPositiveResampling(Resampling):
    """Retire a prompt once the pass rate of one of its groups reaches `pass_rate`.

    Source: arXiv 2510.13786, section 3.2 (No-Positive-Resampling, 0.9).
    """

    def __init__(self, pass_rate: float = 0.9) -> None:
        if isinstance(pass_rate, bool) or not isinstance(pass_rate, int | float) or not 0 < pass_rate <= 1:
            raise ConfigurationError(f"resampling.pass_rate: {pass_rate!r} must be above 0 and at most 1")
        self.pass_rate = pass_rate

    def retires(self, pass_rates: Sequence[float]) -> bool:
        """Return True once any one group has reached the pass rate."""
        return any(rate >= self.pass_rate for rate in pass_rates)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus entries which say what the rate refers to and that retirement is permanent."""
        return {**super().semantics(), "pass_rate_of": "one group", "retired": "for good"}


class UniformResampling(Resampling):
    """Keep every prompt in every epoch."""

    def retires(self, pass_rates: Sequence[float]) -> bool:
        """Return False: no prompt is ever retired."""
        return False
