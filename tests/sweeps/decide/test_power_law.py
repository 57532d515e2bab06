"""Tests of the power law across sizes: recovery of planted laws, crossovers, and the choice against the sigmoid."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sweeps.curve import Curve, make_curve
from sweeps.decide.power_law import fit_power_law, group_by_size, parse_size
from sweeps.decide.sizes import compare_sizes, crossovers, held_out, overtaking_compute
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval, fit_curves
from sweeps.fit.predict import quantiles
from sweeps.fit.seeds import SeedSpread
from tests.sweeps.fit.simulate import law as sigmoid

K_MAX, N_0, SLOPE, LEVEL, START = 0.35, 1e9, 0.12, np.log(0.55), 300.0
SIZES = (5e8, 1.5e9, 3e9, 7e9)


def exponent(size: float) -> float:
    """The formula of arXiv 2509.25300."""
    return K_MAX / (1 + N_0 / size)


def log_loss(size: float, compute: np.ndarray) -> np.ndarray:
    return np.asarray(LEVEL + SLOPE * np.log(size / 1e9) - exponent(size) * np.log(compute / START))


def study(
    rng: int = 0,
    sizes: tuple[float, ...] = SIZES,
    sd: float = 0.005,
    seeds: int = 2,
    seed_sd: float = 0.0,
    points: int = 30,
    unit: float = 1.0,
) -> dict[float, Fit]:
    """Simulate and fit one recipe whose test loss follows the power law. Returns the fits by size."""
    random, curves = np.random.default_rng(rng), []
    x = np.linspace(200, 12000, points)
    for size in sizes:
        reward = [
            1 - np.exp(log_loss(size, x)) + seed_sd * random.standard_normal() + sd * random.standard_normal(points)
            for _ in range(seeds)
        ]
        labels = np.repeat([str(seed) for seed in range(seeds)], points)
        factors = {"size": f"{size:g}"}
        curves.append(
            make_curve(f"s size={size:g}", np.tile(x, seeds) * unit, np.concatenate(reward), labels, factors=factors)
        )
    return group_by_size(fit_curves(curves), "size")["s"]


def holds(interval: Interval | None, truth: float) -> bool:
    if interval is None:
        return False
    return (interval.low is None or interval.low <= truth) and (interval.high is None or truth <= interval.high)


def test_exact_data_return_the_law() -> None:
    law = fit_power_law(study(sd=1e-6))
    assert law.k_max.value == pytest.approx(K_MAX, rel=1e-3)
    assert law.N_0.value == pytest.approx(N_0, rel=1e-2)
    for size in SIZES:
        assert float(np.median(law.exponent(size))) == pytest.approx(exponent(size), rel=1e-2)


@pytest.mark.full
def test_intervals_hold_the_truth() -> None:
    """At least 35 of 40 intervals contain the truth, for k_max, N_0, k, a crossover and R. Seeds have effects."""
    held = np.zeros(5)
    cross = START * np.exp(SLOPE * np.log(7 / 3) / (exponent(7e9) - exponent(3e9)))
    reward = 1 - float(np.exp(log_loss(7e9, np.array(24000.0))))
    grid = np.geomspace(200, 1.2e6, 200)
    for i in range(40):
        law = fit_power_law(study(i, seed_sd=0.01, points=20))
        overtaking = quantiles(overtaking_compute(law.log_loss(3e9, grid) - law.log_loss(7e9, grid), grid))
        held += [
            holds(law.k_max, K_MAX),
            holds(law.N_0, N_0),
            holds(quantiles(law.exponent(7e9)), exponent(7e9)),
            overtaking.value is None or holds(overtaking, cross),
            holds(law.reward(7e9, 24000.0), reward),
        ]
    assert (held >= 35).all(), held


@pytest.mark.slow
def test_a_spread_between_seeds_widens_k_max() -> None:
    """A constant offset of a seed in R tilts its line in log L. So the exponent is less certain, not only the level."""
    widths = []
    for sd in (1e-4, 0.03):
        by_size = {size: replace(fit, seed_spread=SeedSpread(sd)) for size, fit in study().items()}
        k_max = fit_power_law(by_size).k_max
        assert k_max.low is not None and k_max.high is not None
        widths.append(k_max.high - k_max.low)
    assert widths[1] > 3 * widths[0]


def test_noise_is_constant_in_reward_not_in_log_loss() -> None:
    """An error of 0.005 in R moves log L most at small losses. The weights must correct this, so that k moves least."""
    x = np.geomspace(100, 10000, 20)
    reward = 1 - 0.5 * (x / 100) ** -0.6

    def slope(at: int | None) -> float:
        y = reward.copy()
        if at is not None:
            y[at] -= 0.005
        curves = [make_curve(f"s size={n}", x, y, factors={"size": n}) for n in ("1B", "2B")]
        k_max, n_0, _ = fit_power_law(group_by_size(fit_curves(curves), "size")["s"]).best
        return k_max / (1 + n_0 / 1e9)

    without_error = slope(None)
    assert without_error == pytest.approx(0.6, rel=1e-2)
    assert abs(slope(-1) - without_error) < 0.5 * abs(slope(0) - without_error)


@pytest.mark.slow
def test_the_unit_of_compute_changes_nothing() -> None:
    here, there = fit_power_law(study()), fit_power_law(study(unit=1e18))
    assert there.k_max.value == pytest.approx(here.k_max.value, rel=1e-6)
    assert there.N_0.value == pytest.approx(here.N_0.value, rel=1e-4)
    for size in (3e9, 2e10):
        ours, theirs = here.reward(size, 2e4), there.reward(size, 2e22)
        assert theirs.value == pytest.approx(ours.value, rel=1e-6)
        assert theirs.low == pytest.approx(ours.low, rel=1e-4)


@pytest.mark.slow
def test_a_size_that_was_not_run_is_predicted_and_marked() -> None:
    plan = compare_sizes(study(sd=0.002), "s", budget=20000.0, more=[2e9, 1.4e10])
    choices = {choice.size: choice for choice in plan.choices}
    assert choices[1.4e10].extrapolation and choices[2e9].extrapolation and not choices[7e9].extrapolation
    for size in (2e9, 1.4e10):
        assert holds(choices[size].R, 1 - float(np.exp(log_loss(size, np.array(20000.0)))))
        sigmoid_reward = choices[size].R_sigmoid
        assert sigmoid_reward is not None and holds(
            sigmoid_reward, 1 - float(np.exp(log_loss(size, np.array(20000.0))))
        )
    ours, other = choices[7e9].R, choices[1.4e10].R
    assert None not in (ours.low, ours.high, other.low, other.high)
    assert (other.high or 0) - (other.low or 0) > (ours.high or 0) - (ours.low or 0)


@pytest.mark.full
def test_the_law_that_generated_the_data_predicts_better() -> None:
    assert held_out(study(sd=0.002)).better == "power_law"
    x = np.linspace(0, 16000, 60)
    curves = [
        make_curve(
            f"s size={size}",
            x,
            sigmoid(x, a, 1.9, c_mid, 0.2) + 0.003 * np.random.default_rng(i).standard_normal(60),
            factors={"size": size},
        )
        for i, (size, a, c_mid) in enumerate((("1B", 0.5, 2000.0), ("3B", 0.6, 2500.0), ("8B", 0.66, 3000.0)))
    ]
    by_size = group_by_size(fit_curves(curves), "size")["s"]
    compared = held_out(by_size)
    assert compared.better == "sigmoid"
    assert (compared.power_law or 0) > 0.01 > (compared.sigmoid or 1)
    plan = compare_sizes(by_size, "s", budget=30000.0)
    assert any("trust them" in note for note in plan.warnings)
    assert "sigmoid" in plan.sentence and "power law" not in plan.sentence


def test_overtaking_counts_only_if_the_lead_stays() -> None:
    grid = np.array([1.0, 10.0, 100.0, 1000.0])
    lead = np.array(
        [
            [-1.0, -1.0, 1.0, 1.0],  # crosses halfway between 10 and 100, in log compute
            [1.0, 1.0, 1.0, 1.0],  # ahead from the start
            [-1.0, 1.0, 1.0, -1.0],  # falls behind again
            [1.0, -1.0, 1.0, 1.0],  # ahead, behind, ahead: the last crossing counts
        ]
    )
    np.testing.assert_allclose(overtaking_compute(lead, grid), [10**1.5, 1.0, np.inf, 10**1.5])


def test_a_larger_size_that_never_wins() -> None:
    """The larger size is behind at every compute and has the same exponent, so it never overtakes."""
    x = np.linspace(200, 12000, 40)
    rng = np.random.default_rng(0)
    curves = [
        make_curve(f"s size={n}", x, 1 - k * (x / 200) ** -0.2 + 0.003 * rng.standard_normal(40), factors={"size": n})
        for n, k in (("1B", 0.5), ("2B", 0.7))
    ]
    by_size = group_by_size(fit_curves(curves), "size")["s"]
    (pair,) = crossovers(fit_power_law(by_size), None, by_size)
    assert pair.power_law is None and "power law: never within 100 x the data" in pair.reason
    plan = compare_sizes(by_size, "s", budget=10000.0)
    assert max(plan.choices, key=lambda choice: choice.p_best).size == 1e9
    assert any("two sizes determine k_max and N_0 exactly: " in note for note in plan.warnings)


def test_bounds_are_open_if_the_exponent_does_not_saturate() -> None:
    """If k is proportional to N, any large N_0 fits with a k_max to match, so neither has an upper bound."""
    x = np.linspace(200, 12000, 40)
    rng = np.random.default_rng(1)
    curves = [
        make_curve(f"s size={n}B", x, 1 - 0.6 * (x / 200) ** -(0.02 * n) + 0.002 * rng.standard_normal(40),
                   factors={"size": f"{n}B"})
        for n in (1, 2, 4)
    ]  # fmt: skip
    law = fit_power_law(group_by_size(fit_curves(curves), "size")["s"])
    assert law.N_0.high is None and law.k_max.high is None and law.N_0.low is not None


def test_points_without_a_logarithm_are_left_out_and_counted() -> None:
    x = np.linspace(0, 12000, 31)
    reward = np.clip(1 - 0.5 * (np.maximum(x, 100) / 200) ** -0.3, 0, 1)
    perfect = reward.copy()
    perfect[-3:] = 1.0
    curves = [
        make_curve(f"s size={n}", x, y, factors={"size": n}) for n, y in (("1B", reward), ("2B", perfect))
    ]  # fmt: skip
    law = fit_power_law(group_by_size(fit_curves(curves), "size")["s"])
    assert law.left_out == 2 + 3 and law.points == 62 - 5


@pytest.mark.slow
def test_compute_to_a_target_by_size() -> None:
    plan = compare_sizes(study(sd=0.002), "s", target=0.75)
    for reach in plan.reach[1:]:
        truth = START * np.exp((LEVEL + SLOPE * np.log(reach.size / 1e9) - np.log(0.25)) / exponent(reach.size))
        assert holds(reach.power_law, truth)
    json.dumps(plan.to_json(), allow_nan=False)


@pytest.mark.slow
def test_every_answer_is_finite_json_even_on_noise() -> None:
    rng = np.random.default_rng(3)
    curves = [
        make_curve(f"s size={n}", np.linspace(1, 100, 20), rng.random(20), factors={"size": n})
        for n in ("1B", "2B", "9B")
    ]
    by_size = group_by_size(fit_curves(curves), "size")["s"]
    for goal in ({"budget": 1e6}, {"target": 0.99}):
        json.dumps(compare_sizes(by_size, "s", more=[1e3, 1e15], **goal).to_json(), allow_nan=False)


NAMED = [
    ("Qwen/Qwen3-0.6B", 6e8),
    ("/models/Llama-3.1-70B-Instruct", 7e10),
    ("Qwen3-30B-A3B", 3e10),
    ("smollm2-135m", 1.35e8),
]


@pytest.mark.parametrize(
    ("text", "size"), [("7e9", 7e9), ("0.5B", 5e8), (" 350m ", 3.5e8), ("1T", 1e12), ("12", 12.0), *NAMED]
)
def test_sizes_are_parsed(text: str, size: float) -> None:
    assert parse_size(text) == pytest.approx(size)


@pytest.mark.parametrize("text", ["", "B", "big", "-1B", "0", "nan", "inf", "7GB", "phi-3", "my4bit-model"])
def test_text_without_a_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="size"):
        parse_size(text)


def plain(name: str, size: str, reward: float = 0.0) -> Curve:
    x = np.linspace(1, 100, 20)
    return make_curve(name, x, 0.2 + 0.006 * x + reward, factors={"size": size})


def test_impossible_input_is_one_line() -> None:
    with pytest.raises(UserError, match="one size only"):
        fit_power_law(group_by_size(fit_curves([plain("a", "1B")]), "size")["a"], "a")
    with pytest.raises(UserError, match="twice"):
        group_by_size(fit_curves([plain("a size=1B", "1B"), plain("a size=1e9", "1e9")]), "size")
    with pytest.raises(UserError, match="no depth"):
        group_by_size(fit_curves([plain("a", "1B")]), "depth")
    with pytest.raises(UserError, match="no pass rate"):
        fit_power_law(group_by_size(fit_curves([plain("a size=1B", "1B", 1.0), plain("a size=2B", "2B")]), "size")["a"])
