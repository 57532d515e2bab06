"""Members of a study that run as fast as a script says, and learn along curves that are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.executor.base import Launch, Outcome
from sweeps.run.interruption import ask_to_stop, requested_stop
from sweeps.run.journal import Journal
from sweeps.run.progress import last_metrics
from sweeps.run.spec import RunSpec, make_spec

AXIS, METRIC = "compute/virtual_device_hours", "eval/held_out/pass_rate"
STEPS, EVERY = 40, 2


class KilledError(BaseException):
    """The controller's process was killed here."""


def member(a: float, seed: int = 0, steps: int = STEPS, c_mid: float = 0.25, cost: float = 1.0) -> RunSpec:
    """A run whose pass rate rises from 0.2 to about `a`; `cost` is the compute of its STEPS steps."""
    config = {"a": a, "c_mid": c_mid, "cost": cost, "seed": seed, "budget": {"steps": steps}}
    name = f"a={a:g}" + (f",c_mid={c_mid:g}" if c_mid != 0.25 else "") + (f",cost={cost:g}" if cost != 1.0 else "")
    overrides = (f"a={a}", f"c_mid={c_mid}", f"cost={cost}", f"seed={seed}", f"budget.steps={steps}")
    reference = {**config, "a": 0.0}
    spec = make_spec(config, reference, f"scalerl+{name}", "scalerl")
    return RunSpec(**{**spec.__dict__, "overrides": overrides})


def planned(override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
    """What a planner does."""
    found = []
    for overrides in override_lists:
        values = dict(each.split("=", 1) for each in overrides)
        c_mid, cost = float(values.get("c_mid", 0.25)), float(values.get("cost", 1.0))
        steps = int(values.get("budget.steps", STEPS))
        found.append(member(float(values["a"]), int(values.get("seed", 0)), steps, c_mid, cost))
    return found


def evaluation(spec: RunSpec, step: int) -> dict[str, float]:
    """Of a member at a step: the same whoever runs it, and however often."""
    config: dict[str, Any] = dict(spec.config)
    compute = config["cost"] * step / STEPS
    source = np.random.default_rng((int(spec.run[:8], 16), step))
    rise = 0.0 if compute == 0 else 1 / (1 + (config["c_mid"] / compute) ** 1.8)
    reward = 0.2 + (config["a"] - 0.2) * rise + 0.006 * source.standard_normal()
    return {METRIC: float(np.clip(reward, 0, 1)), f"{METRIC}_se": 0.008, AXIS: compute, "compute/flops": compute * 1e9}


class Runners:
    """An executor: some members at a time, each takes a few steps a poll. `outlives` is False.

    Args:
        slots: members at a time.
        pace: steps of a member at a poll.
        killed_after: polls after which the controller is killed.
        fails: runs that fail, and the step at which they do.
    """

    outlives = False

    def __init__(
        self,
        slots: int = 3,
        pace: Callable[[], int] = lambda: 2,
        killed_after: int | None = None,
        fails: dict[str, int] | None = None,
    ) -> None:
        self.slots, self.pace, self.killed_after, self.fails = slots, pace, killed_after, fails or {}
        self.polls = 0
        self.started: list[str] = []
        self.steps = 0  # of all members together
        self._members: dict[str, tuple[Path, Journal, RunSpec, int]] = {}

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        return min(len(waiting), self.slots - len(self._members))

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        for launch in members:
            assert launch.run not in self._members
            self.started.append(launch.run)
            spec = RunSpec.read(launch.run_dir)
            begin = int(last_metrics(launch.run_dir).get("step", -1))
            journal = Journal(launch.run_dir)
            if begin >= 0:
                journal.resume(begin)
            else:
                journal.header(**spec.header(), device="cpu")
                journal.record("eval", 0, evaluation(spec, 0))
            self._members[launch.run] = (launch.run_dir, journal, spec, max(begin, 0))
        return {launch.run: None for launch in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        return {}

    def poll(self, timeout_s: float) -> list[Outcome]:
        self.polls += 1
        if self.killed_after is not None and self.polls > self.killed_after:
            raise KilledError
        return [found for run in list(self._members) if (found := self._go_on(run)) is not None]

    def _go_on(self, run: str) -> Outcome | None:
        run_dir, journal, spec, step = self._members[run]
        if asked := requested_stop(run_dir):
            journal.close()
            del self._members[run]
            return Outcome(run, 87, "stopped", asked)
        end = min(step + max(0, self.pace()), spec.steps)
        for now in range(step + 1, end + 1):
            self.steps += 1
            journal.record("train", now, {"train/loss": 1.0, AXIS: spec.config["cost"] * now / STEPS})
            if now % EVERY == 0:
                journal.record("eval", now, evaluation(spec, now))
            if self.fails.get(run) == now:
                journal.end(now, "failed", "ValueError: no good")
                journal.close()
                del self._members[run]
                return Outcome(run, 1)
        self._members[run] = (run_dir, journal, spec, end)
        if end < spec.steps:
            return None
        journal.end(end, "finished")
        journal.close()
        del self._members[run]
        return Outcome(run, 0)

    def stop(self, runs: Sequence[str], reason: str) -> None:
        for run in runs:
            if run in self._members:
                ask_to_stop(self._members[run][0], reason)

    def running(self) -> list[str]:
        return list(self._members)

    def queued(self) -> frozenset[str]:
        return frozenset()

    def settled(self) -> bool:
        return True

    def close(self) -> None:
        for _, journal, _, _ in self._members.values():
            journal.close()
        self._members.clear()


class Cluster(Runners):
    """As `Runners`, but with a queue, and its members outlive their controller: the next `Cluster` adopts them.

    Args:
        slots: members at work at a time; the others wait in the queue.
        killed_after: polls after which the controller is killed.
        before: the controller that is gone.
    """

    outlives = True

    def __init__(self, slots: int = 3, killed_after: int | None = None, before: Cluster | None = None) -> None:
        super().__init__(slots, killed_after=killed_after)
        self._jobs = {} if before is None else before._members
        self._unseen: set[str] = set()  # the queue has not been looked at yet

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        return len(waiting)

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        super().submit(submission, members)
        return {launch.run: f"job-{launch.run}" for launch in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        self._members = {run: self._jobs[run] for run in self._jobs if run in {launch.run for launch in members}}
        self._unseen = set(self._members)
        return {run: f"job-{run}" for run in self._members}

    def queued(self) -> frozenset[str]:
        return frozenset({*list(self._members)[self.slots :], *self._unseen})

    def poll(self, timeout_s: float) -> list[Outcome]:
        self._unseen.clear()
        return super().poll(timeout_s)

    def _go_on(self, run: str) -> Outcome | None:
        waits = run in self.queued() and requested_stop(self._members[run][0]) is None
        return None if waits else super()._go_on(run)

    def close(self) -> None:
        """Nothing: jobs go on."""


def uneven(seed: int) -> Callable[[], int]:
    """Members that go on by fits and starts."""
    source = random.Random(seed)
    return lambda: source.choice((0, 1, 1, 2, 3, 7))
