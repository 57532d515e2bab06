"""Submit, query and cancel SLURM jobs. While SLURM does not answer, the state of jobs is unknown."""

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
# Final states. With --requeue, SLURM may start a job again that is in one of them.
ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}
    | {"DEADLINE", "SPECIAL_EXIT", "REVOKED"}
)

_COMMAND_TIMEOUT_S = 60
# Additional time per member of a submission, in which two files are written, perhaps to a slow file system.
_TIMEOUT_PER_MEMBER_S = 0.1
# Number of job ids in one argument of a command. On Linux an argument may have at most 128 KiB.
_IDS_PER_COMMAND = 2000
# Prefixes of environment variables that are removed for SLURM's commands. SLURM reads its variables as options: they
# override those of the batch script, and sbatch passes them to the job, where srun, squeue and scontrol read them
# again. submitit's variables choose the signal for its jobs.
_REMOVED_PREFIXES = ("SUBMITIT_", "SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "SACCT_", "SCONTROL_")
# Variables that are kept nevertheless: where SLURM is, and credentials for it.
_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT"})
# The launcher's key for variables whose key is not their name after SBATCH_; None if the launcher itself sets the
# option.
_KEY_OF: Mapping[str, str | None] = {
    "SBATCH_JOB_NAME": "name",
    "SBATCH_TIMELIMIT": "timeout_min",
    "SBATCH_MEM_PER_NODE": "mem_gb",
    "SBATCH_SIGNAL": "signal_delay_s",
    **dict.fromkeys(("SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_INPUT", "SBATCH_OPEN_MODE", "SBATCH_OUTPUT")),
    **dict.fromkeys(("SBATCH_NO_REQUEUE", "SBATCH_REQUEUE", "SBATCH_WAIT")),
    "SLURM_CLUSTERS": "clusters",
}
# Variables that SLURM itself sets inside a job.
_SET_BY_SLURM = ("SBATCH_CPU_BIND", "SBATCH_MEM_BIND")
# Messages of sbatch after which the same submission may succeed later. After `_NO_ANSWER`, it may have been accepted.
_NO_ANSWER = re.compile(
    r"(?i)unable to contact slurm|connection refused|connection reset|timed out|zero bytes|communications? (error|fail)"
    r"|transport endpoint|slurmctld.*(down|not respond)|controller.*not respond"
)
_NOT_NOW = re.compile(
    r"(?i)job submit limit|submitjob|temporarily unable to accept|resource temporarily unavailable|max.*job.*limit"
    r"|standby mode|partition not available|slurm_?db.*connection|too many jobs|(qos|assoc)\w*(max|grp)\w*job"
)
# Messages about permanent limits. They are tested before `_NOT_NOW`, which matches them as well.
_NEVER = re.compile(r"(?i)(qos|assoc)\w*(maxwall|(max|min)\w*perjob|maxnode\w*|min\w+)")
_ARRAY_TOO_LARGE = re.compile(r"(?i)invalid job array specification")


@dataclass(frozen=True)
class JobInfo:
    """A job as SLURM describes it.

    Attributes:
        job: id, `123`, or `123_4` in an array.
        state, node, name: state, list of nodes and name of the job, in SLURM's words.
        reason: why the job waits.
        exit_code: exit code and signal, such as `0:9`; "" if unknown.
    """

    job: str
    state: str
    node: str
    reason: str
    name: str
    exit_code: str = ""

    @property
    def shown(self) -> tuple[str, str | None]:
        """State for display, with a detail or None: for `queued` an unusual reason, for `ended` the state in SLURM."""
        if self.state in QUEUED:
            return "queued", None if self.reason in ("", "None", "Priority", "Resources") else self.reason
        return ("ended", self.state) if self.state in ENDED else ("running", None)


class RefusedError(Exception):
    """Error: the scheduler did not accept a submission.

    Attributes:
        retryable: whether the same submission may succeed later.
        uncertain: whether the submission may have been accepted, because there was no answer.
        too_large: whether the array has more tasks than the cluster allows.
    """

    def __init__(self, message: str, retryable: bool = False, uncertain: bool = False, too_large: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.uncertain = uncertain
        self.too_large = too_large


class Scheduler(Protocol):
    """Protocol of access to SLURM, as far as the executor needs it."""

    def submit(self, request: Request) -> str:
        """Submit members as one job or one array, and return its id.

        Raises:
            RefusedError: the scheduler did not accept the submission, or did not answer.
        """
        ...

    def queue(self) -> dict[str, JobInfo] | None:
        """Return this user's jobs by id, including recently ended jobs; None if there is no answer."""
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
        """Cancel jobs; with `waiting_only`, only jobs that have not begun."""
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
        """Submit through submitit (`handover`), and classify a refusal by sbatch's message; see `Scheduler.submit`."""
        ignored = [] if self._warned else _ignored_variables(os.environ, RESOURCES, request.options)
        self._warned = True
        if ignored:
            _log.warning(
                "cluster: these variables are not passed on to sbatch; use the keys instead: %s", ", ".join(ignored)
            )
        answer = _run_handover(request)
        if "job" in answer:
            return answer["job"]
        refusal = " ".join("".join(answer.values()).split())
        if "unclear" in answer:
            raise RefusedError(refusal, retryable=True, uncertain=True)
        if _ARRAY_TOO_LARGE.search(refusal):
            raise RefusedError(refusal, retryable=True, too_large=True)
        if _NEVER.search(refusal):
            raise RefusedError(refusal)
        if _NOT_NOW.search(refusal):
            raise RefusedError(refusal, retryable=True)
        if _NO_ANSWER.search(refusal):
            raise RefusedError(refusal, retryable=True, uncertain=True)
        raise RefusedError(refusal)

    def queue(self) -> dict[str, JobInfo] | None:
        """Query squeue for this user's jobs in all states; None on a timeout or error."""
        # The name is the last field, because names of other programs' jobs may contain the separator.
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
        for first in range(0, len(jobs), _IDS_PER_COMMAND):
            ids = ",".join(jobs[first : first + _IDS_PER_COMMAND])
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
        """Cancel jobs with scancel; errors and timeouts are ignored, because callers retry at the next poll."""
        if jobs:
            _run(["scancel", *self._where, *(["--state=PENDING"] if waiting_only else []), *jobs])


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for SLURM's commands: a process's environment without variables that are SLURM's options.

    Inside a job, the job's variables would be read as options, and defaults of a site or user could hide jobs.
    """
    return {
        name: value for name, value in environment.items() if not name.startswith(_REMOVED_PREFIXES) or name in _KEPT
    }


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of SLURM. If it is missing or does not answer in time, the result has exit code 1 and no output."""
    own, limit_s = slurm_environment(os.environ), _COMMAND_TIMEOUT_S
    try:
        return subprocess.run(
            command, env=own, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except (subprocess.TimeoutExpired, FileNotFoundError, PermissionError):
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="")


def _run_handover(request: Request) -> dict[str, str]:
    """Run `handover` in a separate session, so that it finishes even if this process is interrupted.

    Returns:
        The key `job` with the job's id, or a message under the key `refused` or `unclear` (result unknown).
    """
    with subprocess.Popen(
        [sys.executable, "-m", handover.__name__],
        env=slurm_environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            limit_s = _COMMAND_TIMEOUT_S + _TIMEOUT_PER_MEMBER_S * len(request.members)
            out, err = process.communicate(json.dumps(asdict(request)), timeout=limit_s)
        except subprocess.TimeoutExpired:
            kill_group(process.pid)  # sbatch is in this group
            return {"unclear": "sbatch: no answer"}
    try:
        answer: dict[str, str] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        # If handover was killed, the result is unknown. If it ended with an exception, it had not called sbatch yet.
        words = (err.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"unclear" if process.returncode < 0 else "refused": f"submitit: {words}"}
    return answer


def _ignored_variables(environment: Mapping[str, str], keys: Collection[str], options: Collection[str]) -> list[str]:
    """Return variables that set options of sbatch but are removed, each with the launcher's key to use instead.

    Args:
        environment: environment variables of this process.
        keys: the launcher's keys that have the same name as sbatch's options.
        options: options that the batch script sets anyway; their variables are not listed.
    """
    ignored = []
    for name in sorted(environment):
        if name not in _KEY_OF and (not name.startswith("SBATCH_") or name.startswith(_SET_BY_SLURM)):
            continue
        option = name.removeprefix("SBATCH_").lower()
        if option.replace("_", "-") in options and name not in _KEY_OF:
            continue
        key = _KEY_OF.get(name, option if option in keys else f"additional_parameters.{option}")
        ignored.append(f"{name} (hydra.launcher.{key})" if key else f"{name} (set by the launcher itself)")
    return ignored


def _queue_line(line: str) -> JobInfo | None:
    parts = line.split("|", 4)
    return JobInfo(parts[0], parts[1], parts[2], parts[3], parts[4]) if len(parts) == 5 else None


def _account_line(line: str) -> list[JobInfo]:
    """Parse a line of sacct, which may stand for several tasks of an array; empty if it has too few fields."""
    parts = line.split("|", 4)
    if len(parts) < 5:
        return []
    job, state, node, exit_code, name = parts
    # "CANCELLED by 1000" is a state and an explanation.
    return [JobInfo(each, state.split(" ")[0], node, "", name, exit_code) for each in _tasks(job)]


def _tasks(job: str) -> list[str]:
    """Expand the id that sacct prints for tasks that have not started, such as `12_[1-3,5%2]`, to the tasks' ids."""
    match = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", job)
    if match is None:
        return [job]
    found = []
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        found += [f"{match[1]}_{number}" for number in range(int(first), int(last or first) + 1)]
    return found
