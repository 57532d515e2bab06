"""The right to write one run: of several processes that would, one does, and another goes on if it dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sweeps.errors import UserError
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.lease import Lease, LeaseHeldError, alive
from sweeps.run.progress import is_done

LEASE_WAIT_S = 60.0


@contextmanager
def sole_writer(run_dir: Path, steps: int, rank: int = 0) -> Iterator[Lease | None]:
    """The right to write the run, for rank 0; None for the other ranks, which wait until it has it.

    A job of a cluster waits as long as it takes: if the other copy dies, nobody else will go on. Elsewhere a writer
    that was orphaned a moment ago gets the time to notice.

    Args:
        run_dir: the run's directory.
        steps: its budget: with it done there is nothing to wait for.
        rank: of this process in its job.

    Raises:
        RunInterruptedError: the run was asked to stop while it waited.
        UserError: another process is writing it.
    """
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    who = {"job": job, "restart": restart, "step": os.environ.get("SLURM_STEP_ID")} if job else {}
    if rank > 0:
        # Rank 0 may find the run done, and be gone before anyone sees its lease.
        while job and not _is(alive(run_dir), who) and not is_done(run_dir, steps):
            _stop_if_asked("while rank 0 waited for another process")
            time.sleep(0.5)
        yield None
        return
    lease = Lease(run_dir, owner=who)
    try:
        lease.acquire(None if job else LEASE_WAIT_S, give_up=lambda: interruption.requested)
    except LeaseHeldError as error:
        _stop_if_asked(f"while {lease.holder()} was writing this run")
        raise UserError(
            f"{run_dir}: another process has been writing this run for {LEASE_WAIT_S:.0f} s ({lease.holder()})"
        ) from error
    with lease:
        yield lease


def _is(facts: dict[str, object] | None, who: dict[str, str | None]) -> bool:
    return facts is not None and all(facts.get(key) == value for key, value in who.items())


def _stop_if_asked(when: str) -> None:
    if interruption.requested:
        raise RunInterruptedError(f"{interruption.reason} {when}")
