"""Records of a run: measured metrics for every logger, `Recorder` and monitoring callback of the Trainer.

Rank 0 measures the metrics. Each record also contains all compute axes and the number of completed steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_scalerl.callbacks.base import Recorder
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.session.data_path import DataPath

Measure = Callable[[], dict[str, Any]]


class Records:
    """Writer of a run's records. `latest` is the last value of every metric; checkpoints store it."""

    # Set by `begin`.
    _trainer: Trainer
    _ranks: Ranks
    _data_path: DataPath | None

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._logged: tuple[int, set[str]] = (-1, set())

    def begin(self, trainer: Trainer, ranks: Ranks, data_path: DataPath | None) -> None:
        """Set the fit whose metrics are recorded, and let its callbacks monitor the latest metrics."""
        self._trainer, self._ranks, self._data_path = trainer, ranks, data_path
        self._logged = (-1, set())
        trainer.callback_metrics.update(_tensors(self.latest))

    def record(self, kind: str, measure: Measure) -> dict[str, float]:
        """Measure on rank 0, send the metrics and all compute axes to every logger and `Recorder`, and return them.

        All ranks call it, because every rank's callbacks may monitor the metrics. Lightning's `log` is not used: at the
        end of an epoch it would write values from the epoch's beginning.

        Args:
            kind: "train" or "eval".
            measure: returns the metrics by name; called on rank 0 only.
        """
        values = self._ranks.share(partial(self._measure_and_write, kind, measure))
        self.latest |= values
        tensors = _tensors(values)
        self._trainer.callback_metrics.update(tensors)
        self._trainer.logged_metrics.update(tensors)
        return values

    def _measure_and_write(self, kind: str, measure: Measure) -> dict[str, float]:
        assert self._data_path is not None
        trainer, step = self._trainer, self._data_path.stream.completed_steps
        values = {name: float(value) for name, value in {**measure(), **self._data_path.compute()}.items()}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Recorder):
                callback.on_record(kind, step, values)
        log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if kind == "eval" or (log_every_n_steps and step % log_every_n_steps == 0):
            # Both the train and the eval record of a step contain the compute axes; a logger gets each metric once per
            # step.
            self._logged = self._logged if self._logged[0] == step else (step, set())
            new_values = {name: value for name, value in values.items() if name not in self._logged[1]}
            self._logged[1].update(new_values)
            for logger in trainer.loggers:
                logger.log_metrics(new_values, step)
                logger.save()
        return values


def _tensors(values: dict[str, float]) -> dict[str, Tensor]:
    """Convert metrics to tensors, which Lightning's callbacks expect; FP64 avoids rounding."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
