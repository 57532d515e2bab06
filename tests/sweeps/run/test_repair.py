"""Truths about a damaged journal: it is named by its line, kept, and gone on from where nothing is missing."""

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
from sweeps.run.progress import check_own, is_done, looks_whole, trouble
from sweeps.run.repair import find_break, mend
from tests.examples import examples

STEPS, EVERY = 9, 2


class KilledError(Exception):
    """In the middle of something."""


def go_on(run_dir: Path, until: int = STEPS, end: bool = True, keep: int = 2) -> int:
    """What a member does: from the newest checkpoint that it may use, with numbers that depend on the step alone."""
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    broken = find_break(run_dir)
    if broken is not None:
        for path in checkpoints.iterdir():
            if int(path.name) > broken.step:
                path.unlink()
        mend(broken)
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
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, patch("os.fsync"):
        yield Path(folder) / "run"


def expected() -> list[tuple[str, int, dict[str, float]]]:
    with place() as run_dir:
        go_on(run_dir)
        return read_journal(run_dir).deterministic()


WHOLE = expected()


def damaged(raw: bytes, at: float, how: str, byte: int) -> bytes:
    place = min(int(at * len(raw)), len(raw) - 1)
    return {
        "a byte": raw[:place] + bytes([byte]) + raw[place + 1 :],
        "a newline": raw[:place] + b"\n" + raw[place:],
        "a hole": raw[:place] + b"\0" * 30 + raw[place + 30 :],
        "a cut": raw[:place] + raw[place + 7 :],
        "a line": raw[: raw.rfind(b"\n", 0, place) + 1] + b"<<<\n" + raw[raw.find(b"\n", place) + 1 :],
    }[how]


@settings(max_examples=examples(100))
@given(stops=st.lists(st.integers(0, STEPS), max_size=3), at=st.floats(0, 1), keep=st.integers(1, 5))
def test_an_end_that_a_power_cut_has_taken_leaves_no_hole(stops: list[int], at: float, keep: int) -> None:
    """Checkpoints are on the disk all the same."""
    with place() as run_dir:
        for stop in [*stops, STEPS - 1]:
            go_on(run_dir, stop, keep=keep)
        path = run_dir / JOURNAL_FILE
        path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])
        go_on(run_dir, keep=keep)
        view = read_journal(run_dir)
        assert view.deterministic() == WHOLE and view.holes == []


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
    with place() as run_dir:
        for stop in stops:
            go_on(run_dir, stop, keep=keep)
        go_on(run_dir, STEPS if ended else STEPS - 1, keep=keep)
        path = run_dir / JOURNAL_FILE
        raw = damaged(path.read_bytes(), at, how, byte)
        path.write_bytes(raw)
        try:
            view = read_journal(run_dir)
        except JournalError as error:
            said = str(error)
        else:
            assume(False)  # a record all the same, or torn at the end
            raise AssertionError(view)
        is_done(run_dir, STEPS, "abc")
        assert trouble(run_dir, "abc") is not None
        try:
            check_own(run_dir, "abc")
            broken = find_break(run_dir)
        except UserError as error:  # the header: whose journal it is, nobody knows
            assert str(path) in str(error)
            assert path.read_bytes() == raw
            return
        assert broken is not None and f"line {broken.line}:" in said
        prefix = b"".join(line + b"\n" for line in raw.split(b"\n")[: broken.line - 1])

        begin = go_on(run_dir, keep=keep)
        assert begin <= max(broken.step, 0)
        assert (run_dir / "metrics.damaged-1.jsonl").read_bytes() == raw, "something recorded is lost"
        assert path.read_bytes().startswith(prefix)
        entries = [json.loads(line) for line in path.read_bytes()[len(prefix) :].splitlines()]
        assert (entries[0]["kind"], entries[0]["line"], entries[0]["kept"]) == (
            "mended",
            broken.line,
            "metrics.damaged-1.jsonl",
        )
        assert read_journal(run_dir).deterministic() == WHOLE, "a hole, or something twice"
        assert is_done(run_dir, STEPS, "abc")
        assert find_break(run_dir) is None and trouble(run_dir, "abc") is None


def broken_journal(run_dir: Path, line: int = 6) -> bytes:
    go_on(run_dir, STEPS - 1)
    lines = (run_dir / JOURNAL_FILE).read_bytes().split(b"\n")
    lines[line - 1] = lines[line - 1][:20]
    raw = b"\n".join(lines)
    (run_dir / JOURNAL_FILE).write_bytes(raw)
    return raw


