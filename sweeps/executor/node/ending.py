"""Determine how jobs ended, from their attempt records and logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sweeps.executor.base import Launch, Outcome
from sweeps.executor.failure import KINDS
from sweeps.executor.node.attempts import Attempt, attempts, log_mark
from sweeps.run.interruption import requested_stop
from sweeps.run.journal import LOG_FILE
from sweeps.run.progress import is_done, journal_damage
from sweeps.run.spec import budget_of

# Failures that are reported even if the member was asked to stop.
_ALWAYS_REPORTED = frozenset({"error", "out_of_memory", "disk_full"})
# Bytes read at the end of a log. A crash of native code prints every thread's stack, which must fit.
_LOG_TAIL = 1 << 16


def newest_attempt(run_dir: Path, submission: str, job: str) -> Attempt | None:
    """Return the attempt record of a job's newest start; None if there is none."""
    starts = [attempt for attempt in attempts(run_dir) if (attempt.submission, attempt.job) == (submission, job)]
    return starts[-1] if starts else None


def outcome_of(
    member: Launch, kind: str | None, reason: str | None, attempt: Attempt | None, node: str | None
) -> Outcome:
    """Return the outcome of a job that has ended, after a look at the member's journal and stop file.

    Args:
        member: member that the job ran.
        kind, reason: kind and message of the failure; None if the job finished.
        attempt: the job's attempt record; None if there is none.
        node: node to blame for the failure; None if no node is to blame.
    """
    run, run_dir = member.run, member.run_dir
    if kind is None:
        # The job finished but the run is not done: its journal is damaged, or the budget was raised meanwhile.
        steps = budget_of(run_dir)
        if (steps is None or not is_done(run_dir, steps, run)) and (damage := journal_damage(run_dir, run)):
            return Outcome(run, 1, "error", damage)
        return Outcome(run, 0, "outgrown", KINDS["outgrown"][0], attempt.node if attempt else None)
    if kind not in _ALWAYS_REPORTED and (stop_reason := requested_stop(run_dir)):
        # A request to stop takes precedence over the failure, so that the member is not retried.
        return Outcome(run, 1, "stopped", stop_reason)
    return Outcome(run, 1, kind, reason, node)


def last_log_lines(logs: Sequence[Path], lines: int = 5) -> str:
    """Return the last lines of the batch logs, joined into one line of at most 2000 characters."""
    nonempty_lines = [line.strip() for path in logs for line in _tail(path)[0].splitlines() if line.strip()]
    return " / ".join(nonempty_lines[-lines:])[-2000:]


def end_of_logs(logs: Sequence[Path], run_dir: Path, submission: str, job: str) -> str:
    """Return the end of all logs of a job's last start: of the batch logs, and of every rank's log."""
    texts = [_tail(path)[0] for path in logs]
    starts = [each.restart for each in attempts(run_dir) if (each.job, each.submission) == (job, submission)]
    for path in [run_dir / LOG_FILE, *sorted(run_dir.glob("log.rank*.txt"))] if starts else []:
        text, is_whole = _tail(path)
        _, mark, after_mark = text.rpartition(log_mark(submission, job, max(starts)))
        # No mark: the text is from earlier attempts, unless the mark is before the part that was read.
        texts.append(after_mark if mark or not is_whole else "")
    return "\n".join(texts)


def _tail(path: Path) -> tuple[str, bool]:
    """Return the end of a log, and whether it is the whole log."""
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - _LOG_TAIL))
            return handle.read().decode(errors="replace"), size <= _LOG_TAIL
    except OSError:
        return "", True
