"""Tests of collapse: runs whose reward fell to exactly 0 cannot recover, and their forecast is 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.curve import make_curve
from sweeps.decide.standing import chances_of_being_best, draw_rewards
from sweeps.fit.collapse import collapse_probability
from sweeps.fit.fit import fit_curve, fit_curves
from sweeps.fit.predict import asymptote_draws, paths, predict, predict_mean
from sweeps.fit.scaled_points import ScaledPoints
from tests.sweeps.fit.simulate import curve

X = np.linspace(0.2, 1.0, 5)
RISING = [0.16, 0.2, 0.3, 0.36, 0.42, 0.45]


def seen(rewards: Sequence[float], seeds: int = 1, bounded: bool = True) -> ScaledPoints:
    """Return evenly spaced evaluations. With several seeds, `rewards` alternates between them at each step."""
    x = np.repeat(np.arange(1, len(rewards) // seeds + 1), seeds) / (len(rewards) // seeds)
    return ScaledPoints(
        x, np.array(rewards, dtype=float), np.tile(np.arange(seeds), len(rewards) // seeds), None, bounded
    )


@pytest.mark.parametrize(("zeros", "p"), [(2, 2 / 3), (3, 4 / 5), (5, 16 / 17)])
def test_more_zeros_make_a_collapse_more_probable(zeros: int, p: float) -> None:
    probability, since = collapse_probability(seen([*RISING, *[0.0] * zeros]))
    assert probability == pytest.approx(p) and since == pytest.approx(7 / (6 + zeros))


@pytest.mark.parametrize(
    "alive",
    [
        seen([*RISING, 0.0]),  # a single 0 may be chance
        seen([*RISING, 0.0, 0.0, 0.01]),
        seen([*RISING, 0.001, 0.001]),
        seen([0.0] * 8),  # the reward never rose
        seen([0.0, 0.0, 0.02, 0.0, 0.01, 0.0, 0.0]),  # neither did this one, above 0.02
        seen([0.3, 0.4, 0.4, 0.5, 0.0, 0.4, 0.0, 0.5], seeds=2),  # only one of two seeds is 0
        ScaledPoints(
            X, np.array([0.3, 0.4, 0.0, 0.0, 0.0]), np.array([0, 1, 1, 1, 1]), None, True
        ),  # the other seed ended with a reward
        ScaledPoints(
            X, np.array([0.3, 0.4, 0.4, 0.0, 0.0]), np.array([0, 1, 0, 1, 0]), None, True
        ),  # only one 0 of each seed
        seen([*RISING, 0.0, 0.0], bounded=False),
    ],
)
def test_these_runs_have_not_collapsed(alive: ScaledPoints) -> None:
    assert collapse_probability(alive) == (0.0, np.inf)


def test_an_earlier_recovery_makes_a_collapse_less_probable() -> None:
    recovered = [*RISING, 0.0, 0.0, 0.3, 0.4, 0.0, 0.0]
    assert 0 < collapse_probability(seen(recovered))[0] < collapse_probability(seen([*RISING, 0.0, 0.0]))[0]


@given(st.lists(st.sampled_from([0.0, 0.1, 0.4]), min_size=2, max_size=40))
def test_one_more_zero_never_makes_a_collapse_less_probable(rewards: list[float]) -> None:
    probability, probability_after = (
        collapse_probability(seen(run_rewards))[0] for run_rewards in (rewards, [*rewards, 0.0])
    )
    assert probability <= probability_after <= 1


@pytest.mark.parametrize(("samples", "rate"), [(16, 0.25), (32, 0.1), (100, 0.05)])
def test_zeros_by_chance_are_not_a_collapse(samples: int, rate: float) -> None:
    source = np.random.default_rng(2510)
    probabilities = [
        collapse_probability(seen(run[:until]))[0]
        for run in source.binomial(samples, rate, (40, 60)) / samples
        for until in range(6, 61)
    ]
    assert np.mean(probabilities) < 0.005


@pytest.mark.parametrize(("bottom", "top"), [(0.0, 1.0), (-1.0, 1.0)])
def test_a_dead_run_is_forecast_to_stay_dead(bottom: float, top: float) -> None:
    z = np.array([*RISING, *[0.0] * 8])
    fit = fit_curve(make_curve("dead", 10.0 * np.arange(1, 15), bottom + (top - bottom) * z))
    assert fit.curve.range == (bottom, top)
    (warning,) = [note for note in fit.warnings if "exactly" in note]
    assert f"exactly {bottom:g} from compute 70 on" in warning and "P = 0.99" in warning
    assert predict_mean(fit, np.array([160.0, 200.0, 240.0])) == (bottom, bottom, bottom)
    band = predict(fit, [160.0, 1000.0], observations=3)
    assert (band.value == bottom).all() and (band.high == bottom).all()
    assert np.median(asymptote_draws(fit)) == bottom
    # The curve before the collapse is not affected.
    assert paths(fit, [60.0]).mean() > bottom + 0.3 * (top - bottom)


def test_a_collapsed_recipe_is_unlikely_to_be_best() -> None:
    living = curve("living", a=0.3, r0=0.1, seeds=1)
    c = living.compute
    dead = make_curve("dead", c, np.where(c >= c[-5], 0.0, 0.2 + 0.6 * c / c.max()), baseline="living")
    p_living, p_dead = chances_of_being_best(draw_rewards(fit_curves([living, dead]), 2 * c.max()))
    assert p_living > 0.95 and p_dead < 0.05
