"""Tests of the journal: torn and damaged lines, resumes, durable records, and values that are never written."""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.run.journal import (
    JOURNAL_FILE,
    Journal,
    JournalError,
    JournalView,
    covered_step,
    find_runs,
    read_journal,
)
from sweeps.run.progress import is_done, journal_damage, last_metrics, looks_whole
from sweeps.run.repair import cut_broken_journal, find_break
from sweeps.run.tail import JournalTail
from tests.examples import examples

RATE = "eval/heldout/pass_rate"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def ticking_clock() -> Callable[[], float]:
    """Return a clock that advances one second per reading."""
    return itertools.count(1000.0).__next__


def lines_of(run_dir: Path) -> list[bytes]:
    return (run_dir / JOURNAL_FILE).read_bytes().splitlines(keepends=True)


def content(view: JournalView) -> tuple[Any, ...]:
    """Return the contents of a view."""
    return view.header, view.records, view.checkpoint_step, view.status, view.reason


@contextmanager
def journal_in_memory() -> Iterator[Path]:
    """Provide a run directory for one hypothesis example, without fsync, which would be slow."""
    with tempfile.TemporaryDirectory() as folder, patch("sweeps.run.journal.os.fsync"):
        yield Path(folder)


# --- writing and reading -------------------------------------------------------------------------------------


def test_what_is_written_is_read(run_dir: Path) -> None:
    journal = Journal(run_dir, clock=ticking_clock())
    journal.header(run="abc", recipe="scalerl", seed=3)
    journal.record("eval", 0, {RATE: 0.25})
    journal.record("train", 1, {"train/loss": 1 / 3})
    journal.checkpoint(1)
    journal.end(1, "finished")
    journal.close()

    view = read_journal(run_dir)
    assert view.header == {"kind": "run", "time": 1000.0, "run": "abc", "recipe": "scalerl", "seed": 3}
    assert [(r.kind, r.step, r.time, r.metrics) for r in view.records] == [
        ("eval", 0, 1001.0, {RATE: 0.25}),
        ("train", 1, 1002.0, {"train/loss": 1 / 3}),
    ]
    assert (view.checkpoint_step, view.status, view.reason) == (1, "finished", None)
    assert content(read_journal(run_dir / JOURNAL_FILE)) == content(view)


