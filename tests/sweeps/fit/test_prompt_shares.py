"""Tests of benchmarks/prompt_shares.py: simulated relays of prompts, controls, and corrections."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.prompt_shares import COMPUTE, CONTROLS, GAPS, HOPELESS, SETTINGS, Cut, Setting, pass_rates, weights


def test_in_a_relay_hard_prompts_stay_at_0_until_easy_ones_are_learned() -> None:
    (setting,) = [candidate for candidate in SETTINGS if candidate.kind == GAPS and candidate.value == 100]
    for number in range(5):
        rates = pass_rates(setting, np.random.default_rng(number))
        easy, hard = (rates[:, part].mean(axis=1) for part in np.array_split(np.argsort(rates[0])[::-1], [40, 90])[::2])
        learned = int(np.argmax(easy > 0.9))
        assert 0 < learned < len(COMPUTE) - 1 and (hard[:learned] < 0.05).all(), "the levels overlap"


@pytest.mark.parametrize("setting", [candidate for candidate in SETTINGS if candidate.kind in CONTROLS], ids=str)
def test_controls_rise_and_level_off(setting: Setting) -> None:
    rates = np.mean([pass_rates(setting, np.random.default_rng(i)).mean(axis=1) for i in range(20)], axis=0)
    early, late = rates[12] - rates[0], rates[24] - rates[12]
    assert early > 1.3 * late > 0


def test_half_of_the_prompts_of_the_hopeless_control_are_never_learned() -> None:
    setting = replace(next(candidate for candidate in SETTINGS if candidate.kind == HOPELESS), value=0.5)
    rates = np.concatenate([pass_rates(setting, np.random.default_rng(i)) for i in range(10)], axis=1)
    assert abs((rates == 0).all(axis=0).mean() - 0.5) < 0.05


def test_the_weights_of_a_correction_ignore_outliers() -> None:
    rng = np.random.default_rng(0)
    terms = rng.random((60, 2))
    errors = terms @ [0.3, -0.2]
    errors[:15] += 5.0  # outliers, which least squares would follow
    cuts = [Cut("", 0.0, float(error), False, {"x": row}) for row, error in zip(terms, errors, strict=True)]
    np.testing.assert_allclose(weights(cuts, "x"), [0.3, -0.2], atol=1e-3)
