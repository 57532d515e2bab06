"""Non-finite gradients: dynamic loss scaling for FP16, and skipped updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import CannotGoOnError

# Defaults of torch.amp.GradScaler.
INITIAL_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
MIN_SCALE = 2.0**-14
# Consecutive skipped updates that end the run.
MAX_SKIPPED_IN_A_ROW = 3


class LossScale:
    """Dynamic loss scaling: the loss is scaled up so that gradients below FP16's smallest number, 6e-8, are not lost.

    The factor is halved after a gradient that is not finite and doubled after `GROWTH_INTERVAL` finite gradients in a
    row.

    Args:
        acts: whether the loss is scaled, as in FP16; otherwise the factor stays 1.
    """

    def __init__(self, acts: bool) -> None:
        self.enabled = acts
        self.factor = INITIAL_SCALE if acts else 1.0
        self._finite_updates = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for the backward pass."""
        return loss * self.factor if self.enabled else loss

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.enabled:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.factor)

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update; `finite` is whether its gradient was finite."""
        if not self.enabled:
            return
        if not finite:
            self.factor, self._finite_updates = max(self.factor * BACKOFF, MIN_SCALE), 0
            return
        self._finite_updates += 1
        if self._finite_updates == GROWTH_INTERVAL:
            self.factor, self._finite_updates = self.factor * GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of finite updates since it last changed."""
        return {"factor": self.factor, "since": self._finite_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the count of finite updates."""
        self.factor, self._finite_updates = state["factor"], state["since"]


class SkippedUpdates:
    """Counts updates that were skipped because loss or gradient was not finite; several in a row end the run.

    In FP16, overflows at a loss scale above 1 do not count towards the limit: the large scale itself, which starts at
    `INITIAL_SCALE`, may be the cause.
    """

    def __init__(self) -> None:
        self._count = 0
        self._in_a_row = 0

    def observe(self, finite: bool, scale: LossScale, completed_steps: int) -> None:
        """Count one update before it is made or skipped, and adapt the loss scale.

        Raises:
            CannotGoOnError: too many updates in a row were not finite.
        """
        # Read the scale before `scale.update` can halve it: this gradient was computed with the old scale.
        overflow = scale.enabled and scale.factor > 1.0
        scale.update(finite)
        if finite:
            self._in_a_row = 0
            return
        self._count += 1
        self._in_a_row += not overflow
        if self._in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise CannotGoOnError(
                f"train: loss or gradient of {MAX_SKIPPED_IN_A_ROW} updates in a row was not finite, the last after "
                f"step {completed_steps}; the weights are those before them. Lower optimizer.lr, choose another "
                "precision, or look at the rewards"
            )

    def metrics(self) -> dict[str, float]:
        """Return `train/skipped_updates`, the number of updates skipped in the run so far."""
        return {"train/skipped_updates": float(self._count)}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped updates in the run, and the number of consecutive ones up to now."""
        return {"count": self._count, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._count, self._in_a_row = state["count"], state["in_a_row"]
