"""A command's metrics as records of a journal: each step is recorded once, even if the command or member is killed.

A step is recorded once it is complete: a later step was logged, or the command has ended. When an attempt resumes from
a checkpoint and logs steps again, a `resume` record voids the old ones. Nothing is lost when a member is killed: the
metrics are in the command's own files, and the next attempt continues reading them. A poll costs time proportional to
the amount logged since the last one.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from sweeps.command.compute import Compute
from sweeps.command.growing import Column, Ending
from sweeps.command.metrics import Found, Source
from sweeps.command.settings import Command
from sweeps.errors import UserError
from sweeps.run.activity import activity
from sweeps.run.fields import MOST_WHOLE
from sweeps.run.journal import Journal, JournalView
from sweeps.source.text import listed, short

# Evaluations are overdue after this multiple of the longest distance between two of them.
_OVERDUE = 3.0


class MetricsError(UserError):
    """Error in a command's metrics: a missing column, or steps that went back; the message names it."""


@dataclass
class _Fresh:
    """Metrics that an attempt has logged so far.

    Attributes:
        latest: by column and step, the value that was logged last.
        waiting: steps with values that are not recorded yet.
        newest: the largest step; newest_compute: the largest step that has compute.
        column: rows of the compute column, in the order of logging; `counter` has processed the first `counted`.
    """

    latest: dict[str, dict[float, float]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    newest: int = -1
    newest_compute: int = -1
    column: Column = field(default_factory=list)
    counter: Counter | None = None
    counted: int = 0

    def take(self, name: str, rows: Sequence[tuple[float, float]], compute: Compute, where: str) -> None:
        """Add rows of a column.

        Raises:
            MetricsError: a step is not a whole number, or too large.
        """
        latest = self.latest.setdefault(name, {})
        for step, value in rows:
            if not abs(step) <= MOST_WHOLE or step != int(step):
                raise MetricsError(
                    f"command.metrics.step: {step:g} in {where} is no whole step; name the column that counts steps"
                )
            latest[step] = value
            self.waiting.add(int(step))
            self.newest = max(self.newest, int(step))
            if name == compute.column:
                self.newest_compute = max(self.newest_compute, int(step))
        if name == compute.column:
            self.column += rows

    def at(self, step: int) -> dict[str, float]:
        """Return the values at a step, by column."""
        return {name: column[step] for name, column in self.latest.items() if step in column}


class Follower:
    """Writer of a member's journal from its command's metrics.

    Args:
        journal: open for writing, with its header written.
        earlier: the journal as earlier attempts left it; None if it is new.
        command: the command that logs the metrics.
        source: reader of the metrics.
        resume: facts for a `resume` record.
        clock: seconds, replaceable in tests.

    Attributes:
        began_anew: True if this attempt starts from step 0, because there is no checkpoint to continue from.
        again: True if the command was started before.
        last_step: the newest step in the journal, -1 before the first.
    """

    def __init__(
        self,
        journal: Journal,
        earlier: JournalView | None,
        command: Command,
        source: Source,
        resume: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._command, self._source, self._clock = journal, command, source, clock
        self._axis = command.compute.axis
        records = [] if earlier is None else earlier.records
        # Compute in the journal, by step.
        self._spent: dict[int, float] = {r.step: r.metrics.get(self._axis, 0.0) for r in records}
        self._wasted = max((r.metrics.get("compute/wasted_device_hours", 0.0) for r in records), default=0.0)
        self._eval_steps = {r.step for r in records if r.kind == "eval"}
        self._known: dict[int, dict[str, float]] = {}
        for record in records:
            self._known.setdefault(record.step, {}).update(record.metrics)
        self.began_anew, self.again = command.anew, earlier is not None
        self._holes = [] if earlier is None else list(earlier.holes)
        self._resume_facts = dict(resume or {})
        self.last_step = max(self._spent, default=-1)
        # State of this attempt. `_before`: columns in the source before it started. `_last_before`: the last recorded
        # step before it. `_begin`: step, compute and clock at which it starts to count. `_seen`: step and clock at the
        # last poll. `_recorded`: the recorded values by step.
        self._before: dict[str, Column] = {}
        self._last_before: int | None = None
        self._begin = 0.0, 0.0, 0.0
        self._seen = 0.0, 0.0
        self._recorded: dict[int, dict[str, float]] = {}
        self._lowest = 0  # smallest recorded step
        # Metrics that this attempt has logged, number of rows read of each column, and the source's version for both.
        self._fresh = _Fresh()
        self._read: dict[str, int] = {}
        self._cut_back: float | None = None
        self._version = -1
        self._columns: set[str] = set()
        self._rows = self._rows_before = 0

    @property
    def has_logged(self) -> bool:
        """Return True if this attempt has logged a step."""
        return bool(self._recorded)

    def catch_up(self) -> None:
        """Record metrics that an earlier attempt logged but its killed member did not record; then begin this attempt.

        Raises:
            UserError: as `update`.
        """
        self._source.ending = Ending.TORN
        found = self._source.read()
        self._source.ending = Ending.OPEN
        self._start(self.last_step)
        newest, went_back = _newest_attempt(found.columns)
        first = min((int(step) for column in newest.values() for step, _ in column), default=0)
        other = self._differing(newest)
        self._start(self.last_step)
        if other and went_back and any(step < first for step in self._spent):
            self._go_back(first, max(self._spent))
        elif other:  # values that were logged after their step had been recorded
            self._record_ended({name: [row for row in rows if row[0] in other] for name, rows in newest.items()}, True)
        self._count_on(newest)
        last, begin = self.last_step, self._begin[0]
        behind = {
            name: [row for row in rows if row[0] > last or (name == self._command.compute.column and row[0] >= begin)]
            for name, rows in newest.items()
        }
        if steps := sorted({int(step) for rows in behind.values() for step, _ in rows if step > last}):
            # A killed member may not have recorded the `resume` of its attempt: find the gap that it left.
            if (end := self._end_of_hole(last, steps)) is not None:
                self._journal.resume(end, **self._resume_facts)
                self._leave_hole(last, end)
            self._record_ended(behind, False)
        self._before, self._rows_before = {name: list(column) for name, column in found.columns.items()}, found.rows
        self._known = {}
        self._last_before = max(self._spent, default=None)
        self._start(self.last_step)

    def _differing(self, columns: Mapping[str, Column]) -> set[int]:
        """Return the steps whose values in the journal differ from these, or are incomplete."""
        named = [(column, f"eval/{name}/pass_rate") for name, column in self._command.rewards.items()]
        named += [(column, f"train/{column}") for column in self._command.keep]
        return {
            int(step)
            for column, metric in named
            for step, value in dict(columns.get(column, ())).items()
            if step <= self.last_step and self._known.get(int(step), {}).get(metric) != value
        }

    def _count_on(self, newest: Mapping[str, Column]) -> None:
        """Continue compute from the journal's value, for a column that restarts from zero in each attempt."""
        compute = self._command.compute
        if not compute.restarts:
            return
        rows = [row for row in newest.get(compute.column or "", ()) if row[0] in self._spent]
        if rows:
            step, value = max(rows)
            self._begin = step, self._spent[int(step)] - value * compute.factor, self._begin[2]

    def _record_ended(self, columns: Mapping[str, Column], late: bool) -> None:
        """Record the metrics of an attempt that has ended; `late`: at steps before the journal's last one."""
        fresh = _Fresh()
        for name, column in columns.items():
            fresh.take(name, column, self._command.compute, self._source.title)
        if not late:
            fresh.waiting = {step for step in fresh.waiting if step > self.last_step}
        self._record(fresh, final=True, ended=True, late=late)

    def _start(self, step: int) -> None:
        """Start to count compute and to record steps after this one."""
        now = self._clock()
        self._begin = float(max(step, 0)), self._spent.get(step, 0.0), now
        self._seen = self._begin[0], now
        self._recorded = {}

    def update(self, ending: Ending = Ending.OPEN) -> bool:
        """Record the steps that are complete now; return whether there were any.

        Args:
            ending: other than `OPEN` once the command has ended, so that its last step is complete.

        Raises:
            MetricsError: a column is missing or has disappeared, the run has started again from zero, or the source
                cannot be read after the command has ended. No record is voided.
        """
        final = ending is not Ending.OPEN
        self._source.ending = ending
        try:
            found = self._source.read()
        except UserError as error:
            if not final:  # it may be half written
                return False
            raise MetricsError(f"command.metrics.source: {error}") from error
        if found.rows != self._rows:
            activity.note(f"{self._source.title}: {found.rows} rows")
        self._check_columns(found, final)
        self._take(found)
        return self._record(self._fresh, final)

    def _take(self, found: Found) -> None:
        """Add the rows logged since the last poll: those after the rows that were there before this attempt."""
        if found.version != self._version:
            self._version, self._fresh, self._read, self._cut_back = found.version, _Fresh(), {}, None
        if self.began_anew and any(len(found.columns.get(name, ())) < len(c) for name, c in self._before.items()):
            self._before = {}  # the attempt started a new log
        unread = {name: column for name, column in found.columns.items() if name not in self._read}
        # By column, the number of rows at the beginning that were there before this attempt.
        same = {name: _common(self._before.get(name, []), column) for name, column in unread.items()}
        # If a log was cut back to a checkpoint, all rows from the first differing step belong to this attempt.
        others = [c[same[n]][0] for n, c in unread.items() if same[n] < min(len(c), len(self._before.get(n, [])))]
        self._cut_back = min([*others, *([] if self._cut_back is None else [self._cut_back])], default=None)
        for name, column in unread.items():
            at = same[name]
            if self._cut_back is not None:
                while at and column[at - 1][0] >= self._cut_back:
                    at -= 1
            elif at == len(column) < len(self._before.get(name, [])):
                continue  # no new rows
            self._read[name] = at
        for name, at in self._read.items():
            rows = found.columns.get(name, [])[at:]
            if rows:
                self._fresh.take(name, rows, self._command.compute, self._source.title)
                self._read[name] += len(rows)

    def _check_columns(self, found: Found, final: bool) -> None:
        needed = dict.fromkeys(self._command.rewards.values(), "metrics.reward")
        if self._command.compute.column is not None:
            needed[self._command.compute.column] = "compute.column"
        if found.rows < self._rows:  # the file was started again
            self._columns = set()
        self._rows = found.rows
        for name, setting in needed.items():
            if name in found.columns or not found.names:
                continue
            where = f"found {listed(found.names)}"
            if name in self._columns:
                raise MetricsError(
                    f"command.{setting}: {short(name)} was in {self._source.title} up to step {self.last_step} and is "
                    f"there no more; {where}; the journal has what was there"
                )
            if final and found.rows != self._rows_before:  # otherwise this attempt has logged nothing
                raise MetricsError(
                    f"command.{setting}: no column {short(name)} in {self._source.title}; {where}; name one of these"
                )
        self._columns |= set(found.columns)

    def _record(self, fresh: _Fresh, final: bool, ended: bool = False, late: bool = False) -> bool:
        """Record the complete steps of this attempt, or of an earlier one that has `ended`; see `_record_ended`."""
        if not fresh.waiting:
            return False
        whole = list(fresh.waiting)
        newest = fresh.newest
        if not final:
            if self._command.compute.column is not None:
                # A step without compute of its own is interpolated, so it needs a later step with compute.
                newest = fresh.newest_compute
            whole = [step for step in whole if step < newest]
        # A recorded step is recorded again if its values have changed: they were logged late, or again.
        new = sorted(step for step in whole if self._recorded.get(step) != fresh.at(step))
        first = not ended and not self._recorded
        if first and self.again and not final and len(new) == 1 and self._is_far(new):
            return False  # wait for one more step, which shows the distance between logged steps
        fresh.waiting.difference_update(whole)
        if not new:
            return False
        if first:
            self._record_start(new)
        elif not ended and len(self._recorded) > 1 and new[0] < self._lowest:
            raise _not_resumed(new[0], self.last_step)
        spent = [self._spent_by(step) for step in new] if late else self._compute_at(new, newest, fresh, ended)
        first_set = next(iter(self._command.rewards.values()))
        for step, compute_then in zip(new, spent, strict=True):
            values = fresh.at(step)
            amounts = {self._axis: compute_then}
            if self._wasted:
                amounts["compute/wasted_device_hours"] = self._wasted
            kept = {f"train/{name}": values[name] for name in self._command.keep if name in values}
            self._journal.record("train", step, {**amounts, **kept})
            if first_set in values:
                rewards = {
                    f"eval/{name}/pass_rate": values[column]
                    for name, column in self._command.rewards.items()
                    if column in values
                }
                self._journal.record("eval", step, {**rewards, **amounts})
                self._eval_steps.add(step)
            self._spent[step] = compute_then
            self._lowest = min(self._lowest, step) if self._recorded else step
            self._recorded[step] = values
            self.last_step = max(self.last_step, step)
        activity.note(f"{self._source.title}: step {new[-1]}")
        return True

    def _record_start(self, new: Sequence[int]) -> None:
        """Record the step from which this attempt continues, derived from the first steps that it has logged."""
        if self._last_before is not None:
            self._go_back(new[0], self._last_before, new)
        elif self.again and (end := self._end_of_hole(-1, new)) is not None:
            self._journal.resume(end, **self._resume_facts)
            self._leave_hole(-1, end)

    def _end_of_hole(self, last: int, new: Sequence[int]) -> int | None:
        """Return the last step of the gap between the journal's `last` step and the `new` ones; None without a gap.

        There is a gap if the distance is larger than all others, between steps in the journal and between new ones.
        This detects metrics that were lost when a machine lost power.
        """
        known = sorted(self._spent)
        pairs = [(a, b) for a, b in pairwise(known) if not any(a < first <= b for first, _ in self._holes)]
        usual = max((b - a for a, b in [*pairs, *pairwise(new)]), default=None)
        return new[0] - usual if usual is not None and new[0] - max(last, 0) > usual else None

    def _is_far(self, new: Sequence[int]) -> bool:
        """Return True if there may be a gap before the new steps, judged by the distances in the journal."""
        last = max((step for step in self._spent if step < new[0]), default=-1)
        return len(self._spent) < 2 or self._end_of_hole(last, new) is not None

    def _leave_hole(self, last: int, end: int) -> None:
        """Note the gap after step `last`. Compute that is counted continues at the average pace so far."""
        print(
            f"warning: {self._source.title}: no records of steps {max(last, 0) + 1} to {end}: they are lost", flush=True
        )
        self._holes.append((max(last, 0) + 1, end))
        compute, (_, spent, began) = self._command.compute, self._begin
        if last > 0 and (compute.per_step or compute.restarts or compute.on_clock):
            self._begin = float(end), spent * end / last, began
            self._seen = float(end), self._seen[1]

    def _go_back(self, first: int, reached: int, new: Sequence[int] = ()) -> None:
        """Record the step from which an attempt continues, by its first logged step; void records up to `reached`.
        Raises:
            MetricsError: it started from the beginning although it should resume.
        """
        kept = [step for step in self._spent if step < first]
        if not kept and not self.began_anew:
            raise _not_resumed(first, self.last_step)
        step = max(kept, default=-1)
        end = self._end_of_hole(step, new) if new else None
        if self._axis == "compute/device_hours":
            self._wasted += self._spent[reached] - self._spent.get(step, 0.0)
        self._journal.resume(step if end is None else end, **self._resume_facts)
        self._spent = {at: value for at, value in self._spent.items() if at <= step}
        self._eval_steps = {at for at in self._eval_steps if at <= step}
        self.last_step = step
        self._begin = float(max(step, 0)), self._spent.get(step, 0.0), self._begin[2]
        self._seen = self._begin[0], self._seen[1]
        if end is not None:
            self._leave_hole(step, end)

    def _spent_by(self, step: int) -> float:
        """Interpolate compute at a step before the journal's last one."""
        steps = sorted(self._spent)
        return float(np.interp(step, steps, [self._spent[at] for at in steps]))

    def _compute_at(self, steps: Sequence[int], newest: int, fresh: _Fresh, ended: bool) -> list[float]:
        compute = self._command.compute
        if compute.unit == "steps":
            return [float(step) for step in steps]
        begin, base, began = self._begin
        if compute.column is not None:
            if fresh.counter is None:
                fresh.counter = Counter(compute, (begin, base), self._source.title)
            fresh.counter.add(fresh.column[fresh.counted :])
            fresh.counted = len(fresh.column)
            return fresh.counter.at(steps)
        if ended:  # the running time of a past attempt is unknown
            return [base] * len(steps)
        # Time between two polls is divided evenly over the steps.
        (at, then), now = self._seen, self._clock()
        self._seen = float(newest), now
        return [float(base + (np.interp(s, [at, newest], [then, now]) - began) * compute.factor) for s in steps]

    def fill_to(self, step: int) -> None:
        """Record a step that the command has reached without logging it, with the compute of the last logged step."""
        spent = self._spent[self.last_step]
        self._journal.record(
            "train", step, {self._axis: float(step) if self._command.compute.unit == "steps" else spent}
        )
        self._spent[step] = spent
        self.last_step = max(self.last_step, step)

    def overdue(self) -> str | None:
        """Return an error message if the reward has not been logged for much longer than usual; else None."""
        steps = sorted(self._eval_steps)
        longest = max((b - a for a, b in pairwise(steps)), default=0)
        if not longest or self.last_step - steps[-1] <= _OVERDUE * longest:
            return None
        column = next(iter(self._command.rewards.values()))
        return (
            f"command.metrics.reward: {short(column)} was last logged at step {steps[-1]} of {self.last_step}, and "
            f"every {longest} steps before; look why the command has left it out; the journal has what was there"
        )


class Counter:
    """Compute by step from a column that counts it; steps without a value are interpolated.

    Args:
        compute: meaning of the column.
        begin: the step at which the run last began or resumed, and the compute at that step.
        where: source of the column, for messages.
    """

    def __init__(self, compute: Compute, begin: tuple[float, float], where: str) -> None:
        self._compute, self._begin, self._where = compute, begin, where
        self._latest: dict[float, float] = {}
        self._at, self._values = [begin[0]], [begin[1]]
        self._sum = 0.0

    def add(self, rows: Sequence[tuple[float, float]]) -> None:
        """Add rows that were logged since the last call.

        Raises:
            MetricsError: the counter has restarted from zero, or decreases.
        """
        ordered = True
        for step, value in rows:
            last = self._at[-1]
            ordered = ordered and (step > last or (step == last and len(self._at) == 1))
            self._latest[step] = value
            if ordered:
                self._append(step, value)
        if not ordered:
            self._at, self._values, self._sum = [], [], 0.0
            at, values = [self._begin[0]], [self._begin[1]]
            for step in sorted(self._latest):
                at.append(step)
                values.append(self._next(self._latest[step], values[-1], step))
            order = np.argsort(at, kind="stable")  # a step may be before the one from which the run resumed
            self._at, self._values = [at[n] for n in order], [values[n] for n in order]

    def _append(self, step: float, value: float) -> None:
        self._values.append(self._next(value, self._values[-1], step))
        self._at.append(step)

    def _next(self, value: float, before: float, step: float) -> float:
        amount, base = value * self._compute.factor, self._begin[1]
        if self._compute.per_step:
            self._sum += amount
            amount = base + self._sum
        elif self._compute.restarts:
            amount = base + amount
        if amount < before:
            raise MetricsError(
                f"command.compute.column: {short(str(self._compute.column))} in {self._where} went back at step "
                f"{step:g}: it counts one attempt only (command.compute.restarts=true), or one step "
                "(command.compute.per_step=true)"
            )
        return amount

    def at(self, steps: Sequence[int]) -> list[float]:
        """Return compute at these steps, which are sorted."""
        first, last = max(0, bisect_left(self._at, steps[0]) - 1), bisect_right(self._at, steps[-1]) + 1
        return [float(value) for value in np.interp(steps, self._at[first:last], self._values[first:last])]


def _not_resumed(first: int, last: int) -> MetricsError:
    return MetricsError(
        f"command.resume: the command began again at step {first}, and the journal has steps up to "
        f"{last}: it has not resumed; say how it does (command.resume.add, command.resume.checkpoints), "
        "or command.resume.anew=true for one that cannot; the journal is as it was"
    )


def _newest_attempt(columns: Mapping[str, Column]) -> tuple[dict[str, Column], bool]:
    """Return the rows of the newest of several attempts in one log, and whether there were several.

    A new attempt begins where steps go back. A column that never goes back may lack rows of the newest attempt; its
    rows outside of the range of the others belong to an earlier attempt.
    """
    parts = {name: column[_begins_at(column) :] for name, column in columns.items()}
    again = [name for name, part in parts.items() if len(part) < len(columns[name])]
    if not again:
        return parts, False
    first = min(parts[name][0][0] for name in again)
    reach = max(parts[name][-1][0] for name in again)
    rest = {
        name: part if name in again else [row for row in part if first <= row[0] <= reach]
        for name, part in parts.items()
    }
    return rest, True


def _begins_at(column: Column) -> int:
    return next((at for at in range(len(column) - 1, 0, -1) if column[at][0] < column[at - 1][0]), 0)


def _common(before: Column, now: Column) -> int:
    """Return the number of equal rows at the beginning of two columns."""
    most = min(len(before), len(now))
    return next((n for n in range(most) if before[n] != now[n]), most)
