"""Truths about curves that are not sigmoids: what is said of them, what is forecast, and what must not be said."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from benchmarks import real_curves
from benchmarks.forecast_zoo import ZOO, Truth, seen
from sweeps.curve import Curve, make_curve
from sweeps.fit import posterior as model
from sweeps.fit.constants import A_PRIOR, FARTHEST, LEVEL_PRIOR, LEVELLING, P_FLAT, R0_PRIOR, SEED_WALKS, WALK_PRIOR
from sweeps.fit.fit import Fit, fit_curve, fit_curves
from sweeps.fit.points import FitOptions
from sweeps.fit.pooling import pooled_weights
from sweeps.fit.posterior import LAWS, Posterior, walk_variance
from sweeps.fit.predict import paths, predict, predict_mean, readable
from sweeps.fit.seen import ScaledPoints
from sweeps.fit.verdict import Doubt, Evidence, after_fit
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
def test_of_a_level_curve_no_asymptote_is_named_also_where_it_wanders() -> None:
    verdicts = [fit.verdict for fit in fitted("flat", 20)]
    assert "flat" in verdicts and "identifiable" not in verdicts
    wandering = Truth("level", lambda c: 0.4 + 0 * c, wander=0.03, memory=0.65)
    found = [fit_curve(seen(wandering, np.random.default_rng(k))).verdict for k in range(20)]
    assert "identifiable" not in found


def test_one_bad_seed_neither_pulls_nor_hides() -> None:
    for number in range(6):
        found = fit_curve(study("3 seeds, one bad", number))
        assert [bad.seed for bad in found.bad_seeds] == ["0"]
        assert any("seed 0 departs from the others (1, 2)" in note and "left out" in note for note in found.warnings)
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
    assert {"identifiable", "open", "pre_inflection", "decreasing"} <= verdicts


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
    assert sum(weights.values()) == pytest.approx(1) and set(weights) == {law.name for law in LAWS}
    assert weights["sigmoid"] > 0.9


def test_the_same_points_have_the_same_future_and_travel_light() -> None:
    first, second = (fit_curve(curve("x", rng=4)) for _ in range(2))
    assert first.outlook is not None and second.outlook is not None
    x = np.array([8000.0, 32000.0])
    assert (first.outlook.at(x) == second.outlook.at(x)).all()
    assert len(pickle.dumps(first.outlook_inputs)) < 1.5e6


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


def test_an_asymptote_that_other_laws_put_elsewhere_is_not_named() -> None:
    """All else speaks for naming it."""
    x = np.linspace(0.0, 10.0, 30)
    doubt = Doubt(p_rise=1.0, p_none=0.0, rival="weibull", rival_lead=0.0, agreement=0.9)
    evidence = Evidence(
        compute=x,
        reward=0.3 + 0.3 * x**2 / (1 + x**2),
        A=(0.6, 0.58, 0.63),
        half_gain=(1.0, 0.0),
        R0=0.3,
        reward_range=1.0,
        doubt=doubt,
    )
    assert after_fit(evidence).name == "identifiable"
    found = after_fit(replace(evidence, doubt=replace(doubt, agreement=0.4)))
    assert found.name == "open" and "put the ceiling elsewhere: 40%" in found.reason
    # Nor where a law explains the points far better, or where nothing rises.
    found = after_fit(replace(evidence, doubt=replace(doubt, rival_lead=5.0, agreement=0.4)))
    assert found.name == "misfit" and "another law: a Weibull curve" in found.reason
    assert after_fit(replace(evidence, doubt=replace(doubt, p_none=0.7, p_rise=P_FLAT / 2))).name == "flat"
    for p_none, p_rise in ((0.3, P_FLAT / 2), (0.7, 2 * P_FLAT)):
        assert after_fit(replace(evidence, doubt=replace(doubt, p_none=p_none, p_rise=p_rise))).name != "flat"
    # Nor where the bend may lie beyond the window.
    assert after_fit(replace(evidence, half_gain=(5.0, 0.3))).name == "pre_inflection"


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


# --- the model ------------------------------------------------------------------------------------------------


def dense(
    seen: ScaledPoints, which: int, theta: np.ndarray, scale: float, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the points, and of the mean curve at computes `at`, by the model's definition."""
    u, v, log_walk, log_noise = theta
    every = np.concatenate([seen.x, at])
    g = LAWS[which].basis(np.log(every)[None], np.array([[u]]), np.array([[v]]))[0]
    levels = (R0_PRIOR if LAWS[which].rises else LEVEL_PRIOR), A_PRIOR
    basis = np.stack([1 - g, g], axis=1)
    mean = basis @ [level for level, _ in levels]
    h = walk_variance(every)
    covariance = basis @ np.diag([sd**2 for _, sd in levels]) @ basis.T
    covariance += np.exp(2 * log_walk) * np.minimum(h[:, None], h)
    n = len(seen.x)
    own = np.minimum(h[:n, None], h[:n]) * ((seen.seed[:, None] == seen.seed) - 1 / seen.seeds)
    covariance[:n, :n] += np.exp(2 * log_walk) * scale**2 * own
    relative = np.ones(n) if seen.variance is None else seen.variance / seen.variance.mean()
    covariance[:n, :n] += (np.exp(2 * log_noise) + 1e-8) * np.diag(relative)
    return mean, covariance


