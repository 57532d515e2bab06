"""Reward functions from the user, written for TRL, for verl or for this library, and weighted sums of rewards.

The form of a function (TRL's, verl's or one of ours) is recognised by the names of its parameters.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollouts.grade import Grade, Grader, Sample, charges_of, check_services, needs_group
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.user_code import FunctionObject, Source
from lightning_scalerl.verify.grade_once import add_function_name
from lightning_scalerl.verify.judge_client import JudgeError

Form = Literal["trl", "verl", "sample", "answer"]

# Arguments of TRL's form in addition to the row's columns, and columns that are not passed.
_TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NOT_PASSED = ("prompt", "completion")
# Parameters without a default that need no argument: *args and **kwargs.
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def form_of(field: str, function: Callable[..., Any]) -> Form:
    """Return the form of a reward function, by the names of its parameters.

    Raises:
        ConfigurationError: the form is unknown.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    if {"completions", "completion_ids", "prompts"} & set(names):
        return "trl"
    if "solution_str" in names or "ground_truth" in names:
        return "verl"
    if names[:1] == ["sample"]:
        return "sample"
    if names[:2] == ["completion", "answer"]:
        return "answer"
    if [parameter.kind for parameter in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]:
        return "trl"  # TRL passes everything by keyword
    raise ConfigurationError(
        f"{field}: its parameters ({', '.join(names)}) are of no known form; TRL's takes completions, verl's "
        "solution_str and ground_truth, ours (completion, answer) or (sample)"
    )


