"""Tests of damaged journals: the broken line is named, the file is kept, and the run resumes without a missing step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.run.journal import JOURNAL_FILE, Journal, JournalError, covered_step, read_journal
from sweeps.run.progress import check_journal_owner, is_done, journal_damage, looks_whole
from sweeps.run.repair import cut_broken_journal, find_break
from tests.examples import examples

STEPS, EVERY = 9, 2


class KilledError(Exception):
    """Raised where a process is killed."""


def run_member(run_dir: Path, until: int = STEPS, end: bool = True, keep: int = 2) -> int:
    """Run a member up to a step; return the step from which it resumed.

    It repairs its journal, resumes from the newest usable checkpoint, and records metrics that depend only on the step.
    """
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    broken = find_break(run_dir)
    if broken is not None:
        for path in checkpoints.iterdir():
            if int(path.name) > broken.step:
                path.unlink()
        cut_broken_journal(broken)
    covered = covered_step(run_dir)
    for path in checkpoints.iterdir():
        if covered is None or int(path.name) > covered:
            path.unlink()
    saved = sorted((int(path.name) for path in checkpoints.iterdir()), reverse=True)
    begin = saved[0] if saved else 0
    journal = Journal(run_dir)
    if journal.path.stat().st_size:
        journal.resume(begin if saved else -1)
    else:
        journal.header(run="abc")
    if not saved:
        journal.record("eval", 0, {"pass_rate": 0.1})
    for step in range(begin + 1, until + 1):
        journal.record("train", step, {"loss": 1 / step})
        if step % 3 == 0:
            journal.record("eval", step, {"pass_rate": step / 10})
        if step % EVERY == 0 or step == STEPS:
            (checkpoints / str(step)).touch()
            journal.checkpoint(step)
            for old in sorted(map(int, (path.name for path in checkpoints.iterdir())), reverse=True)[keep:]:
                (checkpoints / str(old)).unlink()
    if end and until == STEPS:
        journal.end(STEPS, "finished")
    journal.close()
    return begin


@contextmanager
def temporary_run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"):
        yield Path(folder) / "run"


def undisturbed_records() -> list[tuple[str, int, dict[str, float]]]:
    with temporary_run_dir() as run_dir:
        run_member(run_dir)
        return read_journal(run_dir).deterministic()


EXPECTED = undisturbed_records()


def damage(raw: bytes, at: float, how: str, byte: int) -> bytes:
    position = min(int(at * len(raw)), len(raw) - 1)
    return {
        "a byte": raw[:position] + bytes([byte]) + raw[position + 1 :],
        "a newline": raw[:position] + b"\n" + raw[position:],
        "a hole": raw[:position] + b"\0" * 30 + raw[position + 30 :],
        "a cut": raw[:position] + raw[position + 7 :],
        "a line": raw[: raw.rfind(b"\n", 0, position) + 1] + b"<<<\n" + raw[raw.find(b"\n", position) + 1 :],
    }[how]


@settings(max_examples=examples(100))
@given(stops=st.lists(st.integers(0, STEPS), max_size=3), at=st.floats(0, 1), keep=st.integers(1, 5))
def test_a_journal_end_lost_in_a_power_cut_leaves_no_hole(stops: list[int], at: float, keep: int) -> None:
    """Checkpoints may be on disk although the journal's end is lost."""
    with temporary_run_dir() as run_dir:
        for stop in [*stops, STEPS - 1]:
            run_member(run_dir, stop, keep=keep)
        path = run_dir / JOURNAL_FILE
        path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])
        run_member(run_dir, keep=keep)
        view = read_journal(run_dir)
        assert view.deterministic() == EXPECTED and view.holes == []


