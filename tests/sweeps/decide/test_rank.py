"""Tests of rankings: the better recipe wins if the data show it, and otherwise the ranking is undecided or tied."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sweeps.curve import Curve, make_curve
from sweeps.decide.rank import Ranking, rank
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from tests.sweeps.fit.simulate import curve, law


def ranked(*curves: Curve, **options: float) -> Ranking:
    result = rank(fit_curves(curves), **options)
    json.dumps(result.to_json(), allow_nan=False)
    return result


def test_clearly_better_asymptote_wins() -> None:
    result = ranked(curve("last", a=0.44, rng=3), curve("grpo", a=0.5, rng=1), curve("scalerl", a=0.61, rng=2))
    assert [(entry.rank, entry.recipe) for entry in result.ranking] == [(1, "scalerl"), (2, "grpo"), (3, "last")]
    assert not result.undecided
    assert (result.ranking[0].p_best or 0) > 0.99
    assert not result.ranking[0].tied_with_best


@pytest.mark.slow
def test_the_steeper_of_tied_recipes_is_first() -> None:
    """At equal C_mid, the recipe with the higher B needs less compute for 90% of the gain."""
    result = ranked(
        curve("scalerl", a=0.61, b=2.0, white=0.003, rng=1),
        curve("scalerl+loss=dapo", a=0.612, b=1.5, white=0.003, rng=2),
    )
    first, second = result.ranking
    assert (first.recipe, second.recipe) == ("scalerl", "scalerl+loss=dapo")
    assert first.tied_with_best and second.tied_with_best
    assert first.B_at_shared_A is not None and second.B_at_shared_A is not None
    assert (first.B_at_shared_A.value or 0) > (second.B_at_shared_A.value or 0)
    assert not result.undecided


def test_any_of_equal_recipes_may_be_chosen() -> None:
    """Recipes surely within the margin and equally efficient are a decided tie. The sentence names no best recipe."""
    result = ranked(*(curve(name, rng=i) for i, name in enumerate(("scalerl", "scalerl+kl=fixed"))))
    assert not result.undecided and "are tied in A within 0.02" in result.sentence
    assert result.sentence.endswith("take any of them") and "is best" not in result.sentence
    assert all(entry.tied_with_best for entry in result.ranking)


def test_efficiency_does_not_choose_a_recipe_that_may_be_worse() -> None:
    """Two estimates of A are within the margin. The recipe with the higher B is uncertain, so it does not lead."""
    sure = curve("sure", a=0.6, b=1.5, rng=1)
    rough = curve("rough", a=0.59, b=3.0, white=0.05, rng=2)
    result = ranked(sure, rough)
    assert result.leader == "sure" and result.ranking[0].recipe == "sure"


@pytest.mark.full
def test_p_best_of_equal_recipes_is_calibrated() -> None:
    """Two equal recipes whose seeds differ by 0.015: P(best) may exceed 0.95 in at most 5 of 20 studies."""
    sure = 0
    for i in range(20):
        fits = fit_curves(
            [curve(n, seed_sd=0.015, white=0.004, points=21, rng=1000 + 2 * i + k) for k, n in enumerate("ab")]
        )
        sure += max(entry.p_best or 0 for entry in rank(fits).ranking) > 0.95
    assert sure <= 5


def test_refused_recipes_come_last_with_their_reason() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 16000, 30)
    flat = Curve("a-flat", x, 0.3 + 0.01 * rng.standard_normal(30), np.full(30, "0"))
    result = ranked(flat, curve("scalerl", rng=1), curve("scalerl+loss=dapo", end=2000, rng=2), curve("z", a=0.5))
    last = result.ranking[-2:]
    assert [entry.rank for entry in result.ranking] == [1, 2, None, None]
    assert {entry.recipe for entry in last} == {"a-flat", "scalerl+loss=dapo"}
    assert all(entry.reason for entry in last)
    assert sum(entry.p_best or 0 for entry in result.ranking) == pytest.approx(1.0)
    # A recipe before its bend may still be the best, a flat one may not.
    p_best = {entry.recipe: entry.p_best or 0.0 for entry in result.ranking}
    assert p_best["a-flat"] < 0.05 < p_best["scalerl+loss=dapo"] and result.undecided
    assert result.leader == "scalerl+loss=dapo" and "is the best choice so far: it has the" in result.sentence
    assert ", and its A is not identifiable yet (pre_inflection)" in result.sentence
    losses = {entry.recipe: entry.expected_loss for entry in result.ranking}
    assert min(losses, key=lambda recipe: losses[recipe]) == result.leader and min(losses.values()) > 0


def test_nothing_identifiable_is_undecided() -> None:
    result = ranked(curve("scalerl", end=1500), curve("scalerl+loss=dapo", end=1500, rng=1))
    assert result.undecided and all(entry.rank is None for entry in result.ranking)


def test_the_interval_of_reward_at_the_budget_contains_the_truth() -> None:
    result = ranked(curve("scalerl", white=0.01, end=6000, rng=1), budget=6000.0)
    (entry,) = result.ranking
    assert entry.R_at_budget is not None
    low, high = entry.R_at_budget.low, entry.R_at_budget.high
    assert low is not None and high is not None and entry.A.low is not None
    assert low <= 0.3 + 0.31 / (1 + (2500 / 6000) ** 1.9) <= high and high - low < 0.06


def test_leave_one_out_compares_with_the_baseline() -> None:
    result = ranked(
        curve("scalerl", white=0.003, rng=1),
        curve("scalerl+loss=dapo", b=1.5, white=0.003, rng=2),
        curve("scalerl+precision=bf16", a=0.52, white=0.003, rng=3),
        curve("grpo", a=0.5, rng=4),
    )
    assert result.baseline == "scalerl"
    table = {entry.recipe: entry for entry in result.leave_one_out}
    assert set(table) == {"scalerl+loss=dapo", "scalerl+precision=bf16"}
    slower = table["scalerl+loss=dapo"].delta_b
    assert slower is not None and slower.high is not None and slower.high < 0
    worse = table["scalerl+precision=bf16"]
    assert worse.delta_b is None
    assert worse.delta_a is not None and worse.delta_a.value == pytest.approx(-0.09, abs=0.02)


@pytest.mark.full
def test_a_baseline_can_be_asked_for_where_no_run_names_one() -> None:
    plain = [replace(curve(name, white=0.003, rng=i), baseline=None) for i, name in enumerate(("a", "b"))]
    fits = fit_curves(plain)
    assert rank(fits).baseline is None and not rank(fits).leave_one_out
    asked = rank(fits, baseline="b")
    assert (asked.baseline, [entry.recipe for entry in asked.leave_one_out]) == ("b", ["a"])
    with pytest.raises(UserError, match="--baseline 'c': no such recipe; there are a, b"):
        rank(fits, baseline="c")


def test_impossible_options_are_one_line_errors() -> None:
    fits = fit_curves([curve(points=15)])
    for options, word in (({"margin": -1.0}, "--margin"), ({"budget": 0.0}, "--budget")):
        with pytest.raises(UserError, match=word):
            rank(fits, **options)
    with pytest.raises(UserError, match="nothing to rank"):
        rank([])


def seeded(recipe: str, offsets: dict[str, float], rng: int) -> Curve:
    """Simulate one run per seed. offsets: deviation of its asymptote, by seed."""
    compute = np.linspace(0.0, 16000.0, 33)
    random = np.random.default_rng(rng)
    rewards = [law(compute, 0.61 + d, 1.9, 2500.0, 0.3) + 0.003 * random.standard_normal(33) for d in offsets.values()]
    return make_curve(recipe, np.tile(compute, len(offsets)), np.concatenate(rewards), np.repeat(list(offsets), 33))


@pytest.mark.slow
def test_a_seeds_common_effect_on_recipes_cancels() -> None:
    shared = {"0": 0.02, "1": -0.02, "2": 0.0}
    better = {label: offset + 0.008 for label, offset in shared.items()}
    paired = rank(fit_curves([seeded("a", better, 1), seeded("b", shared, 2)]), margin=0.0)
    assert paired.pairing is not None and paired.pairing.seeds == ("0", "1", "2")
    assert paired.pairing.spread.sd < 0.5 * fit_curves([seeded("b", shared, 2)])[0].seed_spread.sd
    other = {"7": 0.02, "8": -0.02, "9": 0.0}
    unpaired = rank(fit_curves([seeded("a", better, 1), seeded("b", other, 2)]), margin=0.0)
    assert unpaired.pairing is None
    assert (paired.ranking[0].p_best or 0) > 0.9 > (unpaired.ranking[0].p_best or 0)


@pytest.mark.slow
def test_seeds_that_only_some_recipes_have_are_not_paired() -> None:
    x = seeded("x", {"0": 0.0, "1": 0.002, "2": 0.03, "3": 0.03}, 1)
    y = seeded("y", {"0": 0.0, "1": 0.002, "7": -0.03, "8": -0.03}, 2)
    ranking = rank(fit_curves([x, y]), margin=0.0)
    assert ranking.pairing is None and ranking.undecided


@pytest.mark.slow
def test_run_numbers_given_by_a_reader_are_not_paired_as_seeds() -> None:
    numbered = {"run 0": 0.02, "run 1": -0.02, "run 2": 0.0}
    assert rank(fit_curves([seeded("a", numbered, 1), seeded("b", numbered, 2)])).pairing is None


def test_the_margin_scales_with_the_reward() -> None:
    data = [seeded("a", {"0": 0.0}, 1), seeded("b", {"0": -0.01}, 2)]
    percent = [make_curve(c.recipe, c.compute, 100 * c.reward, c.seed) for c in data]
    fractions, percents = rank(fit_curves(data)), rank(fit_curves(percent))
    assert percents.margin == 100 * fractions.margin
    assert [e.tied_with_best for e in percents.ranking] == [e.tied_with_best for e in fractions.ranking] == [True, True]


def test_evaluation_sets_are_not_ranked_against_each_other() -> None:
    data = [seeded("a set=math", {"0": 0.0}, 1), seeded("a set=code", {"0": 0.0}, 2)]
    fits = fit_curves([replace(c, factors={"set": c.recipe[-4:]}) for c in data])
    with pytest.raises(UserError, match=r"code, math.*--metric"):
        rank(fits)


def test_a_single_unranked_recipe_is_called_the_only_recipe() -> None:
    """The sentence must not say "none of the 1 recipes"."""
    sentence = rank(fit_curves([curve("short", end=1500)])).sentence
    assert "short, the only recipe, is not identifiable" in sentence and "1 recipes" not in sentence
