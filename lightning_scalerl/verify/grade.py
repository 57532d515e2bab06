"""Records for verifiers: the sample to grade, and the outcome: a score, an abstention or an error.

Nothing here needs torch: these records travel to the verifiers' processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lightning_scalerl.prompt import Prompt


@dataclass(frozen=True)
class Sample:
    """Completion to be graded, with its prompt.

    Attributes:
        prompt: the prompt that was completed.
        completion: the whole text, without special tokens and without the stop text or token.
        answer: the text after the end of thinking: all of the completion if it has no thinking, empty if its thinking
            has not ended.
        tokens: the completion's token ids.
        truncated: whether it hit the token limit.
        step: optimizer steps done when it ended.
    """

    prompt: Prompt
    completion: str
    answer: str
    tokens: tuple[int, ...] = ()
    truncated: bool = False
    step: int = 0


@dataclass(frozen=True)
class Grade:
    """Grader's answer for one completion: a reward, or an abstention.

    Attributes:
        reward: a finite number, 0 to 1 by custom; None to abstain: the completion then counts as if not sampled.
        parts: components of the reward and other numbers to record, by name.
        why: reason of an abstention, for people.
        correct: whether the completion counts as a pass; None where that follows from the reward.
        extra: texts to record beside the completion (`rollouts.jsonl`), by name.
        terms: weighted terms of a sum of several rewards, by name; empty for a single reward.
    """

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    correct: bool | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)


class Grader(Protocol):
    """Protocol of graders: one completion at a time, in whatever process.

    One that compares the completions of a prompt with each other also has `needs_group(prompt)`, which says so, and
    `grade_group(samples)`, which returns a grade for each, or the exception that this one ended in.
    """

    def grade(self, sample: Sample) -> Grade:
        """Grade one completion; an exception is an error of the infrastructure, never a reward of zero."""
        ...


def needs_group(grader: object, prompt: Prompt) -> bool:
    """Return whether a grader is called once for all completions of a group, not for each as it ends."""
    asked = getattr(grader, "needs_group", None)
    return asked is not None and bool(asked(prompt))


Kind = Literal["score", "abstain", "error"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of grading a completion: a score, an abstention or an error.

    Attributes:
        kind: "score", "abstain" or "error"; only scores enter the statistics of a group.
        reward: reward of a score; 0 otherwise.
        parts: see `Grade`.
        why: reason of an abstention or error, in one line.
        seconds: time that the grader has taken, all attempts together.
        attempts: number of attempts.
        correct, extra, terms: see `Grade`.
    """

    kind: Kind
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    seconds: float = 0.0
    attempts: int = 1
    correct: bool | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """Completion that is known to be right or wrong, for a verifier's trial before the first step."""

    sample: Sample
    right: bool
