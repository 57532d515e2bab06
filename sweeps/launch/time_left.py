"""Estimate the time left of a study from the pace of its members and the number of members that run at a time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

# A member's pace is unknown until the member was observed for this many seconds, or has advanced this many times,
# because the first steps also load and compile.
MIN_OBSERVED_S = 30.0
MIN_ADVANCES = 3
# Besides counting down, the displayed value changes by at most this fraction of itself per `MAX_CHANGE_S` seconds.
MAX_CHANGE = 0.2
MAX_CHANGE_S = 10.0
SAME_WORK = 0.01  # relative change of the total steps up to which they count as unchanged
_LATEST = 32  # number of members, the latest that ended, used to estimate overhead


@dataclass
class _Member:
    """Observations of one member.

    Attributes:
        recipe: label of the recipe.
        steps: budget in optimizer steps.
        begin: time in seconds and step at the start.
        first, last: time and step of the first and latest observed advance; None before an advance.
        advances: number of observed advances.
        running: whether the member has not ended.
    """

    recipe: str
    steps: int
    begin: tuple[float, int]
    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None
    advances: int = 0
    running: bool = True

    @property
    def pace(self) -> float | None:
        """Seconds per step since the first advance, or since the start if advances are few; None while unknown."""
        if self.last is None or self.first is None:
            return None
        if self.advances < MIN_ADVANCES:
            seconds = self.last[0] - self.begin[0]
            return seconds / (self.last[1] - self.begin[1]) if seconds >= MIN_OBSERVED_S else None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


class TimeLeft:
    """Estimate of the seconds until all members of a study have ended.

    A running member continues at its own pace. A waiting member has the mean pace of its recipe. If no member of its
    recipe was observed, it takes as long as the average member, because budgets are often matched, in steps or in
    compute. Each waiting member starts when another member ends, so that the number of running members stays the same.

    The displayed value moves towards the estimate by at most `MAX_CHANGE`, so that one slow step does not turn hours
    into days. It jumps only if the total number of steps has changed: members were added, or ended before their
    budgets.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._overheads: list[float] = []  # seconds that members took besides their steps: start, last evaluation
        self._slots: list[int] = []  # recent numbers of running members
        self._last_estimate: tuple[float, float] | None = None  # (time, value) of the last estimate
        self._work = 0.0  # steps of all members, done and remaining

    def started(self, run: str, recipe: str, step: int, steps: int, now: float) -> None:
        """Record that a member has started, with `step` of its `steps` done."""
        self._members[run] = _Member(recipe, steps, (now, step))

    def reached(self, run: str, step: int, now: float) -> None:
        """Record the step that a running member has reached."""
        member = self._members.get(run)
        if member is not None and step > (member.last or member.begin)[1]:
            member.last = now, step
            member.first = member.first or member.last
            member.advances += 1

    def ended(self, run: str, step: int, now: float) -> None:
        """Record that a member has ended, and at which step."""
        self.reached(run, step, now)
        member = self._members.get(run)
        if member is None or not member.running:
            return
        member.running = False
        if member.pace is not None and member.last is not None:
            steps = member.last[1] - member.begin[1]
            self._overheads = [*self._overheads, max(0.0, now - member.begin[0] - member.pace * steps)][-_LATEST:]

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
            max_change_s = max(expected, MAX_CHANGE_S) * MAX_CHANGE * elapsed / MAX_CHANGE_S
            estimate = min(max(estimate, expected - max_change_s), expected + max_change_s)
        self._last_estimate, self._work = (now, estimate), work
        return estimate

    def _estimate(self, running: Mapping[str, int], waiting: Sequence[tuple[str, float]]) -> float | None:
        """Return the seconds until the last member ends, before smoothing; None while no pace is known."""
        paces: dict[str, list[float]] = defaultdict(list)
        lengths: dict[str, list[float]] = defaultdict(list)
        for member in self._members.values():
            if (pace := member.pace) is not None:
                paces[member.recipe].append(pace)
                lengths[member.recipe].append(pace * member.steps)
        if not paces:
            return None
        mean_length = mean(mean(values) for values in lengths.values())
        pace_of = {recipe: mean(values) for recipe, values in paces.items()}
        overhead = median(self._overheads) if self._overheads else 0.0
        ends = []
        for run, steps in running.items():
            known = self._members.get(run)
            pace = None if known is None else known.pace or pace_of.get(known.recipe)
            if pace is None:
                pace = mean_length / max(1, steps if known is None else known.steps)
            ends.append(pace * steps)
        # When one member has ended and the next has not started, fewer run for a moment: use the largest recent number.
        self._slots = [*self._slots, len(running)][-5:]
        ends += [0.0] * (max(1, *self._slots) - len(ends))
        heapq.heapify(ends)
        last = max(ends)
        for recipe, budget in waiting:
            length = pace_of[recipe] * budget if recipe in pace_of else mean_length
            end = heapq.heappop(ends) + overhead + length
            heapq.heappush(ends, end)
            last = max(last, end)
        return last
