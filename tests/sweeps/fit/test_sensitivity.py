"""Tests of the sensitivity table: each row equals the fit that it names, and early points off the law show up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli import main as cli
from sweeps.curve import Curve, make_curve
from sweeps.fit.fit import Fit, FitOptions, fit_curve, fit_curves
from sweeps.fit.history import history
from sweeps.fit.pooling import Pool
from sweeps.fit.sensitivity import CUT, END, MAIN, R0, ROBUST, sensitivity, signed, summary
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve

EXAMPLE = ROOT / "examples" / "curves.csv"


def with_early_bump(height: float) -> Curve:
    """Return a curve that is above the law by up to `height` around compute 1000, near its start."""
    base = curve(rng=3)
    bump = height * np.exp(-(((base.compute - 1000) / 600) ** 2)) * (base.compute > 0)
    return make_curve("bump", base.compute, base.reward + bump, base.seed)


def test_each_row_equals_the_fit_that_it_names() -> None:
    data = curve(rng=1)
    rows = {row.short: row for row in sensitivity(fit_curve(data))}
    main = fit_curve(data)
    assert main.R0 is not None
    for short, options in (
        ("as fitted", FitOptions()),
        ("cut 10%", FitOptions(min_compute=1600)),
        ("R0 +0.05", FitOptions(r0=main.R0 + 0.05)),
        ("robust", FitOptions(robust=True)),
        ("end 50%", FitOptions(max_compute=8000)),
    ):
        fit, row = fit_curve(data, options), rows[short]
        assert (row.A, row.B, row.C_mid, row.verdict, row.n) == (fit.A, fit.B, fit.C_mid, fit.verdict, fit.n)
        assert fit.A.value is not None and main.A.value is not None
        assert row.shift == fit.A.value - main.A.value
    assert {row.kind for row in rows.values()} == {MAIN, CUT, R0, ROBUST, END}


@pytest.mark.full
def test_refits_differ_from_a_pooled_fit_by_the_setting_only() -> None:
    fit, *_ = fit_curves([curve(name, rng=number) for number, name in enumerate("abc")])
    assert fit.pool is not None and fit_curve(fit.curve).A != fit.A
    assert fit_curve(fit.curve, pool=fit.pool).A == fit.A
    rows = {row.short: row for row in sensitivity(fit)}
    low, high = rows["R0 -0.05"], rows["R0 +0.05"]
    assert fit.R0_effect is not None
    assert (low.A.value, high.A.value) == fit.R0_effect.A and (low.B.value, high.B.value) == fit.R0_effect.B
    assert rows["end 75%"].A == fit_curve(fit.curve, FitOptions(max_compute=12000), pool=fit.pool).A
    assert history(fit.curve, every=8, pool=fit.pool)[-1].A == fit.A


def test_a_later_end_with_as_many_points_as_an_early_cut_has_its_own_row() -> None:
    rows = {row.short: row for row in sensitivity(fit_curve(curve(rng=1, points=21)))}
    assert rows["end 75%"].n == rows["cut 30%"].n == 32


@pytest.mark.slow
def test_A_of_a_curve_that_follows_the_law_is_stable() -> None:
    for seed in range(1, 5):
        rows = sensitivity(fit_curve(curve(rng=seed)))
        assert rows[0].kind == MAIN and rows[0].shift == 0
        assert all(row.verdict == "identifiable" and abs(row.shift or 0) < 0.01 for row in rows if row.kind == CUT)
        # Without a third of the points, A may leave its interval by a little. The refit's interval then contains it.
        text = summary(rows)
        assert "within its 95% interval" in text or "but the refit's own interval contains the A as fitted" in text
        assert "not identifiable" not in text


@pytest.mark.slow
def test_early_points_off_the_law_change_A() -> None:
    rows = sensitivity(fit_curve(with_early_bump(0.08)))
    assert rows[0].A.value is not None and rows[0].A.value > 0.63 and rows[0].verdict == "open"
    for row in rows:
        if row.short in ("cut 10%", "cut 20%", "cut 30%"):
            assert row.verdict == "identifiable" and row.A.value == pytest.approx(0.61, abs=0.005)
            assert row.shift is not None and row.shift < -0.05


@pytest.mark.full
def test_settings_that_change_nothing_have_no_row() -> None:
    data = curve(rng=1)
    # The first evaluation is at compute 0, within the window, so R0 `first` and `free` give the same fit.
    assert not {"R0 first", "R0 free", "no cut"} & {row.short for row in sensitivity(fit_curve(data))}
    cut = {row.short for row in sensitivity(fit_curve(data, FitOptions(min_compute=3200)))}
    assert {"no cut", "cut 10%", "cut 30%", "R0 free"} <= cut and "cut 20%" not in cut
    free = {row.short for row in sensitivity(fit_curve(data, FitOptions(r0="free", min_compute=3200)))}
    assert "R0 first" in free and "R0 free" not in free
    assert "robust" not in {row.short for row in sensitivity(fit_curve(data, FitOptions(robust=True)))}


def test_families_without_R0_have_no_row_for_it() -> None:
    rows = sensitivity(fit_curve(curve(rng=1), FitOptions(family="power_law")))
    assert {row.kind for row in rows} == {MAIN, CUT, ROBUST, END}


def test_too_few_points_have_few_rows() -> None:
    rows = sensitivity(fit_curve(curve(points=5, rng=1)))
    assert [row.verdict for row in rows] == ["too_few_points"] and rows[0].shift is None
    assert "not named" in summary(rows)
    # Seven positive compute values suffice for the fit and for light cuts, but not for half of the window.
    seven_points = sensitivity(fit_curve(curve(points=8, rng=1)))
    assert {row.short for row in seven_points if row.kind in (CUT, END)} == {"cut 20%"}


def test_an_impossible_R0_is_not_tried() -> None:
    rows = sensitivity(fit_curve(curve(r0=0.02, rng=1)))
    assert "R0 -0.05" not in {row.short for row in rows} and "R0 +0.05" in {row.short for row in rows}


@pytest.mark.slow
def test_the_unit_of_compute_does_not_change_the_rows() -> None:
    data = curve(rng=2)
    small = sensitivity(fit_curve(data))
    large = sensitivity(fit_curve(replace(data, compute=data.compute * 1e15)))
    assert [row.short for row in small] == [row.short for row in large]
    np.testing.assert_allclose([row.shift for row in large], [row.shift for row in small], atol=1e-5)  # type: ignore[arg-type]


def test_the_fit_itself_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a recipe in a study equal those of the recipe alone, although a study shares the spread between seeds."""
    alone = sensitivity(fit_curve(curve(rng=1)))
    fits = fit_curves([curve(rng=1), curve(recipe="other", rng=2, a=0.5)])
    made: list[FitOptions] = []

    def spy(data: Curve, options: FitOptions, pool: Pool | None) -> Fit:
        made.append(options)
        return fit_curve(data, options, pool=pool)

    monkeypatch.setattr("sweeps.fit.sensitivity.fit_curve", spy)
    assert sensitivity(fits[0]) == alone
    assert made and FitOptions() not in made


