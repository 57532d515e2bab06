"""What a task is: a pool of prompts, held-out sets, and a verifier."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.verify.grade import Grade, Grader, Known, Outcome, Sample

if TYPE_CHECKING:
    from lightning_scalerl.axes.curriculum import Curriculum


class Task(ABC):
    """Problems whose answers can be checked by a program.

    Attributes:
        trusted: the verifier is quick and never hangs: it may run in the trainer's own process. All others run in
            processes of their own, which are sent the grader by value and share nothing with the trainer's.
    """

    trusted: bool = False

    @abstractmethod
    def train_prompts(self) -> Sequence[Prompt]:
        """The training pool: finite, in a fixed order."""

    @abstractmethod
    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Held-out prompts by set name; the first set is the default of every fit."""

    @abstractmethod
    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """The verifier: reward of a completion (text, without special tokens); None to abstain.

        What it raises is an error of the infrastructure, never a reward of 0.
        """

    def grader(self) -> Grader:
        """What grades completions, in whatever process; `reward` unless a task knows better."""
        return TaskGrader(self)

    def known(self) -> Sequence[Known]:
        """Completions known to be right or wrong, that the verifier is tried on before the first step; a handful."""
        return ()

    def notes(self) -> Sequence[str]:
        """What is to be said of it at the start, a line each."""
        return ()

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the names of the rewards in each weighted sum that it grades by, the one that decides a pass first.

        A task that grades by single rewards, whose grader gives no `Grade.terms`, has none.
        """
        return ()

    def is_correct(self, reward: float) -> bool:
        """Whether a reward counts as a pass: 1 or more."""
        return reward >= 1.0


@dataclass(frozen=True)
class TaskGrader:
    """A task's own `reward`."""

    task: Any

    def grade(self, sample: Sample) -> Grade:
        """Of the whole completion."""
        return Grade(self.task.reward(sample.prompt, sample.completion))


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


def check_curriculum(task: Task, curriculum: Curriculum) -> None:
    """Refuse a curriculum that weighs rewards which the task does not have.

    Raises:
        ConfigurationError: which, in one line.
    """
    problem = curriculum.check_rewards(task.reward_sums())
    if problem:
        raise ConfigurationError(problem)


def passes(task: Task, outcome: Outcome) -> bool:
    """Whether a score counts as a pass: as its grader says, else as the task makes of its reward."""
    return task.is_correct(outcome.reward) if outcome.correct is None else outcome.correct


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
        ("grader", "grader(); derive it from lightning_scalerl.Task"),
    ):
        if not callable(getattr(task, method, None)):
            raise ConfigurationError(f"task: {type(task).__name__} has no method {what}")
    checked: Task = task
    if not checked.eval_sets() or not all(checked.eval_sets().values()):
        raise ConfigurationError(f"task: {type(task).__name__} has no held-out prompts; pass rates need a set")
    return checked
