"""Tests of the posterior over laws: verdicts and forecasts of curves that are not sigmoids, and its mathematics."""

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
from sweeps.fit.pooling import make_pools
from sweeps.fit.posterior import LAWS, Posterior, walk_variance
from sweeps.fit.predict import can_forecast, paths, predict, predict_mean
from sweeps.fit.scaled_points import ScaledPoints
from sweeps.fit.verdict import Evidence, LawEvidence, judge_fit
from sweeps.source import load
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve

BY_NAME = {truth.name: truth for truth in ZOO}


def study(name: str, number: int = 0) -> Curve:
    return seen(BY_NAME[name], np.random.default_rng((11, number)))


def fitted(name: str, count: int = 8) -> list[Fit]:
    return [fit_curve(study(name, number)) for number in range(count)]


# --- trends and outlier seeds -----------------------------------------------------------------------------------


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
def test_a_flat_curve_is_never_identifiable_even_if_it_wanders() -> None:
    verdicts = [fit.verdict for fit in fitted("flat", 20)]
    assert "flat" in verdicts and "identifiable" not in verdicts
    wandering = Truth("level", lambda c: 0.4 + 0 * c, wander=0.03, memory=0.65)
    wandering_verdicts = [fit_curve(seen(wandering, np.random.default_rng(k))).verdict for k in range(20)]
    assert "identifiable" not in wandering_verdicts


def test_one_bad_seed_is_left_out_with_a_warning() -> None:
    for number in range(6):
        seed_fit = fit_curve(study("3 seeds, one bad", number))
        assert [bad.seed for bad in seed_fit.bad_seeds] == ["0"]
        assert any("seed 0 departs from the others (1, 2)" in note and "left out" in note for note in seed_fit.warnings)
        assert seed_fit.seeds == 2 and seed_fit.A.value == pytest.approx(0.7, abs=0.06)
    # A fit up to compute 0.48 cannot know that the seed will depart.
    early = fit_curve(study("3 seeds, one bad"), FitOptions(max_compute=0.48))
    assert early.bad_seeds == () and early.seeds == 3


@pytest.mark.slow
def test_good_seeds_are_kept_and_without_a_majority_none_is_left_out() -> None:
    assert all(not fit.bad_seeds for fit in fitted("5 seeds"))
    x = np.linspace(0, 100, 25)
    good = 0.2 + 0.5 * (1 - np.exp(-x / 20))
    pair = make_curve("x", np.tile(x, 2), np.concatenate([good, np.full(25, 0.2)]), np.repeat(["a", "b"], 25))
    assert fit_curve(pair).bad_seeds == ()
    four = make_curve("x", np.tile(x, 4), np.concatenate([good, good, good * 0 + 0.2, good * 0 + 0.2]),
                      np.repeat(["a", "b", "c", "d"], 25))  # fmt: skip
    assert fit_curve(four).bad_seeds == (), "half of the seeds are not outliers"


# --- forecasts ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curves_of_every_verdict_have_a_forecast() -> None:
    verdicts = set()
    for truth in ZOO:
        fit = fit_curve(seen(truth, np.random.default_rng(3)))
        verdicts.add(fit.verdict)
        band = predict(fit, [1.25, 1.5, 2, 4, 10])
        assert can_forecast(fit) and (band.low <= band.value).all() and (band.value <= band.high).all()
        assert (band.low >= 0).all() and (band.high <= 1).all()
        # Bands do not become narrower with distance.
        assert (np.diff(band.high - band.low) >= -0.02).all()
    assert {"identifiable", "open", "pre_inflection", "decreasing"} <= verdicts


@pytest.mark.parametrize(
    ("each", "least", "most"),
    [pytest.param(4, 0.9, 0.999, marks=pytest.mark.slow), pytest.param(12, 0.93, 0.995, marks=pytest.mark.full)],
)
def test_coverage_and_errors_of_forecasts_on_the_zoo(each: int, least: float, most: float) -> None:
    """Coverage and errors over all true curves together. `benchmarks/forecast_zoo.py` has them by curve."""
    held, errors, last_value_errors = [], [], []
    for place, truth in enumerate(ZOO):
        if not truth.foretold:
            continue
        for number in range(each):
            data = seen(truth, np.random.default_rng((5, place, number)))
            band, future = predict(fit_curve(data), [1.25, 2.0]), truth.mean(np.array([1.25, 2.0]))
            held.append((band.low <= future) & (future <= band.high))
            errors.append(np.abs(band.value - future))
            last_value_errors.append(
                abs(np.mean([data.reward[data.seed == s][-1] for s in np.unique(data.seed)]) - future)
            )
    assert least <= np.mean(held) <= most
    assert np.mean(errors) < 0.6 * np.mean(last_value_errors)


