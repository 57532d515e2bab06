"""Tests of compute ratios between recipes, which also break ties in A."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ranking import Recipe, run
from sweeps.decide.efficiency import Ratio
from sweeps.decide.next_run import find_next_steps, make_choice
from sweeps.decide.pairwise import compare
from sweeps.decide.rank import Ranking, rank
from sweeps.decide.reward import rewards
from sweeps.decide.standing import Outcome
from sweeps.fit.family import FAMILIES
from sweeps.fit.fit import Fit, Interval, fit_curves
from sweeps.report.publish import summary
from sweeps.report.ranking_text import ranking_rows
from sweeps.report.write import write_ranking_csv
from tests.sweeps.fit.simulate import curve

INF = math.inf


def test_a_ratio_leaves_out_draws_in_which_neither_recipe_arrives() -> None:
    """If one recipe never reaches the reward, the ratio is 0 or infinite."""
    cases = {
        "all arrive": ([2, 4], [1, 1], [2, 4], 0.0, (2, 2, 4)),
        "neither needs any": ([0, 0], [0, 0], [1, 1], 0.0, (1, 1, 1)),
        "one needs none": ([0, 3], [2, 0], [0, INF], 0.0, (0, 0, None)),
        "one never": ([INF, INF], [1, 1], [INF, INF], 0.0, (None, None, None)),
        "the other never": ([1, 1], [INF, INF], [0, 0], 0.0, (0, 0, 0)),
        "neither in half": ([2, 2, INF, INF], [1, 1, INF, INF], [2, 2], 0.5, (2, 2, 2)),
        "neither in most": ([2, INF, INF], [1, INF, INF], [2], 2 / 3, (2, None, None)),
    }
    for name, (ours, theirs, draws, p_neither, interval) in cases.items():
        computed = Ratio.of(np.array(ours, dtype=float), np.array(theirs, dtype=float))
        assert computed.draws.tolist() == draws and computed.p_neither == pytest.approx(p_neither), name
        assert computed.interval() == Interval(*interval), name
    neither_ever = Ratio.of(np.full(3, INF), np.full(3, INF))
    assert neither_ever.interval() is None and neither_ever.p_neither == 1 and not neither_ever.above_one()


def patch_arrivals(monkeypatch: pytest.MonkeyPatch, *times: list[float]) -> None:
    """Make recipes reach the common reward at these computes: one list of four draws per recipe."""
    drawn = itertools.cycle(times)
    for module in ("reward", "pairwise"):
        monkeypatch.setattr(f"sweeps.decide.{module}.first_compute_above", lambda *_: np.tile(next(drawn), 500))


def test_draws_that_never_arrive_do_not_make_a_recipe_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward table and comparison use the same ratio. In a quarter of the draws neither recipe arrives."""
    fits = fit_curves([curve("a"), curve("b", a=0.5)])
    patch_arrivals(monkeypatch, [1.0, 1.0, 1.0, INF], [1.0, 1.0, 1.0, INF])
    reward_table, (pair,) = rewards(fits), compare(fits, [("a", "b")]).rows
    assert reward_table is not None and reward_table.fastest == "a"
    for row in (reward_table.rows[1], pair):
        assert row.ratio == Interval(1.0, 1.0, 1.0) and row.p_neither == 0.25
    assert (
        "x the compute of" not in reward_table.sentence
        and "25% of the draws" in reward_table.sentence
        and "25% of the draws" in pair.sentence
    )
    # If one recipe never arrives, the ratio is infinite, or 0 in the other direction.
    patch_arrivals(monkeypatch, [1.0, 1.0, 2.0, 2.0], [INF] * 4)
    reward_table, (pair,) = rewards(fits), compare(fits, [("a", "b")]).rows
    assert (
        reward_table is not None
        and reward_table.rows[1].ratio == Interval(None, None, None)
        and "x the compute of" not in reward_table.sentence
    )
    assert pair.ratio == Interval(0.0, 0.0, 0.0)
    patch_arrivals(monkeypatch, [INF] * 4, [INF] * 4)
    reward_table, (pair,) = rewards(fits), compare(fits, [("a", "b")]).rows
    assert (
        reward_table is not None
        and reward_table.rows[1].ratio is None
        and reward_table.rows[1].p_neither == 1.0
        and pair.ratio is None
    )


def rank_identical(kind: Recipe, seed: int) -> Ranking:
    """Rank three recipes that differ by chance only."""
    source = np.random.default_rng((99, seed))
    return rank(fit_curves([run(kind, name, source) for name in "abc"]), brief=True)


KINDS = (Recipe(0.6, 1.8, 1.0, 6.0), Recipe(0.3, 1.8, 1.0, 6.0, 1), Recipe(0.6, 1.8, 1.0, 4.0, 3))


@pytest.mark.parametrize("kind", KINDS, ids=("well seen", "small gain", "short window"))
def test_identical_recipes_are_not_said_to_take_more_compute(kind: Recipe) -> None:
    for seed in range(2):
        result = rank_identical(kind, seed)
        assert result.rewards is not None and "x the compute of" not in result.rewards.sentence
        ratios = [row.ratio for row in result.rewards.rows] + [entry.ratio for entry in result.ranking]
        for ratio in (candidate for candidate in ratios if candidate is not None):
            assert (ratio.low is None or ratio.low <= 1) and (ratio.high is None or ratio.high >= 1), (seed, ratio)
        assert result.standing is not None and result.standing.outcome is not Outcome.MOST_EFFICIENT
        assert "the other" not in result.sentence


