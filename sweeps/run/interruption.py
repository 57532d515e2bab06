"""Requests to stop a run at its next step boundary: by a signal of the scheduler, or by the study's decider.

A signal can arrive in the middle of an optimizer step or of generation, so its handler only records the request. The
study's controller may be on another machine, so it writes a file into the run's directory. At each step boundary the
training loop checks for both, saves, and raises `RunInterruptedError`. After a signal, the program that started the run
continues it in another job. After a request by its study, the run stays stopped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sweeps.run.files import read_json, write_json

STOP_FILE = "stop.json"
# Seconds between two checks for the stop file, because its file system may be slow.
_CHECK_EVERY_S = 2.0
_STDERR = 2
_CTRL_C = b"Ctrl-C: the run stops as soon as it is saved; a second Ctrl-C ends it at once\n"


class RunInterruptedError(Exception):
    """Raised when a run has saved and stopped on request. It can be resumed; `args[0]` has step and reason."""


def ask_to_stop(run_dir: Path, reason: str) -> None:
    """Write the stop file of a run, on this or another machine. The run stops at its next step boundary."""
    write_json(run_dir / STOP_FILE, {"reason": reason})


def requested_stop(run_dir: Path) -> str | None:
    """Return the reason in a run's stop file; None if there is no such file."""
    path = run_dir / STOP_FILE
    try:
        exists = path.exists()
    except OSError:  # the file server is unavailable: a later check finds the file
        return None
    return str(read_json(path).get("reason", "asked to stop")) if exists else None


def clear_stop_request(run_dir: Path) -> None:
    """Remove the stop file, so that the run can be resumed."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)


class Interruption:
    """Stop request for the run in this process. The process has one: `interruption`, at the end of this file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reason: str | None = None
        self._run_dir: Path | None = None
        self._last_check = 0.0

    @property
    def reason(self) -> str | None:
        """Reason to stop at the next step boundary; None without one. Looks for a stop file every 2 seconds."""
        if self._reason is None and self._run_dir is not None and self._clock() - self._last_check >= _CHECK_EVERY_S:
            self._last_check = self._clock()
            self._reason = requested_stop(self._run_dir)
        return self._reason

    @property
    def requested(self) -> bool:
        """True if the run should stop at its next step boundary."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Request a stop. If there was a request before, its reason is kept."""
        self._reason = self._reason or reason

    def clear(self) -> None:
        """Drop the request in memory. A stop file stays."""
        self._reason = None

    @contextmanager
    def watching_stop_file(self, run_dir: Path) -> Iterator[None]:
        """Also obey a stop file in the run's directory during a `with` block."""
        self._run_dir, self._last_check = run_dir, self._clock() - _CHECK_EVERY_S
        try:
            yield
        finally:
            self._run_dir = None

    @contextmanager
    def on_signals(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Let these signals request a stop during a `with` block. Earlier handlers are restored afterwards.

        The second SIGINT (Ctrl-C) raises KeyboardInterrupt at once, because the next step boundary may be minutes away.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            self.request(signal.Signals(number).name)
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.write(_STDERR, _CTRL_C)  # `print` may fail in a signal handler

        handlers = {number: signal.signal(number, handle) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


interruption = Interruption()