@pytest.mark.slow
@settings(max_examples=examples(400))
@given(
    stops=st.lists(st.integers(0, STEPS), max_size=3),
    ended=st.booleans(),
    at=st.floats(0, 1, exclude_max=True),
    how=st.sampled_from(["a byte", "a newline", "a hole", "a cut", "a line"]),
    byte=st.integers(0, 255),
    keep=st.integers(1, 5),
)
def test_a_line_damaged_anywhere_leaves_no_hole(
    stops: list[int], ended: bool, at: float, how: str, byte: int, keep: int
) -> None:
    with temporary_run_dir() as run_dir:
        for stop in stops:
            run_member(run_dir, stop, keep=keep)
        run_member(run_dir, STEPS if ended else STEPS - 1, keep=keep)
        path = run_dir / JOURNAL_FILE
        raw = damage(path.read_bytes(), at, how, byte)
        path.write_bytes(raw)
        try:
            view = read_journal(run_dir)
        except JournalError as error:
            message = str(error)
        else:
            assume(False)  # the damage left a valid record, or only a torn end
            raise AssertionError(view)
        is_done(run_dir, STEPS, "abc")
        assert journal_damage(run_dir, "abc") is not None
        try:
            check_journal_owner(run_dir, "abc")
            broken = find_break(run_dir)
        except UserError as error:  # the header is damaged, so the owner is unknown
            assert str(path) in str(error)
            assert path.read_bytes() == raw
            return
        assert broken is not None and f"line {broken.line}:" in message
        prefix = b"".join(line + b"\n" for line in raw.split(b"\n")[: broken.line - 1])

        begin = run_member(run_dir, keep=keep)
        assert begin <= max(broken.step, 0)
        assert (run_dir / "metrics.damaged-1.jsonl").read_bytes() == raw, "the damaged file is kept unchanged"
        assert path.read_bytes().startswith(prefix)
        entries = [json.loads(line) for line in path.read_bytes()[len(prefix) :].splitlines()]
        assert (entries[0]["kind"], entries[0]["line"], entries[0]["kept"]) == (
            "mended",
            broken.line,
            "metrics.damaged-1.jsonl",
        )
        assert read_journal(run_dir).deterministic() == EXPECTED, "a missing or duplicated record"
        assert is_done(run_dir, STEPS, "abc")
        assert find_break(run_dir) is None and journal_damage(run_dir, "abc") is None


def break_journal(run_dir: Path, line: int = 6) -> bytes:
    run_member(run_dir, STEPS - 1)
    lines = (run_dir / JOURNAL_FILE).read_bytes().split(b"\n")
    lines[line - 1] = lines[line - 1][:20]
    raw = b"\n".join(lines)
    (run_dir / JOURNAL_FILE).write_bytes(raw)
    return raw


@pytest.mark.parametrize("operation", range(4))
def test_a_repair_that_is_killed_is_completed_by_the_next_process(tmp_path: Path, operation: int) -> None:
    raw = break_journal(tmp_path)
    with patch("sweeps.run.repair.os.fsync", side_effect=[None] * operation + [KilledError]), suppress(KilledError):
        run_member(tmp_path, 0)
    run_member(tmp_path)
    copies = sorted(tmp_path.glob("metrics.damaged-*"))
    assert raw in [copy.read_bytes() for copy in copies]
    assert len(copies) == 1 or operation == 0
    assert read_journal(tmp_path).deterministic() == EXPECTED
    assert not list(tmp_path.glob(".metrics*.mended"))


def test_two_repairs_keep_both_damaged_files(tmp_path: Path) -> None:
    first = break_journal(tmp_path, 6)
    run_member(tmp_path, STEPS - 1)
    second = break_journal(tmp_path, 10)
    run_member(tmp_path)
    assert [(tmp_path / f"metrics.damaged-{n}.jsonl").read_bytes() for n in (1, 2)] == [first, second]
    assert read_journal(tmp_path).deterministic() == EXPECTED


