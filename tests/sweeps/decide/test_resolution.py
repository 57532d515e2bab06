"""Truths about what a study says it can tell."""

from __future__ import annotations

import numpy as np
import pytest

from sweeps.curve import make_curve
from sweeps.decide.pairwise import compare
from sweeps.decide.rank import rank
from sweeps.decide.resolution import resolve
from sweeps.fit.fit import fit_curves
from tests.sweeps.decide.test_pairwise import NOISE, study

ALIKE = {"a": 0.6, "b": 0.6, "c": 0.61, "d": 0.59}


@pytest.mark.slow
def test_more_seeds_tell_smaller_differences_and_fewer_are_needed_where_little_is_asked() -> None:
    smallest = []
    for seeds in ("012", "012345678"):
        fits = fit_curves(study(ALIKE, tuple(seeds), each=0.02))
        found = resolve(fits, "a", 0.02)
        assert found is not None and found.source == "paired" and found.compute == 8.0 and found.seeds == len(seeds)
        smallest.append(found.smallest)
        wide = resolve(fits, "a", 0.1)
        assert wide is not None and (wide.seeds_needed or 0) < (found.seeds_needed or 0)
        assert f"{found.smallest:.3f}" in found.sentence
    assert smallest[1] < 0.8 * smallest[0]
    # A seed's own deviation of 0.02: of a difference, with nine seeds, 2.8 * 0.02 * sqrt(2 / 9).
    assert smallest[1] == pytest.approx(2.8 * 0.02 * np.sqrt(2 / 9), rel=0.35)


def test_it_says_what_the_comparisons_say() -> None:
    fits = fit_curves(study({**ALIKE, "bad": 0.4}, each=0.01))
    found = resolve(fits, "a", 0.02)
    one_by_one = [compare(fits, [(fit.recipe, "a")]).rows[0] for fit in fits if fit.recipe != "a"]
    assert found is not None and found.comparisons == 4
    assert found.detections == sum(row.verdict in ("higher", "lower") for row in one_by_one) >= 1
    assert found.seeds_needed is not None
    needed = sorted(row.seeds_needed or 0 for row in one_by_one)
    assert needed[1] <= found.seeds_needed <= needed[2]


def test_where_there_is_one_seed_the_spread_is_borrowed_and_named() -> None:
    found = resolve(fit_curves(study(ALIKE, ("0",))), "a", 0.02)
    assert found is not None and found.source == "borrowed" and "with 1 seed per recipe, " in found.sentence
    assert "spread between seeds taken from the paper" in found.sentence


def test_seeds_that_ran_and_seeds_that_tell_are_both_said() -> None:
    curves = study(ALIKE, ("0", "1"))
    short = curves[1]
    # Its second seed stopped at its start.
    keep = (short.seed == "0") | (short.compute <= 0.02 * short.compute.max())
    curves[1] = short.take(keep)
    found = resolve(fit_curves(curves), "a", 0.02)
    assert found is not None and found.seeds == 1
    assert found.sentence.startswith(
        "with 2 seeds per recipe (in one recipe, only 1 ran far enough to inform the asymptote), this study can detect"
    )
    whole = resolve(fit_curves(study(ALIKE, ("0", "1"))), "a", 0.02)
    assert whole is not None and whole.sentence.startswith("with 2 seeds per recipe, this study can detect")


@pytest.mark.slow
def test_a_run_at_a_learning_rate_of_zero_shows_the_noise() -> None:
    rng = np.random.default_rng(2)
    null = make_curve(
        "a+optimizer=null",
        np.tile(np.linspace(0, 8, 33), 2),
        0.2 + 0.03 * rng.standard_normal(66),
        ["0"] * 33 + ["1"] * 33,
    )
    found = resolve(fit_curves([*study(ALIKE, ("0", "1")), null]), "a", 0.02)
    assert found is not None and found.noise == pytest.approx(0.03, rel=0.2)
    assert f"; evaluations of the null recipe scatter by {found.noise:.3f}" in found.sentence
    without = resolve(fit_curves(study(ALIKE, ("0", "1"))), "a", 0.02)
    assert without is not None and without.noise is None and "null recipe" not in without.sentence


def test_what_has_nothing_to_be_compared_with_says_nothing() -> None:
    fits = fit_curves(study({"a": 0.6}))
    assert resolve(fits, "a", 0.02) is None and resolve(fits, None, 0.02) is None and resolve(fits, "z", 0.02) is None


def test_a_ranking_has_it() -> None:
    found = rank(fit_curves(study(ALIKE, each=0.02)), brief=True)
    assert found.undecided and found.resolution is not None
    said = found.to_json()["resolution"]
    assert said["smallest"] > NOISE / 10 and said["seeds"] == 3 and said["sentence"] == found.resolution.sentence
