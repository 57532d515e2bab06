"""Kinds of cluster on which members can run. A kind is a folder with a class like `Cluster`, and an entry below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from sweeps.errors import UserError
from sweeps.executor.base import Executor, load_entry

# Kind, as `launch.json` names it: its class. Classes are imported when a study needs them.
CLUSTERS = {"slurm": "sweeps.executor.slurm.executor:SlurmCluster"}


class QueuedJob(Protocol):
    """A job as its cluster describes it."""

    @property
    def name(self) -> str:
        """Name of the job, which ends with the name of its submission."""

    @property
    def shown(self) -> tuple[str, str | None]:
        """Return `queued` with the reason if it is not the usual one, `running`, or `ended` with the cluster's word."""


class Scheduler(Protocol):
    """Access to a cluster, as far as a study's status needs it."""

    def queue(self) -> Mapping[str, QueuedJob] | None:
        """Return this user's jobs by id; None if there is no answer."""


class Cluster(Protocol):
    """Resources and limits of the jobs of a study on one kind of cluster, and access to it."""

    @property
    def asks_for_gpus(self) -> bool:
        """True if a job asks for GPUs."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make checked settings from the launcher's keys, or from those that `launch.json` has.

        Raises:
            UserError: a value that cannot work.
        """

    def given(self) -> dict[str, Any]:
        """Return the settings as a flat mapping, the inverse of `of`."""

    def commands(self) -> dict[str, Any]:
        """Return the settings that a shell runs, or that can contain a command. A stranger's study must have none."""

    def scheduler(self) -> Scheduler:
        """Return access to the cluster.

        Raises:
            UserError: it cannot be reached from here.
        """

    def executor(self, study: Path, entry: str, threads: int) -> Executor:
        """Make the executor of a study's members, see `LaunchSettings` for the arguments.

        Raises:
            UserError: the cluster cannot be reached from here.
        """


def cluster_class(kind: str) -> type[Cluster]:
    """Import the class of a kind of cluster.

    Raises:
        UserError: there is no such kind.
    """
    if kind not in CLUSTERS:
        raise UserError(f"cluster: {kind!r} is no kind of cluster; valid: {', '.join(CLUSTERS)}")
    found: type[Cluster] = load_entry(CLUSTERS[kind])
    return found
