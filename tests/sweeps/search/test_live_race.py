"""Tests of live races: which members are stopped, and that slots, pace and kills do not change any decision."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from sweeps.cli.main import main
from sweeps.decide.race import run_race
from sweeps.errors import UserError
from sweeps.launch.ledger import MemberState
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.interruption import requested_stop
from sweeps.run.spec import RunSpec
from sweeps.search.race import LiveRace
from sweeps.search.race_log import RACE_FILE, RaceRecord
from sweeps.search.settings import RaceSettings
from sweeps.source import load
from tests.examples import every
from tests.sweeps.launch.test_study import Recorder
from tests.sweeps.search.runners import METRIC, STEPS, Cluster, KilledError, Runners, member, uneven

LIVE = RaceSettings(mode="live", budget=1.0, p_ahead=0.05, growth=1.2)

# Without shrinking: there are few examples, and shrinking one takes minutes.
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)


class RecordingObserver(Recorder):
    """An observer that also records messages, paused members and added members."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def say(self, line: str) -> None:
        self.messages.append(line)

    def paused(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        self.heard.append(("paused", spec.title, reason))

    def added(self, specs: Sequence[RunSpec]) -> None:
        self.heard += [("added", spec.title) for spec in specs]


def four() -> list[RunSpec]:
    """Return members of four recipes, two seeds each: two winners that are nearly equal, and two losers."""
    asymptotes_and_c_mids = ((0.7, 0.25), (0.45, 0.25), (0.7, 0.26), (0.35, 0.25))
    return [member(a, seed, c_mid=c_mid) for a, c_mid in asymptotes_and_c_mids for seed in (0, 1)]


LOSERS = {"scalerl+a=0.45", "scalerl+a=0.35"}
WINNERS = {"scalerl+a=0.7", "scalerl+a=0.7,c_mid=0.26"}


def raced(
    directory: Path,
    specs: Sequence[RunSpec],
    executor: Runners | None = None,
    rules: RaceSettings = LIVE,
    observer: RecordingObserver | None = None,
) -> dict[str, MemberState]:
    """Run a race to its end, with a new controller after each kill."""
    executor = executor or Runners()
    while True:
        study = Study(directory, specs)
        try:
            return study.run(executor, [observer or RecordingObserver()], decider=LiveRace(study, rules))
        except KilledError:
            executor = Runners(executor.slots, executor.pace, None, executor.fails)


def looks(directory: Path) -> list[Any]:
    lines = [json.loads(line) for line in (directory / RACE_FILE).read_text().splitlines()]
    return [line["look"] for line in lines if line["kind"] == "look"]


def recipes(states: dict[str, MemberState], state: str) -> set[str]:
    return {member_state.recipe for member_state in states.values() if member_state.state == state}


# --- which members are stopped -------------------------------------------------------------------------------


def test_losers_are_stopped_and_the_others_run_to_the_end(tmp_path: Path) -> None:
    executor, observer = Runners(slots=8), RecordingObserver()
    states = raced(tmp_path, four(), executor, observer=observer)
    assert recipes(states, "stopped") == LOSERS
    assert recipes(states, "finished") == WINNERS
    assert executor.steps < 0.85 * 8 * STEPS
    (reason,) = {member_state.reason for member_state in states.values() if member_state.recipe == "scalerl+a=0.35"}
    assert reason is not None and "of ending ahead of scalerl+a=0." in reason and "stopped at compute" in reason
    assert ("stopped", "scalerl+a=0.35 seed 0", reason) in observer.heard
    assert observer.closed == [0], "a stopped member does not count as failed"
    # The end of the output: the ranking, the winner, and the saved compute.
    end = observer.messages[-observer.messages[::-1].index("race: over; ranking by the reward at 1:") - 1 :]
    named = [line.split(": ")[1].split(". ")[-1].removeprefix("-  ") for line in end[1:5]]
    assert set(named[:2]) == WINNERS and set(named[2:]) == LOSERS
    assert all("of being best" in line for line in end[1:3]) and "stopped at compute" in end[3]
    assert end[5].startswith(("race: winner: scalerl+a=0.7", "race: undecided between scalerl+a=0.7"))
    spared = 8 - executor.steps / STEPS  # a stopped member runs on until it sees the request
    saved = f"race: saved {spared:.4g} of the 8 compute of running all recipes to the budget ({spared / 8:.0%})"
    assert end[6:] == [saved]
    view = next(member_view for member_view in overview(tmp_path) if member_view.recipe == "scalerl+a=0.35")
    assert (view.state, view.reason) == ("stopped", reason)


@pytest.mark.slow
def test_a_live_race_decides_like_the_command_afterwards(tmp_path: Path) -> None:
    raced(tmp_path, four(), rules=replace(LIVE, mode="dry_run"))
    curves = load([tmp_path]).curves
    after = run_race(curves, LIVE.rules(1.0), ended=[curve.recipe for curve in curves])
    assert [look["stopped"] for look in looks(tmp_path)] == [list(look.stopped) for look in after.looks]
    assert looks(tmp_path) == json.loads(json.dumps([look.to_json() for look in after.looks]))


@pytest.mark.full
def test_a_dry_run_stops_nothing_and_reports_what_it_would_stop(tmp_path: Path) -> None:
    observer = RecordingObserver()
    states = raced(tmp_path / "dry", four(), rules=replace(LIVE, mode="dry_run"), observer=observer)
    raced(tmp_path / "live", four())
    assert recipes(states, "finished") == {spec.recipe for spec in four()}
    assert looks(tmp_path / "dry") == looks(tmp_path / "live")
    assert sum("would be stopped at compute" in line for line in observer.messages) == 2
    # Then a live race: the looks of the dry run still hold, and no member is left to stop.
    assert "race: a live race would have saved" in observer.messages[-1]
    observer = RecordingObserver()
    states = raced(tmp_path / "dry", four(), observer=observer)
    assert recipes(states, "stopped") == set()
    assert "race: saved 0 of the 8 compute of running all recipes to the budget" in observer.messages[-1]


@pytest.mark.slow
def test_equal_recipes_are_not_stopped(tmp_path: Path) -> None:
    states = raced(tmp_path, [member(0.6, c_mid=c_mid) for c_mid in (0.24, 0.25, 0.26)])
    assert recipes(states, "stopped") == set()


def test_the_default_budget_is_the_smallest_compute_of_a_member(tmp_path: Path) -> None:
    observer = RecordingObserver()
    specs = [member(0.7), member(0.4, cost=0.8), member(0.3, cost=1.5)]
    raced(tmp_path, specs, Runners(slots=1), replace(LIVE, budget=None), observer)
    assert RaceRecord.read(tmp_path).rules == LIVE.rules(0.8)
    assert (
        "race: to 0.8 virtual device hours per run (the smallest compute that a member spends" in observer.messages[0]
    )


def test_the_cost_of_a_start_is_not_multiplied_by_the_steps(tmp_path: Path) -> None:
    """A pipeline has to be filled: its first step may cost as much as a quarter of the run."""
    raced(tmp_path, [member(0.7, start=0.3), member(0.4, start=0.3)], Runners(), replace(LIVE, budget=None))
    rules = RaceRecord.read(tmp_path).rules
    assert rules is not None and rules.budget == pytest.approx(1.3)


# --- decisions do not depend on slots, pace and kills --------------------------------------------------------


@pytest.mark.full
@settings(max_examples=8, phases=NO_SHRINK, derandomize=True)
@given(
    slots=st.integers(1, 9),
    pace=st.integers(0, 1000),
    kills=st.lists(st.integers(1, 60), max_size=4),
)
@example(slots=2, pace=138, kills=[13, 22])
def test_slots_pace_and_killed_controllers_change_no_decision(slots: int, pace: int, kills: list[int]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed, disturbed = Path(scratch) / "a", Path(scratch) / "b"
        raced(undisturbed, four(), Runners(slots=8))
        for after in kills:
            study = Study(disturbed, four())
            executor = Runners(slots, uneven(pace), killed_after=after)
            with pytest.raises(KilledError):
                study.run(executor, [], decider=LiveRace(study, LIVE))
                raise KilledError  # the race ended before the kill
        states = raced(disturbed, four(), Runners(slots, uneven(pace + 1)))
        assert looks(disturbed) == looks(undisturbed)
        assert recipes(states, "stopped") == LOSERS
        # A loser may finish before slower members reach the look that would have stopped it.
        assert recipes(states, "finished") >= WINNERS


def run_until_killed(directory: Path, executor: Runners, rules: RaceSettings = LIVE) -> None:
    study = Study(directory, four())
    with pytest.raises(KilledError):
        study.run(executor, [], decider=LiveRace(study, rules, clock=itertools.count(step=60).__next__))


def asked_to_stop(directory: Path, executor: Runners) -> set[str]:
    """Return the members that were asked to stop and are still running."""
    return {run for run in executor.running() if requested_stop(directory / "runs" / run) is not None}


@pytest.mark.slow
@pytest.mark.parametrize("after", every(3, (8, 12, 18), pytest.mark.full))
def test_members_being_paused_during_a_kill_are_paused(tmp_path: Path, after: int) -> None:
    first = Cluster(slots=2, killed_after=after)
    run_until_killed(tmp_path / "a", first)
    assert asked_to_stop(tmp_path / "a", first)
    raced(tmp_path / "undisturbed", four())
    states = raced(tmp_path / "a", four(), Cluster(slots=2, before=first))
    assert looks(tmp_path / "a") == looks(tmp_path / "undisturbed")
    assert recipes(states, "failed") == set()
    assert recipes(states, "stopped") <= LOSERS and recipes(states, "finished") >= WINNERS


def test_a_launch_without_a_race_continues_members_being_stopped(tmp_path: Path) -> None:
    first = Cluster(slots=2, killed_after=8)
    run_until_killed(tmp_path, first)
    assert asked_to_stop(tmp_path, first)
    states = Study(tmp_path, four()).run(Cluster(slots=2, before=first), [])
    assert recipes(states, "finished") == {spec.recipe for spec in four()}


@pytest.mark.slow
def test_with_few_slots_no_member_runs_far_ahead_of_a_look(tmp_path: Path) -> None:
    executor, observer = Runners(slots=1), RecordingObserver()
    states = raced(tmp_path, four(), executor, observer=observer)
    assert recipes(states, "stopped") == LOSERS
    assert executor.steps < 0.8 * 8 * STEPS
    entries = [entry for entry in Study.read(tmp_path).ledger.entries() if entry["event"] == "stopped"]
    assert any(
        "paused: it is at compute 0.2 and waits for 7 other members to get there" in entry["reason"]
        for entry in entries
    )
    assert any(heard[0] == "paused" for heard in observer.heard)


@pytest.mark.slow
def test_members_interrupted_by_a_kill_are_waited_for(tmp_path: Path) -> None:
    """These members do not run and are not queued. Without waiting, the others would finish before these get a slot."""
    run_until_killed(tmp_path, Runners(slots=2, killed_after=2))
    executor = Runners(slots=2)
    states = raced(tmp_path, four(), executor)
    assert recipes(states, "stopped") == LOSERS and executor.steps < 0.8 * 8 * STEPS


@pytest.mark.slow
def test_a_member_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    specs = four()
    states = raced(tmp_path, specs, Runners(slots=2, fails={specs[0].run: 6}))
    assert states[specs[0].run].state == "failed"
    assert recipes(states, "stopped") == LOSERS


@pytest.mark.full
def test_the_command_does_not_wait_for_a_failed_member_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = four()
    raced(
        tmp_path, specs, Runners(slots=8, fails={specs[2].run: 6})
    )  # the other seed of this recipe was stopped, so it has not ended
    assert main(["race", str(tmp_path), "--budget", "1", "--p-ahead", "0.05", "--growth", "1.2", "--json"]) == 0
    race_json = json.loads(capsys.readouterr().out)
    assert race_json["looks"] == looks(tmp_path)
    assert {recipe_row["recipe"] for recipe_row in race_json["recipes"] if recipe_row["stopped_at"]} == LOSERS


@pytest.mark.slow
def test_a_failed_member_is_continued_by_the_next_launch(tmp_path: Path) -> None:
    specs = four()
    raced(tmp_path, specs, Runners(slots=2, fails={specs[0].run: 6}))
    states = raced(tmp_path, specs, Runners(slots=2))
    assert states[specs[0].run].state == "finished"


@pytest.mark.slow
def test_a_recipe_whose_runs_failed_is_in_looks_only_up_to_the_failure(tmp_path: Path) -> None:
    name, specs = "scalerl+a=0.7,c_mid=0.26", four()
    dead = {spec.run: 12 for spec in specs if spec.recipe == name}  # of 40 steps, at compute 0.3
    states = raced(tmp_path, specs, Runners(slots=3, fails=dead))
    assert recipes(states, "failed") == {name} and recipes(states, "stopped") == LOSERS
    seen = {look["compute"]: {chance["recipe"] for chance in look["chances"]} for look in looks(tmp_path)}
    assert all((name in recipes) == (compute <= 0.3) for compute, recipes in seen.items())
    # The command gives the same looks. The next launch continues the failed runs.
    curves, rules = load([tmp_path]).curves, LIVE.rules(1.0)
    after = run_race(curves, rules, ended=[curve.recipe for curve in curves], failed=[name])
    assert looks(tmp_path) == json.loads(json.dumps([look.to_json() for look in after.looks]))
    before = looks(tmp_path)
    assert recipes(raced(tmp_path, specs), "finished") == WINNERS
    assert looks(tmp_path)[: len(before)] == before


def test_if_all_other_recipes_failed_nothing_is_stopped(tmp_path: Path) -> None:
    specs = four()
    states = raced(tmp_path, specs, Runners(fails={spec.run: 4 for spec in specs[2:]}))
    assert recipes(states, "finished") == {"scalerl+a=0.7"} and recipes(states, "stopped") == set()
    assert RaceRecord.read(tmp_path).looks == ()


@pytest.mark.slow
def test_a_member_stopped_by_hand_is_neither_resumed_nor_waited_for(tmp_path: Path) -> None:
    specs = four()
    executor = Runners(slots=8)
    poll = executor.poll

    def poll_and_stop_by_hand(timeout_s: float) -> Any:
        if executor.polls == 3:
            executor.stop([specs[1].run], "I do not need it")
        return poll(timeout_s)

    executor.poll = poll_and_stop_by_hand  # type: ignore[method-assign]
    states = raced(tmp_path, specs, executor)
    assert (states[specs[1].run].state, states[specs[1].run].reason) == ("failed", "I do not need it")
    assert recipes(states, "stopped") == LOSERS


@pytest.mark.slow
def test_members_of_another_launch_in_the_folder_do_not_race(tmp_path: Path) -> None:
    other = [member(0.9), member(0.95)]
    Study(tmp_path, other).run(Runners(slots=2, fails={other[0].run: 4}), [])
    states = raced(tmp_path, four())
    assert {name for look in looks(tmp_path) for name in look["stopped"]} == LOSERS
    assert recipes(states, "finished") == WINNERS


@pytest.mark.slow
def test_a_continued_race_in_a_shared_folder_decides_like_the_launch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared_folder, specs = tmp_path / "a", four()
    raced(tmp_path / "undisturbed", specs)
    # First a launch without a race, in which a member fails. Then a race that is killed early. Then lost ledger lines.
    others = [member(0.9), member(0.95)]
    Study(shared_folder, others).run(Runners(slots=2, fails={others[0].run: 4}), [])
    run_until_killed(shared_folder, Runners(slots=2, killed_after=2))
    ledger = shared_folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    for number, spec in ((0, specs[7]), (1, specs[0])):  # a member that has not begun, and one that has
        at = next(at for at, line in enumerate(lines) if f'"planned","run":"{spec.run}"' in line)
        lines[at] = "\0" * 30 + "\n" if number else lines[at][:20] + "\n"
    ledger.write_text("".join(lines))
    study = Study.read(shared_folder)
    assert {spec.run for spec in study.specs} == {spec.run for spec in (*specs, *others)}
    assert f"{ledger}: line" in caplog.text and "damaged" in caplog.text
    states = study.run(Runners(slots=2), [], decider=LiveRace(study, LIVE))
    assert looks(shared_folder) == looks(tmp_path / "undisturbed")
    assert recipes(states, "stopped") <= LOSERS
    assert recipes(states, "finished") >= WINNERS | {spec.recipe for spec in others}
    assert recipes(states, "failed") == set()
    assert RaceRecord.read(shared_folder).members == tuple(spec.run for spec in specs)
    # The lost lines were written again. A second race in the folder has its own record.
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(keepends=True) if line[:1] == "{"))
    assert len(Study.read(shared_folder).specs) == 10
    raced(shared_folder, [member(0.3), member(0.8)])
    assert RaceRecord.read(shared_folder).stopped.keys() == {"scalerl+a=0.3"}
    assert RaceRecord.read(shared_folder, [specs[0].run]).stopped.keys() == LOSERS