@pytest.mark.full
def test_identical_recipes_are_rarely_separated() -> None:
    """At most 6 of 120 studies (5%), although seeds of a recipe differ by 0.015 in A."""
    separated = {"rewards": 0, "efficiency": 0}
    for seed in range(40):
        for kind in KINDS:
            result = rank_identical(kind, seed)
            assert result.rewards is not None and result.standing is not None
            separated["rewards"] += "x the compute of" in result.rewards.sentence
            separated["efficiency"] += bool(result.standing.slower)
    assert max(separated.values()) <= 6, separated


def tie(rng: int, **more: tuple[float, float]) -> list[Fit]:
    """Two recipes of equal A; `dear` and `cheap` are their (B, C_mid). The dear one comes first by name."""
    (b, c_mid), (other_b, other_c_mid) = more["dear"], more["cheap"]
    dear = curve("a-dear", b=b, c_mid=c_mid, white=0.004, rng=rng)
    return fit_curves([dear, curve("z-cheap", b=other_b, c_mid=other_c_mid, white=0.004, rng=rng + 100)])


def test_at_equal_A_and_B_the_recipe_with_less_compute_is_first() -> None:
    for rng in (1, 2):
        fits = tie(rng, dear=(1.9, 3600.0), cheap=(1.9, 2000.0))
        result = rank(fits, brief=True)
        first, second = result.ranking
        assert (result.leader, first.recipe, second.recipe) == ("z-cheap", "z-cheap", "a-dear")
        assert not result.undecided and result.sentence.startswith(
            "same ceiling: choose z-cheap, because the other takes 1."
        )
        assert result.sentence in find_next_steps(make_choice(fits)).sentence
        for entry, c_mid in ((first, 2000.0), (second, 3600.0)):
            for interval, share in ((entry.efficiency, 9.0), (entry.efficiency_half, 1.0)):
                assert interval is not None and interval.low is not None and interval.high is not None
                assert interval.low < c_mid * share ** (1 / 1.9) < interval.high < 2 * interval.low
            assert entry.B_at_shared_A is not None
        assert first.ratio is None and second.ratio is not None
        assert second.ratio.low is not None and second.ratio.high is not None
        assert (
            1.3 < second.ratio.low < 1.8 < second.ratio.high < 2.5 and "times the compute of z-cheap" in second.reason
        )


def test_a_higher_B_alone_does_not_win() -> None:
    """The recipe with the higher B needs 1.6 times the compute for 90% of the gain."""
    result = rank(tie(1, dear=(2.1, 4000.0), cheap=(1.7, 2000.0)), brief=True)
    first, second = result.ranking
    assert first.recipe == "z-cheap" and first.tied_with_best and second.tied_with_best
    assert first.B_at_shared_A is not None and second.B_at_shared_A is not None
    assert (first.B_at_shared_A.value or 0) < (second.B_at_shared_A.value or 0)


def test_slower_recipes_of_a_tie_are_named_with_their_factor() -> None:
    names = {"p": 2000.0, "q": 2000.0, "r": 3400.0, "s": 3600.0}
    fits = fit_curves([curve(name, c_mid=at, white=0.004, rng=i) for i, (name, at) in enumerate(names.items())])
    result = rank(fits, brief=True)
    assert result.sentence.startswith(
        (
            "same ceiling: choose p or q, because the other two take 1.",
            "same ceiling: choose q or p, because the other two",
        )
    )
    assert not result.undecided and result.standing is not None
    assert {*result.standing.choices} == {"p", "q"} and {*result.standing.slower} == {"r", "s"}


def test_tables_csv_and_metrics_of_a_tie_agree(tmp_path: Path) -> None:
    fits = tie(1, dear=(1.9, 3600.0), cheap=(1.9, 2000.0))
    result = rank(fits, brief=True, baseline="z-cheap")
    first, second = result.ranking
    assert first.efficiency is not None and second.efficiency is not None and second.ratio is not None
    head, rows = ranking_rows(result)
    assert rows[0][head.index("compute to 90%")].startswith(f"{first.efficiency.value:.3g} [")
    path = write_ranking_csv(tmp_path / "ranking.csv", fits, result)
    (written,) = (row for row in csv.DictReader(path.open()) if row["rank"] == "2")
    assert float(written["efficiency"]) == second.efficiency.value and float(written["ratio_low"]) == second.ratio.low
    (dear,) = [fit for fit in fits if fit.recipe == second.recipe]
    metrics = summary(dear, second, "dear").metrics()
    assert metrics["rank/efficiency"] == second.efficiency.value and metrics["rank/times_compute"] == second.ratio.value
    (contrast,) = result.leave_one_out
    assert contrast.ratio is not None and contrast.ratio.value == pytest.approx(second.ratio.value)


def test_compute_at_inverts_every_family() -> None:
    for family in FAMILIES.values():
        first, second = np.array([1.3, 0.4]), np.array([50.0, 2.0])
        for share in (0.5, 0.9):
            at = family.compute_at(share, first, second)
            if family.names:
                gained = family.basis(np.log(at), *family.coordinates(first, second))
                assert gained == pytest.approx(np.full(2, share)), family.name
            else:
                assert at.tolist() == [0.0, 0.0]
