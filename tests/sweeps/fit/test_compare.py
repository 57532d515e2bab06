"""Tests of curve families: each wins on its own data, and fits without forecasting skill are not ranked."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sweeps.curve import make_curve
from sweeps.decide.rank import rank
from sweeps.errors import UserError
from sweeps.fit.compare import compare
from sweeps.fit.family import FAMILIES
from sweeps.fit.fit import FitOptions, fit_curve, fit_curves
from tests.sweeps.fit.simulate import curve, law

COMPUTE = np.linspace(0.0, 16000.0, 41)


def noisy(reward: np.ndarray, sd: float = 0.003, rng: int = 0) -> np.ndarray:
    return np.asarray(reward + sd * np.random.default_rng(rng).standard_normal(len(reward)))


@pytest.mark.parametrize(
    ("family", "reward", "shape"),
    [
        ("sigmoid", law(COMPUTE, 0.6, 2.5, 4000.0, 0.2), {"B": 2.5, "C_mid": 4000.0}),
        ("sigmoid_zero", law(COMPUTE, 0.6, 1.5, 3000.0, 0.0), {"B": 1.5, "C_mid": 3000.0}),
        ("logistic", 0.2 + 0.5 / (1 + np.exp(-0.001 * (COMPUTE - 6000))), {"k": 0.001, "c": 6000.0}),
        ("exponential", 0.2 + 0.5 * (1 - np.exp(-COMPUTE / 3000)), {"tau": 3000.0}),
        ("power_law", 0.7 - 0.3 * (np.maximum(COMPUTE, 400) / 400) ** -0.8, {"B": 0.8}),
    ],
)
def test_each_family_recovers_its_parameters_and_wins_on_its_own_data(
    family: str, reward: np.ndarray, shape: dict[str, float]
) -> None:
    fit = fit_curve(make_curve("x", COMPUTE, noisy(reward, 0.001)), FitOptions(family=family))
    assert fit.family == family
    json.dumps(fit.to_json(), allow_nan=False)
    for name, value in shape.items():
        estimate = fit.shape[name]
        assert estimate.value == pytest.approx(value, rel=0.1)
        assert estimate.low is not None and estimate.high is not None
        # One in twenty 95% intervals misses, so a miss by less than the interval's width is allowed.
        width = estimate.high - estimate.low
        assert estimate.low - width - 1e-3 * value <= value <= estimate.high + width + 1e-3 * value
    comparison = compare(make_curve("x", COMPUTE, noisy(reward, 0.001)))
    rows = {row.family: row for row in comparison.rows}
    assert set(rows) == set(FAMILIES)
    assert rows[family].delta_aicc < 4
    assert rows["constant"].delta_aicc > 50
    assert comparison.beats_last is True


def test_power_law_misleads_on_a_saturating_curve_as_published() -> None:
    """As in arXiv 2510.13786, A.4: A of the sigmoid is stable under every cut, A of the power law is far too high."""
    compute = np.arange(0.0, 50001.0, 700.0)
    data = make_curve("x", compute, noisy(law(compute, 0.645, 1.7, 10909.0, 0.3), 0.002))
    sigmoid = [fit_curve(data, FitOptions(r0=0.3, min_compute=cut)).A.value for cut in (0.0, 1500.0, 5000.0)]
    assert all(a is not None and abs(a - 0.645) < 0.012 for a in sigmoid)
    power = [
        fit_curve(data, FitOptions(family="power_law", min_compute=low, max_compute=high)).A.value
        for low, high in ((1500.0, 50000.0), (5000.0, 50000.0))
    ]
    assert power[0] is not None and power[0] > 0.9
    assert power[1] is not None and 0.66 < power[1] < power[0]


@pytest.mark.slow
def test_a_curve_that_forecasts_worse_than_the_last_value_is_not_ranked() -> None:
    """A ramp that stops: every fit of its past predicts a further rise, while the last value would have been right."""
    plateauing = 0.2 + ((0.4 * np.maximum(COMPUTE, 1e-3) / 6000.0) ** -6 + 0.4**-6) ** (-1 / 6)
    ramp = make_curve("ramp", COMPUTE, noisy(plateauing, 0.0004))
    fits = fit_curves([curve("good", white=0.004), ramp])
    assert [fit.verdict for fit in fits] == ["identifiable", "misfit"]
    assert compare(ramp).beats_last is False
    ranking = rank(fits)
    entry = {e.recipe: e for e in ranking.ranking}
    assert entry["good"].rank == 1 and entry["ramp"].rank is None
    assert entry["ramp"].verdict == "misfit" and "explains the evaluations" in entry["ramp"].reason
    assert json.dumps(ranking.to_json(), allow_nan=False)


def test_too_few_points_are_not_compared() -> None:
    result = compare(make_curve("x", [0.0, 1.0, 2.0], [0.1, 0.2, 0.3]))
    assert result.rows == () and result.beats_last is None and "too few" in result.sentence


def test_unknown_family_is_named() -> None:
    with pytest.raises(UserError, match=r"cubic.*sigmoid"):
        fit_curve(curve(), FitOptions(family="cubic"))


def test_a_seed_that_ended_early_does_not_change_the_comparison() -> None:
    """Two seeds differ by 0.06 and one stopped early. The other's later evaluations are compared with its own curve."""
    compute = np.linspace(0.0, 16000.0, 41)
    parts = [(compute[:15], 0.64, "0"), (compute, 0.58, "1")]
    rewards = [noisy(law(c, a, 1.9, 2500.0, 0.3), 0.004, i) for i, (c, a, _) in enumerate(parts)]
    data = make_curve(
        "x",
        np.concatenate([c for c, _, _ in parts]),
        np.concatenate(rewards),
        np.concatenate([np.full(len(c), s) for c, _, s in parts]),
    )
    result = compare(data)
    assert result.beats_last is True
    assert min(row.held_out or 1.0 for row in result.rows) < 0.01


@pytest.mark.full
def test_every_family_weights_points_by_their_errors() -> None:
    compute = np.linspace(0.0, 12000.0, 41)
    sd = np.where(compute < 6000, 0.002, 0.03)
    sigmoid_wins = 0
    for rng in range(10):
        reward = law(compute, 0.61, 1.9, 2500.0, 0.3) + sd * np.random.default_rng(rng).standard_normal(41)
        rows = compare(make_curve("x", compute, np.clip(reward, 0, 1), sd=sd)).rows
        sigmoid_wins += min(rows, key=lambda row: row.aicc).family == "sigmoid"
    assert sigmoid_wins >= 7


def test_a_single_evaluation_is_not_compared() -> None:
    assert compare(make_curve("x", [0.0], [0.3])).rows == ()
