"""Transports: how the trainer starts or reaches an engine, talks to it, and learns that it is gone.

One protocol, three ways: a child of this process, an engine that somebody else has started (at an address, or where
it has announced itself), and a step of this SLURM job on another node. What is said over them is `server`'s, who has
which rollout is the ledger's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from lightning_scalerl.generator.addresses import Address
from lightning_scalerl.generator.announced import Announcement, listens_at
from lightning_scalerl.generator.wire import TOKEN, Caller, Line, OtherTokenError, call, call_until

# The kernel closes a connection a moment before the exit status of its process can be read.
EXIT_S = 5.0
# Interval at which a step's log is read for its port.
LOOK_S = 0.2
# Time that a process has to end by itself.
STOP_S = 5.0
SERVER = "lightning_scalerl.generator.server"


@dataclass(frozen=True)
class Surroundings:
    """Facts of the run that a transport needs: where logs go, who calls with which token, and its limits."""

    folder: Path
    token: bytes
    caller: Caller
    start_s: float
    news: threading.Event


class Transport(Protocol):
    """Connection to one engine, started or connected when it is made."""

    @property
    def pid(self) -> int | None:
        """Process id of what was started on this node, None if nothing was."""
        ...

    @property
    def heard(self) -> float:
        """Time (monotonic) of its last message."""
        ...

    @property
    def deaf(self) -> bool:
        """Return whether its connection has ended, so that no message can reach it."""
        ...

    @property
    def refused(self) -> bool:
        """Return whether it will not talk to us, now or later."""
        ...

    def tell(self, *message: Any) -> None:
        """Queue a message; it is dropped if the engine is gone."""
        ...

    def said(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that have arrived."""
        ...

    def gone(self) -> str | None:
        """Return how it ended, None while it may still speak."""
        ...

    def last_words(self) -> str:
        """Return the last line of its log in brackets, empty where there is none."""
        ...

    def ask_to_stop(self) -> None:
        """Ask it to end by itself, without waiting."""
        ...

    def stop(self, at_once: bool = True) -> None:
        """End the connection, and what was started for it; unless `at_once` it gets a moment to end by itself."""
        ...


class _Talks:
    """What all transports have: a line, its state, and what is said over it."""

    _line: Line

    @property
    def heard(self) -> float:
        """Time (monotonic) of its last message."""
        return self._line.heard

    @property
    def deaf(self) -> bool:
        """Return whether its connection has ended."""
        return self._line.gone_at is not None

    @property
    def refused(self) -> bool:
        """Return whether it has sent us away for good."""
        return self._line.refused

    @property
    def sent(self) -> int:
        """Bytes of weights that went over the connection."""
        return self._line.sent

    def tell(self, *message: Any) -> None:
        """Queue a message."""
        self._line.tell(*message)

    def said(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that have arrived."""
        return self._line.said()


class Given(_Talks):
    """Engine that somebody else has started: it is connected, again and again for a while, and left.

    Args:
        address: of the engine.
        around: the run that calls it.
    """

    def __init__(self, address: Address, around: Surroundings) -> None:
        self._address, self._around = address, around
        self._closed = threading.Event()
        self._failed: Exception | None = None
        self._line = Line(self._open, around.news, carries=True)

    def _open(self) -> Connection:
        caller, start_s = self._around.caller, self._around.start_s
        return call_until(self._call, str(self._address), caller, start_s, self._closed, self._attempt_failed)

    def _call(self) -> Connection:
        """Connect once, in a thread; a file is read anew each time."""
        if self._address.kind != "file":
            return call(self._address.host, self._address.port, self._around.token, self._around.caller)
        host, port, token = Announcement(Path(self._address.path)).read()
        try:
            return call(host, port, token, self._around.caller)
        except OtherTokenError as error:  # each start makes its own
            raise OSError(f"the engine that has announced itself there is gone; another is at {host}:{port}") from error

    def _attempt_failed(self, error: Exception) -> None:
        self._failed = error

    @property
    def pid(self) -> int | None:
        """Nothing runs on this node."""
        return None

    def gone(self) -> str | None:
        """Return how its connection ended, None while there is one, or one is being made."""
        if not self.deaf:
            return None
        return f"{'lost its connection' if self._line.opened else 'cannot be reached'}: {self._line.why}"

    def last_words(self) -> str:
        """Return why the last attempt to connect has failed: its log lies elsewhere."""
        return "" if self._failed is None or self._line.opened else f" ({self._failed})"

    def ask_to_stop(self) -> None:
        """Leave it as it is: it may work for the next run."""

    def stop(self, at_once: bool = True) -> None:
        """End the connection, and leave the engine running."""
        self._closed.set()
        self._line.close()


class _Started:
    """Process on this node that was started for an engine, with its log."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], pass_fds: tuple[int, ...]) -> None:
        self.log = log
        with log.open("ab") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=pass_fds, env=environment
            )

    def ended(self) -> str | None:
        """Return how it ended, None while it runs."""
        status = self.process.poll()
        return None if status is None else f"ended with status {status}"

    def last_words(self) -> str:
        """Return the last line of its log in brackets."""
        with suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            return f" ({lines[-1].strip()[:300]})" if lines else ""
        return ""

    def end(self, within_s: float | None) -> None:
        """End it, by force after so many seconds, or at once."""
        if within_s is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=within_s)
        self.process.kill()
        self.process.wait()


