"""A submission: members frozen together under a name that is used once, and the batch script that runs them.

Everything a job needs lies in `<study>/jobs/<submission>/` before the job is submitted: no job has to wait for its
controller, and one whose controller died the moment after runs all the same.

    submission.json   members in the order of the array's tasks, the entry, limits, the code's commit
    code.diff         what the working tree had beyond that commit
    submit.sh         the batch script
    started-<job>-<restart>   left by the batch script each time it starts
    <job>_<rank>_log.out   what SLURM, the set-up commands and srun had to say; members have logs of their own
"""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Launch
from sweeps.redact import redact, redact_config
from sweeps.run.files import write_atomically

JOBS_DIR = "jobs"
MANIFEST_FILE = "submission.json"
SCRIPT_FILE = "submit.sh"
DIFF_FILE = "code.diff"
STARTED = "started-"
REQUEUE_VARIABLE = "SCALERL_REQUEUE_FILE"
JOB_MODULE = "sweeps.executor.job"

# What sbatch is asked for, under the names of the stock launcher (hydra-submitit-launcher) and of submitit.
_RESOURCES = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
    # from here on those that are for SLURM alone
    *("partition", "qos", "comment", "constraint", "exclude", "nodelist", "exclusive", "gres", "cpus_per_gpu"),
    *("gpus_per_task", "mem_per_gpu", "mem_per_cpu", "account", "dependency", "mail_type", "mail_user", "wckey"),
    *("signal_delay_s", "array_parallelism", "additional_parameters", "srun_args"),
)

# The stock launcher's, without a meaning here: everything lies in the study's folder.
_UNUSED = ("submitit_folder",)


