"""Reward functions in TRL's form, in verl's, or ours; several of them with weights.

Which form a function has is told by the names of its parameters. A file is loaded by its path, in each process anew; a
function that a script or notebook hands over is sent there by value.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.verify.grade import Grade, Grader, Sample, needs_group
from lightning_scalerl.verify.grade_once import in_function

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


@dataclass(frozen=True)
class Given:
    """Function that was handed over itself, by a script or a notebook; stands where a `Source` stands.

    Its identity is its source text, with the plain values that it takes from the function around it. Of a
    `functools.partial` these are the arguments that it holds too; of a method or an object that is called, the source
    text of its class and the object's plain attributes. Plain are texts, numbers, None, and lists and dicts of them.
    """

    field: str
    called: Callable[..., Any]

    @property
    def function(self) -> str:
        """Name of the function, which its values are recorded under."""
        called = _unwrapped(self.called)
        name = str(getattr(called, "__name__", type(called).__name__))
        return "reward" if name == "<lambda>" else name

    @property
    def place(self) -> str:
        """Module that it was written in."""
        return str(getattr(_unwrapped(self.called), "__module__", "") or "__main__")

    def digest(self) -> str:
        """Return the SHA-256 of the function's source text.

        Raises:
            ConfigurationError: it has none that can be read.
        """
        try:
            text, around = _text_and_values(self.called)
        except (OSError, TypeError) as error:
            raise ConfigurationError(
                f"{self.field}: the source text of {self.function} cannot be read ({said(error)}), and a run is "
                "identified by it; give a function that is written with def or lambda in a file or a notebook, or "
                '"file.py:function"'
            ) from error
        taken = {name: value for name, value in sorted(around.items()) if _is_plain(value)}
        whole = text + (json.dumps(taken) if taken else "")
        return hashlib.sha256(whole.encode()).hexdigest()

    def load(self) -> Callable[..., Any]:
        """Return the function itself, as it was handed over."""
        return self.called

    def __getstate__(self) -> dict[str, Any]:
        """Return the function in bytes, for the process that grades.

        Raises:
            ConfigurationError: it cannot be sent.
        """
        import cloudpickle

        try:
            return {"field": self.field, "sent": cloudpickle.dumps(self.called)}
        except Exception as error:
            raise ConfigurationError(
                f"{self.field}: {self.function} cannot be sent to the process that grades ({said(error)}); make what "
                "it holds (a model, a client, a lock) inside of it, or write it into a file and give "
                f'"file.py:{self.function}"; verify.workers=0 grades in the trainer\'s own process, where nothing can '
                "stop it if it hangs"
            ) from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        import cloudpickle

        object.__setattr__(self, "field", state["field"])
        object.__setattr__(self, "called", cloudpickle.loads(state["sent"]))


def _unwrapped(called: Any) -> Any:
    """Return the function below any `functools.partial`."""
    while isinstance(called, partial):
        called = called.func
    return called


def _text_and_values(called: Any) -> tuple[str, dict[str, Any]]:
    """Return the source text of what is called, and the values that it holds, by name.

    Raises:
        OSError, TypeError: it has no source text that can be read.
    """
    if isinstance(called, partial):
        text, held = _text_and_values(called.func)
        keywords = {name: value for name, value in sorted(called.keywords.items()) if _is_plain(value)}
        return text, {**held, "partial": [[each for each in called.args if _is_plain(each)], keywords]}
    if inspect.isfunction(called):
        return textwrap.dedent(inspect.getsource(called)), dict(inspect.getclosurevars(called).nonlocals)
    owner = getattr(called, "__self__", called)
    if inspect.isclass(owner) or not hasattr(type(owner), "__module__"):
        return textwrap.dedent(inspect.getsource(called)), {}
    name = getattr(called, "__name__", "__call__") if owner is not called else "__call__"
    attributes = {key: value for key, value in getattr(owner, "__dict__", {}).items() if _is_plain(value)}
    return textwrap.dedent(inspect.getsource(type(owner))), {"called": name, "attributes": attributes}


def _is_plain(value: Any) -> bool:
    """Return whether a value is a text, a number or None, or a list or dict of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return isinstance(value, str | int | float | None) or (
        isinstance(value, list | tuple) and all(map(_is_plain, value))
    )


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
    source: Source | Given
    digest: str = ""  # of the file's bytes, if it is one, or of the source text of a function that was handed over

    def prepare(self) -> None:
        """Load the function before the first grade, as its imports may take long."""
        _ = self._form

    def needs_group(self, prompt: Prompt) -> bool:
        """Return whether the function is called with a list: in TRL's form."""
        return self._form == "trl"

    def grade(self, sample: Sample) -> Grade:
        """Grade by calling the function in its form."""
        try:
            return _CALLS[self._form](self._function, sample)
        except Exception as error:
            raise in_function(error, self.source.function) from error.__cause__

    def grade_group(self, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
        """Grade the completions of a group: by one call in TRL's form, one by one in the others."""
        if self._form != "trl":
            return one_by_one(self, samples)
        try:
            return _call_trl(self._function, samples)
        except Exception as error:
            raise in_function(error, self.source.function) from error.__cause__

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if isinstance(self.source, Source) and self.digest and self.source.digest() != self.digest:
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


def _call_trl(function: Callable[..., Any], samples: Sequence[Sample]) -> list[Grade | Exception]:
    """Call in TRL's form for the completions of one prompt, in order; an entry each, a number or None.

    Keywords, all of them lists: every column of the row but `prompt`. Of a conversation, prompts are lists of messages
    and completions lists of one message of the assistant's.
    """
    prompt, count = samples[0].prompt, len(samples)
    conversational = bool(prompt.messages)
    parts: dict[str, list[float]] = {}
    extra: dict[str, list[str]] = {}

    def log_metric(name: str, value: Any) -> None:
        parts.setdefault(str(name), []).append(float(value))

    def log_extra(column: str, values: Any) -> None:
        each = list(values) if isinstance(values, list | tuple) and len(values) == count else [values] * count
        extra[str(column)] = [str(value) for value in each]

    arguments: dict[str, Any] = {
        "prompts": [[dict(each) for each in prompt.messages] if conversational else prompt.text for _ in samples],
        "completions": [
            [{"role": "assistant", "content": sample.completion}] if conversational else sample.completion
            for sample in samples
        ],
        "completion_ids": [list(sample.tokens) for sample in samples],
        "trainer_state": SimpleNamespace(global_step=max(sample.step for sample in samples)),
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    arguments |= {
        name: [value] * count
        for name, value in prompt.columns.items()
        if name not in ("prompt", "completion", *arguments)
    }
    parameters = inspect.signature(function).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        wanted = {each.name for each in parameters}
        arguments = {name: value for name, value in arguments.items() if name in wanted}
    rewards = _awaited(function(**arguments))
    # By `__len__` arrays and tensors are taken, too, of whichever library.
    if not isinstance(rewards, list | tuple) and not hasattr(rewards, "__len__"):
        raise TypeError(f"a reward function of TRL's form returns a list, not {type(rewards).__name__}")
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {'one completion' if count == 1 else f'{count} completions'}")
    means = {name: sum(values) / len(values) for name, values in parts.items()}
    return [
        Grade(reward, means, extra={column: texts[number] for column, texts in extra.items()})
        for number, reward in enumerate(rewards)
    ]


def one_by_one(grader: Grader, samples: Sequence[Sample]) -> list[Grade | Exception]:
    """Grade each completion of a group by itself; what one raises is its own."""
    grades: list[Grade | Exception] = []
    for sample in samples:
        try:
            grades.append(grader.grade(sample))
        except Exception as error:
            grades.append(error)
    return grades


def together(grader: Grader, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
    """Grade the completions of a group as the grader wants it: by one call, or one by one."""
    if not needs_group(grader, samples[0].prompt):
        return one_by_one(grader, samples)
    try:
        grades: Sequence[Grade | Exception] = grader.grade_group(samples)  # type: ignore[attr-defined]
    except Exception as error:
        return [error] * len(samples)
    return grades


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


def _call_trl_once(function: Callable[..., Any], sample: Sample) -> Grade:
    (grade,) = _call_trl(function, [sample])
    assert isinstance(grade, Grade)
    return grade


_CALLS: Mapping[Form, Callable[[Callable[..., Any], Sample], Grade]] = {
    "trl": _call_trl_once,
    "verl": _call_verl,
    "sample": _call_sample,
    "answer": _call_answer,
}


def _number(name: str, value: Any) -> float:
    """Return the number that a reward of this name has returned, and refuse what is none, naming the reward."""
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

    @property
    def functions(self) -> Sequence[str]:
        """Names of the user's own functions among the rewards."""
        return [each.name for each in self.rewards if isinstance(each.grader, FunctionGrader)]

    def needs_group(self, prompt: Prompt) -> bool:
        """Return whether one of the rewards is called with all completions of a group."""
        return any(needs_group(each.grader, prompt) for each in self.rewards)

    def grade(self, sample: Sample) -> Grade:
        """Grade with every reward, and add up the weighted terms."""
        return self._summed([each.grader.grade(sample) for each in self.rewards])

    def grade_group(self, samples: Sequence[Sample]) -> Sequence[Grade | Exception]:
        """Grade the completions of a group with every reward, and add up each one's terms."""
        rows = zip(*(together(each.grader, samples) for each in self.rewards), strict=True)
        return [self._summed_or_error(row) for row in rows]

    def _summed_or_error(self, row: Sequence[Grade | Exception]) -> Grade | Exception:
        grades = [each for each in row if isinstance(each, Grade)]
        if len(grades) < len(row):
            return next(each for each in row if isinstance(each, Exception))
        try:
            return self._summed(grades)
        except Exception as error:  # a reward that is no number
            return error

    def _summed(self, by_reward: Sequence[Grade]) -> Grade:
        grades = list(zip(self.rewards, by_reward, strict=True))
        numbers = {each.name: _number(each.name, grade.reward) for each, grade in grades if grade.reward is not None}
        parts: dict[str, float] = {}
        for each, grade in grades:
            parts |= dict(grade.parts)
            if each.name in numbers and len(grades) > 1:
                parts[each.name] = numbers[each.name]
        terms = {each.name: each.weight * numbers[each.name] for each in self.rewards if each.name in numbers}
        extra = {name: text for _, grade in grades for name, text in grade.extra.items()}
        if not terms:
            return Grade(None, parts, grades[0][1].why or "every reward abstains", extra=extra)
        first = next(grade for _, grade in grades if grade.reward is not None)
        assert first.reward is not None
        correct = float(first.reward) >= 1.0 if first.correct is None else first.correct
        reward = sum(terms.values())
        return Grade(reward, parts, correct=correct, extra=extra, terms=terms if len(grades) > 1 else {})
