"""Tests of the standing of a choice: ranking, plan, rewards and comparison use one posterior and must agree."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ranking import KINDS, Recipe, run, study
from sweeps.curve import Curve, make_curve
from sweeps.decide.next_run import find_next_steps, make_choice, split_budget
from sweeps.decide.pairwise import compare
from sweeps.decide.rank import rank
from sweeps.decide.reward import RewardRow, Rewards, rewards
from sweeps.decide.standing import Outcome, draw_asymptotes, find_standing
from sweeps.decide.wording import headline, outcome_sentence
from sweeps.fit.fit import Interval, fit_curve, fit_curves
from sweeps.fit.posterior import Posterior
from sweeps.fit.predict import asymptote_draws
from sweeps.report.ranking_text import ranking_text, reward_rows
from tests.examples import every
from tests.sweeps.fit.simulate import curve, law


def simulated(*recipes: Recipe, number: int = 0) -> list[Curve]:
    source = np.random.default_rng((13, number))
    return [run(recipe, f"r{i}", source) for i, recipe in enumerate(recipes)]


def test_a_recipe_that_could_not_be_ranked_can_still_win() -> None:
    """The slower recipe has the higher ceiling, but its window ends at 2 C_mid, so it is not identifiable."""
    result = find_standing(fit_curves(simulated(Recipe(0.55, 1.8, 1.0, 6.0), Recipe(0.57, 1.5, 3.0, 6.0))))
    assert not result.decided and result.leader == "r1" and result.ranked == ("r0",)
    assert "r1 is the best choice so far: it has the highest A with P = 0." in outcome_sentence(result)
    assert ", and its A is not identifiable yet (" in outcome_sentence(result)
    assert sum(result.p_best.values()) == pytest.approx(1)
    # An unranked recipe is a rival even if it is the best with a probability below one half.
    result = find_standing(fit_curves(simulated(Recipe(0.6, 1.8, 1.0, 6.0), Recipe(0.5, 1.5, 3.0, 6.0))))
    assert 0.06 < result.p_best["r1"] < 0.4 and result.rivals == ("r1",) and result.leader == "r0"
    assert "1 of 2 recipes cannot be ranked; of these, r1 could be the best (P = 0." in outcome_sentence(result)


@pytest.mark.parametrize("number", every(3, range(3)))
def test_the_leader_is_what_costs_the_least_and_nobody_gets_compute_whom_the_draws_contradict(number: int) -> None:
    """Curves that cross. An asymptote that cannot be named is not evidence that it is low."""
    source = np.random.default_rng((7, 0, number))
    recipes = KINDS[0](source)
    fits = fit_curves([run(recipe, f"r{i}", source) for i, recipe in enumerate(recipes)])
    choice = make_choice(fits)
    result, split = choice.standing, split_budget(choice, 10 * recipes[0].end)
    loss = np.stack([drawn.asymptote() for drawn in result.drawn])
    expected = (loss.max(axis=0) - loss).mean(axis=1)
    assert list(result.losses.values()) == pytest.approx(expected.tolist())
    assert result.losses[result.leader or ""] <= min(expected) + result.margin
    assert (split.winner is None) == (result.losses[result.leader or ""] > result.margin)
    assert split.winner in (None, result.leader)


def test_a_faster_recipe_whose_ceiling_is_less_sure_is_named_with_both_sides() -> None:
    """Only the slow recipe is surely within the margin, so it leads. The other is tied with it and twice as fast."""
    common = {"b": 2.0, "r0": 0.2, "end": 10000.0, "points": 31, "white": 0.008, "seed_sd": 0.004}
    slow = curve("slow", a=0.705, c_mid=3000.0, rng=100, **common)  # type: ignore[arg-type]
    fast = curve("fast", a=0.69, c_mid=1500.0, **common)  # type: ignore[arg-type]
    result = find_standing(fit_curves([slow, fast]), margin=0.03)
    ratio = result.ratio("fast")
    assert result.leader == "slow" and result.tied == ("slow", "fast") and result.faster == ("fast",)
    assert result.outcome is Outcome.FASTER_UNSURE and result.decided
    assert ratio is not None and ratio.high is not None and ratio.high < 1
    assert result.p_wrong is not None and result.p_wrong <= 0.05 < result.p_wrong_by_recipe["fast"]
    sentence = outcome_sentence(result)
    assert re.fullmatch(
        r"slow has the surest ceiling: it is within 0\.03 of the best with P [=>] 0\.9\d\. fast, tied with it in A, "
        r"needs 0\.\d\d \[0\.\d\d, 0\.\d\d\] times its compute to 90% of the gain, but is within 0\.03 of the best "
        r"only with P = 0\.\d\d",
        sentence,
    ), sentence
    line = headline(result, {recipe: recipe for recipe in ("slow", "fast")})
    assert line == "choose slow for the surest ceiling; fast for less compute and a less sure one"


def test_recipes_without_a_forecast_are_named_where_rewards_are_compared() -> None:
    curves = [curve("a", seeds=1), curve("b", seeds=1, a=0.5), curve("few", seeds=1, points=3)]
    table = rewards(fit_curves(curves))
    assert table is not None and {row.recipe for row in table.rows} == {"a", "b"}
    assert "which all recipes with a forecast reached (left out: few), a is ahead" in table.sentence
    table = rewards(fit_curves(curves[:2]))
    assert table is not None and "which all recipes reached, a is ahead" in table.sentence


def test_a_flat_recipe_is_not_a_rival() -> None:
    flat = make_curve("level", np.linspace(0, 6, 31), 0.2 + 0.01 * np.random.default_rng(2).standard_normal(31))
    result = find_standing(fit_curves([*simulated(Recipe(0.66, 1.8, 1.0, 8.0)), flat]))
    assert (
        result.decided
        and result.rivals == ()
        and outcome_sentence(result).endswith(". 1 of 2 recipes cannot be ranked; it is not likely to be the best")
    )


def test_the_draws_of_an_unknown_recipe_cover_the_whole_scale() -> None:
    fits = fit_curves([curve("a", rng=1), curve("few", points=2)])
    draws = draw_asymptotes(fits)[1].asymptote()
    assert draws.min() < 0.02 and draws.max() > 0.98
    assert not find_standing(fits).decided


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    every(3, [kind for kind in KINDS if kind.__name__ != "many"], pytest.mark.full),
    ids=lambda kind: kind.__name__,
)
def test_ranking_and_plan_agree(kind: Callable[[np.random.Generator], list[Recipe]]) -> None:
    assert study((KINDS.index(kind), 991)).agreed


@pytest.mark.full
def test_sure_rankings_are_right() -> None:
    """Coverage and regret on some of the studies of `benchmarks/ranking.py`."""
    outcomes = [study((place, 500 + number)) for place in range(len(KINDS)) for number in range(6)]
    assert all(outcome.agreed for outcome in outcomes)
    assert np.mean([outcome.right for outcome in outcomes if outcome.sure]) >= 0.88
    assert np.mean([outcome.within for outcome in outcomes if outcome.decided]) >= 0.93
    regret, by_chance, by_last = (
        np.mean([getattr(outcome, pick) for outcome in outcomes]) for pick in ("regret", "by_chance", "by_last")
    )
    assert regret <= by_chance + 0.003 and regret < by_last


@pytest.mark.slow
def test_ranking_plan_and_budget_agree_on_the_leader() -> None:
    fits = fit_curves(simulated(Recipe(0.64, 1.8, 1.0, 5.0), Recipe(0.63, 1.6, 1.0, 5.0), Recipe(0.5, 1.8, 1.0, 5.0)))
    choice = make_choice(fits)
    ranking, settlement, split = rank(fits), find_next_steps(choice), split_budget(choice, 100.0)
    assert settlement.settled == (not ranking.undecided)
    assert ranking.sentence.removeprefix("undecided: ") in settlement.sentence
    assert settlement.leader == split.winner == ranking.ranking[0].recipe


@pytest.mark.slow
def test_a_surely_best_recipe_is_chosen_without_an_identifiable_asymptote() -> None:
    fits = fit_curves(simulated(Recipe(0.5, 1.8, 1.0, 6.0), Recipe(0.75, 1.5, 3.0, 6.0)))
    assert not fits[1].identifiable
    ranking, choice = rank(fits), make_choice(fits)
    assert not ranking.undecided and ranking.leader == fits[1].recipe == find_next_steps(choice).leader
    assert "; its A is not identifiable yet (" in ranking.sentence and (choice.standing.p_wrong or 0.0) <= 0.05
    settlement = find_next_steps(choice)
    assert settlement.settled and settlement.sentence == f"no further run is needed to choose: {ranking.sentence}"
    # Undecided if its asymptote may still be below the other.
    fits = fit_curves(simulated(Recipe(0.6, 1.8, 1.0, 6.0), Recipe(0.62, 1.5, 3.0, 6.0)))
    assert not fits[1].identifiable and rank(fits).undecided and "best choice so far" in rank(fits).sentence


@pytest.mark.parametrize("number", [4, 8, 11])
def test_an_identifiable_leader_is_not_called_unidentifiable(number: int) -> None:
    """In a tie the more efficient recipe leads, even if the other is more likely to be within the margin."""
    fits = fit_curves(simulated(Recipe(0.6, 2.2, 1.0, 9.0), Recipe(0.625, 1.5, 1.0, 9.0), number=number))
    result = find_standing(fits)
    assert all(fit.identifiable for fit in fits)
    assert result.leader == result.ranked[0] and "not identifiable yet" not in outcome_sentence(result)


def test_the_highest_of_many_is_shrunk_towards_the_others() -> None:
    fits = fit_curves(simulated(*(Recipe(0.6, 1.8, 1.0, 5.0, 1) for _ in range(8))))
    named = [i for i, fit in enumerate(fits) if fit.identifiable]
    top = max(named, key=lambda i: fits[i].A.value or 0.0)
    rows, outlook = draw_asymptotes(fits)[top].rows, fits[top].outlook
    assert outlook is not None and rows is not None
    # Compare within each law: joint draws use one law for all recipes, so their weights of laws differ from a fit's.
    for number in np.unique(outlook.futures.law[rows]):
        shrunk = outlook.ceiling[rows][outlook.futures.law[rows] == number]
        assert float(shrunk.mean()) < float(outlook.ceiling[outlook.futures.law == number].mean())


@pytest.mark.parametrize("number", range(3))
def test_the_interval_of_a_slow_recipe_contains_its_higher_ceiling_among_many_alike(number: int) -> None:
    """With a minimum scatter of 0.03 between recipes, the intervals would end at 0.65 to 0.67."""
    alike = [Recipe(0.54 + 0.005 * i, 1.8, 1.0, 6.0, 1) for i in range(7)]
    fits = fit_curves(simulated(*alike, Recipe(0.7, 1.6, 5.0, 6.0, 1), number=number))
    low, high = np.quantile(draw_asymptotes(fits)[7].asymptote(), [0.025, 0.975])
    assert not fits[7].identifiable and low < 0.7 < high and "r7" in find_standing(fits).rivals


@pytest.mark.parametrize("end", [0.8, 1.0])
def test_a_recipe_with_few_data_does_not_lead_by_its_wide_posterior(end: float) -> None:
    full = [Recipe(a, 1.8, 1.0, 6.0, 1) for a in (0.58, 0.6, 0.62)]
    fits = fit_curves(simulated(*full, Recipe(0.56, 1.8, 1.0, end, 1)))
    standing = find_standing(fits)
    assert not fits[3].identifiable
    assert standing.drawn[3].values.mean() < 0.62 < asymptote_draws(fits[3]).mean() and standing.leader == "r2"


def test_a_recipe_that_surely_differs_is_hardly_shrunk() -> None:
    fits = fit_curves(simulated(*[Recipe(0.5, 1.8, 1.0, 6.0)] * 3, Recipe(0.75, 1.8, 1.0, 6.0)))
    assert abs(float(draw_asymptotes(fits)[3].values.mean() - asymptote_draws(fits[3]).mean())) < 0.01


def test_all_recipes_follow_one_law_in_a_draw() -> None:
    """Otherwise a law that puts every ceiling higher would look like a difference between recipes."""
    fits = fit_curves(simulated(*(Recipe(0.6, 1.8, 1.0, 1.0, 3) for _ in range(2))))
    assert not any(fit.identifiable for fit in fits)
    first, second = (drawn.rows for drawn in draw_asymptotes(fits))
    assert first is not None and second is not None
    assert fits[0].outlook is not None and fits[1].outlook is not None
    kinds = fits[0].outlook.futures.law[first], fits[1].outlook.futures.law[second]
    assert np.mean(kinds[0] == kinds[1]) > 0.9


# --- rewards --------------------------------------------------------------------------------------------------


def test_every_recipe_has_a_reward_at_common_compute() -> None:
    slow = curve("slow", c_mid=5000, end=4000, points=20, rng=2)
    reward_table = rewards(fit_curves([curve("fast", rng=1), slow, curve("few", points=4)]), budget=8000.0)
    assert reward_table is not None and reward_table.compute <= 4000
    rows = {row.recipe: row for row in reward_table.rows}
    assert set(rows) == {"fast", "slow", "few"} and sum(row.p_best for row in reward_table.rows) == pytest.approx(1)
    assert rows["fast"].R_at_budget is not None and (rows["fast"].R_at_budget.value or 0) > (rows["fast"].R.value or 0)


def test_the_compute_ratio_to_a_common_reward() -> None:
    """If only C_mid differs, the compute to reach a reward is proportional to C_mid (here 3400 / 2000 = 1.7)."""
    fits = fit_curves([curve("fast", c_mid=2000, white=0.004, rng=1), curve("slow", c_mid=3400, white=0.004, rng=2)])
    reward_table = rewards(fits)
    assert reward_table is not None and reward_table.reward is not None
    slow = next(row for row in reward_table.rows if row.recipe == "slow")
    assert slow.ratio is not None and slow.ratio.low is not None and slow.ratio.high is not None
    assert slow.ratio.low < 1.7 < slow.ratio.high and slow.ratio.high < 2.5
    assert "slow needs 1.7x the compute of fast to reach 0." in reward_table.sentence
    # The reward is at four fifths of the slower recipe's gain, where neither curve is on its plateau.
    assert reward_table.reward == pytest.approx(
        0.3 + 0.8 * (law(np.array([16000.0]), 0.61, 1.9, 3400, 0.3)[0] - 0.3), abs=0.02
    )


def test_too_few_points_give_no_reward_table() -> None:
    assert rewards([fit_curve(curve("few", points=2))]) is None


def test_the_fastest_recipe_is_shown_only_if_known() -> None:
    row = RewardRow("a", Interval(0.5, 0.4, 0.6), 0.5, None, None, None, None)
    others = [replace(row, recipe="b", C=Interval(2.0, 1.0, 3.0)), replace(row, recipe="c", ratio=Interval(2.0, 1, 3))]
    known = Rewards(10.0, 0.4, None, "", (row, *others), fastest="b")
    head, rows = reward_rows(known)
    assert [cells[head.index("times the least")] for cells in rows] == ["-", "1", "2.00 [1.00, 3.00]"]
    assert [cells[-1] for cells in reward_rows(replace(known, fastest=None))[1]] == ["-", "-", "2.00 [1.00, 3.00]"]
    assert "fastest" not in known.to_json()


def test_no_recipe_is_fastest_if_no_draw_reaches_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the first recipe must not be called the fastest."""
    monkeypatch.setattr("sweeps.decide.reward.first_compute_above", lambda paths, *_: np.full(len(paths), np.inf))
    reward_table = rewards(fit_curves([curve("a"), curve("b", a=0.5)]))
    assert reward_table is not None and "(highest with P > 0.99)" in reward_table.sentence
    assert reward_table is not None and reward_table.reward is not None and reward_table.fastest is None
    head, rows = reward_rows(reward_table)
    assert [cells[head.index("times the least")] for cells in rows] == [
        "-",
        "-",
    ] and " needs " not in reward_table.sentence


