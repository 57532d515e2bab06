"""Truths about a race that runs: who is stopped, that nothing else but time changes, and what freed compute buys."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
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
from sweeps.executor.base import Launch, Outcome
from sweeps.launch.ledger import MemberState
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.interruption import stop_asked
from sweeps.run.progress import last_metrics
from sweeps.run.spec import RunSpec
from sweeps.search.race import LiveRace
from sweeps.search.race_log import RACE_FILE, RaceRecord
from sweeps.search.settings import RaceSettings
from sweeps.source import load
from tests.examples import every
from tests.sweeps.launch.test_study import Recorder
from tests.sweeps.search.runners import STEPS, Cluster, KilledError, Runners, member, planned, uneven

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
            return study.run(executor, [told or Told()], decider=LiveRace(study, rules, planned))
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
    assert end[6:] == [f"race: spared {spared:.4g} of the 8 that all runs to the budget take ({spared / 8:.0%})"]
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
    assert "race: a race that stops would have spared" in told.said[-1]
    told = Told()
    states = raced(tmp_path / "dry", four(), rules=replace(LIVE, freed="plan"), told=told)
    assert recipes(states, "stopped") == set()
    # All was spent: nothing was spared, and there is nothing to spend a second time.
    freed = RaceRecord.read(tmp_path / "dry").freed
    assert freed is not None and freed["compute"] == 0 and freed["steps"] == []
    assert "race: spared 0 of the 8 that" in told.said[-1]


@pytest.mark.slow
def test_where_all_are_alike_nobody_is_stopped(tmp_path: Path) -> None:
    states = raced(tmp_path, [member(0.6, c_mid=c_mid) for c_mid in (0.24, 0.25, 0.26)])
    assert recipes(states, "stopped") == set()


def test_without_a_budget_it_is_what_the_slowest_spends(tmp_path: Path) -> None:
    told = Told()
    specs = [member(0.7), member(0.4, cost=0.8), member(0.3, cost=1.5)]
    raced(tmp_path, specs, Runners(slots=1), replace(LIVE, budget=None), told)
    assert RaceRecord.read(tmp_path).rules == LIVE.rules(0.8)
    assert "race: to 0.8 virtual device hours a run" in told.said[0]


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
                study.run(executor, [], decider=LiveRace(study, LIVE, planned))
                raise KilledError  # it was done before
        states = raced(here, four(), Runners(slots, uneven(pace + 1)))
        assert looks(here) == looks(undisturbed)
        assert recipes(states, "stopped") == LOSERS
        # A member may be done before slower ones have come to the look that would have stopped it.
        assert recipes(states, "finished") >= WINNERS


def killed(directory: Path, executor: Runners, rules: RaceSettings = LIVE) -> None:
    study = Study(directory, four())
    with pytest.raises(KilledError):
        study.run(executor, [], decider=LiveRace(study, rules, planned, clock=itertools.count(step=60).__next__))


def asked(directory: Path, executor: Runners) -> set[str]:
    """Members that were asked to stop, and have not yet."""
    return {run for run in executor.running() if stop_asked(directory / "runs" / run) is not None}


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
    assert any("paused: it is at compute 0.2, and 7 others" in entry["reason"] for entry in entries)
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
    states = study.run(Runners(slots=2), [], decider=LiveRace(study, LIVE, planned))
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
            journal.record("eval", 5, {"eval/other/pass_rate": 0.5})
        return poll(timeout_s)

    executor.poll = spoilt  # type: ignore[method-assign]
    states = raced(tmp_path, specs, executor, told=told)
    assert {state.state for state in states.values()} == {"finished"}
    assert sum("race: no look: " in line for line in told.said) == 1


def test_one_recipe_that_is_left_gets_all_that_was_freed(tmp_path: Path) -> None:
    specs = [member(a, seed) for a in (0.7, 0.35) for seed in (0, 1)]
    states = raced(tmp_path, specs, Runners(slots=8), replace(LIVE, freed="plan"))
    freed = RaceRecord.read(tmp_path).freed
    assert freed is not None and [step["recipe"] for step in freed["steps"]] == ["scalerl+a=0.7"]
    assert max(RunSpec.read(tmp_path / "runs" / run).steps for run in states) > 1.5 * STEPS


@pytest.mark.slow
def test_a_stopped_run_is_continued_by_a_launch_without_a_race(tmp_path: Path) -> None:
    raced(tmp_path, four())
    study, executor = Study(tmp_path, four()), Runners()
    states = study.run(executor, [])
    assert recipes(states, "finished") == {spec.recipe for spec in four()}
    assert len(executor.started) == 4
    raced(tmp_path, four(), rules=replace(LIVE, freed="plan"))
    freed = RaceRecord.read(tmp_path).freed
    assert freed is not None and freed["compute"] == 0, "what was continued has not been freed"


@pytest.mark.slow
def test_of_a_run_that_a_dry_run_took_further_only_the_rest_is_freed(tmp_path: Path) -> None:
    killed(tmp_path, Runners(slots=8, killed_after=14), replace(LIVE, mode="dry_run"))
    assert RaceRecord.read(tmp_path).stopped.keys() == LOSERS
    states = raced(tmp_path, four(), rules=replace(LIVE, freed="plan"))
    assert recipes(states, "stopped") == LOSERS
    spent = [last_metrics(tmp_path / "runs" / run)["step"] / STEPS for run in states if states[run].state == "stopped"]
    freed = RaceRecord.read(tmp_path).freed
    assert freed is not None and 0 < freed["compute"] == pytest.approx(sum(1 - each for each in spent))


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


# --- freed compute -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_freed_compute_goes_to_what_the_plan_names_and_only_once(tmp_path: Path) -> None:
    rules, executor, told = replace(LIVE, freed="plan"), Runners(slots=8), Told()
    states = raced(tmp_path, four(), executor, rules, told)
    freed = RaceRecord.read(tmp_path).freed
    assert freed is not None and freed["compute"] > 1 and freed["steps"]
    assert {step["recipe"] for step in freed["steps"]} <= WINNERS
    assert executor.steps > 1.05 * sum(1 for each in states.values() if each.state == "finished") * STEPS
    finished = [each for each in states.values() if each.state == "finished"]
    for each in finished:
        spec = RunSpec.read(tmp_path / "runs" / each.run)
        assert int(load([tmp_path / "runs" / each.run]).runs[0].of_kind("train")[-1].step) == spec.steps
    again, told = Runners(slots=8), Told()
    assert {run: each.state for run, each in raced(tmp_path, four(), again, rules, told).items()} == {
        run: each.state for run, each in states.items()
    }
    assert again.steps == 0
    ended = Counter(heard[1] for heard in told.heard if heard[0] == "finished")
    assert set(ended.values()) == {1} and len(ended) == len(finished)
    assert told.ticks == [] or told.ticks[-1][1] == len(finished)


@pytest.mark.slow
def test_a_run_that_died_before_its_first_step_is_made_no_longer(tmp_path: Path) -> None:
    specs = four()
    states = raced(tmp_path, specs, Runners(slots=8, fails={specs[0].run: 1}), replace(LIVE, freed="plan"))
    assert states[specs[0].run].state == "failed" and states[specs[1].run].state == "finished"
    # What was freed goes to those that still run.
    steps = [RunSpec.read(tmp_path / "runs" / spec.run).steps for spec in specs[:2]]
    assert steps[0] == STEPS < steps[1]


def freed_by_hand(directory: Path, members: Sequence[tuple[str, str]]) -> None:
    """The record of a plan that has these runs with other overrides, one after the other."""
    steps = [{"recipe": "", "action": "longer", "members": [[run, changed]]} for run, changed in members]
    with (directory / RACE_FILE).open("a") as file:
        file.write(json.dumps({"kind": "freed", "compute": 1.0, "steps": steps}) + "\n")


@pytest.mark.full
@pytest.mark.parametrize("budgets", [(60, 80), (80, 60)])
def test_a_run_that_the_plan_names_twice_has_one_budget_the_larger(tmp_path: Path, budgets: tuple[int, int]) -> None:
    specs = four()
    raced(tmp_path, specs)
    freed_by_hand(tmp_path, [(specs[0].run, f"budget.steps={to}") for to in budgets])
    raced(tmp_path, specs, rules=replace(LIVE, freed="plan"))
    assert RunSpec.read(tmp_path / "runs" / specs[0].run).steps == 80
    assert last_metrics(tmp_path / "runs" / specs[0].run)["step"] == 80


@pytest.mark.slow
def test_freed_compute_of_a_launch_with_more_members_is_no_matter_of_this_one(tmp_path: Path) -> None:
    specs = four()
    raced(tmp_path, specs)
    freed_by_hand(tmp_path, [(specs[run].run, "budget.steps=60") for run in (0, 4)])
    raced(tmp_path, specs[:4], rules=replace(LIVE, freed="plan"))
    assert RunSpec.read(tmp_path / "runs" / specs[0].run).steps == 60
    assert RunSpec.read(tmp_path / "runs" / specs[4].run).steps == STEPS


@pytest.mark.full
@settings(max_examples=5, phases=NO_SHRINK, derandomize=True)
@given(kills=st.lists(st.integers(5, 60), min_size=1, max_size=4), slots=st.integers(2, 9))
def test_freed_compute_is_spent_once_whoever_is_killed(kills: list[int], slots: int) -> None:
    rules = replace(LIVE, freed="plan")
    with tempfile.TemporaryDirectory() as scratch:
        undisturbed, here = Path(scratch) / "a", Path(scratch) / "b"
        whole = raced(undisturbed, four(), Runners(slots=8), rules)
        for after in kills:
            study = Study(here, four())
            with pytest.raises(KilledError):
                study.run(Runners(slots, killed_after=after), [], decider=LiveRace(study, rules, planned))
                raise KilledError
        states = raced(here, four(), Runners(slots), rules)
        assert {run: each.state for run, each in states.items()} == {run: each.state for run, each in whole.items()}
        steps = {run: RunSpec.read(here / "runs" / run).steps for run in states}
        assert steps == {run: RunSpec.read(undisturbed / "runs" / run).steps for run in whole}


@pytest.mark.full
@pytest.mark.parametrize("after", every(5, (24, 20, 22, 27, 33), pytest.mark.full))
def test_a_run_that_was_made_longer_is_adopted_and_not_submitted_again(tmp_path: Path, after: int) -> None:
    rules, first = replace(LIVE, freed="plan"), Cluster(slots=8, killed_after=after)
    killed(tmp_path / "a", first, rules)
    assert RaceRecord.read(tmp_path / "a").freed is not None and first.running()
    states = raced(tmp_path / "a", four(), Cluster(slots=8, before=first), rules)
    whole = raced(tmp_path / "undisturbed", four(), Cluster(slots=8), rules)
    assert {run: each.state for run, each in states.items()} == {run: each.state for run, each in whole.items()}
    for run, each in states.items():
        spec = RunSpec.read(tmp_path / "a" / "runs" / run)
        assert spec.steps == RunSpec.read(tmp_path / "undisturbed" / "runs" / run).steps
        assert each.state == "stopped" or last_metrics(tmp_path / "a" / "runs" / run)["step"] == spec.steps


@pytest.mark.full
def test_a_launch_of_some_of_the_members_does_not_settle_what_was_freed(tmp_path: Path) -> None:
    specs, rules = four(), replace(LIVE, freed="plan")
    raced(tmp_path, specs)
    raced(tmp_path, specs[:2], rules=rules)
    assert RaceRecord.read(tmp_path).freed is None
    executor = Runners(slots=8)
    raced(tmp_path, specs, executor, rules)
    freed = RaceRecord.read(tmp_path).freed
    assert freed is not None and freed["compute"] > 1 and executor.steps > 0


@pytest.mark.slow
def test_a_plan_of_which_one_step_is_refused_is_followed_for_the_rest(tmp_path: Path) -> None:
    def careful(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        if any("budget.steps=70" in each for each in lists):
            raise UserError("budget.steps: 70 is no multiple of what the schedule takes")
        return planned(lists)

    specs, rules, told = four(), replace(LIVE, freed="plan"), Told()
    raced(tmp_path, specs)
    freed_by_hand(tmp_path, [(specs[0].run, "budget.steps=70"), (specs[4].run, "budget.steps=60")])
    study = Study(tmp_path, specs)
    study.run(Runners(), [told], decider=LiveRace(study, rules, careful))
    assert [last_metrics(tmp_path / "runs" / specs[run].run)["step"] for run in (0, 4)] == [STEPS, 60]
    assert any("is not spent on" in line and "70 is no multiple" in line for line in told.said)


class Waiting(Cluster):
    """Its jobs are in the queue, and write nothing yet; the controller is killed at its next poll."""

    def __init__(self, before: Sequence[str] = ()) -> None:
        super().__init__()
        self.jobs = list(before)

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        self.jobs += [launch.run for launch in members]
        return {launch.run: f"job-{launch.run}" for launch in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        return {launch.run: f"job-{launch.run}" for launch in members if launch.run in self.jobs}

    def running(self) -> list[str]:
        return self.jobs

    def queued(self) -> frozenset[str]:
        return frozenset(self.jobs)

    def poll(self, timeout_s: float) -> list[Outcome]:
        raise KilledError


@pytest.mark.full
@pytest.mark.parametrize("action", ["longer", "seed"])
def test_what_freed_compute_pays_for_is_found_in_the_queue_by_the_next_controller(tmp_path: Path, action: str) -> None:
    specs, rules = four(), replace(LIVE, freed="plan")
    raced(tmp_path, specs)
    seed = LiveRace(Study(tmp_path, specs), rules, planned)._freed._seed(specs[0].run)
    freed_by_hand(tmp_path, [(specs[0].run, "budget.steps=60") if action == "longer" else seed])
    jobs: list[str] = []
    for _ in range(3):
        executor, study = Waiting(jobs), Study(tmp_path, specs)
        with pytest.raises(KilledError):
            study.run(executor, [], decider=LiveRace(study, rules, planned))
        assert len(executor.jobs) == 1, "one job, whoever follows it"
        jobs = executor.jobs
    with pytest.raises(UserError, match="1 members have jobs on a cluster"):
        study = Study(tmp_path, specs)
        study.run(Runners(), [], decider=LiveRace(study, rules, planned))


@pytest.mark.slow
def test_a_refused_launch_leaves_a_run_that_was_made_longer_its_budget(tmp_path: Path) -> None:
    class Refuses(Runners):
        def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
            raise UserError("the cluster is away")

    specs, rules = four(), replace(LIVE, freed="plan")
    raced(tmp_path, specs)
    freed_by_hand(tmp_path, [(specs[0].run, "budget.steps=60")])
    for executor, ends in ((Runners(killed_after=3), KilledError), (Refuses(), UserError)):
        study = Study(tmp_path, specs)
        with pytest.raises(ends):
            study.run(executor, [], decider=LiveRace(study, rules, planned))
        assert RunSpec.read(tmp_path / "runs" / specs[0].run).steps == 60


@pytest.mark.full
def test_what_failed_is_not_made_longer_and_goes_on_to_its_own_end(tmp_path: Path) -> None:
    specs, rules, told = four(), replace(LIVE, freed="plan"), Told()
    executor = Runners(slots=8, fails={specs[0].run: 20})
    states = raced(tmp_path, specs, executor, rules, told)
    assert states[specs[0].run].state == "failed" and executor.started.count(specs[0].run) == 1
    assert told.ticks[-1][2] == 1 and told.closed == [1]
    again = Told()
    assert raced(tmp_path, specs, rules=rules, told=again)[specs[0].run].state == "finished"
    assert last_metrics(tmp_path / "runs" / specs[0].run)["step"] == STEPS
    assert again.ticks[-1][2] == 0 and again.closed == [0]


@pytest.mark.full
def test_what_was_freed_is_kept_until_recipes_that_failed_have_raced(tmp_path: Path) -> None:
    specs, rules, told = four(), replace(LIVE, freed="plan"), Told()
    dead = {spec.run: 1 for spec in specs if spec.recipe != "scalerl+a=0.7"}
    raced(tmp_path, specs, Runners(slots=8, fails=dead), rules, told)
    assert RaceRecord.read(tmp_path).freed is None
    assert [line for line in told.said if "is kept for scalerl+a=0.35, scalerl+a=0.45, scalerl+a=0.7,c_mid" in line]
    states = raced(tmp_path, specs, rules=rules)
    freed = RaceRecord.read(tmp_path).freed
    assert recipes(states, "stopped") == LOSERS and freed is not None and freed["compute"] > 1 and freed["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [None, 1, 8])
def test_an_added_seed_has_the_budget_of_the_launch_whoever_takes_the_study_up(
    tmp_path: Path, killed_after: int | None
) -> None:
    specs, rules = four(), replace(LIVE, freed="plan")
    raced(tmp_path, specs)
    race = LiveRace(Study(tmp_path, specs), rules, planned)
    members = [race._freed._seed(specs[0].run), (specs[0].run, "budget.steps=80")]
    step = {"recipe": specs[0].recipe, "action": "both", "members": members}
    with (tmp_path / RACE_FILE).open("a") as file:
        file.write(json.dumps({"kind": "freed", "compute": 1.0, "steps": [step]}) + "\n")
    for executor in ([Runners(killed_after=killed_after)] if killed_after else []) + [Runners()]:
        study = Study.read(tmp_path)
        try:
            study.run(executor, [], decider=LiveRace(study, rules, planned))
        except KilledError:
            continue
    budgets = {spec.seed: spec.steps for spec in Study.read(tmp_path).specs if spec.recipe == specs[0].recipe}
    assert budgets == {0: 80, 1: STEPS, 2: STEPS}


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
        ({"freed": "all"}, "race.freed: 'all' is none of nothing, plan"),
        ({"speed": 1}, "race.speed: no such setting; valid: mode, budget"),
        ("live", "race: 'live' must be settings"),
    ],
)
def test_bad_settings_are_named(given: Any, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        RaceSettings.of(given)