def test_a_dead_run_is_not_forecast_to_rise() -> None:
    """Repeated rewards of exactly 0 must not be taken for a coarse scale: they show that there is little noise."""
    fit = fit_curve(make_curve("x", [1, 50, 100, 150, 200, 250, 300, 350], [0.156, 0.408, 0, 0, 0, 0, 0, 0]))
    value, low, _ = predict_mean(fit, [400, 450, 500])
    assert value < 0.03 and low == 0.0


def test_the_predicted_mean_of_evaluations_includes_their_noise() -> None:
    data = curve(white=0.02, seeds=2, rng=3)
    fit = fit_curve(data)
    later = np.linspace(17000, 24000, 12)
    value, low, high = predict_mean(fit, np.tile(later, 2))
    curve_means = paths(fit, later).mean(1)
    assert high - low >= np.subtract(*np.quantile(curve_means, [0.975, 0.025]))
    assert low < 0.61 < high and value == pytest.approx(0.6, abs=0.03)


def test_weights_are_a_distribution_and_a_sigmoid_is_recognised() -> None:
    fit = fit_curve(curve(white=0.003, seeds=1, rng=1))
    assert fit.outlook is not None
    weights = fit.outlook.weights
    assert sum(weights.values()) == pytest.approx(1) and set(weights) == {law.name for law in LAWS}
    assert weights["sigmoid"] > 0.9


def test_forecasts_are_deterministic_and_their_inputs_small() -> None:
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
        return  # without a negative reward the scale is taken for [0, 1]
    assert theirs.verdict == ours.verdict
    for our_end, their_end in ((ours.A.low, theirs.A.low), (ours.A.high, theirs.A.high)):
        assert (our_end is None) == (their_end is None)
        assert our_end is None or their_end == pytest.approx(a * our_end + b, rel=1e-4, abs=1e-4 * a)
    at = np.array([0.5, 1.5])
    for our_end, their_end in zip(predict(ours, at).value, predict(theirs, at * c).value, strict=True):
        assert their_end == pytest.approx(a * our_end + b, abs=2e-3 * a)


def test_an_asymptote_that_other_laws_put_elsewhere_is_not_named() -> None:
    """Otherwise the evidence is sufficient to name the asymptote."""
    x = np.linspace(0.0, 10.0, 30)
    laws = LawEvidence(p_rise=1.0, p_none=0.0, rival="weibull", rival_lead=0.0, agreement=0.9)
    evidence = Evidence(
        compute=x,
        reward=0.3 + 0.3 * x**2 / (1 + x**2),
        A=(0.6, 0.58, 0.63),
        half_gain=(1.0, 0.0),
        R0=0.3,
        reward_range=1.0,
        laws=laws,
    )
    assert judge_fit(evidence).name == "identifiable"
    changed_verdict = judge_fit(replace(evidence, laws=replace(laws, agreement=0.4)))
    assert changed_verdict.name == "open" and "put the ceiling elsewhere: 40%" in changed_verdict.reason
    # Nor if another law explains the points far better, or if the curve does not rise.
    changed_verdict = judge_fit(replace(evidence, laws=replace(laws, rival_lead=5.0, agreement=0.4)))
    assert changed_verdict.name == "misfit" and "another law: a Weibull curve" in changed_verdict.reason
    assert judge_fit(replace(evidence, laws=replace(laws, p_none=0.7, p_rise=P_FLAT / 2))).name == "flat"
    for p_none, p_rise in ((0.3, P_FLAT / 2), (0.7, 2 * P_FLAT)):
        assert judge_fit(replace(evidence, laws=replace(laws, p_none=p_none, p_rise=p_rise))).name != "flat"
    # Nor if the bend may be beyond the window.
    assert judge_fit(replace(evidence, half_gain=(5.0, 0.3))).name == "pre_inflection"


def test_a_forecast_can_reach_the_end_of_the_scale() -> None:
    data = curve(a=1.0, r0=0.2, end=16000, white=0.003, rng=4)
    band = predict(fit_curve(data), [1e6])
    assert band.value[0] > 0.98 and band.high[0] == pytest.approx(1, abs=2e-3)