def test_no_flat_recipe_is_chosen() -> None:
    """If no recipe rises, none is chosen. The text begins with the difference that the study can detect."""
    source = np.random.default_rng(3)
    compute = np.linspace(0, 6, 31)
    ranking = rank(fit_curves([make_curve(name, compute, 0.2 + 0.01 * source.standard_normal(31)) for name in "ab"]))
    assert ranking.undecided and ranking.sentence == "undecided: nothing to choose yet, because both recipes are flat"
    assert ranking.resolution is not None and ranking.outcome == (ranking.resolution.sentence, ranking.sentence)
    assert ranking_text(ranking).startswith("with 1 seed per recipe, this study can detect a difference of ")


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_recipes_that_never_moved_have_no_winner(reward: float) -> None:
    """Constant recipes are surely within the margin, but no run shows which one is better."""
    compute, rewards = np.tile(np.linspace(0, 6, 24), 2), np.full(48, reward)
    curves = [make_curve(name, compute, rewards, seed=np.repeat(["0", "1"], 24)) for name in "ab"]
    ranking = rank(fit_curves(curves))
    assert ranking.undecided and ranking.sentence == "undecided: nothing to choose yet, because both recipes are flat"


def test_a_surely_higher_flat_recipe_is_chosen() -> None:
    source = np.random.default_rng(5)
    compute = np.linspace(0, 6, 31)
    curves = [make_curve(n, compute, a + 0.01 * source.standard_normal(31)) for n, a in (("a", 0.3), ("b", 0.7))]
    ranking = rank(fit_curves(curves))
    assert not ranking.undecided and ranking.leader == "b"


