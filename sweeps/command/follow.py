"""A command's metrics, read as they grow, as records of a journal: each step once, whatever happens to the command.

A step is recorded once it is whole: a later one was logged, or the command has ended. What an attempt logs again after
it has gone back to a checkpoint follows a `resume` record, which voids what was there. What is lost when a member is
killed is nothing: the metrics lie where the command writes them, and the next attempt reads on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from sweeps.command.compute import Compute
from sweeps.command.settings import STDOUT, STDOUT_FILE, Command, newest
from sweeps.errors import UserError
from sweeps.run.activity import activity
from sweeps.run.files import parse_json
from sweeps.run.journal import Journal, Record
from sweeps.source.frame import table_of
from sweeps.source.log import Log
from sweeps.source.raw import log_of_table, read_logs
from sweeps.source.text import listed, short

# Of a log whose last evaluations are overdue: so many times the longest distance between two of them.
_OVERDUE = 3.0


class MetricsError(UserError):
    """Error in a command's metrics: a column that is not there, or steps that went back; the message names it."""


# Values of one metric with their steps, in the order of logging.
Column = list[tuple[float, float]]


@dataclass(frozen=True)
class Found:
    """Metrics of a source as they are now: by column, in the order of logging; names of all columns, and rows."""

    columns: Mapping[str, Column]
    names: Sequence[str] = ()
    rows: int = 0


