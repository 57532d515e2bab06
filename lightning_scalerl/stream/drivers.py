"""Settings of the driver of a rollout stream: virtual clock or real time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, positive, whole_number
from lightning_scalerl.generator.base import Generator, Weights
from lightning_scalerl.generator.fleet.addresses import addresses_of, check_engines
from lightning_scalerl.generator.fleet.fleet import Fleet
from lightning_scalerl.stream.conversations import Conversations
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.events import Event
from lightning_scalerl.stream.live_driver import LiveDriver
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.stream.virtual_driver import VirtualDriver
from lightning_scalerl.verify.verification import Verifiers

Driver = VirtualDriver | LiveDriver
Listeners = list[Callable[[Event], None]]


@dataclass(frozen=True)
class Virtual:
    """Settings of the virtual driver: generate and train in turns in this process, at times from a cost model."""

    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Virtual"}
    # Number of devices outside this process that are charged in addition to the trainer's devices.
    engine_devices: ClassVar[int] = 0

    def driver(
        self,
        stream: RolloutStream,
        generator: Generator,
        weights: Weights,
        cost_model: CostModel,
        verifiers: Verifiers,
        listeners: Listeners,
        conversations: Conversations | None = None,
    ) -> Driver:
        """Build the virtual driver of a rollout stream."""
        return VirtualDriver(
            stream=stream,
            generator=generator,
            weights=weights,
            cost_model=cost_model,
            verifiers=verifiers,
            listeners=listeners,
            conversations=conversations,
        )


@dataclass(frozen=True)
class Live:
    """Settings of the live driver: generate in separate processes, in parallel with the trainer.

    Args:
        generators: number of generator processes on this node; ignored if `engines` is set.
        engines: addresses of engines (docs/reference/generators.md): "local", or vLLM servers as "http://host:port",
            "file:/path" or "srun". They replace the `generators` processes.
        bucket_mib: size in MiB of the chunks in which weights are copied and sent.
        tensor_parallel: number of GPUs that share each engine (vLLM).
        devices: value of CUDA_VISIBLE_DEVICES for each process, such as ["1", "2"]. If empty, the processes use the
            visible GPUs on which no rank trains; if there are no such GPUs, those on which ranks train.
        silence_s: seconds without a message after which a process is considered hung and replaced.
        start_s: start-up timeout of a process, in seconds.
        probe_every: optimizer steps between two comparisons of the trainer's log-probabilities with the generators'.
    """

    operational_parameters: ClassVar[tuple[str, ...]] = (
        "devices",
        "silence_s",
        "start_s",
        "probe_every",
        "engines",
        "bucket_mib",
        "tensor_parallel",
    )

    generators: int = 1
    devices: Sequence[str] = ()
    silence_s: float = 60.0
    start_s: float = 600.0
    probe_every: int = 8
    engines: Sequence[str] = ()
    bucket_mib: float = 64.0
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        whole_number("driver.generators", self.generators)
        whole_number("driver.probe_every", self.probe_every)
        whole_number("driver.tensor_parallel", self.tensor_parallel)
        positive("driver.bucket_mib", self.bucket_mib)
        check_engines(self.engines)
        for field in ("silence_s", "start_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ConfigurationError(
                    f"driver.{field}: {getattr(self, field)!r} must be a number of seconds above 0"
                )

    @property
    def engine_devices(self) -> int:
        """Number of devices of all engines. They are charged in addition to the trainer's devices."""
        return len(addresses_of(self.engines, self.generators, self.tensor_parallel)) * self.tensor_parallel

    def driver(
        self,
        stream: RolloutStream,
        generator: Generator,
        weights: Weights,
        cost_model: CostModel,
        verifiers: Verifiers,
        listeners: Listeners,
        conversations: Conversations | None = None,
    ) -> Driver:
        """Build the live driver of a rollout stream. The cost model is unused: durations are real."""
        assert isinstance(generator, Fleet)
        return LiveDriver(stream, generator, weights, verifiers, listeners, self.probe_every, conversations)
