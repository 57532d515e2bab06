"""Engines as children of this process: started, asked over a pair of sockets, and ended.

Each engine of a run is one: a child that samples, or a child that asks a server of vLLM (`addresses`). `server` lists
the messages; `ledger` tracks which engine has which rollout.
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
from pathlib import Path
from typing import Any

from lightning_scalerl.generator.fleet.wire import Line

# The kernel closes a connection a moment before the exit status of its process can be read.
EXIT_S = 5.0
# Time that a process has to end by itself; a child that has started a server ends it first.
STOP_S = 5.0
PROCESS = "lightning_scalerl.generator.fleet"


@dataclass(frozen=True)
class Surroundings:
    """Facts of the run that a child needs.

    Attributes:
        folder: for logs, and for weights that are published.
        silence_s: seconds without a message after which a child is lost.
        start_s: seconds that a child may take to start.
        news: set when a child has sent a message or has ended.
    """

    folder: Path
    silence_s: float
    start_s: float
    news: threading.Event


def _environment(device: str) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return {**found, "CUDA_VISIBLE_DEVICES": device} if device else found


class Child:
    """Engine in a child of this process, started when this object is made.

    Args:
        number: of the engine, for its log.
        around: the run that starts it.
        device: its CUDA_VISIBLE_DEVICES; empty for those of this process.
    """

    def __init__(self, number: int, around: Surroundings, device: str) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", PROCESS, str(theirs.fileno()), str(around.folder)]
        self._log = around.folder / f"generator-{number}.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=_environment(device),
            )
        # Open here as well it would stay open when the process ends, and its end would not be read.
        theirs.close()
        self._line = Line(ours, around.news)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def heard(self) -> float:
        """Time (monotonic) of its last message."""
        return self._line.heard

    @property
    def deaf(self) -> bool:
        """Return whether its connection has ended, so that no message can reach it."""
        return self._line.gone_at is not None

    def tell(self, *message: Any) -> None:
        """Queue a message; it is dropped if the child is gone."""
        self._line.tell(*message)

    def said(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that have arrived."""
        return self._line.said()

    def gone(self) -> str | None:
        """Return how it ended, None while it may still speak.

        A child whose connection has ended has a moment for its exit status to be there.
        """
        if (status := self._process.poll()) is not None:
            return f"ended with status {status}"
        gone_at = self._line.gone_at
        if gone_at is not None and time.monotonic() - gone_at >= EXIT_S:
            return "closed its connection and did not end"
        return None

    def last_words(self) -> str:
        """Return the last line of its log in brackets, empty where there is none."""
        with suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            return f" ({lines[-1].strip()[:300]})" if lines else ""
        return ""

    def ask_to_stop(self) -> None:
        """Ask it to end by itself, without waiting."""
        self._line.tell("stop")

    def stop(self, at_once: bool = True) -> None:
        """End the process, then the connection; unless `at_once` it gets a moment to end by itself."""
        if not at_once:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_S)
        self._process.kill()
        self._process.wait()
        self._line.close()
