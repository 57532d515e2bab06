"""Every recipe, variant and experiment of conf/ composes, and trains ten steps at `scale=tiny`: the one override."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import hydra
import pytest
from hydra import initialize_config_dir

from lightning_scalerl.choices import AXES
from lightning_scalerl.composition import build_recipe, compose
from lightning_scalerl.member.identify import plan_members
from lightning_scalerl.member.run import run_member
from sweeps.run.journal import read_journal
from tests.paths import ROOT

STEPS = 10


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def members(experiment: str) -> list[list[str]]:
    """The override lists of an experiment's grid, as Hydra's sweeper would make them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        composed = hydra.compose("train", [f"experiment={experiment}"], return_hydra_config=True)
    sweeper = composed.hydra.sweeper
    grid: list[list[str]] = []
    for row in sweeper.get("rows") or [[]]:
        given = [*row, *(f"{key}={value}" for key, value in (sweeper.params or {}).items())]
        grid += BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(given), None)[0]
    return [[f"experiment={experiment}", *point] for point in grid]


def train(overrides: list[str], tmp_path: Path, moves: bool = True) -> None:
    """Ten steps, as `scalerl train` makes them; everything in the journal is finite, and the weights move."""
    given = [*overrides, "scale=tiny", f"budget.steps={STEPS}", f"output_dir={tmp_path}"]
    (spec,) = plan_members([given])
    run_dir = tmp_path / "runs" / spec.run
    spec.write(run_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_member(run_dir)
    view = read_journal(run_dir)
    assert view.status == "finished"
    records = view.of_kind("train")
    assert [record.step for record in records] == list(range(1, STEPS + 1))
    assert all(math.isfinite(value) for record in records for value in record.metrics.values())
    assert not moves or any(record.metrics["train/gradient_norm"] > 0 for record in records), [
        r.metrics["train/reward"] for r in records
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scale", names("scale"))
@pytest.mark.parametrize("recipe", names("recipe"))
def test_every_recipe_goes_with_every_scale(recipe: str, scale: str) -> None:
    built = build_recipe(compose([f"recipe={recipe}", f"scale={scale}"]), recipe)
    built.check(built.choices)
    assert {axis for axis, _ in built.choices.items()} == set(AXES)


@pytest.mark.parametrize("recipe", names("recipe"))
def test_a_recipe_names_every_axis_that_it_could_leave_open(recipe: str) -> None:
    """So that its file says what it is; the two of before the axes grew are what they were."""
    named = (ROOT / "conf" / "recipe" / f"{recipe}.yaml").read_text()
    left = [axis for axis in AXES if f"/{axis}:" not in named]
    grown = ["curriculum", "critic", "kl", "entropy", "epochs"]
    assert left == (grown if recipe in ("scalerl", "scalerl_core") else [])


@pytest.mark.slow
@pytest.mark.parametrize("experiment", names("experiment"))
def test_members_of_an_experiment_differ(experiment: str) -> None:
    specs = plan_members([[*overrides, "scale=tiny"] for overrides in members(experiment)])
    assert len({spec.run for spec in specs}) == len(specs) > 1
    assert len({spec.recipe for spec in specs if spec.seed == 0}) * len({s.seed for s in specs}) == len(specs)


@pytest.mark.parametrize("recipe", names("recipe"))
def test_every_recipe_trains(recipe: str, tmp_path: Path) -> None:
    train([f"recipe={recipe}"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", names("experiment"))
def test_every_experiment_trains(experiment: str, tmp_path: Path) -> None:
    """Its first and its last member."""
    first, *_, last = members(experiment)
    # Its pools hold what this small a model never solves.
    moves = experiment != "data_reuse"
    train(first, tmp_path, moves)
    train(last, tmp_path, moves)


@pytest.mark.slow
@pytest.mark.parametrize("variant", sorted(set(names("variant")) - {"none"}))
def test_every_variant_is_one_change_and_trains(variant: str, tmp_path: Path) -> None:
    """On the first recipe that it changes."""
    changed = compose([f"variant={variant}"])
    axis = str(changed.label).partition("=")[0]
    recipes = ("scalerl", "baseline", "ppo", "dr_grpo") if not variant.endswith("_value") else ("ppo",)
    recipe = next(name for name in recipes if compose([f"recipe={name}"])[axis] != changed[axis])
    train([f"recipe={recipe}", f"variant={variant}"], tmp_path)
