"""Tests of a journal's tail: it gives the same view as reading the whole file, but reads only new lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sweeps.run import tail as tail_module
from sweeps.run.files import parse_line
from sweeps.run.journal import JOURNAL_FILE, Journal, JournalError, JournalView, read_journal
from sweeps.run.tail import JournalTail, Tails
from sweeps.source import load
from tests.examples import examples


def view_or_error(read: Callable[[], JournalView]) -> JournalView | str:
    try:
        return read()
    except JournalError as error:
        return str(error)


class JournalEditor:
    """Writes and damages a run's journal; every line has a different time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL_FILE
        self.time = 0

    def line(self, kind: str, step: int) -> bytes:
        self.time += 1
        entry: dict[str, Any] = {"kind": kind, "time": float(self.time), "step": step}
        if kind in ("train", "eval"):
            entry["metrics"] = {f"{kind}/x": self.time}
        if kind == "end":
            entry["status"] = ("finished", "failed")[step % 2]
        if kind == "run":
            entry["run"] = "abc"
        return json.dumps(entry, separators=(",", ":")).encode() + b"\n"

    def append(self, content: bytes) -> None:
        with self.path.open("ab") as handle:
            handle.write(content)

    def lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []

    def replace(self, content: bytes) -> None:
        """Replace the file by another one, as a repair does."""
        new = self.path.with_name("new")
        new.write_bytes(content)
        new.rename(self.path)

    def apply(self, operation: str, number: int) -> None:
        """Carry out one operation; the meaning of `number` depends on it."""
        step = number % 12
        match operation:
            case "train" | "eval" | "checkpoint" | "resume" | "end" | "run":
                self.append(self.line(operation, step))
            case "half":
                line = self.line("train", step)
                self.append(line[: number % len(line)])
            case "damage":
                self.append(self.line("train", step).replace(b'"kind"', b'\0"kind'))
            case "no record":
                self.append(b'{"kind":"train","time":1.0}\n')
            case "open":  # the next process opens the journal and cuts off a torn line
                Journal(self.path.parent).close()
            case "mend":
                self.replace(b"".join(line for line in self.lines() if parse_line(line)))
            case "shorten":
                lines = self.lines()
                if lines:
                    os.truncate(self.path, sum(map(len, lines[: number % (len(lines) + 1)])))
            case "another":
                self.replace(self.line("run", 0) + self.line("train", step))
            case "remove":
                self.path.unlink(missing_ok=True)


WRITING = ("train", "eval", "train", "eval", "checkpoint", "resume", "end")
OPERATIONS = (*WRITING, *WRITING, "run", "half", "half", "open", "open")
RARE_OPERATIONS = ("damage", "no record", "mend", "mend", "shorten", "another", "remove")
operations = st.lists(
    st.tuples(st.sampled_from((*OPERATIONS, *OPERATIONS, *RARE_OPERATIONS)), st.integers(0, 200), st.booleans()),
    max_size=30,
)


@given(operations)
@settings(max_examples=examples(400))
@example([("train", 1, True), ("half", 40, True), ("open", 0, False), ("train", 2, True)])
@example([("train", 1, True), ("damage", 0, True), ("train", 2, True), ("mend", 0, True), ("train", 3, True)])
@example([("train", 1, False), ("no record", 0, True), ("train", 2, True), ("shorten", 2, True)])
@example([("train", 1, True), ("another", 5, True)])
@example([("train", 9, True), ("shorten", 1, False), ("train", 4, True)])
def test_the_tail_equals_the_view_of_the_whole_file(applied: list[tuple[str, int, bool]]) -> None:
    with TemporaryDirectory() as folder:
        editor = JournalEditor(Path(folder))
        editor.apply("run", 0)
        tail = JournalTail(Path(folder))
        for operation, number, reads in applied:
            editor.apply(operation, number)
            if reads:
                assert view_or_error(tail.update) == view_or_error(lambda: read_journal(folder))
        assert view_or_error(tail.update) == view_or_error(lambda: read_journal(folder))


