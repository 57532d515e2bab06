"""A log of JSON lines or CSV that grows: each look reads what was appended since the last one.

What is taken from a row is what `sweeps.source.raw` takes from the whole file, so that a log read bit by bit gives the
same metrics as one read at once (a property test holds the two together). A file that cannot be read so (quotes in CSV,
another character set, a log of another form) says so, and is read whole by the readers of `sweeps.source`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any

from sweeps.run.files import parse_json
from sweeps.run.journal import JOURNAL_FILE
from sweeps.source import csv_logger, journals
from sweeps.source.cells import number
from sweeps.source.raw import STEP_COLUMNS, step_column

# Values of one metric with their steps, in the order of logging.
Column = list[tuple[float, float]]
_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 4096  # before the place where reading goes on, by which the file is known again
_BOM = b"\xef\xbb\xbf"


class Ending(Enum):
    """State of a log's last line, if nothing ends it.

    OPEN: it is being written. TORN: its writer has ended somehow: an object that is whole counts, numbers that may lack
    digits do not. WHOLE: its writer has ended well, and it counts.
    """

    OPEN = "open"
    TORN = "torn"
    WHOLE = "whole"


@dataclass(frozen=True)
class Cut:
    """Place in a file where a process that was killed has left half a line, and another goes on writing.

    Attributes:
        at: offset of the first byte behind.
        before: digest of the bytes before it, by which the file is known to be the same.
    """

    at: int
    before: str

    @classmethod
    def of(cls, path: Path) -> Cut | None:
        """Return the cut at the end of a file; None if a line ends there, or there is no file."""
        try:
            with path.open("rb", buffering=0) as handle:
                size = handle.seek(0, os.SEEK_END)
                before = _before(handle, size)
        except OSError:
            return None
        return cls(size, _digest(before)) if before and not before.endswith(b"\n") else None


class UnfitError(Exception):
    """Raised for a log that is not to be read line by line."""


class Rows:
    """Metrics in rows, by column and in the order of logging, as rows become known.

    Args:
        wanted: columns whose values are kept.
        step: column of the step; None for a tracker's usual name.
    """

    def __init__(self, wanted: Sequence[str], step: str | None) -> None:
        self._step = step
        self._wanted = tuple(wanted)
        self._kept = frozenset([*(STEP_COLUMNS if step is None else [step]), *wanted])
        self._column: str | None = None  # the column of the step
        # Of the columns that may hold the step and of those that are wanted: row and value.
        self._cells: dict[str, list[tuple[int, float]]] = {}
        self.names: dict[str, None] = {}
        self.columns: dict[str, Column] = {}
        self.count = 0
        self.version = 0  # one more whenever columns do not only grow

    def add(self, row: Mapping[str, Any]) -> None:
        """Take the next row of the log."""
        at, self.count = self.count, self.count + 1
        found = {}
        for name in self._kept & row.keys():
            value = number(row[name])
            if math.isfinite(value):
                found[name] = value
                self._cells.setdefault(name, []).append((at, value))
        if not row.keys() <= self.names.keys():
            self.names |= dict.fromkeys(row)
            self.columns |= {name: [] for name in self._wanted if name in self.names and name not in self.columns}
            column = step_column(list(self.names), self._step)
            if column != self._column:
                self._column = column
                self._part_again()
                return
        if self._column in found:
            for name in self._wanted:
                if name in found:
                    self.columns[name].append((found[self._column], found[name]))

    def _part_again(self) -> None:
        """Make the columns anew: a name has come that goes before the one that was taken for the step."""
        self.version += 1
        steps = dict(self._cells.get(self._column or "", ()))
        for name, column in self.columns.items():
            column[:] = [(steps[at], value) for at, value in self._cells.get(name, ()) if at in steps]

    @property
    def has_steps(self) -> bool:
        """Return whether one of the columns is that of the step."""
        return self._column is not None


class GrowingLog:
    """Reader of a log of JSON lines or CSV that goes on where it was.

    Where the file is another one than before, or shorter, or no longer holds what was read last, it is read anew.

    Args:
        path: the file.
        new_rows: makes an empty table.
        lenient: whether lines that are no JSON are somebody's words, as on standard output; else they are damage.
        cuts: where torn lines end.
    """

    def __init__(
        self, path: Path, new_rows: Callable[[], Rows], lenient: bool = False, cuts: Sequence[Cut] = ()
    ) -> None:
        self._path, self._new_rows, self._lenient, self._cuts = path, new_rows, lenient, cuts
        self._file: tuple[int, int] | None = None
        self._versions = 0
        self.rows = new_rows()
        self._begin()

    def _begin(self) -> None:
        self._versions += self.rows.version + 1
        self.rows = self._new_rows()
        self.left_out = 0  # lines that are damaged
        self._offset = 0  # behind the last line that was taken
        self._mark = b""
        self._first = True
        self._take: Callable[[bytes], None] = self._take_object if self._is_json else self._take_header

    @property
    def version(self) -> int:
        """Number that changes whenever the columns do not only grow."""
        return self._versions + self.rows.version

    @property
    def _is_json(self) -> bool:
        return self._lenient or self._path.suffix.lower() != ".csv"

    def update(self, ending: Ending) -> None:
        """Read what was appended since the last look.

        Raises:
            UnfitError: it is a log to be read whole.
            OSError: it cannot be read.
        """
        with self._path.open("rb", buffering=0) as handle:
            status = os.fstat(handle.fileno())
            file = status.st_dev, status.st_ino
            if file != self._file or status.st_size < self._offset or _before(handle, self._offset) != self._mark:
                self._begin()
                self._check()
                self._file = file
            # At the end once more from the beginning: something before the mark may have been written anew.
            elif ending is not Ending.OPEN:
                self._begin()
            cuts = sorted(cut.at for cut in self._cuts if _digest(_before(handle, cut.at)) == cut.before)
            handle.seek(self._offset)
            rest = b""
            while block := handle.read(_BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._take_line(line, cuts)
                    self._offset += len(line) + 1
            self._mark = _before(handle, self._offset)
        if ending is not Ending.OPEN:
            if rest:
                self._take_line(rest, cuts, ending)
            self._file = None  # whoever goes on with it may end that line otherwise

    def _check(self) -> None:
        """Check that the file is none that a reader of its own knows by its name.

        Raises:
            UnfitError: it is.
        """
        logger = self._path.name == csv_logger.FILE and (self._path.parent / csv_logger.BESIDE).is_file()
        if logger or (self._path.name == JOURNAL_FILE and journals.is_journal(self._path)):
            raise UnfitError

    def _take_line(self, line: bytes, cuts: Sequence[int], ending: Ending = Ending.WHOLE) -> None:
        """Take a line, or the two that a cut makes of it."""
        for cut in cuts:
            if self._offset < cut < self._offset + len(line):
                self._take_torn(line[: cut - self._offset])
                line = line[cut - self._offset :]
        if ending is Ending.TORN:
            self._take_torn(line)
        else:
            self._take(line)

    def _take_torn(self, line: bytes) -> None:
        """Take a line of which the end may be lost: an object shows whether it is whole, numbers do not."""
        if self._is_json:
            self._take(line)
        else:
            self.left_out += 1

    def _take_object(self, line: bytes) -> None:
        line = line.removeprefix(_BOM) if self._first else line
        if not line.strip():
            return
        if not self._lenient and b"\0" in line:
            raise UnfitError  # left by a crash: what stands behind it may be whole
        row = None
        if line.lstrip().startswith(b"{"):
            try:
                row = parse_json(line)
            except ValueError:
                row = None
        if not isinstance(row, dict):
            self.left_out += not self._lenient
            return
        if self._first and not self._lenient:
            if "log_history" in row:
                raise UnfitError  # TRL's trainer state
            if _of_verl(row):
                self._take = self._take_of_verl
                self._take(line)
                return
        self._first = False
        self.rows.add(row)

    def _take_of_verl(self, line: bytes) -> None:
        """Take a line of verl's file logger: {"step": 10, "data": {...}}."""
        self._first = False
        if not line.strip():
            return
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if _of_verl(row):
            self.rows.add({**row["data"], "step": row["step"]})
        else:
            self.left_out += 1

    def _take_header(self, line: bytes) -> None:
        text = _cells(line.removeprefix(_BOM))
        if not any(text):
            return
        header = ",".join(text)
        if len(text) < 2 or text[0][:1] in ("{", "[") or header.startswith("sep=") or max(map(header.count, ";\t")) > 0:
            raise UnfitError
        names = [name.strip() for name in text]

        def take(line: bytes) -> None:
            cells = _cells(line)
            if any(cells):
                row: dict[str, str] = {}
                for name, cell in zip(names, [*cells, *[""] * len(names)], strict=False):
                    row.setdefault(name, cell)  # of a repeated name the first column counts
                self.rows.add(row)

        self._take = take


def _of_verl(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("data"), dict) and "step" in row


def _cells(line: bytes) -> list[str]:
    """Return the cells of a line of CSV without quotes.

    Raises:
        UnfitError: there are some, or it is no text as most have it.
    """
    line = line.removesuffix(b"\r")
    if any(mark in line for mark in (b'"', b"\r", b"\0")):
        raise UnfitError
    try:
        return line.decode().split(",")
    except UnicodeDecodeError as error:
        raise UnfitError from error


def _before(handle: FileIO, at: int) -> bytes:
    length = min(at, _MARK_BYTES)
    return os.pread(handle.fileno(), length, at - length)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
