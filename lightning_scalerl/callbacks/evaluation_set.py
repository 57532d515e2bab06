"""Entries of `evaluation.sets`: held-out sets of other tasks with settings of their own. Nothing is trained on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.task.base import Task

# Keys that an entry of `evaluation.sets` may have besides its task.
_SETTINGS = ("samples", "every_n_steps", "temperature", "max_new_tokens")


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out sets of another task. They are evaluated, but not trained on.

    If a setting is None, the value of `Evaluate` (samples, steps) or of the group `context` is used.

    Args:
        task: task with the prompts, their instruction and their grader. It needs no training prompts.
        samples: completions per prompt.
        every_n_steps: optimizer steps between evaluations. Initial and final weights are always evaluated.
        temperature: sampling temperature; 0 always takes the most likely token.
        max_new_tokens: largest number of tokens in a completion, at most `context.max_new_tokens`.

    Raises:
        ConfigurationError: a value is invalid.
    """

    task: Task
    samples: int | None = None
    every_n_steps: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None

    def check(self, name: str) -> None:
        """Check all values. In errors the set is named `name`, its key in `evaluation.sets`."""
        field = f"evaluation.sets.{name}"
        if not callable(getattr(self.task, "eval_sets", None)):
            raise ConfigurationError(f"{field}.task: {type(self.task).__name__} is no task; give one of conf/task")
        for key in ("samples", "every_n_steps", "max_new_tokens"):
            if (value := getattr(self, key)) is not None:
                whole_number(f"{field}.{key}", value)
        is_number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if self.temperature is not None and not (is_number and 0 <= self.temperature < math.inf):
            raise ConfigurationError(f"{field}.temperature: {self.temperature!r} must be a number, 0 or more")


def evaluation_set(name: str, entry: Any) -> EvaluationSet:
    """Convert an entry of `evaluation.sets` to an `EvaluationSet`, and check it.

    Raises:
        ConfigurationError: the name or a value is invalid.
    """
    field = f"evaluation.sets.{name}"
    if not str(name).replace("_", "").isalnum():
        raise ConfigurationError(f"{field}: a name must be of letters, digits and _: metrics bear it")
    if isinstance(entry, Mapping):
        unknown = [key for key in entry if key not in ("task", *_SETTINGS)]
        if unknown or "task" not in entry:
            raise ConfigurationError(
                f"{field}: {', '.join(map(str, unknown)) or 'no task'}; an entry is a task and perhaps "
                f"{', '.join(_SETTINGS)}"
            )
        entry = EvaluationSet(**entry)
    evaluation = entry if isinstance(entry, EvaluationSet) else EvaluationSet(entry)
    evaluation.check(name)
    return evaluation
