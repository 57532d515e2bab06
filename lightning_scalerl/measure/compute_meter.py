"""Compute meter of a run: cumulative FLOPs and device hours, which continue after a resume.

`compute/flops` counts generation and training. `compute/device_hours` is wall clock x devices from the first batch on,
split into train, generate, checkpoint and idle (the rest). Evaluation is metered separately and is not part of any
compute axis, so that the frequency of evaluation does not move the curve.

Every second counts once, in the innermost phase at that time. So `compute/device_hours` is always the sum of its parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from lightning_scalerl.choices import Passes
from lightning_scalerl.measure.flops import FlopModel
from lightning_scalerl.rollouts.grade import Charge
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.stream.events import Event
from lightning_scalerl.verify.charges import ChargeLedger, ComputeAxes
from sweeps.run.activity import activity

# Parts of `compute/device_hours`; in "idle" the trainer only waits.
PHASES = ("train", "generate", "checkpoint", "idle")
# Compute axes on which lost work is tracked, as `compute/wasted_*`.
WASTED = ("flops", "device_hours")


class ComputeMeter:
    """Counts the FLOPs and device seconds of a run, by phase. It is thread-safe.

    Args:
        flop_model: FLOPs of the model's forward pass.
        devices: number of devices; the wall clock is multiplied by it.
        clock: source of time; None for the system's monotonic clock.
        axes: whether and how judge models count in device hours.
    """

    def __init__(
        self,
        flop_model: FlopModel,
        devices: int = 1,
        clock: Clock | None = None,
        axes: ComputeAxes = ComputeAxes(),  # noqa: B008  # frozen
    ) -> None:
        self._flop_model = flop_model
        # FLOPs of the reference of axis `kl`; None if it is as large as the policy.
        self.reference: FlopModel | None = None
        self.devices = devices
        self._clock = clock or WallClock()
        self._flops = {"train": 0.0, "generate": 0.0, "evaluate": 0.0}
        self._seconds = dict.fromkeys((*PHASES, "evaluate"), 0.0)
        self._phases: list[str] = []  # active phases, the innermost last
        self._running = False
        self._counted_until = self._clock.now()
        self._lock = threading.RLock()
        self._wasted = dict.fromkeys(WASTED, 0.0)
        self._sampled = {"tokens": 0, "flops": 0.0}  # in this process, for the mean cost of a token
        self._lost_flops = 0.0  # FLOPs of lost sampling that has not been repeated yet
        self._hours_at_step = 0.0
        self._axes = axes
        self._charges = ChargeLedger()

    def start(self) -> None:
        """Start counting time as device hours; no effect if it is counted already."""
        self._count_seconds()
        self._running = True

    def stop(self) -> None:
        """Stop counting time as device hours."""
        self._count_seconds()
        self._running = False

    def _count_seconds(self) -> None:
        """Add the seconds since the last call to the innermost phase."""
        with self._lock:
            now = self._clock.now()
            elapsed, self._counted_until = now - self._counted_until, now
            phase = self._phases[-1] if self._phases else "idle"
            # Seconds of evaluation are not device hours, so they are counted even while device hours are not.
            if self._running or phase == "evaluate":
                self._seconds[phase] += elapsed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time in the `with` block to a phase in `PHASES` or to "evaluate"; inner phases get their own time."""
        activity.note(name)
        self._count_seconds()
        self._phases.append(name)
        try:
            yield
        finally:
            self._count_seconds()
            self._phases.pop()

    def on_event(self, event: Event) -> None:
        """Count the FLOPs of a generator step. This is a listener for events of a rollout stream or an evaluation."""
        if event.report is None:
            return
        report = event.report
        if report.finished or report.decoded_tokens or report.prefill_tokens:
            activity.note("decode")  # an empty report is no sign of progress
        flops = self._flop_model.prefill(report.prefill_tokens, report.prefill_context, report.prefilled)
        flops += self._flop_model.decode(report.decoded_tokens, report.decoded_context, report.outside)
        with self._lock:
            if "evaluate" in self._phases:
                self._flops["evaluate"] += flops
            else:
                self._count_sampling(flops, report.decoded_tokens)
            # A lost generator's tokens will be sampled again: estimate their FLOPs by the mean cost of a token.
            if report.lost_tokens and self._sampled["tokens"]:
                self._lost_flops += report.lost_tokens * self._sampled["flops"] / self._sampled["tokens"]

    def _count_sampling(self, flops: float, tokens: int) -> None:
        """Count FLOPs of sampling for training; those that repeat lost work are wasted (`compute/wasted_flops`)."""
        self._sampled["tokens"] += tokens
        self._sampled["flops"] += flops
        repeated = min(self._lost_flops, flops)
        self._lost_flops -= repeated
        self._wasted["flops"] += repeated
        self._flops["generate"] += flops - repeated

    def trained(self, batch: TrainBatch, passes: Passes = Passes()) -> None:  # noqa: B008  # frozen
        """Count the FLOPs of one step: forward and backward together cost three forward passes.

        A critic costs as much as the policy without its head, and a teacher's cost follows from the teacher's size. An
        update costs only two forward passes for frozen weights, and only one in layers before the first trained weight
        (`FlopModel.partial_training`).
        """
        lengths, prompts = batch.lengths.tolist(), batch.completion_start.tolist()
        policy, value = self._flop_model.forward(lengths, prompts), self._flop_model.body(lengths)
        reference = policy if self.reference is None else self.reference.forward(lengths, prompts)
        flops = (3 * passes.policy_updates + passes.policy_forwards) * policy + passes.reference_forwards * reference
        flops += self._flop_model.partial_training(lengths, prompts, passes.policy_updates, passes.policy_forwards)
        flops += (3 * passes.value_updates + passes.value_forwards) * value
        # Without an adapter, the critic has the policy's frozen weights. With an adapter, all its weights are trained.
        if not self._flop_model.adapter:
            flops += self._flop_model.partial_training(lengths, lengths, passes.value_updates, passes.value_forwards)
        self._flops["train"] += flops

    def judged(self, charges: Iterable[Charge], evaluation: bool = False) -> None:
        """Count what judge models cost for one completion, in training or (with `evaluation`) in an evaluation."""
        with self._lock:
            self._charges.add(charges, evaluation)

    @property
    def judge_device_hours(self) -> float:
        """Cost of judges in device hours (`compute.judge`); 0 by default."""
        return self._axes.device_hours(self._charges.training)

    def evaluation_cost(self) -> tuple[float, dict[str, Any]]:
        """Return the FLOPs and judges' charges of all evaluations so far, for `discard_evaluation`."""
        return self._flops["evaluate"], self._charges.state_dict()

    def discard_evaluation(self, cost_before: tuple[float, dict[str, Any]]) -> None:
        """Remove the cost of an aborted evaluation, which will run again and must not count twice.

        Args:
            cost_before: result of `evaluation_cost` when the evaluation began.
        """
        self._flops["evaluate"], charges = cost_before
        self._charges.load_state_dict(charges)

    def count_lost_work(self, cost: Mapping[str, float]) -> None:
        """Count as wasted the work that an interrupted run did after the checkpoint from which it resumes.

        Args:
            cost: total cost of the run when it was interrupted, by the names in `WASTED`.
        """
        current_cost = total_cost(self.metrics())
        for name in WASTED:
            self._wasted[name] += max(0.0, cost.get(name, 0.0) - current_cost[name])

    def metrics(self) -> dict[str, float]:
        """Return the current values of all compute axes and their parts."""
        self._count_seconds()
        hours = {phase: self._seconds[phase] * self.devices / 3600.0 for phase in PHASES}
        values = {
            "compute/flops": self._flops["train"] + self._flops["generate"],
            "compute/flops_train": self._flops["train"],
            "compute/flops_generate": self._flops["generate"],
            "compute/device_hours": sum(hours.values()),
            **{f"compute/device_hours_{phase}": value for phase, value in hours.items()},
        }
        values |= self._charges.metrics()
        if judge_hours := self.judge_device_hours:
            values["compute/device_hours"] += judge_hours
            values["compute/device_hours_judge"] = judge_hours
        for name in WASTED:
            values[f"compute/wasted_{name}"] = self._wasted[name]
        return values

    def reward_rate(self, rewards: float) -> dict[str, float]:
        """Return `time/reward_per_device_hour`: a step's rewards over the device hours since the last step.

        Args:
            rewards: sum of the rewards of all rollouts of the step.
        """
        hours = self.metrics()["compute/device_hours"]
        hours_since_step, self._hours_at_step = hours - self._hours_at_step, hours
        return {"time/reward_per_device_hour": rewards / hours_since_step} if hours_since_step > 0 else {}

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the cost of evaluation in FLOPs and seconds, which is not on any compute axis."""
        return {
            "eval_cost/flops": self._flops["evaluate"],
            "time/evaluate_s": self._seconds["evaluate"],
            **self._charges.evaluation_metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all FLOPs, seconds and charges counted so far, for a checkpoint."""
        self._count_seconds()
        judged = {"charges": self._charges.state_dict()} if self._charges.used else {}
        return {
            **judged,
            "flops": dict(self._flops),
            "seconds": dict(self._seconds),
            "wasted": dict(self._wasted),
            "owed_flops": self._lost_flops,
            "devices": self.devices,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts."""
        # The device hours so far must not change, so seconds are rescaled to the new number of devices.
        scale = state.get("devices", self.devices) / self.devices
        self._flops = dict(state["flops"])
        seconds = dict(state["seconds"])
        if "idle" not in seconds:
            # Earlier versions saved the total seconds (without an evaluation at the start) instead of idle seconds.
            seconds["idle"] = max(0.0, state["elapsed"] - sum(seconds.values()))
        self._seconds = {phase: value * scale for phase, value in seconds.items()}
        self._counted_until = self._clock.now()
        self._wasted = dict(state["wasted"])
        self._lost_flops = state.get("owed_flops", 0.0)
        if "charges" in state:
            self._charges.load_state_dict(state["charges"])
        self._hours_at_step = self.metrics()["compute/device_hours"]


def total_cost(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the total cost in a run's metrics, lost work included, by the names in `WASTED`."""
    return {name: metrics.get(f"compute/{name}", 0.0) + metrics.get(f"compute/wasted_{name}", 0.0) for name in WASTED}


class Clock(Protocol):
    """Monotonic time in seconds, from an arbitrary origin."""

    def now(self) -> float:
        """Return the current time in seconds."""


class WallClock:
    """Monotonic system clock, the default of the meter."""

    def now(self) -> float:
        """Return seconds of the monotonic system clock."""
        return time.monotonic()
