"""Entry points of a SLURM job. They are called for each task of an array and for each rank of a job.

submitit calls `run_member`. Batch scripts of earlier versions, which may still be queued, call
`python -m sweeps job <folder of the submission>`. submitit's signal handlers are replaced, because they would end the
run in the middle of a step, and would requeue the job themselves.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NoReturn

from sweeps.executor.node.entry import run_task
from sweeps.run import slurm_job


def run_member(run_dir: str) -> NoReturn:
    """Run a member in the job that submitit has started, and end the process.

    Never rename or move this function: pickles of queued jobs refer to it as `sweeps.executor.slurm.job.run_member`.
    """
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    run_task(slurm_job.submission_folder(), Path(run_dir), slurm_job)


def run(arguments: list[str]) -> NoReturn:
    """Run the member of this task, for batch scripts of earlier versions, and end the process."""
    run_task(Path(arguments[0]), slurm_job.array_index(), slurm_job)