@pytest.mark.parametrize("operation", range(4))
def test_killed_while_it_mends_the_next_process_mends_it(tmp_path: Path, operation: int) -> None:
    raw = broken_journal(tmp_path)
    with patch("sweeps.run.repair.os.fsync", side_effect=[None] * operation + [KilledError]), suppress(KilledError):
        go_on(tmp_path, 0)
    go_on(tmp_path)
    copies = sorted(tmp_path.glob("metrics.damaged-*"))
    assert raw in [copy.read_bytes() for copy in copies]
    assert len(copies) == 1 or operation == 0
    assert read_journal(tmp_path).deterministic() == WHOLE
    assert not list(tmp_path.glob(".metrics*.mended"))


def test_damage_after_damage_keeps_both(tmp_path: Path) -> None:
    first = broken_journal(tmp_path, 6)
    go_on(tmp_path, STEPS - 1)
    second = broken_journal(tmp_path, 10)
    go_on(tmp_path)
    assert [(tmp_path / f"metrics.damaged-{n}.jsonl").read_bytes() for n in (1, 2)] == [first, second]
    assert read_journal(tmp_path).deterministic() == WHOLE


@pytest.mark.parametrize("lost", ["resume", "train"])
def test_checkpoints_of_a_later_pass_do_not_fit_the_records_of_an_earlier_one(tmp_path: Path, lost: str) -> None:
    """A live run does not repeat bit for bit: its checkpoint of step 4 is of the pass that made it last."""
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
    at = raw.index(b'{"kind":"resume"') if lost == "resume" else raw.index(b'{"kind":"train"', raw.index(b"resume"))
    (tmp_path / JOURNAL_FILE).write_bytes(raw[:at] + b"<" + raw[at + 1 :])
    found = find_break(tmp_path)
    assert found is not None and found.step == 2


def test_what_the_broken_journal_had_spent_is_known(tmp_path: Path) -> None:
    broken_journal(tmp_path)
    mend(found) if (found := find_break(tmp_path)) else pytest.fail("not found")
    view = read_journal(tmp_path)
    assert view.mended is not None
    assert view.mended["metrics"] == {"loss": 1 / (STEPS - 1)}, "the newest, which is lost"
    Journal(tmp_path).resume(2)
    assert read_journal(tmp_path).mended is None, "said once"


def test_a_finished_run_with_a_broken_middle_is_done_and_its_line_is_named(tmp_path: Path) -> None:
    go_on(tmp_path)
    path = tmp_path / JOURNAL_FILE
    lines = path.read_bytes().split(b"\n")
    for number in range(2, len(lines) - 1):
        path.write_bytes(b"\n".join([*lines[: number - 1], b'{"kind":"tr', *lines[number:]]))
        assert is_done(tmp_path, STEPS, "abc")
        assert not is_done(tmp_path, STEPS + 1, "abc")
        assert not looks_whole(tmp_path)
        assert f"{path}, line {number}: " in (trouble(tmp_path, "abc") or "")
    path.write_bytes(b"\n".join(lines))
    assert looks_whole(tmp_path) and trouble(tmp_path, "abc") is None


def test_a_journal_of_another_run_is_neither_done_nor_touched(tmp_path: Path) -> None:
    go_on(tmp_path)
    raw = (tmp_path / JOURNAL_FILE).read_bytes()
    assert is_done(tmp_path, STEPS, "abc") and not is_done(tmp_path, STEPS, "def")
    with pytest.raises(UserError, match=f"{tmp_path / JOURNAL_FILE}: .*another run, abc, in the folder of def; move"):
        check_own(tmp_path, "def")
    assert "another run, abc" in (trouble(tmp_path, "def") or "")
    check_own(tmp_path, "abc")
    assert (tmp_path / JOURNAL_FILE).read_bytes() == raw


@pytest.mark.parametrize("raw", [None, b"", b'{"kind":"run","ru', b"\0\0\0", b'{"kind":"run","run":"abc"}\n'])
def test_a_journal_that_has_hardly_begun_is_nobody_elses_and_not_broken(tmp_path: Path, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / JOURNAL_FILE).write_bytes(raw)
    check_own(tmp_path, "abc")
    assert (find_break(tmp_path), trouble(tmp_path, "abc"), is_done(tmp_path, 0, "abc")) == (None, None, False)
    assert looks_whole(tmp_path) or raw == b"\0\0\0"


@pytest.mark.parametrize("first", [b'{"kind":"run"', b'{"kind":"rux","run":"abc"}', b"", b'{"kind":"run"}'])
def test_a_journal_without_its_header_is_not_written_over(tmp_path: Path, first: bytes) -> None:
    go_on(tmp_path)
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(first + b"\n" + path.read_bytes().split(b"\n", 1)[1])
    with pytest.raises(UserError, match=r"line 1: no header .*restore the line, or move the file away"):
        check_own(tmp_path, "abc")
    assert not is_done(tmp_path, STEPS, "abc")
