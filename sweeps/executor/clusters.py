"""Kinds of cluster on which members can run. Each kind has a folder with a class like `Cluster`, and an entry below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from sweeps.errors import UserError
from sweeps.executor.base import Executor, load_entry

# Class of each kind of cluster, by the kind's name in `launch.json`. A class is imported when a study needs it.
CLUSTERS = {"slurm": "sweeps.executor.slurm.executor:SlurmCluster"}


class QueuedJob(Protocol):
    """Protocol of a job as its cluster describes it."""

    @property
    def name(self) -> str:
        """Name of the job, which ends with the name of its submission."""

    @property
    def shown(self) -> tuple[str, str | None]:
        """State for display (`queued`, `running` or `ended`), with a detail: why it waits, how it ended, or None."""


class Scheduler(Protocol):
    """Protocol of access to a cluster's scheduler, as far as a study's status needs it."""

    def queue(self) -> Mapping[str, QueuedJob] | None:
        """Return this user's jobs by id; None if the scheduler does not answer."""


class Cluster(Protocol):
    """Protocol of one kind of cluster: the settings of a study's jobs there, and access to it."""

    @property
    def asks_for_gpus(self) -> bool:
        """True if a job requests GPUs."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make settings from keys of the launcher or of `launch.json`, and check them.

        Raises:
            UserError: a value cannot work.
        """

    def to_mapping(self) -> dict[str, Any]:
        """Return the settings as a flat mapping, the inverse of `of`."""

    def commands(self) -> dict[str, Any]:
        """Return the settings that are shell commands or can contain them. In an untrusted study they must be empty."""

    def scheduler(self) -> Scheduler:
        """Return access to the cluster.

        Raises:
            UserError: the cluster cannot be reached from here.
        """

    def executor(self, study: Path, entry: str, threads: int) -> Executor:
        """Make the executor that runs a study's members.

        Args:
            study: the study's folder.
            entry: `module:function` that runs one member, given its directory.
            threads: CPU threads of each member.

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
