"""The contract of all executors, as classes of tests.

`ExecutorContract` applies to every executor, `QueueContract` to one with its own queue. A test class for an executor
inherits one of them and provides the fixture `engine`. test_contract.py tests this machine and the virtual cluster,
tests/slurm a real cluster.
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

# Behaviours of a member. `wait` runs until the study asks it to stop.
BEHAVIOURS = ("finish", "fail", "wait")


def perform(run_dir: Path) -> None:
    """Run a member of an engine that starts real processes."""
    behaviour = (run_dir / "does").read_text()
    (run_dir / "begun").touch()
    if behaviour == "fail":
        raise ValueError("no good")
    if behaviour == "wait":
        with interruption.watching_stop_file(run_dir):
            while not interruption.requested:
                (run_dir / "beat").write_text(str(time.monotonic()))
                time.sleep(0.05)
        (run_dir / "saved").touch()
        raise RunInterruptedError(f"step 3: {interruption.reason}")


class Engine(ABC):
    """An executor under test, and access to the members that it runs."""

    patience_s = 60.0

    def __init__(self, study: Path) -> None:
        self.study = study

    @abstractmethod
    def executor(self) -> Executor:
        """Return the executor of a new controller."""

    @abstractmethod
    def clock(self) -> float:
        """Return the time in seconds, real or virtual."""

    @abstractmethod
    def has_begun(self, run: str) -> bool:
        """Return whether the member has begun."""

    def is_running(self, run: str) -> bool:
        """Return whether a member of behaviour `wait` is running now; here: whether it still writes its file `beat`."""
        beat = self.study / "runs" / run / "beat"
        first_beat, deadline = beat.read_text(), time.monotonic() + 2
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if beat.read_text() not in ("", first_beat):
                return True
        return False

    def launch(self, run: str, behaviour: str) -> Launch:
        """Create a member."""
        assert behaviour in BEHAVIOURS
        run_dir = self.study / "runs" / run
        run_dir.mkdir(parents=True)
        (run_dir / "does").write_text(behaviour)
        return Launch(run, run_dir)

    def allow_one_at_a_time(self) -> None:
        """Allow only one running member from now on. Only for an engine with a queue."""
        raise NotImplementedError

    nodes: Sequence[str] = ()  # nodes on which members may run; only for an engine with a queue

    def node_of(self, run: str) -> str:
        """Return the node on which a member ran. Only for an engine with a queue."""
        return attempts(self.study / "runs" / run)[-1].node

    def until(self, executor: Executor, true: Callable[[], bool], outcomes: dict[str, Outcome] | None = None) -> None:
        """Poll until a condition is true; assert that no member ends twice."""
        deadline = self.clock() + self.patience_s
        known = {} if outcomes is None else outcomes
        while not true():
            assert self.clock() < deadline, (known, executor.running())
            for outcome in executor.poll(timeout_s=1.0):
                assert outcome.run not in known, f"{outcome.run} ended twice"
                known[outcome.run] = outcome

    def drive(self, executor: Executor, members: Sequence[Launch]) -> dict[str, Outcome]:
        """Submit all members in batches and wait for their outcomes, as a study does."""
        waiting, outcomes = list(members), dict[str, Outcome]()
        deadline = self.clock() + self.patience_s
        while waiting or executor.running():
            assert self.clock() < deadline, (outcomes, executor.running())
            while waiting and (size := executor.next_batch(waiting)) > 0:
                jobs = executor.submit(new_submission_name(), waiting[:size])
                assert set(jobs) <= {member.run for member in waiting[:size]}
                assert set(jobs) <= set(executor.running()), (
                    "a submitted member counts as running until its outcome is reported"
                )
                waiting = [member for member in waiting if member.run not in jobs]
            for outcome in executor.poll(timeout_s=1.0):
                assert outcome.run not in outcomes and outcome.run not in executor.running()
                outcomes[outcome.run] = outcome
        return outcomes


def new_submission_name() -> str:
    """Return a new submission name; a cluster remembers the earlier ones."""
    return uuid.uuid4().hex[:12]


class ExecutorContract:
    """Tests of every executor. A subclass provides the fixture `engine`."""

    def test_each_member_has_one_outcome(self, engine: Engine) -> None:
        members = [engine.launch("a", "finish"), engine.launch("b", "fail"), engine.launch("c", "finish")]
        outcomes = engine.drive(engine.executor(), members)
        assert {run: outcome.exit_code == 0 for run, outcome in outcomes.items()} == {"a": True, "b": False, "c": True}
        assert outcomes["b"].kind in ("error", None), "an error of the member is not blamed on the machine"

    def test_a_new_executor_runs_nothing_and_has_room(self, engine: Engine) -> None:
        executor = engine.executor()
        assert executor.running() == [] and executor.queued() == frozenset()
        assert executor.next_batch([]) == 0
        members = [engine.launch(run, "finish") for run in "abc"]
        assert 0 < executor.next_batch(members) <= 3

    def test_a_poll_without_outcomes_returns(self, engine: Engine) -> None:
        executor = engine.executor()
        assert executor.poll(timeout_s=0.1) == []
        executor.submit(new_submission_name(), [engine.launch("a", "wait")])
        begin = engine.clock()
        assert executor.poll(timeout_s=0.5) == []
        assert engine.clock() - begin < 20, "a poll must return, because the controller has more to do"
        assert executor.running() == ["a"]
        self.end(engine, executor)

    def test_a_stopped_member_is_reported_with_the_reason(self, engine: Engine) -> None:
        executor = engine.executor()
        for run in "ab":
            launch = engine.launch(run, "wait")
            engine.until(executor, lambda launch=launch: executor.next_batch([launch]) > 0)
            executor.submit(new_submission_name(), [launch])
        engine.until(executor, lambda: engine.has_begun("a") and engine.has_begun("b"))
        outcomes: dict[str, Outcome] = {}
        executor.stop(["a", "unheard of"], "no longer needed")
        engine.until(executor, lambda: "a" in outcomes, outcomes)
        assert (outcomes["a"].kind, outcomes["a"].reason) == ("stopped", "no longer needed")
        assert executor.running() == ["b"], "only `a` is stopped"
        executor.stop(["a"], "twice")  # stopping an ended member has no effect
        assert not any(outcome.run == "a" for outcome in executor.poll(0.5))
        self.end(engine, executor)

    def test_a_later_controller_adopts_members_that_outlive_the_first(self, engine: Engine) -> None:
        first, kept = engine.executor(), new_submission_name()
        launch = engine.launch("a", "wait")
        jobs = first.submit(kept, [launch])
        engine.until(first, lambda: engine.has_begun("a"))
        first.close()
        later = engine.executor()
        known = Launch(launch.run, launch.run_dir, submission=kept, job=jobs["a"])
        # A submission whose controller died before it could record whether it was accepted.
        unaccepted = Launch("n", engine.launch("n", "wait").run_dir, submission=new_submission_name())
        adopted = later.adopt([known, unaccepted])
        assert "n" not in adopted, "a submission that was not accepted must be made again"
        if not first.outlives:
            assert adopted == {} and later.running() == []
            return
        assert adopted == {"a": jobs["a"]} and later.running() == ["a"]
        outcomes: dict[str, Outcome] = {}
        later.stop(["a"], "no longer needed")
        engine.until(later, lambda: "a" in outcomes, outcomes)
        assert outcomes["a"].kind == "stopped"

    def test_closing_ends_only_members_that_do_not_outlive_the_executor(self, engine: Engine) -> None:
        executor = engine.executor()
        launch = engine.launch("a", "wait")
        kept = new_submission_name()
        job = executor.submit(kept, [launch])["a"]
        engine.until(executor, lambda: engine.has_begun("a") and engine.is_running("a"))
        executor.close()
        executor.close()  # a second close has no effect
        assert engine.is_running("a") == executor.outlives
        if executor.outlives:
            later = engine.executor()
            later.adopt([replace(launch, submission=kept, job=job)])
            self.end(engine, later)

    def test_an_executor_settles(self, engine: Engine) -> None:
        executor = engine.executor()
        executor.submit(new_submission_name(), [engine.launch("a", "finish")])
        engine.until(executor, lambda: executor.settled() and not executor.running())

    @staticmethod
    def end(engine: Engine, executor: Executor) -> None:
        """Stop all members and close the executor."""
        executor.stop(executor.running(), "the test is over")
        engine.until(executor, lambda: not executor.running())
        executor.close()


class QueueContract(ExecutorContract):
    """Tests of an executor with its own queue, which outlives the controllers."""

    def test_a_member_avoids_its_excluded_nodes(self, engine: Engine) -> None:
        for number, kept in enumerate(engine.nodes):
            others = tuple(node for node in engine.nodes if node != kept)
            launch = replace(engine.launch(f"a{number}", "finish"), excluded=others)
            engine.drive(engine.executor(), [launch])
            assert engine.node_of(launch.run) == kept
        assert len(engine.nodes) > 1, "with one node this test would show nothing"

    def test_a_member_stopped_in_the_queue_never_begins(self, engine: Engine) -> None:
        engine.allow_one_at_a_time()
        executor = engine.executor()
        executor.submit(new_submission_name(), [engine.launch("a", "wait")])
        engine.until(executor, lambda: engine.has_begun("a"))
        executor.submit(new_submission_name(), [engine.launch("b", "wait")])
        engine.until(executor, lambda: "b" in executor.queued())
        outcomes: dict[str, Outcome] = {}
        executor.stop(["b"], "no longer needed")
        engine.until(executor, lambda: "b" in outcomes, outcomes)
        assert (outcomes["b"].kind, outcomes["b"].reason) == ("stopped", "no longer needed")
        assert not engine.has_begun("b")
        self.end(engine, executor)

    def test_a_member_without_a_recorded_job_is_found_by_its_submission(self, engine: Engine) -> None:
        first, kept = engine.executor(), new_submission_name()
        launch = engine.launch("a", "wait")
        jobs = first.submit(kept, [launch])
        first.close()
        later = engine.executor()
        assert later.adopt([Launch(launch.run, launch.run_dir, submission=kept)]) == jobs
        engine.until(later, lambda: engine.has_begun("a"))
        self.end(engine, later)
