"""Driver of the rollout stream in real time: generators run in parallel with the trainer.

While the trainer takes its step, a background thread collects finished rollouts, submits them for grading and admits
new groups as the async mode allows. Both drivers share one ledger with all the rules (`RolloutStream`); only the source
of time differs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from lightning_scalerl.axes.results import check_bool
from lightning_scalerl.generator.base import StepReport, Weights
from lightning_scalerl.generator.fleet.fleet import Fleet, Work
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.stream.conversations import Conversations
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.rollout_stream import RolloutKey, RolloutStream
from lightning_scalerl.verify.verification import Verifiers, submit_bundle
from sweeps.run.activity import activity

# Poll interval in seconds: each wait checks this often whether to stop.
POLL_S = 0.05


@dataclass
class _Times:
    """Running totals in seconds: wall clock (`passed`), work of the trainer, and work of all generators together."""

    passed: float = 0.0
    trained: float = 0.0
    generated: float = 0.0


class LiveDriver:
    """Provides the TrainBatch of each optimizer step as soon as it is due.

    Args:
        stream: the ledger of groups, which decides when a group may be admitted and which batch is due.
        generator: the generator processes, which sample without being called.
        weights: returns the trainer's current weights, to publish them.
        verifiers: grade finished rollouts while generation continues.
        listeners: called with every event.
        probe_every: optimizer steps between two probes of the generators' log-probabilities.
        conversations: conversations of the rollouts with environments; None without environments.
    """

    # The compute meter counts a probe's time as idle, because the trainer waits for other processes.
    probe_phase: ClassVar[str] = "idle"

    def __init__(
        self,
        stream: RolloutStream,
        generator: Fleet,
        weights: Weights,
        verifiers: Verifiers,
        listeners: list[Callable[[Event], None]] | None = None,
        probe_every: int = 8,
        conversations: Conversations | None = None,
    ) -> None:
        self.stream, self.generator, self.weights = stream, generator, weights
        self.verifiers = verifiers
        self._conversations = conversations
        self._may_have_restored = True  # a loaded checkpoint may have waiting rollouts that no report lists
        self._grading: dict[int, RolloutKey] = {}  # rollouts that are being graded, by ticket
        self.listeners = listeners or []
        self._probe_every = probe_every
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._times = _Times()
        self._since: float | None = None  # the time up to which `_times` are counted; None before the first count
        self._counted_busy_s = 0.0
        # Rates of engines and trainer cover the time since the first batch of this process, not the whole run.
        self._passed_s = 0.0
        self._work_at_start = [Work() for _ in generator.work]
        self._trained_tokens = 0
        activity.reports["engines"] = generator.engine_states  # for `scalerl status`

    def next_batch(self, stop: Callable[[], bool] = lambda: False) -> TrainBatch | None:
        """Wait until a batch is due and return it. The call also marks the step on the previous batch as finished.

        Returns None as soon as `stop` returns True; the next call continues to wait.

        Raises:
            RewardError: a verifier failed.
            PoolExhaustedError: every prompt is retired.
            GeneratorLostError: a generator cannot be kept alive.
        """
        with self._lock:
            self._count(trained=self.stream.training)
            if self.stream.training:
                self.stream.training = False
                self._publish()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="generators", daemon=True)
            self._thread.start()
        while True:
            # Clear before the check: a change after the check then ends the wait below at once.
            self._changed.clear()
            with self._lock:
                if self._error is not None:
                    raise self._error
                if self.stream.batch_due():
                    self._count(trained=False)
                    batch = self.stream.take()
                    self._trained_tokens += int(batch.lengths.sum())
                    return batch
            if stop():
                return None
            self._changed.wait(POLL_S)

    def _publish(self) -> None:
        mode, version = self.stream.choices.async_mode, self.stream.completed_steps
        if check_bool(mode, "publishes", mode.publishes(version)):
            self.generator.publish(self.weights(), version, mode.recompute_kv)

    def _run(self) -> None:
        """Loop of the background thread, until the driver is closed or an error occurs."""
        try:
            while not self._closing.is_set():
                with self._lock:
                    self._poll()
                # Wait without the lock, so that the trainer can publish or take a batch meanwhile.
                self.generator.wait(POLL_S)
        except BaseException as error:
            # An exception would be lost in this thread: `next_batch` raises it in the trainer's thread.
            self._error = error
            self._changed.set()

    def _poll(self) -> None:
        """Collect finished and graded rollouts, then admit groups into the free slots."""
        report = self.generator.collect()
        for listener in self.listeners:
            listener(Event("decode", time.monotonic(), report))
        if self._conversations is not None:
            self._converse(self._conversations, report)
        for finished in report.finished:
            self._grade(self.stream.ended(finished))
        graded = self.verifiers.done() if self._grading else ()
        for ticket, outcome in graded:
            # Grades requested before a checkpoint was loaded are ignored.
            if ticket in self._grading:
                self.stream.graded(self._grading.pop(ticket), outcome)
        # Admit only groups that can start at once: waiting for a slot would only make them staler.
        while self.generator.free_slots and self.stream.may_admit():
            request = self.stream.admit(self.generator.version)
            self.generator.submit(request if self._conversations is None else self._conversations.request(request))
        if graded:
            self._changed.set()

    def _converse(self, conversations: Conversations, report: StepReport) -> None:
        """Send finished turns to their environments, and continue the rollouts whose environment has answered."""
        for waiting in self.generator.waiting if self._may_have_restored else report.waiting:
            conversations.start(waiting)
        self._may_have_restored = False
        for rollout_key, reply in conversations.ready().items():
            try:
                reply.apply(self.generator, rollout_key)
            except KeyError:  # the rollout's engine was lost meanwhile, and the rollout is sampled again
                conversations.leave(rollout_key)
        for finished in report.finished:
            conversations.store_record(finished)

    def _grade(self, bundle: Sequence[tuple[RolloutKey, Sample]]) -> None:
        """Submit the samples of `RolloutStream.ended` for grading; do nothing if there are none."""
        if bundle:
            tickets = submit_bundle(self.verifiers, [sample for _, sample in bundle])
            self._grading |= {ticket: rollout_key for (rollout_key, _), ticket in zip(bundle, tickets, strict=True)}

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Pause the stream during a checkpoint or an evaluation. The pause counts neither as work nor as waiting."""
        with self._lock:
            self._count(trained=self.stream.training)
            try:
                yield
            finally:
                self._since = time.monotonic()

    def close(self) -> None:
        """Stop the thread and the generator processes. Rollouts in flight can still be saved afterwards."""
        self._closing.set()
        activity.reports.pop("engines", None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.generator.close()
        self.verifiers.close()
        if self._conversations is not None:
            self._conversations.close()

    @property
    def may_probe(self) -> bool:
        """True every `probe_every` steps: the generators' log-probabilities are then compared with the trainer's."""
        return self.stream.completed_steps % self._probe_every == 0

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Count the trainer as idle in the `with` block, while the generators are probed."""
        with self._lock:
            self._count(trained=self.stream.training)
        try:
            yield
        finally:
            with self._lock:
                self._count(trained=False)

    # --- metrics and state -------------------------------------------------------------------------------

    def _count(self, trained: bool) -> None:
        """Count the time since the last call: as work of the trainer if `trained`, else as waiting."""
        now = time.monotonic()
        passed = 0.0 if self._since is None else now - self._since
        if self._since is None:
            self._work_at_start = [replace(work) for work in self.generator.work]
        self._since = now
        self._passed_s += passed
        self._times.passed += passed
        self._times.trained += passed * trained
        self._times.generated += self.generator.busy_s - self._counted_busy_s
        self._counted_busy_s = self.generator.busy_s

    def metrics(self) -> dict[str, float]:
        """Return idle shares and token rates of trainer and engines, and the seconds of the last publish."""
        with self._lock:
            self._count(trained=self.stream.training)
            times, generators = self._times, self.generator.generators
            counted_s = max(self._passed_s, 1e-9)
            engines = {}
            for number, (work, before) in enumerate(zip(self.generator.work, self._work_at_start, strict=True)):
                engines[f"live/engine{number}_idle"] = min(1.0, max(0.0, 1 - (work.busy_s - before.busy_s) / counted_s))
                engines[f"live/engine{number}_tokens_s"] = (work.tokens - before.tokens) / counted_s
        passed = max(times.passed, 1e-9)
        return {
            "live/trainer_idle": max(0.0, 1.0 - times.trained / passed),
            "live/trainer_tokens_s": self._trained_tokens / counted_s,
            "live/generator_idle": max(0.0, 1.0 - times.generated / (passed * max(1, generators))),
            "live/publish_s": self.generator.publish_s,
            "live/generators_lost": float(self.generator.lost),
            **engines,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the running totals and conversations. Rollouts in flight are part of the generators' state."""
        conversations = {} if self._conversations is None else {"conversations": self._conversations.state_dict()}
        return {**asdict(self._times), **conversations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the running totals, and submit the stream's ungraded rollouts for grading again."""
        state = dict(state)
        conversations = state.pop("conversations", ())
        if self._conversations is not None:
            self._conversations.load_state_dict(conversations)
            self._may_have_restored = True
        self._times = _Times(**state)
        self.verifiers.forget(self._grading)
        self._grading = {}
        for bundle in self.stream.bundles():
            self._grade(bundle)
