"""Parts that `ScaleRL` holds, as the files of this folder read and set them.

The module has them as attributes, since Lightning, callbacks and users look for them there; who sets what is said
beside it.
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
    """The module of a run, with all that `run.Run` shows to callbacks."""

    # By the constructor (`models.make`).
    tokenizer: Any
    stop_tokens: list[int]
    arguments: dict[str, Any]
    reference_model: Reference
    continuation: Continuation
    records: Records
    files: WeightFiles | None
    read_whole: str | None

    # By `setup`, on every rank.
    memory: str
    critic: ValueModel | None
    terms: list[Term]
    loss_scale: LossScale
    skipped: SkippedUpdates
    health: HealthWatch
    optimizer: torch.optim.Optimizer | None
    sigterm_handler: Any

    # By `setup`, on rank 0; on the others `data_path` is None, and the rest is not there.
    data_path: DataPath | None
    sampling: Sampling
    prompts: PromptSource
    generator: Generator
    driver: Driver
    alarm: TruncationAlarm

    # Of Lightning's module: None as long as no Trainer has it.
    _trainer: Trainer | None

    @property
    def trainer(self) -> Trainer:
        """Trainer that has the module."""
        ...

    @property
    def device_mesh(self) -> Any:
        """Mesh of the ranks of a strategy that shards or splits the model."""
        ...

    @property
    def reference(self) -> Policy | None:
        """Frozen reference model of axis `kl`, or None."""
        ...

    @property
    def log_dict(self) -> Callable[..., None]:
        """Method by which Lightning's modules log metrics."""
        ...

    def optimizers(self) -> Any:
        """Return the optimizer, as Lightning wraps it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all weights by name."""
        ...

    def save_hyperparameters(self, *given: Any) -> None:
        """Keep values as hyper-parameters, for loggers and checkpoints."""
        ...
