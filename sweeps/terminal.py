"""Progress display: a bar on a terminal, a line every `EVERY_S` seconds elsewhere."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

# Seconds between two lines where there is no terminal: a log file that is read afterwards needs no more.
EVERY_S = 30.0

_KEPT_BYTES = 1 << 16  # of lines that nobody has read yet


class NeverBlocking:
    """Non-blocking writer to a stream whose reader may be slow or gone for good.

    Text that a pipe has no room for is buffered until the next write: the newest `_KEPT_BYTES`, the rest is dropped.

    Args:
        stream: text; one without a file descriptor of its own is written to as it is.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._kept = b""
        self._poll: select.poll | None = None
        with suppress(OSError, ValueError, AttributeError):
            self._descriptor = stream.fileno()
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLOUT)

    def write(self, text: str) -> None:
        """Write as much as the pipe has room for; buffer the rest, and drop its oldest lines beyond the limit."""
        if self._poll is None:
            self._stream.write(text)
            return
        self._kept += text.encode(errors="replace")
        if len(self._kept) > _KEPT_BYTES:
            _, _, self._kept = self._kept[-_KEPT_BYTES:].partition(b"\n")
        # A pipe that polls as writable takes up to PIPE_BUF bytes atomically, without blocking.
        while self._kept and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            self._kept = self._kept[os.write(self._descriptor, self._kept[: select.PIPE_BUF]) :]


# The time left is shown after at least this many updates, and if the two halves of the later ones agree in pace within
# a factor of STEADY.
LEAST_SEEN = 8
STEADY = 2.0


class Bar:
    """Progress bar: steps done of the total, a status text, and the estimated time left.

    Args:
        what: is being done, such as "training".
        total: steps.
        done: steps done before, which say nothing of how fast this process is.
        stream: where to; stderr, so that what is piped stays data.
        every_s: seconds between lines, where there is no terminal.
        clock: injected.
    """

    def __init__(
        self,
        what: str,
        total: int,
        done: int = 0,
        stream: TextIO | None = None,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._total = total
        self._begun_at = self._done = done
        self._stream = stream or sys.stderr
        self._every_s = every_s
        self._clock = clock
        self._written_s = clock()
        self._seen: list[tuple[int, float]] = []  # steps done, and when: of every update that made some
        self._text = ""
        self._rich: Any = None
        self._task: Any = None
        if self._stream.isatty():
            self._rich, self._task = self._open()
        else:
            self._write()

    def _open(self) -> tuple[Any, Any]:
        # Imported where there is something to draw on.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[said]}", markup=False),
        )
        shown = Progress(*columns, console=Console(file=self._stream), transient=False)
        task = shown.add_task(self._what, total=self._total, completed=self._done, said="")
        shown.start()
        return shown, task

    def update(self, done: int, text: str | None = None) -> None:
        """Show the number of steps done so far; `text` stays until it is replaced."""
        if done > self._done:
            self._seen.append((done, self._clock()))
        self._done = done
        self._text = self._text if text is None else text
        if self._rich is not None:
            self._rich.update(self._task, completed=done, said=self._said())
        elif self._clock() - self._written_s >= self._every_s:
            self._write()

    def close(self) -> None:
        """Stop the bar and leave its last state on screen; without a terminal, print it if there was progress."""
        if self._rich is not None:
            self._rich.update(self._task, completed=self._done, said=self._said())
            self._rich.stop()
        elif self._done != self._begun_at:
            self._write()

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, at the pace of the later half of this process's updates; None while it is not known.

        The pace is known once both halves of that later half agree within a factor of `STEADY`. The first steps are in
        neither: they also load and compile, and minutes of that would be taken for the pace of all.
        """
        if self._done >= self._total:
            return 0.0
        if len(self._seen) < LEAST_SEEN:
            return None
        seen = self._seen
        first, middle, last = seen[len(seen) // 2], seen[3 * len(seen) // 4], seen[-1]
        earlier, later = _seconds_a_step(first, middle), _seconds_a_step(middle, last)
        if max(earlier, later) > STEADY * min(earlier, later):
            return None
        return _seconds_a_step(first, last) * (self._total - self._done)

    def _said(self) -> str:
        left = f"{duration(left_s)} left" if (left_s := self.left_s) else ""
        return ", ".join(part for part in (self._text, left) if part)

    def _write(self) -> None:
        self._written_s = self._clock()
        said = self._said()
        self._stream.write(f"{self._what} {self._done}/{self._total}{': ' if said else ''}{said}\n")
        self._stream.flush()


def _seconds_a_step(begin: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 group`, `3 groups`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format seconds for people: `35 s`, `4 min`, `2 h 05 min`, `3 d 4 h`."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"
