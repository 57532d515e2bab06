"""What every executor keeps to, whatever it starts members on. An engine is a few lines here and in the tests.

`ExecutorContract` is a class of tests, `QueueContract` that of an engine with a queue of its own: one for each engine
inherits it and gives the fixture `engine`. test_contract.py has this machine and the virtual cluster, tests/slurm a
real one.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sweeps.executor.base import Executor, Launch, Outcome
from sweeps.executor.node.attempts import attempts
from sweeps.run.interruption import RunInterruptedError, interruption

# What a member does; `wait` until its study asks it to stop.
BEHAVIOURS = ("finish", "fail", "wait")


def perform(run_dir: Path) -> None:
    """A member of an engine that starts real processes."""
    does = (run_dir / "does").read_text()
    (run_dir / "begun").touch()
    if does == "fail":
        raise ValueError("no good")
    if does == "wait":
        with interruption.watching_stop_file(run_dir):
            while not interruption.requested:
                (run_dir / "beat").write_text(str(time.monotonic()))
                time.sleep(0.05)
        (run_dir / "saved").touch()
        raise RunInterruptedError(f"step 3: {interruption.reason}")


class Engine(ABC):
    """Where members run, for the tests."""

    patience_s = 60.0

    def __init__(self, study: Path) -> None:
        self.study = study

    @abstractmethod
    def executor(self) -> Executor:
        """A new controller's."""

    @abstractmethod
    def clock(self) -> float:
        """Seconds, real or not."""

    @abstractmethod
    def has_begun(self, run: str) -> bool:
        """Whether the member has been at work."""

    def goes_on(self, run: str) -> bool:
        """Whether a member that waits is at work now; here: whether its heart beats."""
        beat = self.study / "runs" / run / "beat"
        before, deadline = beat.read_text(), time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if beat.read_text() not in ("", before):
                return True
        return False

    def launch(self, run: str, does: str) -> Launch:
        """A member."""
        assert does in BEHAVIOURS
        run_dir = self.study / "runs" / run
        run_dir.mkdir(parents=True)
        (run_dir / "does").write_text(does)
        return Launch(run, run_dir)

    def only_room_for_one(self) -> None:
        """From now on at most one member is at work at a time; of an engine with a queue."""
        raise NotImplementedError

    nodes: Sequence[str] = ()  # of an engine with a queue: where members may run

    def node_of(self, run: str) -> str:
        """The node on which a member ran; of an engine with a queue."""
        return attempts(self.study / "runs" / run)[-1].node

    def until(self, executor: Executor, true: Callable[[], bool], outcomes: dict[str, Outcome] | None = None) -> None:
        """Poll until something holds; no outcome comes twice."""
        deadline = self.clock() + self.patience_s
        known = {} if outcomes is None else outcomes
        while not true():
            assert self.clock() < deadline, (known, executor.running())
            for outcome in executor.poll(timeout_s=1.0):
                assert outcome.run not in known, f"{outcome.run} ended twice"
                known[outcome.run] = outcome

    def drive(self, executor: Executor, members: Sequence[Launch]) -> dict[str, Outcome]:
        """Submit all of them as there is room, and wait for their ends, as a study does."""
        waiting, outcomes = list(members), dict[str, Outcome]()
        deadline = self.clock() + self.patience_s
        while waiting or executor.running():
            assert self.clock() < deadline, (outcomes, executor.running())
            while waiting and (size := executor.next_batch(waiting)) > 0:
                jobs = executor.submit(once(), waiting[:size])
                assert set(jobs) <= {member.run for member in waiting[:size]}
                assert set(jobs) <= set(executor.running()), "submitted, and so running until its end is told"
                waiting = [member for member in waiting if member.run not in jobs]
            for outcome in executor.poll(timeout_s=1.0):
                assert outcome.run not in outcomes and outcome.run not in executor.running()
                outcomes[outcome.run] = outcome
        return outcomes


def once() -> str:
    """The name of a submission: a cluster remembers those of before."""
    return uuid.uuid4().hex[:12]


