"""Access to SLURM: submit, query and cancel jobs. A missing answer is never taken for a state."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from sweeps.errors import UserError
from sweeps.executor.slurm import handover
from sweeps.executor.slurm.handover import Request
from sweeps.executor.slurm.settings import RESOURCES
from sweeps.process import kill_group

_log = logging.getLogger(__name__)

QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"})
# States after which a job does nothing more; with --requeue SLURM itself starts some of these again.
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
    | {"DEADLINE", "SPECIAL_EXIT", "REVOKED"}
)

_COMMAND_TIMEOUT_S = 60
# Of a submission beyond sbatch's: two files a member, on a slow file system.
_FILES_OF_A_MEMBER_S = 0.1
# Ids in one argument: Linux takes 128 KiB.
_AT_A_TIME = 2000
# Defaults of SLURM's commands. sbatch takes its own for stronger than what the script says, and hands all of them on:
# srun, squeue and scontrol read theirs again inside the job. submitit's choose the signal that its jobs get.
_FOREIGN = ("SUBMITIT_", "SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_", "SCONTROL_")
# Where SLURM is, and who asks: no defaults.
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})
# Where the launcher's key has another name than SBATCH_<KEY>; None where the launcher itself says it.
_KEY_OF: Mapping[str, str | None] = {
    "SBATCH_JOB_NAME": "name",
    "SBATCH_TIMELIMIT": "timeout_min",
    "SBATCH_MEM_PER_NODE": "mem_gb",
    "SBATCH_SIGNAL": "signal_delay_s",
    **dict.fromkeys(("SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT")),
    **dict.fromkeys(("SBATCH_NO_REQUEUE", "SBATCH_REQUEUE", "SBATCH_WAIT")),
    "SLURM_CLUSTERS": "clusters",
}
# Set by SLURM itself inside a job.
_OF_A_JOB = ("SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
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
    """Error: the scheduler did not accept a submission.

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
    """Protocol of a cluster's scheduler, as far as the executor needs it."""

    def submit(self, request: Request) -> str:
        """Submit members as one job or one array and return its id. Raises RefusedError."""
        ...

    def queue(self) -> dict[str, JobInfo] | None:
        """Return this user's jobs by id, recently ended ones included; None if there is no answer."""
        ...

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """Return exit code and signal of ended jobs, as `28:0` or `0:9`; jobs that nobody knows are left out."""
        ...

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """Return the accounting records of jobs by id; empty if there is no accounting or no answer."""
        ...

    def array_limit(self) -> int:
        """Return the number of tasks that one array may have."""
        ...

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """Cancel jobs; with `waiting_only` those that have not begun, and no others."""
        ...


