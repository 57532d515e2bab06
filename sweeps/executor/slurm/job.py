"""Entry points of a SLURM job, one call for each task of an array and each rank of a job.

submitit calls `run_member`. Batch scripts of earlier versions, which may still be queued, call
`python -m sweeps job <folder of the submission>`. submitit's handlers of signals are replaced, because they would end
the run in the middle of a step, and requeue it as well.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NoReturn

from sweeps.executor.node.entry import run_task
from sweeps.run import slurm_job


def run_member(run_dir: str) -> NoReturn:
    """Run a member in the job that submitit has started, and end the process.

    Pickles of queued jobs refer to this function as `sweeps.executor.slurm.job.run_member`: never rename or move it.
    It returns nothing for submitit to pickle; results of a member are in its folder.
    """
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    run_task(slurm_job.submission_folder(), Path(run_dir), slurm_job)


def run(arguments: list[str]) -> NoReturn:
    """Run the member of this task of an earlier version's batch script, and end the process."""
    run_task(Path(arguments[0]), slurm_job.array_index(), slurm_job)