@dataclass(frozen=True)
class FunctionGrader:
    """Grader that calls a user's function. Each process loads the function, and refuses it if its file has changed.

    Attributes:
        field: configuration key, for errors.
        source: location of the function, or the function object.
        digest: digest of the file, or of the source text of a function object; empty for a module.
    """

    field: str
    source: Source | FunctionObject
    digest: str = ""

    def prepare(self) -> None:
        """Load the function before the first grade, as its imports may take long."""
        _ = self._form

    @property
    def takes_answer(self) -> bool:
        """True if the function's form has an argument for the row's answer."""
        return self._form in ("verl", "answer")

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Return the names of required arguments that a row has no column for; empty except in TRL's form."""
        return [name for name in self._columns if name in _NOT_PASSED or name not in row]

    def needs_group(self, prompt: Prompt) -> bool:
        """Return whether the function is called once per group: True for TRL's form."""
        return self._form == "trl"

    def grade(self, sample: Sample) -> Grade:
        """Grade by calling the function with the arguments of its form."""
        try:
            return _CALL_BY_FORM[self._form](self._function, sample)
        except Exception as error:
            raise add_function_name(error, self.source.function) from error.__cause__

    def grade_group(self, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
        """Grade the completions of a group: by one call in TRL's form, one by one in the other forms."""
        if self._form != "trl":
            return one_by_one(self, samples)
        try:
            return _call_trl(self._function, samples)
        except Exception as error:
            raise add_function_name(error, self.source.function) from error.__cause__

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if isinstance(self.source, Source) and self.digest and self.source.digest() != self.digest:
            raise RuntimeError(f"{self.source.place} has changed since the run began; its rewards would be another's")
        return self.source.load()

    @cached_property
    def _form(self) -> Form:
        return form_of(self.field, self._function)

    @cached_property
    def _columns(self) -> list[str]:
        """Columns that a call in TRL's form must pass: parameters without a default."""
        parameters = inspect.signature(self._function).parameters.values() if self._form == "trl" else ()
        required = [
            parameter
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        ]
        return [parameter.name for parameter in required if parameter.name not in _TRL_ARGUMENTS]

    def check(self) -> None:
        """Load the function in this process, so that errors in it are reported before anything starts.

        Raises:
            ConfigurationError: it cannot be loaded, or its form is unknown.
        """
        try:
            _ = self._form
        except ConfigurationError:
            raise
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            raise ConfigurationError(
                f"{self.field}: {self.source.place}:{self.source.function} cannot be loaded "
                f"({type(error).__name__}: {message})"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Leave the loaded function out of the pickle, because the other process loads it again."""
        return {"field": self.field, "source": self.source, "digest": self.digest}


def _call_trl(function: Callable[..., Any], samples: Sequence[Sample]) -> list[Grade | Exception]:
    """Call a function in TRL's form with all completions of one prompt; returns one grade per completion, in order.

    All arguments are keywords. Every column of the row except `prompt` and `completion` is passed as a list, one entry
    per completion. In a conversation, a prompt is a list of messages, and a completion is a list of one message by the
    assistant.
    """
    prompt, count = samples[0].prompt, len(samples)
    conversational = bool(prompt.messages)
    parts: dict[str, list[float]] = {}
    extra: dict[str, list[str]] = {}

    def log_metric(name: str, value: Any) -> None:
        parts.setdefault(str(name), []).append(float(value))

    def log_extra(column: str, values: Any) -> None:
        per_sample = list(values) if isinstance(values, list | tuple) and len(values) == count else [values] * count
        extra[str(column)] = [str(value) for value in per_sample]

    texts = [[dict(message) for message in prompt.messages] if conversational else prompt.text for _ in samples]
    completions = [
        [{"role": "assistant", "content": sample.completion}] if conversational else sample.completion
        for sample in samples
    ]
    tokens = [list(sample.tokens) for sample in samples]
    state = SimpleNamespace(global_step=max(sample.step for sample in samples))
    values = (texts, completions, tokens, state, log_extra, log_metric)
    arguments: dict[str, Any] = dict(zip(_TRL_ARGUMENTS, values, strict=True))
    arguments |= {
        name: [value] * count for name, value in prompt.columns.items() if name not in (*_NOT_PASSED, *_TRL_ARGUMENTS)
    }
    rewards = _call(function, arguments)
    # `__len__` admits arrays and tensors of any library. Mappings and sets have it too, but iterating over them would
    # give keys, not rewards in order.
    if not hasattr(rewards, "__len__") or isinstance(rewards, Mapping | Set | str | bytes):
        raise TypeError(f"a reward function of TRL's form returns a list, not {type(rewards).__name__}")
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {'one completion' if count == 1 else f'{count} completions'}")
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    return [
        Grade(reward, means, extra={column: texts[number] for column, texts in extra.items()})
        for number, reward in enumerate(rewards)
    ]


def one_by_one(grader: Grader, samples: Sequence[Sample]) -> list[Grade | Exception]:
    """Grade each completion of a group separately; an exception affects only its own completion."""
    grades: list[Grade | Exception] = []
    for sample in samples:
        try:
            grades.append(grader.grade(sample))
        except Exception as error:
            grades.append(error)
    return grades


def grade_together(grader: Grader, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
    """Grade the completions of a group by one call if the grader needs that, else one by one."""
    if not needs_group(grader, samples[0].prompt):
        return one_by_one(grader, samples)
    try:
        grades: Sequence[Grade | Exception] = grader.grade_group(samples)  # type: ignore[attr-defined]
    except Exception as error:
        return [error] * len(samples)
    return grades


def _call_verl(function: Callable[..., Any], sample: Sample) -> Grade:
    """Call in verl's form: compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or dict.

    In a dict, `score` is the reward and `acc` whether the solution is right; other numbers are recorded.
    """
    columns = sample.prompt.columns
    # Rows in verl's format have the gold answer in this column.
    model = columns.get("reward_model") or {}
    arguments: dict[str, Any] = {
        "data_source": columns.get("data_source", sample.prompt.source),
        "solution_str": sample.completion,
        "ground_truth": model.get("ground_truth", sample.prompt.answer),
        "extra_info": columns.get("extra_info"),
    }
    result = _call(function, arguments)
    if not isinstance(result, Mapping):
        return Grade(result)
    numbers = {str(name): number for name, value in result.items() if (number := _as_float(value)) is not None}
    texts = {str(name): str(value) for name, value in result.items() if isinstance(value, str)}
    if "score" not in result:
        raise KeyError(f"a dict of verl's form holds 'score'; this one {sorted(map(str, result))}")
    reward = numbers.pop("score", result["score"])
    # A fractional accuracy is not a pass: as for rewards, only 1 or more is.
    correct = float(result["acc"]) >= 1 if "acc" in result else None
    return Grade(reward, numbers, correct=correct, extra=texts)


def _as_float(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch as a float; None for anything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array or tensor with several elements
        return None


def _call_sample(function: Callable[..., Any], sample: Sample) -> Grade:
    result = _await_result(function(sample))
    return result if isinstance(result, Grade) else Grade(result)


def _call_answer(function: Callable[..., Any], sample: Sample) -> Grade:
    return Grade(_await_result(function(sample.completion, sample.prompt.answer)))


def _call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function with the arguments that its signature accepts, and return its awaited result."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        accepted = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    return _await_result(function(**arguments))


def _await_result(value: Any) -> Any:
    """Run a coroutine in a new event loop and return its result; other values are returned unchanged."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _call_trl_once(function: Callable[..., Any], sample: Sample) -> Grade:
    (grade,) = _call_trl(function, [sample])
    assert isinstance(grade, Grade)
    return grade


_CALL_BY_FORM: Mapping[Form, Callable[[Callable[..., Any], Sample], Grade]] = {
    "trl": _call_trl_once,
    "verl": _call_verl,
    "sample": _call_sample,
    "answer": _call_answer,
}


def _finite_reward(name: str, value: Any) -> float:
    """Return a reward as a number; raise an error that names the reward if it is not a finite number."""
    if isinstance(value, str):
        raise TypeError(f"a reward is a number or None, not the text {value[:40]!r}, which {name} returned")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"a reward is a number or None, not {str(value)[:40]}, which {name} returned") from error
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {number}; a reward must be a finite number, or None to abstain")
    return number


@dataclass(frozen=True)
class Weighted:
    """Grader with its weight in the sum, and the name under which its values are recorded."""

    name: str
    grader: Grader
    weight: float = 1.0


@dataclass(frozen=True)
class RewardSum:
    """Weighted sum of several rewards. Abstentions are left out; if all rewards abstain, so does the sum.

    The first reward that does not abstain decides whether a completion is a pass: by its grade's `correct` if that is
    set, otherwise by whether the reward is 1 or more.
    Source of the sum: TRL's GRPOTrainer (`reward_weights`, nansum over functions).
    """

    rewards: Sequence[Weighted] = field(default_factory=tuple)

    def prepare(self) -> None:
        """Prepare all graders that need it, before the first grade."""
        for reward in self.rewards:
            if hasattr(reward.grader, "prepare"):
                reward.grader.prepare()

    def ready(self) -> Sequence[str]:
        """Send one request to each grader that is a service, to test it; return one line per service."""
        return [line for reward in self.rewards for line in check_services(reward.grader)]

    @property
    def longest_s(self) -> float:
        """Maximum seconds of one grade: the sum over the graders that limit their time, which run one by one."""
        return sum(float(getattr(reward.grader, "longest_s", 0.0)) for reward in self.rewards)

    def needs_s(self, sample: Sample) -> float:
        """Return the maximum seconds for this sample, summed over the graders that state them."""
        methods = (getattr(reward.grader, "needs_s", None) for reward in self.rewards)
        return float(sum(method(sample) for method in methods if method is not None))

    @property
    def functions(self) -> Sequence[str]:
        """Names of the user's own functions among the rewards."""
        return [reward.name for reward in self.rewards if isinstance(reward.grader, FunctionGrader)]

    def needs_group(self, prompt: Prompt) -> bool:
        """Return whether one of the rewards is called with all completions of a group."""
        return any(needs_group(reward.grader, prompt) for reward in self.rewards)

    def grade(self, sample: Sample) -> Grade:
        """Grade with every reward, and add up the weighted terms."""
        return self._weighted_sum([reward.grader.grade(sample) for reward in self.rewards])

    def grade_group(self, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
        """Grade the completions of a group with every reward, and add up the weighted terms per completion."""
        rows = zip(*(grade_together(reward.grader, samples) for reward in self.rewards), strict=True)
        return [self._weighted_sum_or_error(row) for row in rows]

    def _weighted_sum_or_error(self, row: Sequence[Grade | Exception]) -> Grade | Exception:
        grades = [grade for grade in row if isinstance(grade, Grade)]
        if len(grades) < len(row):
            error = next(error for error in row if isinstance(error, Exception))
            charges = tuple(charge for entry in row for charge in charges_of(entry))
            return error if charges == charges_of(error) else JudgeError.wrap(error, charges)
        try:
            return self._weighted_sum(grades)
        except Exception as error:  # a reward is not a finite number
            return error

    def _weighted_sum(self, by_reward: Sequence[Grade]) -> Grade:
        grades = list(zip(self.rewards, by_reward, strict=True))
        numbers = {
            reward.name: _finite_reward(reward.name, grade.reward)
            for reward, grade in grades
            if grade.reward is not None
        }
        parts: dict[str, float] = {}
        for reward, grade in grades:
            parts |= dict(grade.parts)
            if reward.name in numbers and len(grades) > 1:
                parts[reward.name] = numbers[reward.name]
        terms = {reward.name: reward.weight * numbers[reward.name] for reward in self.rewards if reward.name in numbers}
        extra = {name: text for _, grade in grades for name, text in grade.extra.items()}
        charges = tuple(charge for _, grade in grades for charge in grade.charges)
        if not terms:
            return Grade(None, parts, grades[0][1].why or "every reward abstains", extra=extra, charges=charges)
        deciding = next(grade for _, grade in grades if grade.reward is not None)
        assert deciding.reward is not None
        correct = float(deciding.reward) >= 1.0 if deciding.correct is None else deciding.correct
        total = math.fsum(terms.values())  # independent of the order, and exactly 1 for 0.7 + 0.2 + 0.1
        weighted = terms if len(grades) > 1 else {}
        return Grade(
            total, parts, correct=correct, extra=extra, terms=weighted, answer=deciding.answer, charges=charges
        )
