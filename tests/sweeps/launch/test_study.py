"""Tests of a study: the members that it starts, adopts or leaves alone, and its progress. All outcomes are scripted."""

from __future__ import annotations

import io
import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sweeps.errors import UserError
from sweeps.executor.base import Launch, Outcome
from sweeps.executor.failure import NO_RETRIES
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.members import LEASE_NAME
from sweeps.launch.observer import JOURNALS_PER_UPDATE, SHOWN, Observer, Progress
from sweeps.launch.price import estimate_launch
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import JOURNAL_FILE, LOG_FILE, Journal, read_journal
from sweeps.run.lease import LeaseLostError
from sweeps.run.progress import final_reason, is_done, last_metrics, why_failed
from sweeps.run.spec import RunSpec, make_spec
from sweeps.source import load
from sweeps.terminal import NonBlockingWriter

# A member's behaviour: it writes to its directory and returns its exit code.
Behaviour = Callable[[Path], int]


def member(choice: str, seed: int = 0, steps: int = 4) -> RunSpec:
    config = {"loss": {"choice": choice}, "seed": seed, "budget": {"steps": steps}}
    reference = {**config, "loss": {"choice": "cispo"}}
    return make_spec(config, reference, "scalerl" if choice == "cispo" else f"scalerl+loss={choice}", "scalerl")


def open_journal(run_dir: Path) -> Journal:
    """Open a new journal, or resume an old one after its last step."""
    old = last_metrics(run_dir)
    journal = Journal(run_dir)
    if old:
        journal.resume(int(old["step"]))
    else:
        journal.header(run=run_dir.name)
    return journal


def finishes(run_dir: Path) -> int:
    """Take all steps, and record the end as finished."""
    steps = RunSpec.read(run_dir).steps
    begin = int(last_metrics(run_dir).get("step", 0))
    journal = open_journal(run_dir)
    for step in range(begin + 1, steps + 1):
        journal.record("train", step, {"train/loss": step})
    journal.end(steps, "finished")
    journal.close()
    return 0


def takes_a_step_then(then: Behaviour) -> Behaviour:
    def behave(run_dir: Path) -> int:
        journal = open_journal(run_dir)
        journal.record("train", 1, {"train/loss": 1})
        journal.close()
        return then(run_dir)

    return behave


def logs(text: str, exit_code: int) -> Behaviour:
    def behave(run_dir: Path) -> int:
        with (run_dir / LOG_FILE).open("a") as log:
            log.write(text)
        return exit_code

    return behave


def ends(exit_code: int) -> Behaviour:
    return lambda run_dir: exit_code


def records_failure(reason: str, exit_code: int = 1) -> Behaviour:
    def behave(run_dir: Path) -> int:
        journal = open_journal(run_dir)
        journal.end(1, "failed", reason)
        journal.close()
        return exit_code

    return behave


