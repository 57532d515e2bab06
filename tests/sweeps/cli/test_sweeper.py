"""Tests of the sweepers: rows of overrides in addition to Hydra's grid, and search spaces for Optuna."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.core_plugins import basic_sweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins import scalerl_sweeper
from sweeps.cli.launchers import StudyLauncher
from sweeps.errors import UserError
from sweeps.search.settings import Axis


class Collects(StudyLauncher):
    """A launcher that records the members and runs none."""

    def __init__(self) -> None:
        self.launches: list[list[list[str]]] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
        assert initial_job_idx == sum(map(len, self.launches))
        self.launches.append([list(member_overrides) for member_overrides in job_overrides])
        return []


def members(rows: Any, *arguments: str, batch: int | None = None) -> list[list[list[str]]]:
    # Hydra's plugin search imports its modules again; classes made earlier then lack the current base classes.
    importlib.reload(basic_sweeper)
    sweeper = importlib.reload(scalerl_sweeper).ScaleRLSweeper(batch, {"seed": "0,1"}, rows)
    sweeper.launcher = launcher = Collects()
    sweeper.hydra_context = SimpleNamespace(config_loader=None)
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": "unused"}}})
    sweeper.sweep(list(arguments))
    return launcher.launches


def test_the_grid_is_run_with_each_row() -> None:
    (only_launch,) = members(OmegaConf.create([[], ["loss=dapo"], ["model.width=32,64", "batch.prompts=4"]]))
    assert only_launch == [
        ["seed=0"],
        ["seed=1"],
        ["seed=0", "loss=dapo"],
        ["seed=1", "loss=dapo"],
        *(
            [f"seed={seed}", f"model.width={width}", "batch.prompts=4"]
            for seed in (0, 1)
            for width in (32, 64)
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("rows", [None, [], OmegaConf.create([])])
def test_without_rows_the_grid_is_hydras(rows: Any) -> None:
    assert members(rows, "loss=dapo,gspo") == [
        [[f"seed={seed}", f"loss={loss}"] for seed in (0, 1) for loss in ("dapo", "gspo")]
    ]


def test_a_row_overrides_the_grid_and_the_command_line_overrides_both() -> None:
    assert members([["seed=7", "loss=dapo"], []]) == [[["seed=7", "loss=dapo"], ["seed=0"], ["seed=1"]]]
    (only_launch,) = members([["seed=7", "loss=dapo"], []], "seed=3", "budget.steps=5")
    assert only_launch == [["seed=3", "loss=dapo", "budget.steps=5"], ["seed=3", "budget.steps=5"]]


def test_rows_need_a_launcher_of_this_project() -> None:
    sweeper = importlib.reload(scalerl_sweeper).ScaleRLSweeper(None, {"seed": "0,1"}, [["loss=dapo"]])
    sweeper.launcher = object()
    loader = SimpleNamespace(get_group_options=lambda group: {"cluster": ["local", "moon"]}[group])
    sweeper.hydra_context = SimpleNamespace(config_loader=loader)
    with pytest.raises(UserError, match=r"hydra\.sweeper\.rows: they need a launcher of ours: cluster=local or moon$"):
        sweeper.sweep([])


def test_max_batch_size_splits_the_launch() -> None:
    assert [len(each) for each in members([[], ["loss=dapo"], ["loss=gspo"]], batch=4)] == [4, 2]


def test_a_race_takes_all_members_at_once() -> None:
    sweeper = importlib.reload(scalerl_sweeper).ScaleRLSweeper(2, {"seed": "0,1"}, None)
    sweeper.launcher = Collects()
    sweeper.config = OmegaConf.create({"race": {"mode": "live"}})
    with pytest.raises(UserError, match=r"hydra\.sweeper\.max_batch_size: members race against all others"):
        sweeper.sweep([])


@pytest.mark.parametrize("rows", [["loss=dapo"], "loss=dapo", {"loss": "dapo"}, [["dapo"]], [[1]], [None]])
def test_malformed_rows_are_refused_by_name(rows: Any) -> None:
    with pytest.raises(UserError, match=r"hydra\.sweeper\.rows: .* must be a list of lists of overrides"):
        members(OmegaConf.create(rows) if isinstance(rows, dict) else rows)


def test_the_rows_of_every_experiment_are_valid_overrides() -> None:
    """Parse them as Hydra does. Otherwise a malformed row would fail only at launch."""
    conf = Path(__file__).resolve().parents[3] / "conf" / "experiment"
    rows = {path.stem: OmegaConf.select(OmegaConf.load(path), "hydra.sweeper.rows") for path in conf.glob("*.yaml")}
    with_rows = {name: experiment_rows for name, experiment_rows in rows.items() if experiment_rows}
    assert "replication" in with_rows
    for experiment_rows in with_rows.values():
        for row in OmegaConf.to_container(experiment_rows):
            OverridesParser.create().parse_overrides(row)


# --- a space instead of a grid -------------------------------------------------------------------------------


class Searches(StudyLauncher):
    """A launcher that records the search space and searches nothing."""

    def __init__(self) -> None:
        self.searched: list[Any] = []

    def search(self, base: Any, space: Any, settings: Any, sampler: Any) -> None:
        self.searched.append((base, space, settings, sampler(3)))


def searched(*arguments: str, params: Any = None, **settings: Any) -> Any:
    importlib.reload(basic_sweeper)
    importlib.reload(scalerl_sweeper)
    module = importlib.import_module("hydra_plugins.scalerl_optuna_sweeper")
    sweeper = importlib.reload(module).ScaleRLOptunaSweeper(
        sampler=OmegaConf.create({"_target_": "optuna.samplers.RandomSampler"}), params=params, **settings
    )
    sweeper.launcher = launcher = Searches()
    sweeper.hydra_context = SimpleNamespace(config_loader=None)
    sweeper.config = OmegaConf.create({"hydra": {"sweep": {"dir": "unused"}}})
    sweeper.sweep(list(arguments))
    return launcher.searched[0]


def test_the_search_space_comes_from_the_swept_overrides() -> None:
    overrides = (
        "loss=dapo,gspo",
        "budget.steps=8",
        "optimizer.lr=tag(log,interval(1e-5,1e-3))",
        "a=int(interval(1,9))",
    )
    base, space, settings, sampler = searched(*overrides, "b=range(0,10,5)", n_trials=5)
    assert base == ["budget.steps=8"] and settings == {"n_trials": 5} and type(sampler).__name__ == "RandomSampler"
    assert space == [
        Axis("loss", ("dapo", "gspo")),
        Axis("optimizer.lr", low=1e-5, high=1e-3, log=True),
        Axis("a", low=1, high=9),
        Axis("b", ("0", "5")),
    ]
    assert isinstance(space[2].low, int)


def test_the_command_line_overrides_the_parameters_of_the_sweeper() -> None:
    base, space, _, _ = searched("seed=3", "loss=dapo", params={"loss": "gspo,ppo", "epochs.passes": "1,2"})
    assert base == ["loss=dapo", "seed=3"] and space == [Axis("epochs.passes", ("1", "2"))]


def test_a_search_without_swept_values_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to search; give values"):
        searched("loss=dapo")


def test_a_search_refuses_rows() -> None:
    with pytest.raises(
        UserError, match=r"hydra.sweeper.rows: they list members one by one, .* hydra.sweeper.rows=null"
    ):
        searched("loss=dapo,gspo", rows=[["loss=ppo"]])
    assert searched("loss=dapo,gspo", rows=None)[1] == [Axis("loss", ("dapo", "gspo"))]
