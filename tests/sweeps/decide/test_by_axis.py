"""Tests of rankings on several axes: another recipe may lead per hour than per step, and the output says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli.main import main
from sweeps.curve import DEVICE_HOURS, make_curve
from sweeps.decide.by_axis import by_axis
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, fit_curves
from tests.paths import ROOT
from tests.sweeps.fit.simulate import law

STEPS = np.linspace(0, 400, 41)


def fits(axis: str, hours_per_step: dict[str, float]) -> list[Fit]:
    """Fit two recipes. `long` learns more per step than `short`. Every axis except `step` is in hours."""
    curves = []
    for number, (recipe, c_mid) in enumerate((("long", 60.0), ("short", 110.0))):
        reward = law(STEPS, 0.7, 1.6, c_mid, 0.2) + 0.004 * np.random.default_rng(number).standard_normal(41)
        curves.append(make_curve(recipe, STEPS * (1 if axis == "step" else hours_per_step[recipe]), reward, axis=axis))
    return fit_curves(curves)


def test_axes_disagree_if_a_step_of_the_leader_costs_more() -> None:
    costly_long = {"long": 0.06, "short": 0.02}
    result = by_axis({axis: fits(axis, costly_long) for axis in ("step", DEVICE_HOURS)}, rate=2.5)
    assert not result.agreed and [column.name for column in result.columns] == ["steps", "device hours", "cost"]
    assert [column.first.recipe for column in result.columns] == ["long", "short", "short"]
    steps, hours, cost = result.columns
    assert (steps.compute, hours.compute, cost.compute) == pytest.approx((400, 8.0, 20.0))
    priced = [
        (row.C.value, other.C.value) for row, other in zip(cost.rows, hours.rows, strict=True) if row.C and other.C
    ]
    assert priced and all(money == pytest.approx(2.5 * spent) for money, spent in priced)
    assert result.sentence.startswith("which recipe is ahead depends on the axis: long at equal steps (P = ")
    assert "short at equal device hours and cost (P > 0.99)" in result.sentence
    place = hours.row("long")
    assert place is not None and place[0] == 2 and hours.row("another") is None


def test_axes_agree_if_steps_cost_the_same() -> None:
    same = dict.fromkeys(("long", "short"), 0.02)
    result = by_axis({axis: fits(axis, same) for axis in ("step", "gpu_hours")})
    assert result.agreed and result.sentence.startswith(
        "the same recipe is ahead on every axis: long at equal steps and gpu_"
    )
    assert re.search(r"\(P (> 0\.99|= 0\.\d\d or higher)\)$", result.sentence), result.sentence


def test_wrong_axes_and_rates_are_refused() -> None:
    known = {"step": fits("step", {})}
    for rate, message in ((2.0, "no axis in hours among step"), (0.0, "positive"), (float("nan"), "positive")):
        with pytest.raises(UserError, match=message):
            by_axis(known, rate)
    with pytest.raises(UserError, match="no recipe has evaluations enough"):
        by_axis({"step": fit_curves([make_curve("one", [0, 1], [0.1, 0.2])])})


def test_rank_by_axes_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = str(ROOT / "examples" / "study")
    assert main(["rank", study, "--axes", "--rate", "2", "--json"]) == 0
    ranking_json = json.loads(capsys.readouterr().out)["by_axis"]
    assert [column["axis"] for column in ranking_json["columns"]] == [
        "step", "compute/virtual_device_hours", "compute/flops", "cost",
    ]  # fmt: skip
    assert ranking_json["columns"][3]["compute"] == pytest.approx(2 * ranking_json["columns"][1]["compute"])
    table = tmp_path / "runs.csv"
    rows = ["recipe,compute,hours,reward"]
    for fit in fits("step", {}):
        rows += [
            f"{fit.recipe},{x:g},{x * (0.06 if fit.recipe == 'long' else 0.02):g},{y:g}"
            for x, y in zip(fit.curve.compute, fit.curve.reward, strict=True)
        ]
    table.write_text("\n".join(rows))
    assert main(["rank", str(table), "--axes", "compute,hours"]) == 0
    out = capsys.readouterr().out
    assert "which recipe is ahead depends on the axis: " in out and "at 400 compute" in out and "1. 0." in out
    for wrong, told in (
        (["--axes"], "name its columns"),
        (["--rate", "2"], "for --axes"),
        (["--axes", "days"], "no column days"),
        (["--axes", "hours", "--max-compute", "3"], "cuts no other"),
    ):
        assert main(["rank", str(table), *wrong]) == 1
        assert told in capsys.readouterr().err
