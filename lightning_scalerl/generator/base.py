"""What a generator is: takes rollout requests and weights, gives back finished rollouts, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightning_scalerl.rollout import Rollout


@dataclass(frozen=True)
class GroupRequest:
    """`completions` rollouts of one prompt.

    `key` identifies the group among all in flight (its admission number). `random_key` seeds its sampling: the
    same key gives the same uniform numbers whatever else is in flight, so nothing about scheduling, batching
    or resuming changes what is sampled except through the weights.
    """

    key: int
    prompt_tokens: tuple[int, ...]
    completions: int
    random_key: tuple[int, ...]


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that ended in this step: number `index` of the group `key`."""

    key: int
    index: int
    rollout: Rollout


@dataclass(frozen=True)
class StepReport:
    """What one generator step did. Token and context counts are what was computed, for the meter."""

    finished: Sequence[FinishedRollout]
    prefill_tokens: int
    prefill_context: int
    decoded_tokens: int
    decoded_context: int


class Generator(Protocol):
    """One event at a time: `step` advances every rollout in flight by one token."""

    @property
    def in_flight(self) -> int:
        """Rollouts submitted and not finished."""
        ...

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights in use."""
        ...

    def submit(self, request: GroupRequest) -> None:
        """Queue a group."""
        ...

    def step(self) -> StepReport:
        """Sample one token of every rollout that has a slot; freed slots are refilled at once."""
        ...

    def publish(self, weights: dict[str, Tensor], version: int) -> None:
        """Use new weights from the next token on."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        ...
