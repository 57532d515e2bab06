"""A request to stop a run at its next clean border: raised by a scheduler's signal, honoured by the training loop.

A signal can arrive in the middle of an optimizer step or of a generation; all its handler does is to leave a note
here. The loop reads it where everything is consistent, saves, and ends by raising `RunInterruptedError`; whoever
started the run then decides what becomes of it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


class RunInterruptedError(Exception):
    """The run was asked to stop, has saved itself, and can be continued; `args[0]` says at which step and why."""


class Interruption:
    """The note. One for each process: `interruption` below."""

    def __init__(self) -> None:
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        """Whether the run is to stop at its next clean border."""
        return self.reason is not None

    def request(self, reason: str) -> None:
        """Ask the run to stop; the first reason stays."""
        self.reason = self.reason or reason

    def clear(self) -> None:
        """Forget the request."""
        self.reason = None

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
