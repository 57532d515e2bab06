"""Exclusive right to write one run: only one process has it, and another takes over if it dies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sweeps.errors import UserError
from sweeps.run.activity import Patience, activity
from sweeps.run.interruption import RunInterruptedError, interruption, stop_asked
from sweeps.run.job import current
from sweeps.run.lease import Lease, LeaseHeldError, alive
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec

LEASE_WAIT_S = 60.0
# Hundreds of members send heartbeats to one file system: each writes a few hundred bytes four times per minute. Six
# beats may be lost or delayed by the file system's cache (NFS may show changes a minute late) before a takeover.
BEAT_S = 15.0
EXPIRY_S = 90.0
# A run may write many lines per second, and checks its lease before each.
TRUSTED_S = 1.0
# Long enough to notice that a holder on a dead node is silent, even with a slow file server. After that it is better to
# give the allocation back than to hold it while another copy works.
DUPLICATE_WAIT_S = 600.0


class DuplicateRunError(UserError):
    """Error: another copy of this job is writing the run; the message names it. Neither copy is faulty."""


@contextmanager
def sole_writer(run_dir: Path, spec: RunSpec, rank: int = 0) -> Iterator[Lease | None]:
    """Acquire the run's lease on rank 0 and yield it; other ranks wait for that and get None.

    A cluster job waits for `DUPLICATE_WAIT_S`, because the scheduler may have lost track of a job that is dying or
    still working. Elsewhere the wait is short: it lets a writer that was just orphaned notice that. While the lease is
    held, a stop request in the run's directory is obeyed, and the process ends itself if it hangs
    (`launch.hang_factor`).

    Args:
        run_dir: the run's folder.
        spec: the run's specification; once its budget is done, other ranks stop waiting.
        rank: rank of this process in its job.

    Raises:
        RunInterruptedError: a stop was requested during the wait.
        DuplicateRunError: in a cluster job, another process is still writing the run.
        UserError: the same outside of a cluster.
    """
    who = current().identity()
    job = who.get("job")
    if rank > 0:
        # Rank 0 may find the run done and exit before other ranks see its lease.
        while job and not _is(alive(run_dir), who) and not is_done(run_dir, spec.steps, spec.run):
            _stop_if_asked("while rank 0 waited for another process")
            if reason := stop_asked(run_dir):  # rank 0 exited before taking the lease
                raise RunInterruptedError(reason)
            time.sleep(0.5)
        yield None
        return
    lease = Lease(run_dir, owner=who, beat_s=BEAT_S, expiry_s=EXPIRY_S, facts=activity.facts, trusted_s=TRUSTED_S)
    wait_s = DUPLICATE_WAIT_S if job else LEASE_WAIT_S
    try:
        lease.acquire(wait_s, give_up=lambda: interruption.requested)
    except LeaseHeldError as error:
        _stop_if_asked(f"while {lease.holder()} was writing this run")
        message = f"{run_dir}: another process has been writing this run for {wait_s:.0f} s ({lease.holder()})"
        if job:
            raise DuplicateRunError(f"{message}; this job gives its allocation back") from error
        raise UserError(message) from error
    with lease, interruption.heeding(run_dir), activity.watched(Patience.of(spec.config), lease.release):
        yield lease


def _is(facts: dict[str, object] | None, who: Mapping[str, str | None]) -> bool:
    return facts is not None and all(facts.get(key) == value for key, value in who.items())


def _stop_if_asked(when: str) -> None:
    if interruption.requested:
        raise RunInterruptedError(f"{interruption.reason} {when}")
