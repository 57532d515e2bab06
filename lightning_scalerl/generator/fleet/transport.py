"""Starts and ends the child processes of a run's engines, and exchanges messages with them over a socket pair.

Each engine is one child process. It generates rollouts in its own process, or is a client of a vLLM server (see
`addresses.py`). `server.py` lists the messages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

from lightning_scalerl.generator.fleet.wire import Channel
from sweeps.process import block_signals, last_log_line

# Longest wait for an exit status, in seconds: the connection of an ending process closes before its status is set.
EXIT_S = 5.0
# Time for a process to end by itself, in seconds; a child that has started a server ends that server first.
STOP_S = 5.0
CHILD_MODULE = "lightning_scalerl.generator.fleet"


@dataclass(frozen=True)
class ChildSettings:
    """Settings that all children of a run share.

    Attributes:
        folder: folder for logs and published weights.
        silence_s: seconds without a message after which a child counts as lost.
        start_s: seconds that a child may take to start.
        arrival: set when a child has sent a message or has ended.
    """

    folder: Path
    silence_s: float
    start_s: float
    arrival: threading.Event


def _environment(device: str) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return {**variables, "CUDA_VISIBLE_DEVICES": device} if device else variables


class Child(Channel):
    """Engine in a child process, started by the constructor.

    Args:
        number: the engine's number, part of the name of its log file.
        settings: settings that all children of the run share.
        device: the child's CUDA_VISIBLE_DEVICES; empty to inherit this process's.
    """

    def __init__(self, number: int, settings: ChildSettings, device: str) -> None:
        parent_end, child_end = Pipe()
        command = [sys.executable, "-m", CHILD_MODULE, str(child_end.fileno()), str(settings.folder)]
        self._log = settings.folder / f"generator-{number}.log"
        with self._log.open("ab") as log, block_signals():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_end.fileno(),),
                env=_environment(device),
            )
        # Close the child's end here. Otherwise it stays open when the child ends, and no end of file arrives.
        child_end.close()
        super().__init__(parent_end, settings.arrival)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def end_reason(self) -> str | None:
        """Return how the child ended, or None while it may still send messages.

        After its connection has ended, the child has `EXIT_S` seconds to report an exit status.
        """
        if (status := self._process.poll()) is not None:
            return f"ended with status {status}"
        if self.closed_at is not None and time.monotonic() - self.closed_at >= EXIT_S:
            return "closed its connection but did not end"
        return None

    def last_words(self) -> str:
        """Return the last line of the child's log in parentheses; empty without a log."""
        words = last_log_line(self._log)
        return f" ({words})" if words else ""

    def stop(self, at_once: bool = True) -> None:
        """Kill the process and close the connection.

        With `at_once=False` the process first gets `STOP_S` seconds to end by itself.
        """
        if not at_once:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_S)
        self._process.kill()
        self._process.wait()
        self.close()
