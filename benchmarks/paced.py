"""Generator and trainer whose steps take as long as a cost model says, in real time, however busy the machine is.

Pauses do not compete for cores: idle shares of live runs can then be compared with what was foretold of them.
"""

from __future__ import annotations

import time
from typing import Any

import lightning

from lightning_scalerl import TorchGenerator, TrainBatch
from lightning_scalerl.generator.base import StepReport


class PacedGenerator(TorchGenerator):
    """Samples as the `torch` generator does, and waits to the end of the time of each step.

    Args:
        decode_s, decode_rollout_s: seconds of a decoding step, and of each rollout in it.
        given: arguments of the generator.
    """

    def __init__(self, *, decode_s: float, decode_rollout_s: float, **given: Any) -> None:
        super().__init__(**given)
        self._decode_s, self._decode_rollout_s = decode_s, decode_rollout_s

    def step(self) -> StepReport:
        """Sample a token of everything in flight, no sooner than the pace allows."""
        began = time.monotonic()
        report = super().step()
        if report.decoded_tokens:
            paced_s = self._decode_s + report.decoded_tokens * self._decode_rollout_s
            time.sleep(max(0.0, began + paced_s - time.monotonic()))
        return report


class PacedTrainer(lightning.Callback):
    """Callback that makes every optimizer step take so many seconds at least."""

    def __init__(self, train_s: float) -> None:
        self._train_s, self._began = train_s, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Note when the step begins."""
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        """Wait for the end of its time."""
        if isinstance(batch, TrainBatch):
            time.sleep(max(0.0, self._began + self._train_s - time.monotonic()))
