"""Truths about a race that runs: who is stopped, that nothing else but time changes."""

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

# A failing example is one of few, and shrinking it takes minutes.
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)


class Told(Recorder):
    """An observer that remembers what was said and who was added, too."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def paused(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        self.heard.append(("paused", spec.title, reason))

    def added(self, specs: Sequence[RunSpec]) -> None:
        self.heard += [("added", spec.title) for spec in specs]


def four() -> list[RunSpec]:
    """Two that are alike, and two that are not."""
    each = ((0.7, 0.25), (0.45, 0.25), (0.7, 0.26), (0.35, 0.25))
    return [member(a, seed, c_mid=c_mid) for a, c_mid in each for seed in (0, 1)]


LOSERS = {"scalerl+a=0.45", "scalerl+a=0.35"}
WINNERS = {"scalerl+a=0.7", "scalerl+a=0.7,c_mid=0.26"}


def raced(
    directory: Path,
    specs: Sequence[RunSpec],
    executor: Runners | None = None,
    rules: RaceSettings = LIVE,
    told: Told | None = None,
) -> dict[str, MemberState]:
    """Until it is done, whoever is killed."""
    executor = executor or Runners()
    while True:
        study = Study(directory, specs)
        try:
            return study.run(executor, [told or Told()], decider=LiveRace(study, rules))
        except KilledError:
            executor = Runners(executor.slots, executor.pace, None, executor.fails)


def looks(directory: Path) -> list[Any]:
    lines = [json.loads(line) for line in (directory / RACE_FILE).read_text().splitlines()]
    return [line["look"] for line in lines if line["kind"] == "look"]


def recipes(states: dict[str, MemberState], state: str) -> set[str]:
    return {each.recipe for each in states.values() if each.state == state}


# --- what is stopped -----------------------------------------------------------------------------------------


def test_losers_are_stopped_and_the_others_run_to_the_end(tmp_path: Path) -> None:
    executor, told = Runners(slots=8), Told()
    states = raced(tmp_path, four(), executor, told=told)
    assert recipes(states, "stopped") == LOSERS
    assert recipes(states, "finished") == WINNERS
    assert executor.steps < 0.85 * 8 * STEPS
    (reason,) = {each.reason for each in states.values() if each.recipe == "scalerl+a=0.35"}
    assert reason is not None and "of ending ahead of scalerl+a=0." in reason and "stopped at compute" in reason
    assert ("stopped", "scalerl+a=0.35 seed 0", reason) in told.heard
    assert told.closed == [0], "a member that was stopped has not failed"
    # How it has ended: who comes in which place, who wins, and what the others were spared.
    end = told.said[-told.said[::-1].index("race: over; ranking by the reward at 1:") - 1 :]
    named = [line.split(": ")[1].split(". ")[-1].removeprefix("-  ") for line in end[1:5]]
    assert set(named[:2]) == WINNERS and set(named[2:]) == LOSERS
    assert all("of being best" in line for line in end[1:3]) and "stopped at compute" in end[3]
    assert end[5].startswith(("race: winner: scalerl+a=0.7", "race: undecided between scalerl+a=0.7"))
    spared = sum(2 * (1 - look["compute"]) * len(look["stopped"]) for look in looks(tmp_path))
    saved = f"race: saved {spared:.4g} of the 8 compute of running all recipes to the budget ({spared / 8:.0%})"
    assert end[6:] == [saved]
    view = next(each for each in overview(tmp_path) if each.recipe == "scalerl+a=0.35")
    assert (view.state, view.reason) == ("stopped", reason)


@pytest.mark.slow
def test_it_decides_as_the_command_does_afterwards(tmp_path: Path) -> None:
    raced(tmp_path, four(), rules=replace(LIVE, mode="dry_run"))
    curves = load([tmp_path]).curves
    after = run_race(curves, LIVE.rules(1.0), ended=[curve.recipe for curve in curves])
    assert [look["stopped"] for look in looks(tmp_path)] == [list(look.stopped) for look in after.looks]
    assert looks(tmp_path) == json.loads(json.dumps([look.to_json() for look in after.looks]))


@pytest.mark.full
def test_a_dry_run_stops_nothing_and_says_what_it_would_have(tmp_path: Path) -> None:
    told = Told()
    states = raced(tmp_path / "dry", four(), rules=replace(LIVE, mode="dry_run"), told=told)
    raced(tmp_path / "live", four())
    assert recipes(states, "finished") == {spec.recipe for spec in four()}
    assert looks(tmp_path / "dry") == looks(tmp_path / "live")
    assert sum("would be stopped at compute" in line for line in told.said) == 2
    # And then in earnest: what was decided holds, and there is nothing left to stop.
    assert "race: a live race would have saved" in told.said[-1]
    told = Told()
    states = raced(tmp_path / "dry", four(), told=told)
    assert recipes(states, "stopped") == set()
    assert "race: saved 0 of the 8 compute of running all recipes to the budget" in told.said[-1]


@pytest.mark.slow
def test_where_all_are_alike_nobody_is_stopped(tmp_path: Path) -> None:
    states = raced(tmp_path, [member(0.6, c_mid=c_mid) for c_mid in (0.24, 0.25, 0.26)])
    assert recipes(states, "stopped") == set()


def test_without_a_budget_it_is_what_the_slowest_spends(tmp_path: Path) -> None:
    told = Told()
    specs = [member(0.7), member(0.4, cost=0.8), member(0.3, cost=1.5)]
    raced(tmp_path, specs, Runners(slots=1), replace(LIVE, budget=None), told)
    assert RaceRecord.read(tmp_path).rules == LIVE.rules(0.8)
    assert "race: to 0.8 virtual device hours per run (the smallest compute that a member spends" in told.said[0]


# --- nothing but time ----------------------------------------------------------------------------------------


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
        undisturbed, here = Path(scratch) / "a", Path(scratch) / "b"
        raced(undisturbed, four(), Runners(slots=8))
        for after in kills:
            study = Study(here, four())
            executor = Runners(slots, uneven(pace), killed_after=after)
            with pytest.raises(KilledError):
                study.run(executor, [], decider=LiveRace(study, LIVE))
                raise KilledError  # it was done before
        states = raced(here, four(), Runners(slots, uneven(pace + 1)))
        assert looks(here) == looks(undisturbed)
        assert recipes(states, "stopped") == LOSERS
        # A member may be done before slower ones have come to the look that would have stopped it.
        assert recipes(states, "finished") >= WINNERS


def killed(directory: Path, executor: Runners, rules: RaceSettings = LIVE) -> None:
    study = Study(directory, four())
    with pytest.raises(KilledError):
        study.run(executor, [], decider=LiveRace(study, rules, clock=itertools.count(step=60).__next__))


def asked(directory: Path, executor: Runners) -> set[str]:
    """Members that were asked to stop, and have not yet."""
    return {run for run in executor.running() if requested_stop(directory / "runs" / run) is not None}


@pytest.mark.slow
@pytest.mark.parametrize("after", every(3, (8, 12, 18), pytest.mark.full))
def test_members_that_are_being_paused_when_their_controller_is_killed_are_paused(tmp_path: Path, after: int) -> None:
    first = Cluster(slots=2, killed_after=after)
    killed(tmp_path / "a", first)
    assert asked(tmp_path / "a", first)
    raced(tmp_path / "undisturbed", four())
    states = raced(tmp_path / "a", four(), Cluster(slots=2, before=first))
    assert looks(tmp_path / "a") == looks(tmp_path / "undisturbed")
    assert recipes(states, "failed") == set()
    assert recipes(states, "stopped") <= LOSERS and recipes(states, "finished") >= WINNERS


def test_a_member_that_is_still_being_stopped_is_continued_by_a_launch_without_a_race(tmp_path: Path) -> None:
    first = Cluster(slots=2, killed_after=8)
    killed(tmp_path, first)
    assert asked(tmp_path, first)
    states = Study(tmp_path, four()).run(Cluster(slots=2, before=first), [])
    assert recipes(states, "finished") == {spec.recipe for spec in four()}


@pytest.mark.slow
def test_where_there_are_few_places_none_runs_far_ahead_of_a_look(tmp_path: Path) -> None:
    executor, told = Runners(slots=1), Told()
    states = raced(tmp_path, four(), executor, told=told)
    assert recipes(states, "stopped") == LOSERS
    assert executor.steps < 0.8 * 8 * STEPS
    entries = [entry for entry in Study.read(tmp_path).ledger.entries() if entry["event"] == "stopped"]
    assert any(
        "paused: it is at compute 0.2 and waits for 7 other members to get there" in entry["reason"]
        for entry in entries
    )
    assert any(heard[0] == "paused" for heard in told.heard)


@pytest.mark.slow
def test_members_that_a_killed_controller_left_behind_are_waited_for_as_others_are(tmp_path: Path) -> None:
    """Nothing runs them: they are in no queue, and the others would be at their end before these have a place."""
    killed(tmp_path, Runners(slots=2, killed_after=2))
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
def test_the_command_waits_as_little_for_a_member_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = four()
    raced(tmp_path, specs, Runners(slots=8, fails={specs[2].run: 6}))  # its other seed was stopped, and has not ended
    assert main(["race", str(tmp_path), "--budget", "1", "--p-ahead", "0.05", "--growth", "1.2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["looks"] == looks(tmp_path)
    assert {each["recipe"] for each in said["recipes"] if each["stopped_at"]} == LOSERS


@pytest.mark.slow
def test_a_failed_member_goes_on_when_it_is_launched_again(tmp_path: Path) -> None:
    specs = four()
    raced(tmp_path, specs, Runners(slots=2, fails={specs[0].run: 6}))
    states = raced(tmp_path, specs, Runners(slots=2))
    assert states[specs[0].run].state == "finished"


@pytest.mark.slow
def test_a_recipe_whose_runs_died_is_not_judged_by_what_it_never_came_to(tmp_path: Path) -> None:
    name, specs = "scalerl+a=0.7,c_mid=0.26", four()
    dead = {spec.run: 12 for spec in specs if spec.recipe == name}  # of 40 steps, at compute 0.3
    states = raced(tmp_path, specs, Runners(slots=3, fails=dead))
    assert recipes(states, "failed") == {name} and recipes(states, "stopped") == LOSERS
    seen = {look["compute"]: {each["recipe"] for each in look["chances"]} for look in looks(tmp_path)}
    assert all((name in recipes) == (compute <= 0.3) for compute, recipes in seen.items())
    # As the command has it; and launched again it goes on.
    curves, rules = load([tmp_path]).curves, LIVE.rules(1.0)
    after = run_race(curves, rules, ended=[curve.recipe for curve in curves], failed=[name])
    assert looks(tmp_path) == json.loads(json.dumps([look.to_json() for look in after.looks]))
    before = looks(tmp_path)
    assert recipes(raced(tmp_path, specs), "finished") == WINNERS
    assert looks(tmp_path)[: len(before)] == before


def test_where_all_but_one_recipe_died_the_one_is_not_stopped_and_neither_are_they(tmp_path: Path) -> None:
    specs = four()
    states = raced(tmp_path, specs, Runners(fails={spec.run: 4 for spec in specs[2:]}))
    assert recipes(states, "finished") == {"scalerl+a=0.7"} and recipes(states, "stopped") == set()
    assert RaceRecord.read(tmp_path).looks == ()


@pytest.mark.slow
def test_a_member_stopped_by_hand_is_left_alone_and_not_waited_for(tmp_path: Path) -> None:
    specs = four()
    executor = Runners(slots=8)
    poll = executor.poll

    def by_hand(timeout_s: float) -> Any:
        if executor.polls == 3:
            executor.stop([specs[1].run], "I do not need it")
        return poll(timeout_s)

    executor.poll = by_hand  # type: ignore[method-assign]
    states = raced(tmp_path, specs, executor)
    assert (states[specs[1].run].state, states[specs[1].run].reason) == ("failed", "I do not need it")
    assert recipes(states, "stopped") == LOSERS


@pytest.mark.slow
def test_members_of_another_launch_in_the_same_folder_take_no_part(tmp_path: Path) -> None:
    other = [member(0.9), member(0.95)]
    Study(tmp_path, other).run(Runners(slots=2, fails={other[0].run: 4}), [])
    states = raced(tmp_path, four())
    assert {name for look in looks(tmp_path) for name in look["stopped"]} == LOSERS
    assert recipes(states, "finished") == WINNERS


@pytest.mark.slow
def test_whoever_goes_on_with_a_shared_folder_decides_as_the_launch_did(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here, specs = tmp_path / "a", four()
    raced(tmp_path / "undisturbed", specs)
    # Another launch without a race, of which one failed; then the race, killed as it began, and a line that is lost.
    others = [member(0.9), member(0.95)]
    Study(here, others).run(Runners(slots=2, fails={others[0].run: 4}), [])
    killed(here, Runners(slots=2, killed_after=2))
    ledger = here / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    for number, spec in ((0, specs[7]), (1, specs[0])):  # one that has not begun, one that has
        at = next(at for at, line in enumerate(lines) if f'"planned","run":"{spec.run}"' in line)
        lines[at] = "\0" * 30 + "\n" if number else lines[at][:20] + "\n"
    ledger.write_text("".join(lines))
    study = Study.read(here)
    assert {spec.run for spec in study.specs} == {spec.run for spec in (*specs, *others)}
    assert f"{ledger}: line" in caplog.text and "damaged" in caplog.text
    states = study.run(Runners(slots=2), [], decider=LiveRace(study, LIVE))
    assert looks(here) == looks(tmp_path / "undisturbed")
    assert recipes(states, "stopped") <= LOSERS
    assert recipes(states, "finished") >= WINNERS | {spec.recipe for spec in others}
    assert recipes(states, "failed") == set()
    assert RaceRecord.read(here).members == tuple(spec.run for spec in specs)
    # What was lost was written down again, and another race in the folder is another race.
    ledger.write_text("".join(line for line in ledger.read_text().splitlines(keepends=True) if line[:1] == "{"))
    assert len(Study.read(here).specs) == 10
    raced(here, [member(0.3), member(0.8)])
    assert RaceRecord.read(here).stopped.keys() == {"scalerl+a=0.3"}
    assert RaceRecord.read(here, [specs[0].run]).stopped.keys() == LOSERS


def test_an_evaluation_that_cannot_be_read_ends_no_study(tmp_path: Path) -> None:
    specs, told = four(), Told()
    executor = Runners(slots=8)
    poll = executor.poll

    def spoilt(timeout_s: float) -> Any:
        if executor.polls == 3:
            journal = executor._members[specs[0].run][1]
            journal.record("eval", 5, {METRIC: 0.5})  # without compute
        return poll(timeout_s)

    executor.poll = spoilt  # type: ignore[method-assign]
    states = raced(tmp_path, specs, executor, told=told)
    assert {state.state for state in states.values()} == {"finished"}
    assert sum("race: no look: " in line for line in told.said) == 1


@pytest.mark.slow
def test_a_stopped_run_is_continued_by_a_launch_without_a_race(tmp_path: Path) -> None:
    raced(tmp_path, four())
    study, executor = Study(tmp_path, four()), Runners()
    states = study.run(executor, [])
    assert recipes(states, "finished") == {spec.recipe for spec in four()}
    assert len(executor.started) == 4
    told = Told()
    raced(tmp_path, four(), told=told)
    assert "race: saved 0 of the 8 compute of running all recipes to the budget" in told.said[-1], (
        "what was continued has not been spared"
    )


@pytest.mark.slow
def test_a_race_goes_on_by_the_rules_that_it_was_begun_with(tmp_path: Path) -> None:
    raced(tmp_path, four())
    with pytest.raises(UserError, match=r"race.p_ahead: 0.2, and the race in .* was begun with 0.05"):
        raced(tmp_path, four(), rules=replace(LIVE, p_ahead=0.2))
    with pytest.raises(UserError, match=r"race.budget: 2, and"):
        raced(tmp_path, four(), rules=replace(LIVE, budget=2.0))


@pytest.mark.slow
def test_a_race_that_was_begun_without_a_limit_on_the_loss_goes_on_without(tmp_path: Path) -> None:
    """Studies of versions that had none: what was decided by their rules is decided by these to the end."""
    killed(tmp_path, Runners(slots=8, killed_after=14), LIVE)
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
    begun = RaceRecord.read(tmp_path)
    assert begun.rules is not None and begun.rules.loss == 1.0 and begun.looks
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
def test_what_an_earlier_version_launched_is_raced_on(
    freed: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It may say what spared compute was to go to: ignored, with a warning where that was not nothing."""
    recorded = RaceSettings.recorded({"mode": "live", "budget": 1, "freed": freed})
    assert recorded == RaceSettings(mode="live", budget=1) and caplog.text.count("`scalerl plan`") == warnings
