"""Access to SLURM: submit, query and cancel jobs. A missing answer is never interpreted as a state."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from sweeps.errors import UserError
from sweeps.executor.slurm import handover
from sweeps.executor.slurm.handover import Request
from sweeps.executor.slurm.settings import RESOURCES
from sweeps.process import kill_group

_log = logging.getLogger(__name__)

QUEUED = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"})
# Final states; with --requeue SLURM itself restarts jobs in some of them.
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
    | {"DEADLINE", "SPECIAL_EXIT", "REVOKED"}
)

_COMMAND_TIMEOUT_S = 60
# Additional time per member of a submission, to write two files on a slow file system.
_FILES_OF_A_MEMBER_S = 0.1
# Number of ids in one argument: Linux allows 128 KiB.
_AT_A_TIME = 2000
# Variables with defaults of SLURM's commands. They override options in the batch script, and sbatch passes them all to
# the job, where srun, squeue and scontrol read theirs again. submitit's variables choose the signal for its jobs.
_FOREIGN = ("SUBMITIT_", "SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_", "SCONTROL_")
# Exceptions, which are not defaults: the location and the credentials of SLURM.
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})
# Variables whose launcher key is not the rest of the name (SBATCH_<KEY>); None if the launcher itself sets the option.
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
# Messages of sbatch after which the same submission may succeed later. With `_NO_ANSWER` it may have been accepted.
_NO_ANSWER = re.compile(
    r"(?i)unable to contact slurm|connection refused|connection reset|timed out|zero bytes|communications? (error|fail)"
    r"|transport endpoint|slurmctld.*(down|not respond)|controller.*not respond"
)
_NOT_NOW = re.compile(
    r"(?i)job submit limit|submitjob|temporarily unable to accept|resource temporarily unavailable|max.*job.*limit"
    r"|standby mode|partition not available|slurm_?db.*connection|too many jobs|(qos|assoc)\w*(max|grp)\w*job"
)
# Limits that waiting does not lift, although their messages match `_NOT_NOW`.
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

    @property
    def shown(self) -> tuple[str, str | None]:
        """Return `queued` with the reason if the job does not just wait for its turn, `running`, or `ended`."""
        if self.state in QUEUED:
            return "queued", None if self.reason in ("", "None", "Priority", "Resources") else self.reason
        return ("ended", self.state) if self.state in ENDED else ("running", None)


class RefusedError(Exception):
    """Error: the scheduler did not accept a submission.

    Attributes:
        later: the same submission may succeed later.
        uncertain: there was no answer; the submission may have been accepted.
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
        """Return exit code and signal of ended jobs, as `28:0` or `0:9`; unknown jobs are left out."""
        ...

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """Return the accounting records of jobs by id; empty if there is no accounting or no answer."""
        ...

    def array_limit(self) -> int:
        """Return the number of tasks that one array may have."""
        ...

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """Cancel jobs; with `waiting_only` only those that have not begun."""
        ...