@pytest.mark.parametrize("lost", ["resume", "train"])
def test_a_checkpoint_of_a_later_pass_is_not_used_with_earlier_records(tmp_path: Path, lost: str) -> None:
    """A live run is not deterministic. The checkpoint of step 4 is of the second pass, whose records are damaged."""
    journal = Journal(tmp_path)
    journal.header(run="abc")
    for first, last in ((1, 4), (3, 6)):
        for step in range(first, last + 1):
            journal.record("train", step, {"loss": 1 / step})
            if step % EVERY == 0:
                journal.checkpoint(step)
        if first == 1:
            journal.resume(2)
    journal.close()
    raw = (tmp_path / JOURNAL_FILE).read_bytes()
    position = (
        raw.index(b'{"kind":"resume"') if lost == "resume" else raw.index(b'{"kind":"train"', raw.index(b"resume"))
    )
    (tmp_path / JOURNAL_FILE).write_bytes(raw[:position] + b"<" + raw[position + 1 :])
    broken = find_break(tmp_path)
    assert broken is not None and broken.step == 2


def test_a_repair_records_the_compute_that_was_spent(tmp_path: Path) -> None:
    break_journal(tmp_path)
    cut_broken_journal(broken) if (broken := find_break(tmp_path)) else pytest.fail("not found")
    view = read_journal(tmp_path)
    assert view.mended is not None
    assert view.mended["metrics"] == {"loss": 1 / (STEPS - 1)}, "metrics of the newest record, although it was lost"
    Journal(tmp_path).resume(2)
    assert read_journal(tmp_path).mended is None, "reported only once"


def test_a_finished_run_with_a_broken_line_counts_as_done(tmp_path: Path) -> None:
    run_member(tmp_path)
    path = tmp_path / JOURNAL_FILE
    lines = path.read_bytes().split(b"\n")
    for number in range(2, len(lines) - 1):
        path.write_bytes(b"\n".join([*lines[: number - 1], b'{"kind":"tr', *lines[number:]]))
        assert is_done(tmp_path, STEPS, "abc")
        assert not is_done(tmp_path, STEPS + 1, "abc")
        assert not looks_whole(tmp_path)
        assert f"{path}, line {number}: " in (journal_damage(tmp_path, "abc") or "")
    path.write_bytes(b"\n".join(lines))
    assert looks_whole(tmp_path) and journal_damage(tmp_path, "abc") is None


def test_a_journal_of_another_run_is_refused_and_unchanged(tmp_path: Path) -> None:
    run_member(tmp_path)
    raw = (tmp_path / JOURNAL_FILE).read_bytes()
    assert is_done(tmp_path, STEPS, "abc") and not is_done(tmp_path, STEPS, "def")
    with pytest.raises(UserError, match=f"{tmp_path / JOURNAL_FILE}: .*another run, abc, in the folder of def; move"):
        check_journal_owner(tmp_path, "def")
    assert "another run, abc" in (journal_damage(tmp_path, "def") or "")
    check_journal_owner(tmp_path, "abc")
    assert (tmp_path / JOURNAL_FILE).read_bytes() == raw


@pytest.mark.parametrize("raw", [None, b"", b'{"kind":"run","ru', b"\0\0\0", b'{"kind":"run","run":"abc"}\n'])
def test_a_journal_that_has_hardly_begun_is_accepted(tmp_path: Path, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / JOURNAL_FILE).write_bytes(raw)
    check_journal_owner(tmp_path, "abc")
    assert (find_break(tmp_path), journal_damage(tmp_path, "abc"), is_done(tmp_path, 0, "abc")) == (None, None, False)
    assert looks_whole(tmp_path) or raw == b"\0\0\0"


@pytest.mark.parametrize("first", [b'{"kind":"run"', b'{"kind":"rux","run":"abc"}', b"", b'{"kind":"run"}'])
def test_a_journal_without_its_header_is_not_overwritten(tmp_path: Path, first: bytes) -> None:
    run_member(tmp_path)
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(first + b"\n" + path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(UserError, match=r"line 1: no header .*restore the line, or move the file away"):
        check_journal_owner(tmp_path, "abc")
    assert not is_done(tmp_path, STEPS, "abc")
