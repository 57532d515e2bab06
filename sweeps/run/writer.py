"""Give one process at a time the exclusive right to write a run. If it dies, another process can take over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sweeps.errors import UserError
from sweeps.run.activity import HangTimeout, activity
from sweeps.run.interruption import RunInterruptedError, interruption, requested_stop
from sweeps.run.job import current
from sweeps.run.lease import Lease, LeaseHeldError, holder_facts
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec

LEASE_WAIT_S = 60.0
# Hundreds of members send heartbeats to one file system, so each sends only four per minute. Another process takes over
# only after six missed heartbeats, because caches delay them: NFS may show changes a minute late.
BEAT_S = 15.0
EXPIRY_S = 90.0
# A check of the lease is trusted for this many seconds, because a run checks before every line, many times per second.
TRUSTED_S = 1.0
# Long enough to find out that the holder's node is dead, even on a slow file server. If the holder is alive, it is
# better to return the allocation than to wait while the other copy works.
DUPLICATE_WAIT_S = 600.0


class DuplicateRunError(UserError):
    """Error: another copy of this job is writing the run. The message names it. This job has not failed."""


@contextmanager
def hold_run_lease(run_dir: Path, spec: RunSpec, rank: int = 0) -> Iterator[Lease | None]:
    """Acquire the run's lease on rank 0, and yield it. Other ranks wait until rank 0 has it, and yield None.

    A cluster job waits up to `DUPLICATE_WAIT_S` for the lease: the scheduler may have lost track of an earlier job that
    is dying or still working. Elsewhere the wait is `LEASE_WAIT_S`: by then a holder whose parent has died has ended as
    well. While the lease is held, a stop request in the run's directory is obeyed, and the process ends itself if it
    hangs (`launch.hang_factor`).

    Args:
        run_dir: the run's folder.
        spec: the run's specification; other ranks stop waiting when its budget is reached.
        rank: rank of this process in its job.

    Raises:
        RunInterruptedError: a stop was requested during the wait.
        DuplicateRunError: in a cluster job, another process is still writing the run.
        UserError: outside of a cluster, another process is still writing the run.
    """
    job_facts = current().identity()
    job = job_facts.get("job")
    if rank > 0:
        # Rank 0 may find the run done and exit before other ranks see its lease.
        while job and not _is_held_by(holder_facts(run_dir), job_facts) and not is_done(run_dir, spec.steps, spec.run):
            _stop_if_asked("while rank 0 waited for another process")
            if reason := requested_stop(run_dir):  # rank 0 sees the same request and never takes the lease
                raise RunInterruptedError(reason)
            time.sleep(0.5)
        yield None
        return
    lease = Lease(run_dir, owner=job_facts, beat_s=BEAT_S, expiry_s=EXPIRY_S, facts=activity.facts, trusted_s=TRUSTED_S)
    wait_s = DUPLICATE_WAIT_S if job else LEASE_WAIT_S
    try:
        lease.acquire(wait_s, give_up=lambda: interruption.requested)
    except LeaseHeldError as error:
        _stop_if_asked(f"while {lease.holder()} was writing this run")
        message = f"{run_dir}: another process has been writing this run for {wait_s:.0f} s ({lease.holder()})"
        if job:
            raise DuplicateRunError(f"{message}; this job gives its allocation back") from error
        raise UserError(message) from error
    with lease, interruption.watching_stop_file(run_dir), activity.watched(HangTimeout.of(spec.config), lease.release):
        yield lease


def _is_held_by(facts: dict[str, object] | None, job_facts: Mapping[str, str | None]) -> bool:
    """Return whether the facts in a lease's file name this job; False if `facts` is None (no lease)."""
    return facts is not None and all(facts.get(key) == value for key, value in job_facts.items())


def _stop_if_asked(when: str) -> None:
    """Raise `RunInterruptedError` if this process was asked to stop. `when` completes the message."""
    if interruption.requested:
        raise RunInterruptedError(f"{interruption.reason} {when}")
