"""Tests of learning rate decay: compute counts less below half of the peak rate, in fits and in forecasts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweeps.curve import Array, Curve, make_curve
from sweeps.fit.fit import fit_curve
from sweeps.fit.forecast import Outlook
from sweeps.fit.predict import predict, predict_mean
from sweeps.fit.schedule import at_peak_rate, schedule_of
from sweeps.run.journal import Journal
from sweeps.source import load
from tests.sweeps.fit.simulate import law

STEPS = np.arange(1.0, 321.0)


def linear(end: float) -> Array:
    """Return a rate that decreases linearly to 0 at `end` and stays 0."""
    return np.maximum(1 - STEPS / end, 0.0)


def decayed_run(end: float, noise: float = 0.006, seed: int = 0) -> Curve:
    """Simulate a run whose rate decreases to 0 at `end`. Its reward is a sigmoid of the effective compute."""
    computes = np.arange(0.0, 321.0, 8.0)
    effective = at_peak_rate(STEPS, linear(end), computes)
    assert effective is not None
    reward = law(effective, 0.7, 1.8, 60.0, 0.2) + noise * np.random.default_rng(seed).standard_normal(len(computes))
    return make_curve("r", computes, np.clip(reward, 0, 1), at_peak=effective)


def test_compute_counts_fully_above_half_of_the_peak_rate() -> None:
    effective = at_peak_rate(STEPS, linear(320.0), np.array([0.0, 100.0, 160.0, 240.0, 320.0, 500.0]))
    assert effective is not None
    # At 160 the rate is half of its peak. The 160 after it count as 80: 60 until 240 and 20 later. The tolerance is one
    # step, because each step has the rate of its end.
    np.testing.assert_allclose(effective, [0, 100, 160, 160 + 60, 160 + 80, 160 + 80], atol=1.01)


def test_only_decay_reduces_effective_compute() -> None:
    warm = np.minimum(STEPS / 20, 1.0)
    assert at_peak_rate(STEPS, warm, STEPS) is None
    assert at_peak_rate(STEPS, np.zeros(320), STEPS) is None
    assert at_peak_rate(STEPS, np.where(STEPS > 5, np.nan, 1.0), STEPS) is None
    restarted = np.concatenate([linear(160.0)[:160], linear(160.0)[:160]])
    effective = at_peak_rate(STEPS, restarted, np.array([160.0, 240.0]))
    assert effective is not None
    np.testing.assert_allclose(np.diff(effective), [80.0], atol=1.01)


def test_the_decay_is_extrapolated_beyond_the_last_evaluation() -> None:
    """From the steps up to 200, the linear decay to 320 is predicted correctly. Compute beyond 320 does not count."""
    run = decayed_run(320.0)
    known_schedule = schedule_of(run, 200.0)
    assert known_schedule is not None
    later = np.array([200.0, 240.0, 280.0, 320.0, 1000.0])
    truth = at_peak_rate(STEPS, linear(320.0), later)
    assert truth is not None
    np.testing.assert_allclose(known_schedule.effective_compute(later), truth, atol=1.5)
    assert schedule_of(replace(run, at_peak=None)) is None


def test_a_run_whose_rate_is_0_is_forecast_to_stay() -> None:
    """A forecast by compute alone rises further, as at the peak rate. The run does not rise."""
    run = decayed_run(140.0)
    late, early = run.compute > 240, run.compute <= 150
    final_reward = float(run.reward[late].mean())
    by_rate, low, high = predict_mean(fit_curve(run.take(early)), run.compute[late])
    by_compute, _, _ = predict_mean(fit_curve(replace(run.take(early), at_peak=None)), run.compute[late])
    assert low <= final_reward <= high
    assert abs(by_rate - final_reward) < 0.02 < by_compute - final_reward


def test_parameters_use_effective_compute_and_windows_actual_compute() -> None:
    fit = fit_curve(decayed_run(320.0))
    assert fit.identifiable and fit.window == (0.0, 320.0)
    for interval, truth in ((fit.A, 0.7), (fit.B, 1.8), (fit.C_mid, 60.0)):
        assert interval.low is not None and interval.high is not None
        assert interval.low <= truth <= interval.high
    assert any("the learning rate decays: at the end, compute counts 0%;" in note for note in fit.warnings)
    ahead = predict(fit, [320.0, 3200.0])
    assert ahead.value[1] == pytest.approx(ahead.value[0], abs=2e-3)
    assert fit.draws is not None
    np.testing.assert_allclose(
        fit.draws.gain_fraction(np.array([3200.0])), fit.draws.gain_fraction(np.array([320.0])), atol=1e-3
    )
    assert isinstance(fit.outlook, Outlook)
    np.testing.assert_allclose(*fit.outlook.at(np.array([320.0, 3200.0])).T, atol=1e-3)


def test_the_rate_is_read_from_journals_and_other_logs(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run", clock=lambda: 0.0)
    journal.header(run="run", curve="c", recipe="scalerl", seed=0, device="cpu")
    rows = []
    for step in range(41):
        compute = {"compute/flops": 1e9 * step, "compute/virtual_device_hours": 2.0 * step}
        rate = 1e-3 * max(1 - step / 40, 0.0)
        journal.record("train", step, {"train/learning_rate": rate, **compute})
        journal.record("eval", step, {"eval/heldout/pass_rate": 0.02 * step, **compute})
        rows.append({"step": step, "reward": 0.02 * step, "num_tokens": 100.0 * step, "learning_rate": rate})
    journal.end(40, "finished", None)
    journal.close()
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": rows, "global_step": 40}))
    for source, unit in ((tmp_path / "run", 2.0), (state, 100.0)):
        study = load([source])
        (curve,) = study.curves
        assert curve.at_peak is not None
        assert curve.at_peak[20] == pytest.approx(20 * unit) and curve.at_peak[-1] == pytest.approx(30 * unit, rel=0.03)
    assert "runs whose compute counts less as the learning rate decays: 1" in study.mapping[0]
    (by_step,) = load([tmp_path / "run"], x="step").curves
    assert by_step.at_peak is not None and by_step.at_peak[-1] == pytest.approx(30, rel=0.03)