@dataclass(frozen=True)
class JobSettings:
    """How a cluster runs members.

    Attributes:
        resources: keys of the stock launcher, as sbatch gets them through submitit.
        setup, teardown: commands of the batch script before and after the member.
        python: how a job starts Python: a path, or a container's command that ends in one. None: this interpreter.
        max_num_timeout: times that a member's job may run into its time limit; None for as often as it takes.
        array_size: members an array at most; None for what the cluster allows.
        poll_s: seconds between two looks at the queue.
        lost_after_s: a job that the scheduler knows nothing of counts as lost after this.
    """

    resources: Mapping[str, Any] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    teardown: tuple[str, ...] = ()
    python: str | None = None
    max_num_timeout: int | None = None
    array_size: int | None = None
    poll_s: float = 10.0
    lost_after_s: float = 120.0

    @property
    def timeout_min(self) -> int:
        """The time limit of a job."""
        return int(self.resources.get("timeout_min") or 60)

    @property
    def signal_delay_s(self) -> int:
        """How long before its end a job is told."""
        return int(self.resources.get("signal_delay_s") or 120)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> JobSettings:
        """From the launcher's keys, those of the stock launcher and our own mixed.

        Raises:
            UserError: a value that cannot work; what would.
        """
        rest = {key: value for key, value in given.items() if value is not None and key not in _UNUSED}
        try:
            settings = cls(
                setup=_commands("setup", rest.pop("setup", ())),
                teardown=_commands("teardown", rest.pop("teardown", ())),
                python=rest.pop("python", None),
                max_num_timeout=rest.pop("max_num_timeout", None),
                array_size=rest.pop("array_size", None),
                poll_s=float(rest.pop("poll_s", cls.poll_s)),
                lost_after_s=float(rest.pop("lost_after_s", cls.lost_after_s)),
                resources=rest,
            )
        except (TypeError, ValueError) as error:
            raise UserError(
                f"cluster: {error}; poll_s and lost_after_s are seconds, setup and teardown lists"
            ) from error
        settings.check()
        return settings

    def given(self) -> dict[str, Any]:
        """What `of` makes these settings from."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "resources"}
        return {**self.resources, **{key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}}

    def check(self) -> None:
        """Whether these can work at all.

        Raises:
            UserError: which cannot, and what would.
        """
        unknown = sorted(set(self.resources) - set(_RESOURCES))
        if unknown:
            own = set(self.__dataclass_fields__) - {"resources"}
            raise UserError(
                f"cluster: {unknown[0]} is no setting of a job; valid: {', '.join(sorted({*_RESOURCES, *own}))}"
            )
        for name in ("timeout_min", "nodes", "tasks_per_node"):
            value = self.resources.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"cluster: {name} is {value!r}; it must be a whole number, 1 or more")
        for name, value in self.resources.items():
            if isinstance(value, str) and not value.isprintable():
                raise UserError(f"cluster: {name} is {value!r}; a line break has no place in an option of sbatch")
        taken = {str(key).replace("_", "-") for key in self.resources.get("additional_parameters") or {}} & _OURS
        if taken:
            raise UserError(f"cluster: additional_parameters.{min(taken)} is set by the launcher itself; leave it out")
        for name, kind, what in _KINDS_OF_SETTING:
            value = self.resources.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
                raise UserError(f"cluster: {name} is {value!r}; it must be {what}")
        for name in ("array_parallelism", "mem_gb", "cpus_per_task"):
            if self.resources.get(name) is not None and self.resources[name] <= 0:
                raise UserError(f"cluster: {name} is {self.resources[name]!r}; it must be above 0")
        if not 0 < self.poll_s < math.inf or not 0 <= self.lost_after_s < math.inf:
            raise UserError(
                f"cluster: poll_s is {self.poll_s:g}, lost_after_s {self.lost_after_s:g}; both are seconds, poll_s > 0"
            )
        if 2 * self.signal_delay_s > self.timeout_min * 60:
            raise UserError(
                f"cluster: signal_delay_s={self.signal_delay_s} leaves a job of timeout_min={self.timeout_min} less "
                "than half of its time to work; lower signal_delay_s or raise timeout_min"
            )
        for name, least in (("array_size", 1), ("max_num_timeout", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise UserError(f"cluster: {name} is {value!r}; it must be a whole number from {least} on, or null")


# Options by which jobs are found again, or that would take them where nobody looks.
_OURS = frozenset({"array", "clusters", "cluster", "M", "output", "error", "job-name", "open-mode", "signal"})

# Settings that sbatch or submitit would misunderstand, or fail at later than now.
_KINDS_OF_SETTING: tuple[tuple[str, Any, str], ...] = (
    ("signal_delay_s", int, "a whole number of seconds"),
    ("array_parallelism", int, "a whole number"),
    ("mem_gb", int | float, "a number of gigabytes"),
    ("gpus_per_node", int | str, "a whole number, or a kind and a number such as 'a100:2'"),
    ("cpus_per_task", int, "a whole number"),
    ("additional_parameters", Mapping, "a mapping of sbatch's options"),
    ("srun_args", list | tuple, "a list of srun's options"),
)


def _commands(name: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, list | tuple):
        raise UserError(f"cluster: {name} is {given!r}; it must be a list of commands, such as ['module load cuda']")
    return tuple(map(str, given))


def new_folder(study: Path, submission: str) -> Path:
    """The folder of a submission, which only its owner may enter: scripts run as whoever wrote them."""
    folder = study.resolve() / JOBS_DIR / submission
    for mark, why in (("%", "SLURM takes for a placeholder"), ("\\", "makes SLURM take placeholders for names")):
        if mark in str(folder):
            raise UserError(f"output_dir: {study} has a {mark} in it, which {why}; choose another name")
    if not str(folder).isprintable():
        raise UserError(
            f"output_dir: {str(study)!r} has a line break or another control character; choose another name"
        )
    (study / JOBS_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    return folder


def freeze(
    folder: Path,
    submission: str,
    members: Sequence[Launch],
    settings: JobSettings,
    entry: str,
    threads: int,
    title: str,
) -> Path:
    """Write everything a submission's jobs need; returns the batch script.

    Args:
        folder: of the submission.
        submission: its name.
        members: in the order of the array's tasks.
        settings: resources and limits.
        entry: `module:function`, called with a member's directory.
        threads: of the member's process.
        title: of the job, for people; made harmless here.
    """
    manifest = {
        "submission": submission,
        "entry": entry,
        "members": [member.run for member in members],
        "timeout_min": settings.timeout_min,
        "signal_delay_s": settings.signal_delay_s,
        "max_num_timeout": settings.max_num_timeout,
        "settings": redact_config(settings.given()),
        "command": [redact(argument) for argument in sys.argv],
        "code": freeze_code(folder),
    }
    write_atomically(folder / MANIFEST_FILE, json.dumps(manifest, indent=1))
    script = folder / SCRIPT_FILE
    script.touch(mode=0o600)
    script.write_text(_script(folder, settings, len(members), threads, f"{harmless(title)}-{submission}"))
    return script


def freeze_code(folder: Path) -> dict[str, Any]:
    """The commit that runs, and what the working tree has beyond it."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, errors="replace", timeout=60
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": None}
    diff = redact(git("diff", "HEAD", "--no-color") or "")
    if diff:
        (folder / DIFF_FILE).write_text(diff)
    return {"commit": commit.strip(), "changed": bool(diff)}


