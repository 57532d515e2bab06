"""Cost model of a virtual cluster: the durations on which the rollout stream's discrete-event clock runs.

One process on one core can neither overlap generation and training nor have 64 generators. So that an async
mode's efficiency can show, and show deterministically, the stream computes *when* each event would happen on
a cluster with these rates; which weights sample a token follows from that.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.generator.base import StepReport
from lightning_scalerl.rollout import TrainBatch


@dataclass(frozen=True)
class CostModel:
    """Rates of one device of each kind, and how many there are. All times in seconds.

    Args:
        generator_devices: number of generator devices; they share the rollouts in flight evenly.
        trainer_devices: number of trainer devices; they share a batch evenly.
        colocated: whether both kinds are the same devices, in turns; only for async modes that drain.
        decode_s: one decoding step of a generator device, whatever it holds (reading the weights).
        decode_rollout_s: added to a decoding step per rollout that the device decodes.
        decode_context_s: added to a decoding step per cached token that those rollouts attend to.
        prefill_token_s: prefill per prompt (or recomputed) token, on one device.
        train_s: one optimizer step, whatever the batch.
        train_token_s: added per token (prompt and completion) of the rollouts that carry credit, on one device.
        publish_s: pause of the generators while new weights arrive.
        grade_s: from a rollout's end to its grade; verifiers are as many as needed, and nobody waits for them.
        tensor_parallel: number of generator devices that share one engine, and with it each decoding step.
        tensor_parallel_s: added to a decoding step of an engine that several devices share (they exchange sums).
        source: origin of the rates, in words.
    """

    # Where the rates come from changes no result, and no identity.
    remarks: ClassVar[tuple[str, ...]] = ("source",)
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
        """Number of devices that are paid for."""
        return self.generator_devices if self.colocated else self.generator_devices + self.trainer_devices

    def conflict(self, drains: bool) -> str | None:
        """Return one line if the async mode cannot run on this cluster, else None."""
        if self.colocated and not drains:
            return "cost_model.colocated: true, but the async mode never drains; devices cannot do both at once"
        return None

    def generator_step_s(self, report: StepReport) -> float:
        """Return the seconds of one token for everything in flight; the fullest engine decides."""
        engines = self.generator_devices // self.tensor_parallel
        share = math.ceil(report.decoded_tokens / engines)
        seconds = report.prefill_tokens * self.prefill_token_s / self.generator_devices
        # A rollout's first token comes out of its prefill: a step without decoding is only that.
        if share:
            # decode_s + n (decode_rollout_s + c decode_context_s): n rollouts an engine, attending to c tokens each.
            context = report.decoded_context / report.decoded_tokens
            alone_s = self.decode_s + share * (self.decode_rollout_s + context * self.decode_context_s)
            seconds += alone_s / self.tensor_parallel
            if self.tensor_parallel > 1:
                seconds += self.tensor_parallel_s
        return seconds

    def train_step_s(self, batch: TrainBatch, passes: float = 1.0) -> float:
        """Return the seconds of one step over tokens with credit; `passes` in forward-backwards of the policy."""
        return self.train_s + float(batch.lengths.sum()) * self.train_token_s * passes / self.trainer_devices

    def semantics(self) -> dict[str, Any]:
        """Return every rate of the cost model, by field."""
        return asdict(self)
