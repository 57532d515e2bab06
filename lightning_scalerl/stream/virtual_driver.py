"""Driver of the rollout stream in virtual time: generator and trainer run in parallel on a discrete-event clock.

This process generates and trains in turns. The cost model gives the time at which each event would happen on a cluster,
and the order of events decides which weights sample each token.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, cast

from lightning_scalerl.axes.results import check_bool
from lightning_scalerl.generator.base import COUNTS, FinishedRollout, Generator, StepReport, TurnGenerator, Weights
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.rollout import TrainBatch, packed, unpack_rollouts
from lightning_scalerl.stream.conversations import Conversations
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.events import Event, VirtualClock
from lightning_scalerl.stream.rollout_stream import RolloutKey, RolloutStream
from lightning_scalerl.verify.verification import Verifiers, submit_bundle


class SchedulerStuckError(RuntimeError):
    """Raised when no batch is due and no group is in flight or admissible: a bug in an async mode's rules."""


@dataclass
class VirtualDriver:
    """Provides the TrainBatch of each optimizer step, simulating one event at a time.

    Args:
        stream: the ledger of groups, which decides when a group may be admitted and which batch is due.
        generator: samples one token of every rollout in flight per step.
        weights: returns the trainer's current weights, to publish them.
        cost_model: durations in virtual time.
        verifiers: grade finished rollouts.
        listeners: called with every event.
        conversations: conversations of the rollouts with environments; None without environments.
    """

    # The compute meter counts a probe's time as training, because the generator runs in this process.
    probe_phase: ClassVar[str] = "train"

    stream: RolloutStream
    generator: Generator
    weights: Weights
    cost_model: CostModel
    verifiers: Verifiers
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    conversations: Conversations | None = None
    clock: VirtualClock = field(default_factory=VirtualClock)
    _current_step: StepReport | None = None  # the generator's current step, which ends at `clock.generator_until_s`
    # Pending grades: (virtual time at which the grade arrives, rollout, ticket), the earliest first. The order holds
    # without sorting because every grade takes `grade_s`.
    _grading: deque[tuple[float, RolloutKey, int]] = field(default_factory=deque)
    # Rollouts that wait for an environment: (virtual time of its answer, order of waiting, rollout), as a heap.
    _answering: list[tuple[float, int, RolloutKey]] = field(default_factory=list)
    _turn_count: int = 0  # number of turns so far; orders answers that come at the same time
    # Times of answers from a loaded checkpoint; kept until the generator's state is loaded too.
    _loaded_answers: list[tuple[float, RolloutKey]] | None = None

    def next_batch(self, stop: Callable[[], bool] = lambda: False) -> TrainBatch | None:
        """Advance virtual time until the trainer is free and its next batch is due, and return the batch.

        The state is consistent, and can be saved, between any two events. Before each event `stop` is called. If it
        returns True, this method returns None, and the next call continues from the same state. In virtual time, the
        step on the returned batch ends at `clock.trainer_until_s`.

        Raises:
            RewardError: a verifier failed.
            PoolExhaustedError: every prompt is retired.
        """
        self._resend_turns()
        self._start_generator()
        while self.stream.training or not self.stream.batch_due():
            if stop():
                return None
            self._next_event()
            self._start_generator()
        batch = self.stream.take()
        seconds = self.cost_model.train_step_s(batch, self.stream.choices.passes.relative)
        self.clock.trainer_until_s = self.clock.now_s + seconds
        self.clock.trainer_busy_s += seconds
        self._emit("batch")
        return batch

    def quiet(self) -> AbstractContextManager[None]:
        """Do nothing: between two calls of `next_batch` the stream does not change."""
        return nullcontext()

    def close(self) -> None:
        """Release the resources of the generator and the verifiers."""
        self.generator.close()
        self.verifiers.close()
        if self.conversations is not None:
            self.conversations.close()

    @property
    def may_probe(self) -> bool:
        """Always True: a probe, which compares the generator's log-probabilities with the trainer's, takes no virtual
        time.
        """
        return True

    def probing(self) -> AbstractContextManager[None]:
        """Do nothing: a probe takes no virtual time."""
        return nullcontext()

    def _next_event(self) -> None:
        """Handle the next event: a grade, an answer, the end of a training step, or the generator's next token."""
        stream, clock = self.stream, self.clock
        # At equal times, grades come first, then answers, then the end of a training step, then the generator.
        step_ends = [clock.trainer_until_s] if stream.training else []
        step_ends += [clock.generator_until_s] if self._current_step is not None else []
        answers = [self._answering[0][0]] if self._answering else []
        if self._grading and self._grading[0][0] <= min(step_ends + answers, default=self._grading[0][0]):
            clock.now_s = max(clock.now_s, self._grading[0][0])
            self._take_grade()
        elif self._answering and self._answering[0][0] <= min(step_ends, default=self._answering[0][0]):
            clock.now_s = max(clock.now_s, self._answering[0][0])
            self._continue_rollouts()
        elif stream.training and (self._current_step is None or clock.trainer_until_s <= clock.generator_until_s):
            clock.now_s = clock.trainer_until_s
            stream.training = False
            self._emit("trained")
            self._publish()
        elif self._current_step is not None:
            clock.now_s = clock.generator_until_s
            report, self._current_step = self._current_step, None
            # Submit all rollouts before waiting for a grade, so that they are graded in parallel. If grades take no
            # virtual time, wait for them now; otherwise they arrive while sampling continues.
            self._converse(report)
            for finished in report.finished:
                self._grade(stream.ended(finished), clock.now_s + self.cost_model.grade_s)
            while self._grading and self._grading[0][0] <= clock.now_s:
                self._take_grade()
        else:
            raise SchedulerStuckError(
                f"async_mode: {type(stream.choices.async_mode).__name__} neither trains nor generates after "
                f"{stream.completed_steps} steps and {stream.admitted} admissions"
            )

    def _converse(self, report: StepReport) -> None:
        """Send finished turns to their environments, and conclude the conversations of finished rollouts."""
        if self.conversations is None:
            return
        for waiting in report.waiting:
            due_s = self.clock.now_s + self.conversations.start(waiting)
            heapq.heappush(self._answering, (due_s, self._turn_count, (waiting.key, waiting.index)))
            self._turn_count += 1
        for finished in report.finished:
            self.conversations.store_record(finished)
        # Answers that take no virtual time come before the generator's next step.
        while self._answering and self._answering[0][0] <= self.clock.now_s:
            self._continue_rollouts()

    def _continue_rollouts(self) -> None:
        """Wait for the environments whose answers are due first in virtual time, and continue their rollouts."""
        assert self.conversations is not None
        due_s, rollout_keys = self._answering[0][0], []
        while self._answering and self._answering[0][0] == due_s:
            rollout_keys.append(heapq.heappop(self._answering)[2])
        for rollout_key, reply in self.conversations.replies(rollout_keys).items():
            reply.apply(cast(TurnGenerator, self.generator), rollout_key)
        self._emit("answer")

    def _resend_turns(self) -> None:
        """After a checkpoint was loaded, send the turns of waiting rollouts to their environments again."""
        due, self._loaded_answers = self._loaded_answers, None
        if due is None or self.conversations is None:
            return
        waiting = {
            (waiting_rollout.key, waiting_rollout.index): waiting_rollout
            for waiting_rollout in cast(TurnGenerator, self.generator).waiting
        }
        for due_s, rollout_key in due:
            self.conversations.start(waiting.pop(rollout_key))
            heapq.heappush(self._answering, (due_s, self._turn_count, rollout_key))
            self._turn_count += 1
        # The remaining rollouts ended their turn in the generator's current step: put them back into its report.
        if waiting:
            assert self._current_step is not None
            self._current_step = replace(self._current_step, waiting=tuple(waiting.values()))

    def _grade(self, bundle: Sequence[tuple[RolloutKey, Sample]], due_s: float) -> None:
        """Submit the samples of `RolloutStream.ended` for grading; the grades arrive at virtual time `due_s`."""
        if bundle:
            tickets = submit_bundle(self.verifiers, [sample for _, sample in bundle])
            self._grading += [
                (due_s, rollout_key, ticket) for (rollout_key, _), ticket in zip(bundle, tickets, strict=True)
            ]

    def _take_grade(self) -> None:
        key = self._grading[0][1][0]
        # All grades of a group that is graded in one call are one event. A checkpoint between them would let a resumed
        # run grade the remaining rollouts without the others.
        count = sum(rollout_key[0] == key for _, rollout_key, _ in self._grading) if self.stream.by_group(key) else 1
        for _ in range(count):
            _, rollout_key, ticket = self._grading.popleft()
            self.stream.graded(rollout_key, self.verifiers.wait(ticket))
            self._emit("finish")

    def _publish(self) -> None:
        """Publish the weights, if the async mode does so after this step. Virtual generators pause for `publish_s`."""
        mode, version = self.stream.choices.async_mode, self.stream.completed_steps
        if not check_bool(mode, "publishes", mode.publishes(version)):
            return
        # The generator samples its current step with the old weights, so the new ones arrive at the end of that step.
        arrival_s = self.clock.now_s if self._current_step is None else self.clock.generator_until_s
        self.clock.generator_from_s = arrival_s + self.cost_model.publish_s
        self.generator.publish(self.weights(), version, mode.recompute_kv)
        self._emit("publish")

    def _start_generator(self) -> None:
        """If the generator is idle, admit new groups and start its next step: one token per rollout in flight."""
        if self._current_step is not None:
            return
        # Admit only groups that can start at once: waiting for a slot would only make them staler.
        while self.generator.free_slots and self.stream.may_admit():
            request = self.stream.admit(self.generator.version)
            self.generator.submit(request if self.conversations is None else self.conversations.request(request))
            self._emit("admit")
        if not self.generator.in_flight:
            return
        # If all rollouts wait for environments, a step would take no virtual time and the loop would never end.
        if self.conversations is not None and cast(TurnGenerator, self.generator).idle:
            return
        # The step is computed now, but its rollouts count as finished at `generator_until_s`.
        self._current_step = self.generator.step()
        seconds = self.cost_model.generator_step_s(self._current_step)
        self.clock.generator_until_s = max(self.clock.now_s, self.clock.generator_from_s) + seconds
        self.clock.generator_busy_s += seconds
        self.clock.generator_step_s = seconds
        self._emit("decode", self._current_step)

    def _emit(self, kind: str, report: StepReport | None = None) -> None:
        for listener in self.listeners:
            listener(Event(kind, self.clock.now_s, report))

    # --- metrics and state -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return the virtual device-hours up to the end of the last step, and the idle shares of trainer and generator.

        The trainer's share covers the time up to the end of that step. The generator's share covers the time up to its
        beginning, because the generator's work during the step has not been simulated yet. Time in which weights arrive
        counts as idle. Colocated devices are idle when they neither train nor generate.
        """
        clock = self.clock
        end_s = max(clock.now_s, clock.trainer_until_s)
        unfinished_s = min(clock.generator_step_s, max(0.0, clock.generator_until_s - clock.now_s))
        generated_s = clock.generator_busy_s - unfinished_s
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
        """Return the clock, the generator's current step, and the times at which pending grades and answers arrive."""
        state = self._state()
        if self.conversations is not None:
            due = [(due_s, list(rollout_key)) for due_s, _, rollout_key in sorted(self._answering)]
            if self._loaded_answers is not None:
                due = [(due_s, list(rollout_key)) for due_s, rollout_key in self._loaded_answers]
            state |= {"conversations": self.conversations.state_dict(), "answering": due}
        return state

    def _state(self) -> dict[str, Any]:
        grading = [(due_s, list(rollout_key)) for due_s, rollout_key, _ in self._grading]
        if self._current_step is None:
            return {"clock": asdict(self.clock), "decoded": None, "grading": grading}
        finished = self._current_step.finished
        decoded = {
            # Waiting rollouts are left out, because they are in the generator's state.
            **{name: getattr(self._current_step, name) for name in (*COUNTS, "lost_tokens")},
            "finished": [(done.key, done.index) for done in finished],
            "rollouts": packed([done.rollout for done in finished]),
        }
        return {"clock": asdict(self.clock), "decoded": decoded, "grading": grading}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state exactly as it was when `state_dict` was called. Load the state of `stream` first."""
        self.clock = VirtualClock(**state["clock"])
        self.verifiers.forget(ticket for _, _, ticket in self._grading)
        self._grading.clear()
        due = {(key, index): due_s for due_s, (key, index) in state.get("grading", ())}
        bundles = {bundle[0][0]: bundle for bundle in self.stream.bundles()}
        for rollout_key in [rollout_key for rollout_key in due if rollout_key in bundles]:
            self._grade(bundles[rollout_key], due[rollout_key])
        self._current_step = None
        self._answering.clear()
        if self.conversations is not None:
            self.conversations.load_state_dict(state.get("conversations", ()))
            self._loaded_answers = [(due_s, (key, index)) for due_s, (key, index) in state.get("answering", ())]
        if state["decoded"] is not None:
            entry = dict(state["decoded"])
            rollouts = unpack_rollouts(entry.pop("rollouts"))
            rollout_keys = zip(entry.pop("finished"), rollouts, strict=True)
            finished = [FinishedRollout(key, index, rollout) for (key, index), rollout in rollout_keys]
            self._current_step = StepReport(finished=finished, **entry)
