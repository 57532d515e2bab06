"""Tests of a user's training loop in a race: it decides like the live race, and faults never stop it."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps import stopping
from sweeps.curve import STEPS
from sweeps.errors import UserError
from sweeps.launch.adoption import adopt
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import Journal, read_journal
from sweeps.run.lease import Lease
from sweeps.search.race import LiveRace
from sweeps.search.race_log import RaceRecord
from sweeps.search.settings import RaceSettings
from sweeps.source import load
from sweeps.stopping import RacingRun, finished, should_stop
from tests.examples import examples
from tests.paths import ROOT
from tests.sweeps.search.runners import AXIS, EVERY, METRIC, Runners, evaluation, member
from tests.sweeps.search.runners import STEPS as UNTIL

RULES: dict[str, Any] = {"budget": 1.0, "p_ahead": 0.05, "growth": 1.8}


def curve_of(a: float, seed: int) -> list[tuple[int, float, float, float]]:
    """Return (step, reward, compute, standard error) of each evaluation of a member of the simulated race."""
    spec = member(a, seed)
    rows = [(step, evaluation(spec, step)) for step in range(0, UNTIL + 1, EVERY)]
    return [(step, row[METRIC], row[AXIS], row[f"{METRIC}_se"]) for step, row in rows]


def report(run: RacingRun, row: tuple[int, float, float, float]) -> str | None:
    step, reward, compute, error = row
    return run.should_stop(step, reward, compute, error)


def rows_in(run: RacingRun) -> list[tuple[int, float, float]]:
    view = read_journal(run.run_dir)
    return [(r.step, r.metrics[view.header["axis"]], r.metrics[run.metric]) for r in view.of_kind("eval")]


# --- decisions -------------------------------------------------------------------------------------------------


def test_loops_decide_like_the_live_race(tmp_path: Path) -> None:
    seed, tops = 0, (0.7, 0.66, 0.4)
    study = Study(tmp_path / "live", [member(a, seed) for a in tops])
    study.run(Runners(slots=3), decider=LiveRace(study, RaceSettings(mode="live", **RULES)))
    live = RaceRecord.read(study.directory)
    assert live.stopped, "the live race stops a member, so that there is something to compare"

    runs = {a: RacingRun(tmp_path / "loops", f"scalerl+a={a:g}", seed, axis=AXIS, members=3, **RULES) for a in tops}
    next_row, reasons = dict.fromkeys(tops, 0), {}
    while next_row:
        for a in list(next_row):
            reason = report(runs[a], curve_of(a, seed)[next_row[a]])
            next_row[a] += 1
            if reason is not None:
                reasons[a] = reason
            if reason is not None or next_row[a] == len(curve_of(a, seed)):
                runs[a].end()
                del next_row[a]
    for look in live.stopped.values():
        for name in look.stopped:
            assert reasons[float(name.partition("=")[2])] == look.why(name, live.rules or runs[0.7].rules)
    assert len(reasons) == len(live.stopped)
    looks = [json.loads(line)["look"] for line in (runs[0.7].run_dir / "race.jsonl").read_text().splitlines()]
    taken = [look.to_json() for look in live.looks]
    assert [(each["compute"], each["favourite"], each["stopped"]) for each in looks] == [
        (each["compute"], each["favourite"], each["stopped"]) for each in taken
    ]
    for mine, theirs in zip(looks, taken, strict=True):
        mine, theirs = ({c["recipe"]: c["p_ahead"] for c in each["chances"]} for each in (mine, theirs))
        assert mine == pytest.approx(theirs), "equal up to the order of sums"


def test_a_loop_races_against_adopted_members(tmp_path: Path) -> None:
    rows = [{"recipe": "good", "seed": 0, "hours": c, "reward": y, "sd": e} for _, y, c, e in curve_of(0.7, 0)]
    (tmp_path / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    adopt(tmp_path / "study", [str(tmp_path / "good.jsonl")], ["recipe,seed"], x="hours", unit="device_hours")
    run = RacingRun(tmp_path / "study", "bad", 0, **RULES)
    assert run.axis == "compute/device_hours", "the axis is that of the study"
    reasons = [report(run, row) for row in curve_of(0.4, 0)]
    assert any("of ending ahead of good" in str(why) for why in reasons) and reasons[0] is None
    first = next(n for n, why in enumerate(reasons) if why)
    assert all(reasons[first:]), "a stopped run stays stopped"
    assert {(view.recipe, view.state) for view in overview(tmp_path / "study")} == {
        ("good", "finished"),
        ("bad", "running"),
    }
    run.end()
    with pytest.raises(UserError, match=r"is a member of .* already"):
        RacingRun(tmp_path / "study", "good", 0, **RULES)
    with pytest.raises(
        UserError, match=r"axis: compute/tokens, and the runs in .* are compared by compute/device_hours"
    ):
        RacingRun(tmp_path / "study", "other", 0, axis="compute/tokens", **RULES)


def test_seeds_of_a_recipe_are_one_curve(tmp_path: Path) -> None:
    for seed in (0, 1):
        should_stop(tmp_path, "mine", seed, 0, 0.2, budget=10)
        should_stop(tmp_path, "mine", seed, 1, 0.3 + seed / 10)
        finished(tmp_path, "mine", seed)
    (curve,) = load([tmp_path]).curves
    assert curve.recipe == "mine" and curve.axis == STEPS and sorted(set(curve.seed)) == ["0", "1"]
    assert not curve.warnings and {view.state for view in overview(tmp_path)} == {"finished"}


# --- journals --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=4))
def test_every_step_is_recorded_once_after_any_number_of_resumes(
    kills: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Kills after some evaluations and resuming from earlier steps leave the journal of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("loop")
    next_step = 0
    for until, back in [*kills, (13, 0)]:
        run = RacingRun(folder, "mine", 3, budget=20.0, members=9)
        for step in range(next_step, until):
            assert run.should_stop(step, step / 20, float(step)) is None
        run._lease.release()  # the end of a process releases it too
        next_step = min(next_step if until <= next_step else until, back)
    whole = rows_in(run)
    assert whole == [(step, float(step), step / 20) for step in range(whole[0][0], 13)] and whole[0][0] == 0
    assert read_journal(run.run_dir).missing is None and len(list((folder / "runs").iterdir())) == 1


def loop(study: Path, recipe: str, top: float, pause_s: float, until: int = UNTIL) -> subprocess.Popen[str]:
    """Start a process that runs a user's training loop."""
    code = f"""
import sys, time
from pathlib import Path
from sweeps.stopping import should_stop, finished
heavy = sorted({{"pandas", "torch", "transformers", "optuna", "hydra"}} & sys.modules.keys())
from tests.sweeps.test_stopping import RULES, curve_of
for step, reward, compute, error in curve_of({top}, 0):
    if step > {until}:
        break
    about = dict(axis="compute/flops", members=2, **RULES)
    why = should_stop({str(study)!r}, {recipe!r}, 0, step, reward, compute, error, **about)
    print(step, why or "", *heavy, flush=True)
    if why:
        break
    time.sleep({pause_s})
finished({str(study)!r}, {recipe!r}, 0)
"""
    words = [sys.executable, "-c", code]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.live
