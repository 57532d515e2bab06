"""Submit members to SLURM through submitit, as one job or array. It calls `job.run_member` for each member.

`python -m sweeps.executor.slurm.handover` does this in a separate process, which reads a `Request` and prints the
result, both as JSON. The separate process gives sbatch a timeout, and an environment without SLURM's options. It also
completes a submission that has begun if the controller is killed.

submitit first calls sbatch, and then writes the job's pickle. The pickle is missing if the process dies in between, or
if sbatch's answer is lost. `complete` writes it while the job is queued. A job that starts without its pickle waits for
a minute and fails as `half_submitted`; such failures may be retried any number of times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweeps.executor.slurm.job import run_member

if TYPE_CHECKING:
    from submitit import SlurmExecutor


@dataclass(frozen=True)
class Request:
    """Members to submit together, with the parameters of their jobs.

    Attributes:
        folder: folder of the submission, to which submitit and SLURM write.
        members: folders of the members, in the order of the array's tasks.
        parameters: arguments of `submitit.SlurmExecutor.update_parameters`.
        python: command by which a job starts Python; None for this interpreter.
    """

    folder: str
    members: tuple[str, ...]
    parameters: Mapping[str, Any]
    python: str | None = None

    @property
    def options(self) -> frozenset[str]:
        """Options of sbatch that the batch script sets, such as `time` or `job-name`."""
        given = {**self.parameters, **(self.parameters.get("additional_parameters") or {})}
        return frozenset(key.replace("_", "-") for key, value in given.items() if value is not None)


def executor_of(request: Request) -> SlurmExecutor:
    """Make submitit's executor for a request. Invalid parameters raise here, before sbatch is called."""
    from submitit import SlurmExecutor  # imported here: only the login node needs submitit, which looks for srun

    executor = SlurmExecutor(request.folder, python=request.python)
    executor.update_parameters(**request.parameters)
    return executor


def submit(executor: SlurmExecutor, members: Sequence[str]) -> str:
    """Submit members through submitit and return the id of their job or array.

    Raises:
        submitit.core.utils.FailedJobError: sbatch failed; the message is sbatch's.
    """
    jobs = executor.map_array(run_member, members)
    script = jobs[0].paths.submission_file
    script.chmod(0o600)  # it contains the user's own commands
    for link in script.parent.glob(".*.sh"):  # links under the script's temporary name, which a refusal leaves
        link.unlink()
    return jobs[0].job_id.split("_")[0]


def complete(folder: Path, jobs: Mapping[str, Path]) -> None:
    """Write missing pickles of jobs, as submitit would have done. Errors of the disk are ignored.

    Args:
        folder: folder of the submission.
        jobs: folder of the member, by id of its job.
    """
    from submitit import SlurmJob
    from submitit.helpers import DelayedSubmission

    with suppress(OSError):  # a job that lacks its pickle is retried
        for job, member in jobs.items():
            path = SlurmJob[None](folder, job).paths.submitted_pickle
            if not path.exists():
                unfinished = folder / f"{uuid.uuid4().hex}.pkl"
                DelayedSubmission(run_member, str(member)).dump(unfinished)
                unfinished.rename(path)


def pickle_of(job: str) -> str:
    """Return the name that submitit gives the pickle of a job."""
    return f"{job}_submitted.pkl"


def main() -> int:
    """Submit the request from stdin. Print `{"job": id}`, `{"refused": message}`, or `{"unclear": message}`."""
    request = Request(**json.load(sys.stdin))
    executor = executor_of(request)
    try:
        answer = {"job": submit(executor, request.members)}
    except Exception as error:
        answer = _answer(error)
    with suppress(BrokenPipeError):  # no controller any more: the next one finds the job by its submission's name
        print(json.dumps(answer), flush=True)
    return 0


def _answer(error: Exception) -> dict[str, str]:
    """Return sbatch's message as `refused` if sbatch exited with an error; else `unclear`: the result is unknown."""
    cause = error.__cause__
    if isinstance(cause, subprocess.CalledProcessError):
        return {"refused": cause.stderr or cause.output or f"exit code {cause.returncode}"}
    return {"unclear": str(error) or type(error).__name__}


if __name__ == "__main__":
    os._exit(main())
