"""Ledger of a study: an append-only file with the launches and ends of its members.

One JSON object per line: `{"time": ..., "run": ..., "event": ..., ..., "crc": ...}`. The last field is a checksum
(`sweeps.run.files`); lines of earlier versions lack it. The state of a study follows from this file alone, not from the
memory of the process that launched it. Events of a run, in order:

    planned             the run belongs to the study. `recipe` is the label of its curve, `curve` the curve's identity,
                        `checksum` that of the run's specification. Written again when the checksum changes
    submitting          a job for the run is about to be submitted under the name `submission`; after a crash, the
                        next process looks for a job of that name
    started             the run was submitted; `job` is the scheduler's id
    retried             the job ended before the run was done, and the run is retried (`kind`, `reason` of the failure)
    finished | failed   the run is done, or was given up (`kind`, `reason`)
    stopped             the run was stopped on request (`kind`, `reason`); it may be started again
    adopted             the run was trained elsewhere (`launch.adoption`) and ended there as `state`; may be repeated

In `retried` and `failed`, `node` is a node that may have caused the failure. In `finished`, it is where the run ended.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.redact import redact
from sweeps.run import fields
from sweeps.run.files import append_lines, parse_line
from sweeps.run.spec import SPEC_FILE, RunSpec

LEDGER_FILE = "ledger.jsonl"
RUNS_DIR = "runs"  # folder next to the ledger, with one folder per member, named after the member's identity
FULL_DISK_PAUSE_S = 5.0
_TEXT_FIELDS = {"event", "recipe", "curve", "checksum", "submission", "job", "kind", "reason", "node", "state"}
EVENTS = ("planned", "submitting", "started", "retried", "finished", "failed", "stopped", "adopted")


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemberState:
    """State of a run after all its ledger entries.

    Attributes:
        run, recipe, seed: identity of the run, label of its recipe, and seed.
        state: event of the run's newest entry, `planned` at first. For an adopted run, how it ended in its source.
        attempts: number of jobs or processes started for the run, over all launches.
        submission, job: newest attempt: name of its submission, and the scheduler's id; None on this machine.
        kind, reason: kind of failure and message of a run that failed, was stopped, or was retried; None otherwise.
        retries_used: number of retries by kind of failure, since the run was last given up.
        excluded: nodes that the run's next attempt must avoid.
        unanswered: names of submissions that were begun and never confirmed before another submission was begun.
        curve: identity of the curve that has the label `recipe`; None in ledgers of earlier versions.
        checksum: `RunSpec.checksum` of the run's specification; None in ledgers of earlier versions.
        adopted: whether the run was trained elsewhere, so that it is never started here.
    """

    run: str
    recipe: str
    seed: int
    state: str = "planned"
    attempts: int = 0
    reason: str | None = None
    kind: str | None = None
    submission: str | None = None
    job: str | None = None
    retries_used: Mapping[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    curve: str | None = field(default=None, compare=False)
    checksum: str | None = field(default=None, compare=False)
    adopted: bool = field(default=False, compare=False)

    @property
    def title(self) -> str:
        """Label and seed of the run, for display."""
        return f"{self.recipe} seed {self.seed}"


class Ledger:
    """Append-only log of a study's members. Entries are on disk when an append returns; `fold` computes the states."""

    def __init__(self, study_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = study_dir / LEDGER_FILE
        self._clock = clock

    def now(self) -> float:
        """Return the time in seconds by the clock that stamps the entries."""
        return self._clock()

    def append(self, event: str, run: str, **fields: Any) -> None:
        """Append one entry about a run, see `append_all`."""
        self.append_all(event, [{"run": run, **fields}])

    def append_all(self, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append entries of one event in one durable write. On a full disk, wait for space.

        Args:
            event: one of `EVENTS`.
            entries: fields of each entry, with at least `run`.
        """
        if not entries:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        now = self._clock()
        lines = [_redacted({"time": now, "event": event, **entry}) for entry in entries]
        warned = False
        while True:
            try:
                return append_lines(self.path, lines, durable=True, checksum=True)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if not warned:
                    _log.warning("%s: no space left on the disk; waiting for free space", self.path)
                warned = True
                time.sleep(FULL_DISK_PAUSE_S)

    def size(self) -> int | None:
        """Return the ledger's size in bytes; None if there is no ledger."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return None

    def cut(self, size: int | None) -> None:
        """Drop everything after the first `size` bytes; None removes the file."""
        if size is None:
            self.path.unlink(missing_ok=True)
        elif (self.size() or 0) > size:
            with self.path.open("r+b") as handle:
                handle.truncate(size)
                # Durable before the rollback goes on: it then removes the specifications of the dropped members.
                os.fsync(handle.fileno())

    def entries(self) -> list[dict[str, Any]]:
        """Read all entries in order, without torn (partly written) or invalid lines."""
        return self._read()[0]

    def damaged(self) -> list[int]:
        """Return the line numbers, from 1, of torn or damaged lines."""
        return self._read()[1]

    def _read(self) -> tuple[list[dict[str, Any]], list[int]]:
        if not self.path.exists():
            return [], []
        entries, damaged = [], []
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), start=1):
            entry = parse_line(line)
            if entry is None or not _has_valid_types(entry):
                damaged += [number] if line.strip() else []
            elif entry.get("event") in EVENTS:
                entries.append(entry)
        return entries, damaged

    def fold(self) -> dict[str, MemberState]:
        """Compute the state of every run by applying the ledger's entries in order; by identity, in order of planning.

        A run whose `planned` line is damaged is restored from the specification in its folder.
        """
        entries, damaged = self._read()
        states: dict[str, MemberState] = {}
        unknown: set[str] = set()
        for entry in entries:
            run, event = entry["run"], entry["event"]
            if event == "adopted":
                states[run] = adopted_state(entry)
                continue
            if event == "planned" and run not in states:
                states[run] = MemberState(run, entry.get("recipe", ""), entry.get("seed", 0), curve=entry.get("curve"))
            elif run not in states and run not in unknown:
                if (restored := self._state_from_spec(run)) is None:
                    unknown.add(run)
                else:
                    states[run] = restored
            if run in states:
                states[run] = state_after(states[run], event, entry)
        if damaged:
            for folder in sorted((self.path.parent / RUNS_DIR).glob(f"*/{SPEC_FILE}")):
                run = folder.parent.name
                if run not in states and (restored := self._state_from_spec(run)) is not None:
                    states[run] = restored
        return states

    def _state_from_spec(self, run: str) -> MemberState | None:
        """Return the state `planned` of a run, from the specification in its folder; None if there is no valid one."""
        run_dir = self.path.parent / RUNS_DIR / run
        if run_dir.name != run or not (run_dir / SPEC_FILE).is_file():
            return None
        try:
            spec = RunSpec.read(run_dir)
        except UserError:
            return None
        return MemberState(run, spec.recipe, spec.seed, curve=spec.curve) if spec.run == run else None


