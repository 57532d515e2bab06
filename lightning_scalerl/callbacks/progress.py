"""Progress bar of a run: steps, pass rate, reward, compute spent, time left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar

from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.callbacks.run import run_of
from sweeps.terminal import Bar, device_time


class StepProgress(Recorder, ProgressBar):
    """Progress bar over optimizer steps, instead of Lightning's own bar, which counts epochs.

    On a terminal it is a bar, elsewhere a line every half minute. `Trainer(enable_progress_bar=False)` turns it off.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._bar: Bar | None = None
        self._shown: dict[str, str] = {}

    def enable(self) -> None:
        """Turn the bar on. Called by Lightning."""
        self._enabled = True

    def disable(self) -> None:
        """Turn the bar off. Lightning calls this on all ranks but the first."""
        self._enabled = False

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Open the bar at the step from which the run resumes."""
        step = run_of(pl_module).completed_steps
        self._close()
        if self._enabled and step < trainer.max_steps:
            self._shown = {}
            self._bar = Bar("training", trainer.max_steps, done=step)

    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar by a training step, or show an evaluation's pass rate."""
        if self._bar is None:
            return
        if kind == "eval":
            name, rate = next((key, value) for key, value in metrics.items() if key.endswith("/pass_rate"))
            self._shown["eval"] = f"{name.split('/')[1]} {rate:.3f} (step {step})"
        else:
            shown = {"pass rate": "train/pass_rate", "reward": "train/reward"}
            # A batch in which no completion has a score has neither metric.
            parts = [f"{name} {_short(metrics[key])}" for name, key in shown.items() if key in metrics]
            self._shown["train"] = ", ".join(parts) or "no completion has a score"
        spent = device_time(metrics["compute/device_hours"])
        self._shown["spent"] = f"{metrics['compute/flops']:.2e} FLOPs, {spent}"
        order = ("eval", "train", "spent")
        self._bar.update(step, *(self._shown[part] for part in order if part in self._shown))

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Close the bar. Its last state stays on the terminal."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """Close the bar, so that it does not overwrite the error message."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(value: float) -> str:
    """Format a value with three decimals, or a large one with six significant digits, since rewards have no limit."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.6g}"
