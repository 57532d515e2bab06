"""Facts about the cluster job to which this process belongs, for any kind of cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from sweeps.run import slurm_job


class Job(Protocol):
    """Protocol of the facts about a cluster job. The program that the cluster starts passes them to `enter`."""

    def job_id(self) -> str:
        """Return the job's id, as the cluster lists it."""

    def restart_count(self) -> int:
        """Return how many times the cluster has restarted this job."""

    def rank(self) -> int:
        """Return the rank of this process among all tasks of the job."""

    def step_tasks(self) -> int:
        """Return the number of tasks of the job."""

    def node_name(self) -> str:
        """Return this machine's name, as the cluster calls it."""

    def length_s(self) -> float | None:
        """Return the seconds from the job's start to its time limit; None if the job's manifest has the limit."""

    def identity(self) -> Mapping[str, str | None]:
        """Return facts that identify this start of the job, equal on all ranks; the key `job` has its id."""


# SLURM's facts are the default, because `enter` is not called in a run that the user started with sbatch or srun.
# Outside of SLURM they describe a single process.
_current: Job = slurm_job


def enter(job: Job) -> None:
    """Record the job to which this process belongs."""
    global _current
    _current = job


def current() -> Job:
    """Return the job to which this process belongs."""
    return _current


def node_name() -> str:
    """Return this machine's name, as the cluster calls it."""
    return _current.node_name()
