"""Tests of the published procedure (arXiv 2510.13786, A.5): reference outputs, edges of its grids, and no intervals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli import main as cli
from sweeps.curve import Curve, make_curve
from sweeps.errors import UserError
from sweeps.fit.fit import FitOptions
from sweeps.fit.published import A_GRID, C_MID_GRID, fit_literal
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve, law

EXAMPLE = ROOT / "examples" / "curves.csv"
PUBLISHED_OPTIONS = FitOptions(r0=0.3, min_compute=1500.0)
# Every tenth value of the grid, for speed.
COARSE = C_MID_GRID[::10]


def noiseless(a: float, b: float, c_mid: float, step: float, end: float) -> Curve:
    """Return a curve without noise, evaluated every `step` GPU-hours up to `end`, with R0 0.3."""
    compute = step * np.arange(1, int(end / step) + 1)
    return make_curve("x", compute, law(compute, a, b, c_mid, 0.3))


# Curves of arXiv 2510.13786, Table 1, fitted on the first half of their budget, and the results of an independent
# implementation of the procedure: n, A, B, C_mid, rmse.
REFERENCE = [
    pytest.param((0.610, 1.92, 2542, 150, 8000), (44, 0.610, 1.900, 2518, 0.00083), id="ScaleRL"),
    pytest.param((0.645, 1.89, 11272, 700, 25000), (33, 0.640, 1.915, 10982, 0.00108), id="32k"),
    pytest.param((0.710, 1.65, 4242, 600, 22500), (35, 0.705, 1.693, 4130, 0.00148), id="Scout"),
    pytest.param((0.645, 1.70, 10909, 1351, 50000), (36, 0.645, 1.709, 10982, 0.00054), id="bs2048"),
    pytest.param((0.615, 1.09, 1675, 150, 8000), (44, 0.620, 1.048, 1712, 0.00028), id="code"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "found"), every(3, REFERENCE, pytest.mark.full))
def test_reference_outputs(planted: tuple[float, ...], found: tuple[float, ...]) -> None:
    fit = fit_literal(noiseless(*planted), PUBLISHED_OPTIONS)
    n, a, b, c_mid, rmse = found
    assert fit.n == n and fit.A.value == a
    assert fit.B.value == pytest.approx(b, abs=6e-4)
    assert fit.C_mid.value == pytest.approx(c_mid, abs=0.6)
    assert fit.rmse == pytest.approx(rmse, abs=6e-6)
    assert fit.verdict == "open" and not fit.identifiable and "gives no interval" in fit.reason
    assert (fit.A.low, fit.A.high, fit.A_total, fit.draws) == (None, None, (None, None), None)


def test_the_grids_are_the_published_ones() -> None:
    assert len(A_GRID) == 71 and A_GRID[:2].tolist() == [0.45, 0.455] and A_GRID[-1] == 0.8
    assert len(C_MID_GRID) == 100 and (C_MID_GRID[0], C_MID_GRID[-1]) == (100, 40000)
    assert np.diff(C_MID_GRID) == pytest.approx(403.03, abs=0.01)


def test_a_ceiling_above_the_grid_is_clipped_and_flagged() -> None:
    """A GSM8K curve ends near 0.93, but the published grid of A ends at 0.80."""
    gsm8k = noiseless(0.93, 1.9, 2500, 250, 16000)
    fit = fit_literal(gsm8k, PUBLISHED_OPTIONS, c_mid_grid=COARSE)
    assert fit.A.value == 0.8 and fit.verdict == "at_bound"
    assert "A = 0.8, grid 0.45 to 0.8" in fit.reason
    assert any("edge of its grid (A = 0.8" in note for note in fit.warnings)
    low = fit_literal(noiseless(0.4, 1.9, 2500, 250, 16000), PUBLISHED_OPTIONS, c_mid_grid=[2000.0, 2500.0, 3000.0])
    assert low.A.value == 0.45 and low.verdict == "at_bound" and "A = 0.45, grid" in low.reason
    wider = fit_literal(gsm8k, PUBLISHED_OPTIONS, a_grid=np.linspace(0.8, 1.0, 41), c_mid_grid=[2000.0, 2500.0, 3000.0])
    assert wider.A.value == pytest.approx(0.93) and wider.verdict == "open"
    assert wider.C_mid.value == 2500 and wider.B.value == pytest.approx(1.9)


def test_C_mid_at_the_edge_of_its_grid_is_flagged() -> None:
    fit = fit_literal(
        noiseless(0.6, 1.9, 2500, 250, 16000), PUBLISHED_OPTIONS, c_mid_grid=[500.0, 1000.0, 1500.0, 2000.0]
    )
    assert fit.verdict == "at_bound" and "C_mid = " in fit.reason and "A = " not in fit.reason


def test_compute_in_another_unit_is_refused_with_the_remedy() -> None:
    data = curve(points=17)
    for unit in (1e15, 1e-6):
        fit = fit_literal(make_curve("x", data.compute * unit, data.reward))
        assert fit.verdict == "at_bound" and fit.A.value is None
        assert "in GPU-hours; run without --method scalerl-a5" in fit.reason


def test_unit_and_spacing_of_the_grid_are_noted() -> None:
    fit = fit_literal(noiseless(0.6, 1.9, 2500, 500, 16000), PUBLISHED_OPTIONS, a_grid=[0.55, 0.6, 0.65])
    (note,) = fit.warnings
    assert "only known to a step of its grid, 403 GPU-hours (compute here: compute); none" in note


def test_the_window_and_a_shared_asymptote_are_respected() -> None:
    small_grids = {"a_grid": [0.55, 0.6, 0.65], "c_mid_grid": COARSE}
    data = noiseless(0.6, 1.9, 2500, 500, 16000)
    everything = fit_literal(data, FitOptions(r0=0.3), **small_grids)  # type: ignore[arg-type]
    assert everything.n == 32 and any("below 1,500 GPU-hours" in note for note in everything.warnings)
    part = fit_literal(data, FitOptions(r0=0.3, min_compute=1500, max_compute=8000), **small_grids)  # type: ignore[arg-type]
    assert part.n == 14 and part.window == (1500, 8000)
    assert not any("1,500" in note for note in part.warnings)
    fixed = fit_literal(data, FitOptions(r0=0.3, asymptote=0.62), c_mid_grid=COARSE)
    assert fixed.A.value == 0.62 and fixed.verdict == "open"


def test_r0_is_given_or_the_first_evaluation_and_never_fitted() -> None:
    data = curve(points=17, seeds=2, end=8000.0)
    small_grids = {"a_grid": [0.55, 0.6, 0.65], "c_mid_grid": COARSE}
    fit = fit_literal(data, **small_grids)  # type: ignore[arg-type]
    assert fit.R0_source == "first" and pytest.approx(data.reward[data.compute == 0].mean()) == fit.R0
    assert fit.n == 32 and any("2 seeds" in note for note in fit.warnings)
    later = make_curve("x", data.compute[1:17], data.reward[1:17])
    assert any("the reward at 500 is taken as R0" in note for note in fit_literal(later, **small_grids).warnings)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"--r0 free: .* give a number, or first"):
        fit_literal(data, FitOptions(r0="free"))
    with pytest.raises(UserError, match="--r0 3: outside"):
        fit_literal(data, FitOptions(r0=3.0))
    with pytest.raises(UserError, match="no points above compute 0 in the window"):
        fit_literal(data, FitOptions(min_compute=1e9))


@pytest.mark.parametrize("grid", [[], [0.6, 0.5], [0.5, np.nan], [[0.5]]])
def test_an_invalid_grid_is_refused(grid: list[float]) -> None:
    with pytest.raises(UserError, match=r"a_grid: .* give at least one, finite and increasing"):
        fit_literal(curve(), a_grid=grid)
    with pytest.raises(UserError, match="c_mid_grid: 0 is not positive"):
        fit_literal(curve(), c_mid_grid=[0.0, 1.0])


@pytest.mark.parametrize(
    "reward",
    [
        np.full(8, 0.3),
        np.linspace(0.9, 0.1, 8),
        np.array([0.0, 1.0] * 4),
        np.array([0.3] * 7 + [1.0]),
        1e90 * np.linspace(0.1, 0.9, 8),
    ],
)
def test_no_curve_gives_a_traceback_or_a_numpy_warning(reward: np.ndarray) -> None:
    compute = np.linspace(500.0, 4000.0, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fit_literal(make_curve("x", compute, reward), a_grid=A_GRID[::10], c_mid_grid=COARSE)
    assert not fit.identifiable
    json.dumps(fit.to_json(), allow_nan=False)


def test_grid_cells_whose_fit_fails_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("Optimal parameters not found")

    monkeypatch.setattr("scipy.optimize.curve_fit", fails)
    fit = fit_literal(curve(), a_grid=[0.5, 0.6], c_mid_grid=COARSE)
    assert fit.verdict == "degenerate" and f"{2 * len(COARSE)} of {2 * len(COARSE)} cells" in fit.warnings[-1]


def test_three_points_are_too_few() -> None:
    fit = fit_literal(make_curve("x", [0.0, 500.0, 1000.0, 1500.0], [0.3, 0.4, 0.5, 0.55]))
    assert fit.verdict == "too_few_points" and fit.A.value is None


@pytest.mark.full
def test_the_method_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.csv"
    rows = [line for line in EXAMPLE.read_text().splitlines() if line.startswith(("recipe,", "scalerl,scalerl,0"))]
    path.write_text("\n".join(rows) + "\n")
    command = ["fit", str(path), "--method", "scalerl-a5", "--min-compute", "1500", "--max-compute", "8000"]
    assert cli.main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    (entry,) = json.loads(captured.out)
    assert entry["verdict"] == "open" and entry["A"]["low"] is None and 0.55 < entry["A"]["value"] < 0.65
    assert entry["n"] == 14
    assert cli.main(command) == 0
    captured = capsys.readouterr()
    assert "95% intervals" not in captured.out and "no intervals" in captured.out
    assert cli.main([*command, "--r0", "free"]) == 1
    assert "does not fit R0" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", str(path), "--method", "guess"])
    assert stop.value.code == 2
