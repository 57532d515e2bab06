"""Batch script of a submission: options of sbatch, set-up, the member's command, teardown and requeue."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps.executor.settings import JobSettings

REQUEUE_VARIABLE = "SCALERL_REQUEUE_FILE"
BEGAN_VARIABLE = "SCALERL_BEGAN"
STARTED = "started-"
# Written into scripts that may run long after this version is gone: never to be renamed.
JOB_COMMAND = "-m sweeps job"

# Our keys that sbatch calls otherwise; all others keep their names.
_SBATCH = {"name": "job_name", "timeout_min": "time", "mem_gb": "mem", "tasks_per_node": "ntasks_per_node"}
# Our keys that are no options of sbatch.
_NOT_SBATCH = frozenset(
    {"signal_delay_s", "array_parallelism", "additional_parameters", "srun_args", "stderr_to_stdout"}
)


def batch_script(folder: Path, settings: JobSettings, tasks: int, threads: int, job_name: str) -> str:
    """Return the text of the batch script for sbatch.

    Args:
        folder: folder of the submission, where SLURM and srun write their logs.
        settings: resources, limits, the user's own commands.
        tasks: number of members; more than one make an array.
        threads: CPU threads of a member's process.
        job_name: name of the job, of characters that SLURM takes.
    """
    given = {key: value for key, value in settings.resources.items() if value is not None}
    log = f"{folder}/{'%A_%a' if tasks > 1 else '%j'}_%t_log"
    apart = not given.get("stderr_to_stdout", True)
    options = {
        "nodes": 1,
        **{_SBATCH.get(key, key): value for key, value in given.items() if key not in _NOT_SBATCH},
        **({"mem": _memory(given["mem_gb"])} if "mem_gb" in given else {}),
        "job_name": job_name,
        "time": settings.timeout_min,
        "signal": f"USR2@{settings.signal_delay_s}",  # NCCL may take USR1
        "open_mode": "append",
        "output": f"{log}.out".replace("%t", "0"),
        **({"error": f"{log}.err".replace("%t", "0")} if apart else {}),
        **({"array": f"0-{tasks - 1}%{min(tasks, int(given.get('array_parallelism', 256)))}"} if tasks > 1 else {}),
        # Not every site lets a user requeue unless the job says so.
        "requeue": True,
        **(given.get("additional_parameters") or {}),
    }
    several = int(given.get("nodes", 1)) * int(given.get("tasks_per_node", 1)) > 1
    srun = [
        *("srun", "--unbuffered", "--output", f"{log}.out", *(("--error", f"{log}.err") if apart else ())),
        # One process of several that dies leaves the others waiting for it.
        *(["--kill-on-bad-exit=1"] if several else []),
        # A step does not inherit this from its job.
        *([f"--cpus-per-task={given['cpus_per_task']}"] if given.get("cpus_per_task") else []),
        *(given.get("srun_args") or []),
    ]
    python = settings.python or shlex.quote(sys.executable)
    command = f"{shlex.join(map(str, srun))} {python} -u {JOB_COMMAND} {shlex.quote(str(folder))}"
    where = shlex.quote(str(folder))
    lines = [
        "#!/bin/bash",
        "",
        *_options(options),
        "",
        # By the clock of this node, on which the first rank runs too.
        f"export {BEGAN_VARIABLE}=$(date +%s)",
        f"export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}",
        f"export {REQUEUE_VARIABLE}={where}/requeue-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}",
        # Which start of the job this is: one that ends before the member begins leaves nothing else behind.
        *_NAME,
        f"touch {where}/{STARTED}$scalerl_job-${{SLURM_RESTART_COUNT:-0}}",
        *settings.setup,
        "",
        f"{command} && scalerl_status=0 || scalerl_status=$?",
        "",
        # Whatever the user's own commands switch on or return, the requeue comes last, for it ends the script.
        "set +e",
        *settings.teardown,
        *_REQUEUE,
        "exit $scalerl_status",
        "",
    ]
    return "\n".join(lines)


def _options(options: Mapping[str, Any]) -> list[str]:
    """Return `#SBATCH` lines; True stands for an option without a value."""
    lines = []
    for key, value in sorted(options.items()):
        flag = f"#SBATCH --{key.replace('_', '-')}"
        lines.append(flag if value is True else f"{flag}={shlex.quote(str(value))}")
    return lines


def _memory(gigabytes: float) -> str:
    """Format memory for sbatch, which takes whole numbers only: GB, or MB for a fraction."""
    return f"{int(gigabytes)}GB" if gigabytes == int(gigabytes) else f"{int(gigabytes * 1024)}MB"


# A task of an array by its own name: the last one bears the array's id, by which all of them would be meant.
_NAME = (
    "scalerl_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
    "scalerl_job=${scalerl_job:-$SLURM_JOB_ID}",
)

# Runs on the node after the member, outside of any container. The member has asked for a requeue by leaving the file;
# a job that was cancelled meanwhile is no longer RUNNING and stays cancelled.
_REQUEUE = (
    f'if [ -e "${REQUEUE_VARIABLE}" ]; then',
    "  for scalerl_pause in 1 2 5 10 20 40; do",
    '    if scalerl_state=$(squeue -h -j "$scalerl_job" -o %T 2>/dev/null); then',
    '      [ "$scalerl_state" = RUNNING ] || break',
    '      scontrol requeue "$scalerl_job" && sleep 60 && break',
    "    fi",
    "    sleep $scalerl_pause",
    "  done",
    "fi",
)
