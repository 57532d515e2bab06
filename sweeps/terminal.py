"""Terminal display: a bar, a line every `EVERY_S` seconds where there is no terminal, and tables that fit one."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.text import Text

# Seconds between two lines where there is no terminal: a log file that is read afterwards needs no more.
EVERY_S = 30.0

_KEPT_BYTES = 1 << 16  # of lines that nobody has read yet


def open_streams() -> None:
    """Make standard output and standard error writable, whatever the process was started with.

    A stream that was closed (`>&-`) writes nowhere: Python has None in its place, and the next file that is opened
    would take its descriptor, and with it what a child process prints. A character that the stream's encoding lacks,
    such as half of a surrogate pair in the name of a file, is written as an escape.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (until the process ends)
        elif isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


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
_BAR, _LEAST_BAR = 24, 6  # characters of a bar, and where its terminal is narrow


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
        self._parts: tuple[str, ...] = ()
        self._live: Any = None
        if on_screen(self._stream):
            # Imported where there is something to draw on.
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(console=console, refresh_per_second=4, get_renderable=lambda: self._drawn(console.width))
            self._live.start()
        else:
            self._write()

    def _drawn(self, width: int) -> Text:
        """Draw the bar on one line: of its texts as many as there is room for, the time left before all others."""
        from rich.text import Text

        count = f"{self._done}/{self._total}"
        left = [f"about {duration(left_s)} left"] if (left_s := self.left_s) else []
        room = max(0, width - len(self._what) - len(count) - 4)
        texts: list[str] = []
        for part in [*left, *self._parts]:
            if len("".join(texts)) + 2 * len(texts) + len(part) + _LEAST_BAR > room:
                break
            texts.append(part)
        length = max(_LEAST_BAR, min(_BAR, room - len("".join(texts)) - 2 * len(texts)))
        full = length * self._done // max(1, self._total)
        # What comes when the run ends stands last, as on a line elsewhere.
        told = ", ".join([text for text in texts if text not in left] + [text for text in texts if text in left])
        line = Text.assemble(
            f"{self._what} ", ("━" * full, "green"), ("━" * (length - full), "bright_black"), f" {count}  ", told
        )
        line.truncate(width, overflow="ellipsis")
        return line

    def update(self, done: int, *parts: str) -> None:
        """Show the number of steps done so far, and parts of a status text, the most important first.

        Without any part those of the last update stay; on a narrow terminal the last ones are left out.
        """
        if done > self._done:
            self._seen.append((done, self._clock()))
        self._done = done
        self._parts = tuple(one_line(part) for part in parts) or self._parts
        if self._live is None and self._clock() - self._written_s >= self._every_s:
            self._write()

    def close(self) -> None:
        """Stop the bar and leave its last state on screen; without a terminal, print it if there was progress."""
        if self._live is not None:
            self._live.stop()
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

    def _write(self) -> None:
        self._written_s = self._clock()
        left = [f"{duration(left_s)} left"] if (left_s := self.left_s) else []
        told = ", ".join([*self._parts, *left])
        self._stream.write(f"{self._what} {self._done}/{self._total}{': ' if told else ''}{told}\n")
        self._stream.flush()


