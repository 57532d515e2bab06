"""Base class of tasks: a pool of prompts, held-out sets, and a verifier."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    """Problems whose answers a program can check.

    Attributes:
        trusted: the verifier is quick and never hangs: it may run in the trainer's own process. All others run in
            processes of their own, which are sent the grader by value and share nothing with the trainer's.
    """

    trusted: bool = False

    @abstractmethod
    def train_prompts(self) -> Sequence[Prompt]:
        """Return the training pool: finite, in a fixed order."""

    @abstractmethod
    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return held-out prompts by set name; the first set is the default of every fit."""

    @abstractmethod
    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the verifier's reward of a completion (text, without special tokens); None to abstain.

        What it raises is an error of the infrastructure, never a reward of 0.
        """

    def grader(self) -> Grader:
        """Return the grader that is sent to verifier processes; by default one that calls `reward`."""
        return TaskGrader(self)

    def known(self) -> Sequence[Known]:
        """Return a few completions known to be right or wrong, which the verifier is tried on before the first step."""
        return ()

    def notes(self) -> Sequence[str]:
        """Return remarks on the task's data to print at the start, a line each."""
        return ()

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the names of the rewards in each weighted sum that it grades by, the one that decides a pass first.

        A task that grades by single rewards, whose grader gives no `Grade.terms`, has none.
        """
        return ()

    def identity(self) -> Any:
        """Return what, beside its class and its prompts, tells this task from another; None for nothing."""
        return None

    def is_correct(self, reward: float) -> bool:
        """Return whether a reward counts as a pass: 1 or more."""
        return reward >= 1.0


class PoolTask(Task):
    """Base of the tasks whose prompts are all there once it is made; `__init__` sets `_train` and `_heldout`."""

    _train: Sequence[Prompt]
    _heldout: Mapping[str, Sequence[Prompt]]

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the training pool, in the order in which it was read or drawn."""
        return self._train

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return the held-out prompts, by the name of their set."""
        return self._heldout


@dataclass(frozen=True)
class TaskGrader:
    """Grader that calls a task's own `reward`."""

    task: Any

    def grade(self, sample: Sample) -> Grade:
        """Grade the whole completion, thinking included."""
        return Grade(self.task.reward(sample.prompt, sample.completion))


@dataclass(frozen=True)
class RewardScale:
    """Linear map from a verifier's reward r to the one trained on: incorrect + (correct - incorrect) * r.

    Verifiers give 0 to 1 here, the paper's -1 or 1. Under a normalization this makes no difference, except for what is
    added to the reward: a length penalty of up to 1 is half of the span from -1 to 1, and all of it from 0 to 1.
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
        """Return the reward to train on; unchanged bit for bit under 0 and 1."""
        if self.incorrect == 0.0 and self.correct == 1.0:
            return reward
        return self.incorrect + (self.correct - self.incorrect) * reward


def file_digest(field: str, path: str | Path) -> str:
    """Return a file's SHA-256, which stands for it in a run's identity, wherever the file lies.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        found = Path(path).expanduser()
        about = found.stat()
        return _digest(found, about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise ConfigurationError(f"{field}: cannot read {str(path)!r} ({error.strerror}); give a file") from error


def contents(parameters: Mapping[str, Any], content_of: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return what stands for a task's training rows and held-out sets in a run's identity.

    Args:
        parameters: of the task; `train` says where the rows are, `heldout` likewise by the name of a set.
        content_of: returns the content of one of them, given the field for errors and where it is.
    """
    heldout = parameters.get("heldout")
    named = heldout.items() if isinstance(heldout, Mapping) else ()
    return {
        "train": content_of("task.train", parameters.get("train")),
        "heldout": {name: content_of(f"task.heldout.{name}", given) for name, given in named},
    }


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Return the digest, cached by size and time of change: a grid asks for it with every member."""
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
    """Return whether a score counts as a pass: by its grader if that says, else by the task's rule."""
    return task.is_correct(outcome.reward) if outcome.correct is None else outcome.correct


def check_task(task: Any, evaluated: bool = True) -> Task:
    """Return `task` if it has all that training needs.

    Args:
        task: what a user has given.
        evaluated: whether it must have a held-out set, as a member of a study must: its curve is one of pass rates.

    Raises:
        ConfigurationError: it lacks prompts, a verifier or a held-out set.
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
    sets = checked.eval_sets()
    if not all(sets.values()) or (evaluated and not sets):
        raise ConfigurationError(f"task: {type(task).__name__} has no held-out prompts; pass rates need a set")
    return checked
