"""Tests of races: which recipes are stopped, when a race looks, and the benchmark's competing rules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.pruners import WilcoxonPruner
from optuna.trial import FrozenTrial, TrialState

from benchmarks.racing import ours, rivals, staircases
from benchmarks.racing.ours import RACING, Forecasts
from benchmarks.racing.rivals import halving, median_rule, signed_rank
from benchmarks.racing.simulate import simulate, together
from benchmarks.racing.studies import SETTINGS, Outcome, Study, make_study
from sweeps.cli.main import main
from sweeps.curve import Array, Curve, make_curve, with_shared_scale
from sweeps.decide.race import Look, Race, _count_stops, look_at, make_look, run_race
from sweeps.decide.rules import Rules
from sweeps.decide.standing import chances_of_being_best
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, FitOptions, fit_curves
from sweeps.source import load
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve

BUDGET = 16000.0
RULES = Rules(BUDGET, looks=2, growth=1.3)


def cut(data: Curve, compute: float) -> Curve:
    keep = data.compute <= compute
    return make_curve(data.recipe, data.compute[keep], data.reward[keep], data.seed[keep])


def raced(curves: Sequence[Curve], rules: Rules = RULES, ended: bool = True) -> Race:
    return run_race(curves, rules, ended=[c.recipe for c in curves] if ended else ())


def three() -> list[Curve]:
    return [
        curve("good", a=0.65, rng=1),
        curve("bad", a=0.45, rng=2),
        # Slow, but the best in the end. While the others are ahead of it, the outcome is still open.
        curve("late", a=0.85, b=1.8, c_mid=8000, rng=3),
    ]


def test_a_loser_is_stopped_and_one_that_rises_late_is_not() -> None:
    race = raced(three())
    assert race.leader == "late" and race.stopped["bad"] < 0.5 * BUDGET
    bad = next(runner for runner in race.runners if runner.recipe == "bad")
    assert bad.spent == 2 * race.stopped["bad"]
    assert race.saved == pytest.approx(sum(2 * (BUDGET - at) for at in race.stopped.values()))
    assert race.full == 6 * BUDGET
    assert "of ending ahead of " in bad.reason and " at 1.6e+04, where its forecast is 0.4" in bad.reason
    # At the first look the late one has the lowest reward, so a rule by current rewards would stop it.
    early = [cut(c, 0.2 * BUDGET) for c in three()]
    assert min(early, key=lambda c: c.reward[c.compute == c.compute.max()].mean()).recipe == "late"


@pytest.mark.full
def test_later_evaluations_do_not_change_earlier_looks() -> None:
    whole = raced(three())
    for index, look in enumerate(whole.looks):
        # Cut the curves shortly after this look. The first recipe has run much further, which must not matter either.
        partial_curves = [cut(c, look.compute * (1.01 if at else 1.7) + 500) for at, c in enumerate(three())]
        partial_race = raced(partial_curves, ended=False)
        assert partial_race.looks[: index + 1] == whole.looks[: index + 1]


def test_a_reward_that_comes_later_does_not_change_the_scale_of_a_look() -> None:
    good, bad, _ = three()
    later = replace(good, reward=np.where(good.compute > 8000, 2 * good.reward, good.reward))
    assert later.range is None
    assert look_at(with_shared_scale([later, bad]), 4000, RULES) == look_at([good, bad], 4000, RULES)


@pytest.mark.full
def test_neither_order_nor_unit_of_compute_decides() -> None:
    race = raced(three())
    turned = raced(three()[::-1])
    assert {runner.recipe: runner for runner in race.runners} == {runner.recipe: runner for runner in turned.runners}
    hours = [make_curve(c.recipe, c.compute / 3600, c.reward, c.seed) for c in three()]
    other = raced(hours, replace(RULES, budget=BUDGET / 3600))
    assert {name: at * 3600 for name, at in other.stopped.items()} == pytest.approx(race.stopped)


@pytest.mark.slow
def test_a_look_waits_for_the_slowest_unless_it_has_ended() -> None:
    curves = [curve("good", a=0.65, rng=1), cut(curve("bad", a=0.45, rng=2), 5000), curve("other", a=0.64, rng=3)]
    patient = replace(RULES, looks=99)
    waiting = run_race(curves, patient)
    assert waiting.waits_for == ("bad",) and not waiting.stopped
    assert [look.compute for look in waiting.looks] == [level for level in RULES.levels() if level <= 5000]
    assert "the next look waits for bad" in waiting.sentence
    continued = run_race(curves, patient, ended=["bad"])
    assert continued.waits_for == () and len(continued.looks) == len(list(RULES.levels()))
    # A look also waits for a single slow seed.
    slow = three()[0]
    keep = (slow.seed == "0") | (slow.compute <= 4000)
    lagging = make_curve("good", slow.compute[keep], slow.reward[keep], slow.seed[keep])
    assert run_race([lagging, *three()[1:]], RULES).waits_for == ("good",)


def test_before_the_first_look_nobody_leads() -> None:
    race = run_race([cut(c, 1000) for c in three()], RULES)
    assert (race.looks, race.leader, race.saved) == ((), None, 0.0)
    assert race.sentence.startswith(
        "no look yet: the first is at compute 3200; the next look waits for good, bad, late"
    )
    assert all(runner.p_best is None and runner.reason == "no look yet" for runner in race.runners)


@pytest.mark.slow
def test_many_equal_recipes_are_not_all_stopped() -> None:
    """Each of 60 equal recipes has a small P(best), but about an even chance against any single other recipe."""
    curves = [curve(f"r{number}", a=0.6, points=17, rng=number, seeds=1) for number in range(60)]
    look = look_at(curves, 0.3 * BUDGET, replace(RULES, looks=1))
    assert max(chance.p_best for chance in look.chances) < 0.4
    assert len(look.stopped) < 30


def test_a_recipe_without_a_forecast_is_not_stopped() -> None:
    early = cut(curve("early", a=0.5, rng=4), 1500)
    look = look_at([curve("good", a=0.65, rng=1), early], 4000, replace(RULES, looks=1))
    assert (look.of("early").p_ahead or 0.0) > 0.1
    assert look.stopped == ()
    untried = make_curve("untried", [9000.0], [0.4])
    assert [chance.recipe for chance in look_at([*three(), untried], 4000, RULES).chances] == ["good", "bad", "late"]


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.floats(0.3, 0.8), min_size=2, max_size=4), st.integers(0, 10_000))
def test_one_recipe_always_remains_and_json_is_finite(tops: list[float], number: int) -> None:
    curves = [curve(f"r{at}", a=a, wander=0.01, points=17, rng=number + at) for at, a in enumerate(tops)]
    race = raced(curves, Rules(BUDGET, p_ahead=0.4, looks=1, growth=1.5))
    assert len(race.stopped) < len(curves) and race.leader not in race.stopped
    json.dumps(race.to_json(), allow_nan=False)
    for look in race.looks:
        assert look.favourite not in look.stopped
        assert sum(chance.p_best for chance in look.chances) == pytest.approx(1)
        assert all(race.stopped[name] == look.compute for name in look.stopped)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"budget": 0.0}, "--budget 0: give a positive compute"),
        ({"budget": np.inf}, "--budget inf"),
        ({"p_ahead": 0.0}, "--p-ahead 0: give a chance above 0 and below 0.5"),
        ({"p_ahead": 0.5}, "--p-ahead 0.5"),
        ({"looks": 0}, "--looks 0: give 1 or more"),
        ({"first": 1.0}, "--first 1: give a share of the budget"),
        ({"growth": 1.0}, "--growth 1: give a factor above 1"),
        ({"loss": 0.0}, "--loss 0: give a share of the reward's scale, above 0; 1 sets no limit"),
        ({"loss": 1.5}, "--loss 1.5"),
    ],
)
def test_rules_that_mean_nothing_are_refused(bad: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        Rules(**({"budget": 1.0} | bad))  # type: ignore[arg-type]


def test_a_race_takes_two() -> None:
    with pytest.raises(UserError, match="two recipes or more"):
        run_race([curve()], RULES)


@pytest.mark.slow
def test_no_look_is_taken_before_all_recipes_have_evaluations() -> None:
    """The first evaluations may come after the first look's compute, in the table or because of --min-compute."""
    late = [make_curve(c.recipe, c.compute + 5000, c.reward, c.seed) for c in three()]
    assert raced(late).looks[0].compute > 5000
    race = run_race(three(), RULES, FitOptions(min_compute=4500.0), ended=["good", "bad", "late"])
    assert race.looks[0].compute > 4500
    far = [make_curve(c.recipe, c.compute + 50000, c.reward, c.seed) for c in three()]
    assert raced(far).looks == ()


