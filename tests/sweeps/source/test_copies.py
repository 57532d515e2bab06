"""Tests of copied runs: a run that a source has twice counts once, with a warning that names both."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweeps.run.journal import Journal
from sweeps.source import load
from tests.sweeps.source.test_trackers import run_log

RISING = [0.1, 0.21, 0.33, 0.42, 0.5, 0.55]


def history(path: Path, runs: Sequence[tuple[str, str, str, Sequence[float]]], first: int = 1) -> Path:
    """Write a history table of W&B from the id, recipe, seed and rewards of its runs."""
    rows = [
        f"{run},{recipe},{seed},{step},{1000 * step},{reward}"
        for run, recipe, seed, rewards in runs
        for step, reward in enumerate(rewards, start=first)
    ]
    path.write_text("\n".join(["run_id,recipe,seed,_step,train/num_tokens,eval/reward", *rows]) + "\n")
    return path


def seeds(path: Path) -> list[str]:
    (curve,) = load([path]).curves
    return list(dict.fromkeys(curve.seed.tolist()))


def test_a_copied_run_of_a_tracker_counts_once(tmp_path: Path) -> None:
    runs = [("x", "a", "0", RISING), ("y", "a", "0", RISING), ("z", "b", "0", RISING)]
    path = history(tmp_path / "runs.csv", runs)
    study = load([path])
    assert [(curve.recipe, curve.seed.tolist()) for curve in study.curves] == [("a", ["0"] * 6), ("b", ["0"] * 6)]
    assert study.all_warnings == [
        f"{path}: left out 1 run with exactly the points of another run of their recipe, because a run counts once: "
        "1 of a (y (seed 0) = x (seed 0))"
    ]
    assert len(study.foreign) == 3, "adopt decides on each run"


def test_a_copied_folder_of_wandb_counts_once(tmp_path: Path) -> None:
    for seed in (1, 2):
        run_log(tmp_path / "wandb", seed)
    shutil.copytree(tmp_path / "wandb", tmp_path / "copy")
    study = load([tmp_path / "wandb", tmp_path / "copy"])
    (alone,), (curve,) = load([tmp_path / "wandb"]).curves, study.curves
    assert (curve.seed.tolist(), curve.reward.tolist()) == (alone.seed.tolist(), alone.reward.tolist())
    (warning,) = study.all_warnings
    assert warning.startswith(f"{tmp_path / 'copy'}: left out 2 runs with exactly the points")
    assert f"2 of grpo (grpo-1 ({tmp_path / 'copy'}) = grpo-1 ({tmp_path / 'wandb'}); grpo-2" in warning


def test_a_copied_run_whose_name_has_the_seed_counts_once(tmp_path: Path) -> None:
    rows = [f"{1000 * step},{reward},{reward + 0.01}" for step, reward in enumerate(RISING)]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "runs.csv").write_text("\n".join(["compute,grpo-seed1,grpo-seed2", *rows]) + "\n")
    study = load([tmp_path / "one" / "runs.csv", tmp_path / "two" / "runs.csv"])
    (curve,) = study.curves
    assert curve.seed.tolist() == ["1"] * 6 + ["2"] * 6
    assert len(study.all_warnings) == 1 and "2 of grpo (" in study.all_warnings[0]


@pytest.mark.parametrize(
    ("second_seed", "rewards", "counted"),
    [
        ("7", RISING, ["0"]),
        ("7", [0.0] * 6, ["0", "7"]),
        ("7", [0.1, 0.2, 0.3, 0.4], ["0", "7"]),
        ("0", [0.0] * 6, ["0"]),
        ("0", [0.1, 0.2], ["0"]),
    ],
    ids=["rising", "constant", "short", "constant, same seed", "short, same seed"],
)
def test_equal_runs_of_two_seeds_are_one_only_if_not_by_chance(
    second_seed: str, rewards: list[float], counted: list[str], tmp_path: Path
) -> None:
    assert (
        seeds(history(tmp_path / "runs.csv", [("x", "a", "0", rewards), ("y", "a", second_seed, rewards)])) == counted
    )


def test_runs_without_seeds_are_one_only_if_not_by_chance(tmp_path: Path) -> None:
    assert seeds(history(tmp_path / "copies.csv", [("x", "a", "", RISING), ("y", "a", "", RISING)])) == ["run 0"]
    flat = [0.0] * 6
    assert seeds(history(tmp_path / "flat.csv", [("x", "a", "", flat), ("y", "a", "", flat)])) == ["run 0", "run 1"]


def test_different_runs_of_one_seed_are_kept_with_the_warning_of_tables(tmp_path: Path) -> None:
    higher = [reward + 0.01 for reward in RISING]
    path = history(tmp_path / "runs.csv", [("x", "a", "0", RISING), ("y", "a", "0", higher)])
    assert seeds(path) == ["0", "0#2"]
    table = tmp_path / "table.csv"
    rows = [f"a,0,{1000 * step},{r}" for rewards in (RISING, higher) for step, r in enumerate(rewards, start=1)]
    table.write_text("\n".join(["recipe,seed,compute,reward", *rows]) + "\n")
    assert load([path]).all_warnings == load([table]).all_warnings
    assert "seed 0: 6 compute values have two different rewards" in load([path]).all_warnings[0]
    split = tmp_path / "split.csv"
    history(split, [("x", "a", "0", RISING)])
    late = history(tmp_path / "late.csv", [("y", "a", "0", higher)], first=7)
    (curve,) = load([split, late]).curves
    assert curve.warnings == (
        "seed 0: several runs have this seed; do two runs share one name? give them seeds, or use --by",
    )


def test_journals_of_one_recipe_and_seed_have_the_warning_of_tables(tmp_path: Path) -> None:
    """A study may have a run twice, as after `scalerl adopt` of a corrected table."""
    corrected = [*RISING[:-1], RISING[-1] + 0.01]
    for run, rewards in (("one", RISING), ("two", corrected)):
        journal = Journal(tmp_path / "runs" / run)
        journal.header(recipe="a", seed=0, run=run, curve="c", device="cpu")
        for step, reward in enumerate(rewards, start=1):
            journal.record("eval", step, {"eval/heldout/pass_rate": reward, "compute/flops": 1000.0 * step})
        journal.close()
    curve = load([tmp_path], x="compute/flops").curves[0]
    assert [note for note in curve.warnings if "seed" in note] == [
        f"seed 0: 1 compute value has two different rewards (first at {1000 * len(RISING)}: {RISING[-1]:.4g} and "
        f"{corrected[-1]:.4g}); do two runs share one name? give them seeds, or use --by"
    ]
