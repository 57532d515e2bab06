"""Reward functions in TRL's form, in verl's, or ours; several of them with weights.

Which form a function has is told by the names of its parameters. A file is loaded by its path, in each process anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.verify.grade import Grade, Grader, Sample

Form = Literal["trl", "verl", "sample", "answer"]


@dataclass(frozen=True)
class Source:
    """Location of a function: `file.py:function` or `module:function`."""

    place: str
    function: str

    @classmethod
    def of(cls, field: str, name: str) -> Source:
        """Parse a location; the path of a file is made absolute.

        Raises:
            ConfigurationError: it names no function, or its file is not there.
        """
        place, _, function = name.rpartition(":")
        if not place or not function:
            raise ConfigurationError(
                f"{field}: {name!r} is neither one of ours nor file.py:function nor module:function"
            )
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            if not path.is_file():
                raise ConfigurationError(f"{field}: there is no file {place!r}")
            place = str(path)
        return cls(place, function)

    def digest(self) -> str:
        """Return the SHA-256 of the file's bytes; empty for a module."""
        path = Path(self.place)
        return hashlib.sha256(path.read_bytes()).hexdigest() if self.place.endswith(".py") else ""

    def load(self) -> Callable[..., Any]:
        """Import the function from its file or module.

        Raises:
            ImportError, AttributeError: it cannot be had; or whatever the file raises.
        """
        if not self.place.endswith(".py"):
            found: Callable[..., Any] = getattr(import_module(self.place), self.function)
            return found
        path = Path(self.place)
        # As if it were run from its folder: files beside it can be imported, and its classes find their module.
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        # By the whole path: two files of one name are two modules.
        name = f"_reward_file_{hashlib.sha256(self.place.encode()).hexdigest()[:12]}"
        about = importlib.util.spec_from_file_location(name, path)
        assert about is not None and about.loader is not None
        module = importlib.util.module_from_spec(about)
        sys.modules[name] = module
        try:
            about.loader.exec_module(module)
        except BaseException:
            # A module that was loaded in part would be taken for whole by the next import.
            del sys.modules[name]
            raise
        found = getattr(module, self.function)
        return found


