"""Tests of a joint sigmoid fit across model sizes: recovery of planted laws, the frontier, and its figure."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli.main import main
from sweeps.curve import make_curve
from sweeps.decide.across_sizes import AcrossSizes, fit_across
from sweeps.fit.fit import Fit, Interval, fit_curves
from tests.paths import ROOT
from tests.sweeps.fit.simulate import law as sigmoid

SIZES = (0.5e9, 1.5e9, 3e9, 7e9)
# Planted 1 - A, C_mid, B and 1 - R0: their values at 2e9 parameters, their exponents in size, and how much each size
# deviates from that law (standard deviation of the logarithm).
AT_2B, SLOPES, DEVIATIONS = (0.3, 3000.0, 1.6, 0.7), (-0.2, 0.2, 0.0, -0.1), (0.04, 0.15, 0.1, 0.02)
END = 10000.0


def planted(
    seed: int, ends: dict[float, float] | None = None
) -> tuple[dict[float, tuple[float, ...]], dict[float, Fit]]:
    """Simulate two runs per size. Returns the true (A, B, C_mid, R0) by size, also of a size not run, and the fits."""
    rng = np.random.default_rng(seed)
    truth, curves = {}, []
    for size in (*SIZES, 1.4e10):
        numbers = [
            at_2b * (size / 2e9) ** slope * np.exp(deviation * rng.standard_normal())
            for at_2b, slope, deviation in zip(AT_2B, SLOPES, DEVIATIONS, strict=True)
        ]
        truth[size] = (1 - numbers[0], numbers[2], numbers[1], 1 - numbers[3])
        x = np.linspace(0, (ends or {}).get(size, END), 41)
        if size in SIZES:
            reward, label = [], []
            for run in range(2):
                a, b, c_mid, r0 = truth[size]
                a += 0.015 * rng.standard_normal()
                reward.append(np.clip(sigmoid(x, a, b, c_mid, r0) + 0.012 * rng.standard_normal(41), 0, 1))
                label += [str(run)] * 41
            curves.append(make_curve(f"s size={size:g}", np.tile(x, 2), np.concatenate(reward), label))
    return truth, dict(zip(SIZES, fit_curves(curves), strict=True))


def fit_jointly(by_size: dict[float, Fit]) -> AcrossSizes:
    """Fit all sizes jointly."""
    across = fit_across(by_size, "s")
    assert across is not None
    return across


def holds(interval: Interval, truth: float) -> bool:
    """Return whether a closed interval contains the truth."""
    assert interval.low is not None and interval.high is not None
    return interval.low <= truth <= interval.high


def width(interval: Interval) -> float:
    assert interval.low is not None and interval.high is not None
    return interval.high - interval.low


@pytest.mark.parametrize("studies", [pytest.param(3, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.full)])
def test_intervals_hold_the_truth(studies: int) -> None:
    """95% intervals of ceilings, of rewards at the window's end and at 4 times its compute, and of the frontier."""
    held: dict[str, list[bool]] = {"A": [], "R": [], "R of a size not run": [], "frontier": [], "exponent": []}
    for seed in range(studies):
        truth, by_size = planted(seed)
        across = fit_jointly(by_size)
        held["A"] += [holds(across.ceiling(size), truth[size][0]) for size in SIZES]
        for size, compute in ((7e9, END), (7e9, 4 * END), (1.4e10, END), (1.4e10, 4 * END)):
            low, high = np.quantile(across.curve(size, np.array([compute]))[:, 0], [0.025, 0.975])
            key = "R" if size in SIZES else "R of a size not run"
            held[key].append(low <= sigmoid(np.array([compute]), *truth[size])[0] <= high)
        for point in across.frontier(250.0, END)[::8]:
            best = max(sigmoid(np.array([point.compute]), *truth[size])[0] for size in SIZES)
            held["frontier"].append(holds(replace(point.R, low=(point.R.low or 0) - 0.01), best))
        held["exponent"].append(holds(across.exponents["C_mid"], SLOPES[1]))
    for quantity, inside in held.items():
        assert np.mean(inside) >= (0.9 if studies > 10 else 0.6), (quantity, np.mean(inside))


def test_a_size_before_its_bend_is_informed_by_the_others() -> None:
    """The largest size was run to a third of its C_mid. Its own ceiling is open; the joint fit bounds it."""
    truth, by_size = planted(1, {7e9: 1300.0})
    across = fit_jointly(by_size)
    alone = by_size[7e9]
    assert alone.draws is not None and not alone.identifiable
    own_ceiling = np.quantile(alone.draws.A, [0.025, 0.975])
    joint_ceiling = across.ceiling(7e9)
    assert holds(joint_ceiling, truth[7e9][0])
    assert width(joint_ceiling) < 0.6 * (own_ceiling[1] - own_ceiling[0])


def test_the_frontier_ends_at_the_largest_size_that_was_run() -> None:
    _, by_size = planted(2)
    frontier = fit_jointly(by_size).frontier(250.0, END)
    sizes = [point.size.value for point in frontier]
    assert all(value is not None and SIZES[0] * 0.999 <= value <= SIZES[-1] * 1.001 for value in sizes)
    assert frontier[-1].size.value == pytest.approx(SIZES[-1])
    assert not frontier[0].extrapolation and frontier[-1].extrapolation
    rewards = [point.R.value or 0.0 for point in frontier]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(rewards))


def test_the_joint_fit_is_deterministic_and_needs_sigmoid_draws_of_every_size() -> None:
    _, by_size = planted(3)
    one, two = fit_jointly(by_size), fit_jointly(by_size)
    np.testing.assert_array_equal(one.log_parameters, two.log_parameters)
    assert fit_across({3e9: by_size[3e9]}, "s") is None
    assert fit_across({**by_size, 7e9: replace(by_size[7e9], draws=None)}, "s") is None


@pytest.mark.slow
def test_the_figure_needs_sizes_and_a_known_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = str(ROOT / "examples/sizes.csv")
    figure = tmp_path / "frontier.svg"
    assert main(["plan", table, "--size", "size", "--budget", "20000", "-o", str(figure), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["sizes"]
    assert "best size for each budget" in figure.read_text()
    assert len(entry["frontier"]) == 40 and entry["frontier"][0]["size"]["value"] == pytest.approx(5e8)
    assert entry["joint"]["exponents"]["C_mid"]["value"] < 0
    with pytest.raises(SystemExit):
        main(["plan", table, "--budget", "20000", "-o", str(figure)])
    assert "name their column with --size" in capsys.readouterr().err
    assert main(["plan", table, "--size", "size", "--budget", "20000", "-o", str(tmp_path / "x.gif")]) == 1
    assert "svg, png, pdf" in capsys.readouterr().err
