"""Lightning datamodule of a run: a task, and the batches that the policy itself generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_scalerl.callbacks.predict import PREDICT
from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.composition import build, compose, use_folders
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.task.base import Task, check_task
from lightning_scalerl.task.beside import TaskWithEvaluationSets
from lightning_scalerl.task.dataset import DatasetTask


class RolloutDataModule(LightningDataModule):
    """Training data that is sampled from the current policy.

    Args:
        task: a `Task`, or the name of one in `conf/task/`.
        seed: seed of the prompt order and of sampling.
        config_dir: your own folder, in which tasks are looked up as well (docs/guide/extend.md).
        predict: prompts for `Trainer.predict`: texts, lists of chat messages, rows in the format of a `DatasetTask`, or
            `Prompt`s; None for the first held-out set. A text that equals a prompt of the task is graded as that
            prompt.
        samples: completions per prompt in `Trainer.predict`.

    Raises:
        ConfigurationError: the task is unknown or lacks prompts or a verifier, or an entry of `predict` has none of
            these forms.
    """

    def __init__(
        self,
        task: str | Task,
        seed: int = 0,
        config_dir: str | Path | None = None,
        predict: Sequence[Any] | None = None,
        samples: int = 1,
    ) -> None:
        super().__init__()
        self.samples = whole_number("samples", samples)
        if isinstance(task, list | tuple | Mapping) or hasattr(task, "column_names"):
            raise ConfigurationError(
                "task: rows say nothing of how they are graded; give RolloutDataModule(DatasetTask(train=rows, "
                "heldout=0.1, rewards=my_reward)), with DatasetTask of lightning_scalerl"
            )
        self._predict = predict
        folders = use_folders(() if config_dir is None else (config_dir,))
        parsed = build(compose([f"task={task}"], folders), "task") if isinstance(task, str) else task
        self.task = self._trained = check_task(parsed, evaluated=False)
        self.seed = whole_number("seed", seed, 0)

    def set_evaluation_sets(self, sets: Mapping[str, Task]) -> None:
        """Add held-out sets of other tasks to the task's own; they replace the sets of an earlier call.

        Raises:
            ConfigurationError: a task has no held-out prompts, or two sets have the same name.
        """
        self.task = TaskWithEvaluationSets(self._trained, sets) if sets else self._trained

    def train_dataloader(self) -> _StreamLoader:
        """Return the loader of training batches from the module's rollout stream."""
        return _StreamLoader(self)

    def val_dataloader(self) -> _HeldOutLoader:
        """Return a loader for `Trainer.validate` and `Evaluate`. Its only batch is the list of held-out sets' names."""
        return _HeldOutLoader(list(self.task.eval_sets()))

    def predict_dataloader(self) -> _IndexLoader:
        """Return a loader of the indices of the prompts for `Trainer.predict`."""
        return _IndexLoader(len(self.predicted.prompts))

    @cached_property
    def predicted(self) -> PredictedTask:
        """The task with the prompts of `Trainer.predict` as its held-out set.

        Raises:
            ConfigurationError: a prompt has none of the valid forms.
        """
        if self._predict is None and not self.task.eval_sets():
            raise ConfigurationError("predict: the task has no held-out prompts; give predict=[...], such as texts")
        if self._predict is None:
            return PredictedTask(self.task, list(next(iter(self.task.eval_sets().values()))), frozenset())
        inputs = self._predict
        if isinstance(inputs, str) or not len(inputs):
            raise ConfigurationError(f"predict: {inputs!r} must be a list of prompts, such as ['What is 2 + 2?']")
        pools = [self.task.train_prompts(), *self.task.eval_sets().values()]
        known = {text: prompt for pool in pools for prompt in pool for text in (prompt.text, prompt.question) if text}
        parsed = [self._prompt(number, entry, known) for number, entry in enumerate(inputs)]
        blank = [number for number, (prompt, _) in enumerate(parsed) if not prompt.text.strip()]
        if blank:
            raise ConfigurationError(f"predict: entry {blank[0]} is blank; give a text to complete")
        prompts = [replace(prompt, prompt_id=f"predict {number}") for number, (prompt, _) in enumerate(parsed)]
        unknown = frozenset(prompt.prompt_id for prompt, (_, graded) in zip(prompts, parsed, strict=True) if not graded)
        return PredictedTask(self.task, prompts, unknown)

    def _prompt(self, number: int, entry: Any, known: Mapping[str, Prompt]) -> tuple[Prompt, bool]:
        """Return the prompt of one entry, and whether the task can grade completions of it."""
        if isinstance(entry, Prompt):
            return entry, True
        if isinstance(entry, str):
            return known.get(entry, Prompt("", entry)), entry in known
        if isinstance(entry, Mapping) and isinstance(self._trained, DatasetTask):
            return self._trained.read([entry])[0], True
        if isinstance(entry, list | tuple) and entry and all(isinstance(message, Mapping) for message in entry):
            messages = tuple(dict(message) for message in entry)
            return Prompt("", str(messages[-1].get("content") or ""), messages=messages), False
        raise ConfigurationError(
            f"predict: entry {number}, {str(entry)[:60]!r}, must be a text, a list of messages, or a row of a "
            "DatasetTask's form"
        )


class PredictedTask:
    """A task whose only held-out set is the prompts of `Trainer.predict`. Other attributes are those of `task`.

    `unknown` has the ids of prompts whose completions the task cannot grade.
    """

    def __init__(self, task: Task, prompts: Sequence[Prompt], unknown: frozenset[str]) -> None:
        self._task, self.prompts, self.unknown = task, prompts, unknown

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return the prompts as a set named `predict`."""
        return {PREDICT: self.prompts}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class _IndexLoader:
    """Loader of prompt indices, one per batch: all prompts are sampled together and returned one by one."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        yield from range(self._count)


class _StreamLoader:
    """Loader of training batches for Lightning's loop.

    The loader has a length, because Lightning prefetches one batch from a loader without a length. Every batch would
    then be a step staler than the async mode says, and a checkpoint would lose the prefetched batch.
    """

    def __init__(self, datamodule: RolloutDataModule) -> None:
        self._datamodule = datamodule

    def __len__(self) -> int:
        trainer = self._datamodule.trainer
        return max(1, trainer.max_steps if trainer is not None else 1)

    def __iter__(self) -> Iterator[TrainBatch]:
        module: Any = getattr(self._datamodule.trainer, "lightning_module", None)
        if not hasattr(module, "next_batch"):
            raise ConfigurationError(
                f"datamodule: RolloutDataModule needs a ScaleRL module, got {type(module).__name__}"
            )
        for _ in range(len(self)):
            batch = module.next_batch()
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, object]:
        """Return an empty state: the module's registry saves the stream. Lightning warns if this method is missing."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Do nothing: the module's registry restores the stream's state."""


class _HeldOutLoader:
    """Loader of a single batch: the names of the held-out sets, which `ScaleRL.validation_step` evaluates."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[str]]:
        yield self._names
