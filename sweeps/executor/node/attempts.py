"""Attempt records of a run: one small file per start of a job, which says when it began and how it ended.

`runs/<identity>/attempts/<job>-<restart>-<submission>.jsonl` gets a line when the attempt begins, and another when it
ends. Each start has its own file, so that two copies of a job on two nodes never append to the same one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeps.executor.error_signatures import PEER_FAILURES
from sweeps.redact import redact
from sweeps.run.files import append_lines, parse_lines, read_json, write_json

ATTEMPTS_DIR = "attempts"


@dataclass(frozen=True)
class Attempt:
    """One start of a job that runs a member.

    Attributes:
        submission, job, restart: name of the submission, the cluster's id of the job, and how often the job was
            restarted (a requeued job keeps its id).
        node: name of the node, as the cluster knows it.
        began, ended: seconds by the node's clock, for display; `ended` is None if no end is recorded.
        step: step of the checkpoint from which the attempt resumed; -1 if it started without a checkpoint.
        outcome: `finished`, `failed`, `interrupted` (saved; requeue requested), `stopped` (saved; no requeue); None if
            no end is recorded.
        kind, reason: kind of failure and message of an attempt that failed or was interrupted; None otherwise.
        culprit: node of the rank that failed first, if that rank recorded its failure; else None.
        number: number of the attempt, from 1; 0 in files of earlier versions. Attempts that began at the same time may
            have the same number.
    """

    submission: str
    job: str
    restart: int
    node: str
    began: float
    step: int
    ended: float | None = None
    outcome: str | None = None
    kind: str | None = None
    reason: str | None = None
    culprit: str | None = None
    number: int = 0

    @property
    def failure(self) -> tuple[str | None, str | None] | None:
        """Kind and reason of the failure; (None, None) if the attempt finished; None if no end is recorded."""
        if self.outcome == "finished":
            return None, None
        if self.outcome == "interrupted":
            return self.kind or "preempted", f"{self.reason}; the job was not requeued"
        if self.outcome == "stopped":
            return "stopped", self.reason
        return (self.kind or "error", self.reason or "failed") if self.outcome else None


def log_mark(submission: str, job: str, restart: int) -> str:
    """Return the line that an attempt writes to the run's logs when it starts, since all attempts append to them."""
    return f"--- job {job}, start {restart} ({submission})"


class AttemptLog:
    """Writer of one attempt's file.

    Args:
        run_dir: the run's folder.
        submission, job, restart, node: see `Attempt`.
        clock: seconds by the node's clock; tests replace it.
    """

    def __init__(
        self,
        run_dir: Path,
        submission: str,
        job: str,
        restart: int,
        node: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._path = run_dir / ATTEMPTS_DIR / f"{job}-{restart}-{submission}.jsonl"
        self._identity = {"submission": submission, "job": job, "restart": restart, "node": node}

    def begin(self, step: int) -> None:
        """Record that the member is about to run from the checkpoint at `step`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((each.number for each in attempts(self._run_dir)), default=0)
        self._write({**self._identity, "number": number, "began": self._clock(), "step": step})

    def end(self, outcome: str, kind: str | None = None, reason: str | None = None) -> None:
        """Record how the attempt ended, see `Attempt`; secrets in the reason are redacted."""
        self._write({"ended": self._clock(), "outcome": outcome, "kind": kind, "reason": reason and redact(reason)})

    def record_follower_failure(self, rank: int, kind: str, reason: str) -> None:
        """Record that a rank other than 0 failed. It gets its own file, because each file has only one writer."""
        entry = {"ended": self._clock(), "outcome": "failed", "kind": kind, "reason": redact(reason)}
        entry["culprit"] = self._identity["node"]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path.with_suffix(f".rank{rank}"), entry)

    def _write(self, entry: dict[str, Any]) -> None:
        append_lines(self._path, [entry], durable=True)


def attempts(run_dir: Path) -> list[Attempt]:
    """Read all attempts at a run, in the order in which they began. Unreadable files are skipped."""
    try:
        paths = list((run_dir / ATTEMPTS_DIR).iterdir())
    except OSError:
        return []
    results = []
    for path in paths:
        if path.suffix != ".jsonl":
            continue
        entry: dict[str, Any] = {}
        try:
            lines = parse_lines(path.read_bytes())
        except OSError:
            continue
        for line in lines:
            # A cluster may start a job again without counting a restart. The later start then replaces the earlier one.
            entry = dict(line) if "began" in line else {**entry, **line}
        if entry.get("kind") in PEER_FAILURES or "outcome" not in entry:
            entry |= _follower_failure(path)  # if another rank failed first, it has recorded the cause
        if "began" in entry:
            with suppress(TypeError, ValueError):
                attempt = Attempt(**entry)
                results.append(replace(attempt, number=int(attempt.number), restart=int(attempt.restart)))
    return _sorted_attempts(results)


def _sorted_attempts(unsorted: Sequence[Attempt]) -> list[Attempt]:
    """Sort attempts by number, and the starts of one job by restart count.

    A start that does not see the file of the previous start yet gets the same number, so the restart count is needed
    too. Attempts without numbers are sorted by job id, which grows, then by restart count.
    """
    newest: dict[tuple[str, str], int] = {}
    keyed = []
    for attempt in sorted(unsorted, key=lambda each: each.restart):
        job = attempt.submission, attempt.job
        newest[job] = max(newest.get(job, 0), attempt.number)
        ids = tuple(int(part) for part in re.findall(r"\d+", str(attempt.job)))
        keyed.append(((newest[job], ids, attempt.restart, attempt.submission), attempt))
    return [attempt for _, attempt in sorted(keyed, key=lambda pair: pair[0])]


def _follower_failure(path: Path) -> dict[str, Any]:
    """Return the failure that a rank other than 0 recorded next to an attempt's file; empty if there is none."""
    for other in sorted(path.parent.glob(f"{path.stem}.rank*")):
        if entry := read_json(other):
            return entry
    return {}