def test_an_unreadable_evaluation_does_not_end_a_study(tmp_path: Path) -> None:
    specs, observer = four(), RecordingObserver()
    executor = Runners(slots=8)
    poll = executor.poll

    def spoilt(timeout_s: float) -> Any:
        if executor.polls == 3:
            journal = executor._members[specs[0].run][1]
            journal.record("eval", 5, {METRIC: 0.5})  # without compute
        return poll(timeout_s)

    executor.poll = spoilt  # type: ignore[method-assign]
    states = raced(tmp_path, specs, executor, observer=observer)
    assert {state.state for state in states.values()} == {"finished"}
    assert sum("race: no look: " in line for line in observer.messages) == 1


@pytest.mark.slow
def test_a_stopped_run_is_continued_by_a_launch_without_a_race(tmp_path: Path) -> None:
    raced(tmp_path, four())
    study, executor = Study(tmp_path, four()), Runners()
    states = study.run(executor, [])
    assert recipes(states, "finished") == {spec.recipe for spec in four()}
    assert len(executor.started) == 4
    observer = RecordingObserver()
    raced(tmp_path, four(), observer=observer)
    assert "race: saved 0 of the 8 compute of running all recipes to the budget" in observer.messages[-1], (
        "the compute of continued members is not saved"
    )


