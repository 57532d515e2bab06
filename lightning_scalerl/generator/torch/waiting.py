"""Rollouts of the in-process generator between two turns.

A rollout waits for its insertion, then for a slot. Meanwhile it keeps its slot, only its keys and values, or neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.base import FinishedRollout, SamplingSettings, WaitingRollout
from lightning_scalerl.generator.insertion import Insertions
from lightning_scalerl.generator.torch.slot_cache import KeysValues
from lightning_scalerl.generator.torch.slots import Paused, host
from lightning_scalerl.rollouts.rollout import packed, unpack_rollouts

KEEPS = ("slot", "cache", "nothing")


class PausedRollouts:
    """Rollouts between two turns.

    Args:
        sampling: sampling settings of the generator.
        keeps: "slot": a waiting rollout keeps its slot and its keys and values, and continues at once. "cache": it
            gives up its slot, and its keys and values move to host memory. "nothing": it gives up both, and its whole
            sequence is prefilled again, by the weights in use at that time.

    Raises:
        ConfigurationError: `keeps` is none of these.
    """

    def __init__(self, sampling: SamplingSettings, keeps: str) -> None:
        if keeps not in KEEPS:
            raise ConfigurationError(f"generator.waiting_keeps: {keeps!r} is unknown; valid: {', '.join(KEEPS)}")
        self._sampling, self._keeps = sampling, keeps
        self._paused: dict[tuple[int, int], Paused] = {}
        self.answered: deque[Paused] = deque()
        self._ended: list[FinishedRollout] = []

    def __len__(self) -> int:
        """Number of rollouts that wait, for an insertion or a slot or to be reported."""
        return len(self._paused) + len(self.answered) + len(self._ended)

    @property
    def cached(self) -> bool:
        """True if waiting rollouts keep their keys and values."""
        return self._keeps != "nothing"

    @property
    def due(self) -> bool:
        """True if the next step continues or reports a rollout."""
        return bool(self.answered or self._ended)

    @property
    def held_slots(self) -> int:
        """Number of slots that are kept for waiting rollouts."""
        return len(self._paused) + len(self.answered) if self._keeps == "slot" else 0

    @property
    def claimed_slots(self) -> int:
        """Number of slots that waiting rollouts hold, or need in order to continue."""
        return self.held_slots if self._keeps == "slot" else len(self.answered)

    @property
    def sampled(self) -> int:
        """Number of tokens of the waiting rollouts."""
        return sum(len(paused.rollout.tokens) for paused in (*self._paused.values(), *self.answered))

    @property
    def reports(self) -> list[WaitingRollout]:
        """All rollouts that wait for an insertion."""
        return self.reported(list(self._paused.values()))

    def reported(self, paused: Sequence[Paused]) -> list[WaitingRollout]:
        """Return copies of paused rollouts for a report."""
        return [rollout.insertions.waiting_report(rollout.rollout) for rollout in paused]

    def hold(self, paused: Sequence[Paused]) -> None:
        """Keep rollouts that are between two turns until their insertions arrive."""
        for rollout in paused:
            if rollout.keys_values is not None and self._keeps == "cache":
                rollout.keys_values = cache_on_host(rollout.keys_values)
            self._paused[rollout.insertions.rollout_id] = rollout

    def insert(self, key: int, index: int, tokens: Sequence[int]) -> None:
        """Record the environment's answer for a waiting rollout, which continues as soon as it has a slot."""
        paused = self._paused_rollout(key, index)
        paused.insertions.record_answer(len(paused.rollout.tokens), tokens)
        paused.answer = tuple(tokens)
        self.answered.append(self._paused.pop((key, index)))

    def end(self, key: int, index: int, truncated: bool) -> None:
        """End a waiting rollout; with `truncated` its finish_reason becomes "length"."""
        rollout = self.remove(key, index).rollout
        if truncated:
            rollout.finish_reason = "length"
        self._ended.append(FinishedRollout(key, index, rollout))

    def remove(self, key: int, index: int) -> Paused:
        """Remove and return a rollout that waits for an insertion."""
        paused = self._paused_rollout(key, index)
        del self._paused[key, index]
        return paused

    def _paused_rollout(self, key: int, index: int) -> Paused:
        if (key, index) not in self._paused:
            raise KeyError(f"rollout {index} of group {key} does not wait for an insertion")
        return self._paused[key, index]

    def collect(self) -> list[FinishedRollout]:
        """Return the rollouts that have ended while they waited, each once."""
        ended, self._ended = self._ended, []
        return ended

    def drop_caches(self) -> None:
        """Drop all keys and values: they are computed again when their rollouts continue."""
        for paused in (*self._paused.values(), *self.answered):
            paused.keys_values = None

    def clear(self) -> None:
        """Drop everything."""
        self._paused.clear()
        self.answered.clear()
        self._ended.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return all waiting rollouts in host memory; an empty dict if there is none."""
        if not len(self):
            return {}
        paused = [*self._paused.values(), *self.answered]
        state = {
            "paused": [
                {
                    "insertions": rollout.insertions.state(),
                    "row": [host(value) for value in rollout.row],
                    "keys_values": None if rollout.keys_values is None else cache_on_host(rollout.keys_values),
                    "answer": None if rollout.answer is None else list(rollout.answer),
                }
                for rollout in paused
            ],
            "ended": [(rollout.key, rollout.index) for rollout in self._ended],
            "rollouts": packed(
                [*(rollout.rollout for rollout in paused), *(rollout.rollout for rollout in self._ended)]
            ),
        }
        return {"waiting": state}

    def load_state_dict(self, state: dict[str, Any], device: Any) -> None:
        """Restore the rollouts of `state_dict`; `state` may have further entries, or no entry of this class."""
        self.clear()
        if "waiting" not in state:
            return
        saved = state["waiting"]
        rollouts = iter(unpack_rollouts(saved["rollouts"]))
        for entry in saved["paused"]:
            keys_values = entry["keys_values"]
            if keys_values is not None and self._keeps == "slot":
                keys_values = [(keys.to(device), values.to(device)) for keys, values in keys_values]
            paused = Paused(
                Insertions.from_state(entry["insertions"], self._sampling),
                next(rollouts),
                [value.to(device) for value in entry["row"]],
                keys_values,
                None if entry["answer"] is None else tuple(entry["answer"]),
            )
            if paused.answer is None:
                self._paused[paused.insertions.rollout_id] = paused
            else:
                self.answered.append(paused)
        self._ended = [FinishedRollout(key, index, next(rollouts)) for key, index in saved["ended"]]


def cache_on_host(keys_values: KeysValues) -> KeysValues:
    """Return a copy of all keys and values in host memory."""
    return [(host(keys), host(values)) for keys, values in keys_values]
