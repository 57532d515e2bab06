"""Cost model of a virtual cluster: durations for the discrete-event clock of the rollout stream.

A single process cannot run 64 generators, nor generate while it trains. The stream therefore computes *when* each event
would happen on a cluster with these rates. The weights that sample each token follow from that order, so the efficiency
and the staleness of an async mode can be studied deterministically on one core.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.rollouts.rollout import TrainBatch


@dataclass(frozen=True)
class CostModel:
    """Speed of one generator device and one trainer device, and the number of each. All times are in seconds.

    Args:
        generator_devices: number of generator devices; they share the rollouts in flight evenly.
        trainer_devices: number of trainer devices; they share a batch evenly.
        colocated: whether the same devices generate and train in turns; only for async modes that
            wait for all rollouts in flight before they train.
        decode_s: fixed cost of one decoding step on a generator device (reading the weights).
        decode_rollout_s: added to a decoding step per rollout that the device decodes.
        decode_context_s: added to a decoding step per cached token that the device's rollouts attend to.
        prefill_token_s: prefill of one token of a prompt, or of one token that is recomputed, on one device.
        train_s: fixed cost of one optimizer step.
        train_token_s: added per token (prompt and completion) of the rollouts that carry credit, on one device.
        publish_s: pause of the generators while new weights arrive.
        grade_s: time from the end of a rollout to its grade. It includes no waiting for a free verifier.
        tensor_parallel: number of generator devices that form one engine and share each of its decoding steps.
        tensor_parallel_s: added to each decoding step when `tensor_parallel` is above 1 (the all-reduce).
        source: origin of the rates, in words.
    """

    # The origin of the rates changes no result, so it is not part of a run's identity.
    operational_parameters: ClassVar[tuple[str, ...]] = ("source",)
    added: ClassVar[dict[str, Any]] = {"grade_s": 0.0, "tensor_parallel": 1, "tensor_parallel_s": 0.0}

    generator_devices: int
    trainer_devices: int
    colocated: bool
    decode_s: float
    decode_rollout_s: float
    decode_context_s: float
    prefill_token_s: float
    train_s: float
    train_token_s: float
    publish_s: float
    source: str
    grade_s: float = 0.0
    tensor_parallel: int = 1
    tensor_parallel_s: float = 0.0

    def __post_init__(self) -> None:
        whole_number("cost_model.generator_devices", self.generator_devices)
        whole_number("cost_model.trainer_devices", self.trainer_devices)
        whole_number("cost_model.tensor_parallel", self.tensor_parallel)
        if self.generator_devices % self.tensor_parallel:
            raise ConfigurationError(
                f"cost_model.tensor_parallel: {self.generator_devices} generator devices do not make engines "
                f"of {self.tensor_parallel}"
            )
        for field, value in asdict(self).items():
            if field.endswith("_s") and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf")
            ):
                raise ConfigurationError(f"cost_model.{field}: {value!r} must be a number of seconds, 0 or more")
        if not self.decode_s + self.decode_rollout_s > 0 or not self.train_s + self.train_token_s > 0:
            raise ConfigurationError("cost_model: decoding and training must take time, or nothing could be late")
        if not isinstance(self.colocated, bool):
            raise ConfigurationError(f"cost_model.colocated: {self.colocated!r} must be true or false")
        if self.colocated and self.generator_devices != self.trainer_devices:
            raise ConfigurationError(
                f"cost_model.colocated: generator_devices is {self.generator_devices} and trainer_devices "
                f"{self.trainer_devices}; the same devices are as many"
            )

    @property
    def devices(self) -> int:
        """Number of devices that the run is charged for."""
        return self.generator_devices if self.colocated else self.generator_devices + self.trainer_devices

    def conflict(self, drains: bool) -> str | None:
        """Return a one-line error if the async mode cannot run on this cluster, else None."""
        if self.colocated and not drains:
            return "cost_model.colocated: true, but the async mode never drains; devices cannot do both at once"
        return None

    def generator_step_s(self, report: StepReport) -> float:
        """Return the seconds of one generator step (a token per rollout in flight) on the engine with most rollouts."""
        engines = self.generator_devices // self.tensor_parallel
        rollouts_per_engine = math.ceil(report.decoded_tokens / engines)
        seconds = report.prefill_tokens * self.prefill_token_s / self.generator_devices
        # Prefill yields a rollout's first token, so a step in which all rollouts start costs no decoding.
        if rollouts_per_engine:
            # decode_s + n (decode_rollout_s + c decode_context_s): n rollouts per engine, each attending to c tokens.
            context = report.decoded_context / report.decoded_tokens
            one_device_s = self.decode_s + rollouts_per_engine * (
                self.decode_rollout_s + context * self.decode_context_s
            )
            seconds += one_device_s / self.tensor_parallel
            if self.tensor_parallel > 1:
                seconds += self.tensor_parallel_s
        return seconds

    def train_step_s(self, batch: TrainBatch, passes: float = 1.0) -> float:
        """Return the seconds of one optimizer step.

        Args:
            batch: rollouts with credit; each of their tokens (prompt and completion) costs `train_token_s`.
            passes: cost of the step in forward-backward passes of the policy.
        """
        return self.train_s + float(batch.lengths.sum()) * self.train_token_s * passes / self.trainer_devices

    def semantics(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)
