"""What a task is: a pool of prompts, held-out sets, and a verifier."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.rollout import Prompt


class Task(ABC):
    """Problems whose answers can be checked by a program."""

    @abstractmethod
    def train_prompts(self) -> Sequence[Prompt]:
        """The training pool: finite, in a fixed order."""

    @abstractmethod
    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Held-out prompts by set name; the first set is the default of every fit."""

    @abstractmethod
    def reward(self, prompt: Prompt, completion: str) -> float:
        """The verifier: reward of a completion (text, without special tokens)."""

    def is_correct(self, reward: float) -> bool:
        """Whether a reward counts as a pass: 1 or more."""
        return reward >= 1.0


@dataclass(frozen=True)
class RewardScale:
    """How a verifier's reward r becomes the one that is trained on: incorrect + (correct - incorrect) * r.

    Verifiers give 0 to 1 here, the paper's -1 or 1. Under a normalization it is the same, but for what is added to it:
    a length penalty of up to 1 takes half of the span from a reward of -1 or 1 and all of it from one of 0 or 1.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "RewardScale", "correct": 1.0, "incorrect": 0.0}

    correct: float = 1.0
    incorrect: float = 0.0

    def __post_init__(self) -> None:
        for field in ("correct", "incorrect"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ConfigurationError(f"reward.{field}: {value!r} must be a number")
        if not self.correct > self.incorrect:
            raise ConfigurationError(
                f"reward.correct: {self.correct!r} must be above reward.incorrect, {self.incorrect!r}"
            )

    def scale(self, reward: float) -> float:
        """Of a verifier's reward; unchanged bit for bit under 0 and 1."""
        if self.incorrect == 0.0 and self.correct == 1.0:
            return reward
        return self.incorrect + (self.correct - self.incorrect) * reward


def file_digest(field: str, path: str | Path) -> str:
    """Of a file's bytes: what stands for it in an identity, wherever it lies.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        found = Path(path).expanduser()
        about = found.stat()
        return _digest(found, about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise ConfigurationError(f"{field}: cannot read {str(path)!r} ({error.strerror}); give a file") from error


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Once for a file as it is: a grid asks for every row."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_task(task: Any) -> Task:
    """`task`, if it can be trained on.

    Raises:
        ConfigurationError: it lacks prompts, a held-out set or a verifier.
    """
    for method, what in (
        ("reward", "for a verifier: reward(prompt, completion) -> float"),
        ("is_correct", "is_correct(reward) -> bool"),
        ("train_prompts", "train_prompts() -> prompts"),
        ("eval_sets", "eval_sets() -> {name: held-out prompts}"),
    ):
        if not callable(getattr(task, method, None)):
            raise ConfigurationError(f"task: {type(task).__name__} has no method {what}")
    checked: Task = task
    if not checked.eval_sets() or not all(checked.eval_sets().values()):
        raise ConfigurationError(f"task: {type(task).__name__} has no held-out prompts; pass rates need a set")
    return checked


class RewardError(CannotGoOnError):
    """A verifier raised or returned something that is not a finite number; names the prompt."""


def score(task: Task, prompt: Prompt, completion: str) -> float:
    """A completion's reward.

    Raises:
        RewardError: the verifier raised, or its reward is not a finite number.
    """
    try:
        reward = float(task.reward(prompt, completion))
    except Exception as error:
        raise RewardError(
            f"reward of prompt {prompt.prompt_id!r}: the verifier of {type(task).__name__} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(reward):
        raise RewardError(
            f"reward of prompt {prompt.prompt_id!r}: the verifier of {type(task).__name__} returned {reward}; "
            "a reward must be a finite number"
        )
    return reward