def test_each_curve_is_fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking, plan, rewards and comparison use the draws of the fits and do not fit again."""
    posteriors = 0
    init = Posterior.__init__

    def counted(self: Posterior, *args: object, **settings: object) -> None:
        nonlocal posteriors
        posteriors += 1
        init(self, *args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Posterior, "__init__", counted)
    fits = fit_curves([curve(f"base+axis={i}", a=0.5 + 0.03 * i, rng=i) for i in range(4)])
    assert posteriors == 4
    choice = make_choice(fits)
    rank(fits, budget=40000.0)
    find_next_steps(choice)
    split_budget(choice, 1e5)
    rewards(fits)
    compare(fits, [("base+axis=0", "base+axis=1")])
    assert posteriors == 4


def test_a_choice_may_be_decided_only_at_a_horizon() -> None:
    """Either ceiling may be the higher one, but one recipe is far ahead at twice the window."""
    fits = fit_curves(simulated(Recipe(0.62, 1.8, 1.0, 3.0), Recipe(0.55, 1.3, 4.0, 3.0)))
    ranking = rank(fits)
    assert ranking.horizon is not None and ranking.horizon.compute == pytest.approx(6.0)
    assert ranking.undecided and ranking.horizon.decided and ranking.horizon.leader == "r0"
    assert ranking.outcome[1].startswith(
        "decided at 2 windows (compute 6): r0 is within 0.02 of the highest reward with P"
    )
    assert sum(ranking.horizon.p_best.values()) == pytest.approx(1)
    # With a budget, the horizon is the budget.
    budgeted = rank(fits, budget=9.0)
    assert budgeted.horizon is not None and budgeted.horizon.windows == pytest.approx(3.0)
    assert [entry.p_best_at_horizon for entry in budgeted.ranking] == pytest.approx(
        [budgeted.horizon.p_best[entry.recipe] for entry in budgeted.ranking]
    )
