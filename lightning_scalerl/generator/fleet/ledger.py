"""Ledger of rollouts in flight: which engine has what, what is owed, and what waits for room. No I/O.

The ledger knows groups and engines by name and not where an engine is. Every rollout of a submitted group is handed
out once, whoever sends it and however often; what a lost engine had not finished waits again, the oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, request_from, request_state
from lightning_scalerl.rollouts.rollout import packed, unpacked


@dataclass(eq=False)
class _Open:
    """Group in flight: its rollouts that are still to come, and the engine that samples them.

    `name` is its key in the engines: there the keys of evaluation and of training could collide.
    """

    name: int
    request: GroupRequest
    missing: set[int]
    engine: Hashable | None = None


class Ledger:
    """Groups in flight, oldest first, and the rollouts that have ended and wait to be handed out.

    Args:
        names: source of names that were never given before; ledgers that share engines share it.
    """

    def __init__(self, names: Names | None = None) -> None:
        self.names = names or Names()
        self._open: dict[int, _Open] = {}
        self._waiting: deque[_Open] = deque()
        self._ended: list[FinishedRollout] = []

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not handed out."""
        return sum(len(each.missing) for each in self._open.values()) + len(self._ended)

    @property
    def waiting(self) -> int:
        """Number of rollouts that no engine has."""
        return sum(len(each.missing) for each in self._waiting)

    @property
    def has_ended(self) -> bool:
        """Return whether there is a rollout to hand out."""
        return bool(self._ended)

    def owed(self, engine: Hashable) -> int:
        """Return the number of rollouts that an engine has and has not finished."""
        return sum(len(each.missing) for each in self._open.values() if each.engine == engine)

    def submit(self, request: GroupRequest) -> None:
        """Take a group; it waits for an engine with room."""
        entry = _Open(self.names.next(), request, set(range(request.completions)))
        self._open[entry.name] = entry
        self._waiting.append(entry)

    def assign(self, slots: Mapping[Any, int]) -> list[tuple[Any, GroupRequest]]:
        """Give waiting groups, the oldest first, each to the engine with most room; return who is to be sent what.

        A group goes whole to one engine. What does not fit waits here, where every engine can take it.

        Args:
            slots: number of rollouts that each engine which is up decodes together.
        """
        room = {engine: number - self.owed(engine) for engine, number in slots.items()}
        given = []
        while self._waiting and room:
            best = max(room, key=room.__getitem__)
            if room[best] <= 0:
                break
            entry = self._waiting.popleft()
            entry.engine = best
            room[best] -= len(entry.missing)
            given.append((best, replace(entry.request, key=entry.name)))
        return given

    def finished(self, each: FinishedRollout) -> bool:
        """Take a rollout that has ended; False if it has come already, or was never asked for."""
        entry = self._open.get(each.key)
        if entry is None or each.index not in entry.missing:
            return False
        entry.missing.remove(each.index)
        if not entry.missing:
            del self._open[each.key]
            if entry in self._waiting:  # an engine that was taken for lost has finished it
                self._waiting.remove(entry)
        self._ended.append(replace(each, key=entry.request.key))
        return True

    def collect(self) -> list[FinishedRollout]:
        """Hand out the rollouts that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def keep_only(self, engines: Collection[Hashable]) -> None:
        """Let all groups wait again whose engine is none of these, the oldest first."""
        lost = [each for each in self._open.values() if each.engine is not None and each.engine not in engines]
        for entry in lost:
            entry.engine = None
        # Names are given in the order of submission.
        self._waiting = deque(sorted({*self._waiting, *lost}, key=lambda each: each.name))

    def state_dict(self, number_of: Callable[[Any], int]) -> dict[str, Any]:
        """Return everything in flight, for a checkpoint; `number_of` an engine is its place among all."""
        return {
            "next_name": self.names.last,
            "finished": [(each.key, each.index) for each in self._ended],
            "rollouts": packed([each.rollout for each in self._ended]),
            "open": [
                (
                    each.name,
                    request_state(each.request),
                    sorted(each.missing),
                    None if each.engine is None else number_of(each.engine),
                )
                for each in self._open.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything in flight; all of it waits until `adopt` says that an engine has it."""
        rollouts = unpacked(state["rollouts"])
        self._ended = [
            FinishedRollout(key, index, rollout)
            for (key, index), rollout in zip(state["finished"], rollouts, strict=True)
        ]
        self._open = {
            name: _Open(name, request_from(request), set(missing)) for name, request, missing, _ in state["open"]
        }
        self._waiting = deque(self._open[name] for name in sorted(self._open))
        # Beyond both counters: names that come back with the state must not be given again.
        self.names.skip(state["next_name"])

    def adopt(self, name: int, engine: Hashable) -> None:
        """Record that an engine samples a restored group already."""
        entry = self._open[name]
        entry.engine = engine
        self._waiting.remove(entry)


class Names:
    """Numbers that are given once each."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return a number that was never given before."""
        self.last += 1
        return self.last

    def skip(self, numbers: int) -> None:
        """Leave so many numbers out."""
        self.last += numbers
