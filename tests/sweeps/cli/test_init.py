"""scalerl init: the folder that it makes runs as it is, as its README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.cli.init_command import FOLDER
from sweeps.cli.main import main
from sweeps.run.journal import read_journal
from tests.paths import ROOT


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert "is there already; give the name of a new" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "mine.txt")]) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]


def test_it_says_what_it_has_made_and_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "empty")]) == 0
    said = capsys.readouterr().out
    made = {str(each.relative_to(tmp_path / "empty")) for each in (tmp_path / "empty").rglob("*") if each.is_file()}
    assert made == set(re.findall(r"^  (\S+)$", said, re.MULTILINE)) and "run.sbatch" in made
    readme = (tmp_path / "empty" / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in made - {"README.md"}), "each is explained"
    commands = [line.split("#")[0].split() for line in said.splitlines() if line.startswith("scalerl ")]
    written = [line.split("#")[0].split() for line in readme.splitlines() if line.startswith("scalerl ")]
    assert len(commands) == 2 and all(each in written for each in commands)


def test_the_batch_script_is_that_of_single_runs() -> None:
    """Its requeue is tried on a cluster where that of slurm/single_run.sbatch is."""
    scripts = (FOLDER / "run.sbatch", ROOT / "slurm" / "single_run.sbatch")
    ours, theirs = (path.read_text().partition("status=")[2] for path in scripts)
    assert ours == theirs != ""


@pytest.mark.slow
def test_it_runs_as_it_is(tmp_path: Path) -> None:
    """The first command of its README, which a user types first; and the study is planned as it is written."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SCALERL_CACHE": str(tmp_path / "cache")}

    def scalerl(*words: str, folder: Path = tmp_path / "mine") -> str:
        command = [sys.executable, "-m", "sweeps.cli.main", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert "Loading weights" not in done.stderr and "srun" not in done.stderr, "neither bars nor hints of libraries"
        return done.stdout

    scalerl("init", "mine", folder=tmp_path)
    said = scalerl("train", "--config-dir", ".", "recipe=mine", "budget.steps=4")
    assert "verifier: graded all test completions correctly (4 known to be right, 4 known to be wrong)" in said
    (run,) = (tmp_path / "mine" / "outputs").glob("*/runs/*")
    view = read_journal(run)
    rates = [record.metrics["eval/test/pass_rate"] for record in view.of_kind("eval")]
    assert view.status == "finished" and len(rates) == 2 and 0.1 < rates[0] < 0.9, "the base model is half-way"
    assert {"reward/accuracy", "reward/ends"} <= {name for record in view.of_kind("train") for name in record.metrics}
    planned = scalerl("train", "--config-dir", ".", "--multirun", "experiment=mine", "launch.design=text")
    assert "6 members (3 recipes, 2 seeds)" in planned
