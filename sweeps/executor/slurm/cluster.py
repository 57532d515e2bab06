"""SLURM as a kind of cluster."""

from __future__ import annotations

from pathlib import Path

from sweeps.errors import require
from sweeps.executor.slurm.executor import ClusterExecutor
from sweeps.executor.slurm.scheduler import Scheduler, Slurm
from sweeps.executor.slurm.settings import JobSettings


class SlurmCluster(JobSettings):
    """Settings of SLURM jobs, with access to SLURM (`sweeps.executor.clusters.Cluster`)."""

    def scheduler(self) -> Scheduler:
        """Return access to SLURM by its commands.

        Raises:
            UserError: they are not in PATH.
        """
        return Slurm(self.clusters)

    def executor(self, study: Path, entry: str, threads: int) -> ClusterExecutor:
        """Make the executor that submits a study's members to SLURM.

        Raises:
            UserError: submitit is not installed, or SLURM's commands are not in PATH.
        """
        require("submitit", "cluster: slurm")
        study = study.resolve()
        title = str(self.resources.get("name") or study.name)
        return ClusterExecutor(study, self.scheduler(), self, entry, threads, title)