def all_finished_or_stopped(states: Mapping[str, MemberState]) -> bool:
    """Return whether every member has finished or was stopped."""
    return all(state.state in ("finished", "stopped") for state in states.values())


def read_checked_spec(run_dir: Path, state: MemberState, known: dict[str, Any] | None = None) -> RunSpec:
    """Read a member's specification and check it against the ledger's checksum; for `known` see `RunSpec.read`."""
    spec = RunSpec.read(run_dir, known)
    spec.check_checksum(run_dir, state.checksum)
    return spec


def member_fields(spec: RunSpec, checksum: str) -> dict[str, Any]:
    """Return the fields of a ledger entry that identify a member; `checksum` is that of its specification."""
    return {"run": spec.run, "recipe": spec.recipe, "seed": spec.seed, "curve": spec.curve, "checksum": checksum}


def adopted_state(entry: Mapping[str, Any]) -> MemberState:
    """Return the state of an adopted run, from its ledger entry `adopted`."""
    return MemberState(
        run=entry["run"],
        recipe=entry.get("recipe", ""),
        seed=entry.get("seed", 0),
        state=str(entry.get("state", "finished")),
        reason=entry.get("reason"),
        curve=entry.get("curve"),
        checksum=entry.get("checksum"),
        adopted=True,
    )


def _has_valid_types(entry: Mapping[str, Any]) -> bool:
    """Return whether the fields of an entry have the right types; missing fields are accepted."""
    try:
        fields.run_name(entry)
        for name in _TEXT_FIELDS & {name for name, value in entry.items() if value is not None}:
            fields.text(entry, name)
        for name, check in (("seed", fields.whole), ("time", fields.number)):
            if name in entry:
                check(entry, name)
    except ValueError:
        return False
    return True


def state_after(state: MemberState, event: str, entry: Mapping[str, Any]) -> MemberState:
    """Return the state of a run after one more ledger entry."""
    if event == "planned":
        return replace(state, checksum=entry.get("checksum", state.checksum))
    kind, reason = entry.get("kind"), entry.get("reason")
    # Submitted again without "started" in between. The scheduler may have accepted the earlier submission all the same:
    # if its jobs appear, they must be cancelled, so remember its name.
    if (
        event == "submitting"
        and state.state == "submitting"
        and state.submission not in (None, entry.get("submission"))
    ):
        state = replace(state, unanswered=(*state.unanswered, state.submission))
    state = replace(state, state=event, kind=kind, reason=reason)
    if event == "submitting":
        return replace(state, submission=entry.get("submission"), job=None)
    if event == "started":
        return replace(state, attempts=state.attempts + 1, submission=entry.get("submission"), job=entry.get("job"))
    if event == "retried" and kind:
        retries_used = {**state.retries_used, kind: state.retries_used.get(kind, 0) + 1}
        node = entry.get("node")
        excluded = state.excluded + ((node,) if node and node not in state.excluded else ())
        return replace(state, retries_used=retries_used, excluded=excluded)
    # Given up, stopped or done: in a later launch the run has all its retries again.
    return replace(state, retries_used={}, excluded=())


def _redacted(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: redact(value) if key == "reason" and value else value for key, value in entry.items()}
