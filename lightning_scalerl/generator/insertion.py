"""Insertion rules: which tokens that the model did not sample enter a rollout, where, and why.

Every generator keeps one `Insertions` per rollout and asks it. There are two rules:

- `forced`: at the rollout's point of interruption, a phrase that ends its thinking. It comes once, and only if the
  rollout is still thinking. It never ends a rollout or a turn.
- `environment`: behind a turn, the tokens of an environment's answer. They come later and from outside. Until then the
  rollout waits. It never ends by itself: the caller inserts an answer or ends it.

Generators differ only in how they write the tokens. Our sampler forces a phrase token by token and prefills an answer
onto the cache. vLLM continues behind either one with a new request.
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
        answers: for each answer of the environment, the index of its first token in the completion, and the index after
            its last token.
    """

    request: GroupRequest
    index: int
    sampling: SamplingSettings
    answers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def place(self) -> tuple[int, int]:
        """Key of the group and index of the rollout: its name among everything in flight."""
        return self.request.key, self.index

    @property
    def limit(self) -> int:
        """Largest number of tokens of the completion, including inserted ones."""
        return self.request.limit(self.sampling.max_new_tokens)

    @property
    def turn_limit(self) -> int:
        """Number of tokens at which the current turn ends at the latest."""
        start = self.answers[-1][1] if self.answers else 0
        return min(self.limit, start + self.request.turn_tokens) if self.request.turn_tokens else self.limit

    @property
    def point(self) -> int:
        """Number of tokens at which the end of thinking may be due; an environment's tokens do not count."""
        if not self.request.interrupt_at:
            return NEVER
        return self.request.interrupt_at[self.index] + sum(end - start for start, end in self.answers)

    def phrase(self, tokens: list[int]) -> Sequence[int]:
        """Return the phrase to force behind these tokens, at the point; empty if the thinking has ended."""
        own = list(tokens)
        # An environment may quote the marker that ends thinking: only the model's own tokens count.
        for start, end in reversed(self.answers):
            del own[start:end]
        return () if self.sampling.thinking_ended(own) else self.sampling.phrase

    def after(self, length: int, stopped: bool) -> Next:
        """Decide what follows `length` tokens.

        Args:
            length: number of tokens of the completion.
            stopped: whether the last token is sampled and ends a turn (a stop token, or the end of a stop text).
        """
        if not stopped and length < self.turn_limit:
            return Next.GO_ON
        return Next.WAIT if self.request.waits else Next.END

    def waiting(self, rollout: Rollout) -> WaitingRollout:
        """Return a copy of the rollout for a report that it waits."""
        return WaitingRollout(*self.place, deepcopy(rollout), self.limit - len(rollout.tokens), len(self.answers))

    def answer(self, length: int, tokens: Sequence[int]) -> None:
        """Record an answer behind `length` tokens.

        Raises:
            ValueError: no sampled token would fit after it. An answer is not inserted in part.
        """
        check_room(*self.place, self.limit - length, tokens)
        self.answers.append((length, length + len(tokens)))

    def sources(self, forced: Sequence[bool]) -> list[int]:
        """Return each token's source, given which tokens belong to a forced phrase."""
        sources: list[int] = [Source.FORCED if token else Source.SAMPLED for token in forced]
        for start, end in self.answers:
            sources[start:end] = [Source.ENVIRONMENT] * (end - start)
        return sources

    def state(self) -> tuple[Any, ...]:
        """Return the rollout's request, index and answers as plain values; without answers, the first two alone."""
        answers = [[list(answer) for answer in self.answers]] if self.answers else []
        return (request_state(self.request), self.index, *answers)

    @classmethod
    def from_state(cls, state: Sequence[Any], sampling: SamplingSettings) -> Insertions:
        """Rebuild the record from the values of `state`."""
        request, index, *answers = state
        return cls(request_from(request), index, sampling, [(start, end) for start, end in (answers or [[]])[0]])


def check_room(key: int, index: int, room: int, tokens: Sequence[int]) -> None:
    """Check that an answer fits into a completion that may still get `room` tokens, with a sampled token after it.

    Raises:
        ValueError: it does not fit.
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
