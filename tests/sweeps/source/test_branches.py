"""Tests of runs that branch from another run: compute counts from there, and shared evaluations count once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.run.journal import Journal
from sweeps.source import load

METRIC = "eval/heldout/pass_rate"
FLOPS, HOURS = "compute/flops", "compute/virtual_device_hours"


def run(
    study: Path,
    name: str,
    recipe: str,
    rewards: Mapping[int, float],
    branch: Mapping[str, Any] | None = None,
    seed: int = 0,
    per_step: float = 10.0,
    **header: Any,
) -> Path:
    """Write a journal with these rewards by step. branch: the parent, as `of` describes it."""
    folder = study / "runs" / name
    journal = Journal(folder)
    identity = {"run": name, "curve": recipe, "recipe": recipe, "baseline": "base", "seed": seed, "departures": {}}
    if branch is not None:
        identity |= {"branch": {"optimizer": "kept", **branch}, "baseline": f"base@{branch['step']}"}
    journal.header(**{**identity, **header})
    for step, reward in rewards.items():
        compute = {FLOPS: per_step * step, HOURS: step / 100}
        if step:
            journal.record("train", step, {**compute, "train/learning_rate": 1e-3})
        journal.record("eval", step, {**compute, METRIC: reward, f"{METRIC}_se": 0.01})
    journal.end(max(rewards), "finished")
    journal.close()
    return folder


def of(parent: str, step: int, **above: int) -> dict[str, Any]:
    return {"run": parent, "step": step, "ancestors": {parent: step, **above}}


PARENT = {0: 0.1, 10: 0.2, 20: 0.3, 30: 0.4, 40: 0.5}
CHANGED = {0: 0.1, 10: 0.2, 20: 0.3, 30: 0.5, 40: 0.6}


def family(study: Path) -> None:
    run(study, "p", "base", PARENT)
    run(study, "b", "base@20+loss=dapo", CHANGED, of("p", 20), departures={"loss": "dapo"})


def test_branch_and_parent_count_from_the_branch_point(tmp_path: Path) -> None:
    family(tmp_path)
    study = load([tmp_path], x=FLOPS)
    curves = {curve.recipe: curve for curve in study.curves}
    assert sorted(curves) == ["base@20", "base@20+loss=dapo"]
    parent, branch = curves["base@20"], curves["base@20+loss=dapo"]
    assert parent.compute.tolist() == branch.compute.tolist() == [0, 100, 200]
    assert parent.reward.tolist() == [0.3, 0.4, 0.5] and branch.reward.tolist() == [0.3, 0.5, 0.6]
    assert parent.origin == branch.origin == 200 and branch.baseline == "base@20"
    assert "evaluations that they share count once" in study.shown[0]
    assert "compared from where they diverge (step 20)" in study.shown[0]
    steps = {curve.recipe: curve.compute.tolist() for curve in load([tmp_path], x="step").curves}
    assert steps == {"base@20": [0, 10, 20], "base@20+loss=dapo": [0, 10, 20]}


def test_a_run_without_branches_is_unchanged(tmp_path: Path) -> None:
    run(tmp_path, "p", "base", PARENT)
    (curve,) = load([tmp_path], x=FLOPS).curves
    assert curve.recipe == "base" and curve.compute.tolist() == [0, 100, 200, 300, 400] and curve.origin == 0


def test_a_branch_alone_counts_from_its_start(tmp_path: Path) -> None:
    family(tmp_path)
    (curve,) = load([tmp_path / "runs" / "b"], x=FLOPS).curves
    assert curve.compute.tolist() == [0, 100, 200] and curve.reward.tolist() == [0.3, 0.5, 0.6]


def test_branches_of_branches_count_from_their_common_ancestor(tmp_path: Path) -> None:
    family(tmp_path)
    late = {**CHANGED, 40: 0.7}
    run(tmp_path, "c", "base@20+loss=dapo@30+kl=light", late, of("b", 30, p=20), departures={"kl": "light"})
    with_parent = {curve.recipe: curve.reward.tolist() for curve in load([tmp_path], x=FLOPS).curves}
    assert with_parent["base@20+loss=dapo@30+kl=light"] == [0.3, 0.5, 0.7], "with the parent, curves start at step 20"
    without_parent = load([tmp_path / "runs" / "b", tmp_path / "runs" / "c"], x=FLOPS).curves
    assert [curve.reward.tolist() for curve in without_parent] == [[0.5, 0.6], [0.5, 0.7]], (
        "without the parent, curves start at step 30"
    )


def test_a_branch_between_evaluations_counts_from_the_last_shared_one(tmp_path: Path) -> None:
    run(tmp_path, "p", "base", PARENT)
    run(tmp_path, "b", "base@25+loss=dapo", CHANGED, of("p", 25), departures={"loss": "dapo"})
    for curve in load([tmp_path], x=FLOPS).curves:
        assert curve.compute.tolist() == [0, 100, 200] and curve.reward[0] == 0.3


def test_every_seed_counts_from_its_own_parent(tmp_path: Path) -> None:
    for seed in (0, 1):
        pace = 10.0 + seed
        run(tmp_path, f"p{seed}", "base", PARENT, seed=seed, per_step=pace)
        change = {"departures": {"loss": "dapo"}}
        run(tmp_path, f"b{seed}", "base@20+loss=dapo", CHANGED, of(f"p{seed}", 20), seed=seed, per_step=pace, **change)
    curves = load([tmp_path], x=FLOPS).curves
    assert [curve.compute.tolist() for curve in curves] == [[0, 100, 200, 0, 110, 220]] * 2
    assert [curve.origin for curve in curves] == [210, 210]
    for fit in fit_curves(curves):
        assert fit.seeds == 2 and fit.n == 6, "per seed two evaluations of the branch and the shared start"


def test_a_branch_without_changes_is_merged_with_its_parent(tmp_path: Path) -> None:
    family(tmp_path)
    run(tmp_path, "same", "base@20", {**PARENT, 50: 0.55}, of("p", 20))
    study = load([tmp_path], x=FLOPS)
    curves = {curve.recipe: curve for curve in study.curves}
    assert sorted(curves) == ["base@20", "base@20+loss=dapo"]
    assert curves["base@20"].reward.tolist() == [0.3, 0.4, 0.5, 0.55], "the longer of the two runs is used"
    assert any("left out, because another run has the same curve" in line for line in study.shown)
    fresh = run(tmp_path, "fresh", "base@20+fresh", PARENT, {**of("p", 20), "optimizer": "fresh"})
    assert fresh.exists() and len(load([tmp_path], x=FLOPS).curves) == 3


def test_unrelated_runs_are_not_compared_with_branches(tmp_path: Path) -> None:
    family(tmp_path)
    run(tmp_path, "other", "other", PARENT)
    with pytest.raises(UserError, match="runs/other: not related to the other runs, which branch"):
        load([tmp_path], x=FLOPS)


def test_branches_without_a_shared_evaluation_are_refused(tmp_path: Path) -> None:
    late = {30: 0.4, 40: 0.5}
    run(tmp_path, "p", "base", late)
    run(tmp_path, "b", "base@20+loss=dapo", late, of("p", 20), departures={"loss": "dapo"})
    with pytest.raises(UserError, match="no evaluation up to step 20"):
        load([tmp_path], x=FLOPS)
