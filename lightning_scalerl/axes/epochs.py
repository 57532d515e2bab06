"""Axis `epochs`: number of passes over one rollout batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.axes.choice import DesignChoice, ObservedStep
from lightning_scalerl.checks import whole_number


class Epochs(DesignChoice):
    """Passes of the optimizer over each rollout batch. One training step is one batch, for any number of passes.

    Later passes are further off-policy, which the importance ratio accounts for: a batch keeps the weight versions that
    sampled it. Only the weights after the last pass count as the step's weights and are published.

    Args:
        count: passes, each an update of the weights. 4 to 8 in PPO at 1 to 7 billion parameters, 2 to 4 above.
    """

    axis: ClassVar[str] = "epochs"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Epochs", "count": 1}

    def __init__(self, count: int = 1) -> None:
        self.count = whole_number("epochs.count", count)

    def differs(self, other: Epochs, step: ObservedStep) -> bool:
        """Return whether the number of passes differs and the batch has a rollout to train on."""
        return self.count != other.count and step.batch.rollouts > 0
