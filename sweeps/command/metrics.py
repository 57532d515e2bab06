"""Incremental reader of a command's metrics: each poll reads only new data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.command.growing import Column, Cut, Ending, GrowingLog, Rows, UnfitError
from sweeps.command.settings import STDOUT, STDOUT_FILE, Command, newest
from sweeps.run.files import sync
from sweeps.source.log import Log
from sweeps.source.raw import no_steps, read_logs

# Files that are read line by line as they grow; all others are read as a whole when they have changed.
_BY_LINE = (".jsonl", ".ndjson", ".csv")


@dataclass(frozen=True)
class Found:
    """Metrics of a source: by column, in the order of logging; names of all columns, and the number of rows.

    While `version` is the same, columns only grow. left_out: number of damaged lines that were skipped.
    """

    columns: Mapping[str, Column]
    names: Sequence[str] = ()
    rows: int = 0
    version: int = 0
    left_out: int = 0


class Source:
    """Incremental reader of a command's metrics.

    Args:
        command: names the source and the columns.
        run_dir: the member's folder, where its standard output is stored.
        cuts: positions in the file where killed attempts left half a line, see `seal`.

    Attributes:
        ending: how to treat a last line without a newline.
    """

    def __init__(self, command: Command, run_dir: Path, cuts: Sequence[Cut] = ()) -> None:
        self._command, self._cuts = command, cuts
        self._stdout = command.source == STDOUT
        self._path = str(run_dir / STDOUT_FILE) if self._stdout else command.source
        self._stamp: object = None
        self._latest = Found({})
        self._log: GrowingLog | None = None
        # the file of `_log`, and the version of its rows that was returned last
        self._log_of, self._log_version = "", -1
        self._unfit = ""  # a file that cannot be read line by line
        self.ending = Ending.OPEN
        wanted = [*command.rewards.values(), *command.keep, command.compute.column or ""]
        self._columns = [name for name in dict.fromkeys(wanted) if name]

    @property
    def title(self) -> str:
        """The source's name in messages."""
        return "standard output" if self._stdout else self._command.source

    @property
    def left_out(self) -> int:
        """Number of damaged lines that were skipped."""
        return self._latest.left_out

    def seal(self) -> Cut | None:
        """Terminate half a line that a killed process left, so that the next process appends a new line.

        Standard output is our file, and gets a newline. A file of the command is not changed; the position is returned.
        """
        if self._command.remote or self._command.is_pattern:
            return None
        path = Path(self._path)
        cut = Cut.of(path)
        if cut is None or not self._stdout:
            return None if cut is None or path.suffix.lower() not in _BY_LINE else cut
        with path.open("ab") as handle:
            handle.write(b"\n")
        return None

    def sync(self) -> None:
        """Return once everything that the command has logged to files is on the disk."""
        place = None if self._command.remote else newest(self._path) if self._command.is_pattern else self._path
        for path in [] if place is None else _files(Path(place)):
            sync(path)

    def read(self) -> Found:
        """Return the current metrics; empty before there are any.

        Raises:
            UserError: the source exists but cannot be read.
        """
        if self._command.remote:
            self._latest = self._of(read_logs(self._command.source, self._command.step))
            return self._latest
        place = newest(self._path) if self._command.is_pattern else self._path
        stamp = None if place is None else (place, self.ending, *_stamps(Path(place)))
        if place is None or not Path(place).exists() or stamp == self._stamp:
            return self._latest
        self._latest = self._by_line(place) or self._of(self._of_files(place))
        self._stamp = stamp
        return self._latest

    def _by_line(self, place: str) -> Found | None:
        """Return the metrics of a log that is read line by line; None for other files."""
        path = Path(place)
        if place == self._unfit or not (self._stdout or path.suffix.lower() in _BY_LINE) or not path.is_file():
            return None
        if self._log is None or self._log_of != place:
            self._log_of = place
            self._log = GrowingLog(path, lambda: Rows(self._columns, self._command.step), self._stdout, self._cuts)
        try:
            self._log.update(self.ending)
        except UnfitError:
            self._unfit = place
            return None
        except OSError:  # deleted since the check above
            return self._latest
        rows = self._log.rows
        if rows.count and not rows.has_steps:
            raise no_steps(self.title, list(rows.names), self._command.step)
        version = self._latest.version + (self._log.version != self._log_version)
        self._log_version = self._log.version
        return Found(rows.columns, list(rows.names), rows.count, version, self._log.left_out)

    def _of_files(self, place: str) -> list[Log]:
        path = Path(place)
        if (path.is_file() and not path.stat().st_size) or (path.is_dir() and not any(path.iterdir())):
            return []
        return read_logs(place, self._command.step)

    def _of(self, logs: Sequence[Log]) -> Found:
        columns: dict[str, Column] = {}
        for log in logs:
            for name in self._columns:
                if name in log.names:
                    series = log.series(name)
                    pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
                    columns.setdefault(name, []).extend(pairs)
        names = list(dict.fromkeys(name for log in logs for name in log.names))
        return Found(columns, names, sum(log.rows for log in logs), self._latest.version + 1)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of a file, or of all files below a folder, to detect changes."""
    stamps = []
    for each in _files(path):
        try:
            status = each.stat()
        except OSError:
            continue
        stamps.append((str(each), status.st_size, status.st_mtime_ns))
    return stamps


def _files(path: Path) -> list[Path]:
    """Return a file, or all files below a folder, sorted."""
    return [path] if not path.is_dir() else sorted(each for each in path.rglob("*") if each.is_file())