@pytest.mark.slow
def test_a_killed_loop_resumes_without_loss(tmp_path: Path) -> None:
    good, bad = loop(tmp_path, "good", 0.7, 0.0), loop(tmp_path, "bad", 0.4, 9.0, until=8)
    assert bad.stdout is not None and bad.stdout.readline() == "0 \n", (
        "no package is imported that scalerl-curves does not install"
    )
    bad.send_signal(signal.SIGKILL)
    bad.wait()
    resumed_loop = loop(tmp_path, "bad", 0.4, 0.0)
    resumed_output, _ = resumed_loop.communicate(timeout=120)
    assert resumed_loop.returncode == 0 and "of ending ahead of good" in resumed_output.splitlines()[-1], resumed_output
    good_output, _ = good.communicate(timeout=120)
    assert good.returncode == 0 and "ahead" not in good_output and "Traceback" not in good_output
    curves_by_recipe = {curve.recipe: curve for curve in load([tmp_path]).curves}
    for recipe, top in (("good", 0.7), ("bad", 0.4)):
        rows = curve_of(top, 0)[: len(curves_by_recipe[recipe].compute)]
        assert curves_by_recipe[recipe].reward.tolist() == [reward for _, reward, _, _ in rows]
    assert len(curves_by_recipe["good"].compute) == len(curve_of(0.7, 0)) > len(curves_by_recipe["bad"].compute)


# --- faults ----------------------------------------------------------------------------------------------------


def test_evaluations_that_cannot_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=20)
    real = Journal.record

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    run.should_stop(0, 0.1)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as patched:
        patched.setattr(Journal, "record", full)
        assert run.should_stop(1, 0.2) is None and run.should_stop(2, 0.3) is None
    assert caplog.text.count("No space left on device") == 1, "warned once"
    assert Journal.record is real and len(rows_in(run)) == 1
    run.should_stop(3, 0.4)
    assert [step for step, _, _ in rows_in(run)] == [0, 1, 2, 3]


def test_a_failing_look_is_warned_about_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=20, members=1, axis=STEPS)
    monkeypatch.setattr(run._looks, "take", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING):
        assert run.should_stop(0, 0.1) is None and run.should_stop(1, 0.1) is None
    assert caplog.text.count("ZeroDivisionError") == 1 and len(rows_in(run)) == 2


