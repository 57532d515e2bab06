"""Read the metrics that a trainer's command logs, incrementally: each poll reads only new data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.command.growing import Column, Ending, GrowingLog, HalfLineEnd, Rows, UnfitError
from sweeps.command.settings import STDOUT, STDOUT_FILE, Command, newest
from sweeps.run.files import sync
from sweeps.source.log import Log
from sweeps.source.raw import no_steps, read_logs

# Formats that are read line by line as the file grows. Other files are read as a whole whenever they have changed.
_BY_LINE = (".jsonl", ".ndjson", ".csv")


@dataclass(frozen=True)
class SourceMetrics:
    """All metrics that the command has logged so far.

    Attributes:
        columns: rows (step, value) of each column that is needed, in the order of logging.
        names: names of all columns.
        rows: number of rows.
        version: as long as it stays the same, columns have only grown.
        left_out: number of damaged lines that were left out.
    """

    columns: Mapping[str, Column]
    names: Sequence[str] = ()
    rows: int = 0
    version: int = 0
    left_out: int = 0


class Source:
    """Incremental reader of a command's metrics.

    Args:
        command: command whose metrics are read.
        run_dir: the member's folder, which has the command's standard output.
        cuts: positions in the metrics file where killed attempts left half a line, see `mark_half_line`.

    Attributes:
        ending: how to treat a last line without a newline.
    """

    def __init__(self, command: Command, run_dir: Path, cuts: Sequence[HalfLineEnd] = ()) -> None:
        self._command, self._cuts = command, cuts
        self._stdout = command.source == STDOUT
        self._path = str(run_dir / STDOUT_FILE) if self._stdout else command.source
        self._stamp: object = None
        self._latest = SourceMetrics({})
        self._log: GrowingLog | None = None
        # Path of `_log`, and the version of its rows at the last poll.
        self._log_path, self._log_version = "", -1
        self._unfit = ""  # path of a file that cannot be read line by line
        self.ending = Ending.OPEN
        wanted = [*command.rewards.values(), *command.keep, command.compute.column or ""]
        self._columns = [name for name in dict.fromkeys(wanted) if name]

    @property
    def title(self) -> str:
        """Name of the place where the metrics are logged, for messages."""
        return "standard output" if self._stdout else self._command.source

    @property
    def left_out(self) -> int:
        """Number of damaged lines that were left out."""
        return self._latest.left_out

    def mark_half_line(self) -> HalfLineEnd | None:
        """Mark where a killed process left half a line, before another process appends to the file.

        The file with the standard output gets a newline. A file that the command itself writes is not changed.

        Returns:
            For a file that the command writes, the position after the half line; None if there is no half line.
        """
        if self._command.remote or self._command.is_pattern:
            return None
        path = Path(self._path)
        cut = HalfLineEnd.of(path)
        if cut is None or not self._stdout:
            return None if cut is None or path.suffix.lower() not in _BY_LINE else cut
        with path.open("ab") as handle:
            handle.write(b"\n")
        return None

    def sync(self) -> None:
        """Flush to the disk all files to which the command logs its metrics."""
        file = None if self._command.remote else newest(self._path) if self._command.is_pattern else self._path
        for path in [] if file is None else _files(Path(file)):
            sync(path)

    def read(self) -> SourceMetrics:
        """Return all metrics so far; no columns if the file or address does not exist yet.

        Raises:
            UserError: it exists but cannot be read.
        """
        if self._command.remote:
            self._latest = self._of(read_logs(self._command.source, self._command.step))
            return self._latest
        file = newest(self._path) if self._command.is_pattern else self._path
        stamp = None if file is None else (file, self.ending, *_stamps(Path(file)))
        if file is None or not Path(file).exists() or stamp == self._stamp:
            return self._latest
        self._latest = self._read_by_line(file) or self._of(self._read_whole(file))
        self._stamp = stamp
        return self._latest

    def _read_by_line(self, file: str) -> SourceMetrics | None:
        """Return the metrics of a file that can be read line by line; None for other files."""
        path = Path(file)
        if file == self._unfit or not (self._stdout or path.suffix.lower() in _BY_LINE) or not path.is_file():
            return None
        if self._log is None or self._log_path != file:
            self._log_path = file
            self._log = GrowingLog(path, lambda: Rows(self._columns, self._command.step), self._stdout, self._cuts)
        try:
            self._log.update(self.ending)
        except UnfitError:
            self._unfit = file
            return None
        except OSError:  # the file was deleted since the check above
            return self._latest
        rows = self._log.rows
        if rows.count and not rows.has_steps:
            raise no_steps(self.title, list(rows.names), self._command.step)
        version = self._latest.version + (self._log.version != self._log_version)
        self._log_version = self._log.version
        return SourceMetrics(rows.columns, list(rows.names), rows.count, version, self._log.left_out)

    def _read_whole(self, file: str) -> list[Log]:
        path = Path(file)
        if (path.is_file() and not path.stat().st_size) or (path.is_dir() and not any(path.iterdir())):
            return []
        return read_logs(file, self._command.step)

    def _of(self, logs: Sequence[Log]) -> SourceMetrics:
        columns: dict[str, Column] = {}
        for log in logs:
            for name in self._columns:
                if name in log.names:
                    series = log.series(name)
                    pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
                    columns.setdefault(name, []).extend(pairs)
        names = list(dict.fromkeys(name for log in logs for name in log.names))
        return SourceMetrics(columns, names, sum(log.rows for log in logs), self._latest.version + 1)


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of a file or of all files in a folder, which show changes."""
    stamps = []
    for file in _files(path):
        try:
            status = file.stat()
        except OSError:
            continue
        stamps.append((str(file), status.st_size, status.st_mtime_ns))
    return stamps


def _files(path: Path) -> list[Path]:
    return [path] if not path.is_dir() else sorted(file for file in path.rglob("*") if file.is_file())