class Source:
    """Reader of a command's metrics, read anew only where they have changed.

    Args:
        command: names the source and the columns.
        run_dir: the member's folder, where its standard output is kept.
    """

    def __init__(self, command: Command, run_dir: Path) -> None:
        self._command = command
        self.pattern = str(run_dir / STDOUT_FILE) if command.source == STDOUT else command.source
        self._stamp: object = None
        self._found = Found({})
        wanted = [*command.rewards.values(), *command.keep, command.compute.column or ""]
        self._wanted = [name for name in dict.fromkeys(wanted) if name]

    @property
    def title(self) -> str:
        """The source as messages name it."""
        return "standard output" if self._command.source == STDOUT else self._command.source

    def read(self) -> Found:
        """Return the metrics as they are now; empty before there are any.

        Raises:
            UserError: the source is there and cannot be read.
        """
        if self._command.remote:
            self._found = self._of(read_logs(self._command.source, self._command.step))
            return self._found
        place = newest(self.pattern) if "*" in self.pattern else self.pattern
        stamp = None if place is None else (place, *_stamps(Path(place)))
        if place is None or not Path(place).exists() or stamp == self._stamp:
            return self._found
        logs = self._of_stdout(Path(place)) if self._command.source == STDOUT else self._of_files(place)
        self._found, self._stamp = self._of(logs), stamp
        return self._found

    def _of_files(self, place: str) -> list[Log]:
        path = Path(place)
        if (path.is_file() and not path.stat().st_size) or (path.is_dir() and not any(path.iterdir())):
            return []
        return read_logs(place, self._command.step)

    def _of_stdout(self, path: Path) -> list[Log]:
        """Read the lines of standard output that are JSON objects; others are what a program prints besides."""
        records = []
        for line in path.read_bytes().split(b"\n"):
            if line.lstrip().startswith(b"{"):
                try:
                    record = parse_json(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    records.append(record)
        return [log_of_table(table_of(records), "stdout", self.title, self._command.step)] if records else []

    def _of(self, logs: Sequence[Log]) -> Found:
        columns: dict[str, Column] = {}
        for log in logs:
            for name in self._wanted:
                if name in log.names:
                    series = log.series(name)
                    pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
                    columns.setdefault(name, []).extend(pairs)
        names = list(dict.fromkeys(name for log in logs for name in log.names))
        return Found(columns, names, sum(log.rows for log in logs))


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of a file, or of all below a folder: what changes when something is written."""
    paths = [path] if not path.is_dir() else sorted(each for each in path.rglob("*") if each.is_file())
    stamps = []
    for each in paths:
        try:
            status = each.stat()
        except OSError:
            continue
        stamps.append((str(each), status.st_size, status.st_mtime_ns))
    return stamps


class Follower:
    """Writer of a member's journal from its command's metrics.

    Args:
        journal: open for writing; the header is there.
        records: that the journal holds already, superseded ones left out.
        command: whose metrics they are.
        source: of them.
        began_anew: whether this attempt is to begin from zero, for no checkpoint is there to go on from.
        resume: facts for a `resume` record.
        clock: seconds, replaceable in tests.
    """

    def __init__(
        self,
        journal: Journal,
        records: Sequence[Record],
        command: Command,
        source: Source,
        began_anew: bool = False,
        resume: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal, self._command, self._source, self._clock = journal, command, source, clock
        self._axis = command.compute.axis
        # By step, what compute the journal has for it.
        self._spent: dict[int, float] = {r.step: r.metrics.get(self._axis, 0.0) for r in records}
        self._wasted = max((r.metrics.get("compute/wasted_device_hours", 0.0) for r in records), default=0.0)
        self._eval_steps = {r.step for r in records if r.kind == "eval"}
        self._began_anew = began_anew or command.anew
        self._resume_facts = dict(resume or {})
        # Of this attempt: what the source held before it, the step that it goes on from, with compute and clock there,
        # the step and clock of the last look, and the values that were recorded by step.
        self._before: Mapping[str, Column] = {}
        self._goes_on: int | None = None
        self._begin = 0.0, 0.0, 0.0
        self._seen = 0.0, 0.0
        self._taken: dict[int, dict[str, float]] = {}
        self._columns: set[str] = set()
        self._rows = 0

    @property
    def last_step(self) -> int:
        """The newest step in the journal, -1 before the first."""
        return max(self._spent, default=-1)

    def catch_up(self) -> None:
        """Record what an earlier attempt has logged and its member, killed, has not recorded; then begin this one.

        Raises:
            UserError: as `update`.
        """
        found = self._source.read()
        last = self.last_step
        self._start(last)
        rest = {name: [(s, v) for s, v in column if s > last] for name, column in found.columns.items()}
        if any(rest.values()):
            self._record(rest, final=True, going_on=True)
        self._before = {name: list(column) for name, column in found.columns.items()}
        self._goes_on = max(self._spent, default=None)
        self._start(self.last_step)

    def _start(self, step: int) -> None:
        """Begin to count compute and recorded steps behind this one."""
        now = self._clock()
        self._begin = float(max(step, 0)), self._spent.get(step, 0.0), now
        self._seen = self._begin[0], now
        self._taken = {}

    def update(self, final: bool = False) -> bool:
        """Record the steps that are whole now; return whether there were any.

        Args:
            final: whether the command has ended, so that nothing follows its last step.

        Raises:
            MetricsError: a column is not there (any more), the run has begun again from zero, or the source of a
                command that has ended cannot be read; nothing is voided.
        """
        try:
            found = self._source.read()
        except UserError as error:
            if not final:  # half of it may be written
                return False
            raise MetricsError(f"command.metrics.source: {error}") from error
        self._check_columns(found, final)
        fresh: dict[str, Column] = {}
        for name, column in found.columns.items():
            before = self._before.get(name, [])
            same = _common(before, column)
            # Shorter than it was: the command has begun its file again.
            fresh[name] = column if len(column) < len(before) else column[same:]
        return self._record(fresh, final)

    def _check_columns(self, found: Found, final: bool) -> None:
        needed = dict.fromkeys(self._command.rewards.values(), "metrics.reward")
        if self._command.compute.column is not None:
            needed[self._command.compute.column] = "compute.column"
        if found.rows < self._rows:  # a file that was begun again
            self._columns = set()
        self._rows = found.rows
        for name, field in needed.items():
            if name in found.columns or not found.names:
                continue
            where = f"found {listed(found.names)}"
            if name in self._columns:
                raise MetricsError(
                    f"command.{field}: {short(name)} was in {self._source.title} up to step {self.last_step} and is "
                    f"there no more; {where}; the journal has what was there"
                )
            if final:
                raise MetricsError(
                    f"command.{field}: no column {short(name)} in {self._source.title}; {where}; name one of these"
                )
        self._columns |= set(found.columns)

    def _record(self, fresh: Mapping[str, Column], final: bool, going_on: bool = False) -> bool:
        """Record the whole steps of this attempt; with `going_on` those that an earlier one has left."""
        steps = sorted({int(step) for column in fresh.values() for step, _ in column})
        compute = self._command.compute
        if compute.column is not None and not final:
            # Compute at a step that was logged apart from it lies between two that have it.
            known = max((step for step, _ in fresh.get(compute.column, [])), default=-1)
            steps = [step for step in steps if step <= known]
        if not steps:
            return False
        whole = steps if final else steps[:-1]
        latest = {name: dict(column) for name, column in fresh.items()}
        values = {step: {name: column[step] for name, column in latest.items() if step in column} for step in whole}
        # Once recorded, a step is recorded again if it has got other values since: they were logged late, or again.
        new = [step for step in whole if self._taken.get(step) != values[step]]
        if not new:
            return False
        if not going_on and not self._taken:
            self._go_back(new[0])
        elif not going_on and len(self._taken) > 1 and new[0] < min(self._taken):
            self._refuse(new[0])
        spent = self._compute_at(new, steps[-1], fresh, going_on)
        first_set = next(iter(self._command.rewards.values()))
        for step, compute_then in zip(new, spent, strict=True):
            amounts = {self._axis: compute_then}
            if self._wasted:
                amounts["compute/wasted_device_hours"] = self._wasted
            kept = {f"train/{name}": values[step][name] for name in self._command.keep if name in values[step]}
            self._journal.record("train", step, {**amounts, **kept})
            if first_set in values[step]:
                rewards = {
                    f"eval/{name}/pass_rate": values[step][column]
                    for name, column in self._command.rewards.items()
                    if column in values[step]
                }
                self._journal.record("eval", step, {**rewards, **amounts})
                self._eval_steps.add(step)
            self._spent[step] = compute_then
            self._taken[step] = values[step]
        activity.note(f"{self._source.title}: step {new[-1]}")
        return True

    def _go_back(self, first: int) -> None:
        """Write from which step this attempt goes on, by the first that it has logged.

        Raises:
            MetricsError: from the beginning, though it was to resume.
        """
        if self._goes_on is None:
            return
        kept = [step for step in self._spent if step < first]
        if not kept and not self._began_anew:
            self._refuse(first)
        step = max(kept, default=-1)
        reached = self._spent[self._goes_on]
        if self._axis == "compute/device_hours":
            self._wasted += reached - self._spent.get(step, 0.0)
        self._journal.resume(step, **self._resume_facts)
        self._spent = {at: value for at, value in self._spent.items() if at <= step}
        self._eval_steps = {at for at in self._eval_steps if at <= step}
        self._begin = float(max(step, 0)), self._spent.get(step, 0.0), self._begin[2]
        self._seen = self._begin[0], self._seen[1]

    def _refuse(self, first: int) -> None:
        raise MetricsError(
            f"command.resume: the command began again at step {first}, and the journal has steps up to "
            f"{self.last_step}: it has not resumed; say how it does (command.resume.add, command.resume.checkpoints), "
            "or command.resume.anew=true for one that cannot; the journal is as it was"
        )

    def _compute_at(
        self, steps: Sequence[int], newest: int, fresh: Mapping[str, Column], going_on: bool
    ) -> list[float]:
        compute = self._command.compute
        if compute.unit == "steps":
            return [float(step) for step in steps]
        begin, base, began = self._begin
        if compute.column is not None:
            return counted_at(compute, steps, fresh.get(compute.column, []), (begin, base), self._source.title)
        if going_on:  # of an attempt that is gone nobody knows the time any more
            return [base] * len(steps)
        # Between two looks time is shared out by steps.
        (at, then), now = self._seen, self._clock()
        self._seen = float(newest), now
        return [float(base + (np.interp(s, [at, newest], [then, now]) - began) * compute.factor) for s in steps]

    def fill_to(self, step: int) -> None:
        """Record a step that the command has made and not logged, with the compute of the last one."""
        spent = self._spent[self.last_step]
        self._journal.record(
            "train", step, {self._axis: float(step) if self._command.compute.unit == "steps" else spent}
        )
        self._spent[step] = spent

    def overdue(self) -> str | None:
        """Return why the reward counts as gone: logged at much smaller distances than it is missing now; else None."""
        steps = sorted(self._eval_steps)
        longest = max((b - a for a, b in pairwise(steps)), default=0)
        if not longest or self.last_step - steps[-1] <= _OVERDUE * longest:
            return None
        column = next(iter(self._command.rewards.values()))
        return (
            f"command.metrics.reward: {short(column)} was last logged at step {steps[-1]} of {self.last_step}, and "
            f"every {longest} steps before; look why the command has left it out; the journal has what was there"
        )


def counted_at(
    compute: Compute, steps: Sequence[int], column: Column, begin: tuple[float, float], where: str
) -> list[float]:
    """Return compute at these steps from a column that counts it; between two that have it, it is interpolated.

    Args:
        compute: how the column is meant.
        steps: at which it is wanted.
        column: what was logged since the run has last begun or resumed.
        begin: the step of that, and compute by then.
        where: source of the column, for messages.

    Raises:
        MetricsError: a counter that has begun again from zero, or goes back.
    """
    latest = dict(column)
    at = np.array(sorted(latest), dtype=float)
    values = np.array([latest[step] for step in at]) * compute.factor
    base = begin[1]
    if compute.per_step:
        values = base + np.cumsum(values)
    elif compute.restarts:
        values = base + values
    at, values = np.concatenate([begin[:1], at]), np.concatenate([[base], values])
    fell = np.flatnonzero(np.diff(values) < 0)
    if len(fell):
        raise MetricsError(
            f"command.compute.column: {short(str(compute.column))} in {where} went back at step {at[fell[0] + 1]:g}: "
            "it counts one attempt only (command.compute.restarts=true), or one step (command.compute.per_step=true)"
        )
    order = np.argsort(at, kind="stable")  # a value at step 0 stands beside the beginning
    return [float(value) for value in np.interp(steps, at[order], values[order])]


def _common(before: Column, now: Column) -> int:
    """Return how many values at the beginning are the same."""
    most = min(len(before), len(now))
    return next((n for n in range(most) if before[n] != now[n]), most)
