"""Tests of searches with Optuna: proposals, values of trials, and that no trial is lost or run twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from sweeps.errors import UserError
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.planning import PlannerLostError
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec
from sweeps.search import trials as trials_module
from sweeps.search.optuna_search import Search
from sweeps.search.settings import Axis, SearchSettings
from sweeps.search.trials import TRIALS_FILE, Trials
from tests.examples import every
from tests.sweeps.search.runners import STEPS, KilledError, Runners, planned, uneven
from tests.sweeps.search.test_live_race import RecordingObserver

SPACE = (Axis("a", tuple(f"{a:.2f}" for a in np.arange(0.3, 0.7, 0.05))), Axis("c_mid", low=0.1, high=0.6, log=True))


class Crash:
    """Raise KilledError at the n-th call, in place of a kill of the controller; None for never."""

    def __init__(self, after: int | None) -> None:
        self.left = after

    def __call__(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KilledError


def search(
    directory: Path,
    settings: SearchSettings,
    executor: Runners | None = None,
    crash: Crash | None = None,
    space: Sequence[Axis] = SPACE,
    observer: RecordingObserver | None = None,
    base: Sequence[str] = (),
    sampler: Callable[[int], optuna.samplers.BaseSampler] | None = None,
    planner: Callable[[Sequence[Sequence[str]]], list[RunSpec]] | None = None,
    open_axes: Sequence[Axis] = (),
) -> dict[str, MemberState]:
    study = Study.read(directory) if Ledger(directory).fold() else Study(directory, [])

    def plan_or_crash(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        if crash is not None:
            crash()
        specs = planned([["a=0.3", *overrides] for overrides in lists])
        if crash is not None:
            crash()
        return specs

    def tpe(seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=6, constant_liar=True)

    decider = Search(study, space, settings, base, planner or plan_or_crash, sampler or tpe, open_axes=open_axes)
    return study.run(executor or Runners(), [observer or RecordingObserver()], decider=decider)


def trials(directory: Path) -> list[FrozenTrial]:
    storage = JournalStorage(JournalFileBackend(str(directory / TRIALS_FILE)))
    return optuna.load_study(study_name="search", storage=storage).get_trials()


@pytest.mark.slow
def test_a_search_finds_the_best_and_uses_the_lower_bound_as_value(tmp_path: Path) -> None:
    observer = RecordingObserver()
    states = search(tmp_path, SearchSettings(30, 3, budget=1.0), Runners(slots=3), observer=observer)
    all_trials = trials(tmp_path)
    assert [one_trial.number for one_trial in all_trials] == list(range(30))
    assert all(one_trial.state is TrialState.COMPLETE for one_trial in all_trials)
    assert {member_state.state for member_state in states.values()} == {"finished"}
    best = max(all_trials, key=lambda one_trial: one_trial.value or 0.0)
    assert float(best.params["a"]) >= 0.6
    # The value of a trial is a lower bound, slightly below its last reward.
    for one_trial in all_trials:
        last = one_trial.intermediate_values[STEPS]
        assert one_trial.value is not None and last - 0.15 < one_trial.value < last + 0.01
    assert f"the best is trial {best.number}" in observer.messages[-1]


def test_a_search_over_a_value_that_the_configuration_leaves_open(tmp_path: Path) -> None:
    """Without a value of `a` nothing can be planned, not even the member that trials are compared with."""

    def plan(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        if not all(any(word.startswith("a=") for word in words) for words in lists):
            raise UserError("a: needs a value")
        return planned(lists)

    settings = SearchSettings(3, 1, budget=1.0)
    for _ in range(2):  # the second launch finds the search as the first began it
        states = search(tmp_path, settings, planner=plan, open_axes=SPACE[:1])
        assert {member_state.state for member_state in states.values()} == {"finished"}
        assert [one_trial.state for one_trial in trials(tmp_path)] == [TrialState.COMPLETE] * 3


def test_a_search_resumed_with_fewer_trials_counts_all_that_there_are(tmp_path: Path) -> None:
    search(tmp_path, SearchSettings(3, 3, budget=1.0))
    fewer = SearchSettings(2, 3, budget=1.0)

    def plan(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        return planned([["a=0.3", *overrides] for overrides in lists])

    resumed = Trials(tmp_path, SPACE, fewer, [], plan, lambda seed: optuna.samplers.TPESampler(seed=seed))
    assert resumed.sentence().startswith("3 of 3 trials finished; the best is trial ")


@pytest.mark.slow
def test_slots_are_filled_as_soon_as_they_are_free(tmp_path: Path) -> None:
    """Trials do not run in batches that wait for their slowest member."""
    executor = Runners(slots=4, pace=uneven(3))
    at_once = []
    poll = executor.poll

    def watch(timeout_s: float) -> Any:
        if len(executor.started) < 16:
            at_once.append(len(executor.running()))
        return poll(timeout_s)

    executor.poll = watch  # type: ignore[method-assign]
    search(tmp_path, SearchSettings(16, 4, budget=1.0), executor)
    assert set(at_once) == {4}


@pytest.mark.slow
@pytest.mark.parametrize("seed", every(4, range(4), pytest.mark.full))
def test_sixty_trials_survive_many_kills_without_loss_or_repetition(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    settings = SearchSettings(60, 4, budget=1.0)
    steps = 0
    for _ in range(12):
        executor = Runners(4, uneven(source.randrange(99)), killed_after=source.choice((None, 3, 9, 20)))
        crash = Crash(source.choice((None, 1, 2, 3, 7)))
        if executor.killed_after is None and crash.left is None:
            crash = Crash(5)
        with pytest.raises(KilledError):
            search(tmp_path, settings, executor, crash)
            raise KilledError  # the search ended before the kill
        steps += executor.steps
    executor = Runners(4)
    states = search(tmp_path, settings, executor)
    all_trials = trials(tmp_path)
    assert len(all_trials) == 60 and {one_trial.state for one_trial in all_trials} == {TrialState.COMPLETE}
    runs = [one_trial.user_attrs["run"] for one_trial in all_trials]
    assert set(runs) == set(states), "trials and members do not match"
    entries = Counter(entry["run"] for entry in Ledger(tmp_path).entries() if entry["event"] == "finished")
    assert entries == Counter(set(runs)), "a member finished more than once"
    # Simulated members lose no steps in a kill, so every step was taken once.
    assert steps + executor.steps == STEPS * len(set(runs))
    again = Runners(4)
    search(tmp_path, settings, again)
    assert again.started == [] and len(trials(tmp_path)) == 60


def test_an_interrupted_search_counts_unfinished_members(tmp_path: Path) -> None:
    observer = RecordingObserver()
    with pytest.raises(KilledError):
        search(tmp_path, SearchSettings(20, 2, budget=1.0), Runners(killed_after=90), observer=observer)
    states = Ledger(tmp_path).fold().values()
    open_now = sum(member_state.state != "finished" for member_state in states)
    assert len(states) > 4 > open_now > 0
    assert observer.closed == [open_now]


def test_a_stale_lock_of_a_killed_process_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, lock = tmp_path / TRIALS_FILE, tmp_path / f"{TRIALS_FILE}.lock"
    monkeypatch.setattr(trials_module, "_LOCK_GRACE_S", 0.05)
    lock.symlink_to(journal)  # the form of Optuna's lock
    trials_module._break_stale_lock(journal)
    assert not lock.is_symlink()
    # A lock that was released and taken again in the meantime is not broken.
    lock.symlink_to(journal)
    taken = iter([lock.unlink, lambda: lock.symlink_to(tmp_path)])
    monkeypatch.setattr(trials_module.time, "sleep", lambda seconds: (next(taken)(), next(taken)()))
    trials_module._break_stale_lock(journal)
    assert lock.readlink() == tmp_path


@pytest.mark.slow
def test_a_larger_n_trials_continues_the_search(tmp_path: Path) -> None:
    search(tmp_path, SearchSettings(5, 2, budget=1.0))
    before = [one_trial.params for one_trial in trials(tmp_path)]
    search(tmp_path, SearchSettings(9, 2, budget=1.0))
    after = [one_trial.params for one_trial in trials(tmp_path)]
    assert after[:5] == before and len(after) == 9
    assert len({str(parameters) for parameters in after}) == 9, "a new process must not repeat the proposals"
    with pytest.raises(UserError, match=r"hydra.sweeper.budget: 2.0, and the search in .* was begun with 1.0"):
        search(tmp_path, SearchSettings(9, 2, budget=2.0))


TWO = Axis("a", ("0.4", "0.6"))
FOUR_TRIALS = SearchSettings(4, 2)


@pytest.mark.parametrize(
    ("space", "base", "settings", "said"),
    every(
        5,
        [
            (
                [Axis("a", ("0.4", "0.5"))],
                [],
                FOUR_TRIALS,
                r"the space of a: a=0.4,0.5, and .* was begun with a=0.4,0.6",
            ),
            ([TWO, SPACE[1]], [], FOUR_TRIALS, r"c_mid: c_mid=tag\(log,interval\(0.1,0.6\)\), and .* begun with none"),
            ([TWO], ["budget.steps=80"], FOUR_TRIALS, r"budget.steps: 80, .* with 40; go on with that"),
            ([TWO], ["c_mid=0.3"], FOUR_TRIALS, r"what all trials share: c_mid=0.3, and .* begun with none"),
            ([TWO], [], SearchSettings(4, 2, "asymptote"), r"objective: asymptote, .* with reward"),
        ],
    ),
)
def test_a_search_with_other_settings_is_refused(
    tmp_path: Path, space: list[Axis], base: list[str], settings: SearchSettings, said: str
) -> None:
    search(tmp_path, SearchSettings(3, 2), space=[TWO])
    with pytest.raises(UserError, match=said):
        search(tmp_path, settings, space=space, base=base)
    assert [one_trial.state for one_trial in trials(tmp_path)] == [TrialState.COMPLETE] * 3
    search(tmp_path, FOUR_TRIALS, space=[TWO])
    assert len(trials(tmp_path)) == 4


SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "grid": lambda seed: optuna.samplers.GridSampler({"a": ["0.4", "0.5", "0.6"]}, seed=seed),
    "brute force": lambda seed: optuna.samplers.BruteForceSampler(seed=seed),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_exhausted_sampler_ends_the_search_for_good(tmp_path: Path, sampler: str) -> None:
    observer, space = RecordingObserver(), [Axis("a", ("0.4", "0.5", "0.6"))]
    states = search(tmp_path, SearchSettings(12, 2), space=space, sampler=SAMPLERS[sampler], observer=observer)
    assert len(states) == 3 and {member_state.state for member_state in states.values()} == {"finished"}
    all_trials = trials(tmp_path)
    # While the last trials run, their values may be proposed again.
    assert len(all_trials) <= 5 and {one_trial.params["a"] for one_trial in all_trials} == set(space[0].choices)
    assert any("the sampler has no more proposals" in line for line in observer.messages)
    search(tmp_path, SearchSettings(20, 2), space=space, sampler=SAMPLERS[sampler])
    assert len(trials(tmp_path)) == len(all_trials)


@pytest.mark.parametrize("kills", every(3, map(pytest.param, [(), (3, 5)])), ids=["launched thrice", "killed"])
def test_a_grid_is_completed_over_several_launches(tmp_path: Path, kills: tuple[int, ...]) -> None:
    values = [f"{0.3 + 0.02 * number:.2f}" for number in range(12)]
    space = [Axis("a", tuple(values))]
    grid = lambda seed: optuna.samplers.GridSampler({"a": values}, seed=seed)  # noqa: E731
    for after in kills:
        with pytest.raises(KilledError):
            search(tmp_path, SearchSettings(20, 3), Runners(killed_after=after), space=space, sampler=grid)
    for n_trials in (20,) if kills else (4, 8, 20):
        search(tmp_path, SearchSettings(n_trials, 3), space=space, sampler=grid)
    assert {one_trial.params["a"] for one_trial in trials(tmp_path)} == set(values)


@pytest.mark.slow
def test_another_sampler_continues_after_an_exhausted_one(tmp_path: Path) -> None:
    space = [Axis("a", ("0.4", "0.5", "0.6"))]
    search(tmp_path, SearchSettings(12, 2), space=space, sampler=SAMPLERS["grid"])
    search(tmp_path, SearchSettings(12, 2), space=space)
    assert len(trials(tmp_path)) == 12


@pytest.mark.slow
def test_a_larger_grid_continues_a_smaller_one(tmp_path: Path) -> None:
    space = [Axis("a", ("0.4", "0.5", "0.6", "0.7"))]
    search(tmp_path, SearchSettings(9, 2), space=space, sampler=SAMPLERS["grid"])
    whole = lambda seed: optuna.samplers.GridSampler({"a": list(space[0].choices)}, seed=seed)  # noqa: E731
    assert "0.7" in {
        state.recipe[-3:] for state in search(tmp_path, SearchSettings(9, 2), space=space, sampler=whole).values()
    }


class Picky(optuna.samplers.RandomSampler):
    """A sampler that needs a missing package after some trials."""

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        if len(study.trials) > 8:
            raise ModuleNotFoundError("No module named 'picky'")
        return super().sample_independent(study, trial, name, distribution)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (SAMPLERS["brute force"], "FloatDistribution.step must be given"),
        (lambda seed: optuna.samplers.GridSampler({"a": [0.3, 0.4], "c_mid": [0.2]}, seed=seed), "'0.[34]0?' not in"),
        (lambda seed: optuna.samplers.GridSampler({"a": ["0.30", "0.40"]}, seed=seed), "c_mid, is not found in"),
        (lambda seed: {"seed": seed}, "is none of Optuna's; give its _target_"),
        (lambda seed: Picky(seed), "No module named 'picky'; give one that fits"),
    ],
)
def test_a_sampler_that_does_not_fit_the_space_is_refused_first(tmp_path: Path, sampler: Any, said: str) -> None:
    executor = Runners()
    with pytest.raises(UserError, match=rf"hydra.sweeper.sampler: .*{said}"):
        search(tmp_path / "study", SearchSettings(20, 2, budget=1.0), executor, sampler=sampler)
    assert executor.steps == 0 and not (tmp_path / "study").exists()


@pytest.mark.slow
def test_a_smaller_n_jobs_limits_members_already_proposed(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        search(tmp_path, SearchSettings(8, 4, budget=1.0), Runners(4, killed_after=2))
    executor, at_once = Runners(4), []
    poll = executor.poll

    def watch(timeout_s: float) -> Any:
        at_once.append(len(executor.running()))
        return poll(timeout_s)

    executor.poll = watch  # type: ignore[method-assign]
    search(tmp_path, SearchSettings(8, 1, budget=1), executor)
    assert set(at_once) == {1} and len(trials(tmp_path)) == 8


@pytest.mark.parametrize("prune", every(4, ["none", "race"]))
@pytest.mark.parametrize("record", [{"eval/loss": 1.0}, {"eval/other/pass_rate": 0.5}], ids=["no rate", "another set"])
def test_an_unreadable_evaluation_does_not_end_a_search(tmp_path: Path, record: dict[str, float], prune: str) -> None:
    executor, observer = Runners(2), RecordingObserver()
    poll = executor.poll

    def spoilt(timeout_s: float) -> Any:
        if executor.polls == 3:
            executor._members[executor.started[0]][1].record("eval", 5, record)
        return poll(timeout_s)

    executor.poll = spoilt  # type: ignore[method-assign]
    search(tmp_path, SearchSettings(6, 2, budget=1.0, prune=prune), executor, observer=observer)
    all_trials = trials(tmp_path)
    assert len(all_trials) == 6 and {one_trial.state for one_trial in all_trials[1:]} <= {
        TrialState.COMPLETE,
        TrialState.PRUNED,
    }
    search(tmp_path, SearchSettings(7, 2, budget=1.0, prune=prune))
    assert len(trials(tmp_path)) == 7


def test_a_refused_launch_does_not_change_the_journal(tmp_path: Path) -> None:
    def refuses(submission: str, members: Sequence[Any]) -> Any:
        raise UserError("cluster: no such partition")

    tmp_path.joinpath("mine.txt").touch()
    executor = Runners(2)
    executor.submit = refuses  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no such partition"):
        search(tmp_path, SearchSettings(6, 2), executor)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["mine.txt"]
    search(tmp_path, SearchSettings(2, 2))
    before = (tmp_path / TRIALS_FILE).read_bytes()
    with pytest.raises(UserError, match="no such partition"):
        search(tmp_path, SearchSettings(6, 2), executor)
    assert (tmp_path / TRIALS_FILE).read_bytes() == before


def test_a_torn_last_line_is_removed(tmp_path: Path) -> None:
    search(tmp_path, SearchSettings(3, 2), space=[TWO])
    path = tmp_path / TRIALS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    search(tmp_path, SearchSettings(4, 2), space=[TWO])
    assert [one_trial.state for one_trial in trials(tmp_path)] == [TrialState.COMPLETE] * 4


@pytest.mark.slow
def test_a_failed_trial_is_counted_by_the_next_launch_too(tmp_path: Path) -> None:
    space, observer = [Axis("a", ("0.3", "0.4", "0.5", "0.6", "0.7"))], RecordingObserver()
    bad = planned([["a=0.5"]])[0].run
    search(tmp_path, SearchSettings(15, 2, budget=1.0), Runners(fails={bad: 4}), space=space)
    search(tmp_path, SearchSettings(30, 2, budget=1), space=[*space], observer=observer)
    assert observer.closed == [1] and [heard for heard in observer.heard if heard[0] == "failed"]


@pytest.mark.slow
def test_equal_proposals_share_one_run(tmp_path: Path) -> None:
    executor = Runners()
    states = search(tmp_path, SearchSettings(12, 2, budget=1.0), executor, space=[Axis("a", ("0.4", "0.6"))])
    assert len(states) == len(executor.started) == 2
    all_trials = trials(tmp_path)
    assert len(all_trials) == 12 and {one_trial.state for one_trial in all_trials} == {TrialState.COMPLETE}
    assert len({(one_trial.params["a"], one_trial.value) for one_trial in all_trials}) == 2


@pytest.mark.slow
def test_a_trial_whose_run_fails_is_not_repeated(tmp_path: Path) -> None:
    space = [Axis("a", ("0.3", "0.4", "0.5", "0.6", "0.7"))]
    bad = planned([["a=0.5"]])[0].run
    states = search(tmp_path, SearchSettings(15, 2, budget=1.0), Runners(fails={bad: 4}), space=space)
    assert states[bad].state == "failed"
    ended = {one_trial.params["a"]: one_trial.state for one_trial in trials(tmp_path)}
    assert ended["0.5"] is TrialState.FAIL and ended["0.7"] is TrialState.COMPLETE
    again = Runners()
    search(tmp_path, SearchSettings(15, 2, budget=1.0), again, space=space)
    assert again.started == []


@pytest.mark.slow
def test_a_refused_trial_fails_and_the_search_continues(tmp_path: Path) -> None:
    def refuse_0_4(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        if any("a=0.4" in overrides for overrides in lists):
            raise UserError("a: 0.4 is not allowed")
        return planned([["a=0.3", *overrides] for overrides in lists])

    observer, space = RecordingObserver(), [Axis("a", ("0.4", "0.5", "0.6"))]
    settings = SearchSettings(12, 2, budget=1.0)
    search(tmp_path, settings, space=space, observer=observer, sampler=random_sampler, planner=refuse_0_4)
    for one_trial in trials(tmp_path):
        assert (one_trial.state is TrialState.FAIL) == (one_trial.params["a"] == "0.4")
    assert any("refused (a=0.4): a: 0.4 is not allowed" in line for line in observer.messages)


TEN = (Axis("a", tuple(f"{0.3 + 0.04 * number:.2f}" for number in range(10))),)


def random_sampler(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


def failing_planner(value: str, error: Exception, times: int = 10**6) -> Any:
    """Return a planner that raises for one value, the first `times` times."""
    left = [times]

    def plan_or_fail(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        if any(value in overrides for overrides in lists) and left[0] > 0:
            left[0] -= 1
            raise error
        return planned([["a=0.3", *overrides] for overrides in lists])

    return plan_or_fail


@pytest.mark.slow
def test_a_value_that_cannot_be_composed_fails_only_its_trials(tmp_path: Path) -> None:
    planner = failing_planner("a=0.46", RuntimeError("Could not find\n'loss/nope'"))
    states = search(tmp_path, SearchSettings(20, 2, budget=1.0), planner=planner, space=TEN, sampler=random_sampler)
    refused = [one_trial for one_trial in trials(tmp_path) if one_trial.params["a"] == "0.46"]
    assert refused and {one_trial.state for one_trial in refused} == {TrialState.FAIL}
    assert {one_trial.user_attrs["refused"] for one_trial in refused} == {"Could not find 'loss/nope'"}
    assert {member_state.state for member_state in states.values()} == {"finished"} and len(trials(tmp_path)) == 20


@pytest.mark.slow
def test_a_lost_planner_fails_no_trial(tmp_path: Path) -> None:
    planner = failing_planner("a=0.46", PlannerLostError("planner: its process ended without an answer"), times=1)
    with pytest.raises(PlannerLostError):
        search(tmp_path, SearchSettings(20, 2, budget=1.0), planner=planner, space=TEN, sampler=random_sampler)
    search(tmp_path, SearchSettings(20, 2, budget=1.0), planner=planner, space=TEN, sampler=random_sampler)
    all_trials = trials(tmp_path)
    assert len(all_trials) == 20 and {one_trial.state for one_trial in all_trials} == {TrialState.COMPLETE}
    assert "0.46" in {one_trial.params["a"] for one_trial in all_trials}


def test_after_all_trials_were_refused_the_space_may_be_corrected(tmp_path: Path) -> None:
    def refuse_all(lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        if any(overrides for overrides in lists):
            raise UserError("losss: no such key")
        return planned([["a=0.3"]])

    search(
        tmp_path,
        SearchSettings(4, 2),
        planner=refuse_all,
        space=[Axis("losss", ("dapo", "gspo"))],
        sampler=random_sampler,
    )
    assert {one_trial.state for one_trial in trials(tmp_path)} == {TrialState.FAIL}
    states = search(tmp_path, SearchSettings(4, 2), space=TEN, sampler=random_sampler)
    assert len(trials(tmp_path)) == 4 and {member_state.state for member_state in states.values()} == {"finished"}


@pytest.mark.full
def test_trials_that_will_not_be_best_are_pruned_for_good(tmp_path: Path) -> None:
    executor = Runners(slots=3)
    settings = SearchSettings(12, 3, budget=1.0, prune="race")
    states = search(tmp_path, settings, executor)
    by_run = {one_trial.user_attrs["run"]: one_trial for one_trial in trials(tmp_path)}
    pruned = {run for run, one_trial in by_run.items() if one_trial.state is TrialState.PRUNED}
    assert pruned == {run for run, member_state in states.items() if member_state.state == "stopped"}
    assert len(pruned) > 3 and executor.steps < 0.75 * STEPS * len(states)
    reward = {
        run: 0.2 + (float(one_trial.params["a"]) - 0.2) / (1 + one_trial.params["c_mid"] ** 1.8)
        for run, one_trial in by_run.items()
    }
    best = max(reward[run] for run in by_run.keys() - pruned)
    assert max(reward[run] for run in pruned) < best + 0.02, "a trial that would have been the best was pruned"
    assert "of ending ahead of" in str(states[next(iter(pruned))].reason)
    again = Runners()
    assert {run: member_state.state for run, member_state in search(tmp_path, settings, again).items()} == {
        run: member_state.state for run, member_state in states.items()
    }
    assert again.started == []


def test_runs_too_short_for_a_fit_are_valued_by_their_rewards(tmp_path: Path) -> None:
    space = (Axis("a", ("0.2", "0.9")), Axis("budget.steps", ("4",)))
    search(tmp_path, SearchSettings(8, 2), space=space)
    by_a = {one_trial.params["a"]: one_trial for one_trial in trials(tmp_path)}
    assert set(by_a) == {"0.2", "0.9"}
    for one_trial in by_a.values():
        assert one_trial.value is not None
        assert one_trial.intermediate_values[4] - 0.2 < one_trial.value < one_trial.intermediate_values[4]
    assert (by_a["0.9"].value or 0.0) > (by_a["0.2"].value or 0.0) + 0.05


def test_the_objective_asymptote_uses_the_fitted_asymptote(tmp_path: Path) -> None:
    search(
        tmp_path, SearchSettings(8, 2, "asymptote"), space=[Axis("a", ("0.4", "0.6")), Axis("c_mid", ("0.1", "0.6"))]
    )
    by_values = {(one_trial.params["a"], one_trial.params["c_mid"]): one_trial for one_trial in trials(tmp_path)}
    early = by_values.get(("0.6", "0.1"))
    assert early is not None and early.value is not None and 0.5 < early.value < 0.6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_trials": 0}, "hydra.sweeper.n_trials: 0 must be a whole number, 1 or more"),
        ({"objective": "A"}, "hydra.sweeper.objective: 'A' is none of reward, asymptote"),
        ({"prune": "race"}, "hydra.sweeper.prune: race needs hydra.sweeper.budget"),
        ({"budget": -1.0}, "hydra.sweeper.budget -1: give a positive compute"),
        ({"budget": 1.0, "p_ahead": 0.9}, "hydra.sweeper.p_ahead 0.9: give a chance"),
        ({"p_ahead": 0.9}, "hydra.sweeper.p_ahead 0.9: give a chance"),
        ({"p_ahead": "x"}, "hydra.sweeper.p_ahead: 'x' is no number"),
        ({"first": None}, "hydra.sweeper.first: None is no number"),
        ({"budget": "abc"}, "hydra.sweeper.budget: 'abc' is no number"),
        ({"budget": [1]}, r"hydra.sweeper.budget: \[1\] is no number"),
        ({"n_trails": 3}, "hydra.sweeper.n_trails: no such setting; valid: n_trials, n_jobs"),
    ],
)
def test_bad_settings_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        SearchSettings.of(given)


def test_an_empty_or_infinite_range_is_refused() -> None:
    with pytest.raises(UserError, match=r"lr: interval\(2,1\) holds nothing"):
        Axis("lr", low=2, high=1)
    with pytest.raises(UserError, match=r"lr: interval\(0,inf\) has no end"):
        Axis("lr", low=0, high=float("inf"))
    with pytest.raises(UserError, match=r"lr: .* a logarithm needs ends above 0"):
        Axis("lr", low=0, high=1, log=True)


def test_a_stale_lock_is_broken_before_optuna_opens_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna itself would wait 30 s for the lock."""
    search(tmp_path, SearchSettings(2, 2, budget=1.0))
    lock, open_study = tmp_path / f"{TRIALS_FILE}.lock", trials_module._open_study
    lock.symlink_to(tmp_path / TRIALS_FILE)

    def unlocked(path: Path) -> optuna.Study:
        assert not lock.is_symlink()
        return open_study(path)

    monkeypatch.setattr(trials_module, "_LOCK_GRACE_S", 0.05)
    monkeypatch.setattr(trials_module, "_open_study", unlocked)
    search(tmp_path, SearchSettings(3, 2, budget=1.0))
    assert len(trials(tmp_path)) == 3
