"""Read a log of JSON lines or CSV incrementally: each poll reads only what was appended since the last one.

The metrics equal those that `sweeps.source.raw` reads from the whole file (a property test compares them). A file that
cannot be read line by line (CSV with quotes, another encoding, another format) raises `UnfitError`. It is then read as
a whole, by `sweeps.source`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import Any

from sweeps.run.files import parse_json
from sweeps.run.journal import JOURNAL_FILE
from sweeps.source import csv_logger, journals, verl
from sweeps.source.cells import number
from sweeps.source.raw import STEP_COLUMNS
from sweeps.source.vocabulary import step_column

# Values of one metric with their steps, in the order of logging.
Column = list[tuple[float, float]]
_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 4096  # number of bytes before the read position that are compared, to recognise the file
_BOM = b"\xef\xbb\xbf"


class Ending(Enum):
    """Treatment of a log's last line if it has no newline.

    OPEN: the line is still being written, so ignore it. TORN: the writer has ended abnormally, so accept a complete
    JSON object, but not a CSV line, which may lack digits. WHOLE: the writer has ended normally, so accept the line.
    """

    OPEN = "open"
    TORN = "torn"
    WHOLE = "whole"


@dataclass(frozen=True)
class HalfLineEnd:
    """Position in a file where a killed process left half a line, after which another process appends.

    Attributes:
        at: offset of the first byte after the half line.
        before: digest of the bytes before that offset, which shows whether the file is still the same.
    """

    at: int
    before: str

    @classmethod
    def of(cls, path: Path) -> HalfLineEnd | None:
        """Return the end of a file that ends in half a line; None if it ends in a newline, is empty or missing."""
        try:
            with path.open("rb", buffering=0) as handle:
                size = handle.seek(0, os.SEEK_END)
                before = _bytes_before(handle, size)
        except OSError:
            return None
        return cls(size, _digest(before)) if before and not before.endswith(b"\n") else None


class UnfitError(Exception):
    """Raised for a log that cannot be read line by line."""


class Rows:
    """Table of metrics that grows by rows, in the order of logging.

    Args:
        wanted: columns whose values are kept.
        step: name of the step column; None for the usual names of trackers.

    Attributes:
        names: dictionary whose keys are the names of all columns, in order; its values are None.
        columns: rows (step, value) of each wanted column.
        count: number of rows.
        version: number that increases whenever existing rows of `columns` change. A new row does not count.
    """

    def __init__(self, wanted: Sequence[str], step: str | None) -> None:
        self._step = step
        self._wanted = tuple(wanted)
        self._kept_columns = frozenset([*(STEP_COLUMNS if step is None else [step]), *wanted])
        self._column: str | None = None  # name of the step column
        # Row numbers and values, of the wanted columns and of columns that may turn out to be the step column.
        self._cells: dict[str, list[tuple[int, float]]] = {}
        self.names: dict[str, None] = {}
        self.columns: dict[str, Column] = {}
        self.count = 0
        self.version = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the next row of the log."""
        row_number, self.count = self.count, self.count + 1
        values = {}
        for name in self._kept_columns & row.keys():
            value = number(row[name])
            if math.isfinite(value):
                values[name] = value
                self._cells.setdefault(name, []).append((row_number, value))
        if not row.keys() <= self.names.keys():
            self.names |= dict.fromkeys(row)
            self.columns |= {name: [] for name in self._wanted if name in self.names and name not in self.columns}
            column = step_column(list(self.names), self._step)
            if column != self._column:
                self._column = column
                self._rebuild()
                return
        if self._column in values:
            for name in self._wanted:
                if name in values:
                    self.columns[name].append((values[self._column], values[name]))

    def _rebuild(self) -> None:
        self.version += 1
        steps = dict(self._cells.get(self._column or "", ()))
        for name, column in self.columns.items():
            column[:] = [(steps[at], value) for at, value in self._cells.get(name, ()) if at in steps]

    @property
    def has_steps(self) -> bool:
        """True if the log has a step column."""
        return self._column is not None


