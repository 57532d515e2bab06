"""Attributes of `ScaleRL` that the files of this folder read and set.

They are attributes of the module because Lightning, callbacks and users look for them there. A comment above each
group says which file sets it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from lightning.pytorch import Trainer

from lightning_scalerl.callbacks.run import Run
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.measure.truncation_alarm import TruncationAlarm
from lightning_scalerl.model.files import WeightFiles
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.model.value import ValueModel
from lightning_scalerl.session.continuation import Continuation
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.models import Reference
from lightning_scalerl.session.records import Records
from lightning_scalerl.session.sampling import Sampling
from lightning_scalerl.stream.drivers import Driver
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.update.health import HealthWatch
from lightning_scalerl.update.loss_scale import LossScale, SkippedUpdates
from lightning_scalerl.update.terms import Term


class Parts(Run, Protocol):
    """The module of a run, including all that `run.Run` exposes to callbacks."""

    # Set by the constructor (`models.make`).
    tokenizer: Any
    stop_tokens: list[int]
    arguments: dict[str, Any]
    reference_model: Reference
    continuation: Continuation
    records: Records
    files: WeightFiles | None
    read_whole: str | None

    # Set by `setup` on every rank.
    memory: str
    critic: ValueModel | None
    terms: list[Term]
    loss_scale: LossScale
    skipped: SkippedUpdates
    health: HealthWatch
    optimizer: torch.optim.Optimizer | None
    sigterm_handler: Any

    # Set by `setup` on rank 0. On other ranks `data_path` is None, and the others do not exist.
    data_path: DataPath | None
    sampling: Sampling
    prompts: PromptSource
    generator: Generator
    driver: Driver
    alarm: TruncationAlarm

    # Attributes of Lightning's module. `_trainer` is None until a Trainer is attached.
    _trainer: Trainer | None

    @property
    def trainer(self) -> Trainer:
        """Trainer that the module is attached to."""
        ...

    @property
    def device_mesh(self) -> Any:
        """Device mesh of a strategy that shards or splits the model."""
        ...

    @property
    def reference(self) -> Policy | None:
        """Frozen reference model of axis `kl`, or None."""
        ...

    @property
    def log_dict(self) -> Callable[..., None]:
        """Method with which Lightning's modules log metrics."""
        ...

    def optimizers(self) -> Any:
        """Return the optimizer in Lightning's wrapper."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all weights by name."""
        ...

    def save_hyperparameters(self, *given: Any) -> None:
        """Store values as hyper-parameters, for loggers and checkpoints."""
        ...
