"""Time left of a study: running members at their own pace, waiting ones at that of similar members, by free slots."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

# A member's pace is unknown until it has been observed for this long, or has advanced this many times, because the
# first steps also load and compile.
SEEN_S = 30.0
ADVANCES = 3
# Apart from the passing of time, the displayed value changes by at most this share of itself per `SETTLES_S` seconds.
STEADY = 0.2
SETTLES_S = 10.0
SAME_WORK = 0.01  # relative change of the work up to which it counts as unchanged
_LATEST = 32  # number of latest ends used to estimate time beyond steps


@dataclass
class _Member:
    """One member as observed: its start, the point from which its pace is measured, and its latest advance."""

    recipe: str
    steps: int
    begin: tuple[float, int]
    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None
    advances: int = 0
    running: bool = True

    @property
    def pace(self) -> float | None:
        """Seconds per step since the first advance, or since the start with few advances; None while unknown."""
        if self.last is None or self.first is None:
            return None
        if self.advances < ADVANCES:
            seconds = self.last[0] - self.begin[0]
            return seconds / (self.last[1] - self.begin[1]) if seconds >= SEEN_S else None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


class TimeLeft:
    """Estimate of the seconds until all members of a study have ended.

    A running member continues at its own pace. A waiting one takes as long as others of its recipe would with its
    budget, or, if none of its recipe was observed, as long as members take on average: budgets are often matched, in
    steps or in compute. It starts when a slot is free. The displayed value is kept steady: it moves towards the
    estimate by at most `STEADY`, so that one slow step does not turn hours into days. It jumps only if the work itself
    has changed: members were added, or will not run to their budgets.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._beyond: list[float] = []  # seconds that members took besides their steps: start, last evaluation
        self._slots: list[int] = []
        self._last_estimate: tuple[float, float] | None = None  # (time, value) of the last estimate
        self._work = 0.0  # steps of all members, done and remaining

    def started(self, run: str, recipe: str, step: int, steps: int, now: float) -> None:
        """Note that a member has started, with `step` of its `steps` done."""
        self._members[run] = _Member(recipe, steps, (now, step))

    def saw(self, run: str, step: int, now: float) -> None:
        """Note the step that a running member has reached."""
        member = self._members.get(run)
        if member is not None and step > (member.last or member.begin)[1]:
            member.last = now, step
            member.first = member.first or member.last
            member.advances += 1

    def ended(self, run: str, step: int, now: float) -> None:
        """Note that a member has ended, and at which step."""
        self.saw(run, step, now)
        member = self._members.get(run)
        if member is None or not member.running:
            return
        member.running = False
        if member.pace is not None and member.last is not None:
            made = member.last[1] - member.begin[1]
            self._beyond = [*self._beyond, max(0.0, now - member.begin[0] - member.pace * made)][-_LATEST:]

    def left_s(self, running: Mapping[str, int], waiting: Sequence[tuple[str, float]], now: float) -> float | None:
        """Return the seconds left; None while no pace is known.

        Args:
            running: remaining steps of each running member.
            waiting: recipe ("" if unknown) and steps of each member still to run.
            now: seconds, by the same clock as in the other methods.
        """
        estimate = self._estimate(running, waiting)
        if estimate is None:
            return None
        steps_done = sum(
            member.last[1] - member.begin[1] for member in self._members.values() if member.last is not None
        )
        work = steps_done + sum(running.values()) + sum(steps for _, steps in waiting)
        if self._last_estimate is not None and abs(work - self._work) <= SAME_WORK * self._work:
            elapsed = now - self._last_estimate[0]
            expected = max(0.0, self._last_estimate[1] - elapsed)
            reach = max(expected, SETTLES_S) * STEADY * elapsed / SETTLES_S
            estimate = min(max(estimate, expected - reach), expected + reach)
        self._last_estimate, self._work = (now, estimate), work
        return estimate

    def _estimate(self, running: Mapping[str, int], waiting: Sequence[tuple[str, float]]) -> float | None:
        """Return the seconds until the last member ends if all continue as now, filling the slots in order."""
        paces: dict[str, list[float]] = defaultdict(list)
        lengths: dict[str, list[float]] = defaultdict(list)
        for member in self._members.values():
            if (pace := member.pace) is not None:
                paces[member.recipe].append(pace)
                lengths[member.recipe].append(pace * member.steps)
        if not paces:
            return None
        usual = mean(mean(values) for values in lengths.values())
        pace_of = {recipe: mean(values) for recipe, values in paces.items()}
        beyond = median(self._beyond) if self._beyond else 0.0
        ends = []
        for run, steps in running.items():
            known = self._members.get(run)
            pace = None if known is None else known.pace or pace_of.get(known.recipe)
            if pace is None:
                pace = usual / max(1, steps if known is None else known.steps)
            ends.append(pace * steps)
        # A slot that is briefly empty between two members still counts: use the largest recent number.
        self._slots = [*self._slots, len(running)][-5:]
        ends += [0.0] * (max(1, *self._slots) - len(ends))
        heapq.heapify(ends)
        last = max(ends)
        for recipe, budget in waiting:
            length = pace_of[recipe] * budget if recipe in pace_of else usual
            end = heapq.heappop(ends) + beyond + length
            heapq.heappush(ends, end)
            last = max(last, end)
        return last
