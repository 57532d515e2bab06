"""Engines of a fleet: starts them, exchanges messages with them, and replaces lost ones.

This module tracks which engines are up and what they have sent. The fleet implements `Listener` and decides what a
message means for rollouts and weights.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.generator.fleet.addresses import Address
from lightning_scalerl.generator.fleet.server import Blueprint
from lightning_scalerl.generator.fleet.transport import Child, ChildSettings

_log = logging.getLogger(__name__)

# Largest number of engines that may be lost without a finished rollout in between, as a multiple of the fleet's size.
MOST_LOSSES = 3
# Interval at which messages and the engines' state are polled, in seconds.
POLL_S = 0.02


class GeneratorLostError(CannotGoOnError):
    """Raised when engines cannot be kept alive, or an engine's weights differ from the weights that were sent to it."""


@dataclass(eq=False)
class Engine:
    """Trainer-side state of one engine. A replacement for a lost engine gets a new object.

    Attributes:
        number: index in the fleet; a replacement keeps it.
        address: the engine's address.
        transport: the child process and its connection.
        started_at: monotonic time at which the child was started.
        slots: number of rollouts that the engine decodes together; 0 until it is ready.
        ready: whether messages can reach the engine.
        acknowledged: number of the published weights that the engine uses (`Published.number`).
        aside: whether the engine's rollouts in flight are paused for other work (`Fleet.aside`).
        sampled: number of tokens of the engine's unfinished rollouts, from its last report.
        replies: replies of the engine that were not read yet.
    """

    number: int
    address: Address
    transport: Child
    started_at: float
    slots: int = 0
    ready: bool = False
    acknowledged: int = 0
    aside: bool = False
    sampled: int = 0
    replies: deque[Any] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """The engine's address; for a local engine its number."""
        return str(self.number) if self.address.kind == "local" else str(self.address)

    def __str__(self) -> str:
        return f"process {self.number}" if self.address.kind == "local" else self.name


class Listener(Protocol):
    """Receiver of engine events; the fleet implements it."""

    def on_ready(self, engine: Engine, slots: int, can_score: bool) -> None:
        """Handle an engine that has come up, with nothing in flight and uninitialized weights."""

    def on_work(
        self,
        engine: Engine,
        finished: Sequence[Any],
        computed: Sequence[int],
        busy_s: float,
        sampled: int,
        waiting: Sequence[Any],
    ) -> None:
        """Handle an engine's report of finished rollouts, computed work and rollouts that wait for an insertion."""

    def on_published(self, engine: Engine, number: int, digest: str) -> None:
        """Handle an engine's confirmation of the weights that it now uses."""

    def on_loss(self, engine: Engine) -> None:
        """Handle the loss of an engine with everything it had in flight."""


