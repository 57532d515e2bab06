"""Axis `epochs`: passes over one rollout batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_scalerl.checks import whole_number
from lightning_scalerl.choice import DesignChoice, ObservedStep


class Epochs(DesignChoice):
    """How often the optimizer goes over a batch before the next one. One step is one batch, whatever this is.

    A batch keeps the versions that sampled it, so that later passes are further off-policy: what the importance ratio
    is for. The weights of a step are those after its last pass; only they are published.

    Args:
        count: passes, each an update of the weights. 4 to 8 in PPO at 1 to 7 billion parameters, 2 to 4 above.
    """

    axis: ClassVar[str] = "epochs"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Epochs", "count": 1}

    def __init__(self, count: int = 1) -> None:
        self.count = whole_number("epochs.count", count)

    def differs(self, theirs: Epochs, step: ObservedStep) -> bool:
        """Whether a batch that keeps something is gone over another number of times."""
        return self.count != theirs.count and step.batch.rollouts > 0
