"""Tests of `scalerl init`: the folder that it writes runs unchanged, with the commands in its README."""

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


def test_an_existing_folder_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert "is there already; give the name of a new" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "mine.txt")]) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]


def test_init_lists_its_files_and_the_next_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["init", str(tmp_path / "empty")]) == 0
    output = capsys.readouterr().out
    made = {str(file.relative_to(tmp_path / "empty")) for file in (tmp_path / "empty").rglob("*") if file.is_file()}
    assert made == set(re.findall(r"^  (\S+)$", output, re.MULTILINE)) and "run.sbatch" in made
    readme = (tmp_path / "empty" / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in made - {"README.md"}), "the README explains every file"
    commands = [line.split("#")[0].split() for line in output.splitlines() if line.startswith("scalerl ")]
    readme_commands = [line.split("#")[0].split() for line in readme.splitlines() if line.startswith("scalerl ")]
    assert len(commands) == 2 and all(command_words in readme_commands for command_words in commands)


def test_the_batch_script_equals_single_run_sbatch() -> None:
    """Only slurm/single_run.sbatch is tested on a cluster, so the two must not differ after `status=`."""
    scripts = (FOLDER / "run.sbatch", ROOT / "slurm" / "single_run.sbatch")
    init_script, single_run_script = (path.read_text().partition("status=")[2] for path in scripts)
    assert init_script == single_run_script != ""


@pytest.mark.slow
def test_the_new_folder_runs_unchanged(tmp_path: Path) -> None:
    """Run the first command of the README (with fewer steps), then plan the study that the folder describes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SCALERL_CACHE": str(tmp_path / "cache")}

    def scalerl(*words: str, folder: Path = tmp_path / "mine") -> str:
        command = [sys.executable, "-m", "sweeps.cli.main", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert "Loading weights" not in done.stderr and "srun" not in done.stderr, (
            "no progress bars or hints of libraries"
        )
        return done.stdout

    scalerl("init", "mine", folder=tmp_path)
    output = scalerl("train", "--config-dir", ".", "recipe=mine", "budget.steps=4")
    assert "verifier: graded all test completions correctly (4 known to be right, 4 known to be wrong)" in output
    (run,) = (tmp_path / "mine" / "outputs").glob("*/runs/*")
    view = read_journal(run)
    rates = [record.metrics["eval/test/pass_rate"] for record in view.of_kind("eval")]
    assert view.status == "finished" and len(rates) == 2 and 0.1 < rates[0] < 0.9, (
        "the base model solves some tasks, but not all"
    )
    assert {"reward/accuracy", "reward/ends"} <= {name for record in view.of_kind("train") for name in record.metrics}
    planned = scalerl("train", "--config-dir", ".", "--multirun", "experiment=mine", "launch.design=text")
    assert "6 members (3 recipes, 2 seeds)" in planned
