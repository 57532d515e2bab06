"""Terminal output: a progress bar (without a terminal, a line every `EVERY_S` seconds), and tables that fit."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Seconds between two lines without a terminal, which usually go to a log file.
EVERY_S = 30.0

_BUFFER_BYTES = 1 << 16  # largest amount of text that is kept while the reader is slow


def open_streams() -> None:
    """Make standard output and standard error usable, however the process was started.

    For a closed stream (`>&-`), Python sets None, and the next file to be opened would get its descriptor, and with it
    the output of child processes. Such a stream is replaced by one that discards everything. Characters that a stream's
    encoding lacks, such as half of a surrogate pair in a file name, are written as escapes.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


class NonBlockingWriter:
    """Writer to a stream whose reader may be slow or gone. It never blocks.

    Text that does not fit into a pipe is kept until the next write: the newest `_BUFFER_BYTES` of it.

    Args:
        stream: text stream. If it has no file descriptor, it is written to directly.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._buffer = b""
        self._poll: select.poll | None = None
        with suppress(OSError, ValueError, AttributeError):
            self._descriptor = stream.fileno()
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLOUT)

    def write(self, text: str) -> None:
        """Write as much as fits into the pipe. Keep the rest; beyond the limit, drop its oldest lines."""
        if self._poll is None:
            self._stream.write(text)
            return
        self._buffer += text.encode(errors="replace")
        if len(self._buffer) > _BUFFER_BYTES:
            _, _, self._buffer = self._buffer[-_BUFFER_BYTES:].partition(b"\n")
        # A pipe that is reported as writable takes up to PIPE_BUF bytes without blocking.
        while self._buffer and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            self._buffer = self._buffer[os.write(self._descriptor, self._buffer[: select.PIPE_BUF]) :]


class Bar:
    """Progress bar: steps done and in total, a status text, and the estimated time left.

    The first step does not count in the estimate, because it includes loading and compiling.

    Args:
        what: description of the work, such as "training".
        total: total number of steps.
        done: steps done before this process. They do not count in its speed.
        stream: output stream; stderr by default, so that piped stdout contains only data.
        every_s: seconds between lines without a terminal.
        clock: returns monotonic seconds; tests replace it.
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
        # Imported here, because most commands show no progress.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column as Share

        self._stream = stream or sys.stderr
        self._every_s, self._clock = every_s, clock
        self._begun_at = done
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Share(ratio=1)),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}", markup=False, table_column=Share(ratio=3, no_wrap=True)),
            console=Console(file=self._stream),
            refresh_per_second=4,
            speed_estimate_period=math.inf,
            get_time=clock,
            disable=not is_interactive(self._stream),
            expand=True,
        )
        self._progress.add_task(what, total=total, completed=done, status="")
        (self._task,) = self._progress.tasks
        self._progress.start()
        self._write()

    def update(self, done: int, *parts: str) -> None:
        """Show the number of steps done so far, and parts of a status text, the most important part first.

        Without parts, the last status text stays. On a narrow terminal the end of the text is cut off.
        """
        status = ", ".join(map(one_line, parts)) or self._task.fields["status"]
        self._progress.update(self._task.id, completed=done, status=status)
        if self._clock() - self._written_s >= self._every_s:
            self._write()

    def close(self) -> None:
        """Stop the bar, whose last state stays on screen. Without a terminal, print it if there was progress."""
        if not self._progress.disable:
            self._progress.stop()
        elif self._task.completed != self._begun_at:
            self._write()

    def _write(self) -> None:
        self._written_s = self._clock()
        if not self._progress.disable:
            return
        left_s = self._task.time_remaining
        status = [self._task.fields["status"], f"{duration(left_s)} left" if left_s else ""]
        text = ", ".join(filter(None, status))
        count = f"{self._task.description} {self._task.completed:g}/{self._task.total:g}"
        self._stream.write(f"{count}{': ' if text else ''}{text}\n")
        self._stream.flush()


def device_time(hours: float) -> str:
    """Format device hours as "3.20 device hours", or in minutes or seconds if that would be 0.00."""
    for unit, one in (("hours", 1.0), ("minutes", 60.0)):
        if hours * one >= 0.1:
            return f"{hours * one:.2f} device {unit}"
    return f"{hours * 3600:.2g} device seconds"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 group`, `3 groups`."""
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


def is_interactive(stream: TextIO) -> bool:
    """Return whether lines on a stream can be redrawn: it is a terminal, and TERM is not `dumb`."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def one_line(text: str) -> str:
    """Replace unprintable characters, including line breaks, by spaces."""
    return "".join(ch if ch.isprintable() else " " for ch in text)


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """Draw a curve with at most `width` characters, on a scale from low to high, from its first to its last value.

    Args:
        values: values in order.
        low, high: ends of the scale; the same for curves that are compared.
        width: largest number of characters. Fewer values take one each.
    """
    count = min(width, len(values))
    kept = [values[at * (len(values) - 1) // max(1, count - 1)] for at in range(count)]
    span = high - low or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * min(1.0, max(0.0, (value - low) / span)))] for value in kept)


@dataclass(frozen=True)
class Column:
    """A column of a table for a terminal.

    Attributes:
        name: its header.
        least: the column is shown only if the terminal has at least this many characters.
        soft: whether its cells may be cut off to make room for other columns.
        right: whether cells are aligned to the right.
    """

    name: str
    least: int = 0
    soft: bool = False
    right: bool = False


# A cell of a table: a text, a text with its style, or anything that rich can render.
Cell: TypeAlias = "str | tuple[str, str] | RenderableType"


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int) -> Table:
    """Make a table for a terminal of `width` characters, one line per row. Empty columns are left out."""
    from rich.table import Table
    from rich.text import Text

    def shown(cell: Cell) -> RenderableType:
        if not isinstance(cell, str | tuple):
            return cell
        text, style = (cell, "") if isinstance(cell, str) else cell
        return Text(one_line(text), style, no_wrap=True, overflow="ellipsis")

    cells = [[shown(cell) for cell in row] for row in rows]
    kept = [at for at, column in enumerate(columns) if column.least <= width and any(row[at] for row in cells)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in (columns[at] for at in kept):
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=not column.soft)
    for row in cells:
        table.add_row(*(row[at] for at in kept))
    return table
