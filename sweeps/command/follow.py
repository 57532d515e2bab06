"""Write the metrics of a trainer's command to a journal: each step once, whichever process is killed.

A step is recorded when it is complete: a later step was logged, or the command has ended. When the command resumes from
a checkpoint and logs steps again, a `resume` record makes their old records void. If a member is killed, nothing is
lost, because the metrics are in the command's own files, which the next attempt reads. A poll takes time in proportion
to what was logged since the last one.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

import numpy as np

from sweeps.command.compute import Compute
from sweeps.command.growing import Column, Ending
from sweeps.command.metrics import Source, SourceMetrics
from sweeps.command.settings import Command
from sweeps.errors import UserError
from sweeps.run.activity import activity
from sweeps.run.fields import MAX_INTEGER
from sweeps.run.journal import Journal, JournalView
from sweeps.source.text import listed, short

# Evaluations are overdue after this many times the largest number of steps between two of them.
_OVERDUE = 3.0


class MetricsError(UserError):
    """Error in a command's metrics, such as a missing column or steps that went back. The message names the problem."""


@dataclass
class _AttemptMetrics:
    """Metrics that an attempt (one start of the command) has logged so far.

    Attributes:
        latest: value logged last, by column and step.
        waiting: steps with values that are not recorded yet.
        newest: largest step; -1 before the first.
        newest_compute: largest step with a value of the compute column; -1 before the first.
        column: rows of the compute column, in the order of logging.
        counter: computes the compute at a step; None until it is needed.
        counted: number of rows of `column` that `counter` has processed.
    """

    latest: dict[str, dict[float, float]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    newest: int = -1
    newest_compute: int = -1
    column: Column = field(default_factory=list)
    counter: Counter | None = None
    counted: int = 0

    def add(self, name: str, rows: Sequence[tuple[float, float]], compute: Compute, where: str) -> None:
        """Add rows (step, value) of a column. Messages name the source as `where`.

        Raises:
            MetricsError: a step is not a whole number, or is too large.
        """
        latest = self.latest.setdefault(name, {})
        for step, value in rows:
            if not _is_whole(step):
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
    """Writer of a member's journal from the metrics of its command.

    Args:
        journal: writer of the journal, which already has its header.
        earlier: content of the journal after earlier attempts; None if it is new.
        command: the command that logs the metrics.
        source: reader of the metrics.
        resume: further fields of `resume` records.
        clock: returns seconds; tests replace it.

    Attributes:
        began_anew: whether this attempt starts from step 0, because there is no checkpoint to continue from.
        started_before: whether there was an earlier attempt.
        last_step: newest step in the journal; -1 before the first.
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
        # Compute at each step in the journal.
        self._compute: dict[int, float] = {r.step: r.metrics.get(self._axis, 0.0) for r in records}
        self._wasted_hours = max((r.metrics.get("compute/wasted_device_hours", 0.0) for r in records), default=0.0)
        self._eval_steps = {r.step for r in records if r.kind == "eval"}
        self._recorded_sets = {name for r in records if r.kind == "eval" for name in r.metrics}
        self._known: dict[int, dict[str, float]] = {}
        for record in records:
            self._known.setdefault(record.step, {}).update(record.metrics)
        self.began_anew, self.started_before = command.anew, earlier is not None
        self._holes = [] if earlier is None else list(earlier.holes)
        self._resume_facts = dict(resume or {})
        self.last_step = max(self._compute, default=-1)
        # Before this attempt: columns in the source, number of rows, and last recorded step.
        self._columns_before: dict[str, Column] = {}
        self._rows_before = 0
        self._last_before: int | None = None
        # Step, compute and clock from which this attempt's compute is counted.
        self._begin = 0.0, 0.0, 0.0
        # Step and clock at the last poll.
        self._last_poll = 0.0, 0.0
        # Values that this attempt has recorded, by step, and the smallest of these steps.
        self._recorded: dict[int, dict[str, float]] = {}
        self._lowest = 0
        # Metrics that this attempt has logged; number of rows read of each column; version of the source at that time.
        self._attempt = _AttemptMetrics()
        self._rows_read: dict[str, int] = {}
        self._version = -1
        # First step whose row has changed in this attempt, because the command shortened its log to a checkpoint; or
        # None.
        self._cut_back: float | None = None
        # Columns and number of rows in the source at the last poll.
        self._columns: set[str] = set()
        self._rows = 0
        self._names: Sequence[str] = ()  # names of all columns at the last poll

    @property
    def has_logged(self) -> bool:
        """True if this attempt has logged a step."""
        return bool(self._recorded)

    def catch_up(self) -> None:
        """Record what an earlier attempt logged after its member had been killed; then begin this attempt.

        Raises:
            UserError: as for `update`.
        """
        self._source.ending = Ending.TORN
        found = self._source.read()
        self._source.ending = Ending.OPEN
        self._start(self.last_step)
        newest, went_back = _newest_attempt(found.columns)
        first = min((int(step) for column in newest.values() for step, _ in column), default=0)
        other = self._differing(newest)
        self._start(self.last_step)
        if other and went_back and any(step < first for step in self._compute):
            self._record_resume(first, max(self._compute))
        elif other:  # values of some steps were logged after these steps had been recorded
            self._record_ended({name: [row for row in rows if row[0] in other] for name, rows in newest.items()}, True)
        self._continue_compute(newest)
        last, begin = self.last_step, self._begin[0]
        behind = {
            name: [row for row in rows if row[0] > last or (name == self._command.compute.column and row[0] >= begin)]
            for name, rows in newest.items()
        }
        if steps := sorted({int(step) for rows in behind.values() for step, _ in rows if step > last}):
            # The earlier attempt may have resumed after a gap in the steps, and been killed before it recorded the gap.
            if (end := self._end_of_hole(last, steps)) is not None:
                self._journal.resume(end, **self._resume_facts)
                self._record_hole(last, end)
            self._record_ended(behind, False)
        self._columns_before, self._rows_before = (
            {name: list(column) for name, column in found.columns.items()},
            found.rows,
        )
        self._known = {}
        self._last_before = max(self._compute, default=None)
        self._start(self.last_step)

    def _differing(self, columns: Mapping[str, Column]) -> set[int]:
        """Return the steps whose values in the journal are incomplete or differ from `columns`."""
        metrics = [(column, f"eval/{name}/pass_rate") for name, column in self._command.rewards.items()]
        metrics += [(column, f"train/{column}") for column in self._command.keep]
        return {
            int(step)
            for column, metric in metrics
            for step, value in dict(columns.get(column, ())).items()
            if step <= self.last_step and self._known.get(int(step), {}).get(metric) != value
        }

    def _continue_compute(self, newest: Mapping[str, Column]) -> None:
        """If the compute column begins at 0 in each attempt, add the compute that the journal already has.

        `newest` has the rows of the newest attempt, by column.
        """
        compute = self._command.compute
        if not compute.restarts:
            return
        rows = [row for row in newest.get(compute.column or "", ()) if row[0] in self._compute]
        if rows:
            step, value = max(rows)
            self._begin = step, self._compute[int(step)] - value * compute.factor, self._begin[2]

    def _record_ended(self, columns: Mapping[str, Column], late: bool) -> None:
        """Record the metrics of an attempt that has ended. `late`: whether the journal already has these steps."""
        fresh = _AttemptMetrics()
        for name, column in columns.items():
            fresh.add(name, column, self._command.compute, self._source.title)
        if not late:
            fresh.waiting = {step for step in fresh.waiting if step > self.last_step}
        self._record(fresh, final=True, ended=True, late=late)

    def _start(self, step: int) -> None:
        """Begin to count compute, and to record steps, after this step."""
        now = self._clock()
        self._begin = float(max(step, 0)), self._compute.get(step, 0.0), now
        self._last_poll = self._begin[0], now
        self._recorded = {}

    def update(self, ending: Ending = Ending.OPEN) -> bool:
        """Record the steps that are complete now, and return whether there were any.

        Args:
            ending: `OPEN` while the command runs. Any other value means that it has ended, which completes its last
                step.

        Raises:
            MetricsError: a column is missing or has disappeared, the run has started from zero again, or the source
                cannot be read after the command has ended. Existing records stay valid.
        """
        final = ending is not Ending.OPEN
        self._source.ending = ending
        try:
            found = self._source.read()
        except UserError as error:
            if not final:  # the file may be half written
                return False
            raise MetricsError(f"command.metrics.source: {error}") from error
        if found.rows != self._rows:
            activity.note(f"{self._source.title}: {found.rows} rows")
        self._check_columns(found, final)
        self._add_new_rows(found)
        column = self._command.compute.column
        if ending is Ending.WHOLE and column is not None and self._attempt.newest > self._attempt.newest_compute == -1:
            raise MetricsError(self._no_number("compute.column", column))
        return self._record(self._attempt, final)

    def _add_new_rows(self, found: SourceMetrics) -> None:
        if found.version != self._version:
            self._version, self._attempt, self._rows_read, self._cut_back = found.version, _AttemptMetrics(), {}, None
        if self.began_anew and any(
            len(found.columns.get(name, ())) < len(c) for name, c in self._columns_before.items()
        ):
            self._columns_before = {}  # the attempt has started a new log
        unread = {name: column for name, column in found.columns.items() if name not in self._rows_read}
        # By column, the number of first rows that were there before this attempt.
        same = {name: _equal_rows(self._columns_before.get(name, []), column) for name, column in unread.items()}
        # If the command has shortened its log to a checkpoint, all rows are new from the first step on that differs.
        differing_steps = [
            c[same[n]][0] for n, c in unread.items() if same[n] < min(len(c), len(self._columns_before.get(n, [])))
        ]
        self._cut_back = min([*differing_steps, *([] if self._cut_back is None else [self._cut_back])], default=None)
        for name, column in unread.items():
            begin = same[name]
            if self._cut_back is not None:
                while begin and column[begin - 1][0] >= self._cut_back:
                    begin -= 1
            elif begin == len(column) < len(self._columns_before.get(name, [])):
                continue  # no new rows
            self._rows_read[name] = begin
        new = {name: found.columns.get(name, [])[begin:] for name, begin in self._rows_read.items()}
        wrong = min((step for rows in new.values() for step, _ in rows if not _is_whole(step)), default=None)
        if wrong is not None:  # record the steps before the wrong one; then `add` below raises
            for name, rows in new.items():
                valid = [row for row in rows if row[0] < wrong]
                self._attempt.add(name, valid, self._command.compute, self._source.title)
            if self._command.compute.column is None or self._attempt.newest_compute >= 0:
                self._record(self._attempt, final=True)
        for name, rows in new.items():
            if rows:
                self._attempt.add(name, rows, self._command.compute, self._source.title)
                self._rows_read[name] += len(rows)

    def _check_columns(self, found: SourceMetrics, final: bool) -> None:
        """Check that the source has the columns that are needed. Some may be missing until the command has ended
        (`final`).

        Raises:
            MetricsError: a column is missing or has disappeared.
        """
        needed = dict.fromkeys(self._command.rewards.values(), "metrics.reward")
        if self._command.compute.column is not None:
            needed[self._command.compute.column] = "compute.column"
        if found.rows < self._rows:  # the file was begun again
            self._columns = set()
        self._rows, self._names = found.rows, found.names
        for name, setting in needed.items():
            if name in found.columns or not found.names:
                continue
            where = f"found {listed(found.names)}"
            if name in self._columns:
                raise MetricsError(
                    f"command.{setting}: {short(name)} was in {self._source.title} up to step {self.last_step} and is "
                    f"no longer there; {where}; the journal keeps the values so far"
                )
            if final and found.rows != self._rows_before:  # this attempt has logged something
                raise MetricsError(
                    f"command.{setting}: no column {short(name)} in {self._source.title}; {where}; name one of these"
                )
        self._columns |= set(found.columns)

    def _record(self, attempt: _AttemptMetrics, final: bool, ended: bool = False, late: bool = False) -> bool:
        """Record the complete steps of an attempt, and return whether there were any.

        Args:
            attempt: metrics of the attempt.
            final: whether the command has ended, which completes its last step.
            ended: whether the metrics are those of an earlier attempt.
            late: see `_record_ended`.
        """
        if not attempt.waiting:
            return False
        complete = list(attempt.waiting)
        newest = attempt.newest
        if not final:
            if self._command.compute.column is not None:
                # The compute of a step without a value is interpolated, for which a later step must have a value.
                newest = attempt.newest_compute
            complete = [step for step in complete if step < newest]
        # A step is recorded again if its values have changed, because some were logged late or again.
        new = sorted(step for step in complete if self._recorded.get(step) != attempt.at(step))
        first = not ended and not self._recorded
        if first and self.started_before and not final and len(new) == 1 and self._may_follow_gap(new):
            return False  # wait for one more step, which shows how far apart logged steps are
        attempt.waiting.difference_update(complete)
        if not new:
            return False
        if first:
            self._record_start(new)
        elif not ended and len(self._recorded) > 1 and new[0] < self._lowest:
            raise _not_resumed(new[0], self.last_step)
        if late:
            self._write(attempt, new, [self._interpolated_compute(step) for step in new])
            return True
        try:
            computes = self._compute_at(new, newest, attempt, ended)
        except MetricsError:
            if attempt.counter is not None:  # record the steps before the error
                valid = [step for step in new if step <= attempt.counter.last_step]
                self._write(attempt, valid, attempt.counter.at(valid))
            raise
        self._write(attempt, new, computes)
        return True

    def _write(self, attempt: _AttemptMetrics, new: Sequence[int], computes: Sequence[float]) -> None:
        first_set = next(iter(self._command.rewards.values()))
        for step, compute in zip(new, computes, strict=True):
            values = attempt.at(step)
            compute_metrics = {self._axis: compute}
            if self._wasted_hours:
                compute_metrics["compute/wasted_device_hours"] = self._wasted_hours
            kept_metrics = {f"train/{name}": values[name] for name in self._command.keep if name in values}
            self._journal.record("train", step, {**compute_metrics, **kept_metrics})
            if first_set in values:
                rewards = {
                    f"eval/{name}/pass_rate": values[column]
                    for name, column in self._command.rewards.items()
                    if column in values
                }
                self._journal.record("eval", step, {**rewards, **compute_metrics})
                self._eval_steps.add(step)
                self._recorded_sets |= rewards.keys()
            self._compute[step] = compute
            self._lowest = min(self._lowest, step) if self._recorded else step
            self._recorded[step] = values
            self.last_step = max(self.last_step, step)
        if new:
            activity.note(f"{self._source.title}: step {new[-1]}")

    def _record_start(self, new: Sequence[int]) -> None:
        """If this attempt continues an earlier one, record from which step; `new` are the first steps logged."""
        if self._last_before is not None:
            self._record_resume(new[0], self._last_before, new)
        elif self.started_before and (end := self._end_of_hole(-1, new)) is not None:
            self._journal.resume(end, **self._resume_facts)
            self._record_hole(-1, end)

    def _end_of_hole(self, last: int, new: Sequence[int]) -> int | None:
        """Return the last step of the gap between step `last` and the steps `new`; None if there is no gap.

        There is a gap if the first new step is further from `last` than any two neighbouring steps are apart, in the
        journal or among the new steps. Gaps occur when metrics are lost in a power failure.
        """
        known = sorted(self._compute)
        pairs = [(a, b) for a, b in pairwise(known) if not any(a < first <= b for first, _ in self._holes)]
        largest = max((b - a for a, b in [*pairs, *pairwise(new)]), default=None)
        return new[0] - largest if largest is not None and new[0] - max(last, 0) > largest else None

    def _may_follow_gap(self, new: Sequence[int]) -> bool:
        """Return whether there may be a gap before the new steps: also if the journal has fewer than two steps."""
        last = max((step for step in self._compute if step < new[0]), default=-1)
        return len(self._compute) < 2 or self._end_of_hole(last, new) is not None

    def _record_hole(self, last: int, end: int) -> None:
        """Record the gap from step `last` to `end`. Its steps count with the average compute per step so far."""
        print(
            f"warning: {self._source.title}: no records of steps {max(last, 0) + 1} to {end}; they are lost", flush=True
        )
        self._holes.append((max(last, 0) + 1, end))
        compute, (_, base, began) = self._command.compute, self._begin
        if last > 0 and (compute.per_step or compute.restarts or compute.on_clock):
            self._begin = float(end), base * end / last, began
            self._last_poll = float(end), self._last_poll[1]

    def _record_resume(self, first: int, reached: int, new: Sequence[int] = ()) -> None:
        """Record a resume before the step `first`, which makes records from there up to step `reached` void.

        Args:
            first: first step that the attempt has logged.
            reached: newest step of earlier attempts.
            new: first steps that the attempt has logged, by which a gap is found; empty to look for no gap.

        Raises:
            MetricsError: the attempt started from the beginning, although it should have resumed.
        """
        earlier_steps = [step for step in self._compute if step < first]
        if not earlier_steps and not self.began_anew:
            raise _not_resumed(first, self.last_step)
        step = max(earlier_steps, default=-1)
        end = self._end_of_hole(step, new) if new else None
        if self._axis == "compute/device_hours":
            self._wasted_hours += self._compute[reached] - self._compute.get(step, 0.0)
        self._journal.resume(step if end is None else end, **self._resume_facts)
        self._compute = {at: value for at, value in self._compute.items() if at <= step}
        self._eval_steps = {at for at in self._eval_steps if at <= step}
        self.last_step = step
        self._begin = float(max(step, 0)), self._compute.get(step, 0.0), self._begin[2]
        self._last_poll = self._begin[0], self._last_poll[1]
        if end is not None:
            self._record_hole(step, end)

    def _interpolated_compute(self, step: int) -> float:
        steps = sorted(self._compute)
        return float(np.interp(step, steps, [self._compute[at] for at in steps]))

    def _compute_at(self, steps: Sequence[int], newest: int, fresh: _AttemptMetrics, ended: bool) -> list[float]:
        """Return the compute at sorted steps of an attempt, whose newest step is `newest`."""
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
        if ended:  # it is unknown when the earlier attempt reached its steps
            return [base] * len(steps)
        # The time between two polls is divided evenly among the steps.
        (old_step, old_time), now = self._last_poll, self._clock()
        self._last_poll = float(newest), now
        times = np.interp(steps, [old_step, newest], [old_time, now])
        return [float(base + (at - began) * compute.factor) for at in times]

    def fill_to(self, step: int) -> None:
        """Record a step that the command has reached without logging it, with the compute of the last logged step."""
        spent = self._compute[self.last_step]
        self._journal.record(
            "train", step, {self._axis: float(step) if self._command.compute.unit == "steps" else spent}
        )
        self._compute[step] = spent
        self.last_step = max(self.last_step, step)

    def overdue(self) -> str | None:
        """Return an error message if a needed column has no numbers, or none for unusually long; else None."""
        for name, column in self._command.rewards.items():
            if f"eval/{name}/pass_rate" not in self._recorded_sets:
                return self._no_number("metrics.reward", column)
        reward_column = next(iter(self._command.rewards.values()))
        compute_column, compute_steps = self._command.compute.column, set[float]()
        if compute_column is not None:
            compute_steps = set(self._attempt.latest.get(compute_column, ()))
        return self._not_logged("metrics.reward", reward_column, self._eval_steps) or self._not_logged(
            "compute.column", compute_column or "", compute_steps
        )

    def _not_logged(self, setting: str, column: str, logged: Collection[float]) -> str | None:
        """Return an error message if a column, logged at the steps `logged`, was last logged long ago; else None."""
        steps = sorted(int(step) for step in logged)
        if not steps:
            return None
        longest = max((b - a for a, b in pairwise(steps)), default=None)
        if self.last_step - steps[-1] <= _OVERDUE * (longest or max(1, steps[0])):
            return None
        at = f"at step {steps[-1]} of {self.last_step}"
        when = (
            f"logged only once, {at}" if longest is None else f"last logged {at}, but every {longest} steps before that"
        )
        return (
            f"command.{setting}: {short(column)} was {when}; find out why the command no longer logs it; found "
            f"{listed(self._names)}; the journal keeps the values so far"
        )

    def _no_number(self, setting: str, column: str) -> str:
        return (
            f"command.{setting}: {short(column)} in {self._source.title} has no finite number up to step "
            f"{max(self.last_step, self._attempt.newest)}; found {listed(self._names)}; name a column with numbers, or "
            "correct what the command logs"
        )


class Counter:
    """Compute by step, from a logged column. For steps without a value it is interpolated.

    Args:
        compute: how the column measures compute.
        begin: step at which the run last began or resumed, and the compute there.
        where: name of the source, for messages.
    """

    def __init__(self, compute: Compute, begin: tuple[float, float], where: str) -> None:
        self._compute, self._begin, self._where = compute, begin, where
        self._latest: dict[float, float] = {}
        self._at, self._values = [begin[0]], [begin[1]]
        self._sum = 0.0

    def add(self, rows: Sequence[tuple[float, float]]) -> None:
        """Add the rows (step, value) that were logged since the last call.

        Raises:
            MetricsError: compute decreases; perhaps the column has begun at 0 again.
        """
        ordered = True
        for step, value in rows:
            last = self._at[-1]
            ordered = ordered and (step > last or (step == last and len(self._at) == 1))
            self._latest[step] = value
            if ordered:
                self._append(step, value)
        if not ordered:
            self._sum = 0.0
            points = [self._begin]
            try:
                for step in sorted(self._latest):
                    points.append((step, self._next(self._latest[step], points[-1][1], step)))
            finally:
                points.sort(key=itemgetter(0))  # a step may lie before the one from which the run resumed
                self._at, self._values = [step for step, _ in points], [value for _, value in points]

    def _append(self, step: float, value: float) -> None:
        self._values.append(self._next(value, self._values[-1], step))
        self._at.append(step)

    def _next(self, value: float, before: float, step: float) -> float:
        """Convert the column's value at a step to compute, of which `before` was reached at the previous step.

        Raises:
            MetricsError: compute decreases.
        """
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

    @property
    def last_step(self) -> float:
        """Last step with a valid value."""
        return self._at[-1]

    def at(self, steps: Sequence[int]) -> list[float]:
        """Return the compute at sorted steps."""
        if not steps:
            return []
        first, last = max(0, bisect_left(self._at, steps[0]) - 1), bisect_right(self._at, steps[-1]) + 1
        return [float(value) for value in np.interp(steps, self._at[first:last], self._values[first:last])]


def _is_whole(step: float) -> bool:
    return abs(step) <= MAX_INTEGER and step == int(step)


def _not_resumed(first: int, last: int) -> MetricsError:
    return MetricsError(
        f"command.resume: the command began again at step {first}, but the journal has steps up to "
        f"{last}: it has not resumed; set how it resumes (command.resume.add, command.resume.checkpoints), "
        "or command.resume.anew=true if it cannot; the journal is unchanged"
    )


def _newest_attempt(columns: Mapping[str, Column]) -> tuple[dict[str, Column], bool]:
    """Return the rows of the newest attempt in a log, by column, and whether the log has several attempts.

    A new attempt begins where steps go back. In a column of which the newest attempt has logged few rows or none, steps
    may never go back. Of such a column, rows outside the step range of the other columns belong to an earlier attempt.
    """
    parts = {name: column[_newest_start(column) :] for name, column in columns.items()}
    went_back = [name for name, part in parts.items() if len(part) < len(columns[name])]
    if not went_back:
        return parts, False
    first = min(parts[name][0][0] for name in went_back)
    last = max(parts[name][-1][0] for name in went_back)
    rows = {
        name: part if name in went_back else [row for row in part if first <= row[0] <= last]
        for name, part in parts.items()
    }
    return rows, True


def _newest_start(column: Column) -> int:
    """Return the index of the last row at which a column's steps go back; 0 if they never do."""
    return next((at for at in range(len(column) - 1, 0, -1) if column[at][0] < column[at - 1][0]), 0)


def _equal_rows(before: Column, now: Column) -> int:
    length = min(len(before), len(now))
    return next((n for n in range(length) if before[n] != now[n]), length)