def _seconds_a_step(begin: tuple[int, float], end: tuple[int, float]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def device_time(hours: float) -> str:
    """Return device hours as "3.20 device hours", or in minutes or seconds where that would be 0.00."""
    for unit, one in (("hours", 1.0), ("minutes", 60.0)):
        if hours * one >= 0.1:
            return f"{hours * one:.2f} device {unit}"
    return f"{hours * 3600:.2g} device seconds"


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


def on_screen(stream: TextIO) -> bool:
    """Return whether lines can be drawn anew on a stream: no pipe, no log, no TERM=dumb, and rich is installed."""
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    return stream.isatty() and not dumb and find_spec("rich") is not None


def one_line(text: str) -> str:
    """Replace unprintable characters, line breaks among them, by spaces, whatever a message quotes."""
    return "".join(ch if ch.isprintable() else " " for ch in text)


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` cells, its middle left out: the ends of a recipe's label tell it apart."""
    from rich.cells import cell_len

    text = one_line(text)
    if cell_len(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    tail = (width - 1) // 2
    end = next(at for at in range(len(text) + 1) if cell_len(text[at:]) <= tail)
    head = width - 1 - cell_len(text[end:])
    begin = next(at for at in range(len(text), -1, -1) if cell_len(text[:at]) <= head)
    return f"{text[:begin]}…{text[end:]}"


# Levels of a sparkline, where the terminal's encoding has them and where it has not.
BLOCKS = "▁▂▃▄▅▆▇█"
LETTERS = "_.-=+*#@"


def sparkline(values: Sequence[float], low: float, high: float, width: int, levels: str = BLOCKS) -> str:
    """Return at most `width` characters for a curve, its first and last value among them, on a scale from low to high.

    Args:
        values: in order.
        low, high: ends of the scale, which curves to be compared share.
        width: number of characters for a whole curve; fewer values take one each.
        levels: characters from the lowest to the highest.
    """
    count = min(width, len(values))
    kept = [values[at * (len(values) - 1) // max(1, count - 1)] for at in range(count)]
    top = len(levels) - 1
    return "".join(
        levels[round(top * min(1.0, max(0.0, (value - low) / (high - low))))] if high > low else levels[0]
        for value in kept
    )


@dataclass(frozen=True)
class Column:
    """A column of a table for a terminal.

    Attributes:
        name: its head.
        spare: the larger, the earlier it is left out where the terminal is narrow; 0 for one that always stays.
        least: cells that it may be shortened to; None for one that is shown whole or not at all.
        right: whether its cells are aligned to the right.
    """

    name: str
    spare: int = 0
    least: int | None = None
    right: bool = False


# A cell of a table: its text, or text and style.
Cell = str | tuple[str, str]
_GAP = 2


def fitted(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int, head: bool = True) -> list[Text]:
    """Lay out a table in lines of at most `width` cells: columns are left out or shortened, nothing is wrapped.

    Args:
        columns: of the table; those that no row fills are left out as well.
        rows: cells by column.
        width: of the terminal.
        head: whether the first line names the columns.
    """
    from rich.cells import cell_len
    from rich.text import Text

    cells = [
        [(one_line(cell), "") if isinstance(cell, str) else (one_line(cell[0]), cell[1]) for cell in row]
        for row in rows
    ]
    wanted = [
        max([cell_len(row[at][0]) for row in cells] + [cell_len(column.name) if head else 0])
        for at, column in enumerate(columns)
    ]
    kept = [at for at, column in enumerate(columns) if not column.spare or any(row[at][0] for row in cells)]

    def needed(chosen: Sequence[int]) -> int:
        least = [wanted[at] if columns[at].least is None else min(wanted[at], columns[at].least or 0) for at in chosen]
        return sum(least) + _GAP * (len(chosen) - 1)

    while needed(kept) > width and any(columns[at].spare for at in kept):
        kept.remove(max(kept, key=lambda at: columns[at].spare))
    widths = {at: wanted[at] for at in kept}
    # The widest of the columns that may be shortened gives way first; if that is not enough, the last ones do.
    while (excess := sum(widths.values()) + _GAP * (len(kept) - 1) - width) > 0:
        soft = [at for at in kept if columns[at].least is not None and widths[at] > (columns[at].least or 0)]
        if not soft:
            break
        at = max(soft, key=lambda at: widths[at])
        others = max([widths[other] for other in soft if other != at], default=0)
        widths[at] = max(columns[at].least or 0, widths[at] - excess, min(others, widths[at] - 1))
    lines = []
    for row in [[(column.name, "bold") for column in columns]] * head + cells:
        line, room = Text(no_wrap=True, overflow="crop"), width
        for number, at in enumerate(kept):
            gap = _GAP if number else 0
            own = max(0, min(widths[at], room - gap))
            if not own:
                break
            text = shortened(row[at][0], own)
            pad = " " * (own - cell_len(text))
            line.append(" " * gap)
            line.append(pad + text if columns[at].right else text, row[at][1])
            line.append("" if columns[at].right else pad)
            room -= own + gap
        line.rstrip()
        lines.append(line)
    return lines
