"""Ledger of rollouts in flight: which engine has which group, and which groups wait for an engine. No I/O.

The ledger only needs a hashable name per engine, not its address. Every rollout of a submitted group is returned
once, even if several engines finish it. Unfinished groups of a lost engine wait again, the oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, WaitingRollout, request_from, request_state
from lightning_scalerl.generator.insertion import check_room
from lightning_scalerl.rollouts.rollout import packed, unpacked


@dataclass(eq=False)
class _OpenGroup:
    """Group in flight: the indices of its unfinished rollouts, and the engine that samples them.

    `name` replaces the group's key in the engines, where keys of evaluation and training could collide. `waiting` has
    the rollouts that wait for an insertion in their engine, with the group's key.
    """

    name: int
    request: GroupRequest
    missing: set[int]
    engine: Hashable | None = None
    waiting: dict[int, WaitingRollout] = field(default_factory=dict)


class Ledger:
    """Groups in flight, oldest first, and finished rollouts that were not returned yet.

    Args:
        names: source of unique names; ledgers that share engines must share it.
    """

    def __init__(self, names: Names | None = None) -> None:
        self.names = names or Names()
        self._open: dict[int, _OpenGroup] = {}
        self._waiting: deque[_OpenGroup] = deque()
        self._ended: list[FinishedRollout] = []
        self._new_waiting: list[tuple[_OpenGroup, int]] = []

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not yet returned."""
        return sum(len(each.missing) for each in self._open.values()) + len(self._ended)

    @property
    def waiting(self) -> int:
        """Number of rollouts that are not assigned to an engine."""
        return sum(len(each.missing) for each in self._waiting)

    @property
    def has_ended(self) -> bool:
        """Return whether there is a rollout to report: one that has ended, or waits for an insertion."""
        return bool(self._ended or self._new_waiting)

    def unfinished(self, engine: Hashable) -> int:
        """Return the number of an engine's unfinished rollouts, not counting rollouts that wait for an insertion."""
        rollouts = (len(each.missing) - len(each.waiting) for each in self._open.values() if each.engine == engine)
        return sum(rollouts)

    def submit(self, request: GroupRequest) -> None:
        """Queue a group until an engine has room."""
        entry = _OpenGroup(self.names.next(), request, set(range(request.completions)))
        self._open[entry.name] = entry
        self._waiting.append(entry)

    def assign(self, slots: Mapping[Any, int]) -> list[tuple[Any, GroupRequest]]:
        """Assign waiting groups, the oldest first, each to the engine with most free slots.

        A group is never split. Groups wait here while no engine has a free slot, so that any engine can take them.

        Args:
            slots: for each engine that is up, the number of rollouts that it decodes together.

        Returns:
            (engine, request) pairs to send.
        """
        room = {engine: number - self.unfinished(engine) for engine, number in slots.items()}
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
        """Record a finished rollout; return False if it was recorded before, or was never requested."""
        entry = self._open.get(each.key)
        if entry is None or each.index not in entry.missing:
            return False
        entry.missing.remove(each.index)
        entry.waiting.pop(each.index, None)
        if not entry.missing:
            del self._open[each.key]
            if entry in self._waiting:  # finished by an engine that was believed lost
                self._waiting.remove(entry)
        self._ended.append(replace(each, key=entry.request.key))
        return True

    def collect(self) -> list[FinishedRollout]:
        """Return the rollouts that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def waits(self, each: WaitingRollout, engine: Hashable, report: bool = True) -> bool:
        """Record that a rollout waits in an engine.

        Args:
            each: the rollout, with its group's name in the engine.
            engine: the engine.
            report: whether `collect_waiting` returns it.

        Returns:
            False if it was returned as finished before: the engine has sampled its group once more, and should end it.
        """
        entry = self._open.get(each.key)
        if entry is None or each.index not in entry.missing:
            return False
        if entry.engine == engine and each.index not in entry.waiting:
            entry.waiting[each.index] = replace(each, key=entry.request.key)
            if report:
                self._new_waiting.append((entry, each.index))
        return True

    def all_waiting(self) -> list[WaitingRollout]:
        """Return all rollouts that wait for an insertion."""
        return [each for entry in self._open.values() for each in entry.waiting.values()]

    def collect_waiting(self) -> list[WaitingRollout]:
        """Return the rollouts that have begun to wait since the last call and still do."""
        new, self._new_waiting = self._new_waiting, []
        return [entry.waiting[index] for entry, index in new if index in entry.waiting]

    def continued(self, key: int, index: int, answer: Sequence[int] | None = None) -> tuple[Any, int]:
        """Record that a rollout no longer waits; return its engine, and its group's name there.

        Raises:
            KeyError: it does not wait. Its engine may have been lost: then it is sampled again from its start.
            ValueError: it has no room for its answer.
        """
        for entry in self._open.values():
            if entry.request.key == key and index in entry.waiting:
                if answer is not None:
                    check_room(key, index, entry.waiting[index].room, answer)
                del entry.waiting[index]
                return entry.engine, entry.name
        raise KeyError(f"rollout {index} of group {key} does not wait for an insertion")

    def keep_only(self, engines: Collection[Hashable]) -> None:
        """Queue again every group whose engine is not one of `engines`, the oldest first."""
        lost = [each for each in self._open.values() if each.engine is not None and each.engine not in engines]
        for entry in lost:
            entry.engine = None
            entry.waiting.clear()
        # Names increase in order of submission.
        self._waiting = deque(sorted({*self._waiting, *lost}, key=lambda each: each.name))

    def state_dict(self, number_of: Callable[[Any], int]) -> dict[str, Any]:
        """Return everything in flight, for a checkpoint; `number_of` maps an engine to its number."""
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
        """Restore everything in flight; each group waits until `adopt` records that an engine has it."""
        rollouts = unpacked(state["rollouts"])
        self._ended = [
            FinishedRollout(key, index, rollout)
            for (key, index), rollout in zip(state["finished"], rollouts, strict=True)
        ]
        self._open = {
            name: _OpenGroup(name, request_from(request), set(missing)) for name, request, missing, _ in state["open"]
        }
        self._new_waiting = []
        self._waiting = deque(self._open[name] for name in sorted(self._open))
        # Advance past both counters: names restored with the state must not be issued again.
        self.names.skip(state["next_name"])

    def adopt(self, name: int, engine: Hashable) -> None:
        """Record that an engine already samples a restored group."""
        entry = self._open[name]
        entry.engine = engine
        self._waiting.remove(entry)


class Names:
    """Source of unique, increasing numbers."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return a number that was not returned before."""
        self.last += 1
        return self.last

    def skip(self, numbers: int) -> None:
        """Skip this many numbers."""
        self.last += numbers
