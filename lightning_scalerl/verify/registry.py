"""Named verifiers of this project and a user's own functions, combined with weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.verify.grade import Grade, Sample
from lightning_scalerl.verify.mathematics import Mathematics
from lightning_scalerl.verify.programs import Programs
from lightning_scalerl.verify.rewards import FunctionGrader, Given, RewardSum, Source, Weighted
from lightning_scalerl.verify.text import Choice, ExactMatch, QuestionAnswer, TruthfulAnswer


class NamedGrader(Protocol):
    """Grader that can give a right and a wrong completion for an answer."""

    def grade(self, sample: Sample) -> Grade:
        """Grade one completion of a prompt."""
        ...

    def known(self, answer: Any) -> tuple[str | None, str | None]:
        """Return a completion that is right for an answer and one that is wrong; None where it knows none."""
        ...


VERIFIERS: Mapping[str, type[NamedGrader]] = {
    "exact_match": ExactMatch,
    "math": Mathematics,
    "choice": Choice,
    "question_answer": QuestionAnswer,
    "truthful": TruthfulAnswer,
    "code": Programs,
}
# Verifiers that compare texts and never hang: they need no process of their own.
QUICK = (ExactMatch, Choice, QuestionAnswer, TruthfulAnswer)


# A name or place, a function, or a mapping with one of these under `use`.
Reward = Mapping[str, Any] | str | Callable[..., Any]


def named(field: str, given: Reward) -> Weighted:
    """Build a grader with its weight from its configuration.

    Args:
        field: configuration key, for error messages.
        given: a verifier's name, a function's location (`file.py:function`, `module:function`), or a function itself;
            or a mapping: `use` one of these, `weight`, `name` under which its values are recorded, a verifier's
            settings.

    Raises:
        ConfigurationError: no such verifier, or settings that it does not have.
    """
    if not isinstance(given, str | Mapping) and not callable(given):
        raise ConfigurationError(f"{field}: {given!r} must be a name, a place, a function, or a mapping with `use`")
    about = dict(given) if isinstance(given, Mapping) else {"use": given}
    use = about.pop("use", None)
    weight = about.pop("weight", 1.0)
    called = about.pop("name", None)
    if not isinstance(use, str) and not callable(use):
        raise ConfigurationError(
            f"{field}: {given!r} names no verifier; give {', '.join(VERIFIERS)} or file.py:function"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigurationError(f"{field}.weight: {weight!r} must be a number")
    if isinstance(use, str) and use in VERIFIERS:
        try:
            return Weighted(str(called or use), VERIFIERS[use](**about), float(weight))
        except TypeError as error:
            raise ConfigurationError(f"{field}: {use} has no such setting ({error})") from error
    if about:
        raise ConfigurationError(f"{field}: {', '.join(about)}: a function of yours has no settings here")
    if isinstance(use, str) and ":" not in use:
        raise ConfigurationError(
            f"{field}: {use!r} is none of {', '.join(VERIFIERS)}, and no file.py:function or module:function"
        )
    source = Source.of(field, use) if isinstance(use, str) else Given(field, use)
    grader = FunctionGrader(field, source, source.digest())
    grader.check()
    return Weighted(str(called or source.function), grader, float(weight))


def listed(given: Any) -> list[Any]:
    """Return rewards as a list, of which one may be given as it is."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]


def reward_sum(field: str, given: Sequence[Reward] | Reward) -> RewardSum:
    """Build the weighted sum of one or several rewards.

    Raises:
        ConfigurationError: see `named`; or two with one name.
    """
    entries = listed(given)
    if not entries:
        raise ConfigurationError(f"{field}: give at least one of {', '.join(VERIFIERS)}, or file.py:function")
    found = tuple(named(field, entry) for entry in entries)
    names = [each.name for each in found]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigurationError(f"{field}: two are called {double[0]!r}; give one of them a name of its own")
    return RewardSum(found)


def content(given: Any, digest: Any) -> Any:
    """Return what identifies rewards in a run's identity: a file by its digest, whatever its name and place.

    Args:
        given: the rewards as the configuration has them.
        digest: path of a file -> digest of its content.
    """
    if isinstance(given, list | tuple):
        return [content(each, digest) for each in given]
    if callable(given):
        return {"source": Given("task.rewards", given).digest()}
    if isinstance(given, Mapping):
        return {key: content(value, digest) if key == "use" else value for key, value in given.items()}
    if isinstance(given, str) and given not in VERIFIERS:
        place, _, function = given.rpartition(":")
        return {"file": digest(place), "function": function} if place.endswith(".py") else given
    return given
