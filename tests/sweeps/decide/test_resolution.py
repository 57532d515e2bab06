"""Tests of a study's resolution: the smallest difference between recipes that it can detect."""

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
def test_more_seeds_detect_smaller_differences() -> None:
    smallest = []
    for seeds in ("012", "012345678"):
        fits = fit_curves(study(ALIKE, tuple(seeds), seed_sd=0.02))
        result = resolve(fits, "a", 0.02)
        assert result is not None and result.source == "paired" and result.compute == 8.0 and result.seeds == len(seeds)
        smallest.append(result.smallest)
        wide = resolve(fits, "a", 0.1)
        assert wide is not None and (wide.seeds_needed or 0) < (result.seeds_needed or 0)
        assert f"{result.smallest:.3f}" in result.sentence
    assert smallest[1] < 0.8 * smallest[0]
    # Seeds deviate by 0.02, so the difference of two means of nine has sd 0.02 * sqrt(2 / 9); 2.8 sd have 80% power.
    assert smallest[1] == pytest.approx(2.8 * 0.02 * np.sqrt(2 / 9), rel=0.35)


def test_the_resolution_agrees_with_the_comparisons() -> None:
    fits = fit_curves(study({**ALIKE, "bad": 0.4}, seed_sd=0.01))
    result = resolve(fits, "a", 0.02)
    one_by_one = [compare(fits, [(fit.recipe, "a")]).rows[0] for fit in fits if fit.recipe != "a"]
    assert result is not None and result.comparisons == 4
    assert result.detections == sum(row.verdict in ("higher", "lower") for row in one_by_one) >= 1
    assert result.seeds_needed is not None
    needed = sorted(row.seeds_needed or 0 for row in one_by_one)
    assert needed[1] <= result.seeds_needed <= needed[2]


def test_with_one_seed_the_spread_is_taken_from_the_paper() -> None:
    result = resolve(fit_curves(study(ALIKE, ("0",))), "a", 0.02)
    assert result is not None and result.source == "borrowed" and "with 1 seed per recipe, " in result.sentence
    assert "spread between seeds taken from the paper" in result.sentence


def test_seeds_without_information_on_the_asymptote_are_named() -> None:
    curves = study(ALIKE, ("0", "1"))
    short = curves[1]
    # The second seed of this recipe stopped at the start.
    keep = (short.seed == "0") | (short.compute <= 0.02 * short.compute.max())
    curves[1] = short.take(keep)
    result = resolve(fit_curves(curves), "a", 0.02)
    assert result is not None and result.seeds == 1
    assert result.sentence.startswith(
        "with 2 seeds per recipe (in one recipe, only 1 ran far enough to inform the asymptote), this study can detect"
    )
    whole = resolve(fit_curves(study(ALIKE, ("0", "1"))), "a", 0.02)
    assert whole is not None and whole.sentence.startswith("with 2 seeds per recipe, this study can detect")


@pytest.mark.slow
def test_a_null_recipe_shows_the_noise_of_evaluations() -> None:
    rng = np.random.default_rng(2)
    null = make_curve(
        "a+optimizer=null",
        np.tile(np.linspace(0, 8, 33), 2),
        0.2 + 0.03 * rng.standard_normal(66),
        ["0"] * 33 + ["1"] * 33,
    )
    result = resolve(fit_curves([*study(ALIKE, ("0", "1")), null]), "a", 0.02)
    assert result is not None and result.noise == pytest.approx(0.03, rel=0.2)
    assert f"; evaluations of the null recipe scatter by {result.noise:.3f}" in result.sentence
    without = resolve(fit_curves(study(ALIKE, ("0", "1"))), "a", 0.02)
    assert without is not None and without.noise is None and "null recipe" not in without.sentence


def test_without_another_recipe_or_a_baseline_there_is_no_resolution() -> None:
    fits = fit_curves(study({"a": 0.6}))
    assert resolve(fits, "a", 0.02) is None and resolve(fits, None, 0.02) is None and resolve(fits, "z", 0.02) is None


def test_a_ranking_has_its_resolution() -> None:
    ranking = rank(fit_curves(study(ALIKE, seed_sd=0.02)), brief=True)
    assert ranking.undecided and ranking.resolution is not None
    as_json = ranking.to_json()["resolution"]
    assert (
        as_json["smallest"] > NOISE / 10
        and as_json["seeds"] == 3
        and as_json["sentence"] == ranking.resolution.sentence
    )
