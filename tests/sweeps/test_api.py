"""Tests of sweeps.api, which offers the commands as functions for notebooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from sweeps import api
from sweeps.cli.main import main
from sweeps.errors import UserError
from tests.paths import ROOT

CURVES = str(ROOT / "examples" / "curves.csv")
FRAME = pd.read_csv(CURVES)


@pytest.fixture(scope="module")
def fits() -> api.Fits:
    return api.fit(CURVES, max_compute=8000)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check_same(ours: Any, theirs: Any) -> None:
    assert json.loads(json.dumps(ours)) == theirs


CASES = {
    "fit": (("--robust", "--r0", "free"), {"robust": True, "r0": "free"}),
    "rank": (("--budget", "16000", "--margin", "0.05"), {"budget": 16000.0, "margin": 0.05}),
    "plan": (("--target", "0.6"), {"target": 0.6}),
    "compare": (("scalerl", "scalerl+loss=dapo"), {"recipes": ["scalerl", "scalerl+loss=dapo"]}),
    "effects": ((), {}),
}


@pytest.mark.parametrize("command", CASES)
def test_results_equal_the_json_of_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, options = CASES[command]
    check_same(getattr(api, command)(CURVES, **options).to_json(), printed(capsys, command, CURVES, *words))


def test_fits_are_reused_by_rank(fits: api.Fits, capsys: pytest.CaptureFixture[str]) -> None:
    ranking = api.rank(fits, budget=16000.0)
    assert ranking.fits is fits
    check_same(ranking.to_json(), printed(capsys, "rank", CURVES, "--max-compute", "8000", "--budget", "16000"))
    check_same(api.fit(api.load(CURVES), max_compute=8000).to_json(), json.loads(json.dumps(fits.to_json())))


def test_data_frames_are_read_like_files(fits: api.Fits) -> None:
    """A data frame gives exactly the same result as its CSV file."""
    study = api.load(FRAME)
    assert study.to_json() == api.load(CURVES).to_json()
    one, two = (FRAME[FRAME["recipe"] == name] for name in FRAME["recipe"].unique()[:2])
    assert set(api.load(one, two).to_frame()["recipe"]) == set(FRAME["recipe"].unique()[:2])
    assert api.fit(FRAME, max_compute=8000).to_json() == fits.to_json()


def test_frames_have_an_interval_in_three_columns(fits: api.Fits) -> None:
    frame = fits.to_frame()
    first = fits.to_json()[0]
    assert list(frame["recipe"]) == [entry["recipe"] for entry in fits.to_json()]
    assert frame.loc[0, ["A", "A_low", "A_high"]].tolist() == [first["A"][name] for name in ("value", "low", "high")]
    assert fits[first["recipe"]].A.value == first["A"]["value"] and len(fits) == len(frame)
    with pytest.raises(KeyError, match="no such recipe; there are"):
        _ = fits["another"]
    assert set(api.rank(fits).to_frame()) >= {"recipe", "rank", "p_best", "A", "A_low", "verdict"}


def test_results_have_the_warnings_that_commands_print() -> None:
    one_seed = pd.DataFrame(
        {"step": range(100, 1300, 100), "reward": np.linspace(0.2, 0.5, 12), "recipe": ["a", "b"] * 6}
    )
    study = api.load(one_seed)
    step_warnings = [
        f"{name}: step counts steps, not compute: the compute of a step differs between recipes" for name in "ab"
    ]
    assert study.remarks()[-2:] == step_warnings
    fits = api.fit(study)
    for result in (fits, api.rank(fits)):
        assert all(result.remarks().count(each) == 1 for each in step_warnings)


@pytest.mark.slow
def test_plots_are_drawn_into_the_given_axes(fits: api.Fits) -> None:
    _, ax = pyplot.subplots()
    results = [api.load(CURVES), fits, api.rank(fits), api.effects(fits), api.plan(fits, target=0.6), api.compare(fits)]
    for result in results:
        ax.clear()
        assert result.plot(ax) is ax and ax.lines  # type: ignore[attr-defined]
    assert fits.plot() is not ax
    pyplot.close("all")
    points = {name: len(part) for name, part in FRAME.groupby("recipe")}
    drawn = {str(line.get_label()): len(np.asarray(line.get_xdata())) for line in api.load(CURVES).plot().lines}
    assert drawn == points
    pyplot.close("all")


@pytest.mark.full
def test_notebooks_show_short_tables(fits: api.Fits) -> None:
    for result in (api.load(CURVES), fits, api.rank(fits), api.effects(fits), api.plan(fits, budget=1e5)):
        page = result._repr_html_()
        assert page.startswith("<table") and len(page) < 20000 and "NaN" not in page
    assert api.rank(fits).record.sentence.split(";")[0].replace("<", "&lt;") in api.rank(fits)._repr_html_()


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (lambda: api.fit(), UserError, "give a source"),
        (lambda: api.fit("nowhere.csv"), UserError, "nowhere.csv"),
        (lambda: api.fit(CURVES, maximum=3), TypeError, "fit: no option 'maximum'; valid: metric, x, y"),
        (lambda: api.fit(CURVES, min_compute=5, max_compute=4), UserError, "nothing lies between"),
        (lambda: api.fit(api.load(CURVES), x="step"), TypeError, "x: has been settled by load; give it there"),
        (lambda: api.compare(FRAME, recipes=["other"]), UserError, "no such recipe"),
    ],
)
def test_invalid_arguments_are_refused_like_in_commands(call: Any, kind: type[Exception], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        call()


def test_options_of_fit_cannot_be_changed_in_rank(fits: api.Fits) -> None:
    with pytest.raises(TypeError, match="robust: has been settled by fit"):
        api.rank(fits, robust=True)


def test_sources_can_be_paths(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    assert api.load(tmp_path / "a.csv").to_json() == api.load(CURVES).to_json()


def test_warnings_about_a_data_frame_name_it() -> None:
    read = api.load(FRAME.assign(reward=FRAME["reward"].where(FRAME.index > 0)))
    assert read.remarks() == read.study.warnings == ["DataFrame: skipped 1 row without a reward"]
    assert read.study.mapping[0].startswith("DataFrame: table; ")


def test_errors_about_a_data_frame_name_it_and_its_row() -> None:
    """Not the temporary file that it is read from, nor a line of it; a cell of two lines moves the lines below it."""
    frame = pd.DataFrame({"note": ["a\nb", "c", "d"], "compute": [1, 2, -3], "reward": [0.1, 0.2, 0.3]})
    frame.index = pd.Index(["x", "y", "z"])
    with pytest.raises(UserError) as error:
        api.load(frame)
    assert str(error.value) == "DataFrame: column compute is negative in 1 row, first at row z (-3); it starts at 0"
    with pytest.raises(UserError, match=r"^DataFrame 2: no column reward"):
        api.load(frame.assign(compute=[1, 2, 3]), frame.drop(columns="reward"))
    runs = pd.DataFrame({"recipe": ["a", "b"], "value": [0.5, "x"]})
    with pytest.raises(UserError, match=r"^DataFrame: column value is not a number at row 1 "):
        api.decide("a", "b", runs)
