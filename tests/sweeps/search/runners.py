"""Simulated executors for tests of races and searches: members advance at a scripted pace along known curves."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
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
    """Raised in place of a kill of the controller's process."""


def member(
    a: float, seed: int = 0, steps: int = STEPS, c_mid: float = 0.25, cost: float = 1.0, start: float = 0.0
) -> RunSpec:
    """Return a run whose pass rate rises from 0.2 to about `a`.

    Args:
        cost: compute of its first STEPS steps.
        start: compute that the first step takes in addition.
    """
    config: dict[str, Any] = {"a": a, "c_mid": c_mid, "cost": cost, "seed": seed, "budget": {"steps": steps}}
    config |= {"start": start} if start else {}
    name = f"a={a:g}" + (f",c_mid={c_mid:g}" if c_mid != 0.25 else "") + (f",cost={cost:g}" if cost != 1.0 else "")
    overrides = (f"a={a}", f"c_mid={c_mid}", f"cost={cost}", f"seed={seed}", f"budget.steps={steps}")
    reference = {**config, "a": 0.0}
    spec = make_spec(config, reference, f"scalerl+{name}", "scalerl")
    return RunSpec(**{**spec.__dict__, "overrides": overrides})


def planned(override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
    """Plan members from overrides, like a planner."""
    specs = []
    for overrides in override_lists:
        values = dict(override.split("=", 1) for override in overrides)
        c_mid, cost = float(values.get("c_mid", 0.25)), float(values.get("cost", 1.0))
        steps = int(values.get("budget.steps", STEPS))
        specs.append(member(float(values["a"]), int(values.get("seed", 0)), steps, c_mid, cost))
    return specs


def _compute(config: Mapping[str, Any], step: int) -> float:
    return config["cost"] * step / STEPS + (config.get("start", 0.0) if step else 0.0)


def evaluation(spec: RunSpec, step: int) -> dict[str, float]:
    """Return the metrics of a member's evaluation at a step. They depend only on the member and the step."""
    config: dict[str, Any] = dict(spec.config)
    compute = _compute(config, step)
    source = np.random.default_rng((int(spec.run[:8], 16), step))
    rise = 0.0 if compute == 0 else 1 / (1 + (config["c_mid"] / compute) ** 1.8)
    reward = 0.2 + (config["a"] - 0.2) * rise + 0.006 * source.standard_normal()
    return {METRIC: float(np.clip(reward, 0, 1)), f"{METRIC}_se": 0.008, AXIS: compute, "compute/flops": compute * 1e9}


class Runners:
    """An executor that runs a few members at a time, each some steps per poll. They end with their controller.

    Args:
        slots: number of members that run at the same time.
        pace: returns a member's number of steps in one poll.
        killed_after: number of polls after which the controller is killed; None for never.
        fails: step at which a run fails, by run.
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
        self.steps = 0  # sum over all members
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
        return [found for run in list(self._members) if (found := self._advance(run)) is not None]

    def _advance(self, run: str) -> Outcome | None:
        run_dir, journal, spec, step = self._members[run]
        if asked := requested_stop(run_dir):
            journal.close()
            del self._members[run]
            return Outcome(run, 87, "stopped", asked)
        end = min(step + max(0, self.pace()), spec.steps)
        for now in range(step + 1, end + 1):
            self.steps += 1
            journal.record("train", now, {"train/loss": 1.0, AXIS: _compute(spec.config, now)})
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
    """Like `Runners`, but with a queue. Members outlive their controller and are adopted by the next `Cluster`.

    Args:
        slots: number of members that run at the same time; the others wait in the queue.
        killed_after: number of polls after which the controller is killed; None for never.
        before: the killed controller whose members are adopted.
    """

    outlives = True

    def __init__(self, slots: int = 3, killed_after: int | None = None, before: Cluster | None = None) -> None:
        super().__init__(slots, killed_after=killed_after)
        self._jobs = {} if before is None else before._members
        self._unseen: set[str] = set()  # adopted members whose state in the queue has not been polled yet

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

    def _advance(self, run: str) -> Outcome | None:
        waits = run in self.queued() and requested_stop(self._members[run][0]) is None
        return None if waits else super()._advance(run)

    def close(self) -> None:
        """Do nothing: jobs continue without the controller."""


def uneven(seed: int) -> Callable[[], int]:
    """Return a pace that varies at random between 0 and 7 steps per poll."""
    source = random.Random(seed)
    return lambda: source.choice((0, 1, 1, 2, 3, 7))