@pytest.mark.slow
def test_a_race_continues_only_with_its_original_rules(tmp_path: Path) -> None:
    raced(tmp_path, four())
    with pytest.raises(UserError, match=r"race.p_ahead: 0.2, and the race in .* was begun with 0.05"):
        raced(tmp_path, four(), rules=replace(LIVE, p_ahead=0.2))
    with pytest.raises(UserError, match=r"race.budget: 2, and"):
        raced(tmp_path, four(), rules=replace(LIVE, budget=2.0))


@pytest.mark.slow
def test_a_race_begun_without_a_limit_on_the_loss_continues_without_it(tmp_path: Path) -> None:
    """Earlier versions had no such limit. Their races must continue with the rules that decided so far."""
    run_until_killed(tmp_path, Runners(slots=8, killed_after=14), LIVE)
    path = tmp_path / "race.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["crc"]
        if line["kind"] == "race":
            assert line["rules"].pop("loss") == 0.01
        elif line["kind"] == "look":
            del line["look"]["loss"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    states = raced(tmp_path, four())
    assert recipes(states, "stopped") == LOSERS
    race_record = RaceRecord.read(tmp_path)
    assert race_record.rules is not None and race_record.rules.loss == 1.0 and race_record.looks
    with pytest.raises(UserError, match=r"race.loss: 0.02, and the race in .* was begun with 1;"):
        raced(tmp_path, four(), rules=replace(LIVE, loss=0.02))


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "on"}, "race.mode: 'on' is none of none, dry_run, live"),
        ({"mode": "live", "p_ahead": 0.7}, "race.p_ahead 0.7: give a chance above 0 and below 0.5"),
        ({"mode": "live", "budget": -1}, "race.budget -1: give a positive compute"),
        ({"mode": "live", "budget": "much"}, "race.budget: 'much' is no number"),
        ({"ahead": 1}, "race.ahead: 1 must be a factor above 1"),
        ({"looks": 1.5}, "race.looks: 1.5 is no whole number"),
        ({"freed": "nothing"}, "race.freed: the key was removed; leave it out, and ask `scalerl plan`"),
        ({"speed": 1}, "race.speed: no such setting; valid: mode, budget"),
        ("live", "race: 'live' must be settings"),
    ],
)
def test_bad_settings_are_named(given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        RaceSettings.of(given)


@pytest.mark.parametrize(("freed", "warnings"), [("nothing", 0), ("plan", 1)])
def test_races_of_an_earlier_version_are_continued(freed: str, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """Their settings may contain `freed`, the use of saved compute. It is ignored, except for a warning."""
    recorded = RaceSettings.recorded({"mode": "live", "budget": 1, "freed": freed})
    assert recorded == RaceSettings(mode="live", budget=1) and caplog.text.count("`scalerl plan`") == warnings
