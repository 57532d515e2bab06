"""Who says when things happen in a rollout stream: a virtual clock, or the clock on the wall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from lightning_scalerl.checks import ConfigurationError, whole_number
from lightning_scalerl.distributed.start import devices_beside
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.generator.channel import WeightChannel
from lightning_scalerl.generator.fleet import Fleet
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
    """Generation and training in turns in this process; a cost model says when each event would have happened."""

    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "Virtual"}
    # Of devices that the run pays for beside those of the trainer.
    generators: ClassVar[int] = 0

    def generator(
        self, factory: Callable[..., Generator], model: nn.Module, arguments: dict[str, Any], ranks: int = 1
    ) -> Generator:
        """In this process."""
        return factory(model=model, **arguments)

    def driver(
        self,
        stream: RolloutStream,
        generator: Generator,
        channel: WeightChannel,
        cost_model: CostModel,
        verifiers: Verifiers,
        listeners: Listeners,
    ) -> Driver:
        """Of a stream."""
        return VirtualDriver(stream, generator, channel, cost_model, verifiers, listeners)


@dataclass(frozen=True)
class Live:
    """Generators in processes of their own, at work while the trainer is.

    Args:
        generators: how many.
        devices: for each what it finds in CUDA_VISIBLE_DEVICES, such as ["1"]; empty for those that this process sees
            and no rank trains on, or the trainer's own if there are none.
        silence_s: one that says nothing for so long is taken for hung, and replaced.
        start_s: what one may take to start.
        probe_every: steps between two comparisons of what trainer and generators compute.
    """

    remarks: ClassVar[tuple[str, ...]] = ("devices", "silence_s", "start_s", "probe_every")

    generators: int = 1
    devices: Sequence[str] = ()
    silence_s: float = 60.0
    start_s: float = 600.0
    probe_every: int = 8

    def __post_init__(self) -> None:
        whole_number("driver.generators", self.generators)
        whole_number("driver.probe_every", self.probe_every)
        for field in ("silence_s", "start_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ConfigurationError(
                    f"driver.{field}: {getattr(self, field)!r} must be a number of seconds above 0"
                )

    def generator(
        self, factory: Callable[..., Generator], model: nn.Module, arguments: dict[str, Any], ranks: int = 1
    ) -> Generator:
        """Behind one protocol, as many as there are; `ranks` train on this node."""
        return Fleet(
            factory,
            model,
            arguments,
            generators=self.generators,
            silence_s=self.silence_s,
            start_s=self.start_s,
            devices=self.devices or devices_beside(ranks),
        )

    def driver(
        self,
        stream: RolloutStream,
        generator: Generator,
        channel: WeightChannel,
        cost_model: CostModel,
        verifiers: Verifiers,
        listeners: Listeners,
    ) -> Driver:
        """Of a stream; real time asks no cost model."""
        assert isinstance(generator, Fleet)
        return LiveDriver(stream, generator, channel, verifiers, listeners, self.probe_every)
