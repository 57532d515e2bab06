"""Tests of pairwise comparisons: planted differences are found, and little data is undecided."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sweeps.cli.main import main
from sweeps.curve import Curve, make_curve
from sweeps.decide.pairwise import (
    HIGHER,
    LOWER,
    SAME,
    UNDECIDED,
    Comparisons,
    _bounds,
    compare,
    prompt_error,
    seeds_needed,
)
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.run.passes import Passes
from tests.paths import ROOT
from tests.printed import check_printed
from tests.sweeps.fit.simulate import law

NOISE = 0.01


def study(
    asymptotes: Mapping[str, float], seeds: Sequence[str] = ("0", "1", "2"), seed_sd: float = 0.0, shared: float = 0.0,
    c_mid: Mapping[str, float] | None = None, number: int = 0,
) -> list[Curve]:  # fmt: skip
    """Simulate recipes. A seed shifts all recipes together (sd `shared`) and each alone (sd `seed_sd`)."""
    rng = np.random.default_rng((5, number))
    compute = np.linspace(0, 8, 33)
    common = dict(zip(seeds, shared * rng.standard_normal(len(seeds)), strict=True))
    curves = []
    for recipe, a in asymptotes.items():
        rows = []
        for seed in seeds:
            asymptote = a + common[seed] + seed_sd * rng.standard_normal()
            reward = law(compute, asymptote, 1.8, (c_mid or {}).get(recipe, 1.0), 0.2)
            rows.append(reward + NOISE * rng.standard_normal(len(compute)))
        labels = np.repeat(list(seeds), len(compute))
        sd = np.full(len(labels), NOISE)
        curves.append(make_curve(recipe, np.tile(compute, len(seeds)), np.concatenate(rows), labels, sd))
    return curves


def comparisons(curves: Sequence[Curve], *pairs: tuple[str, str], **more: float) -> Comparisons:
    return compare(fit_curves(curves), pairs, **more)


def test_planted_differences_are_found_and_worded() -> None:
    result = comparisons(
        study({"good": 0.7, "bad": 0.6, "slow": 0.7, "twin": 0.7}, c_mid={"slow": 1.5}),
        ("good", "bad"), ("bad", "good"), ("good", "twin"), ("slow", "good"),
        budget=16.0, margin=0.05,
    )  # fmt: skip
    good, bad, twin, slow = result.rows
    assert result.simultaneous and [row.verdict for row in (good, bad, twin)] == [HIGHER, LOWER, SAME]
    ends = law(np.array([8.0]), 0.7, 1.8, 1.0, 0.2) - law(np.array([8.0]), 0.6, 1.8, 1.0, 0.2)
    for interval, truth in ((good.R, float(ends[0])), (good.A, 0.1), (good.R_at_budget, 0.1), (twin.R, 0.0)):
        assert interval is not None and interval.low is not None and interval.high is not None
        assert interval.low < truth < interval.high and interval.high - interval.low < 0.1
    assert good.p_higher > 0.99 and bad.p_higher < 0.01
    # Swapping the two recipes only changes the sign.
    assert bad.R.value == pytest.approx(-(good.R.value or 0), abs=3e-3)
    assert slow.ratio is not None and slow.ratio.value == pytest.approx(1.5, rel=0.1)
    assert slow.ratio.low is not None and slow.ratio.low > 1 and "slow takes" in slow.sentence
    assert "has the higher reward at compute 8" in good.sentence and "are the same within 0.05" in twin.sentence


@pytest.mark.slow
def test_a_common_effect_of_seeds_cancels() -> None:
    """The common effect of a seed cancels only if the recipes were run with the same seeds."""
    curves = study({"a": 0.62, "b": 0.6, "c": 0.55, "d": 0.65}, shared=0.05)
    paired = comparisons(curves, ("a", "b")).rows[0]
    other_seeds = [
        make_curve(
            recipe_curve.recipe,
            recipe_curve.compute,
            recipe_curve.reward,
            [f"{recipe_curve.recipe}{s}" for s in recipe_curve.seed],
            recipe_curve.sd,
        )
        for recipe_curve in curves
    ]
    unpaired = comparisons(other_seeds, ("a", "b")).rows[0]
    assert paired.paired == ("seed",) and unpaired.paired == ()
    widths = [(row.R.high or math.inf) - (row.R.low or -math.inf) for row in (paired, unpaired)]
    assert widths[0] < 0.6 * widths[1]
    assert (paired.seeds_needed or math.inf) < (unpaired.seeds_needed or math.inf)
    assert paired.R.low is not None and paired.R.high is not None and paired.R.low < 0.02 < paired.R.high


@pytest.mark.full
def test_intervals_have_their_coverage_over_studies() -> None:
    """At least 53 of 60 intervals contain the true difference, with seed effects of each recipe and common ones."""
    inside = 0
    for number in range(60):
        (row,) = comparisons(
            study({"a": 0.63, "b": 0.6, "c": 0.6}, seed_sd=0.02, shared=0.02, number=number), ("a", "b")
        ).rows
        truth = float((law(np.array([8.0]), 0.63, 1.8, 1, 0.2) - law(np.array([8.0]), 0.6, 1.8, 1, 0.2))[0])
        assert row.R.low is not None and row.R.high is not None
        inside += row.R.low <= truth <= row.R.high
    assert inside >= 53


def test_a_flat_recipe_is_compared_without_an_asymptote() -> None:
    level = make_curve("level", np.linspace(0, 8, 33), 0.2 + NOISE * np.random.default_rng(1).standard_normal(33))
    row = comparisons([*study({"a": 0.6}), level], ("a", "level")).rows[0]
    assert row.A is None and row.ratio is None and row.verdict == HIGHER


def test_simultaneous_bounds_hold_together() -> None:
    """All ten hold in 95% of the draws, and each is wider than the interval of its pair alone."""
    draws = [np.random.default_rng(n).standard_normal(2000) for n in range(10)]
    together, alone = _bounds(draws), [_bounds([pair_draws])[0] for pair_draws in draws]
    outside = np.zeros(2000, dtype=bool)
    for pair_draws, joint_bounds, own_bounds in zip(draws, together, alone, strict=True):
        assert (
            joint_bounds.low is not None
            and joint_bounds.high is not None
            and own_bounds.low is not None
            and own_bounds.high is not None
        )
        assert joint_bounds.low < own_bounds.low and own_bounds.high < joint_bounds.high
        outside |= (pair_draws < joint_bounds.low) | (pair_draws > joint_bounds.high)
    assert outside.mean() == pytest.approx(0.05, abs=0.012)
    # Numbers of draws may differ, and draws may be infinite.
    ratio = _bounds([np.full(2000, math.inf), np.arange(1.0, 101.0)])
    assert ratio[0].value is None and ratio[1].value is not None


def test_seeds_needed_give_80_percent_power() -> None:
    """With that many seeds, 80% of studies detect the difference at the 5% level."""
    rng = np.random.default_rng(0)
    sd = 0.03  # of a difference between one seed of each recipe
    needed = seeds_needed(sd / math.sqrt(3) * rng.standard_normal(200_000), 3, 0.02)
    assert needed is not None
    means = 0.02 + sd / math.sqrt(needed) * rng.standard_normal(100_000)
    assert (np.abs(means) > 1.96 * sd / math.sqrt(needed)).mean() == pytest.approx(0.8, abs=0.03)
    assert seeds_needed(1000 * rng.standard_normal(100), 3, 0.02) is None
    assert seeds_needed(1e-9 * rng.standard_normal(100), 3, 0.02) == 2


def passes(rates: np.ndarray, rng: np.random.Generator, samples: int = 8, prompts: str = "p") -> Passes:
    passed = rng.binomial(samples, rates)
    return Passes(prompts, tuple(map(int, passed)), (samples,) * len(rates))


def test_the_prompt_error_is_the_spread_of_differences_over_prompts() -> None:
    rng = np.random.default_rng(3)
    hard, moved = rng.uniform(0.2, 0.8, 4000), 0.15 * rng.standard_normal(4000)
    one, two = np.clip(hard + moved, 0, 1), hard
    truth = float(np.std(one - two)) / math.sqrt(4000)
    error = prompt_error(*({s: passes(rates, rng) for s in "01"} for rates in (one, two)))
    assert error == pytest.approx(truth, rel=0.1)
    # The difficulty of prompts cancels if it is the same for both recipes.
    alike = prompt_error({"0": passes(hard, rng)}, {"0": passes(hard, rng)})
    assert alike is not None and alike < 0.3 * float(np.std(hard)) / math.sqrt(4000)


def test_prompts_of_one_family_count_as_one() -> None:
    """The ten prompts of a family differ alike, so the error is that of families, not of prompts."""
    rng = np.random.default_rng(8)
    moved = np.repeat(0.2 * rng.standard_normal(300), 10)
    hard = rng.uniform(0.3, 0.7, len(moved))
    rates = (np.clip(hard + moved, 0, 1), hard)
    names = tuple(f"family {number // 10}" for number in range(len(moved)))
    both = [{"0": replace(passes(recipe_rates, rng), families=names)} for recipe_rates in rates]
    truth = float(np.std((rates[0] - rates[1]).reshape(-1, 10).mean(1))) / math.sqrt(300)
    assert prompt_error(*both) == pytest.approx(truth, rel=0.1)
    without_families = [{"0": replace(recipe_passes["0"], families=None)} for recipe_passes in both]
    single = prompt_error(*without_families)
    assert single is not None and single < 0.5 * truth
    unnamed = [{"0": replace(recipe_passes["0"], families=("",) * len(moved))} for recipe_passes in both]
    assert prompt_error(*unnamed) == pytest.approx(single)
    assert (
        prompt_error(*({"0": replace(recipe_passes["0"], families=("all",) * len(moved))} for recipe_passes in both))
        is None
    )


def test_other_prompts_other_seeds_and_ungraded_prompts_are_not_paired() -> None:
    rng = np.random.default_rng(4)
    one, two = passes(np.full(50, 0.5), rng), passes(np.full(50, 0.5), rng, prompts="q")
    assert prompt_error({"0": one}, {"0": two}) is None and prompt_error({"0": one}, {"1": one}) is None
    assert prompt_error({}, {}) is None
    first_ungraded = Passes("p", (0, *one.passed[1:]), (0, *one.scored[1:]))
    assert prompt_error({"0": first_ungraded}, {"0": one}) is not None
    all_ungraded = Passes("p", (0,) * 50, (0,) * 50)
    assert prompt_error({"0": all_ungraded}, {"0": one}) is None


def test_passes_give_a_wider_interval_for_other_prompts() -> None:
    rng = np.random.default_rng(6)
    rates = {"a": rng.uniform(0, 1, 60), "b": rng.uniform(0, 1, 60), "c": rng.uniform(0, 1, 60)}
    passes_by_recipe = {recipe: {s: passes(recipe_rates, rng) for s in "012"} for recipe, recipe_rates in rates.items()}
    asked_computes = []

    def passes_of(recipe: str, compute: float) -> dict[str, Passes]:
        asked_computes.append(compute)
        return passes_by_recipe[recipe]

    row = compare(fit_curves(study({"a": 0.62, "b": 0.6, "c": 0.6})), [("a", "b")], passes=passes_of).rows[0]
    assert row.paired == ("seed", "prompt") and set(asked_computes) == {8.0}
    wide, seed_interval = row.R_on_prompts, row.R
    assert (
        wide is not None and (wide.low or 0) < (seed_interval.low or 0) and (seed_interval.high or 0) < (wide.high or 0)
    )


@pytest.mark.parametrize(
    ("pair", "said"), [(("a", "z"), "z: no such recipe; the sources have a, b"), (("a", "a"), "compared with itself")]
)
def test_impossible_pairs_are_refused(pair: tuple[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        comparisons(study({"a": 0.6, "b": 0.5}, seeds=("0",)), pair)


def test_compare_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "curves.csv"
    rows = [
        f"{recipe_curve.recipe},a,{seed},{c},{r}"
        for recipe_curve in study({"a": 0.6, "a+loss=x": 0.5, "a+loss=y": 0.6})
        for seed, c, r in zip(recipe_curve.seed, recipe_curve.compute, recipe_curve.reward, strict=True)
    ]
    table.write_text("recipe,baseline,seed,compute,reward\n" + "\n".join(rows))
    assert main(["compare", str(table), "a+loss=x", "a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (row["recipe"], row["other"], row["told"], row["seeds"]) == ("a+loss=x", "a", LOWER, 3)
    # Without names every recipe is compared with its baseline, with one name with that recipe.
    assert main(["compare", str(table), "--budget", "16"]) == 0
    captured = capsys.readouterr()
    assert "bounds hold for all 2 pairs together" in captured.out and "a+loss=x has the lower reward" in captured.out
    assert "at 16" in captured.out and "on other prompts" not in captured.out and "not paired by prompt" in captured.err
    assert main(["compare", str(table), "a+loss=y", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["comparisons"]
    assert [(row["recipe"], row["other"]) for row in rows] == [("a", "a+loss=y"), ("a+loss=x", "a+loss=y")]
    # A folder without runs is not a source, so its name can be a recipe's.
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert main(["compare", str(table), "a+loss=x", "a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (row["recipe"], row["other"]) == ("a+loss=x", "a")
    assert main(["compare", str(table), "nobody"]) == 1
    assert "nobody: no source with runs, and no such recipe; the sources have a, a+loss=x" in capsys.readouterr().err


def test_little_data_is_undecided() -> None:
    row = comparisons(study({"a": 0.61, "b": 0.6}, seeds=("0",), seed_sd=0.02), ("a", "b")).rows[0]
    assert row.verdict == UNDECIDED and row.seeds_needed is not None
    assert f"a difference of 0.02 needs {row.seeds_needed} seeds per recipe at 80% power" in row.sentence


@pytest.mark.slow
def test_the_page_shows_the_output_of_compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```\n\$ scalerl (.*)\n([^`]*)\n```", (ROOT / "docs/guide/compare.md").read_text())
    assert len(blocks) == 2
    for command, printed in blocks:
        assert main(shlex.split(command)) == 0
        check_printed(capsys.readouterr().out, printed)