def test_signed_has_no_negative_zero() -> None:
    assert [signed(x) for x in (-0.0001, 0.0, 0.0123, -0.02)] == ["0.000", "0.000", "+0.012", "-0.020"]


@pytest.mark.slow
def test_fit_refits_only_with_the_option_sensitivity(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    header, *rows = EXAMPLE.read_text().splitlines()
    example = tmp_path / "one.csv"
    example.write_text("\n".join([header, *(row for row in rows if row.startswith("scalerl,"))]))
    assert cli.main(["fit", str(example), "--sensitivity"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("robust: points far from the curve count less") == 1 and "leaving out early points moves A by" in out
    )
    assert cli.main(["fit", str(example), "--sensitivity", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]["sensitivity"]
    assert first[0]["kind"] == "main" and {"setting", "A", "B", "C_mid", "verdict", "shift", "n"} <= set(first[1])

    def forbidden(*_: object) -> None:
        raise AssertionError("not asked for")

    monkeypatch.setattr("sweeps.fit.sensitivity.sensitivity", forbidden)
    assert cli.main(["fit", str(example), "--json"]) == 0
    assert "sensitivity" not in json.loads(capsys.readouterr().out)[0]


def test_the_published_procedure_has_no_sensitivity(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", str(EXAMPLE), "--sensitivity", "--method", "scalerl-a5"]) == 1
    assert capsys.readouterr().err.startswith("scalerl: --sensitivity")
