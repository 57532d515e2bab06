"""Builds graders from their configuration, by name or from a user's function, and combines them in a weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grade, Sample
from lightning_scalerl.user_code import FunctionObject, Source
from lightning_scalerl.verify.judge import Judge, judge_identity
from lightning_scalerl.verify.mathematics import Mathematics
from lightning_scalerl.verify.programs import Programs
from lightning_scalerl.verify.rewards import FunctionGrader, RewardSum, Weighted
from lightning_scalerl.verify.text import Choice, ExactMatch, QuestionAnswer, TruthfulAnswer


class NamedGrader(Protocol):
    """Grader that is chosen by its name.

    Most graders also have a method `known(answer)`, which returns (a right completion, a wrong completion) for testing
    the grader; None stands for a completion that it cannot construct.
    """

    def grade(self, sample: Sample) -> Grade:
        """Grade one completion of a prompt."""


VERIFIERS: Mapping[str, type[NamedGrader]] = {
    "exact_match": ExactMatch,
    "math": Mathematics,
    "choice": Choice,
    "question_answer": QuestionAnswer,
    "truthful": TruthfulAnswer,
    "code": Programs,
    "judge": Judge,
}
# Verifiers that only compare texts and never hang, so they may run in the trainer's process.
QUICK_VERIFIERS = (ExactMatch, Choice, QuestionAnswer, TruthfulAnswer)


# Configuration of a reward: a verifier's name, the location of a function, a function, or a mapping with one of these
# under `use`.
Reward = Mapping[str, Any] | str | Callable[..., Any]


def build_weighted(field: str, reward: Reward) -> Weighted:
    """Build a weighted grader from its configuration.

    Args:
        field: configuration key, for errors.
        reward: a verifier's name, the location of a function (`file.py:function`, `module:function`) or a function; or
            a mapping with one of these as `use`, and optionally `weight`, `name` (for its recorded values) and settings
            of the verifier.

    Raises:
        ConfigurationError: there is no such verifier or setting.
    """
    if not isinstance(reward, str | Mapping) and not callable(reward):
        raise ConfigurationError(f"{field}: {reward!r} must be a name, a place, a function, or a mapping with `use`")
    settings = dict(reward) if isinstance(reward, Mapping) else {"use": reward}
    use = settings.pop("use", None)
    weight = settings.pop("weight", 1.0)
    custom_name = settings.pop("name", None)
    if not isinstance(use, str) and not callable(use):
        raise ConfigurationError(
            f"{field}: {reward!r} names no verifier; give {', '.join(VERIFIERS)} or file.py:function"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigurationError(f"{field}.weight: {weight!r} must be a number")
    if isinstance(use, str) and use in VERIFIERS:
        if use == "judge" and custom_name:
            settings["label"] = str(custom_name)
        try:
            return Weighted(str(custom_name or use), VERIFIERS[use](**settings), float(weight))
        except TypeError as error:
            raise ConfigurationError(f"{field}: {use} has no such setting ({error})") from error
    if settings:
        raise ConfigurationError(f"{field}: {', '.join(settings)}: a function of yours has no settings here")
    if isinstance(use, str) and ":" not in use:
        raise ConfigurationError(
            f"{field}: {use!r} is none of {', '.join(VERIFIERS)}, and no file.py:function or module:function"
        )
    source = Source.of(field, use) if isinstance(use, str) else FunctionObject(field, use)
    grader = FunctionGrader(field, source, source.digest())
    grader.check()
    return Weighted(str(custom_name or source.function), grader, float(weight))


def as_list(rewards: Any) -> list[Any]:
    """Return rewards as a list; a single reward becomes a list of one."""
    return list(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else [rewards]


def reward_sum(field: str, rewards: Sequence[Reward] | Reward) -> RewardSum:
    """Build the weighted sum of one or more rewards.

    Raises:
        ConfigurationError: see `build_weighted`; or two rewards have the same name.
    """
    entries = as_list(rewards)
    if not entries:
        raise ConfigurationError(f"{field}: give at least one of {', '.join(VERIFIERS)}, or file.py:function")
    weighted = tuple(build_weighted(field, entry) for entry in entries)
    names = [reward.name for reward in weighted]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigurationError(f"{field}: two are called {duplicates[0]!r}; give one of them a name of its own")
    return RewardSum(weighted)


def content(rewards: Any, digest: Any) -> Any:
    """Return the rewards' entry in a run's identity, in which the digest of a file replaces its path.

    Args:
        rewards: the rewards as in the configuration.
        digest: function from the path of a file to the digest of its content.
    """
    if isinstance(rewards, list | tuple):
        return [content(reward, digest) for reward in rewards]
    if callable(rewards):
        return {"source": FunctionObject("task.rewards", rewards).digest()}
    if isinstance(rewards, Mapping):
        rewards = judge_identity(rewards) if rewards.get("use") == "judge" else rewards
        return {key: content(value, digest) if key == "use" else value for key, value in rewards.items()}
    if isinstance(rewards, str) and rewards not in VERIFIERS:
        path, _, function = rewards.rpartition(":")
        return {"file": digest(path), "function": function} if path.endswith(".py") else rewards
    return rewards
