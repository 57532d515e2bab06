"""Lightning datamodule of a run: a task, and the stream of batches that the policy itself produces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, compose, use_folders
from lightning_scalerl.rollout import TrainBatch
from lightning_scalerl.task.base import Task, check_task


class RolloutDataModule(LightningDataModule):
    """Training data that is sampled from the current policy.

    Args:
        task: a `Task`, or the name of one in `conf/task/`.
        seed: of prompt order and sampling.
        config_dir: a folder of yours where tasks are looked for too (docs/guide/extend.md).

    Raises:
        ConfigurationError: an unknown task, or one without prompts, held-out set or verifier.
    """

    def __init__(self, task: str | Task, seed: int = 0, config_dir: str | Path | None = None) -> None:
        super().__init__()
        folders = use_folders(() if config_dir is None else (config_dir,))
        self.task = check_task(build(compose([f"task={task}"], folders), "task") if isinstance(task, str) else task)
        self.seed = seed

    def train_dataloader(self) -> _StreamLoader:
        """Return the loader of batches from the module's rollout stream."""
        return _StreamLoader(self)

    def val_dataloader(self) -> _HeldOutLoader:
        """Return a loader of one batch, the held-out sets' names: for `Trainer.validate` and fits that evaluate."""
        return _HeldOutLoader(list(self.task.eval_sets()))


class _StreamLoader:
    """Loader of training batches, over which Lightning iterates.

    It has a length because Lightning reads one batch ahead of a loader without one: every batch would be a step
    staler than the mode says, and a checkpoint would lose the batch that was read ahead.
    """

    def __init__(self, owner: RolloutDataModule) -> None:
        self._owner = owner

    def __len__(self) -> int:
        trainer = self._owner.trainer
        return max(1, trainer.max_steps if trainer is not None else 1)

    def __iter__(self) -> Iterator[TrainBatch]:
        module: Any = getattr(self._owner.trainer, "lightning_module", None)
        if not hasattr(module, "next_batch"):
            raise ConfigurationError(
                f"datamodule: RolloutDataModule needs a ScaleRL module, got {type(module).__name__}"
            )
        for _ in range(len(self)):
            yield module.next_batch()

    def state_dict(self) -> dict[str, object]:
        """Return nothing: the module's registry holds the stream's state. Lightning warns on resume without this."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Do nothing: the module's registry restores the stream."""


class _HeldOutLoader:
    """Loader of one batch: the names of the held-out sets, which `ScaleRL.validation_step` evaluates together."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[str]]:
        yield self._names
