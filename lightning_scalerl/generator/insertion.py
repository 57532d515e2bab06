"""Insertion rules: which tokens enter a rollout without being sampled by the model, where, and why.

Every generator keeps one `Insertions` per rollout, which decides what to insert. There are two rules:

- `forced`: a phrase that ends the rollout's thinking. It is inserted once, at the rollout's interruption point, if the
  rollout is still thinking then. It never ends a rollout or a turn.
- `environment`: the tokens of an environment's answer, inserted after a turn. The rollout waits until the caller
  inserts the answer or ends the rollout.

Generators differ only in how they write the tokens. Our sampler forces a phrase token by token and prefills an answer
onto the cache. vLLM continues after a phrase or an answer with a new request.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lightning_scalerl.generator.base import GroupRequest, SamplingSettings, WaitingRollout, request_from, request_state
from lightning_scalerl.rollouts.rollout import Rollout, Source

# Interruption point of a rollout that is never interrupted.
NEVER = 2**62


class Next(Enum):
    """Decision about a rollout after its last token: continue sampling, wait for an insertion, or end."""

    GO_ON = "go on"
    WAIT = "wait"
    END = "end"


@dataclass(eq=False)
class Insertions:
    """Insertion rules of rollout `index` of a group, and the answers that were inserted into it.

    Attributes:
        request: the group's request.
        index: number of the rollout in its group.
        sampling: sampling settings of the generator.
        answers: for each answer of the environment, its tokens' positions in the completion: (first, last + 1).
    """

    request: GroupRequest
    index: int
    sampling: SamplingSettings
    answers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rollout_id(self) -> tuple[int, int]:
        """Key of the group and index of the rollout; unique among all rollouts in flight."""
        return self.request.key, self.index

    @property
    def limit(self) -> int:
        """Largest number of tokens of the completion, including inserted ones."""
        return self.request.limit(self.sampling.max_new_tokens)

    @property
    def turn_limit(self) -> int:
        """Completion length, in tokens, at which the current turn ends at the latest."""
        start = self.answers[-1][1] if self.answers else 0
        return min(self.limit, start + self.request.turn_tokens) if self.request.turn_tokens else self.limit

    @property
    def interruption_point(self) -> int:
        """Completion length, in tokens, at which the end of thinking is forced; `NEVER` without an interruption.

        `interrupt_at` counts the model's tokens only, so the lengths of inserted answers are added.
        """
        if not self.request.interrupt_at:
            return NEVER
        return self.request.interrupt_at[self.index] + sum(end - start for start, end in self.answers)

    def phrase(self, tokens: list[int]) -> Sequence[int]:
        """Return the phrase to force after `tokens` (the completion so far); empty if its thinking has ended."""
        model_tokens = list(tokens)
        # Leave out the environment's answers, because they may quote the marker that ends thinking.
        for start, end in reversed(self.answers):
            del model_tokens[start:end]
        return () if self.sampling.thinking_ended(model_tokens) else self.sampling.phrase

    def decide_next(self, length: int, stopped: bool) -> Next:
        """Decide whether the rollout continues, waits for an insertion, or ends.

        Args:
            length: number of tokens of the completion so far.
            stopped: whether the last token is sampled and ends a turn (a stop token, or the end of a stop text).
        """
        if not stopped and length < self.turn_limit:
            return Next.GO_ON
        return Next.WAIT if self.request.waits else Next.END

    def waiting_report(self, rollout: Rollout) -> WaitingRollout:
        """Return the report that `rollout` waits for an insertion, with a copy of the rollout."""
        return WaitingRollout(*self.rollout_id, deepcopy(rollout), self.limit - len(rollout.tokens), len(self.answers))

    def record_answer(self, length: int, tokens: Sequence[int]) -> None:
        """Record that an environment's answer (`tokens`) is inserted after the first `length` tokens of the completion.

        Raises:
            ValueError: no sampled token would fit after the answer. An answer is never inserted in part.
        """
        check_room(*self.rollout_id, self.limit - length, tokens)
        self.answers.append((length, length + len(tokens)))

    def sources(self, forced: Sequence[bool]) -> list[int]:
        """Return each token's source, given which tokens belong to a forced phrase."""
        sources: list[int] = [Source.FORCED if token else Source.SAMPLED for token in forced]
        for start, end in self.answers:
            sources[start:end] = [Source.ENVIRONMENT] * (end - start)
        return sources

    def state(self) -> tuple[Any, ...]:
        """Return the request, the index and, if there are any, the answers as plain values, for a checkpoint."""
        answers = [[list(record_answer) for record_answer in self.answers]] if self.answers else []
        return (request_state(self.request), self.index, *answers)

    @classmethod
    def from_state(cls, state: Sequence[Any], sampling: SamplingSettings) -> Insertions:
        """Rebuild the record from the values of `state`."""
        request, index, *answers = state
        return cls(request_from(request), index, sampling, [(start, end) for start, end in (answers or [[]])[0]])


def check_room(key: int, index: int, room: int, tokens: Sequence[int]) -> None:
    """Check that an answer and one sampled token after it fit into a completion that may still get `room` tokens.

    Raises:
        ValueError: they do not fit.
    """
    if len(tokens) >= room:
        raise ValueError(
            f"insert: {len(tokens)} tokens do not fit into rollout {index} of group {key}, which has room for {room} "
            "and samples at least one after them; end it instead"
        )


def check_answer(tokens: Sequence[int], vocabulary: int) -> None:
    """Check the tokens of an answer.

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ValueError(f"insert: token {token} is not in the vocabulary of {vocabulary}")
