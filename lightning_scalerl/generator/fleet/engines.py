"""Engines of a fleet: started, heard, asked, and replaced when they are lost.

This module tracks which engines are up and what they have sent. What that means for rollouts and weights is up to the
fleet, which implements `Listener`.
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

# Give up after so many losses (times the number of engines) without a rollout in between.
MOST_LOSSES = 3
# Longest wait before messages and the engines' state are looked at again.
POLL_S = 0.02


class GeneratorLostError(CannotGoOnError):
    """Raised when no engine can be kept alive, or one holds other weights than it was sent."""


@dataclass(eq=False)
class Engine:
    """State of one engine, as the trainer sees it. The engine that replaces a lost one has a state of its own."""

    number: int
    address: Address
    transport: Child
    started: float
    slots: int = 0
    ready: bool = False
    acknowledged: int = 0  # number of the weights that it uses
    aside: bool = False
    sampled: int = 0  # tokens of rollouts that it has not finished, by its last report
    replies: deque[Any] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Its address where it has one of its own, else its number."""
        return str(self.number) if self.address.kind == "local" else str(self.address)

    def __str__(self) -> str:
        return f"process {self.number}" if self.address.kind == "local" else self.name


class Listener(Protocol):
    """Receiver of what is heard of the engines: the fleet."""

    def is_ready(self, engine: Engine, slots: int, can_score: bool) -> None:
        """Hear that an engine is up, with nothing in flight and weights that are nobody's."""
        ...

    def has_worked(
        self, engine: Engine, finished: Sequence[Any], computed: Sequence[int], busy_s: float, sampled: int
    ) -> None:
        """Hear what an engine has finished and computed."""
        ...

    def holds(self, engine: Engine, number: int, digest: str) -> None:
        """Hear which weights an engine uses now."""
        ...

    def has_lost(self, engine: Engine) -> None:
        """Hear that an engine is gone, with all that it had."""
        ...


class Engines:
    """All engines of a fleet that are up or being started.

    Args:
        blueprints: by address, in the order of the engines' numbers.
        around: the run, with its limits.
        devices: CUDA_VISIBLE_DEVICES of the children in turn; empty to share that of this process.
        listener: that hears of them.
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

    def __contains__(self, engine: object) -> bool:
        return engine in self._all

    def places(self) -> list[dict[str, Any]]:
        """Return where each engine is and its state, by number; read by other threads without a lock."""
        return [{"where": str(engine.address), "state": "up" if engine.ready else "starting"} for engine in self]

    @property
    def up(self) -> list[Engine]:
        """Engines that messages can reach, in their order."""
        return [engine for engine in self._all if engine.ready]

    def start(self) -> None:
        """Start all of them, and wait until each is up.

        Raises:
            ConfigurationError: one is unusable.
            GeneratorLostError: one cannot be started.
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
        """Wait until an engine has sent something, at most `seconds` seconds."""
        self._around.news.wait(seconds)
        self._around.news.clear()

    def ask(self, engine: Engine, *message: Any) -> Any:
        """Return an engine's answer to a message, or None if it is lost first."""
        engine.replies.clear()
        engine.transport.tell(*message)
        self.await_(lambda: engine.replies or engine not in self._all)
        return engine.replies.popleft() if engine.replies else None

    def await_(self, done: Callable[[], object], at_start: bool = False) -> None:
        """Handle messages until a condition holds. Each engine answers before its timeout, or is replaced."""
        while not done():
            self.wait(POLL_S)
            self.hear(at_start)

    def hear(self, at_start: bool = False) -> None:
        """Handle what the engines have sent, and replace those that have ended or timed out."""
        for engine in self:
            # Looked at before reading, so that no last message is missed.
            gone = engine.transport.gone()
            for message in engine.transport.said():
                if engine in self._all:  # not replaced because of the message before
                    self._take(engine, at_start, *message)
            silent_s = time.monotonic() - (engine.transport.heard if engine.ready else engine.started)
            if gone is not None:
                self._replace(engine, gone, at_start)
            elif engine.transport.deaf:
                engine.ready = False  # no message can reach it
            elif silent_s > (self._around.silence_s if engine.ready else self._around.start_s):
                self._replace(engine, f"said nothing for {silent_s:.0f} s", at_start)

    def _take(self, engine: Engine, at_start: bool, what: str, *rest: Any) -> None:
        """Handle one message of an engine, as `server` lists them."""
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
        """Count a rollout that has ended: the losses before it do not end the run."""
        self._losses = 0

    def _replace(self, engine: Engine, why: str, at_start: bool) -> None:
        """End an engine and start another in its place; give up after too many losses in a row."""
        # Replaced already in this round, because of its own `failed` message.
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
        """End what was started, and leave the others."""
        # All get the message before any is waited for, so that they end at the same time.
        for engine in self._all:
            engine.transport.ask_to_stop()
        for engine in self._all:
            engine.transport.stop(at_once=False)
        self._all = []
