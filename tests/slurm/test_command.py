"""Tests of studies of another trainer's commands on a cluster: a killed controller and member, and a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.executor.node.attempts import attempts
from sweeps.launch.ledger import Ledger
from tests.paths import ROOT
from tests.slurm.cluster import PATIENCE_S, Lab, eventually
from tests.sweeps.command.toy import commands_of, lines, steps_of, write_study

pytestmark = [pytest.mark.slurm]

LINE = f"{sys.executable} -S train.py --steps={{steps}} --seed={{seed}} --out={{run_dir}} --loss={{loss}} --wait=17"


def launch_of(folder: Path, *overrides: str) -> list[str]:
    """Return the command that launches the toy study in a folder."""
    return [
        *(sys.executable, "-m", "lightning_scalerl.train", "--config-dir", str(folder), "--config-name", "toy"),
        *("--multirun", *overrides, "seed=1", "cluster=slurm"),
        *("hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=10", "hydra.launcher.mem_gb=1"),
    ]


def test_a_study_of_commands_finishes_after_two_kills(tmp_path: Path, ready_lab: Lab) -> None:
    write_study(tmp_path, line=LINE)
    command = launch_of(tmp_path, "loss=grpo,dapo")
    environment = {**ready_lab.environment, "PYTHONPATH": str(ROOT)}
    runs = tmp_path / "outputs" / "runs"
    with (tmp_path / "said.txt").open("w") as log:
        launch = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    eventually(lambda: runs.is_dir() and len([each for each in runs.iterdir() if lines(each) > 10]) == 2, "journals")
    launch.kill()
    launch.wait()
    # Kill the command of one member. Its job fails, and the next attempt continues from its checkpoint.
    one, other = runs.iterdir()
    (process,) = commands_of(one)
    os.kill(process, 9)
    (other / "go").touch()
    eventually(lambda: "ended with killed by SIGKILL" in (one / "metrics.jsonl").read_text(), "the end of an attempt")
    (one / "go").touch()
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stdout + result.stderr
    states = Ledger(tmp_path / "outputs").fold().values()
    assert {state.state for state in states} == {"finished"}
    (retried,) = [entry for entry in Ledger(tmp_path / "outputs").entries() if entry["event"] == "retried"]
    assert (retried["run"], retried["kind"]) == (one.name, "killed") and "killed by SIGKILL at step" in retried[
        "reason"
    ]
    for run in (one, other):
        assert steps_of(run) == list(range(1, 31)) and steps_of(run, "eval") == [5, 10, 15, 20, 25, 30]


def test_a_command_is_stopped_and_requeued_at_the_clusters_warning(tmp_path: Path, ready_lab: Lab) -> None:
    """SLURM sends the warning to all processes of the step; only the member's own process forwards it."""
    write_study(tmp_path, line=LINE)
    environment = {**ready_lab.environment, "PYTHONPATH": str(ROOT)}
    runs = tmp_path / "outputs" / "runs"
    with (tmp_path / "said.txt").open("w") as log:
        launch = subprocess.Popen(launch_of(tmp_path), cwd=tmp_path, env=environment, stdout=log, stderr=log)
    eventually(lambda: runs.is_dir() and [each for each in runs.iterdir() if lines(each) > 10], "a journal")
    (run,) = runs.iterdir()
    (state,) = Ledger(tmp_path / "outputs").fold().values()
    ready_lab.sh("scancel", "--signal=USR2", state.job or "")
    eventually(lambda: "asked to stop (SIGUSR2)" in (run / "log.txt").read_text(), "the request to stop")
    (run / "go").touch()
    assert launch.wait(timeout=PATIENCE_S) == 0, (tmp_path / "said.txt").read_text()
    records = [(each.job, each.outcome, each.kind) for each in attempts(run)]
    assert records == [(state.job, "interrupted", "preempted"), (state.job, "finished", None)]
    assert "retried" not in {entry["event"] for entry in Ledger(tmp_path / "outputs").entries()}
    assert steps_of(run) == list(range(1, 31))