class ScriptedExecutor:
    """An executor of scripted members; each poll runs one member to its end.

    Args:
        script: behaviours of the attempts of each run; all further attempts finish.
        max_parallel: largest number of running members.
        newest_first: whether the member submitted last ends first.
    """

    def __init__(
        self,
        script: dict[str, Sequence[Behaviour]] | None = None,
        max_parallel: int = 2,
        newest_first: bool = False,
    ) -> None:
        self.script = defaultdict[str, deque[Behaviour]](deque)
        for run, behaviours in (script or {}).items():
            self.script[run].extend(behaviours)
        self.max_parallel = max_parallel
        self.newest_first = newest_first
        self.submitted: list[str] = []
        self.most_at_once = 0
        self.closed = 0
        self.during_poll: Callable[[], None] = lambda: None
        self._running: dict[str, Path] = {}

    outlives = False

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        return min(len(waiting), self.max_parallel - len(self._running))

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        for member in members:
            assert member.run not in self._running
            self.submitted.append(member.run)
            self._running[member.run] = member.run_dir
        self.most_at_once = max(self.most_at_once, len(self._running))
        return {member.run: None for member in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        return {}

    def queued(self) -> frozenset[str]:
        return frozenset()

    def settled(self) -> bool:
        return True

    def poll(self, timeout_s: float) -> list[Outcome]:
        self.during_poll()
        run = list(self._running)[-1 if self.newest_first else 0]
        run_dir = self._running.pop(run)
        behave = self.script[run].popleft() if self.script[run] else finishes
        return [Outcome(run, behave(run_dir))]

    def stop(self, runs: Sequence[str], reason: str) -> None:
        raise NotImplementedError

    def running(self) -> list[str]:
        return list(self._running)

    def close(self) -> None:
        self.closed += 1


class Recorder(Observer):
    """An observer that records events."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []
        self.ticks: list[tuple[int, int, int]] = []
        self.closed: list[int] = []

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        self.heard.append(("started", spec.title))

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        self.heard.append((state, spec.title, *([reason] if reason else [])))

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        self.heard.append(("queued", spec.title))

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        self.heard.append(("retried", spec.title, reason))

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        self.ticks.append((len(running), done, failed))

    def close(self, failed: int, left: int) -> None:
        self.closed.append(failed)


@pytest.fixture
def specs() -> list[RunSpec]:
    return [member(choice, seed) for choice in ("cispo", "dapo") for seed in (0, 1)]


def events(study: Study, spec: RunSpec) -> list[str]:
    return [entry["event"] for entry in study.ledger.entries() if entry["run"] == spec.run]


# --- starting members ----------------------------------------------------------------------------------------


def test_all_members_run_once_and_are_done(tmp_path: Path, specs: list[RunSpec]) -> None:
    study, executor, observer = Study(tmp_path, specs), ScriptedExecutor(), Recorder()
    states = study.run(executor, [observer])
    assert executor.submitted == [spec.run for spec in specs]
    assert list(states) == [spec.run for spec in specs]
    for spec in specs:
        assert states[spec.run] == MemberState(spec.run, spec.recipe, spec.seed, "finished", 1)
        assert events(study, spec) == ["planned", "started", "finished"]
        assert study.run_dir(spec) == tmp_path / "runs" / spec.run
        assert RunSpec.read(study.run_dir(spec)) == spec
        assert [event for event in observer.heard if event[1] == spec.title] == [
            ("started", spec.title),
            ("finished", spec.title),
        ]
    assert executor.closed == 1
    assert observer.ticks[-1] == (0, 4, 0)
    assert observer.closed == [0]


def test_the_frozen_spec_is_there_before_the_member_starts(tmp_path: Path, specs: list[RunSpec]) -> None:
    class Checking(ScriptedExecutor):
        def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
            for launch in members:
                assert RunSpec.read(launch.run_dir).run == launch.run
            return super().submit(submission, members)

    Study(tmp_path, specs).run(Checking())


def change(spec_file: Path, key: str, value: object) -> None:
    """Change a value in a frozen specification."""
    content = json.loads(spec_file.read_text())
    (content["config"] if key in content["config"] else content)[key] = value
    spec_file.write_text(json.dumps(content))


def test_a_member_with_a_changed_specification_is_not_run(tmp_path: Path, specs: list[RunSpec]) -> None:
    """The changed run would be another experiment under the identity of the old one."""
    study, executor, observer = Study(tmp_path, specs), ScriptedExecutor(max_parallel=1), Recorder()
    other = study.run_dir(specs[2]) / "spec.json"
    executor.during_poll = lambda: change(other, "loss", {"choice": "cispo"})
    states = study.run(executor, [observer])
    assert executor.submitted == [spec.run for spec in specs if spec is not specs[2]]
    reason = states[specs[2].run].reason
    assert states[specs[2].run].state == "failed" and reason is not None
    assert reason.startswith(f"{other}: changed since the study was launched") and observer.closed == [1]
    with pytest.raises(UserError, match=f"^{other}: changed since"):
        Study.read(tmp_path)
    # A new launch freezes the specification again. A larger budget does not count as a change.
    longer = [replace(spec, steps=6) for spec in specs]
    assert {each.state for each in Study(tmp_path, longer).run(ScriptedExecutor()).values()} == {"finished"}
    assert [spec.steps for spec in Study.read(tmp_path).specs] == [6] * 4
    assert events(study, specs[0]).count("planned") == 1


def test_a_specification_frozen_anew_gets_its_new_checksum(tmp_path: Path) -> None:
    spec = member("cispo")
    Study(tmp_path, [spec]).run(ScriptedExecutor({spec.run: [ends(1)]}))
    ledger = tmp_path / "ledger.jsonl"
    # First frozen by an earlier version without checksums, then by a command for which it has other departures.
    ledger.write_text(re.sub(r',"(checksum|crc)":"\w+"', "", ledger.read_text()))
    assert Study.read(tmp_path).specs == [spec] and Ledger(tmp_path).fold()[spec.run].checksum is None
    for again in (spec, replace(spec, departures={"loss": "cispo"})):
        study = Study(tmp_path, [again])
        study.run(ScriptedExecutor({spec.run: [ends(1)]}))
        assert Study.read(tmp_path).specs == [again]
        assert study.ledger.fold()[spec.run].checksum == again.checksum()
    assert events(study, spec).count("planned") == 3


def test_duplicate_members_run_once(tmp_path: Path, specs: list[RunSpec]) -> None:
    executor = ScriptedExecutor()
    states = Study(tmp_path, [*specs, specs[1], specs[0]]).run(executor)
    assert executor.submitted == [spec.run for spec in specs] == list(states)


def test_one_label_for_two_curves_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    one = member("cispo")
    other = make_spec({**one.config, "batch": 3}, one.reference, "scalerl", "scalerl")
    with pytest.raises(UserError, match="scalerl"):
        Study(tmp_path / "study", [one, other])
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("cap", [1, 2, 3, 9])
@pytest.mark.parametrize("newest_first", [False, True])
def test_the_executors_limit_is_reached_and_not_exceeded(tmp_path: Path, cap: int, newest_first: bool) -> None:
    specs = [member("cispo", seed) for seed in range(5)]
    executor = ScriptedExecutor(max_parallel=cap, newest_first=newest_first)
    states = Study(tmp_path, specs).run(executor)
    assert executor.most_at_once == min(cap, 5)
    assert {state.state for state in states.values()} == {"finished"}


def test_a_study_without_members_runs_nothing(tmp_path: Path) -> None:
    assert Study(tmp_path, []).run(ScriptedExecutor()) == {}


# --- launching again -----------------------------------------------------------------------------------------


def test_finished_members_are_not_submitted(tmp_path: Path, specs: list[RunSpec]) -> None:
    Study(tmp_path, specs).run(ScriptedExecutor())
    before = {path: path.read_bytes() for path in tmp_path.glob("runs/*/*")}
    study, executor, observer = Study(tmp_path, specs), ScriptedExecutor(), Recorder()
    states = study.run(executor, [observer])
    assert executor.submitted == []
    assert observer.heard == [("finished", spec.title) for spec in specs]
    assert {state.state for state in states.values()} == {"finished"}
    assert all(events(study, spec) == ["planned", "started", "finished"] for spec in specs)
    assert {path: path.read_bytes() for path in tmp_path.glob("runs/*/*")} == before


def test_a_larger_sweep_keeps_the_members_of_a_smaller_one(tmp_path: Path, specs: list[RunSpec]) -> None:
    Study(tmp_path, specs[:2]).run(ScriptedExecutor())
    executor = ScriptedExecutor()
    states = Study(tmp_path, specs).run(executor)
    assert executor.submitted == [spec.run for spec in specs[2:]]
    assert {state.state for state in states.values()} == {"finished"}


def test_a_smaller_sweep_leaves_the_others_alone(tmp_path: Path, specs: list[RunSpec]) -> None:
    Study(tmp_path, specs).run(ScriptedExecutor({specs[3].run: [ends(1)]}))
    states = Study(tmp_path, specs[:2]).run(ScriptedExecutor())
    assert list(states) == [specs[0].run, specs[1].run]
    assert Study(tmp_path, specs).ledger.fold()[specs[3].run].state == "failed"


def test_a_run_whose_end_is_missing_in_the_ledger_is_not_submitted(tmp_path: Path, specs: list[RunSpec]) -> None:
    # The controller was killed after the member finished, before it recorded that.
    study = Study(tmp_path, specs[:1])
    spec = specs[0]
    spec.write(study.run_dir(spec))
    study.ledger.append("planned", spec.run, recipe=spec.recipe, seed=spec.seed)
    study.ledger.append("started", spec.run)
    finishes(study.run_dir(spec))
    executor = ScriptedExecutor()
    states = study.run(executor)
    assert executor.submitted == []
    assert states[spec.run].state == "finished"
    assert events(study, spec) == ["planned", "started", "finished"]


def test_a_lost_ledger_is_rebuilt_from_the_journals(tmp_path: Path, specs: list[RunSpec]) -> None:
    study = Study(tmp_path, specs)
    study.run(ScriptedExecutor())
    study.ledger.path.unlink()
    executor = ScriptedExecutor()
    states = Study(tmp_path, specs).run(executor)
    assert executor.submitted == []
    assert {state.state for state in states.values()} == {"finished"}


def test_a_member_finished_by_the_ledger_but_not_by_its_journal_is_run(tmp_path: Path, specs: list[RunSpec]) -> None:
    study = Study(tmp_path, specs[:1])
    study.ledger.append("planned", specs[0].run, recipe=specs[0].recipe, seed=0)
    study.ledger.append("finished", specs[0].run)
    executor = ScriptedExecutor()
    study.run(executor)
    assert executor.submitted == [specs[0].run]


def test_a_failed_member_does_not_affect_others_and_is_retried_by_the_next_launch(
    tmp_path: Path, specs: list[RunSpec]
) -> None:
    bad = specs[1]
    observer = Recorder()
    study = Study(tmp_path, specs)
    states = study.run(ScriptedExecutor({bad.run: [takes_a_step_then(ends(3))]}), [observer])
    assert {run: state.state for run, state in states.items()} == {
        spec.run: "failed" if spec is bad else "finished" for spec in specs
    }
    assert states[bad.run].reason == "exit code 3"
    assert ("failed", bad.title, "exit code 3") in observer.heard
    assert observer.ticks[-1] == (0, 3, 1)
    assert observer.closed == [1]

    executor, again = ScriptedExecutor(), Recorder()
    states = study.run(executor, [again])
    assert executor.submitted == [bad.run]
    assert states[bad.run] == MemberState(bad.run, bad.recipe, bad.seed, "finished", attempts=2)
    assert events(study, bad) == ["planned", "started", "failed", "started", "finished"]
    assert again.ticks[-1] == (0, 4, 0)


def test_a_failed_member_is_not_retried_by_the_same_launch(tmp_path: Path, specs: list[RunSpec]) -> None:
    executor = ScriptedExecutor({spec.run: [ends(1)] * 5 for spec in specs})
    states = Study(tmp_path, specs).run(executor)
    assert executor.submitted == [spec.run for spec in specs]
    assert {state.state for state in states.values()} == {"failed"}


def test_observers_see_the_retry_and_the_second_start(tmp_path: Path, specs: list[RunSpec]) -> None:
    executor, observer = ScriptedExecutor({specs[0].run: [ends(-9)]}), Recorder()
    Study(tmp_path, specs[:1]).run(executor, [observer], {"killed": 1})
    assert [event[0] for event in observer.heard] == ["started", "retried", "started", "finished"]


def test_exit_code_zero_alone_is_not_success(tmp_path: Path, specs: list[RunSpec]) -> None:
    states = Study(tmp_path, specs[:1]).run(ScriptedExecutor({specs[0].run: [takes_a_step_then(ends(0))]}))
    assert states[specs[0].run].state == "failed"


def test_a_finished_journal_with_a_bad_exit_fails_once_and_counts_later(tmp_path: Path, specs: list[RunSpec]) -> None:
    def finishes_and_dies(run_dir: Path) -> int:
        finishes(run_dir)
        return -11

    states = Study(tmp_path, specs[:1]).run(ScriptedExecutor({specs[0].run: [finishes_and_dies]}))
    assert (states[specs[0].run].state, states[specs[0].run].reason) == ("failed", "killed by SIGSEGV")
    executor = ScriptedExecutor()
    states = Study(tmp_path, specs[:1]).run(executor)
    assert (executor.submitted, states[specs[0].run].state) == ([], "finished")


# --- the budget ----------------------------------------------------------------------------------------------


def test_a_larger_budget_continues_and_a_smaller_one_runs_nothing(tmp_path: Path) -> None:
    for steps, expected in ((4, 1), (10, 1), (10, 0), (7, 0)):
        spec = member("cispo", steps=steps)
        study, executor = Study(tmp_path, [spec]), ScriptedExecutor()
        states = study.run(executor)
        assert len(executor.submitted) == expected
        assert states[spec.run].state == "finished"
    assert len(list(tmp_path.glob("runs/*"))) == 1
    assert states[spec.run].attempts == 2
    assert events(study, spec) == ["planned", "started", "finished", "started", "finished"]
    assert [record.step for record in read_journal(study.run_dir(spec)).records] == list(range(1, 11))
    assert RunSpec.read(study.run_dir(spec)).steps == 10


def test_a_member_that_ended_for_good_is_finished_under_any_budget(tmp_path: Path, printed: list[str]) -> None:
    """A run has no prompt left. It is not retried, its measurements count, and the reason is shown."""

    def runs_dry(run_dir: Path) -> int:
        journal = open_journal(run_dir)
        for step in (0, 2):
            metrics = {"eval/heldout/pass_rate": 0.5, "compute/flops": float(step), "compute/device_hours": step / 10}
            journal.record("eval", step, metrics)
        journal.end(2, "finished", "dry", final=True)
        journal.close()
        return 0

    (dry,) = specs = [member("cispo")]
    for steps in (4, 8):  # the second launch starts nothing
        specs = [member("cispo", steps=steps)]
        study = Study(tmp_path, specs)
        executor = ScriptedExecutor({dry.run: [runs_dry]} if steps == 4 else {})
        progress = Progress(1, steps, every_s=0, write=printed.append)
        (state,) = study.run(executor, [progress], retries=dict.fromkeys(NO_RETRIES, 5)).values()
        assert (state.state, state.reason, executor.submitted) == ("finished", "dry", [dry.run] if steps == 4 else [])
        assert f"step 2/{steps}, pass rate 0.500; dry" in "".join(printed)
        (view,) = overview(tmp_path)
        assert (view.state, view.reason, view.step) == ("finished", "dry", 2)
        assert estimate_launch(specs, tmp_path).left == 0
    study_read = load([str(tmp_path)])
    assert "(seed 0) ended at step 2: dry" in study_read.curves[0].warnings[0] and study_read.curves[0].ended
    journal = Journal(tmp_path / "runs" / dry.run)
    journal.resume(0)  # a user's own script continues the run
    journal.close()
    assert not is_done(tmp_path / "runs" / dry.run, 4, dry.run) and final_reason(tmp_path / "runs" / dry.run) is None


def test_is_done_follows_the_journal(tmp_path: Path) -> None:
    assert not is_done(tmp_path, 4, "abc")
    journal = Journal(tmp_path)
    assert not is_done(tmp_path, 4, "abc")
    journal.header(run="abc")
    for step in range(1, 5):
        journal.record("train", step, {"x": step})
    assert not is_done(tmp_path, 4, "abc")
    journal.end(4, "failed", "no")
    assert not is_done(tmp_path, 4, "abc")
    journal.resume(4)
    journal.end(4, "finished")
    assert is_done(tmp_path, 4, "abc")
    assert not is_done(tmp_path, 5, "abc")
    raw = (tmp_path / JOURNAL_FILE).read_bytes()
    for number in (1, 4):  # a broken line in the middle of a finished run's journal
        parts = raw.split(b'"kind":"train"')
        parts[number - 1 : number + 1] = [b'"kind":"tr\nin"'.join(parts[number - 1 : number + 1])]
        (tmp_path / JOURNAL_FILE).write_bytes(b'"kind":"train"'.join(parts))
        assert is_done(tmp_path, 4, "abc")
        assert not is_done(tmp_path, 5, "abc")
    (tmp_path / JOURNAL_FILE).write_bytes(raw)
    assert not is_done(tmp_path, 4, "another"), "a journal of another run says nothing about this one"


def test_a_journal_of_another_run_is_refused_before_anything_is_submitted(tmp_path: Path, specs: list[RunSpec]) -> None:
    study, executor = Study(tmp_path, specs), ScriptedExecutor()
    journal = Journal(study.run_dir(specs[1]))
    journal.header(run="somebody")
    journal.record("train", 1, {"x": 1.0})
    journal.end(1, "finished")
    journal.close()
    raw = journal.path.read_bytes()
    with pytest.raises(UserError, match=f"{journal.path}: .*another run, somebody, in the folder of {specs[1].run}"):
        study.run(executor)
    assert not executor.submitted and not study.ledger.fold()
    assert journal.path.read_bytes() == raw


# --- one controller ------------------------------------------------------------------------------------------


def test_a_second_controller_is_refused_while_the_first_runs(tmp_path: Path, specs: list[RunSpec]) -> None:
    first, second = ScriptedExecutor(), ScriptedExecutor()
    refusals = []

    def intrude() -> None:
        with pytest.raises(UserError, match="another process") as caught:
            Study(tmp_path, specs).run(second)
        refusals.append(str(caught.value))

    first.during_poll = intrude
    states = Study(tmp_path, specs).run(first)
    assert len(refusals) == 4
    assert str(tmp_path) in refusals[0]
    assert second.submitted == []
    assert {state.state for state in states.values()} == {"finished"}
    assert {state.attempts for state in states.values()} == {1}
    Study(tmp_path, specs).run(second)
    assert second.submitted == []


def test_two_studies_run_side_by_side(tmp_path: Path, specs: list[RunSpec]) -> None:
    first, second = ScriptedExecutor(), ScriptedExecutor()

    def run_the_other() -> None:
        Study(tmp_path / "two", specs).run(second)

    first.during_poll = run_the_other
    Study(tmp_path / "one", specs).run(first)
    assert first.submitted == second.submitted == [spec.run for spec in specs]


class Interrupted(Recorder):
    """An observer that is interrupted by Ctrl-C while members run."""

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        raise KeyboardInterrupt


class Unclosable(Recorder):
    """An observer whose tracking server is unavailable."""

    def close(self, failed: int, left: int) -> None:
        super().close(failed, left)
        raise OSError("away")


def test_an_interrupted_controller_ends_its_members_and_frees_the_study(tmp_path: Path, specs: list[RunSpec]) -> None:
    executor, observer = ScriptedExecutor(), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Study(tmp_path, specs).run(executor, [observer])
    assert executor.closed == 1
    assert observer.closed == [4], "observers must not take this for a finished study"
    states = Study(tmp_path, specs).run(ScriptedExecutor())
    assert {state.state for state in states.values()} == {"finished"}


@pytest.mark.parametrize("place", [0, 1])
def test_an_observer_that_cannot_be_closed_does_not_keep_others_open(
    tmp_path: Path, specs: list[RunSpec], place: int
) -> None:
    executor, observers = ScriptedExecutor(), [Recorder(), Recorder()]
    observers[place] = Unclosable()
    with pytest.raises(OSError, match="away"):
        Study(tmp_path, specs).run(executor, observers)
    assert executor.closed == 1
    assert [observer.closed for observer in observers] == [[0], [0]]
    assert Study(tmp_path, specs).run(ScriptedExecutor()).keys() == {spec.run for spec in specs}


# --- reasons -------------------------------------------------------------------------------------------------

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: from the log\n\n  \n'


@pytest.mark.parametrize(
    ("behaviours", "reason"),
    [
        ([records_failure("RewardError: from the journal")], "RewardError: from the journal"),
        ([logs(TRACEBACK, 0), records_failure("RewardError: from the journal")], "RewardError: from the journal"),
        ([records_failure("RewardError: from the journal", -9)], "RewardError: from the journal"),
        ([logs(TRACEBACK, 1)], "ValueError: from the log"),
        ([takes_a_step_then(logs(TRACEBACK, 1))], "ValueError: from the log"),
        ([logs(TRACEBACK, -9)], "killed by SIGKILL"),
        ([logs("Epoch 0: 12%", -15)], "killed by SIGTERM"),
        ([takes_a_step_then(ends(-6))], "killed by SIGABRT"),
        ([logs("\n  \n", 4)], "exit code 4"),
        ([ends(4)], "exit code 4"),
        ([logs("x" * 9000, 1)], "x" * 500),
    ],
)
def test_the_reason_is_from_the_journal_or_the_log_or_the_exit_code(
    tmp_path: Path, behaviours: list[Behaviour], reason: str
) -> None:
    spec = member("cispo")

    def behave(run_dir: Path) -> int:
        return [then(run_dir) for then in behaviours][-1]

    states = Study(tmp_path, [spec]).run(ScriptedExecutor({spec.run: [behave]}))
    assert (states[spec.run].state, states[spec.run].reason) == ("failed", reason)


@pytest.mark.parametrize(
    "first", [records_failure("RewardError: of the first attempt"), logs("ValueError: of the first attempt\n", 1)]
)
@pytest.mark.parametrize(("second", "reason"), [(ends(-9), "killed by SIGKILL"), (ends(7), "exit code 7")])
def test_a_second_attempt_does_not_inherit_the_reason_of_the_first(
    tmp_path: Path, first: Behaviour, second: Behaviour, reason: str
) -> None:
    spec = member("cispo")
    executor = ScriptedExecutor({spec.run: [first, second]})
    study = Study(tmp_path, [spec])
    assert "of the first attempt" in str(study.run(executor)[spec.run].reason)
    assert study.run(executor)[spec.run].reason == reason


def test_a_second_attempt_may_fail_for_the_reason_of_the_first(tmp_path: Path) -> None:
    spec = member("cispo")
    study = Study(tmp_path, [spec])
    for behave in (records_failure("RewardError: no"), logs("ValueError: no\n", 1)):
        executor = ScriptedExecutor({spec.run: [behave, behave]})
        assert study.run(executor)[spec.run].reason == study.run(executor)[spec.run].reason


def test_an_undecodable_log_is_tolerated(tmp_path: Path) -> None:
    (tmp_path / LOG_FILE).write_bytes(b"\xff\xfe broken \x80\n")
    assert "broken" in why_failed(tmp_path, "exit code 1")
    assert why_failed(tmp_path / "nowhere", "exit code 1") == "exit code 1"


# --- progress ------------------------------------------------------------------------------------------------


@pytest.fixture
def printed() -> list[str]:
    return []


def record(run_dir: Path, step: int, rate: float | None = None) -> None:
    journal = open_journal(run_dir)
    journal.record("train", step, {"train/loss": 0.5})
    if rate is not None:
        journal.record("eval", step, {"eval/heldout/pass_rate": rate, "eval/heldout/pass_rate_se": 0.9})
    journal.close()


def test_progress_shows_the_step_of_every_running_member(tmp_path: Path, printed: list[str]) -> None:
    one, two = member("cispo", steps=40), member("dapo", seed=1, steps=60)
    progress = Progress(total=3, steps=40, every_s=0, write=printed.append)
    progress.started(one, tmp_path / "one")
    progress.started(two, tmp_path / "two")
    progress.tick([one, two], 0, 0, 0)
    assert printed.pop().endswith("0/3 done | scalerl seed 0: starting | scalerl+loss=dapo seed 1: starting\n")
    record(tmp_path / "one", 7)
    record(tmp_path / "two", 8, rate=0.25)
    progress.tick([one, two], 0, 1, 0)
    assert printed.pop().endswith(
        "1/3 done | scalerl seed 0: step 7/40 | scalerl+loss=dapo seed 1: step 8/60, pass rate 0.250\n"
    )
    record(tmp_path / "two", 9)
    progress.tick([two], 0, 1, 1)
    assert printed.pop().endswith("1/3 done, 1 failed | scalerl+loss=dapo seed 1: step 9/60, pass rate 0.250\n")
    progress.tick([], 0, 2, 1)
    assert printed.pop().endswith("] 2/3 done, 1 failed\n")
    assert printed == []


def test_progress_shows_how_a_member_ended(tmp_path: Path, printed: list[str]) -> None:
    progress = Progress(total=2, steps=40, write=printed.append)
    record(tmp_path, 40, rate=0.5)
    progress.ended(member("cispo", steps=40), tmp_path, "finished", None)
    progress.ended(member("dapo"), tmp_path, "failed", "killed by SIGKILL")
    assert printed[0].endswith("finished  scalerl seed 0: step 40/40, pass rate 0.500\n")
    assert printed[1].endswith("failed    scalerl+loss=dapo seed 0: killed by SIGKILL\n")
    assert all(line.startswith("[00:0") for line in printed)


def test_progress_is_printed_once_per_interval(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("sweeps.launch.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(total=1, steps=4, every_s=10, write=printed.append)
    progress.started(member("cispo"), tmp_path)
    for seconds, lines in ((5, 0), (9.9, 0), (10, 1), (15, 1), (20, 2), (75, 3)):
        now[0] = 100 + seconds
        progress.tick([member("cispo")], 0, 0, 0)
        assert len(printed) == lines
    assert printed[-1].startswith("[01:15] ")


def test_inherited_steps_of_a_branch_do_not_count_in_the_pace(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("sweeps.launch.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    plain = member("cispo", steps=40)
    branch = replace(plain, config={**plain.config, "branch": {"run": "0123456789ab", "step": 20}})
    progress = Progress(total=1, steps=40, every_s=0, write=printed.append)
    progress.started(branch, tmp_path)
    now[0] = 600.0
    record(tmp_path, 30)
    progress.tick([branch], 0, 0, 0)
    assert "about 10 min left" in printed[-1], "10 steps took 10 min, and 10 are left"


def test_progress_estimates_the_remaining_time(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pace is measured only by this process; members that were finished before do not count."""
    now = [0.0]
    monkeypatch.setattr("sweeps.launch.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    one, two = member("cispo", steps=40), member("dapo", steps=40)
    record(tmp_path / "one", 20)
    progress = Progress(total=4, steps=40, every_s=0, write=printed.append)
    progress.ended(member("gspo"), tmp_path / "before", "finished", None)
    progress.started(one, tmp_path / "one")
    now[0] = 100.0
    record(tmp_path / "one", 30)
    progress.tick([one], 0, 1, 0)
    # 10 steps took 100 s; left are 10 steps of this member and 80 of the two that wait.
    assert printed[-1].startswith("[01:40] about 15 min left, 1/4 done | ")
    progress.ended(one, tmp_path / "one", "finished", None)
    progress.started(two, tmp_path / "two")
    progress.tick([two], 0, 3, 0)
    assert "about 7 min left, 3/4 done | " in printed[-1]


def test_the_remaining_time_uses_each_members_own_budget(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the member of 960 steps is left: 860 steps at 10 s each. The mean budget of 500 must not be used."""
    now = [0.0]
    monkeypatch.setattr("sweeps.launch.observer.time", SimpleNamespace(monotonic=lambda: now[0]))
    long = member("dapo", steps=960)
    progress = Progress(total=2, steps=500, every_s=0, write=printed.append)
    progress.ended(member("cispo", steps=40), tmp_path / "short", "finished", None)
    progress.started(long, tmp_path / "long")
    now[0] = 1000.0
    record(tmp_path / "long", 100)
    progress.tick([long], 0, 1, 0)
    assert "about 2 h 23 min left, 1/2 done | scalerl+loss=dapo seed 0: step 100/960" in printed[-1]


def test_progress_reads_few_journals_per_tick_and_all_in_turn(
    tmp_path: Path, printed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [member("cispo", seed=seed, steps=40) for seed in range(100)]
    progress = Progress(total=100, steps=40, every_s=0, write=printed.append)
    for spec in members:
        progress.started(spec, tmp_path / spec.run)
    read_dirs: list[Path] = []
    monkeypatch.setattr(
        "sweeps.launch.observer.last_metrics", lambda run_dir: read_dirs.append(run_dir) or {"step": 10.0}
    )
    for tick in range(1, 5):
        progress.tick(members, 0, 0, 0)
        assert len(read_dirs) == tick * JOURNALS_PER_UPDATE
    assert {path.name for path in read_dirs} == {spec.run for spec in members}
    assert printed[-1].count("step 10/40") == SHOWN and "94 more running" in printed[-1]


def test_on_a_terminal_progress_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(total=3, steps=40, every_s=0)
    one = member("cispo", steps=40)
    record(tmp_path / "one", 7, rate=0.25)
    progress.started(one, tmp_path / "one")
    progress.tick([one], 1, 1, 0)
    progress.ended(one, tmp_path / "one", "finished", None)
    progress.close(0, 0)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "1/3 done, 1 queued" in shown
    assert re.search(r"recipe +seed +step +pass rate", shown)
    assert re.search(r"scalerl +0 +━━╸━+ +7/40 +0\.250", shown)
    assert "finished  scalerl seed 0: step 7/40, pass rate 0.250" in shown


def test_progress_follows_a_whole_study(tmp_path: Path, specs: list[RunSpec], printed: list[str]) -> None:
    executor = ScriptedExecutor({specs[2].run: [logs("ValueError: no\n", 1)]})
    Study(tmp_path, specs).run(executor, [Progress(4, 4, every_s=0, write=printed.append)])
    assert sum("finished  " in line for line in printed) == 3
    assert sum("failed    scalerl+loss=dapo seed 0: ValueError: no" in line for line in printed) == 1
    assert "3/4 done, 1 failed" in printed[-2] and "3/4 done, 1 not done" in printed[-1]
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in printed)


def test_the_newest_metrics_are_read_from_the_end_of_the_journal(tmp_path: Path) -> None:
    assert last_metrics(tmp_path) == {}
    journal = Journal(tmp_path)
    journal.header(run="abc")
    assert last_metrics(tmp_path) == {}
    journal.record("eval", 1, {"eval/heldout/pass_rate": 0.5, "compute/flops": 1})
    for step in range(2, 200):
        journal.record("train", step, {"train/loss": 0.5})
    journal.close()
    assert last_metrics(tmp_path) == {"step": 199.0, "eval/heldout/pass_rate": 0.5}
    assert last_metrics(tmp_path, tail_bytes=300) == {"step": 199.0}
    with (tmp_path / JOURNAL_FILE).open("a") as handle:
        handle.write(json.dumps({"kind": "train", "step": 200, "metrics": {}})[:-5])
    assert last_metrics(tmp_path)["step"] == 199.0


def test_a_controller_that_lost_its_lease_writes_nothing_more(tmp_path: Path, specs: list[RunSpec]) -> None:
    executor, observer = ScriptedExecutor(max_parallel=1), Recorder()

    def taken_over() -> None:
        (tmp_path / f".{LEASE_NAME}.json").write_text(json.dumps({"token": "of another", "host": "elsewhere"}))

    executor.during_poll = taken_over
    with pytest.raises(LeaseLostError, match="elsewhere"):
        Study(tmp_path, specs).run(executor, [observer])
    entries = Ledger(tmp_path).entries()
    assert [entry["event"] for entry in entries] == ["planned"] * len(specs) + ["started"]
    assert observer.closed == [0], "no member is reported as failed"


def test_a_study_renamed_while_it_runs_leaves_nothing_at_the_old_place(tmp_path: Path, specs: list[RunSpec]) -> None:
    here, executor = tmp_path / "here", ScriptedExecutor({specs[0].run: [ends(0)]}, max_parallel=1)
    executor.during_poll = lambda: here.rename(tmp_path / "there") and None
    with pytest.raises(LeaseLostError, match=f"^{here}: renamed or removed while .* with the new place"):
        Study(here, specs).run(executor)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and executor.submitted == [specs[0].run]


def test_an_unread_pipe_does_not_block_a_controller(tmp_path: Path, specs: list[RunSpec]) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as stream:
        os.set_blocking(writing, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writing, b"x" * 65536)
        os.set_blocking(writing, True)
        progress = Progress(4, 4, every_s=0, write=NonBlockingWriter(stream).write)
        states = Study(tmp_path, specs).run(ScriptedExecutor(), [progress])
        assert {state.state for state in states.values()} == {"finished"}
        # When the pipe is read, the newest lines arrive.
        reader.read1(1 << 20)
        progress.say("that is all")
        assert b"4/4 done\n" in (printed := reader.read1(1 << 20)) and printed.endswith(b"that is all\n")


def test_a_study_of_another_version_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """The other version gave its runs other identities, so they would be trained a second time."""
    study = Study(tmp_path, [member("cispo")])
    study.run(ScriptedExecutor())
    spec_file = study.run_dir(study.specs[0]) / "spec.json"
    old = json.loads(spec_file.read_text())
    del old["form"]
    spec_file.write_text(json.dumps(old))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name[0] != "."}
    again, begun = Study(tmp_path, [member("dapo")]), []
    with pytest.raises(UserError, match=r"another version.*study=NAME"), again.prepare(ScriptedExecutor()) as prepared:
        begun.append(prepared)
    assert not begun
    assert {path: path.read_bytes() for path in before} == before


def test_messages_of_progress_do_not_block_on_a_full_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error is a full pipe, to which a plain write would block forever."""

    class Unread(io.StringIO):
        def fileno(self) -> int:
            return writing

        def write(self, text: str) -> int:
            raise AssertionError("it waits for a reader")

    reading, writing = os.pipe()
    with os.fdopen(reading, "rb"), os.fdopen(writing, "wb", buffering=0):
        os.set_blocking(writing, False)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(writing, b"x" * 65536)
        os.set_blocking(writing, True)
        monkeypatch.setattr("sys.stderr", Unread())
        Progress(4, 4, every_s=0).say("that is all")


def test_no_folder_is_created_at_the_old_place_of_a_renamed_study(tmp_path: Path, specs: list[RunSpec]) -> None:
    """The study is renamed between two submissions. The second one must not create a folder at the old place."""
    here = tmp_path / "here"

    class MakesFolders(ScriptedExecutor):
        def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
            for launch in members:
                launch.run_dir.mkdir(parents=True, exist_ok=True)
            return super().submit(submission, members)

        def poll(self, timeout_s: float) -> list[Outcome]:
            self.max_parallel = 2
            here.rename(tmp_path / "there")
            return []

    executor = MakesFolders(max_parallel=1)
    with pytest.raises(LeaseLostError, match=f"^{here}: renamed or removed while"):
        Study(here, specs).run(executor)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and executor.submitted == [specs[0].run]
