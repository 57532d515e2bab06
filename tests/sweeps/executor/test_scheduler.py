"""Truths about how SLURM's commands are called: with what the launcher says, and nothing that lay around."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from sweeps.executor import scheduler
from sweeps.executor.scheduler import Slurm

COMMANDS = ("sbatch", "squeue", "scancel", "sacct", "scontrol", "srun")
# Of SLURM 22.05's binaries, those that would have done harm; then one of each other family.
FOREIGN = {
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
        (bin / name).write_text(f"#!/bin/sh\nenv -0 >'{tmp_path}/{name}.env'\necho 7\n")
        (bin / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "SRUN", "SQUEUE", "SCANCEL", "SACCT", "SCONTROL")):
            monkeypatch.delenv(name)
    (tmp_path / "submit.sh").write_text("#!/bin/bash\n\n#SBATCH --account='mine'\n#SBATCH --job-name=study\n")
    return tmp_path


def environment(called: Path, name: str) -> dict[str, str]:
    said = (called / f"{name}.env").read_text().split("\0")
    return dict(line.split("=", 1) for line in said if "=" in line)


def call_all(called: Path) -> None:
    slurm = Slurm()
    assert slurm.submit(called / "submit.sh") == "7"
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
        slurm.submit(called / "submit.sh")
        slurm.submit(called / "submit.sh")
    (record,) = caplog.records
    said = record.getMessage()
    for words in (
        "SBATCH_PARTITION (hydra.launcher.partition)",
        "SBATCH_JOB_NAME (hydra.launcher.name)",
        "SBATCH_TIMELIMIT (hydra.launcher.timeout_min)",
        "SBATCH_RESERVATION (hydra.launcher.additional_parameters.reservation)",
        "SBATCH_OUTPUT (the launcher's own)",
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
