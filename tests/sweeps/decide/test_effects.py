"""Tests of the effects of axes, estimated from a grid of recipes."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli.main import main
from sweeps.curve import Curve, make_curve
from sweeps.decide.effects import (
    OWN,
    _central_cell,
    _choose_next_cells,
    _Design,
    _effects_posterior,
    effects,
    levels_of_recipes,
)
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from tests.paths import ROOT
from tests.printed import check_printed
from tests.sweeps.fit.simulate import law

PAGE = ROOT / "docs/guide/effects.md"

AXES = tuple("abcdefgh")


def fraction() -> list[dict[str, str]]:
    """Return a 2^(8-4) fractional factorial: no main effect is aliased with another or with an interaction of two."""
    cells = []
    for n in range(16):
        a, b, c, d = ((n >> k) & 1 for k in range(4))
        levels = (a, b, c, d, a ^ b ^ c, a ^ b ^ d, a ^ c ^ d, b ^ c ^ d)
        cells.append({axis: ("new" if level else OWN) for axis, level in zip(AXES, levels, strict=True)})
    return cells


def solved(effect: Sequence[float], sd: float, interaction_sd: float, number: int) -> np.ndarray:
    rng = np.random.default_rng((8, number))
    cells = fraction()
    sums = [sum(e for e, axis in zip(effect, AXES, strict=True) if cell[axis] == "new") for cell in cells]
    y = 0.6 + np.array(sums) + sd * rng.standard_normal(16) + interaction_sd * rng.standard_normal(16)
    design = _Design.of(cells, {axis: [OWN, "new"] for axis in AXES}, ())
    return _effects_posterior(design, y, sd**2 * np.eye(16), 1.0).draws


def test_effects_of_0_02_are_detected_and_intervals_have_their_coverage() -> None:
    """Eight axes of two levels in sixteen recipes. The value of each recipe has a standard error of 0.008."""
    truth = (0.02, -0.02, 0.02, 0.0, 0.0, 0.0, 0.0, -0.02)
    inside, detected, false_alarms = [], [], []
    for number in range(40):
        low, high = np.quantile(solved(truth, 0.008, 0.003, number), [0.025, 0.975], axis=1)
        inside += list((low <= truth) & (truth <= high))
        excludes_zero = (low > 0) | (high < 0)
        detected += list(excludes_zero[np.array(truth) != 0])
        false_alarms += list(excludes_zero[np.array(truth) == 0])
    assert np.mean(inside) >= 0.92 and np.mean(detected) > 0.75 and np.mean(false_alarms) <= 0.08


def test_without_effects_all_estimates_shrink_to_zero() -> None:
    draws = solved((0.0,) * 8, 0.03, 0.0, 1)
    least_squares_sd = 0.03 * np.sqrt(4 / 16)
    assert (
        np.abs(np.median(draws, axis=1)).max() < least_squares_sd and draws.std(axis=1).max() < 1.2 * least_squares_sd
    )


def grid(number: int = 0, interaction: float = 0.0) -> list[Curve]:
    """Two axes: x lowers A by 0.1, y takes twice the compute. Both together add `interaction` to A."""
    rng = np.random.default_rng(number)
    compute, curves = np.linspace(0, 8, 33), []
    for x in (False, True):
        for y in (False, True):
            a = 0.7 - 0.1 * x + interaction * (x and y)
            label = "base" + "+loss=x" * x + "+async=y" * y
            reward = np.concatenate(
                [law(compute, a, 1.8, 1.6 if y else 0.8, 0.2) + 0.006 * rng.standard_normal(33) for _ in range(2)]
            )
            curves.append(make_curve(label, np.tile(compute, 2), reward, ["0"] * 33 + ["1"] * 33))
    return curves


def test_effects_of_a_grid_follow_from_its_labels() -> None:
    result = effects(fit_curves(grid()))
    by_level = {(axis_effect.axis, axis_effect.level): axis_effect for axis_effect in result.effects}
    assert by_level.keys() == {("loss", "x"), ("async", "y")} and result.cells == 4 and not result.left_out
    loss, slower = by_level["loss", "x"], by_level["async", "y"]
    assert loss.against == OWN and loss.cells == 2
    assert loss.A.value == pytest.approx(-0.1, abs=0.03) and loss.p_positive < 0.03
    assert slower.A.low is not None and slower.A.high is not None and slower.A.low < 0 < slower.A.high
    assert slower.compute is not None and slower.compute.value == pytest.approx(2, rel=0.25)
    assert loss.compute is not None and loss.compute.low is not None and loss.compute.low < 1


@pytest.mark.slow
def test_interactions_are_estimated_on_request() -> None:
    plain = effects(fit_curves(grid(interaction=0.1)))
    result = effects(fit_curves(grid(interaction=0.1)), [("loss", "async")])
    both = next(axis_effect for axis_effect in result.effects if axis_effect.axis == "loss:async")
    assert both.level == "x:y" and both.against == f"{OWN}:{OWN}" and both.cells == 1
    assert (both.A.value or 0) > 0.03 and both.p_positive > 0.8
    assert {axis_effect.axis for axis_effect in plain.effects} == {"loss", "async"}
    with pytest.raises(UserError, match="--interaction lr: no axis that varies here; those are async, loss"):
        effects(fit_curves(grid()), [("loss", "lr")])


@pytest.mark.parametrize("again", [("loss", "async"), ("async", "loss")])
def test_a_repeated_interaction_counts_once(again: tuple[str, str]) -> None:
    fits = fit_curves(grid(interaction=0.1))
    assert effects(fits, [("loss", "async"), again]) == effects(fits, [("loss", "async")])


def test_aliased_axes_are_noted_and_short_recipes_are_left_out() -> None:
    curves = [recipe_curve for recipe_curve in grid() if recipe_curve.recipe in ("base", "base+loss=x+async=y")]
    third = make_curve("base+z=1", curves[0].compute, curves[0].reward, curves[0].seed)
    short = make_curve("base+loss=short", [0.0, 1.0], [0.2, 0.3])
    result = effects(fit_curves([*curves, third, short]))
    assert result.left_out == ("base+loss=short",)
    assert result.notes == ("loss and async vary together, so the grid cannot separate their effects",)
    with pytest.raises(UserError, match="2 recipes can be read"):
        effects(fit_curves(curves))


def test_the_next_cell_separates_axes_that_vary_together() -> None:
    cells = fraction()[:12]
    axes = {axis: [OWN, "new"] for axis in AXES}
    design = _Design.of(cells, axes, ())
    one = _effects_posterior(design, np.random.default_rng(0).standard_normal(12) * 0.02 + 0.6, 1e-4 * np.eye(12), 1.0)
    next_cells = _choose_next_cells(cells, axes, (), one, 1e-4)
    assert len(next_cells) == 3 and all(
        0 < next_cell.gain < 1 and next_cell.levels not in cells for next_cell in next_cells
    )
    assert next_cells[0].gain > 0.8 * max(next_cell.gain for next_cell in next_cells)
    # If two axes have the same level in every cell, the next cell gives them different levels.
    alike = [{**cell, "b": cell["a"]} for cell in cells]
    one = _effects_posterior(_Design.of(alike, axes, ()), np.linspace(0.58, 0.62, 12), 1e-4 * np.eye(12), 1.0)
    first = _choose_next_cells(alike, axes, (), one, 1e-4)[0].levels
    assert first["a"] != first["b"]


def test_labels_and_factors_are_axes() -> None:
    assert levels_of_recipes(["s+loss=dapo", "s", "t+fast"], [{}, {}, {}]) == [
        {"recipe": "s", "loss": "dapo", "fast": OWN},
        {"recipe": "s", "loss": OWN, "fast": OWN},
        {"recipe": "t", "loss": OWN, "fast": "yes"},
    ]
    assert levels_of_recipes(["s size=1"], [{"size": "1"}]) == [{"recipe": "s", "size": "1"}]
    assert levels_of_recipes(["my run+loss=dapo size=1 set=a b"], [{"size": "1", "set": "a b"}]) == [
        {"recipe": "my run", "size": "1", "set": "a b", "loss": "dapo"}
    ], "a label and a value may have spaces"


def test_effects_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "grid.csv"
    rows = [
        f"{recipe_curve.recipe},{seed},{c},{r}"
        for recipe_curve in grid()
        for seed, c, r in zip(recipe_curve.seed, recipe_curve.compute, recipe_curve.reward, strict=True)
    ]
    table.write_text("recipe,seed,compute,reward\n" + "\n".join(rows))
    assert main(["effects", str(table), "-o", str(tmp_path / "effects.svg")]) == 0
    shown = capsys.readouterr().out
    assert "loss" in shown and "async" in shown and "averages over 4 recipes with 95% intervals; " in shown
    assert (tmp_path / "effects.svg").read_text().startswith("<?xml")
    assert main(["effects", str(table), "--interaction", "loss:async", "--json"]) == 0
    printed_json = json.loads(capsys.readouterr().out)
    assert [effect_row["axis"] for effect_row in printed_json["effects"]] == ["async", "loss", "loss:async"]
    with pytest.raises(SystemExit, match="2"):
        main(["effects", str(table), "--interaction", "loss"])
    assert "'loss' is no pair of axes" in capsys.readouterr().err


def test_settings_are_part_of_their_axis() -> None:
    recipes = ["s", "s+kl=fixed+kl.coefficient=0.2", "s+kl.coefficient=0.3+batch.prompts=8", "s+kl=none"]
    cells = levels_of_recipes(recipes, [{}] * 4)
    assert [cell["kl"] for cell in cells] == [OWN, "fixed coefficient=0.2", "coefficient=0.3", "none"]
    assert [cell["batch.prompts"] for cell in cells] == [OWN, OWN, "8", OWN]
    assert all(cell.keys() == {"recipe", "kl", "batch.prompts"} for cell in cells)


def test_one_change_at_a_time_points_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An axis changed together with its setting is one change. A cell with two changes makes the study a grid."""
    labels = ["s", "s+loss=dapo", "s+kl=fixed+kl.coefficient=0.2"]
    assert (
        _central_cell(levels_of_recipes(labels, [{}] * 3)) == 0
        and _central_cell(levels_of_recipes(labels[::-1], [{}] * 3)) == 2
    )
    assert _central_cell(levels_of_recipes([*labels, "s+loss=dapo+kl=none"], [{}] * 4)) is None
    path, rows = tmp_path / "one.csv", ["recipe,seed,compute,reward"]
    for label, curve in zip(labels, grid(), strict=False):
        values = zip(curve.seed, curve.compute, curve.reward, strict=True)
        rows += [f"{label},{seed},{c},{r}" for seed, c, r in values]
    path.write_text("\n".join(rows))
    assert main(["effects", str(path), "--json"]) == 0
    printed_json = json.loads(capsys.readouterr().out)
    said = "one change at a time: each recipe differs from s in one axis"
    assert printed_json["effects"] == [] and printed_json["notes"][0].startswith(said) and printed_json["next"]
    assert main(["effects", str(path)]) == 0
    shown, warned = capsys.readouterr()
    assert shown.startswith(said) and "use scalerl compare" in shown and "to run next" in shown and said not in warned
    assert main(["effects", str(path), "-o", str(tmp_path / "no.svg")]) == 1
    assert "nothing to draw; one change" in capsys.readouterr().err and not (tmp_path / "no.svg").exists()


def test_the_example_grid_equals_the_output_of_its_script(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "make_grid.py"), run_name="__main__")
    assert capsys.readouterr().out == (ROOT / "examples" / "grid.csv").read_text()


@pytest.mark.slow
def test_the_page_shows_the_output_of_effects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    pages = re.findall(r"```\n\$ scalerl effects (\S+)\n([^`]*)\n```", PAGE.read_text())
    assert len(pages) == 2
    for source, printed in pages:
        assert main(["effects", source]) == 0
        check_printed(capsys.readouterr().out, printed)