def test_the_window_of_a_fit_ends_the_race() -> None:
    race = run_race(three(), RULES, FitOptions(max_compute=6000.0), ended=["good", "bad", "late"])
    assert race.looks[-1].compute <= 6000 < race.looks[-1].compute * RULES.growth


def test_race_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    table = str(ROOT / "examples" / "curves.csv")
    assert main(["race", table, "--budget", "16000"]) == 0
    out = capsys.readouterr().out
    assert "scalerl+loss=dapo" in out and "3 of 4 recipes stopped after 9 looks; scalerl leads" in out
    assert main(["race", table, "--budget", "16000", "--json", "--growth", "1.5"]) == 0
    race_json = json.loads(capsys.readouterr().out)
    assert race_json["rules"]["growth"] == 1.5 and race_json["leader"] == "scalerl"
    assert {entry["recipe"] for entry in race_json["recipes"]} == {
        entry["recipe"] for entry in race_json["looks"][0]["chances"]
    }
    assert main(["race", table, "--budget", "16000", "--first", "2"]) == 1
    assert "--first 2: give a share" in capsys.readouterr().err
    assert main(["race", table, "--budget", "187"]) == 1
    assert "--budget 187: the earliest evaluation is at compute 187.5; give the compute" in capsys.readouterr().err


