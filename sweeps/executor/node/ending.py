"""Ends of jobs, from the records that they wrote and from their logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sweeps.executor.base import Launch, Outcome
from sweeps.executor.failure import KINDS
from sweeps.executor.node.attempts import Attempt, attempts, log_mark
from sweeps.run.interruption import requested_stop
from sweeps.run.journal import LOG_FILE
from sweeps.run.progress import is_done, trouble
from sweeps.run.spec import budget_of

# These failures are reported even for a member that was asked to stop.
_OWN_FAULT = frozenset({"error", "out_of_memory", "disk_full"})
# Bytes of a log's end to read: enough for a crash of native code, which prints a stack for each thread.
_LOG_TAIL = 1 << 16


def newest_attempt(run_dir: Path, submission: str, job: str) -> Attempt | None:
    """Return the record of a job's newest start; None without one."""
    own = [attempt for attempt in attempts(run_dir) if (attempt.submission, attempt.job) == (submission, job)]
    return own[-1] if own else None


def outcome_of(
    member: Launch, kind: str | None, reason: str | None, attempt: Attempt | None, node: str | None
) -> Outcome:
    """Return the outcome of an ended job, whose failure counts only if the member's journal agrees.

    Args:
        member: the job's member.
        kind, reason: of the failure; None if the job finished.
        attempt: the job's own record; None without one.
        node: the node to blame for the failure.
    """
    run, run_dir = member.run, member.run_dir
    if kind is None:
        # The job finished but the journal is not done: it is unreadable, or the budget was raised since the start.
        steps = budget_of(run_dir)
        if (steps is None or not is_done(run_dir, steps, run)) and (wrong := trouble(run_dir, run)):
            return Outcome(run, 1, "error", wrong)
        return Outcome(run, 0, "outgrown", KINDS["outgrown"][0], attempt.node if attempt else None)
    if kind not in _OWN_FAULT and (asked := requested_stop(run_dir)):
        # a study's request to stop wins: the member must not be retried
        return Outcome(run, 1, "stopped", asked)
    return Outcome(run, 1, kind, reason, node)


def last_words(logs: Sequence[Path], lines: int = 5) -> str:
    """Return the last lines of the batch logs, joined into one of at most 2000 characters."""
    said_lines = [line.strip() for path in logs for line in _tail(path)[0].splitlines() if line.strip()]
    return " / ".join(said_lines[-lines:])[-2000:]


def end_of_logs(logs: Sequence[Path], run_dir: Path, submission: str, job: str) -> str:
    """Return the end of the logs of a job's last start: of the batch script and of every rank."""
    texts = [_tail(path)[0] for path in logs]
    starts = [each.restart for each in attempts(run_dir) if (each.job, each.submission) == (job, submission)]
    for path in [run_dir / LOG_FILE, *sorted(run_dir.glob("log.rank*.txt"))] if starts else []:
        text, whole = _tail(path)
        _, found, own = text.rpartition(log_mark(submission, job, max(starts)))
        # A log without this attempt's mark belongs to other attempts, unless the tail may have cut the mark off.
        texts.append(own if found or not whole else "")
    return "\n".join(texts)


def _tail(path: Path) -> tuple[str, bool]:
    """Return the end of a log, and whether that is the whole log."""
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - _LOG_TAIL))
            return handle.read().decode(errors="replace"), size <= _LOG_TAIL
    except OSError:
        return "", True
