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
from lightning_scalerl.rollouts.grade import Grade, Grader, Known, Outcome, Sample
from lightning_scalerl.rollouts.prompt import Prompt

if TYPE_CHECKING:
    from lightning_scalerl.axes.curriculum import Curriculum


class Task(ABC):
    """Problems whose answers a program can check.

    Attributes:
        trusted: whether the verifier may run in the trainer's process, because it is quick and never hangs. Other
            verifiers run in separate processes. These receive a pickled copy of the grader and share no state with the
            trainer.
    """

    trusted: bool = False

    @abstractmethod
    def train_prompts(self) -> Sequence[Prompt]:
        """Return the training pool, finite and in a fixed order."""

    @abstractmethod
    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return held-out prompts by set name. Fits use the first set by default."""

    @abstractmethod
    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the verifier's reward for a completion (text without special tokens), or None to abstain.

        An exception counts as an infrastructure error, never as a reward of 0.
        """

    def stated(self, completion: str) -> str | None:
        """Return the answer in a completion, for majority votes (`Grade.answer`); None (no votes) by default."""
        return None

    def grader(self) -> Grader:
        """Return the grader to send to verifier processes. The default one calls `reward`."""
        return TaskGrader(self)

    def known(self) -> Sequence[Known]:
        """Return a few completions known to be right or wrong; the verifier is tested on them before the first step."""
        return ()

    def notes(self) -> Sequence[str]:
        """Return remarks on the task's data, one line each, to print at the start."""
        return ()

    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Return the names of the rewards in each weighted sum of rewards that the task uses.

        The reward that decides a pass comes first in each sum. Empty if the task uses single rewards, without
        `Grade.terms`.
        """
        return ()

    def identity(self) -> Any:
        """Return values that identify the task in addition to its class and prompts; None for nothing."""
        return None

    def is_correct(self, reward: float) -> bool:
        """Return whether a reward counts as a pass: 1 or more."""
        return reward >= 1.0


class PoolTask(Task):
    """Base of tasks that load all prompts at construction: `__init__` sets `_train` and `_heldout`."""

    _train: Sequence[Prompt]
    _heldout: Mapping[str, Sequence[Prompt]]

    def train_prompts(self) -> Sequence[Prompt]:
        """Return the training pool in the order in which it was read or drawn."""
        return self._train

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Return the held-out prompts by set name."""
        return self._heldout


@dataclass(frozen=True)
class TaskGrader:
    """Grader that calls the method `reward` of a task."""

    task: Any

    def grade(self, sample: Sample) -> Grade:
        """Grade the whole completion, thinking included."""
        completion = sample.completion
        return Grade(self.task.reward(sample.prompt, completion), answer=self.task.stated(completion))


@dataclass(frozen=True)
class RewardScale:
    """Linear map from a verifier's reward r to the training reward: incorrect + (correct - incorrect) * r.

    Verifiers of this project return 0 to 1; the ScaleRL paper (arXiv 2510.13786) uses -1 and 1. If advantages are
    normalized, the scale matters only when something is added to the reward. For example, a length penalty of 1 is half
    of the range from -1 to 1, but the whole range from 0 to 1.
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

    @property
    def slope(self) -> float:
        """Change of the training reward per unit of the verifier's reward."""
        return self.correct - self.incorrect

    def scale(self, reward: float) -> float:
        """Return the training reward; with the default scale of 0 to 1, exactly the verifier's reward."""
        if self.incorrect == 0.0 and self.correct == 1.0:
            return reward
        return self.incorrect + self.slope * reward


@dataclass(frozen=True)
class NoReward(RewardScale):
    """Training reward of 0 for every completion, regardless of the verifier. Pass rates are recorded as usual.

    It is for distillation, where the KL divergence from a teacher (axis `kl`) is the only training signal.
    """

    @property
    def slope(self) -> float:
        """Return 0: the training reward does not depend on the verifier's."""
        return 0.0

    def scale(self, reward: float) -> float:
        """Return 0 for any reward."""
        return 0.0


def file_digest(field: str, path: str | Path) -> str:
    """Return a file's SHA-256, which represents the file in a run's identity in place of its path.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    try:
        expanded = Path(path).expanduser()
        stat = expanded.stat()
        return _digest(expanded, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigurationError(f"{field}: cannot read {str(path)!r} ({error.strerror}); give a file") from error


def identity_contents(parameters: Mapping[str, Any], content_of: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return values that represent a task's training rows and held-out sets in a run's identity.

    Args:
        parameters: the task's parameters. `train` is the location of the training rows, and `heldout` maps set names to
            locations.
        content_of: function of (field for errors, location) that returns such a value, for instance a digest.
    """
    heldout = parameters.get("heldout")
    heldout_sets = heldout.items() if isinstance(heldout, Mapping) else ()
    train = parameters.get("train")
    return {
        "train": None if train is None else content_of("task.train", train),
        "heldout": {name: content_of(f"task.heldout.{name}", location) for name, location in heldout_sets},
    }


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Return the digest of a file. It is cached by size and modification time, as every member of a grid needs it."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_curriculum(task: Task, curriculum: Curriculum) -> None:
    """Refuse a curriculum that sets weights of rewards which the task does not have.

    Raises:
        ConfigurationError: the task lacks a reward of the curriculum; the error names the reward.
    """
    problem = curriculum.check_rewards(task.reward_sums())
    if problem:
        raise ConfigurationError(problem)


def passes(task: Task, outcome: Outcome) -> bool:
    """Return whether a score counts as a pass: the grader's decision, or if it made none, the task's `is_correct`."""
    if outcome.correct is not None:
        return outcome.correct
    passed: bool | None = task.is_correct(outcome.reward)
    if passed is None:  # a missing `return`
        raise ConfigurationError(
            f"task: {type(task).__name__}.is_correct({outcome.reward:g}) returned None; return whether it is a pass"
        )
    return passed


def check_task(task: Any, evaluated: bool = True) -> Task:
    """Return `task` if it has everything that training needs.

    Args:
        task: object from the user.
        evaluated: whether the task must have a held-out set. Members of a study need one, because their curves are pass
            rates on it.

    Raises:
        ConfigurationError: the task lacks prompts, a verifier or a held-out set, or has them in another form.
    """
    for method, description in (
        ("reward", "for a verifier: reward(prompt, completion) -> float"),
        ("is_correct", "is_correct(reward) -> bool"),
        ("train_prompts", "train_prompts() -> prompts"),
        ("eval_sets", "eval_sets() -> {name: held-out prompts}"),
        ("grader", "grader(); derive it from lightning_scalerl.Task"),
    ):
        if not callable(getattr(task, method, None)):
            raise ConfigurationError(f"task: {type(task).__name__} has no method {description}")
    checked: Task = task
    if not _is_list(checked.train_prompts()):
        raise ConfigurationError(f"task: {type(task).__name__}.train_prompts() must return a list of prompts")
    if not checked.train_prompts():
        raise ConfigurationError(
            f"task.train: needs a value; {type(task).__name__} has no training prompts, as a set in evaluation.sets has"
        )
    sets = checked.eval_sets()
    if not isinstance(sets, Mapping) or not all(map(_is_list, sets.values())):
        raise ConfigurationError(f"task: {type(task).__name__}.eval_sets() must return {{name: list of prompts}}")
    if not all(sets.values()) or (evaluated and not sets):
        raise ConfigurationError(f"task: {type(task).__name__} has no held-out prompts; pass rates need a set")
    return checked


def _is_list(value: Any) -> bool:
    """Return whether a value can be indexed and has a length, unlike a generator or a dataset that is streamed."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, str | Mapping)
