"""Tests of several evaluation sets: which one separates recipes best, and their aggregate score."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from sweeps import api
from sweeps.cli.curves import compare_over_sets
from sweeps.cli.main import main, make_parser
from sweeps.curve import Curve, make_curve
from sweeps.decide.aggregate import aggregate, improvement, iqm, profile, resample, take
from sweeps.decide.rank import rank
from sweeps.decide.set_scores import set_scores
from sweeps.decide.signal import Signal, signal_to_noise
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.report.drawing import svg
from sweeps.report.figures import performance_figure
from sweeps.report.page import Findings, render
from sweeps.report.plain import table
from sweeps.report.ranking_text import aggregate_rows, signal_rows
from sweeps.run.journal import Journal
from sweeps.source import load
from sweeps.source.journals import curves_by_set
from tests.examples import examples
from tests.paths import ROOT
from tests.sweeps.fit.simulate import curve as simulated

# Only five distinct values, so that scores tie.
SCORES = arrays(
    float, array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(0, 4).map(lambda n: n / 4)
)


def on_set(recipe: str, name: str, runs: dict[str, list[float]], every: float = 1.0, **others: Any) -> Curve:
    """Return a recipe's curve on a set. runs: scores by seed; evaluations are `every` apart in compute, from 0."""
    rewards = [score for scores in runs.values() for score in scores]
    compute = [every * step for scores in runs.values() for step in range(len(scores))]
    seeds = [seed for seed, scores in runs.items() for _ in scores]
    return make_curve(
        f"{recipe} set={name}",
        compute,
        rewards,
        seeds,
        metric=f"eval/{name}/pass_rate",
        factors={"set": name},
        **others,
    )


def signals(*curves: Curve) -> Signal:
    set_signal = signal_to_noise(curves)
    assert set_signal is not None
    json.dumps(set_signal.to_json(), allow_nan=False)
    return set_signal


