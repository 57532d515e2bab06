"""Read a growing journal incrementally: each update reads only the lines that were appended."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from sweeps.run.files import has_wrong_checksum, parse_line
from sweeps.run.journal import JOURNAL_FILE, JournalError, JournalParser, JournalView

# Beginning of a record, as `Journal` writes it.
_RECORD = re.compile(rb'\{"kind":"(train|eval)","time":[-+.\deE]+,"step":(-?\d+),"metrics":\{')
_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 4096  # number of bytes read last that are hashed, to notice changes of the file


class JournalTail:
    """Incremental version of `read_journal` for one journal.

    A line is read as soon as it is complete. The file is read from its beginning again if it was replaced (by a mended
    journal), became shorter, or no longer contains the bytes that were read last.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL_FILE
        self._begin({})

    def _begin(self, dropped_up_to: Mapping[str, int]) -> None:
        """Start at the beginning of the file. Records up to the steps in `dropped_up_to`, by kind, are not stored."""
        self._parser = JournalParser(self.path)
        self._parser.forget(dropped_up_to)
        self._file: tuple[int, int] | None = None  # device and inode
        self._offset = 0  # first byte after the last line parsed
        self._mark = 0, b""  # length and digest of the bytes before the offset

    def forget(self, steps: Mapping[str, int]) -> None:
        """Drop the records up to these steps, by kind, and do not store such records later, to save memory.

        Lines with such records that are read later are not parsed. In them, only a wrong checksum, or damage from a
        crash of the writer, is noticed.
        """
        self._parser.forget(steps)

    def update(self) -> JournalView:
        """Read the appended lines, and return the journal as it is now, without forgotten records.

        Raises:
            JournalError: as for `read_journal`.
        """
        try:
            with self.path.open("rb", buffering=0) as handle:
                status = os.fstat(handle.fileno())
                file = status.st_dev, status.st_ino
                if self._file != file or status.st_size < self._offset or not self._is_same_file(handle):
                    self._begin(self._parser.forgotten)
                    self._file = file
                self._read(handle)
        except OSError as error:
            self._begin(self._parser.forgotten)
            reason = f"cannot read the journal ({error.strerror}); give a run directory"
            raise JournalError(f"{self.path}: {reason}") from error
        return self._parser.view()

    def _is_same_file(self, handle: FileIO) -> bool:
        """Return whether the bytes before the current offset are those that were read last."""
        length, digest = self._mark
        return _digest(os.pread(handle.fileno(), length, self._offset - length)) == digest if length else True

    def _read(self, handle: FileIO) -> None:
        """Parse the lines from the current offset to the last valid line. A torn end is left for the next update."""
        begin = at = self._offset
        handle.seek(at)
        rest = recent = b""
        damaged = False
        try:
            while block := handle.read(_BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    at += len(line) + 1
                    if (step := self._forgotten_step(line)) is not None:
                        if damaged:
                            self._parser.take(None)
                        self._parser.skip(step)
                    elif (entry := parse_line(line)) is None:
                        damaged = True  # unless this is the last line, which may still be incomplete
                        continue
                    else:
                        self._parser.take(None if damaged else entry)
                    self._offset = at
                    recent = line
        finally:
            if self._offset > begin:
                recent = (recent + b"\n")[-_MARK_BYTES:]
                self._mark = len(recent), _digest(recent)

    def _forgotten_step(self, line: bytes) -> int | None:
        """Return the step of a record that is not to be stored, without parsing the line; None for any other line."""
        forgotten = self._parser.forgotten
        # What a power failure or a torn write leaves is still noticed: zeros, and two records in one line.
        if not forgotten or not line.endswith(b"}") or b"\0" in line or line.count(b'{"kind":') != 1:
            return None
        match = _RECORD.match(line)
        if match is None or int(match[2]) > forgotten.get(match[1].decode(), -1) or has_wrong_checksum(line):
            return None
        return int(match[2])


class Tails:
    """Incremental `read_journal` for many journals: a `JournalTail` for each.

    Args:
        forgotten: by kind of record, the last step whose records are not stored; None to store all records.
    """

    def __init__(self, dropped_up_to: Mapping[str, int] | None = None) -> None:
        self._forgotten = dict(dropped_up_to or {})
        self._tails: dict[Path, JournalTail] = {}

    def __call__(self, run_dir: Path) -> JournalView:
        """Return the journal in a run's directory as it is now.

        Raises:
            JournalError: as for `read_journal`.
        """
        if run_dir not in self._tails:
            self._tails[run_dir] = JournalTail(run_dir)
            self._tails[run_dir].forget(self._forgotten)
        return self._tails[run_dir].update()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
