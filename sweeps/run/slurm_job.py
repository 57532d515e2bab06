"""Facts about the current SLURM job: ids, ranks, restarts, tasks.

submitit provides ids and ranks. This module adds the number of restarts, the node's name in SLURM, and the numbers of
tasks and nodes of the current `srun` step, which are not those of the job. Only this module takes facts about the job
from `SLURM_*`. `sweeps.executor.slurm` writes such variables into batch scripts or removes them. It warns about a
removed variable that would have set an option of sbatch.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sweeps.errors import require

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmJobEnvironment


@cache
def _environment() -> SlurmJobEnvironment:
    """Return submitit's description of the job, whether or not submitit started the job.

    Raises:
        UserError: submitit is not installed (scalerl-curves does not include it).
    """
    require("submitit", "SLURM_JOB_ID: a process inside a SLURM job", "submitit")
    from submitit.slurm.slurm import SlurmJobEnvironment  # imported here, because it takes a tenth of a second

    return SlurmJobEnvironment()


def inside() -> bool:
    """Return whether this process belongs to a SLURM job."""
    return bool(os.environ.get("SLURM_JOB_ID"))


def job_id() -> str:
    """Return the id of this task's job: `123`, or `123_4` in an array; `0` outside of SLURM."""
    return _environment().job_id if inside() else "0"


def array_index() -> int:
    """Return this job's index in its array; 0 without an array."""
    return int(_environment().array_task_id or 0)


def rank() -> int:
    """Return the rank of this process among all tasks of its `srun` step; 0 outside of SLURM."""
    return _environment().global_rank


def submission_folder() -> Path:
    """Return the folder from which submitit started this job."""
    return Path(_environment().paths.folder)


def restart_count() -> int:
    """Return how many times SLURM has restarted this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0)


def node_name() -> str:
    """Return this machine's name in SLURM, which in a container may differ from the hostname; else the hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def length_s() -> float | None:
    """Return the seconds from this job's start to its time limit, by slurmctld's clock; None if unknown."""
    start, end = (os.environ.get(f"SLURM_JOB_{name}_TIME") for name in ("START", "END"))
    return float(end) - float(start) if start and end else None


def identity() -> dict[str, str | None]:
    """Return job id, restart count and step id, all equal on all ranks of one `srun`; empty outside of SLURM."""
    if not inside():
        return {}
    return {
        "job": os.environ["SLURM_JOB_ID"],
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "step": os.environ.get("SLURM_STEP_ID"),
    }


def step_name() -> str:
    """Return a name for this start of this step, which ranks compare to detect foreign processes on a port."""
    return "/".join(os.environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))


def step_numbers() -> tuple[int, int]:
    """Return the ids of this job and of its step, as integers."""
    return int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_STEP_ID", 0))


def step_tasks() -> int:
    """Return the number of tasks in this `srun`; 1 in a batch script, 0 without SLURM."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) if inside() else 0


def step_nodes() -> int:
    """Return the number of nodes of this step."""
    return int(os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)


def tasks_of_nodes() -> str:
    """Return the numbers of tasks per node in SLURM's notation: "2(x3),1" is 2 on three nodes and 1 on a fourth."""
    return os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or ""


def evenly_spread() -> bool:
    """Return whether every node has the same number of this step's tasks."""
    return len(set(re.sub(r"\(x\d+\)", "", tasks_of_nodes()).split(","))) == 1


def gpus_of_node() -> int:
    """Return the number of GPUs that this job requested on each node; 0 if none."""
    # SLURM writes `4` or `a100:4`.
    listed = os.environ.get("SLURM_GPUS_PER_NODE") or os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    return int(listed.rpartition(":")[2])


def set_step_sizes_in_environment(tasks: int, nodes: int) -> None:
    """Set the environment's numbers of tasks and nodes to those of the step, for a library that reads the job's."""
    os.environ["SLURM_NTASKS"] = str(tasks)
    os.environ["SLURM_NNODES"] = str(nodes)
    os.environ["SLURM_NTASKS_PER_NODE"] = str(tasks // nodes)


def nodes_of_job() -> list[str]:
    """Return the names of all nodes of this job, in SLURM's order."""
    return _names(os.environ["SLURM_JOB_NODELIST"])


def nodes_of_step() -> list[str]:
    """Return the names of the nodes of this `srun` step; this node's name in a batch script."""
    return _names(os.environ.get("SLURM_STEP_NODELIST") or node_name())


def _names(listed: str) -> list[str]:
    """Expand a node list in SLURM's notation, such as n[1-3], to the names of the nodes."""
    process = subprocess.run(
        ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=60, check=True
    )
    return process.stdout.split()
