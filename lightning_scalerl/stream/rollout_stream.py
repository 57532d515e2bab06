"""The rollout stream: prompts -> generator -> length control -> reward -> TrainBatch, one event at a time.

One scheduler for every async mode, on a discrete-event clock: generator and trainer are two parties that work
side by side in virtual time (`cost_model`), although this process does one thing after the other. The modes
differ only in their admission and publish rules; the staleness rule of DESIGN.md is enforced here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lightning_scalerl.choices import Choices
from lightning_scalerl.generator.base import FinishedRollout, Generator, GroupRequest, StepReport
from lightning_scalerl.rollout import Group, Prompt, Rollout, TrainBatch
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.credit import assemble
from lightning_scalerl.stream.events import Event, VirtualClock
from lightning_scalerl.stream.prompts import PromptSource
from lightning_scalerl.stream.random_streams import INTERRUPTION_STREAM, TRAINING_STREAM
from lightning_scalerl.task.base import Task, score


class SchedulerStuckError(RuntimeError):
    """Nothing is due, nothing is in flight and nothing may start: a bug in an async mode's rules."""


@dataclass
class _OpenGroup:
    """An admitted group whose rollouts are not all finished."""

    prompt: Prompt
    prompt_tokens: list[int]
    version: int  # of the weights at admission: no token of the group can be older
    rollouts: list[Rollout | None]
    history: tuple[float, ...]  # pass rates of the prompt's earlier groups, as known at admission


