"""Exclusive right to write one run: one of several processes has it, and another takes over if it dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweeps.errors import UserError
from sweeps.run import slurm_job
from sweeps.run.activity import Patience, activity
from sweeps.run.interruption import RunInterruptedError, interruption, stop_asked
from sweeps.run.lease import Lease, LeaseHeldError, alive
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec

LEASE_WAIT_S = 60.0
# Hundreds of members beat on one file system: each writes a few hundred bytes four times a minute. Six beats may be
# lost, or come late through a cache of that file system (NFS shows some things after a minute only), before another
# takes over.
BEAT_S = 15.0
EXPIRY_S = 90.0
# A run may write many lines a second, and each asks first whether it may.
TRUSTED_S = 1.0
# Long enough for the silence of a holder on a dead node to be noticed, with room for a slow file server; then the
# allocation is better given back than held beside a copy that works.
DUPLICATE_WAIT_S = 600.0


class DuplicateRunError(UserError):
    """Error: another copy of this job is writing the run; the message names it. Nothing is wrong with either."""


@contextmanager
def sole_writer(run_dir: Path, spec: RunSpec, rank: int = 0) -> Iterator[Lease | None]:
    """Acquire the run's lease for rank 0 and yield it; the other ranks wait for that and get None.

    A job of a cluster waits for `DUPLICATE_WAIT_S`: the scheduler may have lost sight of a job that is dying, or of
    one that works on. Elsewhere a writer that was orphaned a moment ago gets the time to notice. While a run is
    written, a request in its directory to stop is heeded, and it ends itself if it hangs (`launch.hang_factor`).

    Args:
        run_dir: the run's folder.
        spec: the run's specification; once its budget is done the other ranks have nothing to wait for.
        rank: rank of this process in its job.

    Raises:
        RunInterruptedError: the run was asked to stop while it waited.
        DuplicateRunError: in a job of a cluster, another process is writing it still.
        UserError: the same elsewhere.
    """
    who = slurm_job.identity()
    job = who.get("job")
    if rank > 0:
        # Rank 0 may find the run done, and be gone before anyone sees its lease.
        while job and not _is(alive(run_dir), who) and not is_done(run_dir, spec.steps, spec.run):
            _stop_if_asked("while rank 0 waited for another process")
            if asked := stop_asked(run_dir):  # rank 0 has left before it would have taken the lease
                raise RunInterruptedError(asked)
            time.sleep(0.5)
        yield None
        return
    lease = Lease(run_dir, owner=who, beat_s=BEAT_S, expiry_s=EXPIRY_S, facts=activity.facts, trusted_s=TRUSTED_S)
    wait_s = DUPLICATE_WAIT_S if job else LEASE_WAIT_S
    try:
        lease.acquire(wait_s, give_up=lambda: interruption.requested)
    except LeaseHeldError as error:
        _stop_if_asked(f"while {lease.holder()} was writing this run")
        said = f"{run_dir}: another process has been writing this run for {wait_s:.0f} s ({lease.holder()})"
        if job:
            raise DuplicateRunError(f"{said}; this job gives its allocation back") from error
        raise UserError(said) from error
    with lease, interruption.heeding(run_dir), activity.watched(Patience.of(spec.config), lease.release):
        yield lease


def _is(facts: dict[str, object] | None, who: dict[str, str | None]) -> bool:
    return facts is not None and all(facts.get(key) == value for key, value in who.items())


def _stop_if_asked(when: str) -> None:
    if interruption.requested:
        raise RunInterruptedError(f"{interruption.reason} {when}")