class Slurm:
    """SLURM scheduler through its command-line tools in PATH, also for clusters federated with this one.

    Args:
        clusters: comma-separated names, as sbatch takes them; empty for the local cluster. Job ids are unique
            within a federation.

    Raises:
        UserError: the commands are not in PATH.
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
        refusal = " ".join("".join(answer.values()).split())
        if "unclear" in answer:
            raise RefusedError(refusal, later=True, uncertain=True)
        if _ARRAY_TOO_LARGE.search(refusal):
            raise RefusedError(refusal, later=True, too_large=True)
        if _NEVER.search(refusal):
            raise RefusedError(refusal)
        if _NOT_NOW.search(refusal):
            raise RefusedError(refusal, later=True)
        if _NO_ANSWER.search(refusal):
            raise RefusedError(refusal, later=True, uncertain=True)
        raise RefusedError(refusal)

    def queue(self) -> dict[str, JobInfo] | None:
        """Query squeue for this user's jobs in all states; None on a timeout or error."""
        # The name comes last: names of other programs' jobs may contain the separator.
        own = ["-u", str(os.getuid())]
        command = ["squeue", *self._where, "-h", "-a", "-r", "--states=all", *own, "-o", "%i|%T|%N|%r|%j"]
        done = _run(command)
        if done.returncode:
            return None
        return {info.job: info for line in done.stdout.splitlines() if (info := _queue_line(line))}

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """Query squeue for exit codes, then sacct for the remaining jobs: accounting has them later, or never."""
        found = {}
        fields = ["-O", "JobArrayID:40,exit_code:20"]
        output = ""
        for first in range(0, len(jobs), _AT_A_TIME):
            ids = ",".join(jobs[first : first + _AT_A_TIME])
            command = ["squeue", *self._where, "-h", "-a", "-r", "--states=all", "-j", ids, *fields]
            output += _run(command).stdout
        # squeue prints a wait status: the exit code in the high byte, the signal in the low 7 bits.
        for line in output.splitlines():
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
        done = _run(["sacct", *self._where, "-X", "-n", "-P", "-j", ",".join(ids), "-o", fields])
        if done.returncode:
            return {}
        return {info.job: info for line in done.stdout.splitlines() for info in _account_line(line)}

    def array_limit(self) -> int:
        """Read MaxArraySize from scontrol; default 1001, as in SLURM."""
        match = re.search(r"(?m)^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]).stdout)
        # The setting is one more than the highest index; 0 switches arrays off.
        return max(1, int(match[1]) if match else 1001)

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """Cancel jobs with scancel; an error or timeout is ignored, because callers retry."""
        if jobs:
            # errors are ignored; a job that is still there is cancelled at the next poll
            _run(["scancel", *self._where, *(["--state=PENDING"] if waiting_only else []), *jobs])


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for SLURM's commands: this process's, without SLURM's own option variables.

    Inside another job, its variables would be read as options; defaults of a site or user would hide jobs.
    """
    return {name: value for name, value in environment.items() if not name.startswith(_FOREIGN) or name in _KEPT}


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM. If it is missing or does not answer in time, the result has exit code 1 and no output."""
    own, limit_s = passed_on(os.environ), _COMMAND_TIMEOUT_S
    try:
        return subprocess.run(
            command, env=own, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError, PermissionError):
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="")


def _handed_over(request: Request) -> dict[str, str]:
    """Run `handover` and return its answer: the job's id, or a message as `refused` or `unclear` (result unknown).
    It runs in its own session and finishes even if this process is interrupted; it does not take long.
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
            kill_group(process.pid)  # sbatch is in this group
            return {"unclear": "sbatch: no answer"}
    try:
        answer: dict[str, str] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        # If handover was killed, the result is unknown. An exception ends it only before it calls sbatch.
        words = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"unclear" if process.returncode < 0 else "refused": f"submitit: {words}"}
    return answer


def _ignored(environment: Mapping[str, str], keys: Collection[str], options: Collection[str]) -> list[str]:
    """Return variables that set options of sbatch but are not passed on, each with the key to use instead.

    Args:
        environment: environment variables of this process.
        keys: the launcher's keys that have the same name as sbatch's options.
        options: options that the batch script sets anyway; their variables are not listed.
    """
    ignored = []
    for name in sorted(environment):
        if name not in _KEY_OF and (not name.startswith("SBATCH_") or name.startswith(_OF_A_JOB)):
            continue
        option = name.removeprefix("SBATCH_").lower()
        if option.replace("_", "-") in options and name not in _KEY_OF:
            continue
        key = _KEY_OF.get(name, option if option in keys else f"additional_parameters.{option}")
        ignored.append(f"{name} (hydra.launcher.{key})" if key else f"{name} (the launcher's own)")
    return ignored


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
    """Expand the accounting line of tasks that have not started, such as `12_[1-3,5%2]`, into their ids."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    if match is None:
        return [job]
    found = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        found += [f"{match[1]}_{number}" for number in range(int(first), int(last or first) + 1)]
    return found
