"""The rollout stream: prompts -> generator -> reward -> filter -> advantage -> TrainBatch, one event at a time.

One scheduler for every async mode. It admits groups while the mode allows, lets the generator advance by one
token, rewards what has ended, and hands out a batch when one is due. The modes differ only in their admission
and publish rules; the staleness rule of DESIGN.md is enforced here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_scalerl.clock import Clock, WallClock
from lightning_scalerl.credit import assemble
from lightning_scalerl.generator.base import FinishedRollout, Generator, GroupRequest, StepReport
from lightning_scalerl.prompts import PromptSource
from lightning_scalerl.rollout import Group, Prompt, Rollout, TrainBatch
from lightning_scalerl.task.base import Task


class RewardError(RuntimeError):
    """A verifier raised or returned something that is not a finite number; names the prompt."""


@dataclass(frozen=True)
class Event:
    """Something the scheduler did: `admit`, `decode`, `finish`, `batch` or `publish`, at `time_s`."""

    kind: str
    time_s: float
    report: StepReport | None = None


@dataclass
class _OpenGroup:
    """An admitted group whose rollouts are not all finished."""

    prompt: Prompt
    prompt_tokens: list[int]
    version: int  # of the weights at admission: no token of the group can be older
    rollouts: list[Rollout | None]


@dataclass
class RolloutStream:
    """Produces the TrainBatch of each optimizer step.

    Args:
        prompts: where prompts come from, in what order.
        task: verifies completions.
        encode, decode: tokenizer calls.
        generator: samples.
        choices: by axis.
        groups_per_step: P.
        completions: rollouts a group.
        max_new_tokens: completion limit.
        seed: of sampling.
        clock: time stamps of events; injected.
    """

    prompts: PromptSource
    task: Task
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    generator: Generator
    choices: Mapping[str, Any]
    groups_per_step: int
    completions: int
    max_new_tokens: int
    seed: int
    clock: Clock = field(default_factory=WallClock)
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    completed_steps: int = 0
    _admitted: int = 0
    _open: dict[int, _OpenGroup] = field(default_factory=dict)
    _ready: list[Group] = field(default_factory=list)

    def __iter__(self) -> Iterator[TrainBatch]:
        """Batches without end."""
        while True:
            yield self.next_batch()

    def next_batch(self) -> TrainBatch:
        """Run the scheduler until the next batch is due.

        Raises:
            RewardError: a verifier failed.
        """
        while not self._batch_due():
            self._advance()
        self._ready.sort(key=lambda group: (group.oldest_version, group.admission))
        groups, self._ready = self._ready[: self.groups_per_step], self._ready[self.groups_per_step :]
        self._emit("batch")
        return assemble(groups, self.choices, self.max_new_tokens)

    def step_completed(self, weights: Callable[[], dict[str, Tensor]]) -> None:
        """An optimizer step is done: publish its weights if the mode says so."""
        self.completed_steps += 1
        if self.choices["async_mode"].publishes(self.completed_steps):
            self.generator.publish(weights(), self.completed_steps)
            self._emit("publish")

    def _batch_due(self) -> bool:
        """P groups are ready, and nobody has to be waited for.

        A mode that drains waits for everything in flight. Otherwise a group of version v must train by step v + k:
        what this batch leaves behind has to fit into the steps that remain for it, or the trainer waits for more
        of the oldest. Waiting for all of them always suffices, by the admission rule.
        """
        if len(self._ready) < self.groups_per_step:
            return False
        mode = self.choices["async_mode"]
        if mode.drains:
            return not self._open
        left = sorted(group.oldest_version for group in self._ready)[self.groups_per_step :]
        left = sorted(left + [group.version for group in self._open.values()])
        spare = mode.max_staleness - self.completed_steps
        return all(number < self.groups_per_step * (version + spare) for number, version in enumerate(left))

    def _advance(self) -> None:
        self._admit()
        report = self.generator.step()
        self._emit("decode", report)
        for finished in report.finished:
            self._finish(finished)

    def _admit(self) -> None:
        mode = self.choices["async_mode"]
        while mode.may_admit(self._admitted, self.completed_steps, self.groups_per_step):
            prompt = self.prompts.next()
            tokens = self.encode(prompt.text)
            key = self._admitted
            self._open[key] = _OpenGroup(prompt, tokens, self.generator.version, [None] * self.completions)
            self.generator.submit(
                GroupRequest(key, tuple(tokens), self.completions, random_key=(self.seed, TRAINING_STREAM, key))
            )
            self._admitted += 1
            self._emit("admit")

    def _finish(self, finished: FinishedRollout) -> None:
        group = self._open[finished.key]
        rollout = finished.rollout
        rollout.reward = score(self.task, group.prompt, self.decode(rollout.tokens))
        rollout.correct = self.task.is_correct(rollout.reward)
        group.rollouts[finished.index] = rollout
        self._emit("finish")
        rollouts = [rollout for rollout in group.rollouts if rollout is not None]
        if len(rollouts) == len(group.rollouts):
            del self._open[finished.key]
            self._ready.append(Group(finished.key, group.prompt, group.prompt_tokens, rollouts))

    def _emit(self, kind: str, report: StepReport | None = None) -> None:
        for listener in self.listeners:
            listener(Event(kind, self.clock.now(), report))

    def state_dict(self) -> dict[str, Any]:
        """Counters, groups in flight and groups ready."""
        return {
            "completed_steps": self.completed_steps,
            "admitted": self._admitted,
            "open": {
                key: {
                    "prompt_id": group.prompt.prompt_id,
                    "version": group.version,
                    "rollouts": [None if rollout is None else vars(rollout) for rollout in group.rollouts],
                }
                for key, group in self._open.items()
            },
            "ready": [
                {
                    "admission": group.admission,
                    "prompt_id": group.prompt.prompt_id,
                    "rollouts": [vars(rollout) for rollout in group.rollouts],
                }
                for group in self._ready
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.completed_steps = state["completed_steps"]
        self._admitted = state["admitted"]
        self._open = {}
        for key, entry in state["open"].items():
            prompt = self.prompts.by_id(entry["prompt_id"])
            rollouts = [None if rollout is None else Rollout(**rollout) for rollout in entry["rollouts"]]
            self._open[key] = _OpenGroup(prompt, self.encode(prompt.text), entry["version"], rollouts)
        self._ready = []
        for entry in state["ready"]:
            prompt = self.prompts.by_id(entry["prompt_id"])
            rollouts_done = [Rollout(**rollout) for rollout in entry["rollouts"]]
            self._ready.append(Group(entry["admission"], prompt, self.encode(prompt.text), rollouts_done))


# Streams of random numbers of one seed must never meet: the first number after the seed tells them apart.
TRAINING_STREAM = 0
EVALUATION_STREAM = 1
PROMPT_STREAM = 2


def score(task: Task, prompt: Prompt, completion: str) -> float:
    """A completion's reward.

    Raises:
        RewardError: the verifier raised, or its reward is not a finite number.
    """
    try:
        reward = float(task.reward(prompt, completion))
    except Exception as error:
        raise RewardError(
            f"reward of prompt {prompt.prompt_id!r}: the verifier of {type(task).__name__} raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(reward):
        raise RewardError(
            f"reward of prompt {prompt.prompt_id!r}: the verifier of {type(task).__name__} returned {reward}; "
            "a reward must be a finite number"
        )
    return reward
