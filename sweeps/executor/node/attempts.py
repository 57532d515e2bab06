"""Attempt records of a run: each job writes one small file about when it began and how it ended.

`runs/<identity>/attempts/<job>-<restart>-<submission>.jsonl` has a line when the attempt begins and one when it ends.
Each file has one writer: two copies of a job on two nodes never append to the same file.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeps.executor.error_signatures import OF_A_PEER
from sweeps.redact import redact
from sweeps.run.files import append_lines, parse_lines, read_json, write_json

ATTEMPTS_DIR = "attempts"


@dataclass(frozen=True)
class Attempt:
    """One job's work on a run.

    Attributes:
        submission, job, restart: name of the submission, the cluster's id of the job, and its restart count: a
            requeued job keeps its id.
        node: name of the node, as the cluster knows it.
        began, ended: seconds by the node's own clock, for display; `ended` is None while it runs, or if it was killed.
        step: step of the checkpoint that it resumed from; -1 if it started from nothing.
        outcome: `finished`, `failed`, `interrupted` (saved, and asked to be requeued), `stopped` (saved, no requeue),
            or None.
        kind, reason: why it failed or was interrupted.
        culprit: the node of the rank that failed, if that is not the node of rank 0, which writes this record.
        number: one more than the largest number among the run's attempts at its begin; 0 in files of earlier versions.
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
        """Kind and reason of its failure, both None if it finished; None if it recorded no end."""
        if self.outcome == "finished":
            return None, None
        if self.outcome == "interrupted":
            return self.kind or "preempted", f"{self.reason}; the job was not requeued"
        if self.outcome == "stopped":
            return "stopped", self.reason
        return (self.kind or "error", self.reason or "failed") if self.outcome else None


def log_mark(submission: str, job: str, restart: int) -> str:
    """Return the line that marks the begin of an attempt in its ranks' logs, to which all attempts append."""
    return f"--- job {job}, start {restart} ({submission})"


class AttemptLog:
    """Writer of one attempt's file; `clock` is the node's own."""

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
        self._who = {"submission": submission, "job": job, "restart": restart, "node": node}

    def begin(self, step: int) -> None:
        """Record that the member is about to run, from the checkpoint at `step`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number = 1 + max((each.number for each in attempts(self._run_dir)), default=0)
        self._write({**self._who, "number": number, "began": self._clock(), "step": step})

    def end(self, outcome: str, kind: str | None = None, reason: str | None = None) -> None:
        """Record how the attempt ended; secrets in the reason are redacted."""
        self._write({"ended": self._clock(), "outcome": outcome, "kind": kind, "reason": reason and redact(reason)})

    def follower_failed(self, rank: int, kind: str, reason: str) -> None:
        """Record that a rank other than rank 0 failed, in a separate file because each file has one writer."""
        entry = {"ended": self._clock(), "outcome": "failed", "kind": kind, "reason": redact(reason)}
        entry["culprit"] = self._who["node"]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path.with_suffix(f".rank{rank}"), entry)

    def _write(self, entry: dict[str, Any]) -> None:
        append_lines(self._path, [entry], durable=True)


def attempts(run_dir: Path) -> list[Attempt]:
    """Read all attempts at a run, in the order in which they began; unreadable files are skipped."""
    try:
        paths = list((run_dir / ATTEMPTS_DIR).iterdir())
    except OSError:
        return []
    found = []
    for path in paths:
        if path.suffix != ".jsonl":
            continue
        entry: dict[str, Any] = {}
        try:
            lines = parse_lines(path.read_bytes())
        except OSError:
            continue
        for line in lines:
            # A cluster may start a job again without counting the restart: the later attempt counts.
            entry = dict(line) if "began" in line else {**entry, **line}
        if entry.get("kind") in OF_A_PEER or "outcome" not in entry:
            entry |= _of_followers(path)  # the rank that failed first has the cause
        if "began" in entry:
            with suppress(TypeError, ValueError):
                attempt = Attempt(**entry)
                found.append(replace(attempt, number=int(attempt.number), restart=int(attempt.restart)))
    return _in_order(found)


def _in_order(found: Sequence[Attempt]) -> list[Attempt]:
    """Sort attempts by number, and the starts of one job by their restart count.

    The count is needed because a start may not have seen the file of the one before. Attempts without numbers are
    sorted by job id, which grows, then by the count.
    """
    newest: dict[tuple[str, str], int] = {}
    keyed = []
    for attempt in sorted(found, key=lambda each: each.restart):
        job = attempt.submission, attempt.job
        newest[job] = max(newest.get(job, 0), attempt.number)
        ids = tuple(int(part) for part in re.findall(r"\d+", str(attempt.job)))
        keyed.append(((newest[job], ids, attempt.restart, attempt.submission), attempt))
    return [attempt for _, attempt in sorted(keyed, key=lambda pair: pair[0])]


def _of_followers(path: Path) -> dict[str, Any]:
    for other in sorted(path.parent.glob(f"{path.stem}.rank*")):
        if entry := read_json(other):
            return entry
    return {}
