"""Record of the rollouts in flight: which engine has which group, and which groups wait for an engine. No I/O.

The ledger only needs a hashable name per engine, not its address. Every rollout of a submitted group is returned once,
even if several engines finish it. Unfinished groups of a lost engine wait again, the oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_scalerl.generator.base import FinishedRollout, GroupRequest, WaitingRollout, request_from, request_state
from lightning_scalerl.generator.insertion import check_room
from lightning_scalerl.rollouts.rollout import packed, unpack_rollouts


@dataclass(eq=False)
class _OpenGroup:
    """Group in flight: the indices of its unfinished rollouts, and the engine that samples them.

    Attributes:
        name: number by which engines know the group. Its key would not do, because keys of evaluation and training may
            be equal.
        request: the request, with the caller's key.
        missing: indices of unfinished rollouts.
        engine: engine that samples the group; None while it waits for one.
        waiting: rollouts that wait in the engine for an insertion, by index, with the caller's key.
    """

    name: int
    request: GroupRequest
    missing: set[int]
    engine: Hashable | None = None
    waiting: dict[int, WaitingRollout] = field(default_factory=dict)


class Ledger:
    """Groups in flight, oldest first, and finished rollouts that were not returned yet.

    Args:
        names: source of unique group names; ledgers that share engines must share it.
    """

    def __init__(self, names: Names | None = None) -> None:
        self.names = names or Names()
        self._open: dict[int, _OpenGroup] = {}
        self._unassigned: deque[_OpenGroup] = deque()
        self._ended: list[FinishedRollout] = []
        self._new_waiting: list[tuple[_OpenGroup, int]] = []

    @property
    def in_flight(self) -> int:
        """Number of rollouts submitted and not yet returned."""
        return sum(len(group.missing) for group in self._open.values()) + len(self._ended)

    @property
    def unassigned(self) -> int:
        """Number of rollouts that are not assigned to an engine."""
        return sum(len(group.missing) for group in self._unassigned)

    @property
    def has_report(self) -> bool:
        """True if there is a rollout to report: one that has ended or has begun to wait for an insertion."""
        return bool(self._ended or self._new_waiting)

    def unfinished(self, engine: Hashable) -> int:
        """Return the number of an engine's rollouts that are neither finished nor waiting for their environment."""
        rollouts = (len(group.missing) - len(group.waiting) for group in self._open.values() if group.engine == engine)
        return sum(rollouts)

    def submit(self, request: GroupRequest) -> None:
        """Queue a group until an engine has room."""
        group = _OpenGroup(self.names.next(), request, set(range(request.completions)))
        self._open[group.name] = group
        self._unassigned.append(group)

    def assign(self, slots: Mapping[Any, int]) -> list[tuple[Any, GroupRequest]]:
        """Assign groups without an engine, the oldest first, each to the engine with most free slots.

        A group is never split. Groups stay unassigned while no engine has a free slot, so that the first engine with
        one can take them.

        Args:
            slots: for each engine that is up, the number of rollouts that it decodes together.

        Returns:
            (engine, request) pairs to send.
        """
        room = {engine: number - self.unfinished(engine) for engine, number in slots.items()}
        assignments = []
        while self._unassigned and room:
            best = max(room, key=room.__getitem__)
            if room[best] <= 0:
                break
            group = self._unassigned.popleft()
            group.engine = best
            room[best] -= len(group.missing)
            assignments.append((best, replace(group.request, key=group.name)))
        return assignments

    def record_finished(self, rollout: FinishedRollout) -> bool:
        """Record a finished rollout; return False if it was recorded before, or was never requested."""
        group = self._open.get(rollout.key)
        if group is None or rollout.index not in group.missing:
            return False
        group.missing.remove(rollout.index)
        group.waiting.pop(rollout.index, None)
        if not group.missing:
            del self._open[rollout.key]
            if group in self._unassigned:  # finished by an engine that was believed lost
                self._unassigned.remove(group)
        self._ended.append(replace(rollout, key=group.request.key))
        return True

    def collect(self) -> list[FinishedRollout]:
        """Return the rollouts that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def record_waiting(self, rollout: WaitingRollout, engine: Hashable, report: bool = True) -> bool:
        """Record that a rollout waits for an insertion.

        Args:
            rollout: the rollout, with its group's name in the engine.
            engine: the engine that holds the rollout.
            report: whether `collect_waiting` returns the rollout.

        Returns:
            False if the rollout was already returned as finished: the engine has sampled its group a second time, and
            the caller should end the rollout there.
        """
        group = self._open.get(rollout.key)
        if group is None or rollout.index not in group.missing:
            return False
        if group.engine == engine and rollout.index not in group.waiting:
            group.waiting[rollout.index] = replace(rollout, key=group.request.key)
            if report:
                self._new_waiting.append((group, rollout.index))
        return True

    def all_waiting(self) -> list[WaitingRollout]:
        """Return all rollouts that wait for tokens to be inserted, such as an observation of their environment."""
        return [rollout for group in self._open.values() for rollout in group.waiting.values()]

    def collect_waiting(self) -> list[WaitingRollout]:
        """Return the rollouts that have begun to wait since the last call and still do."""
        new, self._new_waiting = self._new_waiting, []
        return [group.waiting[index] for group, index in new if index in group.waiting]

    def resume(self, key: int, index: int, answer: Sequence[int] | None = None) -> tuple[Any, int]:
        """Record that a rollout no longer waits; return its engine, and its group's name in that engine.

        Raises:
            KeyError: the rollout does not wait. If its engine was lost, it is sampled again from its start.
            ValueError: there is no room for the answer.
        """
        for group in self._open.values():
            if group.request.key == key and index in group.waiting:
                if answer is not None:
                    check_room(key, index, group.waiting[index].room, answer)
                del group.waiting[index]
                return group.engine, group.name
        raise KeyError(f"rollout {index} of group {key} does not wait for an insertion")

    def requeue_others(self, engines: Collection[Hashable]) -> None:
        """Queue again every group whose engine is not one of `engines`, the oldest first."""
        lost = [group for group in self._open.values() if group.engine is not None and group.engine not in engines]
        for group in lost:
            group.engine = None
            group.waiting.clear()
        # Names increase in order of submission, so the oldest group comes first.
        self._unassigned = deque(sorted({*self._unassigned, *lost}, key=lambda group: group.name))

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
        rollouts = unpack_rollouts(state["rollouts"])
        self._ended = [
            FinishedRollout(key, index, rollout)
            for (key, index), rollout in zip(state["finished"], rollouts, strict=True)
        ]
        self._open = {
            name: _OpenGroup(name, request_from(request), set(missing)) for name, request, missing, _ in state["open"]
        }
        self._new_waiting = []
        self._unassigned = deque(self._open[name] for name in sorted(self._open))
        # Restored names must not be issued again. The sum of the saved counter and the current one is above both.
        self.names.skip(state["next_name"])

    def adopt(self, name: int, engine: Hashable) -> None:
        """Record that an engine already samples a restored group."""
        group = self._open[name]
        group.engine = engine
        self._unassigned.remove(group)


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