@settings(max_examples=examples(100), deadline=None)
@given(SCORES, SCORES)
def test_statistics_equal_brute_force(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> None:
    kept = sorted(x.ravel())[x.size // 4 : x.size - x.size // 4]
    assert float(iqm(x)) == pytest.approx(sum(kept) / len(kept))
    thresholds = np.array([-0.1, 0.0, 0.25, 0.6, 1.0])
    assert profile(x, thresholds) == pytest.approx([sum(v > t for v in x.ravel()) / x.size for t in thresholds])
    sets = min(x.shape[1], y.shape[1])
    wins = [(a > b) + 0.5 * (a == b) for s in range(sets) for a, b in product(x[:, s], y[:, s])]
    chance = float(improvement(x[:, :sets], y[:, :sets]))
    assert chance == pytest.approx(sum(wins) / len(wins))
    assert float(improvement(y[:, :sets], x[:, :sets])) == pytest.approx(1 - chance)


def test_runs_are_resampled_within_each_set() -> None:
    scores = np.arange(6.0).reshape(3, 2)
    assert take(scores, np.array([[[2, 0], [2, 1], [0, 1]]])).tolist() == [[[4, 1], [4, 3], [0, 3]]]
    draws = resample(scores, np.random.default_rng(0), reps=4000)
    assert draws.shape == (4000, 3, 2) and (draws % 2 == [0, 1]).all()
    # Runs are drawn independently for each set, so the sets are uncorrelated.
    assert abs(np.corrcoef(draws[..., 0].mean(axis=1), draws[..., 1].mean(axis=1))[0, 1]) < 0.05
    assert iqm(draws).shape == (4000,) and profile(draws, np.zeros(7)).shape == (4000, 7)


def test_signal_and_noise_equal_their_closed_form() -> None:
    """Signal is the range of the recipes' means, noise the scatter pooled within runs; both are divided by the mean."""
    a = {"0": [0.9, 0.9, 0.3, 0.5, 0.3, 0.5, 0.4], "1": [0.9, 0.9, 0.4, 0.4, 0.4, 0.4, 0.4]}
    b = {"0": [0.9, 0.1, 0.6, 0.6, 0.6, 0.6, 0.6]}
    quiet = {"0": [0.1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.52]}
    set_signal = signals(on_set("a", "one", a), on_set("b", "one", b), on_set("a", "two", a), on_set("b", "two", quiet))
    by_set = {row.set: row for row in set_signal.rows}
    one = by_set["one"]
    variances = [np.var(runs[-5:], ddof=1) for runs in (*a.values(), *b.values())]
    assert (one.mean, one.signal) == pytest.approx((0.5, 0.2 / 0.5))
    assert one.noise == pytest.approx(np.sqrt(np.mean(variances)) / 0.5)
    assert one.ratio == pytest.approx(0.2 / np.sqrt(np.mean(variances)))
    assert [row.set for row in set_signal.rows] == ["one", "two"] and set_signal.best == "one"
    assert set_signal.sentence.startswith("use set one (--metric eval/one/pass_rate): it separates the recipes best; ")


def test_noise_equals_the_authors_up_to_the_divisor() -> None:
    """The authors' `signal_to_noise_ratio` uses np.std, which divides by n. We divide by n - 1."""
    a, b = [0.0, 0.2, 0.25, 0.3, 0.22, 0.28], [0.0, 0.25, 0.25, 0.25, 0.25, 0.25]
    set_signal = signals(*(on_set(r, s, {"0": run}) for s in ("x", "y") for r, run in (("a", a), ("b", b))))
    authors_noise = np.std(a[1:]) / np.mean(a[1:])
    assert set_signal.rows[0].noise == pytest.approx(authors_noise * np.sqrt(5 / 4) / np.sqrt(2))


def test_a_rise_counts_as_noise_and_a_ratio_without_it_is_given() -> None:
    """`steep` rises by 0.1 per evaluation. `flat` has the same scatter, no rise, and a fifth of the signal."""
    scatter = np.array([0.0, 0.01, -0.01, 0.01, 0.0, -0.01, 0.01, -0.01])

    def scores(level: float, slope: float) -> dict[str, list[float]]:
        return {"0": [0.0, *(level + slope * np.arange(8) + scatter).tolist()]}

    set_signal = signals(
        *(on_set(recipe, "steep", scores(level, 0.1)) for recipe, level in (("a", 0.0), ("b", 0.1))),
        *(on_set(recipe, "flat", scores(level, 0.0)) for recipe, level in (("a", 0.5), ("b", 0.52))),
    )
    steep = next(row for row in set_signal.rows if row.set == "steep")
    line = np.polynomial.Polynomial.fit(np.arange(5), scatter[-5:], 1)
    residual_sd = np.sqrt(((scatter[-5:] - line(np.arange(5))) ** 2).sum() / 3)
    assert set_signal.best == "flat" and steep.ratio_without_rise == pytest.approx(0.1 / residual_sd)
    assert set_signal.sentence.endswith(f"set steep leads with {0.1 / residual_sd:.3g}")


def test_no_set_is_recommended_without_a_signal() -> None:
    wild = {recipe: {"0": [0.1, *[0.3, 0.7] * 4][:-1]} for recipe in "ab"}
    flat = {"0": [0.1, *[0.5] * 8]}
    set_signal = signals(
        *(on_set(recipe, "wild", wild[recipe]) for recipe in "ab"), *(on_set(recipe, "flat", flat) for recipe in "ab")
    )
    assert set_signal.best is None and set_signal.sentence.startswith("no set separates the recipes: ")
    assert [(row.set, row.ratio is None) for row in set_signal.rows] == [("wild", False), ("flat", True)]
    short = [on_set(recipe, name, {"0": [0.1, 0.2, 0.3]}) for recipe in "ab" for name in ("x", "y")]
    assert signals(*short).sentence.startswith("the sets' signal to noise is unknown")
    assert signal_to_noise(short[:2]) is None  # one recipe
    assert signal_to_noise(short[::2]) is None  # one set
    assert set_scores([on_set("a", "x", {"0": [0.5]})]) is None


def test_scores_are_the_latest_at_the_compute_that_all_runs_reached() -> None:
    """Set y is evaluated less often. A run without a score on every set is left out, with a note."""
    curves = [
        on_set("a", "x", {"0": [0.0, 0.1, 0.2, 0.3, 0.4, 0.9], "1": [0.0, 0.1, 0.2, 0.3, 0.6]}),
        on_set("a", "y", {"0": [0.0, 0.5, 0.7], "1": [0.0, 0.4, 0.6]}, every=2.0),
        on_set("b", "x", {"0": [0.0, 0.2, 0.2, 0.2, 0.2], "1": [0.0, 0.2, 0.2, 0.2, 0.2], "2": [0.0]}),
        on_set("b", "y", {"0": [0.0, 0.3, 0.3]}, every=2.0),
    ]
    combined = aggregate(curves, ["x", "y"])
    assert combined.compute == 4.0 and [row.recipe for row in combined.rows] == ["a", "b"]
    first, second = combined.rows
    assert first.by_set == pytest.approx({"x": 0.5, "y": 0.65}) and (first.runs, second.runs) == (2, 1)
    assert first.iqm.value == pytest.approx(0.6) and first.p_first_improves is None
    assert first.iqm.low is not None and first.iqm.low < 0.6
    assert second.p_first_improves is not None and second.p_first_improves.value == 1.0
    assert second.iqm.low is None and second.profile_low[0] is None  # one run gives no interval
    assert combined.notes == (
        "b, seed 2: no evaluation after the start; left out",
        "b: left out 1 run without a score on every set by compute 4",
    )
    assert "more seeds give an interval" in combined.sentence
    json.dumps(combined.to_json(), allow_nan=False)
    assert aggregate(curves, ["x", "y"]) == combined  # bootstrap draws are deterministic


def test_a_run_that_ended_early_is_noted() -> None:
    curves = [on_set("a", name, {"0": [0.1] * 9, "1": [0.1] * 9, "2": [0.1] * 3}) for name in "xy"]
    assert aggregate(curves, ["x", "y"]).notes == ("a, seed 2, ends at compute 2: all runs are compared there",)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["x", "z"], r"--sets x,z: no evaluation set 'z'; there are x, y"),
        (["x", "y"], "no run has an evaluation after the start on every set"),
    ],
)
def test_sets_that_cannot_be_averaged_are_refused(sets: list[str], told: str) -> None:
    curves = [on_set("a", "x", {"0": [0.1, 0.2]}), on_set("a", "y", {"1": [0.1, 0.2]})]
    with pytest.raises(UserError, match=told):
        aggregate(curves, sets)