def test_the_mean_of_more_evaluations_has_a_narrower_band() -> None:
    """With two seeds, eight evaluations are four per seed. Their mean has a quarter of the noise variance of two."""
    data = curve(white=0.02, wander=0.0, points=60, rng=3)
    fit = fit_curve(make_curve("x", data.compute, data.reward, data.seed, np.full(len(data.reward), 0.02)))

    def variance(observations: int) -> float:
        band = predict(fit, [16500], observations=observations)
        return float(band.high[0] - band.low[0]) ** 2

    alone = variance(0)
    assert 0.12 < (variance(8) - alone) / (variance(2) - alone) < 0.6


# --- the model ------------------------------------------------------------------------------------------------


def dense_moments(
    scaled_points: ScaledPoints, which: int, theta: np.ndarray, scale: float, at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and covariance of the points and of the mean curve at computes `at`, from the model's definition."""
    u, v, log_walk, log_noise = theta
    all_computes = np.concatenate([scaled_points.x, at])
    g = LAWS[which].basis(np.log(all_computes)[None], np.array([[u]]), np.array([[v]]))[0]
    levels = (R0_PRIOR if LAWS[which].rises else LEVEL_PRIOR), A_PRIOR
    basis = np.stack([1 - g, g], axis=1)
    mean = basis @ [level for level, _ in levels]
    h = walk_variance(all_computes)
    covariance = basis @ np.diag([sd**2 for _, sd in levels]) @ basis.T
    covariance += np.exp(2 * log_walk) * np.minimum(h[:, None], h)
    n = len(scaled_points.x)
    seed_walks = np.minimum(h[:n, None], h[:n]) * (
        (scaled_points.seed[:, None] == scaled_points.seed) - 1 / scaled_points.seeds
    )
    covariance[:n, :n] += np.exp(2 * log_walk) * scale**2 * seed_walks
    relative = np.ones(n) if scaled_points.variance is None else scaled_points.variance / scaled_points.variance.mean()
    covariance[:n, :n] += (np.exp(2 * log_noise) + 1e-8) * np.diag(relative)
    return mean, covariance


def two_seeds(number: int = 0) -> ScaledPoints:
    source = np.random.default_rng(number)
    x = np.sort(source.uniform(0.02, 1.0, 14))
    return ScaledPoints(x, source.uniform(0.2, 0.8, 14), np.arange(14) % 2, source.uniform(1e-4, 4e-4, 14), True)


@pytest.mark.parametrize("which", range(len(LAWS)))
def test_the_evidence_is_that_of_the_model(which: int) -> None:
    scaled_points = two_seeds()
    posterior = Posterior(scaled_points, np.random.default_rng(0))
    theta = np.array([[0.5, -0.8, -2.5, -3.0], [0.1, 0.4, -4.0, -2.0]])
    for scale, rotated in zip(SEED_WALKS, posterior._rotated, strict=True):
        log_evidences = posterior._regress(which, rotated, theta).log_evidence
        for row, evidence in zip(theta, log_evidences, strict=True):
            mean, covariance = dense_moments(scaled_points, which, row, scale, np.zeros(0))
            assert evidence == pytest.approx(multivariate_normal(mean, covariance).logpdf(scaled_points.z), rel=1e-8)


@pytest.mark.parametrize("which", range(len(LAWS)))
def test_draws_have_the_moments_of_the_model(which: int) -> None:
    """Given the parameters the curve is Gaussian: at evaluations, between them, and beyond the window."""
    scaled_points, count = two_seeds(1), 20_000
    posterior = Posterior(scaled_points, np.random.default_rng(0))
    theta = np.array([0.5, -0.8, -2.5, -3.0])
    at = np.array([0.25, 0.5, 1.0, 1.5, 3.0, 100.0])
    r0, a, walk = posterior._draw_levels(which, posterior._rotated[1], np.tile(theta, (count, 1)))
    draws = model.CurveDraws(
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
    mean, covariance = dense_moments(scaled_points, which, theta, SEED_WALKS[1], at)
    n = len(scaled_points.x)
    gain = np.linalg.solve(covariance[:n, :n], covariance[:n, n:]).T
    expected, conditional = (
        mean[n:] + gain @ (scaled_points.z - mean[:n]),
        covariance[n:, n:] - gain @ covariance[:n, n:],
    )
    error = np.sqrt(np.diag(conditional) / count)
    assert (np.abs(draws.mean(0) - expected) < 4 * error).all()
    np.testing.assert_allclose(np.cov(draws.T), conditional, atol=0.04 * float(np.diag(conditional).max()))


def test_the_samplers_evidence_equals_that_of_many_prior_samples() -> None:
    data = curve(white=0.02, seeds=1, points=16, rng=5)
    fit = fit_curve(data)
    assert fit.outlook_inputs is not None
    posterior = Posterior(fit.outlook_inputs.points, np.random.default_rng(1))
    source = np.random.default_rng(2)
    for which, law in enumerate(LAWS):
        prior = np.array([*law.shape, WALK_PRIOR, posterior._noise])
        theta = prior[:, 0] + prior[:, 1] * source.standard_normal((40_000, 4))
        log = posterior._regress(which, posterior._rotated[0], theta).log_evidence
        evidence_of_prior = np.logaddexp.reduce(log) - np.log(len(log))
        assert posterior.log_evidence[law.name] == pytest.approx(evidence_of_prior, abs=0.3), law.name


def test_a_walk_is_brownian_within_the_window_and_levels_beyond_it() -> None:
    x = np.linspace(0, 1, 11)
    np.testing.assert_allclose(walk_variance(x), x)
    beyond = walk_variance(np.array([1.0, 1.5, 2.0, 5.0, 1e6]))
    assert (np.diff(beyond) > 0).all() and beyond[-1] == pytest.approx(1 + LEVELLING)


def test_a_random_walk_is_forecast_near_its_last_value() -> None:
    source = np.random.default_rng(4)
    x = np.linspace(1, 60, 60)
    z = 0.5 + np.cumsum(0.02 * source.standard_normal(60))
    fit = fit_curve(make_curve("x", x, z))
    assert fit.outlook is not None and fit.outlook.weights["none"] > 0.3
    band = predict(fit, [66.0])
    assert band.low[0] < z[-1] < band.high[0] and abs(band.value[0] - z[-1]) < 0.05


# --- documentation and pooling ----------------------------------------------------------------------------------


def test_the_methods_page_lists_the_priors() -> None:
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
    """Coverage and errors on some of the real curves of docs/measured/real_curves.md."""
    files = [Path(real_curves.__file__).parent / "real" / f"{name}.csv" for name in names]
    forecast_rows = [row for file in files for row in real_curves.forecasts(file, load([str(file)]).curves)]
    assert len(forecast_rows) > 10 and np.mean([row.holds for row in forecast_rows]) >= 0.85
    error, last = (np.mean([abs(getattr(row, name) - row.came) for row in forecast_rows]) for name in ("value", "last"))
    assert error < last


def test_recipes_of_a_study_share_the_size_of_their_walks() -> None:
    """Twelve recipes follow the law closely, so the asymptote of each is more certain than if it is fitted alone."""
    steady = [curve(f"r{i}", a=0.5 + 0.01 * i, seeds=1, points=25, white=0.01, rng=i) for i in range(12)]

    def width(fit: Fit) -> float:
        assert fit.A.low is not None and fit.A.high is not None
        return fit.A.high - fit.A.low

    alone, pooled = fit_curve(steady[0]), fit_curves(steady)[0]
    assert alone.pool is None and pooled.pool is not None and pooled.pool.size == 12
    assert width(pooled) < 0.85 * width(alone)
    assert [fit.A for fit in fit_curves(steady[::-1])][::-1] == [fit.A for fit in fit_curves(steady)]
    # Two recipes are too few to be pooled.
    assert fit_curves(steady[:2])[0].A == alone.A


def test_pooled_weights_are_those_of_the_hierarchy() -> None:
    """If all recipes walk by about 0.01, draws near 0.01 get more weight than draws near the prior's 0.06."""
    source = np.random.default_rng(0)
    walks = [np.log(0.01) + 0.3 * source.standard_normal(2000) for _ in range(8)]
    vague = WALK_PRIOR[0] + WALK_PRIOR[1] * source.standard_normal(2000)
    weight = make_pools([*walks, vague])[-1].weights(vague)
    mean = float(weight @ vague / weight.sum())
    assert abs(mean - np.log(0.01)) < 0.25 and abs(float(vague.mean()) - WALK_PRIOR[0]) < 0.1
    # A recipe's own draws do not enter its weights.
    grid = np.linspace(*np.quantile(vague, [0.1, 0.9]), 20)
    np.testing.assert_allclose(
        *(make_pools([*walks[:3], own_draws])[-1].weights(grid) for own_draws in (vague, 0.2 * vague - 1))
    )
    # A single recipe keeps its prior, which is the sum of the centre's prior and the scatter around the centre.
    single_weight = make_pools([vague])[0].weights(vague)
    spread = float(
        np.sqrt(single_weight @ (vague - single_weight @ vague / single_weight.sum()) ** 2 / single_weight.sum())
    )
    assert 0.8 < spread / WALK_PRIOR[1] < 1.2
