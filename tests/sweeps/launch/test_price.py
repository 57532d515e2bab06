"""Tests of the estimated cost of a launch, and of the comparisons that it will decide."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.cli.main import main
from sweeps.curve import make_curve
from sweeps.decide.design import predict_resolution
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, fit_curves
from sweeps.launch.price import check_hours, estimate_launch
from sweeps.run.checkpoint_names import checkpoint_name
from sweeps.run.journal import Journal
from sweeps.run.spec import RunSpec
from tests import forked, light
from tests.place import Place

HOURS = "compute/device_hours"


def spec(seed: int = 0, steps: int = 100, recipe: str = "scalerl", prompts: int = 8) -> RunSpec:
    """Return a member; `prompts` sets its scale."""
    config = {"batch": {"prompts": prompts}, "model": {"width": 32}, "launch": {}}
    return RunSpec(f"{recipe}-{seed}-{prompts}", recipe, recipe, "scalerl", {}, {}, seed, steps, config, config)


def write_run(
    study: Path, one: RunSpec, steps: int, hours: float, frozen: bool = True, checkpoint: int | None = None
) -> None:
    """Write a run with some steps, and with a checkpoint of the last one or of the step `checkpoint`.

    Without its specification it looks like the run of a script.
    """
    place = study / "runs" / one.run
    place.mkdir(parents=True)
    if frozen:
        one.write(place)
    lines = [{"kind": "run", "time": 0.0, **one.header()}]
    for step in (0, steps):
        metrics = {"eval/heldout/pass_rate": 0.3, HOURS: hours * step / steps, "compute/flops": 1e9 * step}
        lines.append({"kind": "eval", "time": 1.0, "step": step, "metrics": metrics})
    covered = steps if checkpoint is None else checkpoint
    lines.append({"kind": "checkpoint", "time": 1.0, "step": covered})
    (place / "checkpoints").mkdir()
    (place / "checkpoints" / checkpoint_name(covered)).touch()
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_recipe_costs_its_median_per_step_at_the_same_scale(tmp_path: Path) -> None:
    like = tmp_path / "pilot"
    write_run(like, spec(0), 10, 1.0)  # 0.1 per step
    write_run(like, spec(1), 10, 3.0)  # 0.3 per step: the median is 0.2
    write_run(like, spec(0, recipe="slow"), 10, 10.0)
    write_run(like, spec(5, prompts=64), 10, 1000.0)  # another scale
    members = [spec(0), spec(1), spec(2, recipe="slow"), spec(3, recipe="new")]
    estimate = estimate_launch(members, tmp_path / "study", str(like), rate=2.0)
    assert (estimate.members, estimate.recipes, estimate.seeds, estimate.steps, estimate.left) == (4, 3, 4, 400, 400)
    assert estimate.price is not None and estimate.price.other_scale == ()
    # A recipe that never ran costs the median of all runs per step: 0.3.
    assert estimate.price.hours == pytest.approx(20 + 20 + 100 + 30)
    assert estimate.money == pytest.approx(2 * estimate.price.hours)
    assert estimate.sentences() == [
        "4 members (3 recipes, 4 seeds), 400 steps",
        f"device hours: about 170, estimated from 4 runs of {like}; price: 340",
    ]


def test_an_estimate_from_another_scale_is_marked(tmp_path: Path) -> None:
    write_run(tmp_path / "pilot", spec(0, prompts=64), 10, 10.0)
    estimate = estimate_launch([spec()], tmp_path / "study", str(tmp_path / "pilot"))
    assert estimate.price is not None and (estimate.price.hours, estimate.price.other_scale) == (100.0, ("batch",))
    assert "some members differ from these runs in batch" in estimate.sentences()[1]


def test_a_continued_study_is_estimated_from_its_own_runs_and_remaining_steps(tmp_path: Path) -> None:
    write_run(tmp_path, spec(0), 40, 4.0)
    estimate = estimate_launch([spec(0), spec(1)], tmp_path)
    assert estimate.price is not None and (estimate.left, estimate.price.hours) == (160, pytest.approx(16.0))
    assert "200 steps, of which 160 are left" in estimate.sentences()[0]


def test_an_unfinished_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """Later steps are made again: all of them without a checkpoint, and none of a finished run."""

    def left() -> int:
        return estimate_launch([spec(0)], tmp_path).left

    write_run(tmp_path, spec(0), 40, 4.0, checkpoint=35)
    run_dir = tmp_path / "runs" / spec(0).run
    assert left() == 65
    estimate = estimate_launch([spec(0)], tmp_path)
    assert estimate.price is not None and estimate.price.hours == pytest.approx(6.5)
    checkpoint = run_dir / "checkpoints" / checkpoint_name(35)
    checkpoint.rename(checkpoint.with_name(checkpoint_name(36)))
    assert left() == 100, "the journal does not record the checkpoint of step 36"
    checkpoint.touch()
    journal = Journal(run_dir)
    journal.end(40, "failed", "why")
    journal.close()
    assert left() == 65


def test_a_finished_run_continues_from_its_last_step(tmp_path: Path) -> None:
    write_run(tmp_path, spec(0), 40, 4.0, checkpoint=35)
    journal = Journal(tmp_path / "runs" / spec(0).run)
    journal.end(40, "finished")
    journal.close()
    assert estimate_launch([spec(0)], tmp_path).left == 60


def test_a_command_continues_from_the_checkpoint_in_its_journal(tmp_path: Path) -> None:
    """Its checkpoints are in a folder of its own; without one it starts again."""
    write_run(tmp_path, spec(0), 40, 4.0, checkpoint=35)
    shutil.rmtree(tmp_path / "runs" / spec(0).run / "checkpoints")
    assert estimate_launch([spec(0)], tmp_path).left == 100
    journal = Journal(tmp_path / "runs" / spec(0).run)
    journal.attempt(0)
    journal.close()
    assert estimate_launch([spec(0)], tmp_path).left == 65


def test_duplicate_members_count_once(tmp_path: Path) -> None:
    """The override `seed=0,0` gives the same member twice."""
    write_run(tmp_path, spec(0), 40, 4.0)
    estimate = estimate_launch([spec(0), spec(0)], tmp_path)
    assert (estimate.members, estimate.steps, estimate.left) == (1, 100, 60)
    assert estimate.price is not None and estimate.price.hours == pytest.approx(6.0)


def test_a_branch_costs_the_steps_after_its_parents(tmp_path: Path) -> None:
    write_run(tmp_path, spec(0), 40, 4.0)
    branch = {"branch": {"run": "scalerl-0-8", "step": 30}}
    estimate = estimate_launch([replace(spec(1), config={**spec(1).config, **branch})], tmp_path)
    assert estimate.price is not None and (estimate.left, estimate.price.hours) == (70, pytest.approx(7.0))


def test_runs_without_a_specification_count_and_broken_ones_do_not(tmp_path: Path) -> None:
    write_run(tmp_path, spec(7), 10, 1.0, frozen=False)
    broken = tmp_path / "runs" / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text("[]\n[]\n")
    estimate = estimate_launch([spec(0)], tmp_path)
    assert estimate.price is not None and estimate.price.hours == pytest.approx(10.0) and estimate.price.runs == 1


def test_unknown_costs_and_invalid_limits_are_refused(tmp_path: Path) -> None:
    unknown = estimate_launch([spec()], tmp_path)
    assert (
        unknown.price is None
        and "device hours: unknown, because no run here has taken a step" in unknown.sentences()[1]
    )
    assert unknown.sentences(show_unknown=False) == ["1 member (1 recipe, 1 seed), 100 steps"]
    with pytest.raises(UserError, match=r"launch\.like: .*nowhere: no run with device hours"):
        estimate_launch([spec()], tmp_path, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"launch\.rate: -1 must be the money"):
        estimate_launch([spec()], tmp_path, rate=-1)
    with pytest.raises(UserError, match=r"launch\.max_device_hours: 5, but no run says.*launch\.like"):
        check_hours(unknown, 5)
    write_run(tmp_path, spec(1), 10, 1.0)
    known = estimate_launch([spec()], tmp_path)
    check_hours(known, None)
    check_hours(known, 10.5)
    with pytest.raises(UserError, match=r"launch\.max_device_hours: 9, and 100 steps take about 10 by"):
        check_hours(known, 9)
    for bad in (0, True, "many", float("nan")):
        with pytest.raises(UserError, match=r"launch\.max_device_hours: .* must be a positive number"):
            check_hours(known, bad)


# --- comparisons that a launch will decide -----------------------------------------------------------------------


def study(recipes: int, seeds: int, between: float, seed_sd: float, rng: np.random.Generator) -> list[Fit]:
    """Return fitted recipes whose asymptotes have the standard deviation `between`."""
    compute = np.linspace(50, 4000, 25)
    curves = []
    for number in range(recipes):
        ceiling = 0.6 + between * rng.standard_normal()
        rows = []
        for seed in range(seeds):
            seed_ceiling = ceiling + seed_sd * rng.standard_normal()
            reward = (
                0.1 + (seed_ceiling - 0.1) / (1 + (500 / compute) ** 1.5) + 0.01 * rng.standard_normal(len(compute))
            )
            rows += [(c, r, str(seed)) for c, r in zip(compute, reward, strict=True)]
        c, r, s = zip(*rows, strict=True)
        curves.append(make_curve(f"recipe {number}", list(c), list(r), seed=list(s)))
    return fit_curves(curves)


def test_few_comparisons_stay_undecided_if_recipes_differ_much() -> None:
    rng = np.random.default_rng(3)
    far, same = (predict_resolution(9, 3, study(6, 3, between, 0.01, rng), by="pilot") for between in (0.15, 0.0))
    assert far.comparisons == same.comparisons == 8
    assert far.undecided is not None and far.undecided < 2.5
    assert same.undecided is not None and same.undecided > 6.5
    assert far.source == "pilot" and "of 8 comparisons with the best will stay undecided" in far.sentence


def test_a_single_recipe_has_no_comparison() -> None:
    fits = study(3, 2, 0.05, 0.02, np.random.default_rng(5))
    for one in (predict_resolution(1, 2, fits, by="pilot"), predict_resolution(1, 2)):
        assert one.comparisons == 0 and "undecided" not in one.sentence
        assert one.sentence.startswith("a single recipe has nothing to be compared with; between two, a difference of")


@given(st.integers(2, 30), st.integers(1, 30))
def test_four_times_the_seeds_halve_the_smallest_difference(recipes: int, seeds: int) -> None:
    """The smallest difference falls with the root of the number of seeds. `seeds_needed` does not depend on it."""
    one, two = predict_resolution(recipes, seeds), predict_resolution(recipes, 4 * seeds)
    assert two.smallest == pytest.approx(one.smallest / 2) and one.seeds_needed == two.seeds_needed
    assert one.undecided is None and "published spread" in one.sentence


@pytest.mark.full
def test_the_predicted_share_of_undecided_comparisons_matches_simulated_studies() -> None:
    """The share is predicted from one study and counted in other studies of the same kind."""
    from sweeps.decide.pairwise import compare

    rng = np.random.default_rng(11)
    predicted, counted = [], []
    for _ in range(12):
        fits = study(5, 3, 0.05, 0.02, rng)
        share = predict_resolution(5, 3, study(5, 3, 0.05, 0.02, rng)).undecided
        assert share is not None
        predicted.append(share / 4)
        best = max(fits, key=lambda fit: fit.curve.reward[-3:].mean()).recipe
        for fit in fits:
            if fit.recipe != best:
                (row,) = compare(fits, [(fit.recipe, best)]).rows
                assert row.R.low is not None and row.R.high is not None
                counted.append(row.R.low <= 0 <= row.R.high)
    assert np.mean(predicted) == pytest.approx(np.mean(counted), abs=0.2)


def test_a_design_without_recipes_is_refused() -> None:
    with pytest.raises(UserError, match="0 recipes with 3 seeds is no study"):
        predict_resolution(0, 3)
    assert predict_resolution(2, 2, margin=0.0).seeds_needed is None


# --- the command -------------------------------------------------------------------------------------------------


def launch_study(place: Place, *words: str, command: tuple[str, ...] = ("--multirun",)) -> tuple[int, str, str]:
    """Launch a light study of 12 steps; return exit code, stdout and stderr."""
    study = [*place.overrides("study"), *light.overrides("local"), "seed=0,1"]
    arguments = [sys.executable, "-m", "lightning_scalerl.train", *command, *study, *words]
    result = forked.run(arguments, cwd=place.root, env=place.environment())
    return result.returncode, result.stdout, result.stderr


@pytest.mark.slow
def test_a_launch_above_its_limit_is_refused_in_one_line(tmp_path: Path) -> None:
    write_run(tmp_path / "pilot", spec(), 10, 5.0)
    code, out, err = launch_study(
        Place(tmp_path, light=True), f"launch.like={tmp_path}/pilot", "launch.max_device_hours=11"
    )
    assert code == 1 and not out and len(err.strip().splitlines()) == 1
    assert "launch.max_device_hours: 11, and 24 steps take about 12 by" in err and not (tmp_path / "study").exists()


@pytest.mark.full
def test_a_launch_prints_its_cost_and_is_refused_above_its_limit(tmp_path: Path) -> None:
    place = Place(tmp_path, light=True)
    write_run(tmp_path / "pilot", spec(), 10, 5.0)
    code, out, _ = launch_study(place, f"launch.like={tmp_path}/pilot", "launch.rate=3", "launch.design=json")
    estimate = json.loads(out)
    assert code == 0 and not (tmp_path / "study").exists(), "nothing was started"
    assert (estimate["members"], estimate["steps"], estimate["price"]["hours"], estimate["money"]) == (
        2,
        24,
        12.0,
        36.0,
    )
    assert estimate["comparisons"]["comparisons"] == 0
    code, _, err = launch_study(place, f"launch.like={tmp_path}/pilot", "launch.max_device_hours=11")
    assert code == 1 and "launch.max_device_hours: 11, and 24 steps take about 12 by" in err
    assert not (tmp_path / "study").exists()
    code, _, err = launch_study(place, f"launch.like={tmp_path}/pilot", "launch.max_device_hours=13")
    assert (
        code == 0
        and "2 members (1 recipe, 2 seeds), 24 steps" in err
        and "device hours: about 12, estimated from 1 run of" in err
    )
    code, _, err = launch_study(place)
    assert code == 0 and "24 steps, of which 0 are left" in err and "device hours" not in err
    code, _, err = launch_study(place, "launch.design=page")
    assert code == 1 and "launch.design: 'page' is none of text, json, null" in err


def test_plan_with_design_becomes_a_launch_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("sweeps.cli.study_commands.train_command", lambda words: calls.append(list(words)) or 0)
    assert main(["plan", "--design", "seed=0,1", "loss=dapo", "--like", "it's", "--rate", "2", "--json"]) == 0
    assert calls == [
        ["--multirun", "seed=0,1", "loss=dapo", "launch.design=json", "launch.like='it\\'s'", "launch.rate=2.0"]
    ]
    for arguments, message in (
        (["plan"], "give a SOURCE, or --design"),
        (
            ["plan", "x.csv", "--target", "1", "--like", "y"],
            "--like and --rate: only for a planned study; give --design",
        ),
        (["plan", "x.csv", "--design", "seed=0"], "x.csv is a source"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2 and message in capsys.readouterr().err


def test_trials_of_a_search_are_not_counted_as_one_recipe(tmp_path: Path) -> None:
    trials = [replace(spec(), run=f"scalerl/{number}") for number in range(3)]
    assert estimate_launch(trials, tmp_path).sentences(show_unknown=False) == ["3 trials, 300 steps"]