def two_seeds(number: int = 0) -> ScaledPoints:
    source = np.random.default_rng(number)
    x = np.sort(source.uniform(0.02, 1.0, 14))
    return ScaledPoints(x, source.uniform(0.2, 0.8, 14), np.arange(14) % 2, source.uniform(1e-4, 4e-4, 14), True)


@pytest.mark.parametrize("which", range(len(LAWS)))
def test_the_evidence_is_that_of_the_model(which: int) -> None:
    seen = two_seeds()
    posterior = Posterior(seen, np.random.default_rng(0))
    theta = np.array([[0.5, -0.8, -2.5, -3.0], [0.1, 0.4, -4.0, -2.0]])
    for scale, turned in zip(SEED_WALKS, posterior._rotated, strict=True):
        found = posterior._regress(which, turned, theta).log_evidence
        for row, evidence in zip(theta, found, strict=True):
            mean, covariance = dense(seen, which, row, scale, np.zeros(0))
            assert evidence == pytest.approx(multivariate_normal(mean, covariance).logpdf(seen.z), rel=1e-8)


@pytest.mark.parametrize("which", range(len(LAWS)))
def test_draws_have_the_moments_of_the_model(which: int) -> None:
    """Given the parameters the curve is Gaussian: at evaluations, between them and beyond the window."""
    seen, count = two_seeds(1), 20_000
    posterior = Posterior(seen, np.random.default_rng(0))
    theta = np.array([0.5, -0.8, -2.5, -3.0])
    at = np.array([0.25, 0.5, 1.0, 1.5, 3.0, 100.0])
    r0, a, walk = posterior._draw_levels(which, posterior._rotated[1], np.tile(theta, (count, 1)))
    draws = model.Futures(
        laws=LAWS,
        law=np.full(count, which),
        u=np.full(count, theta[0]),
        v=np.full(count, theta[1]),
        r0=r0,
        a=a,
        walk=walk,
        noise=np.ones(count),
        log_walk=np.zeros(count),
        bounded=False,
        dead=np.zeros(count, dtype=np.bool_),
    ).at(at)
    mean, covariance = dense(seen, which, theta, SEED_WALKS[1], at)
    n = len(seen.x)
    gain = np.linalg.solve(covariance[:n, :n], covariance[:n, n:]).T
    expected, left = mean[n:] + gain @ (seen.z - mean[:n]), covariance[n:, n:] - gain @ covariance[:n, n:]
    error = np.sqrt(np.diag(left) / count)
    assert (np.abs(draws.mean(0) - expected) < 4 * error).all()
    np.testing.assert_allclose(np.cov(draws.T), left, atol=0.04 * float(np.diag(left).max()))


def test_the_sampler_finds_the_evidence_that_many_samples_of_the_prior_have() -> None:
    data = curve(white=0.02, seeds=1, points=16, rng=5)
    fit = fit_curve(data)
    assert fit.outlook_inputs is not None
    posterior = Posterior(fit.outlook_inputs.points, np.random.default_rng(1))
    source = np.random.default_rng(2)
    for which, law in enumerate(LAWS):
        prior = np.array([*law.shape, WALK_PRIOR, posterior._noise])
        theta = prior[:, 0] + prior[:, 1] * source.standard_normal((40_000, 4))
        log = posterior._regress(which, posterior._rotated[0], theta).log_evidence
        many = np.logaddexp.reduce(log) - np.log(len(log))
        assert posterior.log_evidence[law.name] == pytest.approx(many, abs=0.3), law.name


