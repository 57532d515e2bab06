"""A generator that follows a script instead of a model, for tests of stream drivers and for replaying rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from lightning_scalerl.generator.base import (
    FinishedRollout,
    GroupRequest,
    StepReport,
    request_from,
    request_state,
    set_aside,
)
from lightning_scalerl.rollouts.rollout import Rollout

Script = Callable[[GroupRequest, int], Sequence[int]]


class ScriptedGenerator:
    """Emits one scripted token per step for every rollout in a slot.

    Args:
        script: maps (request, index of the rollout in its group) to the rollout's token ids, at least one.
        slots: number of rollouts that advance together.
    """

    def __init__(self, script: Script, slots: int) -> None:
        self._script = script
        self._slots = slots
        self._version = 0
        self._waiting: list[tuple[GroupRequest, int]] = []
        self._active: list[tuple[GroupRequest, int, list[int]]] = []

    @property
    def version(self) -> int:
        """Version of the last published weights."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not finished."""
        return len(self._waiting) + len(self._active)

    @property
    def sampled_in_flight(self) -> int:
        """Number of tokens sampled so far for the rollouts in flight."""
        return sum(len(versions) for _, _, versions in self._active)

    @property
    def free_slots(self) -> int:
        """Number of slots that are neither occupied nor needed by waiting rollouts."""
        return max(0, self._slots - self.in_flight)

    def submit(self, request: GroupRequest) -> None:
        """Queue all rollouts of a group; they start as slots become free."""
        self._waiting += [(request, index) for index in range(request.completions)]

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Label all later tokens with this version; the weights are ignored."""
        self._version = version

    def step(self) -> StepReport:
        """Emit the next scripted token of every active rollout."""
        while self._waiting and len(self._active) < self._slots:
            request, index = self._waiting.pop(0)
            self._active.append((request, index, []))
        finished, still_active = [], []
        for request, index, versions in self._active:
            tokens = list(self._script(request, index))
            versions.append(self._version)
            if len(versions) < len(tokens):
                still_active.append((request, index, versions))
                continue
            # The script has no probabilities: -1 is an arbitrary log-probability.
            rollout = Rollout(
                tokens=tokens,
                generator_logprobs=[-1.0] * len(tokens),
                weight_versions=versions,
                sources=[0] * len(tokens),
                finish_reason="stop",
            )
            finished.append(FinishedRollout(request.key, index, rollout))
        decoded = len(self._active)
        self._active = still_active
        return StepReport(finished, decoded_tokens=decoded, decoded_context=decoded)

    def aside(self) -> AbstractContextManager[None]:
        """Free the generator for other work; rollouts in flight wait."""
        return set_aside(self, self.clear)

    def clear(self) -> None:
        """Drop everything in flight."""
        self._waiting, self._active = [], []

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight; the script itself is not saved."""
        return {
            "version": self._version,
            "waiting": [(request_state(request), index) for request, index in self._waiting],
            "active": [(request_state(request), index, list(versions)) for request, index, versions in self._active],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything in flight from a checkpoint."""
        self._version = state["version"]
        self._waiting = [(request_from(request), index) for request, index in state["waiting"]]
        self._active = [(request_from(request), index, list(seen)) for request, index, seen in state["active"]]
