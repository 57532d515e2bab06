"""Truths about how SLURM's commands are called: with what the launcher says, and nothing that lay around."""

from __future__ import annotations

import json
import logging
import os
import pickletools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from submitit.helpers import DelayedSubmission

from sweeps.executor.slurm import job as job_module
from sweeps.executor.slurm import scheduler
from sweeps.executor.slurm.handover import Request, pickle_of
from sweeps.executor.slurm.scheduler import RefusedError, Slurm

COMMANDS = ("sbatch", "squeue", "scancel", "sacct", "scontrol", "srun")
# Of SLURM 22.05's binaries, those that would have done harm; then one of each other family.
FOREIGN = {
    "SUBMITIT_PREEMPT_SIGNAL": "USR1",
    "SBATCH_JOB_NAME": "mine",
    "SBATCH_ARRAY_INX": "0-9",
    "SBATCH_OUTPUT": "/dev/null",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_WAIT": "1",
    "SBATCH_TIMELIMIT": "1",
    "SLURM_CLUSTERS": "elsewhere",
    "SLURM_TIME_FORMAT": "relative",
    "SLURM_JOB_ID": "7",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_EXCLUSIVE": "1",
    "SRUN_EXPORT_ENV": "NONE",
    "SRUN_CPUS_PER_TASK": "9",
    "SQUEUE_STATES": "RUNNING",
    "SQUEUE_FORMAT": "%i",
    "SCANCEL_STATE": "PENDING",
    "SCANCEL_INTERACTIVE": "true",
    "SACCT_FORMAT": "JobID",
    "SCONTROL_LOCAL": "1",
}
KEPT = {
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JWT": "a.b.c",
    "HF_HOME": "/shared/hf",
    "SCALERL_CACHE": "/shared",
}


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which each of SLURM's commands leaves its environment; nothing of SLURM's is set."""
    bin = tmp_path / "bin"
    bin.mkdir()
    for name in COMMANDS:
        (bin / name).write_text(f"#!/bin/sh\nenv -0 >'{tmp_path}/{name}.env'\necho Submitted batch job 7\n")
        (bin / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "SRUN", "SQUEUE", "SCANCEL", "SACCT", "SCONTROL")):
            monkeypatch.delenv(name)
    return tmp_path


def request(called: Path, members: int = 1) -> Request:
    """Of members that ask for an account."""
    folders = tuple(str(called / "runs" / f"run{number}") for number in range(members))
    return Request(str(called / "jobs"), folders, {"account": "mine", "job_name": "study", "time": 60})


def environment(called: Path, name: str) -> dict[str, str]:
    said = (called / f"{name}.env").read_text().split("\0")
    return dict(line.split("=", 1) for line in said if "=" in line)


def call_all(called: Path) -> None:
    slurm = Slurm()
    assert slurm.submit(request(called)) == "7"
    slurm.queue()
    slurm.accounted(["7"])
    slurm.array_limit()
    slurm.cancel(["7"])


def test_what_lies_around_is_handed_to_none_of_the_commands(called: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FOREIGN, **KEPT}.items():
        monkeypatch.setenv(name, value)
    call_all(called)
    for command in COMMANDS:
        if command == "srun":
            continue  # called by the batch script, with what sbatch was given
        seen = environment(called, command)
        assert not FOREIGN.keys() & seen.keys(), command
        assert KEPT.items() <= seen.items(), command


def test_who_relies_on_such_a_variable_is_told_once_by_which_key_to_say_it(
    called: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_JOB_NAME", "SBATCH_TIMELIMIT", "SBATCH_RESERVATION"):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("SBATCH_OUTPUT", "mine.log")
    monkeypatch.setenv("SBATCH_CPU_BIND", "quiet")  # SLURM's own, inside a job
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    slurm = Slurm()
    with caplog.at_level(logging.WARNING):
        slurm.submit(request(called))
        slurm.submit(request(called))
    (record,) = caplog.records
    said = record.getMessage()
    for words in (
        "SBATCH_PARTITION (hydra.launcher.partition)",
        "SBATCH_JOB_NAME (hydra.launcher.name)",
        "SBATCH_TIMELIMIT (hydra.launcher.timeout_min)",
        "SBATCH_RESERVATION (hydra.launcher.additional_parameters.reservation)",
        "SBATCH_OUTPUT (set by the launcher itself)",
        "SLURM_CLUSTERS (hydra.launcher.clusters)",
    ):
        assert words in said
    assert "ACCOUNT" not in said, "the script says it already"
    assert "BIND" not in said and "value" not in said


def test_where_nothing_lies_around_nothing_is_said(called: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        call_all(called)
    assert caplog.records == []


def test_a_scancel_that_is_not_answered_ends_nobody(called: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (called / "bin" / "scancel").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(scheduler, "_COMMAND_TIMEOUT_S", 0.2)
    Slurm().cancel(["7"])


# --- what is submitted, and what sbatch says to it ------------------------------------------------------------


def sbatch(called: Path, does: str) -> None:
    (called / "bin" / "sbatch").write_text(f"#!/bin/sh\n{does}\n")


@pytest.mark.parametrize("members", [1, 3])
def test_a_pickle_holds_one_name_that_stays_and_the_members_folder(called: Path, members: int) -> None:
    """Whatever lies in a queue for weeks must be read by a later version: nothing else may be in it."""
    assert Slurm().submit(request(called, members)) == "7"
    jobs = [f"7_{number}" for number in range(members)] if members > 1 else ["7"]
    for job, member in zip(jobs, request(called, members).members, strict=True):
        raw = (called / "jobs" / pickle_of(job)).read_bytes()
        named = {word for operation, word, _ in pickletools.genops(raw) if isinstance(word, str)}
        ours = {word for word in named if word.startswith(("sweeps", "lightning_scalerl", "/"))}
        assert ours == {"sweeps.executor.slurm.job", member}
        assert "run_member" in named
        submitted = DelayedSubmission.load(called / "jobs" / pickle_of(job))
        assert submitted.function is job_module.run_member
        assert (submitted.args, submitted.kwargs) == ((member,), {})
    assert (called / "jobs" / "7_submission.sh").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("said", "later", "uncertain", "too_large"),
    [
        ("Invalid partition specified: nowhere", False, False, False),
        ("AssocMaxSubmitJobLimit: job submit limit", True, False, False),
        ("Unable to contact slurm controller", True, True, False),
        ("Invalid job array specification", True, False, True),
    ],
)
def test_a_refusal_is_read_from_what_sbatch_said(
    called: Path, said: str, later: bool, uncertain: bool, too_large: bool
) -> None:
    sbatch(called, f"echo 'sbatch: error: {said}' >&2; exit 1")
    with pytest.raises(RefusedError) as refusal:
        Slurm().submit(request(called))
    error = refusal.value
    assert (str(error), error.retryable) == (f"sbatch: error: {said}", later)
    assert (error.uncertain, error.too_large) == (uncertain, too_large)


@pytest.mark.parametrize("does", ["exit 0", "echo something else", "exec sleep 9", "kill -9 $PPID; exec sleep 1"])
def test_where_nobody_knows_whether_a_job_was_taken_it_may_have_been(
    called: Path, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch(called, does)
    monkeypatch.setattr(scheduler, "_COMMAND_TIMEOUT_S", 3)
    with pytest.raises(RefusedError) as refusal:
        Slurm().submit(request(called))
    assert refusal.value.retryable and refusal.value.uncertain


def test_what_submitit_does_not_take_is_refused_before_sbatch_is_called(called: Path) -> None:
    sbatch(called, f"touch '{called}/asked'")
    wrong = replace(request(called), parameters={"no_such_parameter": 1})
    with pytest.raises(RefusedError, match="submitit: ") as refusal:
        Slurm().submit(wrong)
    assert not refusal.value.retryable and not (called / "asked").exists()


def test_sbatch_is_ended_when_it_does_not_answer(called: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch(called, f"echo $$ >'{called}/pid'; exec sleep 600")
    monkeypatch.setattr(scheduler, "_COMMAND_TIMEOUT_S", 2)
    with pytest.raises(RefusedError, match="no answer"):
        Slurm().submit(request(called))
    pid = int((called / "pid").read_text())
    wait_until(lambda: not (Path("/proc") / str(pid)).exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_submission_goes_on_when_its_controller_is_interrupted(called: Path) -> None:
    """Ctrl-C in the terminal while sbatch is at work: the job gets its pickle all the same."""
    waiting = f"touch '{called}/asked'; while [ ! -e '{called}/go' ]; do sleep 0.05; done"
    sbatch(called, f"{waiting}; echo Submitted batch job 7")
    code = (
        "import json, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from sweeps.executor.slurm.handover import Request\n"
        "from sweeps.executor.slurm.scheduler import Slurm\n"
        "Slurm().submit(Request(**json.load(sys.stdin)))"
    )
    controller = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert controller.stdin is not None
    with controller.stdin as pipe:
        pipe.write(json.dumps(asdict(request(called))))
    wait_until(lambda: (called / "asked").exists())
    os.killpg(controller.pid, signal.SIGINT)
    assert controller.wait() != 0
    (called / "go").touch()
    wait_until(lambda: (called / "jobs" / pickle_of("7")).exists())


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
