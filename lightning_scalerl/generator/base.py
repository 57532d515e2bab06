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
    or resuming changes what is sampled except through the weights. `interrupt_at` gives for each rollout the
    tokens of thinking after which its end is forced; empty for never.
    """

    key: int
    prompt_tokens: tuple[int, ...]
    completions: int
    random_key: tuple[int, ...]
    interrupt_at: tuple[int, ...] = ()


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that ended in this step: number `index` of the group `key`."""

    key: int
    index: int
    rollout: Rollout


@dataclass(frozen=True)
class StepReport:
    """What one generator step did. Token and context counts are what was computed, for the meter.

    `prefill_tokens` are prompt tokens and, after a publish, those whose keys and values were recomputed.
    """

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
    def free_slots(self) -> int:
        """Rollouts that would start in the next step if they were submitted now."""
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

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Use new weights from the next token on.

        Rollouts in flight go on with the keys and values they have, or with recomputed ones. Rollouts that have
        no token yet start afresh in either case.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put it back."""
        ...


def request_state(request: GroupRequest) -> dict[str, Any]:
    """A request as plain values, for a checkpoint."""
    return {field: list(value) if isinstance(value, tuple) else value for field, value in vars(request).items()}


def request_from(state: dict[str, Any]) -> GroupRequest:
    """The inverse of `request_state`."""
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in state.items()}
    return GroupRequest(**values)