class Engines:
    """All engines of a fleet that are up or being started.

    Args:
        blueprints: (address, blueprint) of each engine, in the order of their numbers.
        settings: settings that all children of the run share.
        devices: CUDA_VISIBLE_DEVICES for the children, assigned in turn; empty to inherit this process's.
        listener: receives the engines' events.

    Attributes:
        lost: number of engines lost so far.
    """

    def __init__(
        self,
        blueprints: Sequence[tuple[Address, Blueprint]],
        settings: ChildSettings,
        devices: Sequence[str],
        listener: Listener,
    ) -> None:
        self._blueprints, self._settings = blueprints, settings
        self._devices, self._listener = list(devices), listener
        self._losses_in_a_row = 0
        self.lost = 0
        self._all: list[Engine] = []

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def engine_states(self) -> list[dict[str, Any]]:
        """Return each engine's address and state, in order of number; other threads call this without a lock."""
        return [{"where": str(engine.address), "state": "up" if engine.ready else "starting"} for engine in self]

    @property
    def up(self) -> list[Engine]:
        """Engines that messages can reach, in order of number."""
        return [engine for engine in self._all if engine.ready]

    def start(self) -> None:
        """Start all engines and wait until each is up.

        Raises:
            ConfigurationError: an engine reports that it is unusable.
            GeneratorLostError: an engine cannot be started.
        """
        for number in range(len(self._blueprints)):
            self._all.append(self._start_engine(number))
        self.handle_until(lambda: all(engine.ready for engine in self._all), at_start=True)

    def _start_engine(self, number: int) -> Engine:
        """Start engine `number` and send it its blueprint; return without waiting until it is ready."""
        address, blueprint = self._blueprints[number]
        assigns_device = bool(self._devices) and address.kind == "local"
        child = Child(number, self._settings, self._devices[number % len(self._devices)] if assigns_device else "")
        child.send(blueprint)
        return Engine(number=number, address=address, transport=child, started_at=time.monotonic())

    def wait(self, seconds: float) -> None:
        """Wait until an engine has sent a message, at most `seconds` seconds."""
        self._settings.arrival.wait(seconds)
        self._settings.arrival.clear()

    def ask(self, engine: Engine, *message: Any) -> Any:
        """Send a message and wait for the engine's reply; return None if the engine is lost before it replies."""
        engine.replies.clear()
        engine.transport.send(*message)
        self.handle_until(lambda: engine.replies or engine not in self._all)
        return engine.replies.popleft() if engine.replies else None

    def handle_until(self, done: Callable[[], object], at_start: bool = False) -> None:
        """Handle messages until `done()` is true. An engine that does not answer within its timeout is replaced."""
        while not done():
            self.wait(POLL_S)
            self.handle_messages(at_start)

    def handle_messages(self, at_start: bool = False) -> None:
        """Handle all arrived messages, and replace engines that have ended or timed out."""
        for engine in self:
            # Ask for the end reason before reading, so that the last messages of an engine that has ended are still
            # handled.
            end_reason = engine.transport.end_reason()
            for message in engine.transport.received():
                if engine in self._all:  # an earlier message may have led to the engine's replacement
                    self._handle(engine, at_start, *message)
            silent_s = time.monotonic() - (engine.transport.heard_at if engine.ready else engine.started_at)
            if end_reason is not None:
                self._replace(engine, end_reason, at_start)
            elif engine.transport.closed_at is not None:
                engine.ready = False  # no message can reach the engine
            elif silent_s > (self._settings.silence_s if engine.ready else self._settings.start_s):
                self._replace(engine, f"was silent for {silent_s:.0f} s", at_start)

    def _handle(self, engine: Engine, at_start: bool, name: str, *arguments: Any) -> None:
        """Handle one message of an engine; the `server` module lists the messages."""
        if name == "ready":
            engine.ready, engine.slots = True, arguments[0]
            self._listener.on_ready(engine, *arguments)
        elif name == "work":
            self._listener.on_work(engine, *arguments)
        elif name == "published":
            self._listener.on_published(engine, *arguments)
        elif name == "reply":
            engine.replies.append(arguments[0])
        elif name == "failed":
            if at_start or arguments[0].startswith("ConfigurationError"):
                raise ConfigurationError(arguments[0].removeprefix("ConfigurationError: "))
            self._replace(engine, arguments[0], at_start)

    def reset_losses(self) -> None:
        """Reset the count of lost engines, because a rollout has ended: only losses without progress end the run."""
        self._losses_in_a_row = 0

    def _replace(self, engine: Engine, reason: str, at_start: bool) -> None:
        """End an engine and start a replacement, or raise an error if too many engines were lost in a row."""
        # The engine's `failed` message may already have led to its replacement in this round.
        if engine not in self._all:
            return
        engine.transport.stop()
        last_words = engine.transport.last_words()
        self.lost += 1
        self._losses_in_a_row += 1
        if at_start or self._losses_in_a_row > MOST_LOSSES * len(self._all):
            raise GeneratorLostError(f"generator: {engine} {reason}{last_words}")
        _log.warning("generator %s %s%s: it is restarted", engine.name, reason, last_words)
        self._all[self._all.index(engine)] = self._start_engine(engine.number)
        self._listener.on_loss(engine)

    def end(self) -> None:
        """End all child processes; vLLM servers that the run did not start keep running."""
        # Ask all children to stop before waiting for any of them, so that they end in parallel.
        for engine in self._all:
            engine.transport.send("stop")
        for engine in self._all:
            engine.transport.stop(at_once=False)
        self._all = []
