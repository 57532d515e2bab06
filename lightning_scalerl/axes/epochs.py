"""Axis `epochs`: number of passes over one rollout batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.checks import whole_number
from lightning_scalerl.choice import DesignChoice, ObservedStep


class Epochs(DesignChoice):
    """Passes of the optimizer over each rollout batch; one training step is one batch, whatever their number.

    A batch keeps the versions that sampled it, so later passes are further off-policy, which the importance ratio
    accounts for. The weights of a step are those after its last pass; only they are published.

    Args:
        count: passes, each an update of the weights. 4 to 8 in PPO at 1 to 7 billion parameters, 2 to 4 above.
    """

    axis: ClassVar[str] = "epochs"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Epochs", "count": 1}

    def __init__(self, count: int = 1) -> None:
        self.count = whole_number("epochs.count", count)

    def differs(self, theirs: Epochs, step: ObservedStep) -> bool:
        """Return whether the number of passes differs and the batch has a rollout to train on."""
        return self.count != theirs.count and step.batch.rollouts > 0
