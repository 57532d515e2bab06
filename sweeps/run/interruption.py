"""A request to stop a run at its next clean border: by a scheduler's signal, or by whoever conducts the study.

A signal can arrive in the middle of an optimizer step or of a generation; all its handler does is to leave a note
here. A study's controller may be on another machine, so it leaves a file in the run's directory. The loop reads both
where everything is consistent, saves, and ends by raising `RunInterruptedError`; whoever started the run then decides
what becomes of it: after a signal it goes on, in another job; asked by its study, it stays where it is.
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
# Between two looks for the file: it may lie on a file system that is far away.
_LOOK_S = 2.0


class RunInterruptedError(Exception):
    """The run was asked to stop, has saved itself, and can be continued; `args[0]` says at which step and why."""


def ask_to_stop(run_dir: Path, reason: str) -> None:
    """Ask a run, wherever it is at work or is to be, to stop at its next clean border and not to go on by itself."""
    write_json(run_dir / STOP_FILE, {"reason": reason})


def stop_asked(run_dir: Path) -> str | None:
    """Why a run is asked to stop for good, or None."""
    path = run_dir / STOP_FILE
    try:
        asked = path.exists()
    except OSError:  # a file server that is away for a moment: the next look finds it
        return None
    return str(read_json(path).get("reason", "asked to stop")) if asked else None


def let_go_on(run_dir: Path) -> None:
    """Take the request back: the run is to be continued."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)


class Interruption:
    """The note. One for each process: `interruption` below."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: str | None = None
        self._run_dir: Path | None = None
        self._looked = 0.0

    @property
    def reason(self) -> str | None:
        """Why the run is to stop at its next clean border, or None."""
        if self._noted is None and self._run_dir is not None and self._clock() - self._looked >= _LOOK_S:
            self._looked = self._clock()
            self._noted = stop_asked(self._run_dir)
        return self._noted

    @property
    def requested(self) -> bool:
        """Whether the run is to stop at its next clean border."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask the run to stop; the first reason stays."""
        self._noted = self._noted or reason

    def clear(self) -> None:
        """Forget the request."""
        self._noted = None

    @contextmanager
    def heeding(self, run_dir: Path) -> Iterator[None]:
        """While inside, a request in the run's directory counts as well."""
        self._run_dir, self._looked = run_dir, self._clock() - _LOOK_S
        try:
            yield
        finally:
            self._run_dir = None

    @contextmanager
    def on_signals(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """While inside, these signals leave the note; what handled them before is put back afterwards."""

        def note(number: int, frame: FrameType | None) -> None:
            self.request(signal.Signals(number).name)

        before = {number: signal.signal(number, note) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


interruption = Interruption()