def test_a_slow_look_does_not_delay_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=20, members=1, wait_s=0.2, axis=STEPS)
    release_file = tmp_path / "go"

    def slow() -> str:
        while not release_file.exists():
            time.sleep(0.01)
        return "enough"

    monkeypatch.setattr(run._looks, "take", slow)
    started_at = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert run.should_stop(0, 0.1) is None
        assert run.should_stop(1, 0.1) is None
    assert time.monotonic() - started_at < 2 and caplog.text.count("no answer within 0.2 s") == 1
    release_file.touch()
    run._wait_s = 20.0
    assert run.should_stop(2, 0.1) == "enough"
    assert [step for step, _, _ in rows_in(run)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("reward", "compute"), [(float("nan"), 1.0), (0.5, float("inf")), (0.5, -1.0), (None, 1.0), (0.5, "many")]
)
def test_invalid_evaluations_are_warned_about_and_not_recorded(
    reward: Any, compute: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=20)
    with caplog.at_level(logging.WARNING):
        assert run.should_stop(0, 0.1, 0.0) is None and run.should_stop(1, reward, compute) is None
    assert " is not valid, and was not recorded" in caplog.text and len(rows_in(run)) == 1


def test_steps_do_not_replace_compute_that_a_call_omits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=2e9, axis="compute/tokens")
    with caplog.at_level(logging.WARNING):
        assert run.should_stop(1, 0.1, 1e8) is None and run.should_stop(2, 0.2) is None
    assert "no compute is given, but runs are compared by compute/tokens: the evaluation" in caplog.text
    assert [step for step, _, _ in rows_in(run)] == [1]


def test_compute_that_decreases_is_warned_about_and_not_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=20)
    for step, compute in ((0, 0.0), (1, 5.0), (2, 10.0)):
        run.should_stop(step, 0.1, compute)
    with caplog.at_level(logging.WARNING):
        run.should_stop(3, 0.2, 1.0)
    assert "compute 1 is less than the 10 of step 2" in caplog.text and len(rows_in(run)) == 3


def test_a_run_that_another_process_writes_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RacingRun(tmp_path, "mine", 0, budget=20, wait_s=0.3)
    monkeypatch.setattr(stopping, "EXPIRY_S", 0.1)
    monkeypatch.setattr(stopping, "BEAT_S", 0.0)
    other = Lease(run.run_dir)
    other.acquire()
    assert run.should_stop(0, 0.1) is None and not (run.run_dir / "metrics.jsonl").exists()
    other.release()
    run._wait_s = 20.0
    assert run.should_stop(1, 0.1) is None and [step for step, _, _ in rows_in(run)] == [0, 1]


def test_invalid_rules_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p-ahead 0\.9"):
        RacingRun(tmp_path, "mine", 0, budget=1.0, p_ahead=0.9)
    with pytest.raises(UserError, match=r"budget: .* has no race whose budget is known"):
        should_stop(tmp_path, "mine", 0, 0, 0.1)
    assert not list(tmp_path.iterdir())
    (tmp_path / "launch.json").write_text(json.dumps({"race": {"mode": "live", "budget": 7.0, "p_ahead": 0.02}}))
    run = RacingRun(tmp_path, "mine", 0)
    assert (run.rules.budget, run.rules.p_ahead) == (7.0, 0.02), "rules of the study"


def test_the_transformers_callback_records_rewards_and_stops_training(tmp_path: Path) -> None:
    """Call the events of the transformers callback directly, without transformers."""

    class State:
        is_world_process_zero, global_step, total_flos, num_input_tokens_seen = True, 0, 0.0, 0

    class Control:
        should_training_stop = should_save = False

    class Args:
        world_size = 1

    events = stopping._RaceEvents(
        {"study": tmp_path, "recipe": "mine", "seed": 0, "budget": 9.0}, "eval_reward", "tokens"
    )
    events.on_train_begin(Args, State, Control)
    events.on_log(Args, State, Control, {"loss": 1.0, "num_tokens": 10.0})
    assert events._run is not None and not (events._run.run_dir / "metrics.jsonl").exists(), "no reward, no record"
    events.on_log(Args, State, Control, {"eval_reward": 0.25})
    State.global_step = 3
    events.on_log(Args, State, Control, {"eval_reward": 0.3})
    assert rows_in(events._run) == [(0, 0.0, 0.25), (3, 10.0, 0.3)] and not Control.should_training_stop
    events._run._stop_reason = "enough"
    State.global_step = 5
    events.on_log(Args, State, Control, {"eval_reward": 0.5, "eval_num_tokens": 50.0})
    assert Control.should_training_stop and Control.should_save
    Control.should_training_stop = False
    events.on_step_end(Args, State, Control)
    assert Control.should_training_stop
    with pytest.raises(UserError, match="compute: 'joules' is none of tokens, flops, steps, device_hours"):
        stopping.race_callback(tmp_path, "mine", 0, 1.0, compute="joules")
