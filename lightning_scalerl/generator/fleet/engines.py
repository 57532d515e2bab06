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
from lightning_scalerl.generator.fleet.transport import Child, Surroundings

_log = logging.getLogger(__name__)

# Give up after more than this many losses per engine without a finished rollout in between.
MOST_LOSSES = 3
# Interval at which messages and the engines' state are polled, in seconds.
POLL_S = 0.02


class GeneratorLostError(CannotGoOnError):
    """Raised when engines cannot be kept alive, or one holds other weights than it was sent."""


@dataclass(eq=False)
class Engine:
    """Trainer-side state of one engine. A replacement for a lost engine gets a new object."""

    number: int
    address: Address
    transport: Child
    started: float
    slots: int = 0
    ready: bool = False
    acknowledged: int = 0  # publish number of the weights that it uses
    aside: bool = False
    sampled: int = 0  # tokens of its unfinished rollouts, from its last report
    replies: deque[Any] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """The engine's address; for a local engine its number."""
        return str(self.number) if self.address.kind == "local" else str(self.address)

    def __str__(self) -> str:
        return f"process {self.number}" if self.address.kind == "local" else self.name


class Listener(Protocol):
    """Receiver of engine events; the fleet implements it."""

    def is_ready(self, engine: Engine, slots: int, can_score: bool) -> None:
        """Handle an engine that has come up, with nothing in flight and uninitialized weights."""

    def has_worked(
        self,
        engine: Engine,
        finished: Sequence[Any],
        computed: Sequence[int],
        busy_s: float,
        sampled: int,
        waiting: Sequence[Any],
    ) -> None:
        """Handle an engine's report of finished rollouts, computed work and rollouts that wait for an insertion."""

    def holds(self, engine: Engine, number: int, digest: str) -> None:
        """Handle an engine's confirmation of the weights that it now uses."""

    def has_lost(self, engine: Engine) -> None:
        """Handle the loss of an engine with everything it had in flight."""


class Engines:
    """All engines of a fleet that are up or being started.

    Args:
        blueprints: (address, blueprint) of each engine, in the order of their numbers.
        around: the run's folder, timeouts and event.
        devices: CUDA_VISIBLE_DEVICES for the children, assigned in turn; empty to inherit this process's.
        listener: receives the engines' events.
    """

    def __init__(
        self,
        blueprints: Sequence[tuple[Address, Blueprint]],
        around: Surroundings,
        devices: Sequence[str],
        listener: Listener,
    ) -> None:
        self._blueprints, self._around = blueprints, around
        self._devices, self._listener = list(devices), listener
        self._losses = 0
        self.lost = 0
        self._all: list[Engine] = []

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def places(self) -> list[dict[str, Any]]:
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
            self._all.append(self._started(number))
        self.await_(lambda: all(engine.ready for engine in self._all), at_start=True)

    def _started(self, number: int) -> Engine:
        """Start engine `number` and send it its blueprint; return it before it is ready."""
        address, blueprint = self._blueprints[number]
        own = bool(self._devices) and address.kind == "local"
        child = Child(number, self._around, self._devices[number % len(self._devices)] if own else "")
        child.tell(blueprint)
        return Engine(number=number, address=address, transport=child, started=time.monotonic())

    def wait(self, seconds: float) -> None:
        """Wait until an engine has sent a message, at most `seconds` seconds."""
        self._around.news.wait(seconds)
        self._around.news.clear()

    def ask(self, engine: Engine, *message: Any) -> Any:
        """Send a message and return the engine's reply, or None if the engine is lost first."""
        engine.replies.clear()
        engine.transport.tell(*message)
        self.await_(lambda: engine.replies or engine not in self._all)
        return engine.replies.popleft() if engine.replies else None

    def await_(self, done: Callable[[], object], at_start: bool = False) -> None:
        """Handle messages until `done()` holds. An engine that does not answer within its timeout is replaced."""
        while not done():
            self.wait(POLL_S)
            self.hear(at_start)

    def hear(self, at_start: bool = False) -> None:
        """Handle all arrived messages, and replace engines that have ended or timed out."""
        for engine in self:
            # Check this before reading, so that the last messages of an ended engine are still handled.
            gone = engine.transport.gone()
            for message in engine.transport.received():
                if engine in self._all:  # an earlier message may have led to its replacement
                    self._take(engine, at_start, *message)
            silent_s = time.monotonic() - (engine.transport.heard if engine.ready else engine.started)
            if gone is not None:
                self._replace(engine, gone, at_start)
            elif engine.transport.gone_at is not None:
                engine.ready = False  # no message can reach it
            elif silent_s > (self._around.silence_s if engine.ready else self._around.start_s):
                self._replace(engine, f"said nothing for {silent_s:.0f} s", at_start)

    def _take(self, engine: Engine, at_start: bool, what: str, *rest: Any) -> None:
        """Handle one message of an engine; the `server` module lists the messages."""
        if what == "ready":
            engine.ready, engine.slots = True, rest[0]
            self._listener.is_ready(engine, *rest)
        elif what == "work":
            self._listener.has_worked(engine, *rest)
        elif what == "published":
            self._listener.holds(engine, *rest)
        elif what == "reply":
            engine.replies.append(rest[0])
        elif what == "failed":
            if at_start or rest[0].startswith("ConfigurationError"):
                raise ConfigurationError(rest[0].removeprefix("ConfigurationError: "))
            self._replace(engine, rest[0], at_start)

    def count_rollout(self) -> None:
        """Reset the count of losses, because a rollout has ended: only losses without progress end the run."""
        self._losses = 0

    def _replace(self, engine: Engine, why: str, at_start: bool) -> None:
        """End an engine and start a replacement; give up after too many losses in a row."""
        # Already replaced in this round, because of its `failed` message.
        if engine not in self._all:
            return
        engine.transport.stop()
        words = engine.transport.last_words()
        self.lost += 1
        self._losses += 1
        if at_start or self._losses > MOST_LOSSES * len(self._all):
            raise GeneratorLostError(f"generator: {engine} {why}{words}")
        _log.warning("generator %s %s%s: it is started again", engine.name, why, words)
        self._all[self._all.index(engine)] = self._started(engine.number)
        self._listener.has_lost(engine)

    def end(self) -> None:
        """End all child processes; vLLM servers that the run did not start keep running."""
        # Ask all before waiting for any, so that they end in parallel.
        for engine in self._all:
            engine.transport.tell("stop")
        for engine in self._all:
            engine.transport.stop(at_once=False)
        self._all = []
