"""Axis `epochs`: number of passes over one rollout batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import whole_number


class Epochs(DesignChoice):
    """Passes of the optimizer over each rollout batch. One training step is one batch, for any number of passes.

    Later passes are further off-policy. The importance ratio accounts for this, because its denominator stays the same
    in all passes over a batch. Only the weights after the last pass count as the step's weights and are published.

    Args:
        count: number of passes, each of which updates the weights. Usual in PPO: 4 to 8 for models of 1 to 7 billion
            parameters, 2 to 4 for larger ones.
    """

    axis: ClassVar[str] = "epochs"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Epochs", "count": 1}

    def __init__(self, count: int = 1) -> None:
        self.count = whole_number("epochs.count", count)

    def differs(self, other: Epochs, step: ObservedStep) -> bool:
        """Return whether the number of passes differs and the batch has a rollout to train on."""
        return self.count != other.count and step.batch.rollouts > 0
