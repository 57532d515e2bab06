"""Tests of file access: readers never see partial writes, and a full disk leaves the old content."""

from __future__ import annotations

import errno
import math
import os
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings
from sweeps.run.files import (
    append_lines,
    lines_from_end,
    parse_json,
    parse_line,
    parse_lines,
    read_json,
    whole_lines,
    write_atomically,
    write_json,
)
from sweeps.run.lease import Lease, holder_facts
from sweeps.run.spec import SPEC_FILE, RunSpec, budget_of, check_form, curve_of


def test_appended_lines_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"n": 0}, {"n": 1, "text": "a\nb ✓"}])
    append_lines(path, [{"n": 2}], durable=True)
    assert parse_lines(path.read_bytes()) == [{"n": 0}, {"n": 1, "text": "a\nb ✓"}, {"n": 2}]
    assert path.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize("torn", [b'{"n": 9', b"\0\0\0", b"\xff", b'{"n":9}'])
def test_a_torn_line_does_not_affect_the_next_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"n": 0}])
    with path.open("ab") as handle:
        handle.write(torn)
    append_lines(path, [{"n": 1}])
    numbers = [entry["n"] for entry in parse_lines(path.read_bytes())]
    assert [n for n in numbers if n != 9] == [0, 1]


@pytest.mark.parametrize("torn", [b"", b'{"n": 9'])
def test_an_append_on_a_full_disk_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, [{"n": 0}])
    path.write_bytes(path.read_bytes() + torn)
    before, write, room = path.read_bytes(), os.write, [5]

    def write_little(descriptor: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: room.pop()])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_little)
        with pytest.raises(OSError, match="No space"):
            append_lines(path, [{"n": 1}, {"n": 2}])
    assert not room and path.read_bytes() == before
    append_lines(path, [{"n": 1}])
    assert [entry["n"] for entry in parse_lines(path.read_bytes())] == [0, 1]


@pytest.mark.parametrize("first", [True, False])
def test_an_undone_append_keeps_lines_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """A failed append removes its own partial line, unless another process has written after it."""
    path, theirs, write, room = tmp_path / "lines.jsonl", b'{"n":7}\n', os.write, [5]
    append_lines(path, [{"n": 0}])

    def full(descriptor: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if first:
            write(descriptor, theirs)
        count = write(descriptor, data[: room.pop()])
        if not first:
            write(descriptor, b"\n" + theirs)
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            append_lines(path, [{"n": 1}])
    append_lines(path, [{"n": 1}])
    assert [entry["n"] for entry in parse_lines(path.read_bytes())] == [0, 7, 1]


def test_non_finite_values_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        append_lines(path, [{"n": 0}, {"n": math.nan}])
    assert path.read_bytes() == b""


def test_whole_lines_end_with_the_last_valid_one() -> None:
    good = b'{"n":0}\nrubbish\n{"n":1}\n'
    for rest in (b"", b'{"n"', b"\0\0\0\n", b'"text"\n[1]\n{"n":'):
        lines, length = whole_lines(good + rest)
        assert lines == good.split(b"\n")[:-1] and length == len(good)


@given(st.lists(st.sampled_from([b"\n", b"a", b"bcd", b"\n\n"])).map(b"".join), st.integers(1, 9))
def test_lines_from_the_end_are_the_whole_lines_reversed(content: bytes, block: int) -> None:
    lines = content.split(b"\n")[:-1]
    assert list(lines_from_end(BytesIO(content), block_bytes=block)) == lines[::-1]
    begins = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    for max_bytes in range(len(content) + 2):
        first = len(content) - max_bytes
        expected = [line for begin, line in zip(begins, lines, strict=True) if begin > first or first <= 0]
        assert list(lines_from_end(BytesIO(content), max_bytes, block)) == expected[::-1]


def test_only_the_end_of_a_long_file_is_read() -> None:
    class Counting(BytesIO):
        taken = 0

        def read(self, size: int | None = -1) -> bytes:
            content = super().read(size)
            self.taken += len(content)
            return content

    handle = Counting(b"a line\n" * 100_000)
    lines = lines_from_end(handle)
    assert [next(lines) for _ in range(2000)] == [b"a line"] * 2000
    assert handle.taken < 50_000


def test_json_is_replaced_atomically_and_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": math.inf})
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert read_json(path) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    path.write_text("[1]")
    assert read_json(path) == {} and read_json(tmp_path / "none") == {}


DEEP = "[" * 100_000 + "]" * 100_000  # Python's parser raises a RecursionError for it


def test_json_that_is_nested_too_deeply_counts_as_unreadable(tmp_path: Path) -> None:
    """Each of our files with such content is treated like any other unreadable file."""
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json(DEEP)
    assert parse_line(DEEP.encode()) is None
    for name in (SPEC_FILE, LAUNCH_FILE, ".writer.json"):
        (tmp_path / name).write_text(DEEP)
    assert read_json(tmp_path / SPEC_FILE) == {}
    with pytest.raises(UserError, match="not a run's frozen specification"):
        RunSpec.read(tmp_path)
    check_form([tmp_path])
    assert budget_of(tmp_path) is None and curve_of(tmp_path) is None
    with pytest.raises(UserError, match="does not say how the study was launched"):
        LaunchSettings.read(tmp_path)
    assert LaunchSettings.scheduler_of(tmp_path) is None
    assert (holder_facts(tmp_path) or {}).get("token") is None
    lease = Lease(tmp_path, beat_s=0.1, expiry_s=0.5)
    lease.acquire(0)  # a damaged lease file has no heartbeat, so the lease is free
    lease.release()
