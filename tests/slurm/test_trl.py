"""Tests of a study whose members TRL trains as jobs of a cluster, by the commands of docs/guide/other_trainers.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.launch.ledger import Ledger, MemberState
from sweeps.run.journal import read_journal
from tests.paths import ROOT
from tests.slurm.cluster import Lab, eventually
from tests.translate.test_translate import peers_python
from tests.translate.test_trl import ON_TRL, steps_of, tracked

# These tests take minutes, because every attempt imports torch and TRL.
pytestmark = [pytest.mark.slurm, pytest.mark.peers, pytest.mark.full]

# Timeout of a study, whose members import TRL at the same time on a machine with few cores.
STUDY_S = 1400.0
STEPS = 600


class OnTrl:
    """A study in its own folder, and the commands of a user's shell."""

    def __init__(self, folder: Path, lab: Lab, *grid: str) -> None:
        self.folder, self.lab = folder, lab
        self.tracking = f"sqlite:///{folder}/mlflow.db"
        self.runs = folder / "outputs" / "on_trl" / "runs"
        self.train = (
            *("train", "--multirun", "trainer=trl", f"trainer.python={peers_python()}", "study=on_trl", *ON_TRL, *grid),
            *(f"mlflow.uri={self.tracking}", "cluster=slurm"),
            # Not in the guide: short intervals, so that the controller soon notices changes.
            *("hydra.launcher.poll_s=1", "hydra.launcher.lost_after_s=10", "hydra.launcher.mem_gb=3"),
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `scalerl ...`; its output goes to a file."""
        environment = {**self.lab.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / "said.txt").open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sweeps.cli.main", *words],
                cwd=self.folder, env=environment, stdout=log, stderr=log, text=True,
            )  # fmt: skip

    def scalerl(self, *words: str) -> int:
        """Run `scalerl ...` to its end and return its exit code."""
        process = self.start(*words)
        try:
            return process.wait(STUDY_S)
        finally:
            process.kill()  # its jobs are cancelled by the fixture
            process.wait()

    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    def reached(self) -> dict[str, int]:
        """Return the last evaluated step of each member that has one, by run."""
        steps_by_run = {path.parent.name: steps_of(path) for path in self.runs.glob("*/trl")}
        return {run: steps[-1] for run, steps in steps_by_run.items() if steps}

    def is_at(self, step: int) -> bool:
        return max(self.reached().values(), default=-1) >= step

    def kill_a_trainer(self) -> str:
        """Kill TRL's process of the member with the most steps; return its run."""
        reached = self.reached()
        run = max(reached, key=lambda candidate: reached[candidate])
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = file.read_bytes().decode().split("\0")
            except OSError:
                continue
            if any(word.endswith("trl_run.py") for word in arguments) and str(self.runs / run / "trl") in arguments:
                os.kill(int(file.parent.name), signal.SIGKILL)
                return run
        raise AssertionError(f"{run} is not running")

    def states(self) -> dict[str, MemberState]:
        return {state.run: state for state in Ledger(self.runs.parent).fold().values()}

    def evaluated(self, run: str) -> list[int]:
        return [record.step for record in read_journal(self.runs / run).of_kind("eval")]

    def was_resumed(self, run: str) -> bool:
        """Return whether the command of a member was restarted with a checkpoint to resume from."""
        last = json.loads((self.runs / run / "command.json").read_text())
        return int(last["attempts"]) > 1 and bool(last["goes_on"])


def kill_controller_and_trainer(study: OnTrl, step: int) -> str:
    """Kill the controller, then a member's trainer while no controller runs; return the killed run."""
    controller = study.start(*study.train)
    try:
        eventually(lambda: study.is_at(step), f"step {step}; {study.said()[-2000:]}")
    finally:
        controller.kill()
        controller.wait()
    run = study.kill_a_trainer()
    eventually(lambda: "SIGKILL" in (study.runs / run / "metrics.jsonl").read_text(), "the end of an attempt")
    return run


def test_a_member_of_trl_continues_after_its_controller_and_trainer_were_killed(tmp_path: Path, ready_lab: Lab) -> None:
    """`scalerl collect` continues it, and needs no --trust for the user's own study."""
    study = OnTrl(tmp_path, ready_lab, "seed=0", "loss=cispo", "budget.steps=40", "checkpoint.every_n_steps=2")
    run = kill_controller_and_trainer(study, step=4)
    assert study.scalerl("collect", "outputs/on_trl", "--wait") == 0, study.said()
    (state,) = study.states().values()
    assert (state.state, study.was_resumed(run)) == ("finished", True), study.said()
    (retried,) = [entry for entry in Ledger(study.runs.parent).entries() if entry["event"] == "retried"]
    assert (retried["run"], retried["kind"]) == (run, "killed") and "killed by SIGKILL at step" in retried["reason"]
    assert study.evaluated(run) == list(range(0, 41, 2))
    assert tracked(study.tracking, "on_trl") == [("FINISHED", "0", 40.0)]


def test_a_race_of_trl_members_finishes_after_two_kills(tmp_path: Path, ready_lab: Lab) -> None:
    """A race of two losses with three seeds stops the loss that changes no weights. All commands work on the result."""
    (tmp_path / "mine" / "loss").mkdir(parents=True)
    # The cap is so low that gradients are far below Adam's epsilon (1e-15), so the weights do not change.
    (tmp_path / "mine" / "loss" / "still.yaml").write_text("_target_: lightning_scalerl.CISPO\nmax_ratio: 1.0e-30\n")
    study = OnTrl(
        *(tmp_path, ready_lab, "--config-dir", "mine", "seed=0,1,2", "loss=dapo,still", f"budget.steps={STEPS}"),
        *("checkpoint.every_n_steps=10", "race.mode=live", "race.first=0.1", "race.growth=1.2"),
    )
    killed = kill_controller_and_trainer(study, step=12)
    assert study.scalerl(*study.train) == 0, study.said()
    states = study.states()
    assert study.was_resumed(killed)
    assert sorted((state.recipe.rpartition("=")[2], state.state) for state in states.values()) == [
        *[("dapo", "finished")] * 3,
        *[("still", "stopped")] * 3,
    ], study.said()
    for run, state in states.items():
        steps = study.evaluated(run)
        assert steps == list(range(0, steps[-1] + 1, 2)), (run, steps)
        assert (steps[-1] == STEPS) == (state.state == "finished")
        assert read_journal(study.runs / run).header["axis"] == "compute/flops"
    spent = min(read_journal(study.runs / run).of_kind("eval")[-1].metrics["compute/flops"] for run in states)
    for words in (("rank",), ("race", "--budget", str(spent)), ("report", "-o", "report.html"), ("status",)):
        assert study.scalerl(words[0], "outputs/on_trl", *words[1:]) == 0, (words, study.said()[-2000:])
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert sorted(status for status, _, _ in tracked(study.tracking, "on_trl")) == ["FINISHED"] * 3 + ["KILLED"] * 3
