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
        prompt: what was asked.
        completion: the whole text, without special tokens and without what has ended it.
        answer: what follows the end of thinking: the whole completion where nothing thinks, empty where thinking has
            not ended.
        tokens: the completion's ids.
        truncated: it hit the token limit.
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
        reward: a finite number, 0 to 1 by custom; None for an abstention: the completion counts as if not sampled.
        parts: what the reward is made of, and other numbers to be recorded, by name.
        why: of an abstention, for people.
        correct: whether the completion counts as a pass, where that does not follow from the reward.
        extra: what else is to be read beside the completion (`rollouts.jsonl`), by name.
        terms: of a weighted sum of several rewards, its terms by their names; empty of a single reward.
    """

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    correct: bool | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)


class Grader(Protocol):
    """Protocol of graders: one completion at a time, in whatever process."""

    def grade(self, sample: Sample) -> Grade:
        """Grade one completion; an exception is an error of the infrastructure, never a reward of zero."""
        ...


Kind = Literal["score", "abstain", "error"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of grading a completion: a score, an abstention or an error.

    Attributes:
        kind: only a score enters group statistics.
        reward: of a score; 0 otherwise.
        parts: see `Grade`.
        why: of an abstention or error, in one line.
        seconds: that the grader has worked, all attempts together.
        attempts: how often it was tried.
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
