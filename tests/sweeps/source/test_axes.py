"""Tests of axes that are not cumulative compute (row numbers, compute per step, no step), and of unknown formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.source import load
from tests.paths import ROOT

COMPUTE_PER_STEP = (900, 950, 910, 990, 905, 930, 901, 940)


def history(path: Path, **columns: Sequence[float]) -> Path:
    rows = zip(*columns.values(), strict=True)
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return path


REWARD = tuple(step / 10 for step in range(1, 9))


def test_x_order_numbers_the_rows(tmp_path: Path) -> None:
    log = history(tmp_path / "a.jsonl", _step=(0,) * 8, acc=REWARD)
    (curve,) = load([log], metric="acc", x="order").curves
    assert curve.axis == "order" and curve.compute.tolist() == list(range(1, 9))
    assert curve.reward.tolist() == list(REWARD)
    assert any(
        "order numbers the values in the order of logging, which is not compute" in note for note in curve.warnings
    )
    table = tmp_path / "b.csv"
    table.write_text("recipe,seed,reward\n" + "".join(f"{r},{s},0.{i}\n" for i in (3, 4) for r in "xy" for s in (1, 2)))
    for c in load([table], x="order").curves:  # the rows of each run are numbered separately
        assert sorted(zip(c.seed, c.compute, strict=True)) == [("1", 1), ("1", 2), ("2", 1), ("2", 2)]
        assert any("order numbers the rows from top to bottom, which is not compute" in note for note in c.warnings)
    table.write_text("grpo,dapo\n" + "0.3,30\n" * 3)
    assert {c.recipe for c in load([table], x="order", y="all").curves} == {"grpo", "dapo"}
    table.write_text("order,reward\n5,0.1\n7,0.2\n")  # a column named order is used as the axis
    assert load([table], x="order").curves[0].compute.tolist() == [5, 7]
    chart = tmp_path / "chart.csv"
    chart.write_text("Step,a - acc,a - acc__MIN,a - acc__MAX\n10,0.1,0.1,0.1\n20,0.2,0.2,0.2\n")
    assert load([chart], x="order").curves[0].compute.tolist() == [1, 2]


def test_x_order_numbers_the_evaluations_of_our_runs() -> None:
    for c in load([ROOT / "examples" / "study"], x="order").curves:
        for seed in set(c.seed):
            assert c.compute[c.seed == seed].tolist() == list(range(1, sum(c.seed == seed) + 1))
        assert any("which is not compute" in note for note in c.warnings)


def test_compute_per_step_gives_a_warning_and_can_be_summed(tmp_path: Path) -> None:
    log = history(tmp_path / "a.jsonl", _step=range(1, 9), acc=REWARD, took=COMPUTE_PER_STEP, same=(5,) * 8)
    for name in ("took", "same"):
        (curve,) = load([log], metric="acc", x=name).curves
        assert any(
            "looks like the compute of each step, not the total so far" in note and f"--x sum:{name}" in note
            for note in curve.warnings
        )
    (curve,) = load([log], metric="acc", x="sum:took").curves
    assert curve.axis == "took" and curve.compute[:3].tolist() == [900, 1850, 2760] and not curve.warnings
    with pytest.raises(UserError, match="no metric nope; found _step, acc, took, same; choose with --x sum:METRIC"):
        load([log], metric="acc", x="sum:nope")
    table = tmp_path / "b.csv"
    rows = [f"{s},{t},{r}\n" for s, t, r in zip(range(8), COMPUTE_PER_STEP, REWARD, strict=True)]
    table.write_text("step,took,reward\n" + "".join(rows))
    assert any(
        "took looks like the compute of each step, not the total so far" in note
        for note in load([table], x="took").warnings
    )
    shuffled = [f"{s},{100 * s},{s / 10}\n" for s in (3, 1, 8, 2, 7, 4, 6, 5)]
    table.write_text("step,tokens,reward\n" + "".join(shuffled))
    assert not load([table], x="tokens").warnings


@pytest.mark.parametrize(("x", "named"), [(None, "acc"), ("tokens", "tokens")])
def test_values_logged_without_a_step_are_refused_by_name(tmp_path: Path, x: str | None, named: str) -> None:
    rows = [{"_step": s if x else 0, "acc": s / 10} for s in range(1, 9)]
    rows += [{"_step": 0, "tokens": t} for t in range(8)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=f"all 8 values of {named} are at step 0, .* --x order"):
        load([path], metric="acc", x=x)


def test_an_unknown_file_is_refused_with_the_formats_tried(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text("epoch 1 of 3, all is well\nepoch 2 of 3, reward is 0.5\n")
    with pytest.raises(UserError, match=r"tried as: TRL trainer state, verl console log, console log .*, table$"):
        load([path])
    path = tmp_path / "table.csv"
    path.write_text("x,y\n1,2\n")
    with pytest.raises(UserError, match="no column compute, reward; found x, y") as caught:
        load([path])
    assert "tried" not in str(caught.value)


@pytest.mark.parametrize("points", [6, 7])
def test_the_minimum_number_of_points_is_the_one_in_the_message(tmp_path: Path, points: int) -> None:
    rows = "".join(f"{10 * (i + 1)},{0.1 + 0.05 * i}\n" for i in range(points))
    path = tmp_path / "a.csv"
    path.write_text("compute,reward\n" + rows)
    (fit,) = fit_curves(load([path]).curves, workers=1)
    assert (fit.verdict == "too_few_points") == (points < 7)
    assert points == 7 or "at least 7 points, and in one run 6 distinct values of compute" in fit.reason
