"""Handling of gradients that are not finite: dynamic loss scaling for FP16, and skipped updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import CannotGoOnError

# Defaults of torch.amp.GradScaler.
START, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
SMALLEST = 2.0**-14
MOST_IN_A_ROW = 3


class LossScale:
    """Dynamic loss scaling: gradients below FP16's smallest number, 6e-8, would be lost, so the loss is scaled up.

    The factor is halved after a gradient that overflowed, and doubled after `INTERVAL` that did not.

    Args:
        acts: whether the loss is scaled, as in FP16; else the factor is 1 and stays so.
    """

    def __init__(self, acts: bool) -> None:
        self.acts = acts
        self.factor = START if acts else 1.0
        self._since = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, for the backward pass."""
        return loss * self.factor if self.acts else loss

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.acts:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(self.factor)

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update whose gradient was finite, or was not."""
        if not self.acts:
            return
        if not finite:
            self.factor, self._since = max(self.factor * BACKOFF, SMALLEST), 0
            return
        self._since += 1
        if self._since == INTERVAL:
            self.factor, self._since = self.factor * GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of finite updates since it last changed."""
        return {"factor": self.factor, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the count of finite updates."""
        self.factor, self._since = state["factor"], state["since"]


class SkippedUpdates:
    """Counts updates whose loss or gradient was not finite: they are skipped, and several in a row end the run.

    In FP16 overflows at a scale above 1 do not count as in a row: the scale, which begins at `START`, may be the cause.
    """

    def __init__(self) -> None:
        self._count = 0
        self._in_a_row = 0

    def observe(self, finite: bool, scale: LossScale, completed_steps: int) -> None:
        """Count one update, before it would be made.

        Raises:
            CannotGoOnError: too many in a row.
        """
        # By the scale that this gradient was computed with: `update` halves it.
        overflow = scale.acts and scale.factor > 1.0
        scale.update(finite)
        if finite:
            self._in_a_row = 0
            return
        self._count += 1
        self._in_a_row += not overflow
        if self._in_a_row == MOST_IN_A_ROW:
            raise CannotGoOnError(
                f"train: loss or gradient of {MOST_IN_A_ROW} updates in a row was not finite, the last after step "
                f"{completed_steps}; the weights are those before them. Lower optimizer.lr, choose another precision, "
                "or look at the rewards"
            )

    def metrics(self) -> dict[str, float]:
        """Return `train/skipped_updates`, the number skipped in the run so far."""
        return {"train/skipped_updates": float(self._count)}

    def state_dict(self) -> dict[str, Any]:
        """Return the total count and the current count in a row."""
        return {"count": self._count, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the total count and the current count in a row."""
        self._count, self._in_a_row = state["count"], state["in_a_row"]