@pytest.mark.full
def test_a_race_over_real_runs_keeps_the_best() -> None:
    """92 real runs: no stopped recipe ends more than 0.02 above the best kept one (docs/guide/race.md)."""
    curves = load([ROOT / "benchmarks/racing/replication_hot.csv"]).curves
    budget = 4.5e11
    race = run_race(curves, Rules(budget), ended=[c.recipe for c in curves], workers=2)
    final_reward = {
        c.recipe: float(c.reward[c.compute > 0.93 * budget].mean()) for c in curves if c.compute.max() > budget
    }
    kept_recipes = [recipe for recipe in final_reward if recipe not in race.stopped]
    assert 0.3 < race.saved / race.full < 0.5
    assert max(final_reward.values()) - final_reward[race.leader or ""] < 0.02
    assert (
        max(final_reward[recipe] for recipe in final_reward if recipe in race.stopped)
        < max(final_reward[kept_recipe] for kept_recipe in kept_recipes) + 0.02
    )


# --- the simulation that measures the value of racing --------------------------------------------------------


def plain(*rewards: float) -> Study:
    """Return a study of eight recipes with constant rewards; 0.1 for those that are not listed."""
    truth = np.array([*rewards, *([0.1] * (8 - len(rewards)))])
    rate = np.tile(truth[:, None], (1, 21))
    passed = np.tile((np.arange(128) / 128 < truth[:, None]).astype(float)[:, None, :], (1, 21, 1))
    return Study(truth, truth, rate, np.full_like(rate, 0.01), passed)


@pytest.mark.full
def test_rivals_pay_for_all_compute_that_they_used() -> None:
    study = plain(0.8, 0.6, 0.5, 0.4)
    assert halving(study, 2, 0.25).tolist() == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert halving(study, 4, 0.1).tolist() == pytest.approx([1.0, 0.4, *[0.1] * 6])
    # A recipe at the median of the running ones is not stopped.
    assert median_rule(plain(*[0.8] * 5), 0.3).tolist() == [*[1.0] * 5, *[0.3] * 3]
    assert signed_rank(study, 0.01, 0.2).tolist() == [1.0, *[0.2] * 7]
    by_method = rivals.outcomes(study) | ours.outcomes(study)
    assert by_method["all runs to the budget"].compute == 1.0
    assert all(result.regret == 0 and result.false == 0 for result in by_method.values())


def test_signed_rank_equals_optunas_wilcoxon_pruner() -> None:
    """Optuna compares a trial with the best one, prompt by prompt, at every evaluation of every recipe."""
    study, grace, p = make_study(SETTINGS[0], 5), 0.2, 0.01
    running, spent = list(range(8)), np.ones(8)
    for at in range(4, 20):
        best = max(running, key=lambda recipe: study.rate[recipe, at])
        searched = optuna.create_study(direction="maximize")
        searched.add_trial(trial(study, best, at, TrialState.COMPLETE))
        for recipe in [candidate for candidate in running if candidate != best]:
            if WilcoxonPruner(p_threshold=p).prune(searched, trial(study, recipe, at, TrialState.RUNNING)):
                running.remove(recipe)
                spent[recipe] = at / 20
    assert 1 < (spent < 1).sum() < 8
    assert signed_rank(study, p, grace).tolist() == spent.tolist()