@given(operations, st.integers(-1, 12), st.integers(-1, 12), st.booleans())
@settings(max_examples=examples(300))
def test_what_was_forgotten_is_all_that_is_missing(
    applied: list[tuple[str, int, bool]], train: int, evaluation: int, first: bool
) -> None:
    with TemporaryDirectory() as folder:
        editor = JournalEditor(Path(folder))
        editor.apply("run", 0)
        tail = JournalTail(Path(folder))
        steps = {"train": train, "eval": evaluation}
        if first:
            tail.forget(steps)
        for operation, number, reads in applied:
            editor.apply(operation, number)
            if reads:
                view_or_error(tail.update)
        tail.forget(steps)
        tail_view, full_view = view_or_error(tail.update), view_or_error(lambda: read_journal(folder))
        if isinstance(full_view, JournalView):
            full_view.records = [record for record in full_view.records if record.step > steps[record.kind]]
        assert tail_view == full_view


def test_a_replaced_file_with_the_same_end_is_read_again(tmp_path: Path) -> None:
    editor, tail = JournalEditor(tmp_path), JournalTail(tmp_path)
    editor.append(editor.line("run", 0) + b"".join(editor.line("train", step) for step in range(2, 60)))
    tail.update()
    editor.replace(editor.path.read_bytes().replace(b'"step":2,', b'"step":1,'))
    assert tail.update() == read_journal(tmp_path)
    assert tail.update().records[0].step == 1


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the lines that are parsed."""
    lines: list[bytes] = []

    def counted(line: bytes) -> Any:
        lines.append(line)
        return parse_line(line)

    monkeypatch.setattr(tail_module, "parse_line", counted)
    return lines


def test_only_appended_lines_are_read(tmp_path: Path, parsed: list[bytes]) -> None:
    editor, tail = JournalEditor(tmp_path), JournalTail(tmp_path)
    editor.append(editor.line("run", 0) + b"".join(editor.line("train", step) for step in range(500)))
    assert len(tail.update().records) == 500 and len(parsed) == 501
    editor.append(line := editor.line("train", 500))
    parsed.clear()
    assert len(tail.update().records) == 501 and parsed == [line.rstrip()]
    parsed.clear()
    tail.update()
    assert parsed == []


def test_what_was_used_before_is_neither_kept_nor_parsed(tmp_path: Path, parsed: list[bytes]) -> None:
    journal = Journal(tmp_path, clock=lambda: 1.5e9)
    journal.header(run="abc")
    for step in range(100):
        journal.record("train", step, {"train/loss": step, "bad": float("nan")})
    journal.record("eval", 50, {"eval/x": 1.0})
    journal.close()
    tail = JournalTail(tmp_path)
    tail.forget({"train": 89})
    assert [record.step for record in tail.update().records] == [*range(90, 100), 50]
    assert len(parsed) == 12  # 11 records and the header
    tail.forget({"train": 95, "eval": 50})
    assert [record.step for record in tail.update().records] == [96, 97, 98, 99]


def test_whoever_watches_reads_evaluations_alone_and_each_once(tmp_path: Path, parsed: list[bytes]) -> None:
    def write(run: str, first: int, last: int) -> None:
        journal = Journal(tmp_path / run, clock=lambda: 1.5e9)
        if first == 1:
            journal.header(run=run, recipe="r", seed=int(run))
        for step in range(first, last):
            journal.record("train", step, {"train/loss": step})
            if step % 10 == 0:
                journal.record("eval", step, {"eval/x/pass_rate": step / 1000, "compute/virtual_device_hours": step})
        journal.close()

    journals = Tails({"train": sys.maxsize})
    for first, last in ((1, 101), (101, 201)):
        for run in ("1", "2"):
            write(run, first, last)
        parsed.clear()
        tailed, full = load([tmp_path], read=journals), load([tmp_path])
        assert len(parsed) == 2 * (10 + (first == 1))
        assert [curve.reward.tolist() for curve in tailed.curves] == [curve.reward.tolist() for curve in full.curves]
        assert tailed.warnings == full.warnings
