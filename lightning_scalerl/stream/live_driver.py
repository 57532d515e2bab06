"""Driver of the rollout stream in real time: generators run in parallel with the trainer.

While the trainer takes its step, a thread of this process hears what the generators have finished, has it rewarded, and
admits what the async mode's rules allow. The rules are the ledger's (`RolloutStream`), those of virtual time to the
letter; what differs is who says when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from lightning_scalerl.generator.channel import WeightChannel
from lightning_scalerl.generator.fleet.fleet import Fleet, Work
from lightning_scalerl.rollout import TrainBatch
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.rollout_stream import Place, RolloutStream
from lightning_scalerl.verify.grade import Sample
from lightning_scalerl.verify.verification import Verifiers, submit_bundle
from sweeps.run.activity import activity

# Interval at which a wait checks whether to stop.
LOOK_S = 0.05


@dataclass
class _Times:
    """Seconds of wall clock, of the trainer's work, and of all generators' work together."""

    passed: float = 0.0
    trained: float = 0.0
    generated: float = 0.0


class LiveDriver:
    """Hands out the TrainBatch of each optimizer step as soon as it is due.

    Args:
        stream: the ledger of groups: what may be admitted, and which batch is due.
        generator: the generator processes, which sample by themselves.
        channel: publishes the trainer's weights to them.
        verifiers: grade rollouts that have ended, while generation goes on.
        listeners: called with every event.
        probe_every: optimizer steps between two probes of the generators' log-probabilities.
    """

    # Phase of the compute meter for a probe: the trainer waits for other processes.
    probe_phase: ClassVar[str] = "idle"

    def __init__(
        self,
        stream: RolloutStream,
        generator: Fleet,
        channel: WeightChannel,
        verifiers: Verifiers,
        listeners: list[Callable[[Event], None]] | None = None,
        probe_every: int = 8,
    ) -> None:
        self.stream, self.generator, self.channel = stream, generator, channel
        self.verifiers = verifiers
        self._grading: dict[int, Place] = {}  # by ticket
        self.listeners = listeners or []
        self._probe_every = probe_every
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._times = _Times()
        self._since: float | None = None  # up to when the times are counted
        self._counted_busy_s = 0.0
        # Of each engine by itself, and of the trainer, since this process began to count.
        self._passed_s = 0.0
        self._before = [Work() for _ in generator.work]
        self._trained_tokens = 0
        activity.reports["engines"] = generator.places  # for `scalerl status`

    def next_batch(self, stop: Callable[[], bool] = lambda: False) -> TrainBatch | None:
        """Wait until a batch is due, and hand it out; the step on the last one is over.

        Asked to `stop`, it returns None; the next call goes on as if nothing had been.

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
            # Cleared before looking: what changes after the look then ends the wait below.
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
            self._changed.wait(LOOK_S)

    def _publish(self) -> None:
        mode, version = self.stream.choices.async_mode, self.stream.completed_steps
        if mode.publishes(version):
            self.channel.publish(version, mode.recompute_kv)

    def _run(self) -> None:
        """Run turns in a thread of its own, until the driver is closed or something fails."""
        try:
            while not self._closing.is_set():
                with self._lock:
                    self._turn()
                # Without the lock: the trainer may publish or take its batch meanwhile.
                self.generator.wait(LOOK_S)
        except BaseException as error:
            # Raised by `next_batch`, in the trainer's thread: in this one nobody would see it.
            self._error = error
            self._changed.set()

    def _turn(self) -> None:
        """Take what has ended or is graded, and fill what is free."""
        report = self.generator.collect()
        for listener in self.listeners:
            listener(Event("decode", time.monotonic(), report))
        for finished in report.finished:
            self.stream.ended(finished)
            self._grade(self.stream.bundle((finished.key, finished.index)))
        graded = self.verifiers.done() if self._grading else ()
        for ticket, outcome in graded:
            if ticket in self._grading:
                self.stream.graded(self._grading.pop(ticket), outcome)
        # Only as many as start at once: a group that waits for a slot only gets staler.
        while self.generator.free_slots and self.stream.may_admit():
            self.generator.submit(self.stream.admit(self.channel.version))
        if graded:
            self._changed.set()

    def _grade(self, bundle: Sequence[tuple[Place, Sample]]) -> None:
        if bundle:
            tickets = submit_bundle(self.verifiers, [sample for _, sample in bundle])
            self._grading |= {ticket: place for (place, _), ticket in zip(bundle, tickets, strict=True)}

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Hold the stream still while a checkpoint or an evaluation is made; the time is charged to nobody."""
        with self._lock:
            self._count(trained=self.stream.training)
            try:
                yield
            finally:
                self._since = time.monotonic()

    def close(self) -> None:
        """End the thread and the generators' processes; what is in flight can still be saved."""
        self._closing.set()
        activity.reports.pop("engines", None)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.generator.close()
        self.verifiers.close()

    @property
    def may_probe(self) -> bool:
        """Return whether the generators may be probed at this step: every `probe_every` steps."""
        return self.stream.completed_steps % self._probe_every == 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Count the trainer as idle in the `with` block, while the generators are probed."""
        with self._lock:
            self._count(trained=self.stream.training)
        try:
            yield
        finally:
            with self._lock:
                self._count(trained=False)

    # --- what is measured and kept -----------------------------------------------------------------------

    def _count(self, trained: bool) -> None:
        """Add the time since the last call to the trainer's work if `trained`, else to its waiting."""
        now = time.monotonic()
        passed = 0.0 if self._since is None else now - self._since
        if self._since is None:
            self._before = [replace(work) for work in self.generator.work]
        self._since = now
        self._passed_s += passed
        self._times.passed += passed
        self._times.trained += passed * trained
        self._times.generated += self.generator.busy_s - self._counted_busy_s
        self._counted_busy_s = self.generator.busy_s

    def metrics(self) -> dict[str, float]:
        """Return idle shares of trainer and engines in real time, their rates, and the seconds of the last publish."""
        with self._lock:
            self._count(trained=self.stream.training)
            times, generators = self._times, self.generator.generators
            own_s = max(self._passed_s, 1e-9)
            engines = {}
            for number, (work, before) in enumerate(zip(self.generator.work, self._before, strict=True)):
                engines[f"live/engine{number}_idle"] = min(1.0, max(0.0, 1 - (work.busy_s - before.busy_s) / own_s))
                engines[f"live/engine{number}_tokens_s"] = (work.tokens - before.tokens) / own_s
        passed = max(times.passed, 1e-9)
        return {
            "live/trainer_idle": max(0.0, 1.0 - times.trained / passed),
            "live/trainer_tokens_s": self._trained_tokens / own_s,
            "live/generator_idle": max(0.0, 1.0 - times.generated / (passed * max(1, generators))),
            "live/publish_s": self.generator.publish_s,
            "live/generators_lost": float(self.generator.lost),
            **engines,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the times; what is in flight is part of the generators' own state."""
        return asdict(self._times)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the times; what the stream holds ungraded is graded again."""
        self._times = _Times(**state)
        self.verifiers.forget(self._grading)
        self._grading = {}
        for bundle in self.stream.bundles():
            self._grade(bundle)
