"""Records for verifiers: the sample to grade, and its outcome, which is a score, an abstention or an error.

Nothing here imports torch, because verifier processes use these records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lightning_scalerl.rollouts.prompt import Prompt


@dataclass(frozen=True)
class Sample:
    """Completion to grade, with its prompt.

    Attributes:
        prompt: the prompt.
        completion: the whole text, without special tokens and without the stop text or token.
        answer: the text after the thinking: the whole completion if there is no thinking, "" if thinking has not ended.
        tokens: the completion's token ids.
        truncated: whether the completion reached the token limit.
        step: number of completed optimizer steps when the completion finished.
        turns: with an environment, all turns and observations as pairs of source and text; sources are "sampled",
            "forced" and "environment". `completion`, `answer` and `tokens` are then those of the model's last turn.
        settled: the outcome if it is known without a verifier, else None.
    """

    prompt: Prompt
    completion: str
    answer: str
    tokens: tuple[int, ...] = ()
    truncated: bool = False
    step: int = 0
    turns: tuple[tuple[str, str], ...] = ()
    settled: Outcome | None = None


@dataclass(frozen=True)
class Charge:
    """Cost of one answer from a judge model that runs as a service.

    Attributes:
        key: hash of the question. A run counts each key once, except the empty key, which stands for answers that are
            not cached (such as failures).
        seconds: time of the requests, without pauses between them.
        prompt_tokens, completion_tokens: as the service reports them.
        cost: price of the tokens, in the unit of the prices that the user gave.
        paid: whether the service was asked; False if the answer was in the cache.
    """

    key: str
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    paid: bool = True


@dataclass(frozen=True)
class Grade:
    """Result of a grader for one completion: a reward, or an abstention.

    Attributes:
        reward: a finite number, usually 0 to 1; None for an abstention: the completion then counts as if it had not
            been sampled.
        parts: components of the reward and other numbers to record, by name.
        why: reason for an abstention, as text for the user.
        correct: whether the completion counts as a pass; None to derive it from the reward.
        extra: texts to record with the completion (`rollouts.jsonl`), by name.
        terms: weighted terms of a sum of several rewards, by name; empty for a single reward.
        answer: the answer in the completion, normalized so that equal answers are equal texts; "" if the completion has
            no answer; None if the grader does not return answers. maj@k (`sweeps.run.pass_at_k`) reads only those of
            wrong completions.
        charges: costs of the judges that were asked.
    """

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    correct: bool | None = None
    extra: Mapping[str, str] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    charges: tuple[Charge, ...] = ()


class Grader(Protocol):
    """Protocol of graders, which may run in any process.

    A grader that compares the completions of a prompt with each other has two more methods: `needs_group(prompt)`
    returns True, and `grade_group(samples)` returns one entry per completion, its grade or the exception it caused.
    """

    def grade(self, sample: Sample) -> Grade:
        """Grade one completion. An exception counts as an error of the infrastructure, never as a reward of 0."""
        ...


def needs_group(grader: object, prompt: Prompt) -> bool:
    """Return whether a grader is called once per group, instead of once per completion."""
    method = getattr(grader, "needs_group", None)
    return method is not None and bool(method(prompt))


def check_services(grader: object) -> Sequence[str]:
    """Try the services that a grader uses, before anything is computed; return one line per service.

    Raises:
        ConfigurationError: a service does not answer, or its key is missing.
    """
    method = getattr(grader, "ready", None)
    return () if method is None else list(method())


Kind = Literal["score", "abstain", "error"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of grading a completion: a score, an abstention or an error.

    Attributes:
        kind: "score", "abstain" or "error"; only scores count in the statistics of a group.
        reward: reward of a score; 0 otherwise.
        parts: see `Grade`.
        why: reason for an abstention or error, in one line.
        seconds: time spent on grading, summed over all attempts.
        attempts: number of attempts.
        correct, extra, terms, answer: see `Grade`.
        charges: costs of judges in all attempts, including failed attempts.
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
    answer: str | None = None
    charges: tuple[Charge, ...] = ()


def charges_of(result: Grade | Exception) -> tuple[Charge, ...]:
    """Return the charges of a grade, or those of the exception that a judge raised after it was asked."""
    return tuple(getattr(result, "charges", ()))


@dataclass(frozen=True)
class Known:
    """Completion known to be right or wrong, to test a verifier before the first step."""

    sample: Sample
    right: bool
