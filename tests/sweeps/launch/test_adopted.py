"""Tests that adopted runs replace the members of a launch with the same values; only the others are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_scalerl.member.command import plan_commands
from sweeps.cli.launchers import _measurement
from sweeps.errors import UserError
from sweeps.executor.local import InProcessExecutor
from sweeps.launch.adopted import replaced_members, substitute_adopted_runs
from sweeps.launch.adoption import adopt
from sweeps.launch.ledger import Ledger
from sweeps.launch.price import estimate_launch
from sweeps.launch.study import Study
from sweeps.run.journal import Journal, read_journal
from sweeps.run.progress import final_reason
from sweeps.run.spec import RunSpec
from sweeps.source import load
from tests.paths import ROOT

SCRIPT = """
import json, sys
loss, lr, seed, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
best = {"grpo": 0.5, "dapo": 0.8}[loss]
for step in range(0, steps + 1, 2):
    row = {"step": step, "tokens": 100 * step, "eval_reward": best * step / (step + 10) + 0.001 * seed}
    print(json.dumps(row), flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write a study's configuration, and the script of its command."""
    (tmp_path / "train.py").write_text(SCRIPT)
    content: dict[str, Any] = {
        "defaults": [{"member": "command"}, "_self_"],
        "loss": "grpo",
        "lr": 1e-5,
        "command": {
            "line": f"{sys.executable} -S train.py {{loss}} {{lr}} {{seed}} {{steps}}",
            "metrics": {"reward": "eval_reward"},
            "compute": {"unit": "tokens", "column": "tokens"},
        },
        "budget": {"steps": 20},
        "study": "mine",
        "output_dir": str(tmp_path / "study"),
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return tmp_path


def run_by_hand(place: Path, loss: str, seed: int, steps: int = 20, lr: str = "1e-05") -> None:
    """Run the script by hand, and write its log under a name with the values."""
    words = [sys.executable, "-S", "train.py", loss, lr, str(seed), str(steps)]
    log = place / "logs" / f"loss={loss},lr={lr},seed={seed}.jsonl"
    log.parent.mkdir(exist_ok=True)
    log.write_text(subprocess.run(words, cwd=place, capture_output=True, text=True, check=True).stdout)


def grid_members(place: Path, *more: str) -> list[RunSpec]:
    """Return the members of the grid of two losses and two seeds."""
    grid = [[f"loss={loss}", f"seed={seed}", *more] for loss in ("grpo", "dapo") for seed in (0, 1)]
    return plan_commands(grid, [str(place / "mine.yaml")])


def launch(place: Path) -> tuple[list[str], list[str]]:
    """Launch the grid; return the titles of the started members, and the notes."""
    started: list[str] = []

    class Executor(InProcessExecutor):
        def submit(self, submission: str, members: Any) -> dict[str, str | None]:
            started.extend(RunSpec.read(member.run_dir).title for member in members)
            return super().submit(submission, members)

    specs, notes = substitute_adopted_runs(place / "study", grid_members(place), _measurement)
    states = Study(place / "study", specs).run(Executor("sweeps.command.runner:run_member"))
    assert {state.state for state in states.values()} == {"finished"} and len(states) == 4
    return started, notes


def test_only_members_without_an_adopted_run_are_started(place: Path) -> None:
    for seed in (0, 1):
        run_by_hand(place, "grpo", seed)
    adopt(place / "study", [str(place / "logs")], ["loss,lr,seed"], x="tokens")
    started, notes = launch(place)
    assert started == ["loss=dapo seed 0", "loss=dapo seed 1"]
    assert notes == ["2 of 4 members ran elsewhere and were adopted; they are not started"]
    study = load([place / "study"])
    curve_of = {curve.recipe: curve for curve in study.curves}
    assert curve_of.keys() == {"mine", "loss=dapo"}, "the labels are those of the launch"
    assert {curve.axis for curve in study.curves} == {"compute/tokens"}
    assert [sorted(set(curve.seed)) for curve in study.curves] == [["0", "1"]] * 2
    assert not study.warnings and not any(curve.warnings for curve in study.curves)
    assert launch(place)[0] == [] and len(Study.read(place / "study").specs) == 4
    run_by_hand(place, "dapo", 7)
    adopt(place / "study", [str(place / "logs")], ["loss,lr,seed"], x="tokens")
    assert sorted(set({c.recipe: c for c in load([place / "study"]).curves}["loss=dapo"].seed)) == ["0", "1", "7"]


def test_the_steps_of_a_table_show_an_unfinished_run(place: Path) -> None:
    """A table's steps count like those of a log; a repeated row is one point. Without steps, the rows are numbered."""
    complete = "".join(f"grpo,0,{step},{100 * step},{step / 40}\n" for step in range(0, 21, 2))
    cut_off = "".join(f"grpo,1,{step},{100 * step},{step / 50}\n" for step in (2, 4, 4, 6))
    (place / "table.csv").write_text(f"loss,seed,step,tokens,reward\n{complete}{cut_off}")
    done = adopt(place / "study", [str(place / "table.csv")], ["loss,seed"])
    assert [run.points for run in done.runs] == [11, 3]
    steps = {run.seed: [r.step for r in read_journal(place / "study" / "runs" / run.run).records] for run in done.runs}
    assert steps == {0: list(range(0, 21, 2)), 1: [2, 4, 6]}
    members, notes = substitute_adopted_runs(place / "study", grid_members(place), _measurement)
    assert notes[-1] == "mine seed 1 was adopted with 6 of 20 steps and is started anew"
    assert [("adopted" in member.config) for member in members] == [True, False, False, False]
    (place / "wide.csv").write_text("step,tokens,grpo-seed1,dapo-seed1\n2,200,0.1,0.2\n4,400,0.2,0.3\n6,600,0.3,\n")
    run = adopt(place / "wide", [str(place / "wide.csv")]).runs[0]
    assert RunSpec.read(place / "wide" / "runs" / run.run).steps == 6
    for text in (complete.replace("grpo,0,2,", "grpo,0,x,"), complete.replace("grpo,0,2,", "grpo,0,4,")):
        (place / "unclear.csv").write_text(f"loss,seed,step,tokens,reward\n{text}")
        (run,) = adopt(place / f"numbered{len(text)}", [str(place / "unclear.csv")], ["loss,seed"]).runs
        spec = RunSpec.read(place / f"numbered{len(text)}" / "runs" / run.run)
        assert spec.steps == 10 and not spec.config["adopted"]["by_step"]


def test_replaced_members_cost_nothing_and_matching_writes_nothing(place: Path) -> None:
    """Matching writes nothing, because a design or a refused launch must leave the study unchanged."""
    for loss, seed, steps in (("grpo", 0, 20), ("grpo", 1, 8), ("dapo", 5, 20)):
        run_by_hand(place, loss, seed, steps)
    adopt(place / "study", [str(place / "logs")], ["loss,lr,seed"], x="tokens")
    before = {path: path.read_bytes() for path in (place / "study").rglob("*") if path.is_file()}
    members = grid_members(place)
    replaced = replaced_members(place / "study", members)
    assert replaced == {members[0].run}, "one run has too few steps, and one has another seed"
    assert estimate_launch(members, place / "study", elsewhere=replaced).sentences()[0] == (
        "4 members (2 recipes, 2 seeds), 80 steps, of which 60 are left"
    )
    assert {path: path.read_bytes() for path in (place / "study").rglob("*") if path.is_file()} == before
    arguments = ["--config-dir", str(place), "--config-name", "mine", "--multirun", "loss=grpo,dapo", "seed=0,1"]
    result = subprocess.run(
        [sys.executable, "-m", "lightning_scalerl.train", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "80 steps, of which 60 are left" in result.stdout + result.stderr


def test_an_adopted_run_that_ended_for_good_replaces_a_member_of_any_budget(place: Path) -> None:
    run_dir = place / "elsewhere" / "runs" / "a"
    journal = Journal(run_dir)
    journal.header(run="a", recipe="a", seed=0, loss="grpo", lr=1e-5)
    for step in (0, 4, 8):
        metrics = {"eval/reward/pass_rate": 0.1 * step, "compute/tokens": 100.0 * step}
        journal.record("eval", step, metrics)
    journal.end(8, "finished", "dry", final=True)
    journal.close()
    adopt(place / "study", [str(place / "elsewhere")], ["loss,lr,seed"], x="compute/tokens")
    members = grid_members(place)
    assert replaced_members(place / "study", members) == {members[0].run}
    specs, notes = substitute_adopted_runs(place / "study", members, _measurement)
    assert notes == ["1 of 4 members ran elsewhere and were adopted; they are not started"]
    assert final_reason(place / "study" / "runs" / specs[0].run) == "dry"


def test_runs_that_replace_no_member_are_noted(place: Path) -> None:
    run_by_hand(place, "grpo", 0, steps=8)
    run_by_hand(place, "dapo", 5)
    adopt(place / "study", [str(place / "logs")], ["loss,seed"], x="tokens")
    specs, notes = substitute_adopted_runs(place / "study", grid_members(place), _measurement)
    assert [spec.run for spec in specs] == [spec.run for spec in grid_members(place)]
    assert notes == ["mine seed 0 was adopted with 8 of 20 steps and is started anew"]
    assert {state.recipe for state in Ledger(place / "study").fold().values()} == {"mine", "loss=dapo"}
    rates = [*grid_members(place), *grid_members(place, "lr=0.1")]
    _, notes = substitute_adopted_runs(place / "study", rates, _measurement)
    assert any("could be any of mine, lr=0.1, so it replaces none; adopt it --by all values" in note for note in notes)


def test_a_run_may_be_matched_by_the_recipe_label(place: Path) -> None:
    run_by_hand(place, "dapo", 1)
    (place / "logs/loss=dapo,lr=1e-05,seed=1.jsonl").rename(place / "logs/loss=dapo-seed1.jsonl")
    adopt(place / "study", [str(place / "logs")], x="tokens")
    specs, _ = substitute_adopted_runs(place / "study", grid_members(place), _measurement)
    assert [spec.title for spec in specs if "adopted" in spec.config] == ["loss=dapo seed 1"]


def test_another_unit_is_refused_before_any_start(place: Path) -> None:
    run_by_hand(place, "grpo", 0)
    adopt(place / "study", [str(place / "logs")], ["loss,seed"], x="step")
    with pytest.raises(
        UserError, match="its adopted runs count compute/steps, and this launch compute/tokens; measure"
    ):
        substitute_adopted_runs(place / "study", grid_members(place), _measurement)


def test_another_reward_is_refused_before_any_start(place: Path) -> None:
    run_by_hand(place, "grpo", 0)
    adopt(place / "study", [str(place / "logs")], ["loss,seed"], x="tokens", evaluation_set="math")
    with pytest.raises(UserError, match="have no eval/heldout/pass_rate, by which this launch is compared; adopt them"):
        substitute_adopted_runs(place / "study", grid_members(place), _measurement)


def test_relabelling_keeps_provenance_and_records(place: Path) -> None:
    run_by_hand(place, "grpo", 0)
    (taken,) = adopt(place / "study", [str(place / "logs")], ["loss,seed"], x="tokens").runs
    before = read_journal(place / "study/runs" / taken.run)
    substitute_adopted_runs(place / "study", grid_members(place), _measurement)
    after = read_journal(place / "study/runs" / taken.run)
    assert (before.header["recipe"], after.header["recipe"]) == ("loss=grpo", "mine")
    assert after.header["adopted"] == before.header["adopted"] and after.records == before.records
    assert after.status == "finished" and after.header["compute_is"] == "tokens: tokens"


@pytest.mark.slow
def test_a_search_uses_adopted_runs_as_trials(place: Path) -> None:
    """The adopted run describes its compute in another way than the trials, and gets the label of its trial."""
    run_by_hand(place, "dapo", 0)
    adopt(place / "study", [str(place / "logs")], ["loss,lr,seed"], x="tokens")
    words = ["--config-dir", ".", "--config-name", "mine", "--multirun", "hydra/sweeper=scalerl_optuna"]
    words += ["loss=choice(grpo,dapo)", "hydra.sweeper.n_trials=4", "hydra.sweeper.prune=race"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_scalerl.train", *words, "hydra.sweeper.budget=2000"],
        cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "(loss=dapo seed 0) ran elsewhere and was adopted; it is not started" in output
    assert "4 of 4 trials finished" in output and "nothing is pruned" not in output
    assert len(Study.read(place / "study").specs) == 2
    assert {curve.recipe for curve in load([place / "study"]).curves} == {"mine", "loss=dapo"}
