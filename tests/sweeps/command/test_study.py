"""Tests of studies of commands: they launch, resume, race and rank like studies of our own runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sweeps.cli.launchers import StudyLauncher, _pause_warnings
from sweeps.cli.main import main
from sweeps.command.runner import run_member
from sweeps.errors import UserError
from sweeps.executor.local import LocalExecutor
from sweeps.launch.resume_command import command
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import read_journal
from sweeps.search.race import LiveRace
from sweeps.search.settings import RaceSettings
from sweeps.source import load
from tests.paths import ROOT
from tests.sweeps.command.toy import commands_of, lines, planned, steps_of, wait_until, write_study

WAITING = "python -S train.py --steps={steps} --seed={seed} --out={run_dir} --loss={loss} --wait=17"


def train(folder: Path, *words: str) -> subprocess.Popen[str]:
    line = [
        sys.executable,
        "-m",
        "lightning_scalerl.train",
        "--config-dir",
        str(folder),
        "--config-name",
        "toy",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_the_same_command_finishes_a_study_whose_controller_was_killed(tmp_path: Path) -> None:
    write_study(tmp_path, line=WAITING)
    words = ("--multirun", "loss=grpo,dapo", "seed=1", "launch.max_parallel=2")
    runs = tmp_path / "outputs" / "runs"
    launch = train(tmp_path, *words)
    wait_until(lambda: runs.is_dir() and len([run for run in runs.iterdir() if lines(run) > 10]) == 2)
    launch.kill()
    launch.communicate()
    wait_until(lambda: not any(commands_of(run) for run in runs.iterdir()))
    for run in runs.iterdir():
        (run / "go").touch()
    again = train(tmp_path, *words)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert "2/2 done" in output and "finished  loss=dapo seed 1: step 30/30" in output
    for run in runs.iterdir():
        assert steps_of(run) == list(range(1, 31)) and steps_of(run, "eval") == [5, 10, 15, 20, 25, 30]
    # A single member runs in the foreground.
    assert "done already" in train(tmp_path, "loss=dapo", "seed=1").communicate(timeout=120)[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two recipes with two seeds each."""
    folder = tmp_path_factory.mktemp("toy")
    file = write_study(folder, steps=60)
    study = Study(folder / "outputs", planned(file, *(f"loss={a} seed={s}" for a in ("grpo", "dapo") for s in (0, 1))))
    for spec in study.specs:
        spec.write(study.run_dir(spec))
        run_member(study.run_dir(spec))
    return study.directory


def test_load_and_rank_read_studies_of_commands(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curves = load([finished]).curves
    assert {(curve.recipe, curve.axis, curve.unit) for curve in curves} == {
        ("toy", "compute/tokens", "tokens"),
        ("loss=dapo", "compute/tokens", "tokens"),
    }
    assert main(["rank", str(finished)]) == 0
    assert "loss=dapo is ahead" in capsys.readouterr().out


@pytest.mark.full
def test_report_reads_studies_of_commands(finished: Path, tmp_path: Path) -> None:
    assert main(["report", str(finished), "-o", str(tmp_path / "report.html")]) == 0
    assert "tokens" in (tmp_path / "report.html").read_text()


def test_the_proposed_command_names_the_studys_file(finished: Path) -> None:
    class Extend:
        recipe, action, compute = "loss=dapo", "extend", 12000.0

    line = command(Extend(), [read_journal(run) for run in (finished / "runs").iterdir()], "compute/tokens")
    folder = finished.parent
    assert line == (
        f"scalerl train --config-dir {folder} --config-name toy --multirun loss=dapo seed=0,1 budget.steps=120"
    )


def test_runs_with_different_measures_of_compute_are_not_fitted_together(finished: Path, tmp_path: Path) -> None:
    file = write_study(tmp_path, compute={"unit": "steps"})
    (spec,) = planned(file)
    spec.write(tmp_path / "outputs/runs" / spec.run)
    run_member(tmp_path / "outputs/runs" / spec.run)
    with pytest.raises(
        UserError, match=r"runs measure compute in different ways \(steps, .*, tokens: tokens\), and rew"
    ):
        load([finished, tmp_path / "outputs"])


def test_a_race_stops_the_recipe_that_will_not_be_best(tmp_path: Path) -> None:
    # The loser waits at step 300 of 400 and can only end if the race stops it.
    line = "python -S train.py --steps={steps} --seed={seed} --out={run_dir} --loss={loss} --wait={wait}"
    values = {"loss": "grpo", "wait": -1}
    file = write_study(tmp_path, steps=400, line=line, values=values)
    words = [f"loss=dapo seed={seed}" for seed in (0, 1)] + [f"loss=grpo wait=300 seed={seed}" for seed in (0, 1)]
    study = Study(tmp_path / "outputs", planned(file, *words))
    race = RaceSettings(mode="live", budget=40000.0)
    executor = LocalExecutor("sweeps.command.runner:run_member", 4, 1, ["sweeps.command.runner"])
    states = study.run(executor, decider=LiveRace(study, race))
    assert {(state.recipe, state.state) for state in states.values()} == {
        ("loss=dapo", "finished"),
        ("wait=300", "stopped"),
    }
    views = {view.recipe: view for view in overview(study.directory)}
    assert "of ending ahead of" in (views["wait=300"].reason or "")
    for spec in study.specs:
        steps = steps_of(study.run_dir(spec))
        assert steps == list(range(1, len(steps) + 1)) and len(steps) == (400 if "dapo" in spec.recipe else 300)
    assert json.loads((study.directory / "race.jsonl").read_text().splitlines()[1])["axis"] == "compute/tokens"


@pytest.mark.parametrize(("anew", "places", "warned"), [(True, 1, True), (True, 4, False), (False, 1, False)])
def test_a_race_warns_that_pauses_lose_the_progress_of_commands(
    anew: bool, places: int, warned: bool, tmp_path: Path
) -> None:
    file = write_study(tmp_path, resume={"anew": anew})
    specs = planned(file, *(f"loss={loss} seed={seed}" for loss in ("grpo", "dapo") for seed in (0, 1)))
    launcher = StudyLauncher("lightning_scalerl:plan_commands", "sweeps.command.runner:run_member")
    config = {**specs[0].config, "race": {**specs[0].config["race"], "mode": "live"}}
    config["launch"] = {**config["launch"], "max_parallel": places}
    warnings = _pause_warnings(specs, launcher.plan(config))
    assert bool(warnings) == warned
    assert not warned or ("command.resume.anew" in warnings[0] and "launch.max_parallel=4" in warnings[0])
    assert _pause_warnings(specs, launcher.plan(specs[0].config)) == [], "without a race no member is paused"
    # Adopted runs need no place.
    adopted = [replace(spec, config={**spec.config, "adopted": {}}) for spec in specs[1:]]
    assert _pause_warnings([specs[0], *adopted], launcher.plan(config)) == []
