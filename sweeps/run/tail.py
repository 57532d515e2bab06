"""Incremental reading of a growing journal: each update reads only the appended lines."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from sweeps.run.files import has_wrong_checksum, parse_line
from sweeps.run.journal import JOURNAL_FILE, JournalError, JournalView, Reading

# Beginning of a record, as `Journal` writes it.
_RECORD = re.compile(rb'\{"kind":"(train|eval)","time":[-+.\deE]+,"step":(-?\d+),"metrics":\{')
_BLOCK_BYTES = 1 << 20
_MARK_BYTES = 4096  # length of the last bytes read, which identify the file


class JournalTail:
    """Incremental version of `read_journal` for one journal.

    A line is read once it is complete. The file is read again from its beginning if it was replaced (by a mended
    journal), became shorter, or no longer contains the bytes read last.

    Args:
        run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL_FILE
        self._begin({})

    def _begin(self, passed: Mapping[str, int]) -> None:
        self._reading = Reading(self.path)
        self._reading.forget(passed)
        self._file: tuple[int, int] | None = None
        self._offset = 0  # first byte after the last line taken
        self._mark = 0, b""  # length and digest of the bytes before the offset

    def forget(self, steps: Mapping[str, int]) -> None:
        """Keep no records up to these steps, by kind, now or later, to save memory once they have been used.

        Lines that are forgotten before they are read are not parsed: only wrong checksums, and the damage that writers
        leave, are noticed in them.
        """
        self._reading.forget(steps)

    def update(self) -> JournalView:
        """Read the appended lines and return the journal as it is now, without forgotten records.

        Raises:
            JournalError: as for `read_journal`.
        """
        try:
            with self.path.open("rb", buffering=0) as handle:
                status = os.fstat(handle.fileno())
                file = status.st_dev, status.st_ino
                if self._file != file or status.st_size < self._offset or not self._known_again(handle):
                    self._begin(self._reading.passed)
                    self._file = file
                self._read(handle)
        except OSError as error:
            self._begin(self._reading.passed)
            reason = f"cannot read the journal ({error.strerror}); give a run directory"
            raise JournalError(f"{self.path}: {reason}") from error
        return self._reading.view()

    def _known_again(self, handle: FileIO) -> bool:
        length, digest = self._mark
        return _digest(os.pread(handle.fileno(), length, self._offset - length)) == digest if length else True

    def _read(self, handle: FileIO) -> None:
        """Read from the current offset to the last valid line; a torn end is left for the next update."""
        begin = at = self._offset
        handle.seek(at)
        rest = recent = b""
        damaged = False
        try:
            while block := handle.read(_BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    at += len(line) + 1
                    if (step := self._forgotten(line)) is not None:
                        if damaged:
                            self._reading.take(None)
                        self._reading.skip(step)
                    elif (entry := parse_line(line)) is None:
                        damaged = True  # torn if it is the last line, else damaged
                        continue
                    else:
                        self._reading.take(None if damaged else entry)
                    self._offset = at
                    recent = line
        finally:
            if self._offset > begin:
                recent = (recent + b"\n")[-_MARK_BYTES:]
                self._mark = len(recent), _digest(recent)

    def _forgotten(self, line: bytes) -> int | None:
        """Return the step of a record that is not kept, without parsing the line; None for any other line."""
        passed = self._reading.passed
        # Damage from power failures and torn writes is still noticed: zeros, and two lines in one.
        if not passed or not line.endswith(b"}") or b"\0" in line or line.count(b'{"kind":') != 1:
            return None
        match = _RECORD.match(line)
        if match is None or int(match[2]) > passed.get(match[1].decode(), -1) or has_wrong_checksum(line):
            return None
        return int(match[2])


class Tails:
    """Incremental `read_journal` for many journals, with one tail each.

    Args:
        passed: maps a kind of record to a step; records of that kind up to and including this step are skipped.
    """

    def __init__(self, passed: Mapping[str, int] | None = None) -> None:
        self._passed = dict(passed or {})
        self._tails: dict[Path, JournalTail] = {}

    def __call__(self, run_dir: Path) -> JournalView:
        """Return the journal in a run's directory as it is now.

        Raises:
            JournalError: as for `read_journal`.
        """
        if run_dir not in self._tails:
            self._tails[run_dir] = JournalTail(run_dir)
            self._tails[run_dir].forget(self._passed)
        return self._tails[run_dir].update()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