def form_of(field: str, function: Callable[..., Any]) -> Form:
    """Return the form that a reward function is written in, by its parameters' names.

    Raises:
        ConfigurationError: none that is known.
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
    if [each.kind for each in parameters.values()] == [inspect.Parameter.VAR_KEYWORD]:
        return "trl"  # which gives everything by keyword
    raise ConfigurationError(
        f"{field}: its parameters ({', '.join(names)}) are of no known form; TRL's takes completions, verl's "
        "solution_str and ground_truth, ours (completion, answer) or (sample)"
    )


@dataclass(frozen=True)
class FunctionGrader:
    """Grader that calls a user's function; it is loaded anew in each process, and refused if its file has changed."""

    field: str
    source: Source
    digest: str = ""  # of the file's bytes, if it is one

    def prepare(self) -> None:
        """Load the function before the first grade, as its imports may take long."""
        _ = self._form

    def grade(self, sample: Sample) -> Grade:
        """Grade by calling the function in its form."""
        return _CALLS[self._form](self._function, sample)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self.digest and self.source.digest() != self.digest:
            raise RuntimeError(f"{self.source.place} has changed since the run began; its rewards would be another's")
        return self.source.load()

    @cached_property
    def _form(self) -> Form:
        return form_of(self.field, self._function)

    def check(self) -> None:
        """Load the function in this process, so that a mistake in it is reported before anything starts.

        Raises:
            ConfigurationError: it cannot be loaded, or has no known form.
        """
        try:
            _ = self._form
        except ConfigurationError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigurationError(
                f"{self.field}: {self.source.place}:{self.source.function} cannot be loaded "
                f"({type(error).__name__}: {said})"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        """Leave the function out of the pickle: it is loaded anew in the other process."""
        return {"field": self.field, "source": self.source, "digest": self.digest}


def _call_trl(function: Callable[..., Any], sample: Sample) -> Grade:
    """Call in TRL's form: keywords, lists of one, every column of the row but `prompt`; a list of a number or None.

    Of a conversation, prompts are lists of messages and completions lists of one message of the assistant's.
    """
    prompt = sample.prompt
    conversational = bool(prompt.messages)
    parts: dict[str, list[float]] = {}
    extra: dict[str, str] = {}

    def log_metric(name: str, value: Any) -> None:
        parts.setdefault(str(name), []).append(float(value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        extra[str(column)] = str(values[0] if isinstance(values, list | tuple) and values else values)

    arguments: dict[str, Any] = {
        "prompts": [[dict(each) for each in prompt.messages] if conversational else prompt.text],
        "completions": [[{"role": "assistant", "content": sample.completion}] if conversational else sample.completion],
        "completion_ids": [list(sample.tokens)],
        "trainer_state": SimpleNamespace(global_step=sample.step),
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    arguments |= {
        name: [value] for name, value in prompt.columns.items() if name not in ("prompt", "completion", *arguments)
    }
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        wanted = {each.name for each in parameters}
        arguments = {name: value for name, value in arguments.items() if name in wanted}
    rewards = _awaited(function(**arguments))
    # By `__len__` arrays and tensors are taken, too, of whichever library.
    if not isinstance(rewards, list | tuple) and not hasattr(rewards, "__len__"):
        raise TypeError(f"a reward function of TRL's form returns a list, not {type(rewards).__name__}")
    if len(rewards) != 1:
        raise ValueError(f"{len(rewards)} rewards for one completion")
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    return Grade(rewards[0], means, extra=extra)


def _call_verl(function: Callable[..., Any], sample: Sample) -> Grade:
    """Call in verl's form: compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number or dict.

    The dict holds the reward as `score`; `acc` says whether the solution is right; other numbers are recorded.
    """
    columns = sample.prompt.columns
    # verl's own rows hold the gold answer in this column.
    model = columns.get("reward_model") or {}
    arguments: dict[str, Any] = {
        "data_source": columns.get("data_source", sample.prompt.source),
        "solution_str": sample.completion,
        "ground_truth": model.get("ground_truth", sample.prompt.answer),
        "extra_info": columns.get("extra_info"),
    }
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        wanted = {each.name for each in parameters}
        arguments = {name: value for name, value in arguments.items() if name in wanted}
    said = _awaited(function(**arguments))
    if not isinstance(said, Mapping):
        return Grade(said)
    numbers = {str(name): float(value) for name, value in said.items() if isinstance(value, bool | int | float)}
    texts = {str(name): str(value) for name, value in said.items() if isinstance(value, str)}
    if "score" not in said:
        raise KeyError(f"a dict of verl's form holds 'score'; this one {sorted(map(str, said))}")
    reward = numbers.pop("score", said["score"])
    correct = bool(said["acc"]) if "acc" in said else None
    return Grade(reward, numbers, correct=correct, extra=texts)


def _call_sample(function: Callable[..., Any], sample: Sample) -> Grade:
    said = _awaited(function(sample))
    return said if isinstance(said, Grade) else Grade(said)


def _call_answer(function: Callable[..., Any], sample: Sample) -> Grade:
    return Grade(_awaited(function(sample.completion, sample.prompt.answer)))


def _awaited(value: Any) -> Any:
    """Return a coroutine's result in a new event loop; verifier processes have none running."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


_CALLS: Mapping[Form, Callable[[Callable[..., Any], Sample], Grade]] = {
    "trl": _call_trl,
    "verl": _call_verl,
    "sample": _call_sample,
    "answer": _call_answer,
}


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"a reward is a number or None, not the text {value[:40]!r}")
    return float(value)


@dataclass(frozen=True)
class Weighted:
    """Grader with its weight in the sum, and the name that its values are recorded under."""

    name: str
    grader: Grader
    weight: float = 1.0


@dataclass(frozen=True)
class RewardSum:
    """Weighted sum of several rewards; abstentions are left out of it, and if all abstain so does the sum.

    Whether a completion counts as a pass is what the first of them says that does not abstain: 1 or more.
    Source of the sum: TRL's GRPOTrainer (`reward_weights`, nansum over functions).
    """

    rewards: Sequence[Weighted] = field(default_factory=tuple)

    def prepare(self) -> None:
        """Prepare every grader that needs it before the first grade."""
        for each in self.rewards:
            if hasattr(each.grader, "prepare"):
                each.grader.prepare()

    @property
    def longest_s(self) -> float:
        """Seconds that the graders with limits of their own take at most, one after the other."""
        return sum(float(getattr(each.grader, "longest_s", 0.0)) for each in self.rewards)

    def needs_s(self, sample: Sample) -> float:
        """Return the seconds that graders with limits of their own take at most for this sample."""
        needs = (getattr(each.grader, "needs_s", None) for each in self.rewards)
        return float(sum(of(sample) for of in needs if of is not None))

    def grade(self, sample: Sample) -> Grade:
        """Grade with every reward, and add up the weighted terms."""
        grades = [(each, each.grader.grade(sample)) for each in self.rewards]
        parts: dict[str, float] = {}
        for each, grade in grades:
            parts |= dict(grade.parts)
            if grade.reward is not None and len(grades) > 1:
                parts[each.name] = float(grade.reward)
        terms = {each.name: each.weight * _number(grade.reward) for each, grade in grades if grade.reward is not None}
        extra = {name: text for _, grade in grades for name, text in grade.extra.items()}
        if not terms:
            return Grade(None, parts, grades[0][1].why or "every reward abstains", extra=extra)
        first = next(grade for _, grade in grades if grade.reward is not None)
        assert first.reward is not None
        correct = float(first.reward) >= 1.0 if first.correct is None else first.correct
        reward = sum(terms.values())
        return Grade(reward, parts, correct=correct, extra=extra, terms=terms if len(grades) > 1 else {})