def harmless(name: str) -> str:
    """A name as the scheduler's tools take it: letters, digits, a few marks; never empty, never long."""
    return re.sub(r"[^A-Za-z0-9_.+=-]+", "_", name).strip("._-")[:60] or "scalerl"


def _script(folder: Path, settings: JobSettings, tasks: int, threads: int, job_name: str) -> str:
    from submitit.slurm.slurm import SlurmExecutor

    given = {key: value for key, value in settings.resources.items() if value is not None}
    several = int(given.get("nodes", 1)) * int(given.get("tasks_per_node", 1)) > 1
    given["srun_args"] = [
        # One process of several that dies leaves the others waiting for it.
        *(["--kill-on-bad-exit=1"] if several else []),
        # A step does not inherit this from its job.
        *([f"--cpus-per-task={given['cpus_per_task']}"] if given.get("cpus_per_task") else []),
        *(given.get("srun_args") or []),
    ]
    # Not every site lets a user requeue unless the job says so; `wckey` is refused by some, and no use to anyone here.
    given["additional_parameters"] = {"requeue": True, **(given.get("additional_parameters") or {})}
    given.setdefault("wckey", None)
    given["name"] = job_name
    requeue_file = f"{shlex.quote(str(folder))}/requeue-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
    given["setup"] = [
        f"export OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads}",
        f"export {REQUEUE_VARIABLE}={requeue_file}",
        # Which start of the job this is: one that ends before the member begins leaves nothing else behind.
        *_NAME,
        f"touch {shlex.quote(str(folder))}/{STARTED}$scalerl_job-${{SLURM_RESTART_COUNT:-0}}",
        *settings.setup,
    ]
    # Whatever the user's own commands switch on or return, the requeue comes last, for it ends the script.
    given["teardown"] = ["set +e", *settings.teardown, *_REQUEUE, "exit $scalerl_status"]
    given.setdefault("signal_delay_s", settings.signal_delay_s)
    given.setdefault("timeout_min", settings.timeout_min)
    given.setdefault("stderr_to_stdout", True)
    # submitit knows how its keys become sbatch's; its pickles, which a job must survive without, stay out of it.
    executor = SlurmExecutor(folder, python=settings.python)
    executor.update_parameters(**executor._convert_parameters(given))
    if tasks > 1:
        executor.parameters["map_count"] = tasks
    python = settings.python or shlex.quote(sys.executable)
    command = f"{python} -u -m {JOB_MODULE} {shlex.quote(str(folder))}"
    text: str = executor._make_submission_file_text(f"{command} && scalerl_status=0 || scalerl_status=$?", "")
    return text + "\n"


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