@dataclass
class RolloutStream:
    """Produces the TrainBatch of each optimizer step.

    Args:
        prompts: where prompts come from, in what order.
        task: verifies completions.
        encode, decode: tokenizer calls.
        generator: samples.
        choices: the run's.
        weights: the trainer's, as they are now.
        cost_model: how long things take in virtual time.
        groups_per_step: P.
        completions: rollouts a group, on average.
        max_new_tokens: completion limit.
        seed: of sampling.
        listeners: called with every event.
    """

    prompts: PromptSource
    task: Task
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    generator: Generator
    choices: Choices
    weights: Callable[[], dict[str, Tensor]]
    cost_model: CostModel
    groups_per_step: int
    completions: int
    max_new_tokens: int
    seed: int
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    completed_steps: int = 0
    clock: VirtualClock = field(default_factory=VirtualClock)
    admitted: int = 0
    _training: bool = False  # in virtual time a batch is at the trainer
    _decoded: StepReport | None = None  # what the generator has in hand at `generator_until_s`
    _open: dict[int, _OpenGroup] = field(default_factory=dict)
    _ready: list[Group] = field(default_factory=list)

    def next_batch(self, stop: Callable[[], bool] = lambda: False) -> TrainBatch | None:
        """Run both parties until the trainer is free and its next batch is due, and hand that out.

        Between any two events everything is consistent and can be saved. Asked to `stop` there, it returns None; the
        next call goes on as if nothing had been.

        Raises:
            RewardError: a verifier failed.
            PoolExhaustedError: every prompt is retired.
        """
        self._start_generator()
        while self._training or not self._batch_due():
            if stop():
                return None
            self._next_event()
            self._start_generator()
        self._ready.sort(key=lambda group: (group.oldest_version, group.admission))
        groups, self._ready = self._ready[: self.groups_per_step], self._ready[self.groups_per_step :]
        batch = assemble(groups, self.choices, self.max_new_tokens)
        self._training = True
        seconds = self.cost_model.train_step_s(batch)
        self.clock.trainer_until_s = self.clock.now_s + seconds
        self.clock.trainer_busy_s += seconds
        self._emit("batch")
        return batch

    def step_completed(self) -> None:
        """The optimizer step on the last batch is computed; in virtual time it ends at `trainer_until_s`."""
        self.completed_steps += 1

    # --- events ------------------------------------------------------------------------------------------

    def _next_event(self) -> None:
        """Whichever comes first: the trainer is done, or the generator has its next token."""
        if self._training and (self._decoded is None or self.clock.trainer_until_s <= self.clock.generator_until_s):
            self.clock.now_s = self.clock.trainer_until_s
            self._training = False
            self._emit("trained")
            self._publish()
        elif self._decoded is not None:
            self.clock.now_s = self.clock.generator_until_s
            report, self._decoded = self._decoded, None
            for finished in report.finished:
                self._finish(finished)
        else:
            raise SchedulerStuckError(
                f"async_mode: {type(self.choices.async_mode).__name__} neither trains nor generates after "
                f"{self.completed_steps} steps and {self.admitted} admissions"
            )

    def _publish(self) -> None:
        mode = self.choices.async_mode
        if not mode.publishes(self.completed_steps):
            return
        # A token under way was sampled already; the swap comes behind it.
        arrival_s = self.clock.now_s if self._decoded is None else self.clock.generator_until_s
        self.clock.generator_from_s = arrival_s + self.cost_model.publish_s
        self.generator.publish(self.weights(), self.completed_steps, mode.recompute_kv)
        self._emit("publish")

    def _start_generator(self) -> None:
        """If it is idle, admit what may be admitted and begin the next token of everything in flight."""
        if self._decoded is not None:
            return
        self._admit()
        if not self.generator.in_flight:
            return
        self._decoded = self.generator.step()
        seconds = self.cost_model.generator_step_s(self._decoded)
        self.clock.generator_until_s = max(self.clock.now_s, self.clock.generator_from_s) + seconds
        self.clock.generator_busy_s += seconds
        self.clock.generator_step_s = seconds
        self._emit("decode", self._decoded)

    def _admit(self) -> None:
        """Open groups while the mode allows it and a slot is free: a group that waits for one only grows old."""
        mode, length_control = self.choices.async_mode, self.choices.length_control
        done = self.completed_steps - self._training
        while self.generator.free_slots and mode.may_admit(self.admitted, done, self.groups_per_step):
            if self.prompts.exhausted and (self._open or len(self._ready) >= self.groups_per_step):
                break  # what was sampled can still be trained
            prompt = self.prompts.next()
            tokens = self.encode(prompt.text)
            key = self.admitted
            history = tuple(self.prompts.history(prompt.prompt_id))
            count = self.choices.allocation.completions(self.completions, history)
            self._open[key] = _OpenGroup(prompt, tokens, self.generator.version, [None] * count, history)
            self.generator.submit(
                GroupRequest(
                    key=key,
                    prompt_tokens=tuple(tokens),
                    completions=count,
                    random_key=(self.seed, TRAINING_STREAM, key),
                    interrupt_at=length_control.interrupt_at(count, (self.seed, INTERRUPTION_STREAM, key)),
                )
            )
            self.admitted += 1
            self._emit("admit")

    def _finish(self, finished: FinishedRollout) -> None:
        group = self._open[finished.key]
        rollout = finished.rollout
        reward = score(self.task, group.prompt, self.decode(rollout.tokens))
        rollout.correct = self.task.is_correct(reward)
        rollout.reward = self.choices.length_control.reward(reward, rollout.correct, len(rollout.tokens))
        for own in self.choices.own.values():
            rollout.reward = own.adjust_reward(rollout.reward, rollout)
        group.rollouts[finished.index] = rollout
        rollouts = [rollout for rollout in group.rollouts if rollout is not None]
        if len(rollouts) == len(group.rollouts):
            del self._open[finished.key]
            complete = Group(finished.key, group.prompt, group.prompt_tokens, rollouts, group.history)
            self._ready.append(complete)
            self.prompts.resolved(group.prompt.prompt_id, complete.pass_rate)
        self._emit("finish")

    def _batch_due(self) -> bool:
        """P groups are ready, and nobody has to be waited for.

        A mode that drains waits for everything in flight. Otherwise a group of version v must train by step v + k:
        what this batch leaves behind has to fit into the steps that remain for it, or the trainer waits for more
        of the oldest. Waiting for all of them always suffices, by the admission rule.
        """
        if len(self._ready) < self.groups_per_step:
            return False
        mode = self.choices.async_mode
        if mode.drains:
            done = self.completed_steps - self._training
            more = mode.may_admit(self.admitted, done, self.groups_per_step) and not self.prompts.exhausted
            return not self._open and not more
        left = sorted(group.oldest_version for group in self._ready)[self.groups_per_step :]
        left = sorted(left + [group.version for group in self._open.values()])
        spare = mode.max_staleness - self.completed_steps
        return all(number < self.groups_per_step * (version + spare) for number, version in enumerate(left))

    def _emit(self, kind: str, report: StepReport | None = None) -> None:
        for listener in self.listeners:
            listener(Event(kind, self.clock.now_s, report))

    # --- what is measured and kept -----------------------------------------------------------------------

    def virtual_metrics(self) -> dict[str, float]:
        """The virtual compute axis at the end of the last step, and the share of time each party was idle.

        The trainer's share is up to the end of that step, the generator's up to its beginning: what it did
        meanwhile has not been computed yet. Time in which weights arrive counts as idle. Devices that do both in turns
        are idle when they do neither.
        """
        clock = self.clock
        end_s = max(clock.now_s, clock.trainer_until_s)
        to_come_s = min(clock.generator_step_s, max(0.0, clock.generator_until_s - clock.now_s))
        generated_s = clock.generator_busy_s - to_come_s
        trained = clock.trainer_busy_s / end_s if end_s else 1.0
        generated = generated_s / clock.now_s if clock.now_s else 1.0
        if self.cost_model.colocated and end_s:
            trained = generated = (clock.trainer_busy_s + generated_s) / end_s
        return {
            "compute/virtual_device_hours": self.cost_model.devices * end_s / 3600.0,
            "virtual/trainer_idle": 1.0 - trained,
            "virtual/generator_idle": 1.0 - generated,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters, the clock, groups in flight and groups ready."""
        return {
            "completed_steps": self.completed_steps,
            "admitted": self.admitted,
            "clock": asdict(self.clock),
            "training": self._training,
            "decoded": None if self._decoded is None else asdict(self._decoded),
            "open": {
                key: {
                    "prompt_id": group.prompt.prompt_id,
                    "version": group.version,
                    "history": list(group.history),
                    "rollouts": [None if rollout is None else asdict(rollout) for rollout in group.rollouts],
                }
                for key, group in self._open.items()
            },
            "ready": [
                {
                    "admission": group.admission,
                    "history": list(group.history),
                    "prompt_id": group.prompt.prompt_id,
                    "rollouts": [asdict(rollout) for rollout in group.rollouts],
                }
                for group in self._ready
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self.completed_steps = state["completed_steps"]
        self.admitted = state["admitted"]
        self.clock = VirtualClock(**state["clock"])
        self._training = state["training"]
        self._decoded = None if state["decoded"] is None else _report_from(state["decoded"])
        self._open = {}
        for key, entry in state["open"].items():
            prompt = self.prompts.by_id(entry["prompt_id"])
            rollouts = [None if rollout is None else Rollout(**rollout) for rollout in entry["rollouts"]]
            self._open[key] = _OpenGroup(
                prompt, self.encode(prompt.text), entry["version"], rollouts, tuple(entry["history"])
            )
        self._ready = []
        for entry in state["ready"]:
            prompt = self.prompts.by_id(entry["prompt_id"])
            rollouts_done = [Rollout(**rollout) for rollout in entry["rollouts"]]
            history = tuple(entry["history"])
            self._ready.append(Group(entry["admission"], prompt, self.encode(prompt.text), rollouts_done, history))


def _report_from(state: dict[str, Any]) -> StepReport:
    finished = [
        FinishedRollout(entry["key"], entry["index"], Rollout(**entry["rollout"])) for entry in state["finished"]
    ]
    return StepReport(**{**state, "finished": finished})