def test_a_line_is_readable_as_soon_as_it_is_written(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    for step in range(1, 4):
        journal.record("train", step, {"train/loss": step})
        assert read_journal(run_dir).records[-1].step == step


@given(value=st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives_bit_for_bit(value: float) -> None:
    with journal_in_memory() as run_dir:
        journal = Journal(run_dir)
        journal.header(run="abc")
        journal.record("train", 1, {"x": value})
        assert read_journal(run_dir).records[0].metrics["x"].hex() == value.hex()


def test_a_second_writer_appends(run_dir: Path) -> None:
    first = Journal(run_dir)
    first.header(run="abc")
    first.record("train", 1, {"x": 1})
    first.close()
    second = Journal(run_dir)
    second.record("train", 2, {"x": 2})
    second.close()
    assert [record.step for record in read_journal(run_dir).records] == [1, 2]


def test_only_train_and_eval_are_records(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="validate"):
        Journal(run_dir).record("validate", 1, {})


# --- torn lines ----------------------------------------------------------------------------------------------

LAST_RECORDS: dict[str, Callable[[Journal], None]] = {
    "train": lambda journal: journal.record("train", 2, {"train/loss": 0.5, "train/reward": 0.125}),
    "eval": lambda journal: journal.record("eval", 1, {RATE: 0.5}),
    "checkpoint": lambda journal: journal.checkpoint(1),
    "resume": lambda journal: journal.resume(0),
    "end": lambda journal: journal.end(1, "failed", "ValueError: naïve \u2713 {]"),
}


@pytest.mark.parametrize("kind", LAST_RECORDS)
def test_only_a_torn_last_line_is_dropped(run_dir: Path, kind: str) -> None:
    journal = Journal(run_dir, clock=ticking_clock())
    journal.header(run="abc", recipe="scalerl")
    journal.record("eval", 0, {RATE: 0.25})
    journal.record("train", 1, {"train/loss": 1.0})
    journal.close()
    intact = (run_dir / JOURNAL_FILE).read_bytes()
    before = content(read_journal(run_dir))

    journal = Journal(run_dir, clock=ticking_clock())
    LAST_RECORDS[kind](journal)
    journal.close()
    last = (run_dir / JOURNAL_FILE).read_bytes()[len(intact) :]
    assert content(read_journal(run_dir)) != before

    for cut in range(len(last)):
        (run_dir / JOURNAL_FILE).write_bytes(intact + last[:cut])
        assert content(read_journal(run_dir)) == before
        # The next process cuts off the torn line before it appends its own.
        journal = Journal(run_dir, clock=ticking_clock())
        assert (run_dir / JOURNAL_FILE).read_bytes() == intact
        LAST_RECORDS[kind](journal)
        journal.close()
        assert (run_dir / JOURNAL_FILE).read_bytes() == intact + last


@pytest.mark.parametrize("rubbish", [b"\0" * 40, b"\0" * 40 + b"\n", b'{"kind":"train","st\n', b"\n", b"\xff\xfe\n"])
def test_garbage_after_a_power_cut_is_cut_off(run_dir: Path, rubbish: bytes) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("train", 1, {"x": 1})
    journal.close()
    with (run_dir / JOURNAL_FILE).open("ab") as handle:
        handle.write(rubbish)
    assert [record.step for record in read_journal(run_dir).records] == [1]
    journal = Journal(run_dir)
    journal.record("train", 2, {"x": 2})
    journal.close()
    assert [record.step for record in read_journal(run_dir).records] == [1, 2]
    assert rubbish not in lines_of(run_dir)


def test_every_reader_detects_a_changed_byte(run_dir: Path) -> None:
    """A line with a changed digit or letter may still be valid JSON. Only the checksum detects it."""
    journal = Journal(run_dir, clock=ticking_clock())
    journal.header(run="abc", recipe="scalerl")
    journal.record("eval", 0, {RATE: 0.125, "compute/flops": 1e6})
    journal.record("train", 1, {"train/loss": 1 / 3})
    journal.checkpoint(1)
    journal.end(1, "finished")
    journal.close()
    path, raw, lines = run_dir / JOURNAL_FILE, (run_dir / JOURNAL_FILE).read_bytes(), lines_of(run_dir)
    assert looks_whole(run_dir) and is_done(run_dir, 1, "abc")
    for number in (1, 2):
        begin = sum(map(len, lines[:number]))
        for position in range(begin, begin + len(lines[number]) - 1):
            old = raw[position : position + 1]
            path.write_bytes(raw[:position] + (b"7" if old != b"7" else b"8") + raw[position + 1 :])
            if b'"crc"' not in path.read_bytes()[begin:].split(b"\n")[0]:
                continue  # the change hit the name of the checksum field, so there is nothing to compare
            tail = JournalTail(run_dir)
            tail.forget({"eval": 10, "train": 10})
            for read in (lambda: read_journal(run_dir), tail.update):
                with pytest.raises(JournalError, match=f"{path}, line {number + 1}: "):
                    read()
            assert not looks_whole(run_dir) and f"line {number + 1}" in str(journal_damage(run_dir, "abc"))
            broken = find_break(run_dir)
            assert broken is not None and broken.line == number + 1
    # A damaged last line counts as torn, so the run has no end and is running.
    path.write_bytes(raw.replace(b'"status":"finished"', b'"status":"Finished"'))
    assert read_journal(run_dir).status == "running" and not is_done(run_dir, 1, "abc")
    # A mended journal has checksums like any other. Lines of earlier versions have none and are not checked.
    path.write_bytes(raw.replace(b"0.333", b"0.334"))
    broken = find_break(run_dir)
    assert broken is not None
    cut_broken_journal(broken)
    assert path.read_bytes().count(b'"crc":"') == 3 and looks_whole(run_dir)
    path.write_bytes(re.sub(rb',"crc":"\w{8}"', b"", raw).replace(b"0.333", b"0.334"))
    assert b"crc" not in path.read_bytes() and looks_whole(run_dir)
    assert read_journal(run_dir).of_kind("train")[0].metrics["train/loss"] > 0.334


def test_reading_never_changes_the_file(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.close()
    torn = (run_dir / JOURNAL_FILE).read_bytes() + b'{"kind":"tr'
    (run_dir / JOURNAL_FILE).write_bytes(torn)
    read_journal(run_dir)
    assert (run_dir / JOURNAL_FILE).read_bytes() == torn


# --- unreadable lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        b'{"kind":"train","step":1,"ti',
        b"",
        b"[1, 2]",
        b"\0\0\0\0",
        b'{"time":1.0,"step":1}',
        b'{"kind":"train","time":1.0,"step":"soon","metrics":{}}',
        b'{"kind":"train","time":1.0,"step":Infinity,"metrics":{}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":5}',
        b'{"kind":"train","time":1.0,"step":1}',
        b'{"kind":"end","time":1.0,"step":1}',
        b'{"kind":"train","time":NaN,"step":1,"metrics":{}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":{"x":NaN}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":{"x":-Infinity}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":{"x":"0.5"}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":{"x":[0.5]}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":{"x":null}}',
        b'{"kind":"train","time":1.0,"step":1,"metrics":{"x":true}}',
    ],
)
def test_a_broken_middle_line_is_named(run_dir: Path, broken: bytes) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("train", 1, {"x": 1})
    journal.record("train", 2, {"x": 2})
    journal.close()
    header, first, second = lines_of(run_dir)
    (run_dir / JOURNAL_FILE).write_bytes(header + first + broken + b"\n" + second)
    with pytest.raises(JournalError) as caught:
        read_journal(run_dir)
    message = str(caught.value)
    assert str(run_dir / JOURNAL_FILE) in message
    assert "line 3" in message
    assert "\n" not in message


def test_a_missing_journal_is_an_error_that_names_the_file(run_dir: Path) -> None:
    with pytest.raises(JournalError, match=f"{run_dir / JOURNAL_FILE}.*No such file"):
        read_journal(run_dir)


def test_a_journal_whose_header_is_torn_has_not_begun(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc", recipe="scalerl")
    journal.close()
    header = (run_dir / JOURNAL_FILE).read_bytes()
    for cut in range(len(header)):
        (run_dir / JOURNAL_FILE).write_bytes(header[:cut])
        with pytest.raises(JournalError, match="no header"):
            read_journal(run_dir)
        Journal(run_dir).close()
        assert (run_dir / JOURNAL_FILE).read_bytes() == b""


# --- resumes and replaced records ----------------------------------------------------------------------------


def test_a_resume_voids_later_steps_only(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("eval", 0, {RATE: 0.1})
    for step in range(1, 6):
        journal.record("train", step, {"x": step})
    journal.record("eval", 4, {RATE: 0.4})
    journal.resume(3)
    assert [(r.kind, r.step) for r in read_journal(run_dir).records] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]
    journal.record("train", 4, {"x": 40})
    assert read_journal(run_dir).of_kind("train")[-1].metrics == {"x": 40.0}


def test_a_resume_from_the_start_voids_everything_but_the_header(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("eval", 0, {RATE: 0.1})
    journal.checkpoint(0)
    journal.resume(-1)
    view = read_journal(run_dir)
    assert (view.records, view.checkpoint_step, view.header["run"]) == ([], None, "abc")


def test_the_later_record_of_a_kind_and_step_wins(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("train", 2, {"x": 1, "only_before": 1})
    journal.record("eval", 2, {RATE: 0.5})
    journal.record("train", 2, {"x": 2})
    view = read_journal(run_dir)
    assert [record.metrics for record in view.of_kind("train")] == [{"x": 2.0}]
    assert [record.metrics for record in view.of_kind("eval")] == [{RATE: 0.5}]


def test_after_a_resume_an_ended_run_is_running(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("train", 1, {"x": 1})
    journal.end(1, "failed", "RewardError: no")
    assert (read_journal(run_dir).status, read_journal(run_dir).reason) == ("failed", "RewardError: no")
    journal.resume(1)
    assert (read_journal(run_dir).status, read_journal(run_dir).reason) == ("running", None)


# --- durable records -----------------------------------------------------------------------------------------


def test_durable_records_are_covered_by_a_checkpoint_or_a_finished_end(run_dir: Path) -> None:
    def durable() -> list[int]:
        return [record.step for record in read_journal(run_dir).durable()]

    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("eval", 0, {RATE: 0.1})
    journal.record("train", 1, {"x": 1})
    assert durable() == []
    journal.checkpoint(1)
    assert durable() == [0, 1]
    journal.record("train", 2, {"x": 2})
    assert durable() == [0, 1]
    journal.end(2, "failed", "no")
    assert durable() == [0, 1]
    journal.resume(1)
    assert durable() == [0, 1]
    journal.record("train", 2, {"x": 2})
    assert durable() == [0, 1]
    journal.end(2, "finished")
    assert durable() == [0, 1, 2]


# --- non-finite values, and comparison of journals -----------------------------------------------------------


def test_values_that_are_not_finite_are_named_and_left_out(run_dir: Path) -> None:
    journal = Journal(run_dir)
    journal.header(run="abc")
    journal.record("train", 1, {"fine": 1.0, "b": math.nan, "a": math.inf, "c": -math.inf})
    journal.record("train", 2, {"fine": 1.0})
    _, with_gaps, without_gaps = [json.loads(line, parse_constant=pytest.fail) for line in lines_of(run_dir)]
    assert with_gaps["metrics"] == {"fine": 1.0}
    assert with_gaps["not_finite"] == ["a", "b", "c"]
    assert "not_finite" not in without_gaps
    assert [record.metrics for record in read_journal(run_dir).records] == [{"fine": 1.0}] * 2


def test_a_header_that_is_not_finite_is_refused(run_dir: Path) -> None:
    journal = Journal(run_dir)
    with pytest.raises(ValueError):
        journal.header(run="abc", lr=math.nan)
    journal.header(run="abc")
    assert read_journal(run_dir).header["run"] == "abc"


def write_two(run_dir: Path, wall: float, loss: float) -> list[tuple[str, int, dict[str, float]]]:
    journal = Journal(run_dir, clock=lambda: wall)
    journal.header(run="abc")
    clocks = (
        "compute/device_hours",
        "compute/device_hours_idle",
        "compute/wasted_flops",
        "compute/wasted_device_hours",
        "time/evaluate_s",
    )
    journal.record("train", 1, {"train/loss": loss, "compute/flops": 7.0, **dict.fromkeys(clocks, wall)})
    journal.record("eval", 1, {RATE: 0.5, "compute/virtual_device_hours": 2.0})
    return read_journal(run_dir).deterministic()


def test_only_wall_clock_values_are_not_compared(tmp_path: Path) -> None:
    one = write_two(tmp_path / "one", wall=1.0, loss=0.5)
    assert write_two(tmp_path / "two", wall=2.0, loss=0.5) == one
    assert write_two(tmp_path / "three", wall=1.0, loss=math.nextafter(0.5, 1)) != one
    assert one == [
        ("eval", 1, {"compute/virtual_device_hours": 2.0, RATE: 0.5}),
        ("train", 1, {"compute/flops": 7.0, "train/loss": 0.5}),
    ]


def test_the_order_of_writing_is_not_compared(tmp_path: Path) -> None:
    for name, order in (("one", (1, 2)), ("two", (2, 1))):
        journal = Journal(tmp_path / name)
        journal.header(run="abc")
        for step in order:
            journal.record("train", step, {"x": step})
    assert read_journal(tmp_path / "one").deterministic() == read_journal(tmp_path / "two").deterministic()


# --- any history ---------------------------------------------------------------------------------------------

steps = st.integers(0, 6)
history = st.lists(
    st.one_of(
        st.tuples(st.just("train"), steps),
        st.tuples(st.just("eval"), steps),
        st.tuples(st.just("checkpoint"), steps),
        st.tuples(st.just("resume"), st.integers(-1, 6)),
        st.tuples(st.sampled_from(["finished", "failed"]), steps),
        st.tuples(st.just("torn"), st.integers(1, 60)),
    ),
    max_size=25,
)


@settings(max_examples=examples(150))
@given(history)
def test_any_history_folds_as_defined(events: list[tuple[str, int]]) -> None:
    with journal_in_memory() as run_dir:
        journal = Journal(run_dir)
        journal.header(run="abc")
        for number, (kind, step) in enumerate(events):
            if kind in ("train", "eval"):
                journal.record(kind, step, {"number": number})
            elif kind == "checkpoint":
                journal.checkpoint(step)
            elif kind == "resume":
                journal.resume(step)
            elif kind == "torn":
                # The process dies in the middle of a line, and the next one continues.
                journal.record("train", 3, {"number": -1})
                journal.close()
                raw = (run_dir / JOURNAL_FILE).read_bytes()
                last = len(raw.splitlines(keepends=True)[-1])
                (run_dir / JOURNAL_FILE).write_bytes(raw[: len(raw) - min(step, last)])
                journal = Journal(run_dir)
            else:
                journal.end(step, kind)
        journal.close()
        view = read_journal(run_dir)

    # A record counts unless a later record of the same kind and step, or a resume to an earlier step, replaces it.
    def counts(position: int, kind: str, step: int) -> bool:
        later = events[position + 1 :]
        return (kind, step) not in later and all(s >= step for w, s in later if w == "resume")

    expected = [
        (kind, step, float(position))
        for position, (kind, step) in enumerate(events)
        if kind in ("train", "eval") and counts(position, kind, step)
    ]
    assert [(r.kind, r.step, r.metrics["number"]) for r in view.records] == expected

    covered = [step for kind, step in events if kind in ("checkpoint", "resume")]
    assert view.checkpoint_step == (covered[-1] if covered and covered[-1] >= 0 else None)

    states = [kind for kind, _ in events if kind in ("resume", "finished", "failed")]
    assert view.status == {"resume": "running"}.get(states[-1], states[-1]) if states else "running"

    limit = 99 if view.status == "finished" else -1 if view.checkpoint_step is None else view.checkpoint_step
    assert [record.step for record in view.durable()] == [step for _, step, _ in expected if step <= limit]


# --- checkpoints newer than the journal ----------------------------------------------------------------------


def write_run(run_dir: Path, *events: int | tuple[str, int]) -> Journal:
    """Append events to a journal: a number is a training record of that step, a pair is a checkpoint or resume."""
    journal = Journal(run_dir)
    if not journal.path.stat().st_size:
        journal.header(run="abc")
    for event in events:
        if isinstance(event, int):
            journal.record("train", event, {"train/loss": 1.0})
        else:
            getattr(journal, event[0])(event[1])
    journal.close()
    return journal


def test_a_run_resumed_beyond_its_records_has_a_hole(run_dir: Path) -> None:
    """The hole is reported until a resume goes back to a step before it."""
    write_run(run_dir, *range(1, 7), ("checkpoint", 6), ("resume", 6), 7)
    tail = JournalTail(run_dir)
    for events, holes, missing in (
        ((), [], None),
        ((("resume", 9), 10), [(8, 9)], "no records of steps 8 to 9"),
        ((("resume", 12),), [(8, 9), (11, 12)], "no records of steps 8 to 9, steps 11 to 12"),
        ((("resume", 8), 9, 10), [(8, 8)], "no records of step 8"),
        ((("resume", 6), 7, 8), [], None),
        ((("resume", -1), ("resume", 2), 3), [(1, 2)], "no records of steps 1 to 2"),
    ):
        write_run(run_dir, *events)
        for view in (read_journal(run_dir), tail.update()):
            assert view.holes == holes and view.missing == missing, events


def test_a_checkpoint_counts_when_it_is_recorded(run_dir: Path) -> None:
    assert covered_step(run_dir) is None
    run_dir.mkdir()
    (run_dir / JOURNAL_FILE).write_bytes(b'{"kind":"run","ru')
    assert covered_step(run_dir) == -1, "a torn header: the run was about to begin"
    write_run(run_dir, 1, 2, 3)
    assert covered_step(run_dir) == -1
    write_run(run_dir, ("checkpoint", 3), 4, 5, 6)
    assert covered_step(run_dir) == 3
    write_run(run_dir, ("checkpoint", 6), ("resume", 3), 4)
    assert covered_step(run_dir) == 3
    (run_dir / JOURNAL_FILE).write_text('{"loss": 1.0}\n')
    assert covered_step(run_dir) is None, "a file of another program"


# --- finding runs --------------------------------------------------------------------------------------------


def test_runs_are_found_at_and_below_a_directory(tmp_path: Path) -> None:
    for name in ("study/runs/b", "study/runs/a", "other/runs/c"):
        Journal(tmp_path / name).close()
    (tmp_path / "study" / "runs" / "empty").mkdir()
    assert find_runs(tmp_path / "study" / "runs" / "a") == [tmp_path / "study/runs/a"]
    assert find_runs(tmp_path / "study") == [tmp_path / "study/runs/a", tmp_path / "study/runs/b"]
    assert [path.name for path in find_runs(tmp_path)] == ["c", "a", "b"]
    assert find_runs(tmp_path / "study" / "runs" / "empty") == []


def test_journals_below_a_run_are_ignored(tmp_path: Path) -> None:
    """A member may start another trainer, whose metrics file may have the name of our journal."""
    run_dir = tmp_path / "study" / "runs" / "a"
    for name in ("a", "a/out", "a/out/more", "b"):
        Journal(run_dir.parent / name).close()
    assert find_runs(tmp_path) == find_runs(tmp_path / "study") == [run_dir, run_dir.with_name("b")]


def test_the_newest_metrics_are_read_past_invalid_lines(tmp_path: Path) -> None:
    """A missing or torn journal, and lines of JSON that are not records, must not raise an error."""
    assert last_metrics(tmp_path) == {}
    path = tmp_path / JOURNAL_FILE
    good = b'{"kind":"eval","step":4,"metrics":{"eval/a/pass_rate":0.5,"time":1}}\n'
    for bad in (b"", b'{"kind":"train","st', b'{"kind":"train"}\n', b'{"kind":"eval","step":"5","metrics":{}}\n'):
        path.write_bytes(bad)
        assert last_metrics(tmp_path) == {}
        path.write_bytes(good + bad)
        assert last_metrics(tmp_path) == {"step": 4.0, "eval/a/pass_rate": 0.5}
