"""What is asked of SLURM: submit a script, say how jobs are, forget one. Nothing is ever guessed from silence."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sweeps.errors import UserError

QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"})
# States after which a job does nothing more; with --requeue SLURM itself starts some of these again.
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
    | {"DEADLINE", "SPECIAL_EXIT", "REVOKED"}
)

_COMMAND_TIMEOUT_S = 60
_FOREIGN = ("SLURM_", "SQUEUE_", "SACCT_", "SCONTROL_")
# What sbatch says when the same submission may succeed later. The first kind may have been accepted all the same.
_NO_ANSWER = re.compile(
    r"(?i)unable to contact slurm|connection refused|connection reset|timed out|zero bytes|communications? (error|fail)"
    r"|transport endpoint|slurmctld.*(down|not respond)|controller.*not respond"
)
_NOT_NOW = re.compile(
    r"(?i)job submit limit|submitjob|temporarily unable to accept|resource temporarily unavailable|max.*job.*limit"
    r"|standby mode|partition not available|slurm_?db.*connection|too many jobs|(qos|assoc)\w*(max|grp)\w*job"
)
# Limits that no waiting changes, under the same words as those that it does.
_NEVER = re.compile(r"(?i)(qos|assoc)\w*(maxwall|(max|min)\w*perjob|maxnode\w*|min\w+)")
_ARRAY_TOO_LARGE = re.compile(r"(?i)invalid job array specification")


@dataclass(frozen=True)
class JobInfo:
    """A job as SLURM describes it: `job` is `123` or `123_4`, `reason` why it waits, `exit_code` as `0:9`."""

    job: str
    state: str
    node: str
    reason: str
    name: str
    exit_code: str = ""


class RefusedError(Exception):
    """A submission was not taken.

    Attributes:
        later: the same may succeed later.
        uncertain: there was no answer; it may have been taken.
        too_large: the array has more tasks than the cluster allows.
    """

    def __init__(self, message: str, later: bool = False, uncertain: bool = False, too_large: bool = False) -> None:
        super().__init__(message)
        self.later = later
        self.uncertain = uncertain
        self.too_large = too_large


class Scheduler(Protocol):
    """What the executor needs of a cluster."""

    def submit(self, script: Path) -> str:
        """Submit a batch script; the job's id. Raises RefusedError."""
        ...

    def queue(self) -> dict[str, JobInfo] | None:
        """This user's jobs by id, with those that ended a short while ago; None if there is no answer."""
        ...

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """How ended jobs did so, as `28:0` or `0:9`, of those of which anybody still knows it."""
        ...

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """What accounting knows about jobs; empty if there is none."""
        ...

    def array_limit(self) -> int:
        """Tasks that one array may have."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None:
        """Ask for the end of jobs."""
        ...


class Slurm:
    """The cluster whose commands are in PATH.

    Raises:
        UserError: they are not.
    """

    def __init__(self) -> None:
        import shutil

        missing = [name for name in ("sbatch", "squeue", "srun", "scontrol") if shutil.which(name) is None]
        if missing:
            raise UserError(
                f"cluster: slurm needs {', '.join(missing)} in PATH; run this on a login node of the cluster, or use "
                "cluster=local"
            )

    def submit(self, script: Path) -> str:
        """See `Scheduler.submit`."""
        try:
            done = _run(["sbatch", "--parsable", str(script)])
        except subprocess.TimeoutExpired as error:
            raise RefusedError("sbatch: no answer", later=True, uncertain=True) from error
        if done.returncode == 0 and (match := re.search(r"(?m)^(\d+)(;.*)?$", done.stdout.strip())):
            return match[1]
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split()) or f"exit code {done.returncode}"
        if _ARRAY_TOO_LARGE.search(said):
            raise RefusedError(said, later=True, too_large=True)
        if _NEVER.search(said):
            raise RefusedError(said)
        if _NOT_NOW.search(said):
            raise RefusedError(said, later=True)
        if _NO_ANSWER.search(said):
            raise RefusedError(said, later=True, uncertain=True)
        raise RefusedError(said)

    def queue(self) -> dict[str, JobInfo] | None:
        """See `Scheduler.queue`."""
        # The name comes last: it alone may hold a separator, being another program's.
        command = ["squeue", "-h", "-a", "-r", "--states=all", "-u", str(os.getuid()), "-o", "%i|%T|%N|%r|%j"]
        try:
            done = _run(command)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return None
        return {info.job: info for line in done.stdout.splitlines() if (info := _queue_line(line))}

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """See `Scheduler.exit_codes`; from slurmctld, for accounting learns of them later, or never."""
        found = {}
        command = ["squeue", "-h", "-a", "-r", "--states=all", "-j", ",".join(jobs), "-O", "JobArrayID:40,exit_code:20"]
        try:
            said = _run(command).stdout if jobs else ""
        except subprocess.TimeoutExpired:
            said = ""
        for line in said.splitlines():
            match line.split():
                case [job, status] if status.isdecimal():
                    found[job] = f"{int(status) >> 8}:{int(status) & 0x7F}"
        missing = [job for job in jobs if job not in found]
        known = self.accounted(missing)
        return {**{job: info.exit_code for job, info in known.items() if job in missing}, **found}

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """See `Scheduler.accounted`."""
        ids = sorted({job.split("_")[0] for job in jobs})
        if not ids:
            return {}
        fields = "JobID,State,NodeList,ExitCode,JobName"
        try:
            done = _run(["sacct", "-X", "-n", "-P", "-j", ",".join(ids), "-o", fields])
        except (subprocess.TimeoutExpired, OSError):
            return {}
        if done.returncode:
            return {}
        return {info.job: info for line in done.stdout.splitlines() for info in _account_line(line)}

    def array_limit(self) -> int:
        """See `Scheduler.array_limit`; 1001, SLURM's own default, if it does not say."""
        try:
            said = _run(["scontrol", "show", "config"]).stdout
        except subprocess.TimeoutExpired:
            said = ""
        match = re.search(r"(?m)^MaxArraySize\s*=\s*(\d+)", said)
        # The setting is one more than the highest index; 0 switches arrays off.
        return max(1, int(match[1]) if match else 1001)

    def cancel(self, jobs: Sequence[str]) -> None:
        """See `Scheduler.cancel`."""
        if jobs:
            _run(["scancel", *jobs])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # Inside another job its variables would be taken for options, and a site's or user's defaults would hide jobs.
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN) or name == "SLURM_CONF"}
    return subprocess.run(
        command, env=own, capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
    )


def _queue_line(line: str) -> JobInfo | None:
    parts = line.split("|", 4)
    return JobInfo(parts[0], parts[1], parts[2], parts[3], parts[4]) if len(parts) == 5 else None


def _account_line(line: str) -> list[JobInfo]:
    parts = line.split("|", 4)
    if len(parts) < 5:
        return []
    job, state, node, exit_code, name = parts
    # "CANCELLED by 1000" is a state and an explanation.
    return [JobInfo(each, state.split(" ")[0], node, "", name, exit_code) for each in _tasks(job)]


def _tasks(job: str) -> list[str]:
    """Tasks that have not started are one line of accounting: `12_[1-3,5%2]`."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    if match is None:
        return [job]
    found = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        found += [f"{match[1]}_{number}" for number in range(int(first), int(last or first) + 1)]
    return found