def trial(study: Study, recipe: int, at: int, state: TrialState) -> FrozenTrial:
    passed = {prompt: float(rate) for prompt, rate in enumerate(study.passed[recipe, at])}
    value = float(study.rate[recipe, at]) if state is TrialState.COMPLETE else None
    return optuna.trial.create_trial(state=state, value=value, intermediate_values=passed)


@pytest.mark.full
def test_the_simulation_races_like_the_command() -> None:
    """Small differences remain: the simulation also has fits of stopped recipes, which inform its weights of laws."""
    study = make_study(SETTINGS[0], 4)  # the best recipe leads by 0.05, so both must name it
    compute = np.arange(21) / 20
    curves = [make_curve(str(i), compute, study.rate[i], sd=study.sd[i]) for i in range(8)]
    winner, spent = Forecasts(study, RACING).race(RACING)
    race = run_race(curves, RACING, ended=[str(i) for i in range(8)])
    assert race.leader == str(winner)
    command_spent = [race.stopped.get(str(i), 1.0) for i in range(8)]
    assert np.abs(np.array(command_spent) - spent).mean() < 0.1 and min(command_spent) < 0.5


def test_staircases_have_their_documented_rewards() -> None:
    studies = [make_study(staircases.STAIRS, number) for number in range(6)]
    for at, name in ((5, "early"), (20, "truth")):
        apart = np.concatenate([study.rate[:, at] - getattr(study, name) for study in studies])
        assert abs(apart.mean()) < 0.01 and apart.std() < 0.04
    low, high = staircases.wilson(0.9, 200)
    assert (round(low, 3), round(high, 3)) == (0.851, 0.934)


def _half(study: Study) -> dict[str, Outcome]:
    return {"half": Outcome(float(study.truth[0]), 0.5, 1, 0)}


def _whole(study: Study) -> dict[str, Outcome]:
    return {"whole": Outcome(0.0, 1.0, 0, 0)}


def test_a_simulation_resumes_and_compares_the_studies_of_all_methods(tmp_path: Path) -> None:
    first = simulate("a", _half, SETTINGS[0], 2, tmp_path)
    more = simulate("a", _half, SETTINGS[0], 3, tmp_path)
    assert more[:2] == first and len(more) == 3
    assert [row["half"][0] for row in more] == [make_study(SETTINGS[0], number).truth[0] for number in range(3)]
    assert simulate("a", _half, SETTINGS[0], 1, tmp_path) == more, (
        "all stored studies are returned, even if fewer are requested"
    )
    by_method = together(more, simulate("b", _whole, SETTINGS[0], 2, tmp_path))
    assert {name: rows.shape for name, rows in by_method.items()} == {"half": (2, 4), "whole": (2, 4)}


def favourite_and_others(number: int) -> tuple[list[Fit], list[Array]]:
    """Fits and draws of a favourite at 0.5 and `number` others. Each is ahead by 0.2 in 5% of draws, no two at once."""
    fits = fit_curves([curve(f"r{i:02d}", rng=i) for i in range(number + 1)])
    turns = np.arange(2000) % 20
    return fits, [np.full(2000, 0.5), *(np.where(turns == i, 0.7, 0.3) for i in range(number))]


def earlier_look(loss: float) -> list[Look]:
    """Return an earlier look whose stops have this expected cost."""
    return [Look(0.0, "r00", (), (), loss)]


def test_chances_that_are_small_each_add_up_over_many_recipes() -> None:
    fits, draws = favourite_and_others(12)
    rules = Rules(BUDGET, loss=0.035)
    look = make_look(4000.0, fits, draws, rules)
    assert {chance.p_ahead for chance in look.chances} == {None, 0.05}
    # Stopping one costs 0.2 in 5% of the draws, which is 0.01. The costs add up, since no two are ahead in one draw.
    assert look.stopped == ("r01", "r02", "r03") and look.loss == pytest.approx(0.03)
    assert make_look(4000.0, fits, draws, rules, earlier_look(0.02)).stopped == ("r01",), (
        "the cost of earlier stops counts"
    )
    assert make_look(4000.0, fits, draws, rules, earlier_look(0.04)).stopped == ()
    hopeless = [draws[0], *(recipe_draws - 0.5 for recipe_draws in draws[1:])]
    assert len(make_look(4000.0, fits, hopeless, rules, earlier_look(0.04)).stopped) == 12, (
        "stops without cost are always allowed"
    )
    every_one = make_look(4000.0, fits, draws, replace(rules, loss=1.0), earlier_look(3.0))
    assert len(every_one.stopped) == 12 and every_one.loss == pytest.approx(0.12), "no limit"
    assert Look.of_json(every_one.to_json()) == every_one


