"""Truths about rankings: the better recipe wins when the data say so, and only then."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sweeps.curve import Curve
from sweeps.errors import UserError
from sweeps.fit import fit_curves
from sweeps.rank import Ranking, rank
from tests.sweeps.simulate import curve


def ranked(*curves: Curve, **options: float) -> Ranking:
    result = rank(fit_curves(curves), **options)
    json.dumps(result.to_json(), allow_nan=False)
    return result


def test_clearly_better_asymptote_wins() -> None:
    result = ranked(curve("grpo", a=0.5, rng=1), curve("scalerl", a=0.61, rng=2))
    assert [entry.recipe for entry in result.ranking] == ["scalerl", "grpo"]
    assert not result.undecided
    assert (result.ranking[0].p_best or 0) > 0.99
    assert not result.ranking[0].tied_with_best


def test_tie_in_A_is_broken_by_B_at_the_shared_A() -> None:
    """The paper's rule, on constructed data: A within 0.02, then the higher B."""
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


def test_equal_recipes_are_undecided() -> None:
    result = ranked(*(curve(name, rng=i) for i, name in enumerate(("scalerl", "scalerl+kl=fixed"))))
    assert result.undecided and result.sentence.startswith("undecided")


def test_p_best_of_equal_recipes_is_calibrated() -> None:
    """Seeds differ by 0.015; the winner among two equal recipes must not often look sure."""
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
    assert all(entry.p_best is None and entry.reason for entry in last)
    assert sum(entry.p_best or 0 for entry in result.ranking) == pytest.approx(1.0)
    assert "2 of 4 recipes cannot be ranked" in result.sentence


def test_nothing_identifiable_is_undecided() -> None:
    result = ranked(curve("scalerl", end=1500), curve("scalerl+loss=dapo", end=1500, rng=1))
    assert result.undecided and all(entry.rank is None for entry in result.ranking)


def test_reward_at_the_budget_is_better_known_than_A() -> None:
    result = ranked(curve("scalerl", white=0.01, end=6000, rng=1), budget=6000.0)
    (entry,) = result.ranking
    assert entry.R_at_budget is not None
    low, high = entry.R_at_budget.low, entry.R_at_budget.high
    assert low is not None and high is not None and entry.A.low is not None
    assert low <= 0.3 + 0.31 / (1 + (2500 / 6000) ** 1.9) <= high
    assert high - low < (1 if entry.A.high is None else entry.A.high) - entry.A.low


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


def test_impossible_options_are_one_line_errors() -> None:
    fits = fit_curves([curve(points=15)])
    for options, word in (({"margin": -1.0}, "--margin"), ({"budget": 0.0}, "--budget")):
        with pytest.raises(UserError, match=word):
            rank(fits, **options)
    with pytest.raises(UserError, match="nothing to rank"):
        rank([])
