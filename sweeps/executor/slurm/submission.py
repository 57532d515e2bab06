"""Prepare a submission to SLURM: write the files that its jobs need, and make the request for submitit.

All files are in the submission's folder, whose name is used only once. `node.manifest` writes its files before the jobs
are submitted. The pickle is written afterwards, because submitit names it after the job's id; `handover` describes what
happens to a job without a pickle. Besides the manifest, the folder has:

    <job>_submission.sh       the batch script, written by submitit
    <job>_submitted.pkl       names the function `sweeps.executor.slurm.job.run_member` and the member's folder
    started-<job>-<restart>   written by the batch script each time it starts
    <job>_<rank>_log.out      output of SLURM, of the set-up commands and of srun; members have logs of their own
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Launch
from sweeps.executor.node.entry import BEGAN_VARIABLE, REQUEUE_VARIABLE
from sweeps.executor.node.manifest import JOBS_DIR, make_folder, write_manifest
from sweeps.executor.slurm.handover import Request
from sweeps.executor.slurm.settings import JobSettings

STARTED = "started-"

# Keys that have another name in SLURM, and therefore in submitit.
_NAME_OF = {"timeout_min": "time", "mem_gb": "mem", "tasks_per_node": "ntasks_per_node"}


def new_folder(study: Path, submission: str) -> Path:
    """Make the folder of a submission, with mode 0700, because the owner's jobs run its scripts.

    Raises:
        UserError: the path has a character that SLURM would interpret.
    """
    folder = study.resolve() / JOBS_DIR / submission
    for mark, why in (("%", "SLURM takes for a placeholder"), ("\\", "makes SLURM take placeholders for names")):
        if mark in str(folder):
            raise UserError(f"output_dir: {study} has a {mark} in it, which {why}; choose another name")
    if not str(folder).isprintable():
        raise UserError(
            f"output_dir: {str(study)!r} has a line break or another control character; choose another name"
        )
    return make_folder(study, submission)


def write_submission(
    folder: Path, members: Sequence[Launch], settings: JobSettings, entry: str, threads: int, title: str
) -> Request:
    """Write the files that a submission's jobs need, and return the request for submitit.

    Args:
        folder: folder of the submission; its last part is the submission's name.
        members: members in the order of the array's tasks.
        settings: resources and limits.
        entry: `module:function` that runs one member, given the member's folder.
        threads: CPU threads of a member's process.
        title: beginning of the job's name, for display; see `sanitize_name`.
    """
    limits = {
        "timeout_min": settings.timeout_min,
        "signal_delay_s": settings.signal_delay_s,
        "max_num_timeout": settings.max_num_timeout,
        "gpus": settings.needs_gpu,
    }
    write_manifest(folder, members, entry, limits, settings.to_mapping())
    # The job's name ends with the submission's name, by which the executor finds the job in the queue.
    job_parameters = parameters(folder, settings, threads, f"{sanitize_name(title)}-{folder.name}")
    return Request(
        str(folder), tuple(str(member.run_dir.resolve()) for member in members), job_parameters, settings.python
    )


def parameters(folder: Path, settings: JobSettings, threads: int, job_name: str) -> dict[str, Any]:
    """Return the parameters of submitit's executor for the jobs of a submission.

    Args:
        folder: folder of the submission.
        settings: resources, limits, and the user's commands.
        threads: CPU threads of a member's process.
        job_name: name of the jobs; may contain only characters that SLURM accepts.
    """
    resources = {key: value for key, value in settings.resources.items() if value is not None}
    has_several_tasks = int(resources.get("nodes", 1)) * int(resources.get("tasks_per_node", 1)) > 1
    submitit_parameters = {
        _NAME_OF.get(key, key): value for key, value in resources.items() if key not in ("name", "clusters")
    }
    return {
        "wckey": None,  # clusters that register such keys refuse submitit's default
        "stderr_to_stdout": True,
        **submitit_parameters,
        **({"mem": _memory(resources["mem_gb"])} if "mem_gb" in resources else {}),
        "job_name": job_name,
        "time": settings.timeout_min,
        "signal_delay_s": settings.signal_delay_s,
        "additional_parameters": {
            # Set explicitly: a user may have set another signal for submitit, and NCCL may use USR1.
            "signal": f"USR2@{settings.signal_delay_s}",
            # At some sites a job can be requeued only if it requests that.
            "requeue": True,
            **({"clusters": settings.clusters} if settings.clusters else {}),
            **(resources.get("additional_parameters") or {}),
        },
        "srun_args": [
            # If one of several processes dies, end the others, which would wait for it.
            *(["--kill-on-bad-exit=1"] if has_several_tasks else []),
            # A job step does not inherit this option from its job.
            *([f"--cpus-per-task={resources['cpus_per_task']}"] if resources.get("cpus_per_task") else []),
            *map(str, resources.get("srun_args") or []),
        ],
        "setup": _setup_commands(folder, threads, settings.setup),
        "teardown": _teardown_commands(settings.teardown),
    }


def _memory(gigabytes: float) -> str:
    """Format memory for sbatch, which accepts only whole numbers: in GB, or a fraction in MB."""
    return f"{int(gigabytes)}GB" if gigabytes == int(gigabytes) else f"{int(gigabytes * 1024)}MB"


def _setup_commands(folder: Path, threads: int, commands: Sequence[str]) -> list[str]:
    """Return the commands that a batch script runs before the member, including the user's."""
    where = shlex.quote(str(folder))
    return [
        # The clock of this node, on which the first rank runs as well.
        f"export {BEGAN_VARIABLE}=$(date +%s)",
        f"export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}",
        f"export {REQUEUE_VARIABLE}={where}/requeue-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}",
        # In the last task of an array, SLURM_JOB_ID is the id of the whole array, so name the task explicitly.
        "scalerl_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}",
        "scalerl_job=${scalerl_job:-$SLURM_JOB_ID}",
        # Mark this start of the job. If the job ends before the member begins, this file is the only trace.
        f"touch {where}/{STARTED}$scalerl_job-${{SLURM_RESTART_COUNT:-0}}",
        *commands,
        # The user's commands may have set `-e` or a trap. A member that fails must not end the script before the
        # requeue.
        "set +e; trap - ERR",
    ]


def _teardown_commands(commands: Sequence[str]) -> list[str]:
    """Return the commands that a batch script runs after the member: the user's, then a requeue if one was requested.

    They run on the node, outside of any container. A requeue ends the script. A job that was cancelled in the meantime
    is no longer RUNNING, and stays cancelled.
    """
    return [
        "scalerl_status=$?",
        *commands,
        f'if [ -e "${REQUEUE_VARIABLE}" ]; then',
        "  for scalerl_pause in 1 2 5 10 20 40; do",
        '    if scalerl_state=$(squeue -h -j "$scalerl_job" -o %T 2>/dev/null); then',
        '      [ "$scalerl_state" = RUNNING ] || break',
        '      scontrol requeue "$scalerl_job" && sleep 60 && break',
        "    fi",
        "    sleep $scalerl_pause",
        "  done",
        "fi",
        "exit $scalerl_status",
        "",
    ]


def sanitize_name(name: str) -> str:
    """Return a name with only letters, digits and `_.+=-`, of 1 to 60 characters."""
    return re.sub(r"[^A-Za-z0-9_.+=-]+", "_", name).strip("._-")[:60] or "scalerl"