def test_the_recipes_least_likely_to_win_are_stopped_first() -> None:
    fits, draws = favourite_and_others(2)
    draws[1] = np.where(np.arange(2000) % 50 < 4, 0.9, 0.3)  # ahead in 8% of draws instead of 5%, and by more
    look = make_look(4000.0, fits, draws, Rules(BUDGET, loss=0.02))
    assert look.stopped == ("r02",) and (look.of("r01").p_ahead or 0) < 0.1


@settings(max_examples=60)
@given(number=st.integers(2, 7), seed=st.integers(0, 10**6), limit=st.floats(0.0, 0.2))
def test_the_cost_of_stopping_several_recipes_is_computed_jointly(number: int, seed: int, limit: float) -> None:
    rng = np.random.default_rng(seed)
    draws = list(rng.random((number, 50)))
    due = [int(at) for at in rng.permutation(number)[: rng.integers(0, number)]]

    def costs_of(stopped_recipes: list[int]) -> float:
        best_left = np.max([draws[at] for at in range(number) if at not in stopped_recipes], axis=0)
        return (
            float(np.mean([max(max(draws[at][k] for at in stopped_recipes) - best_left[k], 0.0) for k in range(50)]))
            / 2.0
        )

    costs = [costs_of(due[:n]) for n in range(1, len(due) + 1)]
    largest = max((n for n, total_cost in enumerate(costs, start=1) if total_cost <= limit), default=0)
    stopped, loss = _count_stops(draws, due, 2.0, limit)
    assert stopped == largest and loss == pytest.approx(costs[largest - 1] if largest else 0.0)


@pytest.mark.slow
def test_the_expected_cost_of_a_race_is_within_its_limit() -> None:
    curves = [curve(f"r{i}", a=0.5 + 0.05 * i, rng=i) for i in range(5)]
    free = raced(curves, Rules(BUDGET, growth=1.6, loss=1.0))
    free_loss = sum(look.loss for look in free.looks)
    for share in (0.5, 0.1):
        race = raced(curves, Rules(BUDGET, growth=1.6, loss=share * free_loss))
        assert sum(look.loss for look in race.looks) <= share * free_loss
        assert race.saved < free.saved and race.leader == free.leader
    kept = look_at(curves, 0.3 * BUDGET, Rules(BUDGET, loss=1e-9))
    assert kept.stopped == () and any(chance.below for chance in kept.chances)
    early = run_race([cut(c, 0.4 * BUDGET) for c in curves], Rules(BUDGET, growth=1.6, loss=1e-9))
    reasons = {runner.recipe: runner.reason for runner in early.runners}
    assert any(
        "not stopped, because the expected cost of all stops together would exceed 1e-09" in reason_text
        for reason_text in reasons.values()
    )


def test_the_favourite_has_the_highest_mean_and_a_forecast() -> None:
    """A recipe that is often ahead by a little is worth less than one that is rarely ahead by a lot."""
    often, seldom, short = fit_curves([curve("often"), curve("seldom"), make_curve("short", [0.0, 9.0], [0.3, 0.3])])
    rules = Rules(budget=24000.0)
    tenths = np.arange(1000) % 10
    draws = [np.full(1000, 0.5), np.where(tenths < 4, 0.9, 0.49), np.full(1000, 0.99)]
    look = make_look(16000.0, [often, seldom, short], draws, rules)
    assert chances_of_being_best(draws[:2])[0] > 0.5 and look.favourite == "seldom"
    assert look.of("seldom").p_ahead is None and look.of("often").p_ahead == 0.6
    # If no recipe has a forecast, there still is a favourite.
    assert make_look(9.0, [short, short], [np.full(10, 0.1), np.full(10, 0.2)], rules).favourite == "short"