def study(folder: Path) -> str:
    """Write journals of two recipes on two sets: `math` separates them, `code` is noise."""
    for number, (recipe, seed) in enumerate(product(("base", "base+loss=dapo"), (0, 1, 2))):
        rng = np.random.default_rng(number)
        journal = Journal(folder / "runs" / f"{recipe}-{seed}", clock=lambda: 0.0)
        journal.header(recipe=recipe, seed=seed, run=f"{recipe}-{seed}", curve=recipe, baseline="base", device="cpu")
        for step in range(16):
            rise = 1 - np.exp(-step / 2)
            math = (0.4 if recipe == "base" else 0.6) * rise + 0.01 * rng.standard_normal()
            metrics = {"eval/code/pass_rate": 0.3 + 0.08 * rng.standard_normal(), "compute/flops": 1e3 * step}
            journal.record(
                "eval", step, {**metrics, "eval/math/pass_rate": abs(math), "compute/virtual_device_hours": step}
            )
        journal.end(16, "finished")
        journal.close()
    return str(folder)


def test_tables_of_a_study_are_those_in_the_guide(tmp_path: Path) -> None:
    source = study(tmp_path)
    options = make_parser().parse_args(["rank", source, "--sets", "math, code"])
    set_signal, aggregated = compare_over_sets(options, load([source]))
    assert set_signal is not None and aggregated is not None
    assert set_signal.best == "math" and set_signal.axis == "compute/virtual_device_hours" and set_signal.compute == 15
    head, rows = signal_rows(set_signal)
    assert head[-2:] == ["signal to noise", "without the rise"] and [row[0] for row in rows] == ["math", "code"]
    head, rows = aggregate_rows(aggregated)
    assert head[2:] == ["interquartile mean", "P(base+loss=dapo improves on it)", "math", "code"]
    assert [row[0] for row in rows] == ["base+loss=dapo", "base"] and rows[0][3] == "-"
    page = (ROOT / "docs" / "guide" / "fit.md").read_text()
    for text in (
        set_signal.sentence,
        table(*signal_rows(set_signal)),
        aggregated.sentence,
        table(*aggregate_rows(aggregated)),
    ):
        assert text in page
    by_size = make_parser().parse_args(["rank", source, "--group", "seed"])
    grouped, none = compare_over_sets(by_size, load([source], factors=["seed"]))
    assert grouped is not None and none is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sets", "math"], "name two sets or more"),
        (["--sets", "math,math"], "name two sets or more"),
        (["--sets", "math,code", "--lower-is-better"], "leave out --lower-is-better"),
        (["--sets", "math,aime"], "no evaluation set 'aime'; there are code, math"),
    ],
)
@pytest.mark.parametrize("command", ["rank", "report"])
def test_wrong_sets_are_refused(
    command: str, options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = study(tmp_path / "study")
    output_option = ["-o", str(tmp_path / "r.html")] if command == "report" else []
    assert main([command, source, *options, *output_option]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_rank_prints_what_the_api_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = study(tmp_path)
    options = [source, "--metric", "eval/math/pass_rate", "--sets", "math,code"]
    assert main(["rank", *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["signal"]["best"] == "math" and printed["signal"]["rows"][0]["ratio"] > 5
    assert printed["sets"]["sets"] == ["math", "code"] and len(printed["sets"]["rows"][0]["profile"]) == 21
    api_ranking = api.rank(source, metric="eval/math/pass_rate", sets=["math", "code"])
    assert json.loads(json.dumps(api_ranking.to_json())) == printed
    assert any("use set math" in line for line in api_ranking.remarks())
    assert main(["rank", *options]) == 0
    out = capsys.readouterr().out
    assert "P(base+loss=dapo improves on it)" in out and "use set math (--metric eval/math/pass_rate)" in out


@pytest.mark.full
def test_the_report_shows_signal_and_aggregate(tmp_path: Path) -> None:
    page = tmp_path / "out" / "r.html"
    assert main(["report", study(tmp_path / "study"), "--sets", "math,code", "-o", str(page)]) == 0
    text = page.read_text()
    assert "Which evaluation set separates recipes best" in text and "Several evaluation sets combined" in text
    assert "Use set math" in text
    assert (tmp_path / "out" / "r_performance.svg").exists()


def test_the_page_shows_signal_and_aggregate_if_given(tmp_path: Path) -> None:
    curves = [simulated(recipe, a=0.3, seeds=1, points=9) for recipe in ("base", "base+loss=dapo")]
    fits = fit_curves(curves)
    ranking = rank(fits, brief=True)
    options = make_parser().parse_args(["rank", ".", "--sets", "math,code"])
    set_signal, aggregated = compare_over_sets(options, load([study(tmp_path)]))
    figure = performance_figure(aggregated, ranking)
    assert figure is not None and performance_figure(None, ranking) is None
    lines, bands = figure.axes[0].lines, figure.axes[0].collections
    assert len(lines) == len(bands) == 2 and list(lines[0].get_ydata()) == list(
        aggregated.rows[0].profile if aggregated else ()
    )
    # Unranked recipes are all grey, so their line styles must differ.
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 2
    page_arguments: dict[str, Any] = {
        "title": "x",
        "curves": curves,
        "fits": fits,
        "ranking": ranking,
        "runs": [],
        "warnings": [],
    }
    text = render(
        **page_arguments,
        documents={"performance": svg(figure)},
        findings=Findings(signal=set_signal, aggregate=aggregated),
    )
    without = render(**page_arguments, documents={})
    for part in (
        "Which evaluation set separates recipes best",
        "Use set math",
        "Several evaluation sets combined",
        "Performance profiles: ",
    ):
        assert part in text and part not in without


def test_sources_without_sets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "study")
    assert curves_by_set(load([example]).runs, "compute/flops") == []
    assert main(["rank", example, "--sets", "a,b"]) == 1
    assert "--sets a,b: no evaluation set 'a'; the sources name none" in capsys.readouterr().err


def test_logs_of_another_trainer_are_aggregated_with_the_option_sets() -> None:
    log, metric = str(ROOT / "tests" / "data" / "logs" / "prime_rl_history.json"), "eval/aime24/avg@16"
    words = ["rank", log, "--metric", metric]
    assert compare_over_sets(make_parser().parse_args(words), load([log], metric=metric)) == (None, None)
    set_signal, aggregated = compare_over_sets(
        make_parser().parse_args([*words, "--sets", "aime24,livecodebench"]), load([log], metric=metric)
    )
    assert set_signal is None and aggregated is not None  # one recipe, nothing to separate
    (row,) = aggregated.rows
    assert row.recipe == "prime_rl_history" and list(row.by_set) == ["aime24", "livecodebench"]
    assert row.iqm.value == pytest.approx(np.mean(list(row.by_set.values())))
