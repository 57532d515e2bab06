"""Tests of the calls of SLURM's commands: they get the launcher's settings, and no variables of the user's shell."""

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
# Variables that the commands of SLURM 22.05 read: first those that would do harm, then one of each other family.
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
def stub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace SLURM's commands by scripts that write their environment into this folder; unset SLURM's variables."""
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


def request(stub_folder: Path, members: int = 1) -> Request:
    """Return a request for members, with an account."""
    folders = tuple(str(stub_folder / "runs" / f"run{number}") for number in range(members))
    return Request(str(stub_folder / "jobs"), folders, {"account": "mine", "job_name": "study", "time": 60})


def environment(stub_folder: Path, name: str) -> dict[str, str]:
    entries = (stub_folder / f"{name}.env").read_text().split("\0")
    return dict(line.split("=", 1) for line in entries if "=" in line)


def call_all(stub_folder: Path) -> None:
    slurm = Slurm()
    assert slurm.submit(request(stub_folder)) == "7"
    slurm.queue()
    slurm.accounted(["7"])
    slurm.array_limit()
    slurm.cancel(["7"])


def test_slurm_variables_of_the_shell_reach_no_command(stub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FOREIGN, **KEPT}.items():
        monkeypatch.setenv(name, value)
    call_all(stub_folder)
    for command in COMMANDS:
        if command == "srun":
            continue  # the batch script calls srun, in the environment that sbatch passes on
        variables = environment(stub_folder, command)
        assert not FOREIGN.keys() & variables.keys(), command
        assert KEPT.items() <= variables.items(), command


def test_ignored_variables_are_named_once_with_the_key_to_set_instead(
    stub_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_JOB_NAME", "SBATCH_TIMELIMIT", "SBATCH_RESERVATION"):
        monkeypatch.setenv(name, "value")
    monkeypatch.setenv("SBATCH_OUTPUT", "mine.log")
    monkeypatch.setenv("SBATCH_CPU_BIND", "quiet")  # set by SLURM itself inside a job
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    slurm = Slurm()
    with caplog.at_level(logging.WARNING):
        slurm.submit(request(stub_folder))
        slurm.submit(request(stub_folder))
    (record,) = caplog.records
    message = record.getMessage()
    for text in (
        "SBATCH_PARTITION (hydra.launcher.partition)",
        "SBATCH_JOB_NAME (hydra.launcher.name)",
        "SBATCH_TIMELIMIT (hydra.launcher.timeout_min)",
        "SBATCH_RESERVATION (hydra.launcher.additional_parameters.reservation)",
        "SBATCH_OUTPUT (set by the launcher itself)",
        "SLURM_CLUSTERS (hydra.launcher.clusters)",
    ):
        assert text in message
    assert "ACCOUNT" not in message, "the script sets the account, so the variable has no effect"
    assert "BIND" not in message and "value" not in message


def test_without_such_variables_there_is_no_warning(stub_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        call_all(stub_folder)
    assert caplog.records == []


def test_a_scancel_without_an_answer_is_not_an_error(stub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stub_folder / "bin" / "scancel").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(scheduler, "_COMMAND_TIMEOUT_S", 0.2)
    Slurm().cancel(["7"])


# --- submissions, and answers of sbatch -----------------------------------------------------------------------


def set_sbatch(stub_folder: Path, command: str) -> None:
    (stub_folder / "bin" / "sbatch").write_text(f"#!/bin/sh\n{command}\n")


@pytest.mark.parametrize("members", [1, 3])
def test_a_pickle_holds_only_a_stable_function_name_and_the_members_folder(stub_folder: Path, members: int) -> None:
    """A job may wait in the queue for weeks, so a later version must be able to read its pickle."""
    assert Slurm().submit(request(stub_folder, members)) == "7"
    jobs = [f"7_{number}" for number in range(members)] if members > 1 else ["7"]
    for job, member in zip(jobs, request(stub_folder, members).members, strict=True):
        raw = (stub_folder / "jobs" / pickle_of(job)).read_bytes()
        strings = {text for operation, text, _ in pickletools.genops(raw) if isinstance(text, str)}
        our_names = {text for text in strings if text.startswith(("sweeps", "lightning_scalerl", "/"))}
        assert our_names == {"sweeps.executor.slurm.job", member}
        assert "run_member" in strings
        submitted = DelayedSubmission.load(stub_folder / "jobs" / pickle_of(job))
        assert submitted.function is job_module.run_member
        assert (submitted.args, submitted.kwargs) == ((member,), {})
    assert (stub_folder / "jobs" / "7_submission.sh").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("answer", "retryable", "uncertain", "too_large"),
    [
        ("Invalid partition specified: nowhere", False, False, False),
        ("AssocMaxSubmitJobLimit: job submit limit", True, False, False),
        ("Unable to contact slurm controller", True, True, False),
        ("Invalid job array specification", True, False, True),
    ],
)
def test_a_refusal_is_classified_by_the_message_of_sbatch(
    stub_folder: Path, answer: str, retryable: bool, uncertain: bool, too_large: bool
) -> None:
    set_sbatch(stub_folder, f"echo 'sbatch: error: {answer}' >&2; exit 1")
    with pytest.raises(RefusedError) as refusal:
        Slurm().submit(request(stub_folder))
    error = refusal.value
    assert (str(error), error.retryable) == (f"sbatch: error: {answer}", retryable)
    assert (error.uncertain, error.too_large) == (uncertain, too_large)


@pytest.mark.parametrize("command", ["exit 0", "echo something else", "exec sleep 9", "kill -9 $PPID; exec sleep 1"])
def test_without_a_clear_answer_a_submission_is_uncertain(
    stub_folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sbatch(stub_folder, command)
    monkeypatch.setattr(scheduler, "_COMMAND_TIMEOUT_S", 3)
    with pytest.raises(RefusedError) as refusal:
        Slurm().submit(request(stub_folder))
    assert refusal.value.retryable and refusal.value.uncertain


def test_parameters_unknown_to_submitit_are_refused_before_sbatch_is_called(stub_folder: Path) -> None:
    set_sbatch(stub_folder, f"touch '{stub_folder}/asked'")
    wrong = replace(request(stub_folder), parameters={"no_such_parameter": 1})
    with pytest.raises(RefusedError, match="submitit: ") as refusal:
        Slurm().submit(wrong)
    assert not refusal.value.retryable and not (stub_folder / "asked").exists()


def test_sbatch_is_killed_if_it_does_not_answer(stub_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sbatch(stub_folder, f"echo $$ >'{stub_folder}/pid'; exec sleep 600")
    monkeypatch.setattr(scheduler, "_COMMAND_TIMEOUT_S", 2)
    with pytest.raises(RefusedError, match="no answer"):
        Slurm().submit(request(stub_folder))
    pid = int((stub_folder / "pid").read_text())
    wait_until(lambda: not (Path("/proc") / str(pid)).exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_submission_is_completed_when_its_controller_is_interrupted(stub_folder: Path) -> None:
    """Ctrl-C in the terminal while sbatch runs: the job still gets its pickle."""
    waiting = f"touch '{stub_folder}/asked'; while [ ! -e '{stub_folder}/go' ]; do sleep 0.05; done"
    set_sbatch(stub_folder, f"{waiting}; echo Submitted batch job 7")
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
        pipe.write(json.dumps(asdict(request(stub_folder))))
    wait_until(lambda: (stub_folder / "asked").exists())
    os.killpg(controller.pid, signal.SIGINT)
    assert controller.wait() != 0
    (stub_folder / "go").touch()
    wait_until(lambda: (stub_folder / "jobs" / pickle_of("7")).exists())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