def test_a_walk_is_brownian_within_the_window_and_levels_beyond_it() -> None:
    x = np.linspace(0, 1, 11)
    np.testing.assert_allclose(walk_variance(x), x)
    beyond = walk_variance(np.array([1.0, 1.5, 2.0, 5.0, 1e6]))
    assert (np.diff(beyond) > 0).all() and beyond[-1] == pytest.approx(1 + LEVELLING)


def test_what_wanders_without_a_law_is_forecast_about_its_last_value() -> None:
    source = np.random.default_rng(4)
    x = np.linspace(1, 60, 60)
    z = 0.5 + np.cumsum(0.02 * source.standard_normal(60))
    fit = fit_curve(make_curve("x", x, z))
    assert fit.outlook is not None and fit.outlook.weights["none"] > 0.3
    band = predict(fit, [66.0])
    assert band.low[0] < z[-1] < band.high[0] and abs(band.value[0] - z[-1]) < 0.05


# --- what is said of it -----------------------------------------------------------------------------------------


def test_the_methods_page_has_the_numbers() -> None:
    page = " ".join((ROOT / "docs" / "reference" / "methods.md").read_text().split())
    for law in LAWS:
        assert f"| {law.name} | {law.prior:g} |" in page, law.name
    for name, (mean, sd) in (("R0", R0_PRIOR), ("A", A_PRIOR), ("level", LEVEL_PRIOR), ("log tau", WALK_PRIOR)):
        assert f"`{name} ~ N({mean:g}, {sd:g}^2)`" in page, name
    assert f"two windows) < {P_FLAT:g}" in page and f"{FARTHEST:g} windows" in page


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("train_marinfold_exp237",), marks=pytest.mark.slow),
        pytest.param(("train_verl_notebook", "train_nhockid_openrs"), marks=pytest.mark.full),
    ],
    ids=["few", "many"],
)
def test_real_curves_are_foretold(names: tuple[str, ...]) -> None:
    """What was reached on them, of docs/measured/real_curves.md."""
    files = [Path(real_curves.__file__).parent / "real" / f"{name}.csv" for name in names]
    found = [row for file in files for row in real_curves.forecasts(file, load([str(file)]).curves)]
    assert len(found) > 10 and np.mean([row.holds for row in found]) >= 0.85
    error, last = (np.mean([abs(getattr(row, name) - row.came) for row in found]) for name in ("value", "last"))
    assert error < last


def test_recipes_of_a_study_tell_each_other_how_far_runs_walk() -> None:
    """Twelve recipes keep to the law, so the asymptote of each is known better than alone."""
    still = [curve(f"r{i}", a=0.5 + 0.01 * i, seeds=1, points=25, white=0.01, rng=i) for i in range(12)]

    def width(fit: Fit) -> float:
        assert fit.A.low is not None and fit.A.high is not None
        return fit.A.high - fit.A.low

    alone, together = fit_curve(still[0]), fit_curves(still)[0]
    assert (alone.pool_size, together.pool_size) == (1, 12)
    assert width(together) < 0.85 * width(alone)
    assert [fit.A for fit in fit_curves(still[::-1])][::-1] == [fit.A for fit in fit_curves(still)]
    # Two recipes say too little of each other.
    assert fit_curves(still[:2])[0].A == alone.A


def test_pooled_weights_are_those_of_the_hierarchy() -> None:
    """Of recipes that all walk about 0.01, draws near that weigh more than those near the prior's 0.06."""
    source = np.random.default_rng(0)
    walks = [(np.log(0.01) + 0.3 * source.standard_normal(2000),) * 2 for _ in range(8)]
    vague = WALK_PRIOR[0] + WALK_PRIOR[1] * source.standard_normal(2000)
    weight = pooled_weights([*walks, (vague, vague)])[-1][0]
    mean = float(weight @ vague / weight.sum())
    assert abs(mean - np.log(0.01)) < 0.25 and abs(float(vague.mean()) - WALK_PRIOR[0]) < 0.1
    # What a recipe's own draws say is not counted a second time.
    grid = np.linspace(*np.quantile(vague, [0.1, 0.9]), 20)
    np.testing.assert_allclose(*(pooled_weights([*walks[:3], (own, grid)])[-1][1] for own in (vague, 0.2 * vague - 1)))
    # Alone it is as it was: the centre's prior and the scatter about it make up a recipe's own.
    (own, _), *_ = pooled_weights([(vague, vague)] * 1)
    spread = float(np.sqrt(own @ (vague - own @ vague / own.sum()) ** 2 / own.sum()))
    assert 0.8 < spread / WALK_PRIOR[1] < 1.2
