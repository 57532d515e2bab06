"""Tests of the command for an advice: it names existing runs, and a budget that reaches the advised compute."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString

from sweeps.launch.resume_command import command
from sweeps.run.journal import Journal, read_journal
from sweeps.run.spec import make_spec

AXIS = "compute/flops"


@dataclass
class Advice:
    recipe: str = "scalerl+loss=dapo"
    action: str = "extend"
    compute: float = 300.0


def write_launched_run(
    root: Path,
    seed: int,
    overrides: tuple[str, ...],
    steps: int = 10,
    folders: tuple[str, ...] = (),
    output_dir: str | None = None,
    **more: object,
) -> Path:
    config = {"seed": seed, "budget": {"steps": steps}, "loss": {"_target_": "x"}, "output_dir": output_dir, **more}
    spec = make_spec(config, config, "scalerl+loss=dapo", "scalerl")
    run_dir = root / "runs" / spec.run
    spec.__class__(**{**spec.__dict__, "overrides": overrides, "folders": folders}).write(run_dir)
    journal = Journal(run_dir, clock=lambda: 0.0)
    journal.header(run=spec.run, curve=spec.curve, recipe=spec.recipe, seed=seed)
    for step in range(0, steps + 1, 5):
        journal.record("eval", step, {AXIS: 10.0 * step, "eval/heldout/pass_rate": 0.1})
    journal.close()
    return run_dir


# The last override is of a removed key and must be dropped, or the command would be refused.
OVERRIDES = ("experiment=demo", "study=my study", "variant=loss_dapo", "seed=0", "budget.steps=10", "race.freed=plan")


def test_an_extension_continues_the_same_runs(tmp_path: Path) -> None:
    runs = [read_journal(write_launched_run(tmp_path, seed, OVERRIDES)) for seed in (0, 1)]
    assert command(Advice(), runs, AXIS) == (
        "scalerl train --multirun experiment=demo 'study=my study' variant=loss_dapo seed=0,1 budget.steps=30"
    )


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("outputs/mine", "experiment=demo 'study=my study'"),
        ("copied", "experiment=demo output_dir=copied"),
        ("outputs/../copied", "experiment=demo output_dir=copied"),
        (".", "experiment=demo output_dir={}/here"),
        ("it's 1, 2", """experiment=demo 'output_dir='"'"'it\\'"'"'s 1, 2'"'"''"""),
        ("2", """experiment=demo 'output_dir='"'"'2'"'"''"""),
        ("../elsewhere", "experiment=demo output_dir={}/elsewhere"),
    ],
)
def test_the_command_of_a_moved_study_names_its_folder(
    folder: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded overrides would lead to the study from which it was copied. A path outside of here is absolute."""
    (tmp_path / "here" / "outputs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    overrides = ("experiment=demo", "study=my study", "+output_dir=elsewhere")[: 2 if "mine" in folder else 3]
    run = read_journal(write_launched_run(Path(folder), 0, overrides, output_dir="outputs/mine"))
    line = command(Advice(), [run], AXIS)
    assert line == f"scalerl train --multirun {words.format(tmp_path)} seed=0 budget.steps=30"
    override = OverridesParser.create().parse_override(shlex.split(line)[4])
    if override.get_key_element() == "output_dir":
        value = override.value()
        assert isinstance(value, str | QuotedString) and Path(str(getattr(value, "text", value))).samefile(folder)


@pytest.mark.parametrize(
    ("folders", "options"),
    [
        (("/my files",), "--config-dir '/my files'"),
        (("/one", "/two"), "--config-dir /one 'hydra.searchpath=[file:///two]'"),
        (("/mine", "/mine/trainer.yaml"), "--config-dir /mine --config-name trainer"),
    ],
)
def test_the_command_names_the_users_configuration_folders(
    tmp_path: Path, folders: tuple[str, ...], options: str
) -> None:
    run = read_journal(write_launched_run(tmp_path, 0, OVERRIDES, folders=folders))
    line = command(Advice(), [run], AXIS)
    assert line is not None and line.startswith(f"scalerl train {options} --multirun experiment=demo")


def test_a_raced_recipe_continues_without_the_race_that_stopped_it(tmp_path: Path) -> None:
    race = ("race.mode=live", "race.p_ahead=0.45")
    run = read_journal(write_launched_run(tmp_path, 0, (*OVERRIDES[:-1], *race), race={"mode": "live"}))
    line = command(Advice(), [run], AXIS)
    assert line is not None and line.endswith(" variant=loss_dapo race.mode=none seed=0 budget.steps=30")


def test_advice_to_add_a_seed_gives_a_new_seed_and_the_same_budget(tmp_path: Path) -> None:
    runs = [read_journal(write_launched_run(tmp_path, seed, OVERRIDES)) for seed in (0, 4)]
    line = command(Advice(action="seed", compute=100.0), runs, AXIS)
    assert line is not None and line.endswith("variant=loss_dapo seed=5 budget.steps=10")


@pytest.mark.parametrize("overrides", [(), OVERRIDES])
def test_there_is_no_command_without_launched_runs(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    runs = [read_journal(write_launched_run(tmp_path, 0, overrides))]
    assert command(Advice("another"), runs, AXIS) is None
    assert command(Advice(), [], AXIS) is None
    if not overrides:
        assert command(Advice(), runs, AXIS) is None
    (runs[0].path.parent / "spec.json").unlink()
    assert command(Advice(), runs, AXIS) is None
