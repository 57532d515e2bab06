"""Estimate the time left of a study from its members' pace and the number of members that run at a time."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

# A member's pace is known once it has advanced this many times, or was observed for this many seconds. Its first steps
# are not representative, because they also load and compile.
MIN_OBSERVED_S = 30.0
MIN_ADVANCES = 3
# Besides counting down, the displayed estimate changes by at most this fraction of itself per `MAX_CHANGE_S` seconds.
MAX_CHANGE = 0.2
MAX_CHANGE_S = 10.0
SAME_WORK = 0.01  # the total of steps counts as unchanged up to this relative change
_LATEST = 32  # number of members that ended last, used to estimate the overhead


@dataclass
class _Member:
    """Observations of one member. An advance is an observation of a higher step than before.

    Attributes:
        recipe: label of its recipe.
        steps: budget in optimizer steps.
        begin: start of the member: time in seconds, and step.
        first, last: first and latest observed advance: time and step; None before the first advance.
        advances: number of observed advances.
        running: whether the member is running.
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
        """Seconds per step since the first advance (since the start if advances are few); None while unknown."""
        if self.last is None or self.first is None:
            return None
        if self.advances < MIN_ADVANCES:
            seconds = self.last[0] - self.begin[0]
            return seconds / (self.last[1] - self.begin[1]) if seconds >= MIN_OBSERVED_S else None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


class TimeLeft:
    """Estimate of the seconds until all members of a study have ended.

    A running member continues at its own pace. A waiting member has the mean pace of its recipe. If no member of its
    recipe was observed, it takes as long as an average member, because members often have equal budgets in steps or in
    compute. A waiting member starts when another ends, so that the number of running members stays the same.

    The displayed value approaches the estimate by at most `MAX_CHANGE`, so that one slow step does not turn hours into
    days. It may jump only when the total number of steps has changed, because members were added, or ended early.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._overheads: list[float] = []  # by ended member, seconds besides its steps: start, last evaluation
        self._recent_running_counts: list[int] = []  # number of running members at each of the last calls
        self._last_estimate: tuple[float, float] | None = None  # (time, value) of the last estimate
        self._total_steps = 0.0  # steps of all members, done and remaining, at the last estimate

    def started(self, run: str, recipe: str, step: int, steps: int, now: float) -> None:
        """Record that a member with a budget of `steps` has started at `step`."""
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
            waiting: for each member still to start, its recipe ("" if unknown) and its steps.
            now: time in seconds, by the same clock as in the other methods.
        """
        estimate = self._estimate(running, waiting)
        if estimate is None:
            return None
        steps_done = sum(
            member.last[1] - member.begin[1] for member in self._members.values() if member.last is not None
        )
        work = steps_done + sum(running.values()) + sum(steps for _, steps in waiting)
        if self._last_estimate is not None and abs(work - self._total_steps) <= SAME_WORK * self._total_steps:
            elapsed = now - self._last_estimate[0]
            expected = max(0.0, self._last_estimate[1] - elapsed)
            max_change_s = max(expected, MAX_CHANGE_S) * MAX_CHANGE * elapsed / MAX_CHANGE_S
            estimate = min(max(estimate, expected - max_change_s), expected + max_change_s)
        self._last_estimate, self._total_steps = (now, estimate), work
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
        # Between the end of one member and the start of the next, fewer run for a moment: take the largest recent
        # number.
        self._recent_running_counts = [*self._recent_running_counts, len(running)][-5:]
        ends += [0.0] * (max(1, *self._recent_running_counts) - len(ends))
        heapq.heapify(ends)
        last = max(ends)
        for recipe, budget in waiting:
            length = pace_of[recipe] * budget if recipe in pace_of else mean_length
            end = heapq.heappop(ends) + overhead + length
            heapq.heappush(ends, end)
            last = max(last, end)
        return last
