"""Tests that the examples run unchanged."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from pathlib import Path

import pytest

from lightning_scalerl.member.command import plan_commands, run_command
from sweeps.run.journal import read_journal
from sweeps.run.progress import is_done
from tests import forked
from tests.paths import ROOT

RATE = "eval/heldout/pass_rate"


def run_own_run_script(folder: Path, steps: int) -> str:
    command = [sys.executable, str(ROOT / "examples" / "own_run.py"), "--batches", "200", "--steps", str(steps)]
    environment = {**os.environ, "SCALERL_CACHE": str(folder / "cache"), "WANDB_SILENT": "true"}
    done = forked.run(command, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_file_makes_a_study_of_a_plain_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide shows the example's study file. Its grid can be planned, and one member is run."""
    source = ROOT / "examples" / "any_trainer"
    text = (source / "study.yaml").read_text()
    page = (ROOT / "docs" / "guide" / "any_trainer.md").read_text()
    assert text[text.index("defaults:") :] in page
    (command,) = [
        line for line in page.splitlines() if line.startswith("scalerl train") and "--config-name study" in line
    ]
    assert command in text and "loss=reinforce,ppo seed=1,2,3" in command
    folder = Path(shutil.copytree(source, tmp_path / "mine"))
    monkeypatch.chdir(folder)
    # The study's command is `python`, as in an activated environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    grid = [[f"loss={loss}", f"seed={seed}", "budget.steps=30"] for loss in ("reinforce", "ppo") for seed in (1, 2, 3)]
    specs = plan_commands(grid, [str(folder / "study.yaml")])
    assert list(dict.fromkeys(spec.recipe for spec in specs)) == ["loss=reinforce", "loss=ppo"]
    run_dir = folder / "run"
    specs[3].write(run_dir)
    run_command(run_dir)
    assert is_done(run_dir, 30, specs[3].run)
    view = read_journal(run_dir)
    assert [record.step for record in view.of_kind("train")] == list(range(1, 31))
    rates = [record.metrics[RATE] for record in view.of_kind("eval")]
    assert len(rates) == 3 and rates[-1] > rates[0]


@pytest.mark.full
def test_the_own_run_example_trains_and_resumes(tmp_path: Path) -> None:
    """own_run.py uses three loggers, Lightning's callbacks and a user's task and loss; a second call resumes it."""
    run_own_run_script(tmp_path, 10)
    output_text = run_own_run_script(tmp_path, 15)
    output = tmp_path / "outputs" / "own_run"
    view = read_journal(output)
    assert [record.step for record in view.of_kind("eval")] == [0, 5, 10, 15] and view.status == "finished"
    rates = {record.step: record.metrics[RATE] for record in view.of_kind("eval")}
    assert f"pass rate {rates[15]:.3f} after 15 steps" in output_text
    best = max(rates, key=lambda step: (rates[step], -step) if step else (-1.0, 0))
    assert f"best: {rates[best]:.3f} in {output}/best/step={best}.ckpt" in output_text
    logged = {}
    for path in sorted(output.glob("csv/*/metrics.csv")):
        logged |= {int(line["step"]): float(line[RATE]) for line in csv.DictReader(path.open()) if line[RATE]}
    assert logged == rates
    assert len(list(output.glob("wandb/offline-run-*/*.wandb"))) == 2
    assert "PatientCISPO" in (output / "semantics.json").read_text()