class ExecutorContract:
    """The tests. A class of them gives the fixture `engine`."""

    def test_each_member_ends_once_and_says_how(self, engine: Engine) -> None:
        members = [engine.launch("a", "finish"), engine.launch("b", "fail"), engine.launch("c", "finish")]
        outcomes = engine.drive(engine.executor(), members)
        assert {run: outcome.exit_code == 0 for run, outcome in outcomes.items()} == {"a": True, "b": False, "c": True}
        assert outcomes["b"].kind in ("error", None), "one that failed is not put down to the machine"

    def test_it_says_how_many_it_takes_and_nothing_is_asked_of_it_before(self, engine: Engine) -> None:
        executor = engine.executor()
        assert executor.running() == [] and executor.queued() == frozenset()
        assert executor.next_batch([]) == 0
        members = [engine.launch(run, "finish") for run in "abc"]
        assert 0 < executor.next_batch(members) <= 3

    def test_a_poll_with_nothing_to_tell_comes_back(self, engine: Engine) -> None:
        executor = engine.executor()
        assert executor.poll(timeout_s=0.1) == []
        executor.submit(once(), [engine.launch("a", "wait")])
        before = engine.clock()
        assert executor.poll(timeout_s=0.5) == []
        assert engine.clock() - before < 20, "whoever conducts a study has more to do"
        assert executor.running() == ["a"]
        self.end(engine, executor)

    def test_a_member_that_is_stopped_has_saved_itself_and_says_why(self, engine: Engine) -> None:
        executor = engine.executor()
        for run in "ab":
            launch = engine.launch(run, "wait")
            engine.until(executor, lambda launch=launch: executor.next_batch([launch]) > 0)
            executor.submit(once(), [launch])
        engine.until(executor, lambda: engine.has_begun("a") and engine.has_begun("b"))
        outcomes: dict[str, Outcome] = {}
        executor.stop(["a", "unheard of"], "no longer needed")
        engine.until(executor, lambda: "a" in outcomes, outcomes)
        assert (outcomes["a"].kind, outcomes["a"].reason) == ("stopped", "no longer needed")
        assert executor.running() == ["b"], "and it alone"
        executor.stop(["a"], "twice")  # nothing comes of it
        assert not any(outcome.run == "a" for outcome in executor.poll(0.5))
        self.end(engine, executor)

    def test_members_outlive_their_controller_or_end_with_it(self, engine: Engine) -> None:
        first, kept = engine.executor(), once()
        launch = engine.launch("a", "wait")
        jobs = first.submit(kept, [launch])
        engine.until(first, lambda: engine.has_begun("a"))
        first.close()
        later = engine.executor()
        known = Launch(launch.run, launch.run_dir, submission=kept, job=jobs["a"])
        # Submitted by a process that was gone before it could write down whether it was.
        never = Launch("n", engine.launch("n", "wait").run_dir, submission=once())
        found = later.adopt([known, never])
        assert "n" not in found, "what nobody has taken is to be submitted anew"
        if not first.outlives:
            assert found == {} and later.running() == []
            return
        assert found == {"a": jobs["a"]} and later.running() == ["a"]
        outcomes: dict[str, Outcome] = {}
        later.stop(["a"], "no longer needed")
        engine.until(later, lambda: "a" in outcomes, outcomes)
        assert outcomes["a"].kind == "stopped"

    def test_closing_ends_what_does_not_outlive_it_and_nothing_else(self, engine: Engine) -> None:
        executor = engine.executor()
        launch = engine.launch("a", "wait")
        kept = once()
        job = executor.submit(kept, [launch])["a"]
        engine.until(executor, lambda: engine.has_begun("a") and engine.goes_on("a"))
        executor.close()
        executor.close()  # twice is once
        assert engine.goes_on("a") == executor.outlives
        if executor.outlives:
            later = engine.executor()
            later.adopt([replace(launch, submission=kept, job=job)])
            self.end(engine, later)

    def test_it_says_when_it_is_clear_of_every_member(self, engine: Engine) -> None:
        executor = engine.executor()
        executor.submit(once(), [engine.launch("a", "finish")])
        engine.until(executor, lambda: executor.settled() and not executor.running())

    @staticmethod
    def end(engine: Engine, executor: Executor) -> None:
        """Nothing is left behind."""
        executor.stop(executor.running(), "the test is over")
        engine.until(executor, lambda: not executor.running())
        executor.close()


class QueueContract(ExecutorContract):
    """And of one that has a queue of its own, which outlives its controllers."""

    def test_a_member_keeps_off_the_nodes_that_it_excludes(self, engine: Engine) -> None:
        for number, kept in enumerate(engine.nodes):
            others = tuple(node for node in engine.nodes if node != kept)
            launch = replace(engine.launch(f"a{number}", "finish"), excluded=others)
            engine.drive(engine.executor(), [launch])
            assert engine.node_of(launch.run) == kept
        assert len(engine.nodes) > 1, "or nothing was shown"

    def test_one_that_waits_for_its_turn_never_begins(self, engine: Engine) -> None:
        engine.only_room_for_one()
        executor = engine.executor()
        executor.submit(once(), [engine.launch("a", "wait")])
        engine.until(executor, lambda: engine.has_begun("a"))
        executor.submit(once(), [engine.launch("b", "wait")])
        engine.until(executor, lambda: "b" in executor.queued())
        outcomes: dict[str, Outcome] = {}
        executor.stop(["b"], "no longer needed")
        engine.until(executor, lambda: "b" in outcomes, outcomes)
        assert (outcomes["b"].kind, outcomes["b"].reason) == ("stopped", "no longer needed")
        assert not engine.has_begun("b")
        self.end(engine, executor)

    def test_one_whose_job_was_not_written_down_is_found_by_its_submission(self, engine: Engine) -> None:
        first, kept = engine.executor(), once()
        launch = engine.launch("a", "wait")
        jobs = first.submit(kept, [launch])
        first.close()
        later = engine.executor()
        assert later.adopt([Launch(launch.run, launch.run_dir, submission=kept)]) == jobs
        engine.until(later, lambda: engine.has_begun("a"))
        self.end(engine, later)
