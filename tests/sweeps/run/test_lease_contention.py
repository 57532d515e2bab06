"""Tests that exactly one contender holds a lease, in any interleaving, also on file systems without locks.

Contenders run in threads, of which one runs at a time, with a virtual clock in seconds. Between any two file operations
another contender may run, stall for longer than the lease lasts, or be killed.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sweeps.run import lease as module
from sweeps.run.lease import Lease, LeaseLostError, holder_facts
from tests.examples import examples

BEAT_S, EXPIRY_S = 3.0, 12.0
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Killed(BaseException):
    """Raised by every operation of a killed process, so that it cannot clean up."""


@dataclass
class Actor:
    """A thread of a process."""

    process: int
    host: str
    work: Callable[[], None]
    wake: float = 0.0
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    has_ended: bool = False
    error: BaseException | None = None


class Stage:
    """A scheduler that lets one actor at a time run up to its next operation."""

    def __init__(self, seed: int, stalls: float) -> None:
        self.now = 0.0
        self.killed: set[int] = set()
        self._random = random.Random(seed)
        self._stalls = stalls
        self._actors: list[Actor] = []
        self._here = threading.local()
        self._back = threading.Semaphore(0)

    def start_actor(self, process: int, host: str, work: Callable[[], None]) -> None:
        actor = Actor(process, host, work, wake=self.now)
        self._actors.append(actor)

        def play() -> None:
            self._here.actor = actor
            actor.turn.acquire()
            try:
                self._alive(actor)
                actor.work()
            except Killed:
                pass
            except BaseException as error:
                actor.error = error
            actor.has_ended = True
            self._back.release()

        threading.Thread(target=play, daemon=True).start()

    def play(self) -> None:
        """Run all actors to their ends."""
        for _ in range(100_000):
            left = [actor for actor in self._actors if not actor.has_ended]
            if not left:
                break
            ready = [actor for actor in left if actor.wake <= self.now]
            if not ready:
                self.now = min(actor.wake for actor in left)
                continue
            actor = self._random.choice(ready)
            if self._random.random() < self._stalls:
                actor.wake = self.now + self._random.uniform(0, 2 * EXPIRY_S)
                continue
            actor.turn.release()
            self._back.acquire()
        else:
            raise AssertionError("the contenders never end")
        for actor in self._actors:
            if actor.error is not None:
                raise actor.error

    def let_others_run(self) -> None:
        """Let other actors run."""
        actor = getattr(self._here, "actor", None)
        if actor is not None:
            self._back.release()
            actor.turn.acquire()
            self._alive(actor)

    def _alive(self, actor: Actor) -> None:
        if actor.process in self.killed:
            raise Killed

    @property
    def actor(self) -> Actor:
        found: Actor = self._here.actor
        return found

    # --- replacements for the module's clocks, threads and file operations ---

    def sleep(self, length_s: float) -> None:
        self.actor.wake = self.now + length_s
        self.let_others_run()

    def thread(self, target: Callable[[], None], **_: Any) -> Any:
        parent, done = self.actor, threading.Event()

        def work() -> None:
            try:
                target()
            finally:
                done.set()

        def join() -> None:
            while not done.is_set():
                self.sleep(0.1)

        return SimpleNamespace(start=lambda: self.start_actor(parent.process, parent.host, work), join=join)

    def event(self) -> Any:
        real = threading.Event()

        def wait(length_s: float) -> bool:
            end = self.now + length_s
            while not real.is_set() and self.now < end:
                self.sleep(min(1.0, end - self.now))
            return real.is_set()

        return SimpleNamespace(set=real.set, clear=real.clear, wait=wait)

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **keywords: Any) -> Any:
            self.let_others_run()
            return real(*arguments, **keywords)

        return operation


@contextmanager
def replaced_operations(stage: Stage, flock: Callable[..., None]) -> Iterator[None]:
    """Replace the module's operations on files, threads and clocks by those of the stage."""
    clocks = {"monotonic": lambda: stage.now, "clock_gettime": lambda _: stage.now, "time": lambda: stage.now}
    locks = SimpleNamespace(flock=flock, LOCK_EX=1, LOCK_NB=2, LOCK_UN=3, LOCK_SH=4)
    with ExitStack() as stack:
        for name, replacement in {
            "time": SimpleNamespace(sleep=stage.sleep, **clocks),
            "threading": SimpleNamespace(Thread=stage.thread, Event=stage.event),
            "fcntl": locks,
            "node_name": lambda: stage.actor.host,
        }.items():
            stack.enter_context(patch.object(module, name, replacement))
        for name in ("open", "close", "pwrite", "fsync"):
            stack.enter_context(patch.object(os, name, stage.before(getattr(os, name))))
        for name in ("read_text", "glob", "replace", "unlink"):
            stack.enter_context(patch.object(Path, name, stage.before(getattr(Path, name))))
        yield


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 2**32),
    contenders=st.integers(2, 3),
    hosts=st.sampled_from(["one", "several"]),
    locks=st.sampled_from([*NO_FLOCK, None]),
    stalls=st.sampled_from([0.0, 0.02, 0.1]),
    kills=st.booleans(),
    earlier_file=st.sampled_from(["nothing", "released", "silent", "garbage"]),
)
@example(seed=1, contenders=3, hosts="several", locks=None, stalls=0.0, kills=False, earlier_file="silent")
def test_exactly_one_contender_holds_the_lease(
    seed: int, contenders: int, hosts: str, locks: int | None, stalls: float, kills: bool, earlier_file: str
) -> None:
    """Locks fail with an error, or (`None`) are local to each machine."""

    def flock(descriptor: int, operation: int) -> None:
        if locks is not None or hosts == "one":
            raise OSError(locks or errno.ENOSYS, "no locks")

    stage = Stage(seed, stalls)
    chance = random.Random(seed)
    written: list[int] = []
    acquired, lost = set(), set()

    def contend(number: int, directory: Path) -> None:
        lease = Lease(directory, beat_s=BEAT_S, expiry_s=EXPIRY_S, trusted_s=BEAT_S / 3)
        lease.acquire(wait_s=None)
        acquired.add(number)
        for _ in range(5):
            try:
                lease.check()
            except LeaseLostError:
                lost.add(number)
                break
            written.append(number)  # it may write at this moment
            if kills and chance.random() < 0.2:
                stage.killed.add(number)
            stage.sleep(chance.uniform(0, EXPIRY_S / 2))
        lease.release()

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        text = {
            "released": '{"host": "one", "pid": 7, "token": "old", "term": 4, "released": true}',
            "silent": '{"host": "gone", "pid": 7, "token": "old"}',  # written by a version without terms
            "garbage": "\0" * 30,
        }
        if earlier_file in text:
            (directory / ".writer.json").write_text(text[earlier_file])
        with replaced_operations(stage, flock):
            for number in range(contenders):
                host = "one" if hosts == "one" else f"host-{number}"
                stage.start_actor(number, host, lambda number=number: contend(number, directory))  # type: ignore[misc]
            stage.play()
        assert len(list(groupby(written))) == len(set(written)), f"an earlier holder wrote after a later one: {written}"
        assert acquired | stage.killed == set(range(contenders)), "a contender that was not killed never got the lease"
        if not stalls:
            assert not lost, "a contender that never stalled lost its lease"
        if not stage.killed and not lost:
            assert holder_facts(directory) is None
            assert sorted(path.name for path in directory.iterdir()) == [".writer.json", ".writer.lock"]


if __name__ == "__main__":
    pytest.main([__file__])
