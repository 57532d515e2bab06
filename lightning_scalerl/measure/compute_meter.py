"""Compute meter of a run: FLOPs and device hours, cumulative, monotone, and continued after a resume.

`compute/flops` counts generation and training; `compute/device_hours` is wall clock x devices from the first
batch on, split into train, generate, checkpoint and idle (the rest). Evaluation is metered apart and on no
axis: how often one looks must not move the curve.

Every second is booked once, under the innermost phase that it passes in, so the axis is the sum of its parts
whichever hook starts or stops the clock first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from lightning_scalerl.choices import Passes
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.rollout import TrainBatch
from lightning_scalerl.stream.events import Event
from sweeps.run.activity import activity

# Parts of the device-hours axis; in "idle" the trainer only waits.
PHASES = ("train", "generate", "checkpoint", "idle")
WASTED = ("flops", "device_hours")


class ComputeMeter:
    """Counts the FLOPs and device seconds of a run, by phase. Threads may share it.

    Args:
        flop_model: the model's cost.
        devices: how many devices the wall clock is multiplied with.
        clock: injected.
    """

    def __init__(self, flop_model: FlopModel, devices: int = 1, clock: Clock | None = None) -> None:
        self._flop_model = flop_model
        self.devices = devices
        self._clock = clock or WallClock()
        self._flops = {"train": 0.0, "generate": 0.0, "evaluate": 0.0}
        self._seconds = dict.fromkeys((*PHASES, "evaluate"), 0.0)
        self._phases: list[str] = []  # entered and not left, the innermost last
        self._running = False
        self._booked_until = self._clock.now()
        self._lock = threading.RLock()
        self._wasted = dict.fromkeys(WASTED, 0.0)
        self._sampled = {"tokens": 0, "flops": 0.0}  # by this process, to know what a token costs
        self._owed_flops = 0.0  # of sampling that was lost, and is still to be done again
        self._hours_at_step = 0.0

    def start(self) -> None:
        """Count wall clock on the device-hours axis from here on; no effect if it is counted already."""
        self._book()
        self._running = True

    def stop(self) -> None:
        """Stop counting wall clock on the device-hours axis."""
        self._book()
        self._running = False

    def _book(self) -> None:
        """Book the seconds since the last call under the innermost phase."""
        with self._lock:
            now = self._clock.now()
            passed, self._booked_until = now - self._booked_until, now
            phase = self._phases[-1] if self._phases else "idle"
            # Evaluation is on no axis, so its seconds count whether or not the clock of the axis runs.
            if self._running or phase == "evaluate":
                self._seconds[phase] += passed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time inside under a phase of `PHASES`, or "evaluate"; an inner phase is taken out of the outer."""
        activity.note(name)
        self._book()
        self._phases.append(name)
        try:
            yield
        finally:
            self._book()
            self._phases.pop()

    def on_event(self, event: Event) -> None:
        """Count the FLOPs of a generator step; listens to a rollout stream or to an evaluation."""
        if event.report is None:
            return
        report = event.report
        if report.finished or report.decoded_tokens or report.prefill_tokens:
            activity.note("decode")  # an empty report shows no progress
        flops = self._flop_model.prefill(report.prefill_tokens, report.prefill_context, report.prefilled)
        flops += self._flop_model.decode(report.decoded_tokens, report.decoded_context, report.outside)
        with self._lock:
            if "evaluate" in self._phases:
                self._flops["evaluate"] += flops
            else:
                self._generated(flops, report.decoded_tokens)
            if report.lost_tokens and self._sampled["tokens"]:
                self._owed_flops += report.lost_tokens * self._sampled["flops"] / self._sampled["tokens"]

    def _generated(self, flops: float, tokens: int) -> None:
        """Count FLOPs of sampling for training; repeats of what a lost generator had sampled are wasted, on no axis."""
        self._sampled["tokens"] += tokens
        self._sampled["flops"] += flops
        again = min(self._owed_flops, flops)
        self._owed_flops -= again
        self._wasted["flops"] += again
        self._flops["generate"] += flops - again

    def trained(self, batch: TrainBatch, passes: Passes = Passes()) -> None:  # noqa: B008  # frozen
        """Count the FLOPs of one step: forward and backward cost three forward passes. A critic has no vocabulary.

        Frozen weights beside an adapter cost two, and one before the first that is trained (`FlopModel.adapting`).
        """
        lengths, prompts = batch.lengths.tolist(), batch.completion_start.tolist()
        policy, value = self._flop_model.forward(lengths, prompts), self._flop_model.body(lengths)
        flops = (3 * passes.policy_updates + passes.policy_forwards) * policy
        if self._flop_model.adapter:
            flops += self._flop_model.adapting(lengths, prompts, passes.policy_updates, passes.policy_forwards)
        self._flops["train"] += flops + (3 * passes.value_updates + passes.value_forwards) * value

    def evaluation_thrown_away(self, flops_before: float) -> None:
        """Take back the FLOPs of an evaluation that was broken off: it is made again, and must not count twice.

        Args:
            flops_before: `evaluation_flops` when it began.
        """
        self._flops["evaluate"] = flops_before

    @property
    def evaluation_flops(self) -> float:
        """FLOPs that evaluation has cost so far, on no compute axis."""
        return self._flops["evaluate"]

    def spent_by_then(self, spent: Mapping[str, float]) -> None:
        """Count as wasted what an interrupted run had `spent` beyond the point that it resumes from."""
        now = spent_in(self.metrics())
        for name in WASTED:
            self._wasted[name] += max(0.0, spent.get(name, 0.0) - now[name])

    def metrics(self) -> dict[str, float]:
        """Return all compute axes and their parts, as of now."""
        self._book()
        hours = {phase: self._seconds[phase] * self.devices / 3600.0 for phase in PHASES}
        values = {
            "compute/flops": self._flops["train"] + self._flops["generate"],
            "compute/flops_train": self._flops["train"],
            "compute/flops_generate": self._flops["generate"],
            "compute/device_hours": sum(hours.values()),
            **{f"compute/device_hours_{phase}": value for phase, value in hours.items()},
        }
        for name in WASTED:
            values[f"compute/wasted_{name}"] = self._wasted[name]
        return values

    def reward_rate(self, rewards: float) -> dict[str, float]:
        """Return `time/reward_per_device_hour`: a step's rewards over the device hours since the last step.

        Args:
            rewards: of all rollouts of the step, added up.
        """
        hours = self.metrics()["compute/device_hours"]
        since, self._hours_at_step = hours - self._hours_at_step, hours
        return {"time/reward_per_device_hour": rewards / since} if since > 0 else {}

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the cost of evaluation in FLOPs and seconds, which is on no compute axis."""
        return {
            "eval_cost/flops": self._flops["evaluate"],
            "time/evaluate_s": self._seconds["evaluate"],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counts up to now, for a checkpoint."""
        self._book()
        return {
            "flops": dict(self._flops),
            "seconds": dict(self._seconds),
            "wasted": dict(self._wasted),
            "owed_flops": self._owed_flops,
            "devices": self.devices,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts; seconds are rescaled if the number of devices has changed."""
        # Device hours must stay the same: with another number of devices, they are other seconds.
        scale = state.get("devices", self.devices) / self.devices
        self._flops = dict(state["flops"])
        seconds = dict(state["seconds"])
        if "idle" not in seconds:
            # Earlier versions saved the total, without a starting evaluation, in place of idle seconds.
            seconds["idle"] = max(0.0, state["elapsed"] - sum(seconds.values()))
        self._seconds = {phase: value * scale for phase, value in seconds.items()}
        self._booked_until = self._clock.now()
        self._wasted = dict(state["wasted"])
        self._owed_flops = state.get("owed_flops", 0.0)
        self._hours_at_step = self.metrics()["compute/device_hours"]


def spent_in(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the total cost by a record of a run, lost work included, under the names of `WASTED`."""
    return {name: metrics.get(f"compute/{name}", 0.0) + metrics.get(f"compute/wasted_{name}", 0.0) for name in WASTED}


class Clock(Protocol):
    """Time in seconds from an arbitrary origin, monotone."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...


class WallClock:
    """Monotonic system clock, as the meter's default."""

    def now(self) -> float:
        """Return seconds of the monotonic system clock."""
        return time.monotonic()
