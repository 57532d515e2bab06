"""Truths about advice as a command: it names the runs that are there, and a budget that reaches the compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from sweeps.launch.resume_command import command
from sweeps.run.journal import Journal, read_journal
from sweeps.run.spec import make_spec

AXIS = "compute/flops"


@dataclass
class Advice:
    recipe: str = "scalerl+loss=dapo"
    action: str = "extend"
    compute: float = 300.0


def launched(root: Path, seed: int, overrides: tuple[str, ...], steps: int = 10, folders: tuple[str, ...] = ()) -> Path:
    config = {"seed": seed, "budget": {"steps": steps}, "loss": {"_target_": "x"}}
    spec = make_spec(config, config, "scalerl+loss=dapo", "scalerl")
    run_dir = root / "runs" / spec.run
    spec.__class__(**{**spec.__dict__, "overrides": overrides, "folders": folders}).write(run_dir)
    journal = Journal(run_dir, clock=lambda: 0.0)
    journal.header(run=spec.run, curve=spec.curve, recipe=spec.recipe, seed=seed)
    for step in range(0, steps + 1, 5):
        journal.record("eval", step, {AXIS: 10.0 * step, "eval/heldout/pass_rate": 0.1})
    journal.close()
    return run_dir


# The last one is no longer a key: the command must be accepted.
OVERRIDES = ("experiment=demo", "study=my study", "variant=loss_dapo", "seed=0", "budget.steps=10", "race.freed=plan")


def test_an_extension_goes_on_with_the_same_runs(tmp_path: Path) -> None:
    runs = [read_journal(launched(tmp_path, seed, OVERRIDES)) for seed in (0, 1)]
    assert command(Advice(), runs, AXIS) == (
        "scalerl train --multirun experiment=demo 'study=my study' variant=loss_dapo seed=0,1 budget.steps=30"
    )


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (("/my files",), "--config-dir '/my files'"),
        (("/one", "/two"), "--config-dir /one 'hydra.searchpath=[file:///two]'"),
        (("/mine", "/mine/trainer.yaml"), "--config-dir /mine --config-name trainer"),
    ],
)
def test_the_command_names_the_folders_of_ones_own(tmp_path: Path, folders: tuple[str, ...], words: str) -> None:
    run = read_journal(launched(tmp_path, 0, OVERRIDES, folders=folders))
    line = command(Advice(), [run], AXIS)
    assert line is not None and line.startswith(f"scalerl train {words} --multirun experiment=demo")


def test_a_seed_is_a_new_one_of_the_same_budget(tmp_path: Path) -> None:
    runs = [read_journal(launched(tmp_path, seed, OVERRIDES)) for seed in (0, 4)]
    line = command(Advice(action="seed", compute=100.0), runs, AXIS)
    assert line is not None and line.endswith("variant=loss_dapo seed=5 budget.steps=10")


@pytest.mark.parametrize("overrides", [(), OVERRIDES])
def test_runs_that_were_not_launched_here_have_no_command(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    runs = [read_journal(launched(tmp_path, 0, overrides))]
    assert command(Advice("another"), runs, AXIS) is None
    assert command(Advice(), [], AXIS) is None
    if not overrides:
        assert command(Advice(), runs, AXIS) is None
    (runs[0].path.parent / "spec.json").unlink()
    assert command(Advice(), runs, AXIS) is None
