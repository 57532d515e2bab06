"""Task `jsonl`: prompts from JSON-lines files, graded by exact match or by the user's verifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_scalerl.checks import ConfigurationError, lone_surrogate, shown
from lightning_scalerl.rollouts.grade import Grade, Grader, Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import PoolTask, file_digest, identity_contents
from lightning_scalerl.task.formats import FAMILY
from sweeps.run.files import parse_json

Verifier = Callable[[str, str], float | None]


@dataclass(frozen=True)
class AnswerGrader:
    """Grader that calls a function with the completion and the prompt's answer."""

    verify: Verifier

    def grade(self, sample: Sample) -> Grade:
        """Grade the whole completion, thinking included."""
        return Grade(self.verify(sample.completion, sample.prompt.answer))


def exact_match(completion: str, answer: str) -> float:
    """Return 1 if completion and answer are the same apart from surrounding white space, else 0."""
    return float(completion.strip() == answer.strip())


VERIFIERS: Mapping[str, Verifier] = {"exact_match": exact_match}


class JsonlTask(PoolTask):
    """Prompts from JSON-lines files: one object per line with `prompt` and `answer`.

    Optional keys are `id` (by default the number of the line), `difficulty` and `family`.

    Args:
        train: file with the training pool; None for a task that is only evaluated.
        heldout: held-out files by set name. Fits use the first set by default.
        verifier: `exact_match`, or your own `module:function`. It is called as function(completion, answer) and returns
            a float (1 or more is a pass) or None to abstain.

    Raises:
        ConfigurationError: a file is missing or malformed, or the verifier cannot be imported.
    """

    def __init__(self, train: str | None, heldout: Mapping[str, str], verifier: str) -> None:
        self._verify = load_verifier(verifier)
        self.trusted = verifier in VERIFIERS
        self._train = [] if train is None else read_prompts("task.train", train)
        self._heldout = {name: read_prompts(f"task.heldout.{name}", path) for name, path in heldout.items()}

    @staticmethod
    def content(parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return digests of the files, which represent them in a run's identity.

        Raises:
            ConfigurationError: a file cannot be read.
        """
        return identity_contents(parameters, lambda field, path: file_digest(field, str(path)))

    def reward(self, prompt: Prompt, completion: str) -> float | None:
        """Return the verifier's reward for a completion; None if it abstains."""
        return self._verify(completion, prompt.answer)

    def grader(self) -> Grader:
        """Return a grader with the verifier alone: verifier processes do not need the task's prompts."""
        return AnswerGrader(self._verify)


def load_verifier(name: str) -> Verifier:
    """Return a built-in verifier by name, or the user's by `module:function`.

    Raises:
        ConfigurationError: the verifier cannot be imported or is not callable.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    module, _, function = str(name).partition(":")
    try:
        verifier: Verifier = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"task.verifier: {name!r} cannot be imported ({error}); give {', '.join(VERIFIERS)} or module:function"
        ) from error
    if not callable(verifier):
        raise ConfigurationError(f"task.verifier: {name!r} is not callable")
    return verifier


def read_prompts(field: str, path: str) -> list[Prompt]:
    """Read the prompts of one JSON-lines file.

    Raises:
        ConfigurationError: a line is malformed; the error names field, file, line and problem.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{field}: cannot read {path!r} ({error}); give a UTF-8 JSON-lines file") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            if not isinstance(entry, dict):
                raise ValueError(f"{line[:40]!r} is no object")
            if not (text := _text(entry, "prompt")).strip():
                raise ValueError("prompt: is empty")
            name, difficulty = _text(entry, "id", str(number)), _text(entry, "difficulty", "")
            answer, family = _text(entry, "answer"), _text(entry, FAMILY, "")
            prompts.append(Prompt(prompt_id=name, text=text, answer=answer, difficulty=difficulty, family=family))
        except ValueError as error:
            raise ConfigurationError(
                f"{field}: {path}, line {number}: {error}; each line is an object with prompt and answer"
            ) from error
    if not prompts:
        raise ConfigurationError(f"{field}: {path!r} holds no prompts")
    return prompts


def _text(entry: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Return a field of a line as text. Only strings and numbers are accepted: others would become a Python repr.

    Raises:
        ValueError: the field is missing and has no default, is neither a string nor a finite number, or has a lone
            surrogate.
    """
    value = entry.get(name)
    if default is not None and value is None:
        return default
    if name not in entry:
        raise ValueError(f"{name}: is missing")
    infinite = isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or infinite:
        raise ValueError(f"{name}: {shown(value)} must be a text or a finite number")
    if (reason := lone_surrogate(value)) is not None:
        raise ValueError(f"{name}: {reason}")
    return str(value)