class Slurm:
    """SLURM scheduler by its command-line tools in PATH, also for clusters federated with this one.

    Args:
        clusters: names with commas between them, as sbatch takes them; the own one if empty. Ids of jobs are unique
            among those of a federation.

    Raises:
        UserError: the commands are not there.
    """

    def __init__(self, clusters: str = "") -> None:
        import shutil

        self._where = [f"--clusters={clusters}"] if clusters else []
        self._warned = False

        missing = [name for name in ("sbatch", "squeue", "srun", "scontrol") if shutil.which(name) is None]
        if missing:
            raise UserError(
                f"cluster: slurm needs {', '.join(missing)} in PATH; run this on a login node of the cluster, or use "
                "cluster=local"
            )

    def submit(self, request: Request) -> str:
        """Submit through submitit (`handover`); classify a refusal by sbatch's text, see `Scheduler.submit`."""
        ignored = [] if self._warned else _ignored(os.environ, RESOURCES, request.options)
        self._warned = True
        if ignored:
            _log.warning("cluster: not passed on to sbatch; say it by key instead: %s", ", ".join(ignored))
        answer = _handed_over(request)
        if "job" in answer:
            return answer["job"]
        said = " ".join("".join(answer.values()).split())
        if "unclear" in answer:
            raise RefusedError(said, later=True, uncertain=True)
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
        """Query squeue for this user's jobs in all states; None on a timeout or error."""
        # The name comes last: it alone may hold a separator, being another program's.
        own = ["-u", str(os.getuid())]
        command = ["squeue", *self._where, "-h", "-a", "-r", "--states=all", *own, "-o", "%i|%T|%N|%r|%j"]
        try:
            done = _run(command)
        except subprocess.TimeoutExpired:
            return None
        if done.returncode:
            return None
        return {info.job: info for line in done.stdout.splitlines() if (info := _queue_line(line))}

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """Query squeue for exit codes, then sacct for the rest: accounting learns of them later, or never."""
        found = {}
        fields = ["-O", "JobArrayID:40,exit_code:20"]
        said = ""
        for first in range(0, len(jobs), _AT_A_TIME):
            ids = ",".join(jobs[first : first + _AT_A_TIME])
            command = ["squeue", *self._where, "-h", "-a", "-r", "--states=all", "-j", ids, *fields]
            with suppress(subprocess.TimeoutExpired):
                said += _run(command).stdout
        for line in said.splitlines():
            match line.split():
                case [job, status] if status.isdecimal():
                    found[job] = f"{int(status) >> 8}:{int(status) & 0x7F}"
        missing = [job for job in jobs if job not in found]
        known = self.accounted(missing)
        return {**{job: info.exit_code for job, info in known.items() if job in missing}, **found}

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """Query sacct for these jobs and all tasks of their arrays; empty on a timeout or error."""
        ids = sorted({job.split("_")[0] for job in jobs})
        if not ids:
            return {}
        fields = "JobID,State,NodeList,ExitCode,JobName"
        try:
            done = _run(["sacct", *self._where, "-X", "-n", "-P", "-j", ",".join(ids), "-o", fields])
        except (subprocess.TimeoutExpired, OSError):
            return {}
        if done.returncode:
            return {}
        return {info.job: info for line in done.stdout.splitlines() for info in _account_line(line)}

    def array_limit(self) -> int:
        """Read MaxArraySize from scontrol; 1001, SLURM's own default, if it does not say."""
        try:
            said = _run(["scontrol", "show", "config"]).stdout
        except subprocess.TimeoutExpired:
            said = ""
        match = re.search(r"(?m)^MaxArraySize\s*=\s*(\d+)", said)
        # The setting is one more than the highest index; 0 switches arrays off.
        return max(1, int(match[1]) if match else 1001)

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """Cancel jobs with scancel; an error or timeout is ignored, for callers ask again."""
        if jobs:
            with suppress(subprocess.TimeoutExpired):  # as silent as the others; what is seen again is asked again
                _run(["scancel", *self._where, *(["--state=PENDING"] if waiting_only else []), *jobs])


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for SLURM's commands: this process's, without SLURM's own option variables.

    Inside another job its variables would be taken for options, and a site's or user's defaults would hide jobs.
    """
    return {name: value for name, value in environment.items() if not name.startswith(_FOREIGN) or name in _KEPT}


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    own = passed_on(os.environ)
    return subprocess.run(
        command, env=own, capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT_S, check=False
    )


def _handed_over(request: Request) -> dict[str, str]:
    """Run `handover` and return its answer: the job's id, or words as `refused`, or as `unclear` if it may be taken.

    In a session of its own, and left to itself when this process is interrupted: what it has begun is soon done.
    """
    with subprocess.Popen(
        [sys.executable, "-m", handover.__name__],
        env=passed_on(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            limit_s = _COMMAND_TIMEOUT_S + _FILES_OF_A_MEMBER_S * len(request.members)
            out, err = process.communicate(json.dumps(asdict(request)), timeout=limit_s)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)  # sbatch with it
            return {"unclear": "sbatch: no answer"}
    try:
        answer: dict[str, str] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        # Killed it was in the middle; an exception has ended it before it has called sbatch.
        words = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"unclear" if process.returncode < 0 else "refused": f"submitit: {words}"}
    return answer


def _ignored(environment: Mapping[str, str], keys: Collection[str], options: Collection[str]) -> list[str]:
    """Return variables that would have set options of sbatch but are not passed on, each with the key to use instead.

    Args:
        environment: environment variables of this process.
        keys: names of the launcher's keys that equal sbatch's own.
        options: those that the batch script sets already, which are not listed.
    """
    said = []
    for name in sorted(environment):
        if name not in _KEY_OF and (not name.startswith("SBATCH_") or name.startswith(_OF_A_JOB)):
            continue
        option = name.removeprefix("SBATCH_").lower()
        if option.replace("_", "-") in options and name not in _KEY_OF:
            continue
        key = _KEY_OF.get(name, option if option in keys else f"additional_parameters.{option}")
        said.append(f"{name} (hydra.launcher.{key})" if key else f"{name} (the launcher's own)")
    return said


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
    """Expand the one accounting line of tasks that have not started, such as `12_[1-3,5%2]`, into their ids."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    if match is None:
        return [job]
    found = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        found += [f"{match[1]}_{number}" for number in range(int(first), int(last or first) + 1)]
    return found
