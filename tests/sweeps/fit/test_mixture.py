"""Truths about curves that are not sigmoids: what is said of them, what is forecast, and what must not be said."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import real_curves
from benchmarks.forecast_zoo import ZOO, Truth, seen
from sweeps.curve import Curve, make_curve
from sweeps.fit import mixture as mixture_module
from sweeps.fit.constants import (
    A_PRIOR,
    AGREED,
    AHEAD,
    BEND,
    DRIFT_SD,
    JUMP_SD,
    MAX_WIDTH,
    OTHERS,
    P_DRIFT,
    R0_PRIOR,
    REACH,
    RISE,
    RULED_OUT,
    TREND,
)
from sweeps.fit.fit import Fit, fit_curve, fit_curves
from sweeps.fit.kinds import KINDS, WALK
from sweeps.fit.mixture import PRIOR, mixture, shared_prior
from sweeps.fit.points import FitOptions
from sweeps.fit.predict import paths, predict, predict_mean, readable
from sweeps.fit.verdict import Doubt, Evidence, after_fit, trend_z
from sweeps.source import load
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve

BY_NAME = {truth.name: truth for truth in ZOO}


def study(name: str, number: int = 0) -> Curve:
    return seen(BY_NAME[name], np.random.default_rng((11, number)))


def fitted(name: str, count: int = 8) -> list[Fit]:
    return [fit_curve(study(name, number)) for number in range(count)]


# --- trend before shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    every(5, ["two steps", "dip and recovery", "collapse at 92% of the window", "3 seeds, one bad", "late rise"]),
)
def test_what_plainly_moves_is_never_flat(name: str) -> None:
    assert all(fit.verdict != "flat" for fit in fitted(name))


def test_a_straight_rise_in_eight_points_is_not_flat() -> None:
    for number in range(20):
        rng = np.random.default_rng(number)
        c = np.linspace(1, 8, 8)
        fit = fit_curve(make_curve("x", c, 0.2 + 0.4 * c / 8 + 0.01 * rng.standard_normal(8)))
        assert fit.verdict not in ("flat", "too_few_points")


@pytest.mark.parametrize(("low", "high", "points", "sd"), [(0.04, 0.66, 30, 0.043), (0.784, 0.927, 29, 0.02)])
def test_a_rise_beyond_its_residuals_is_not_flat(low: float, high: float, points: int, sd: float) -> None:
    for number in range(10):
        rng = np.random.default_rng(number)
        c = np.linspace(1, 100, points)
        reward = low + (high - low) * c / 100 + sd * rng.standard_normal(points)
        assert fit_curve(make_curve("x", c, np.clip(reward, 0, 1))).verdict != "flat"


@pytest.mark.slow
def test_a_level_curve_is_flat_also_where_it_wanders() -> None:
    verdicts = [fit.verdict for fit in fitted("flat", 20)]
    assert verdicts.count("flat") >= 17 and "identifiable" not in verdicts
    wandering = Truth("level", lambda c: 0.4 + 0 * c, wander=0.03, memory=0.65)
    found = [fit_curve(seen(wandering, np.random.default_rng(k))).verdict for k in range(20)]
    assert "identifiable" not in found


# --- lack of fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "verdicts", "said"),
    every(
        3,
        [
            ("late rise", {"misfit", "pre_inflection"}, "late rise: the reward rose by"),
            ("collapse at 92% of the window", {"misfit", "decreasing"}, "fell by"),
            ("delayed start", {"misfit", "identifiable", "open"}, "delayed start"),
        ],
    ),
)
def test_a_misfit_says_what_is_seen(name: str, verdicts: set[str], said: str) -> None:
    fits = fitted(name, 12)
    assert {fit.verdict for fit in fits} <= verdicts
    assert sum(said in fit.reason for fit in fits) >= 4
    misfits = [fit for fit in fits if fit.verdict == "misfit"]
    assert misfits and all("the best so far is" in fit.reason and "forecasts hold" in fit.reason for fit in misfits)


def test_one_bad_seed_neither_pulls_nor_hides() -> None:
    for number in range(6):
        found = fit_curve(study("3 seeds, one bad", number))
        assert [bad.seed for bad in found.bad_seeds] == ["0"]
        assert any("seed 0 went its own way" in note and "left out" in note for note in found.warnings)
        assert found.seeds == 2 and found.A.value == pytest.approx(0.7, abs=0.06)
    # A fit of what came before does not know.
    early = fit_curve(study("3 seeds, one bad"), FitOptions(max_compute=0.48))
    assert early.bad_seeds == () and early.seeds == 3


@pytest.mark.slow
def test_honest_seeds_are_kept_and_two_that_disagree_are_not_decided_between() -> None:
    assert all(not fit.bad_seeds for fit in fitted("5 seeds"))
    x = np.linspace(0, 100, 25)
    good = 0.2 + 0.5 * (1 - np.exp(-x / 20))
    pair = make_curve("x", np.tile(x, 2), np.concatenate([good, np.full(25, 0.2)]), np.repeat(["a", "b"], 25))
    assert fit_curve(pair).bad_seeds == ()
    four = make_curve("x", np.tile(x, 4), np.concatenate([good, good, good * 0 + 0.2, good * 0 + 0.2]),
                      np.repeat(["a", "b", "c", "d"], 25))  # fmt: skip
    assert fit_curve(four).bad_seeds == (), "half of the seeds are no outliers"


# --- forecasts ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_verdict_can_be_forecast_from() -> None:
    verdicts = set()
    for truth in ZOO:
        fit = fit_curve(seen(truth, np.random.default_rng(3)))
        verdicts.add(fit.verdict)
        band = predict(fit, [1.25, 1.5, 2, 4, 10])
        assert readable(fit) and (band.low <= band.value).all() and (band.value <= band.high).all()
        assert (band.low >= 0).all() and (band.high <= 1).all()
        # What lies further ahead is not better known.
        assert (np.diff(band.high - band.low) >= -0.02).all()
    assert {"identifiable", "flat", "misfit", "pre_inflection", "decreasing"} <= verdicts


@pytest.mark.parametrize(
    ("each", "least", "most"),
    [pytest.param(4, 0.9, 0.999, marks=pytest.mark.slow), pytest.param(12, 0.93, 0.995, marks=pytest.mark.full)],
)
def test_the_zoo_in_short(each: int, least: float, most: float) -> None:
    """Coverage and errors over every truth at once; `benchmarks/forecast_zoo.py` has each by itself."""
    held, errors, last = [], [], []
    for place, truth in enumerate(ZOO):
        if not truth.foretold:
            continue
        for number in range(each):
            data = seen(truth, np.random.default_rng((5, place, number)))
            band, future = predict(fit_curve(data), [1.25, 2.0]), truth.mean(np.array([1.25, 2.0]))
            held.append((band.low <= future) & (future <= band.high))
            errors.append(np.abs(band.value - future))
            last.append(abs(np.mean([data.reward[data.seed == s][-1] for s in np.unique(data.seed)]) - future))
    assert least <= np.mean(held) <= most
    assert np.mean(errors) < 0.6 * np.mean(last)


def test_a_run_that_has_died_is_not_foretold_to_rise_again() -> None:
    """Rewards of exactly 0 are no coarse lattice: they say how little noise there is."""
    fit = fit_curve(make_curve("x", [1, 50, 100, 150, 200, 250, 300, 350], [0.156, 0.408, 0, 0, 0, 0, 0, 0]))
    value, low, _ = predict_mean(fit, [400, 450, 500])
    assert value < 0.03 and low == 0.0


def test_what_is_noisy_may_stray_from_its_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """By more than its noise: drifts widen its forecasts, and those of quiet evaluations by less."""

    def width(white: float) -> float:
        bands = [predict(fit_curve(curve(white=white, seeds=1, rng=rng)), [30000]) for rng in range(6)]
        return float(np.mean([band.high - band.low for band in bands]))

    quiet, noisy = width(0.004), width(0.04)
    assert noisy > 3 * quiet
    monkeypatch.setattr(mixture_module, "P_DRIFT", 1e-12)
    added = noisy - width(0.04)
    assert added > 0.2 * noisy and added > 3 * (quiet - width(0.004))


def test_the_mean_of_later_evaluations_has_their_noise() -> None:
    data = curve(white=0.02, seeds=2, rng=3)
    fit = fit_curve(data)
    later = np.linspace(17000, 24000, 12)
    value, low, high = predict_mean(fit, np.tile(later, 2))
    alone = paths(fit, later).mean(1)
    assert high - low >= np.subtract(*np.quantile(alone, [0.975, 0.025]))
    assert low < 0.61 < high and value == pytest.approx(0.6, abs=0.03)


def test_weights_are_a_distribution_and_a_sigmoid_is_recognised() -> None:
    fit = fit_curve(curve(white=0.003, seeds=1, rng=1))
    assert fit.outlook is not None
    weights = fit.outlook.weights
    assert sum(weights.values()) == pytest.approx(1) and set(weights) == {kind.name for kind in (*KINDS, WALK)}
    assert weights["sigmoid"] > 0.9


def test_what_foretold_other_recipes_is_trusted_more() -> None:
    even = dict.fromkeys(PRIOR, 0.0)
    assert shared_prior([]) == pytest.approx({name: value / sum(PRIOR.values()) for name, value in PRIOR.items()})
    telling = {**even, "line": 6.0}
    shared = shared_prior([telling] * 8)
    assert shared["line"] > 0.5 > PRIOR["line"] and sum(shared.values()) == pytest.approx(1)
    assert shared_prior([even] * 8)["sigmoid"] == pytest.approx(PRIOR["sigmoid"] / sum(PRIOR.values()), abs=0.02)


def test_the_same_points_have_the_same_future_and_travel_light() -> None:
    first, second = (fit_curve(curve("x", rng=4)) for _ in range(2))
    assert first.outlook is not None and second.outlook is not None
    x = np.array([8000.0, 32000.0])
    assert (first.outlook.at(x) == second.outlook.at(x)).all()
    assert len(pickle.dumps(first.lookout)) < 1.5e6


# --- units ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@given(
    name=st.sampled_from(["plateau seen", "window at 2 C_mid", "late rise", "straight, no ceiling", "flat"]),
    scale=st.sampled_from(["percent", "[-1, 1]", "FLOPs"]),
    number=st.integers(0, 5),
)
@settings(max_examples=25)
def test_units_change_nothing(name: str, scale: str, number: int) -> None:
    data = study(name, number)
    a, b, c = {"percent": (100, 0, 1), "[-1, 1]": (2, -1, 1), "FLOPs": (1, 0, 1e21)}[scale]
    assert data.sd is not None
    other = make_curve("run", data.compute * c, data.reward * a + b, data.seed, data.sd * a)
    ours, theirs = fit_curve(data), fit_curve(other)
    if scale == "[-1, 1]" and float(other.reward.min()) >= 0:
        return  # nothing tells that scale from [0, 1]
    assert theirs.verdict == ours.verdict
    for mine, its in ((ours.A.low, theirs.A.low), (ours.A.high, theirs.A.high)):
        assert (mine is None) == (its is None)
        assert mine is None or its == pytest.approx(a * mine + b, rel=1e-4, abs=1e-4 * a)
    at = np.array([0.5, 1.5])
    for mine, its in zip(predict(ours, at).value, predict(theirs, at * c).value, strict=True):
        assert its == pytest.approx(a * mine + b, abs=2e-3 * a)


def test_recipes_of_a_study_are_forecast_in_the_light_of_each_other() -> None:
    fits = fit_curves([study("steep, B = 4", k) for k in range(3)])
    alone = fit_curve(study("steep, B = 4", 0))
    assert fits[0].outlook is not None and alone.outlook is not None
    assert fits[0].outlook.weights["sigmoid"] > alone.outlook.weights["sigmoid"]


def test_mixtures_need_not_be_told_of_jumps() -> None:
    fit = fit_curve(study("late rise"))
    assert fit.outlook is not None and fit.outlook.jump is not None
    assert fit.outlook.jump.p > 0.5 and fit.outlook.jump.compute == pytest.approx(0.97, abs=0.06)
    assert fit.lookout is not None and mixture(fit.lookout.seen).restless


@pytest.mark.slow
def test_what_moves_is_no_level_curve_though_wander_would_explain_it() -> None:
    """A policy that strays for long: by its sampling errors the trend is far from none, and no law is in sight."""
    truth = replace(BY_NAME["flat"], wander=0.05, memory=0.65, prompts=4000)
    found = [fit_curve(seen(truth, np.random.default_rng(i))) for i in range(16)]
    moved = [fit for fit in found if fit.lookout and abs(trend_z(*_points(fit))) > TREND]
    assert len(moved) > 8 and all(fit.verdict != "flat" for fit in moved)
    assert any("no more than a policy that wanders" in fit.reason for fit in moved)


def _points(fit: Fit) -> tuple[Any, Any, Any]:
    assert fit.lookout is not None
    return fit.lookout.seen.x, fit.lookout.seen.z, fit.lookout.seen.variance


def test_an_asymptote_that_other_laws_put_elsewhere_is_not_named() -> None:
    """All else speaks for naming it."""
    x = np.linspace(0.0, 10.0, 30)
    doubt = Doubt({}, 50.0, 20.0, "weibull", 0.0, 0.9)
    evidence = Evidence(
        x,
        0.3 + 0.3 * x**2 / (1 + x**2),
        (0.6, 0.58, 0.63),
        (2.0, 1.8, 2.2),
        (1.0, 0.9, 1.1),
        0.3,
        1.0,
        None,
        0.01,
        doubt,
    )
    assert after_fit(evidence).name == "identifiable"
    found = after_fit(replace(evidence, doubt=replace(doubt, agreed=0.4)))
    assert found.name == "open" and "put the ceiling elsewhere: 40%" in found.reason
    # A window that ends soon after the bend asks for a narrower interval.
    assert after_fit(replace(evidence, half_gain=(5.0, 4.0, 7.0))).name == "open"


def test_a_forecast_reaches_the_end_of_the_scale() -> None:
    data = curve(a=1.0, r0=0.2, end=16000, white=0.003, rng=4)
    band = predict(fit_curve(data), [1e6])
    assert band.value[0] > 0.98 and band.high[0] == pytest.approx(1, abs=2e-3)


def test_more_evaluations_are_foretold_more_closely_and_not_exactly() -> None:
    """Of two seeds: eight evaluations are four each, and their mean has a quarter of the variance of two."""
    data = curve(white=0.02, wander=0.0, points=60, rng=3)
    fit = fit_curve(make_curve("x", data.compute, data.reward, data.seed, np.full(len(data.reward), 0.02)))

    def variance(observations: int) -> float:
        band = predict(fit, [16500], observations=observations)
        return float(band.high[0] - band.low[0]) ** 2

    alone = variance(0)
    assert 0.12 < (variance(8) - alone) / (variance(2) - alone) < 0.6


# --- what is said of it -----------------------------------------------------------------------------------------


def test_the_methods_page_has_the_numbers() -> None:
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    for kind in (*KINDS, WALK):
        assert re.search(rf"^\| {kind.name} \| .* \| {kind.prior:.2f} \|", page, flags=re.MULTILINE | re.IGNORECASE), (
            kind
        )
    assert f"`d ~ N(0, ({DRIFT_SD:g} r)^2)`" in page
    assert f"there is one with probability {P_DRIFT:g}" in page and f"`j ~ N(0, {JUMP_SD:g}^2)`" in page
    for name, (mean, sd) in (("R0", R0_PRIOR), ("A", A_PRIOR)):
        assert f"`{name} ~ N({mean:g}, {sd:g}^2)`" in page
    flat = " ".join(page.split())
    assert f"A's is {OTHERS:g} times as long unless every other law is behind by {RULED_OUT:g} in" in flat
    assert f"within {MAX_WIDTH:g} of the scale" in flat and f"at least {AGREED:g} of what all kinds say" in flat
    assert f"lies below {BEND:g} of the window" in flat and f"ends before {REACH:g} C_mid" in flat
    assert f"over the constant above {RISE:g}, or a trend of more than {TREND:g} standard" in flat
    assert f"ahead of the sigmoid by more than {AHEAD:g} in log density" in flat


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("eval_rasbt_ch07_math500", "train_marinfold_exp237"), marks=pytest.mark.slow),
        pytest.param(("train_rasbt", "train_verl_notebook", "train_nhockid_openrs"), marks=pytest.mark.full),
    ],
    ids=["few", "many"],
)
def test_real_curves_are_foretold(names: tuple[str, ...]) -> None:
    """Their priors were set on these (docs/measured/real_curves.md): this holds what was reached."""
    files = [Path(real_curves.__file__).parent / "real" / f"{name}.csv" for name in names]
    found = [row for file in files for row in real_curves.forecasts(file, load([str(file)]).curves)]
    assert len(found) > 20 and np.mean([row.holds for row in found]) >= 0.85
    error, last = (np.mean([abs(getattr(row, name) - row.came) for row in found]) for name in ("value", "last"))
    assert error < last
