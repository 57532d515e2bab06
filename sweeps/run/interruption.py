"""Requests to stop a run at its next step boundary: by a scheduler's signal, or by the study's decider.

A signal can arrive in the middle of an optimizer step or of generation, so its handler only notes the request here. A
study's controller may be on another machine, so it writes a file into the run's directory. The training loop checks
both at step boundaries, saves, and raises `RunInterruptedError`. The program that started the run then decides: after a
signal the run continues in another job; after a request of its study it stays stopped.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from sweeps.run.files import read_json, write_json

STOP_FILE = "stop.json"
# Seconds between two checks for the file, which may be on a slow file system.
_LOOK_S = 2.0


class RunInterruptedError(Exception):
    """Raised when a run has saved and stopped on request and can be resumed; `args[0]` has the step and reason."""


def ask_to_stop(run_dir: Path, reason: str) -> None:
    """Write the stop file of a run, on any machine: it stops at its next step boundary and does not resume itself."""
    write_json(run_dir / STOP_FILE, {"reason": reason})


def stop_asked(run_dir: Path) -> str | None:
    """Return the reason in a run's stop file; None if there is no such file."""
    path = run_dir / STOP_FILE
    try:
        exists = path.exists()
    except OSError:  # a file server is briefly unavailable: the next check finds the file
        return None
    return str(read_json(path).get("reason", "asked to stop")) if exists else None


def clear_stop_request(run_dir: Path) -> None:
    """Remove the stop file, so that the run can be resumed."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)


class Interruption:
    """Stop request of the run in this process. There is one per process, `interruption` below."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: str | None = None
        self._run_dir: Path | None = None
        self._looked = 0.0

    @property
    def reason(self) -> str | None:
        """Reason to stop at the next step boundary, or None; checks for the stop file every `_LOOK_S` seconds."""
        if self._noted is None and self._run_dir is not None and self._clock() - self._looked >= _LOOK_S:
            self._looked = self._clock()
            self._noted = stop_asked(self._run_dir)
        return self._noted

    @property
    def requested(self) -> bool:
        """Return whether the run should stop at its next step boundary."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Request a stop; the first reason is kept."""
        self._noted = self._noted or reason

    def clear(self) -> None:
        """Drop a noted request; a stop file stays."""
        self._noted = None

    @contextmanager
    def heeding(self, run_dir: Path) -> Iterator[None]:
        """Context manager: inside, a stop file in the run's directory counts as a request."""
        self._run_dir, self._looked = run_dir, self._clock() - _LOOK_S
        try:
            yield
        finally:
            self._run_dir = None

    @contextmanager
    def on_signals(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Context manager: inside, these signals request a stop; their earlier handlers are restored afterwards."""

        def note(number: int, frame: FrameType | None) -> None:
            self.request(signal.Signals(number).name)

        handlers = {number: signal.signal(number, note) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


interruption = Interruption()