class GrowingLog:
    """Incremental reader of a log of JSON lines or CSV.

    If the file was replaced, has become shorter, or no longer contains the bytes read last, it is read from its
    beginning.

    Args:
        path: the file.
        new_rows: makes an empty table.
        lenient: whether to ignore lines that are not JSON, as on standard output; otherwise they count as damaged.
        cuts: positions where half lines end.
    """

    def __init__(
        self, path: Path, new_rows: Callable[[], Rows], lenient: bool = False, cuts: Sequence[HalfLineEnd] = ()
    ) -> None:
        self._path, self._new_rows, self._lenient, self._cuts = path, new_rows, lenient, cuts
        self._file: tuple[int, int] | None = None
        self._versions = 0
        self.rows = new_rows()
        self._begin()

    def _begin(self) -> None:
        self._versions += self.rows.version + 1
        self.rows = self._new_rows()
        self.left_out = 0  # number of damaged lines
        self._offset = 0  # end of the last complete line
        self._mark = b""  # last bytes before the offset
        self._first = True  # no row has been read
        self._parse: Callable[[bytes], None] = self._parse_object if self._is_json else self._parse_header

    @property
    def version(self) -> int:
        """Number that changes whenever the columns change other than by growing."""
        return self._versions + self.rows.version

    @property
    def _is_json(self) -> bool:
        return self._lenient or self._path.suffix.lower() != ".csv"

    def update(self, ending: Ending) -> None:
        """Read what was appended since the last call.

        Raises:
            UnfitError: the log must be read as a whole.
            OSError: the log cannot be read.
        """
        with self._path.open("rb", buffering=0) as handle:
            status = os.fstat(handle.fileno())
            file = status.st_dev, status.st_ino
            if file != self._file or status.st_size < self._offset or _bytes_before(handle, self._offset) != self._mark:
                self._begin()
                self._check_name()
                self._file = file
            # When the command has ended, read all again, because bytes before the mark may have been rewritten.
            elif ending is not Ending.OPEN:
                self._begin()
            cuts = sorted(cut.at for cut in self._cuts if _digest(_bytes_before(handle, cut.at)) == cut.before)
            handle.seek(self._offset)
            rest = b""
            while block := handle.read(_BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    self._parse_line(line, cuts)
                    self._offset += len(line) + 1
            self._mark = _bytes_before(handle, self._offset)
        if ending is not Ending.OPEN:
            if rest:
                self._parse_line(rest, cuts, ending)
            self._file = None  # read all again next time, because another attempt may complete this line differently

    def _check_name(self) -> None:
        """Raise UnfitError if `sweeps.source` has a special reader for a file of this name."""
        logger = self._path.name == csv_logger.FILE and (self._path.parent / csv_logger.PARAMETERS_FILE).is_file()
        if logger or (self._path.name == JOURNAL_FILE and journals.is_journal(self._path)):
            raise UnfitError

    def _parse_line(self, line: bytes, cuts: Sequence[int], ending: Ending = Ending.WHOLE) -> None:
        """Process a line. If it contains a position in `cuts`, it is two lines: a half line, and what was appended."""
        for cut in cuts:
            if self._offset < cut < self._offset + len(line):
                self._parse_torn(line[: cut - self._offset])
                line = line[cut - self._offset :]
        if ending is Ending.TORN:
            self._parse_torn(line)
        else:
            self._parse(line)

    def _parse_torn(self, line: bytes) -> None:
        """Process a line that may be incomplete. JSON shows whether it is; a line of CSV counts as damaged."""
        if self._is_json:
            self._parse(line)
        else:
            self.left_out += 1

    def _parse_object(self, line: bytes) -> None:
        line = line.removeprefix(_BOM) if self._first else line
        if not line.strip():
            return
        if not self._lenient and b"\0" in line:
            raise UnfitError  # a crash has left NUL bytes, and the text after them may be a complete row
        row = _value(line) if line.lstrip().startswith(b"{") else None
        if not isinstance(row, dict):
            self.left_out += not self._lenient
            return
        if self._first and not self._lenient:
            if "log_history" in row:
                raise UnfitError  # TRL's trainer state, which is read as a whole
            if verl.is_row(row):
                self._parse = self._parse_verl_row
                self._parse(line)
                return
        self._first = False
        self.rows.add(row)

    def _parse_verl_row(self, line: bytes) -> None:
        """Process a line of verl's file logger, such as {"step": 10, "data": {...}}."""
        self._first = False
        if not line.strip():
            return
        row = _value(line)
        if verl.is_row(row):
            self.rows.add({**row["data"], "step": row["step"]})
        else:
            self.left_out += 1

    def _parse_header(self, line: bytes) -> None:
        header_cells = _cells(line.removeprefix(_BOM))
        if not any(header_cells):
            return
        header = ",".join(header_cells)
        # Not plain CSV: a single column, JSON, or a separator other than a comma.
        if (
            len(header_cells) < 2
            or header_cells[0][:1] in ("{", "[")
            or header.startswith("sep=")
            or max(map(header.count, ";\t")) > 0
        ):
            raise UnfitError
        names = [name.strip() for name in header_cells]

        def parse_row(line: bytes) -> None:
            cells = _cells(line)
            if any(cells):
                row: dict[str, str] = {}
                for name, cell in zip(names, [*cells, *[""] * len(names)], strict=False):
                    row.setdefault(name, cell)  # if a name is repeated, the first column counts
                self.rows.add(row)

        self._parse = parse_row


def _value(line: bytes) -> Any:
    """Return the JSON value of a line; None if the line is not JSON."""
    with suppress(ValueError):
        return parse_json(line)
    return None


def _cells(line: bytes) -> list[str]:
    """Split a line of CSV without quotes into cells.

    Raises:
        UnfitError: the line has quotes or control characters, or is not UTF-8.
    """
    line = line.removesuffix(b"\r")
    if any(mark in line for mark in (b'"', b"\r", b"\0")):
        raise UnfitError
    try:
        return line.decode().split(",")
    except UnicodeDecodeError as error:
        raise UnfitError from error


def _bytes_before(handle: FileIO, at: int) -> bytes:
    """Return the last `_MARK_BYTES` bytes before the offset `at`, or fewer at the file's beginning."""
    length = min(at, _MARK_BYTES)
    return os.pread(handle.fileno(), length, at - length)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