def _environment(device: str) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return {**found, "CUDA_VISIBLE_DEVICES": device} if device else found


class Child(_Talks):
    """Engine in a child of this process, over a pair of sockets that nobody else can reach.

    Args:
        number: of the engine, for its log.
        around: the run that starts it.
        device: its CUDA_VISIBLE_DEVICES; empty for those of this process.
    """

    def __init__(self, number: int, around: Surroundings, device: str) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", SERVER, str(theirs.fileno()), str(around.folder)]
        log = around.folder / f"generator-{number}.log"
        self._started = _Started(command, log, _environment(device), (theirs.fileno(),))
        # Open here as well it would stay open when the process ends, and its end would not be read.
        theirs.close()
        self._line = Line(lambda: ours, around.news)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._started.process.pid

    def gone(self) -> str | None:
        """Return how it ended; one that cannot be heard has a moment for its exit status to be there."""
        if (ended := self._started.ended()) is not None:
            return ended
        gone_at = self._line.gone_at
        if gone_at is not None and time.monotonic() - gone_at >= EXIT_S:
            return "closed its connection and did not end"
        return None

    def last_words(self) -> str:
        """Return the last line of its log in brackets."""
        return self._started.last_words()

    def ask_to_stop(self) -> None:
        """Ask it to end by itself."""
        self._line.tell("stop")

    def stop(self, at_once: bool = True) -> None:
        """End the process, then the connection."""
        self._started.end(None if at_once else STOP_S)
        self._line.close()


class Step(Given):
    """Engine as a step of this SLURM job on another node: `srun` starts it there, and it is connected over TCP.

    It ends by itself when nobody has been connected for `start_s`, and with the job.

    Args:
        address: with the node's name.
        number: of the engine, for its log.
        around: the run that starts it.
        device: numbers of its GPUs among those that SLURM gives the step; empty for all.
    """

    def __init__(self, address: Address, number: int, around: Surroundings, device: str) -> None:
        place = f"--nodelist={address.host}"
        shared = ["--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none", "--input=none", "--quiet"]
        once = ["--once", str(around.start_s)]
        # On all addresses of its node: which of them leads here is not known, and whoever comes needs the token.
        engine = [sys.executable, "-u", "-m", SERVER, "--listen", "0.0.0.0:0", *once]
        # By the engine itself: SLURM sets CUDA_VISIBLE_DEVICES of a step, whatever the environment says.
        engine += ["--gpus", device] if device else []
        environment = {**_environment(""), TOKEN: around.token.decode()}
        log = around.folder / f"generator-{number}.log"
        log.unlink(missing_ok=True)  # of a step before, with another port
        self._started = _Started(["srun", place, *shared, *engine], log, environment, ())
        super().__init__(address, around)

    def _call(self) -> Connection:
        """Connect once the step has said its port."""
        return call(self._address.host, self._port(), self._around.token, self._around.caller)

    def _port(self) -> int:
        deadline = time.monotonic() + self._around.start_s
        while True:
            with suppress(OSError):
                if place := listens_at(self._started.log.read_text(errors="replace")):
                    return place[1]
            if self._closed.wait(LOOK_S) or time.monotonic() > deadline:
                raise OSError(f"the step on {self._address.host} did not start within {self._around.start_s:.0f} s")

    @property
    def pid(self) -> int:
        """Process id of the `srun` that has started the step."""
        return self._started.process.pid

    def gone(self) -> str | None:
        """Return how the step or its connection ended."""
        return self._started.ended() or super().gone()

    def last_words(self) -> str:
        """Return the last line of the step's log in brackets."""
        return self._started.last_words()

    def ask_to_stop(self) -> None:
        """Ask it to end by itself: it is this run's own."""
        self._line.tell("stop")

    def stop(self, at_once: bool = True) -> None:
        """End the step, then the connection."""
        if at_once:
            self._started.process.terminate()
        self._started.end(STOP_S)
        super().stop()


def reach(address: Address, number: int, around: Surroundings, device: str) -> Transport:
    """Start the engine of an address, or connect to it."""
    if address.given:
        return Given(address, around)
    if address.kind == "srun":
        return Step(address, number, around, device)
    return Child(number, around, device)
