"""Tests of the ledger: its fold, and that a torn line does not affect other lines."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeps.launch.ledger import LEDGER_FILE, Ledger, MemberState
from tests.examples import examples


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "study", clock=itertools.count(1000.0).__next__)


def add_bytes(ledger: Ledger, raw: bytes) -> None:
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    with ledger.path.open("ab") as handle:
        handle.write(raw)


def brief(ledger: Ledger) -> list[tuple[str, str]]:
    return [(entry["event"], entry["run"]) for entry in ledger.entries()]


def test_a_ledger_that_was_never_written_is_empty(ledger: Ledger) -> None:
    assert ledger.entries() == []
    assert ledger.fold() == {}
    assert not ledger.path.exists()


def test_an_entry_comes_back_as_it_was_written(ledger: Ledger) -> None:
    ledger.append("planned", "a", recipe="scalerl+loss=dapo", seed=3)
    ledger.append("failed", "a", reason='said "no"\nand \u2713')
    assert ledger.entries() == [
        {"time": 1000.0, "event": "planned", "run": "a", "recipe": "scalerl+loss=dapo", "seed": 3},
        {"time": 1001.0, "event": "failed", "run": "a", "reason": 'said "no"\nand \u2713'},
    ]
    assert ledger.path.name == LEDGER_FILE
    assert ledger.path.read_bytes().count(b"\n") == 2


def test_the_last_event_of_a_run_is_its_state(ledger: Ledger) -> None:
    def a() -> MemberState:
        return ledger.fold()["a"]

    ledger.append("planned", "b", recipe="scalerl+loss=dapo", seed=1)
    ledger.append("planned", "a", recipe="scalerl", seed=7)
    assert a() == MemberState("a", "scalerl", 7, "planned", 0, None)
    ledger.append("started", "a")
    assert a() == MemberState("a", "scalerl", 7, "started", 1, None)
    ledger.append("failed", "a", reason="killed by SIGKILL")
    assert a() == MemberState("a", "scalerl", 7, "failed", 1, "killed by SIGKILL")
    ledger.append("started", "a")
    assert a() == MemberState("a", "scalerl", 7, "started", 2, None)
    ledger.append("finished", "a")
    assert a() == MemberState("a", "scalerl", 7, "finished", 2, None)
    assert ledger.fold()["b"] == MemberState("b", "scalerl+loss=dapo", 1, "planned", 0, None)
    assert list(ledger.fold()) == ["b", "a"]


def test_planning_again_keeps_the_state(ledger: Ledger) -> None:
    ledger.append("planned", "a", recipe="scalerl", seed=7)
    ledger.append("started", "a")
    ledger.append("finished", "a")
    done = ledger.fold()
    ledger.append("planned", "a", recipe="scalerl", seed=7)
    assert ledger.fold() == done


def test_another_process_reads_the_same(ledger: Ledger) -> None:
    ledger.append("planned", "a", recipe="scalerl", seed=7)
    ledger.append("started", "a")
    other = Ledger(ledger.path.parent)
    assert other.fold() == ledger.fold()
    other.append("finished", "a")
    assert ledger.fold()["a"].state == "finished"


def test_a_line_torn_at_any_byte_keeps_both_neighbours(ledger: Ledger) -> None:
    ledger.append("planned", "a", recipe="scalerl", seed=7)
    before = ledger.path.read_bytes()
    ledger.append("started", "a")
    torn = ledger.path.read_bytes()[len(before) :]
    for cut in range(1, len(torn) - 1):
        ledger.path.write_bytes(before + torn[:cut])
        assert brief(ledger) == [("planned", "a")]
        ledger.append("planned", "b")
        assert brief(ledger) == [("planned", "a"), ("planned", "b")]
        assert ledger.path.read_bytes().startswith(before + torn[:cut] + b"\n")


def test_a_line_that_lacks_only_its_end_is_an_entry(ledger: Ledger) -> None:
    ledger.append("planned", "a")
    ledger.append("started", "a")
    ledger.path.write_bytes(ledger.path.read_bytes()[:-1])
    assert brief(ledger) == [("planned", "a"), ("started", "a")]
    ledger.append("finished", "a")
    assert brief(ledger) == [("planned", "a"), ("started", "a"), ("finished", "a")]


GARBAGE = (
    b"",
    b"\0\0\0\0",
    b"\xff\xfe\x80",
    b"null",
    b"5",
    b'"planned"',
    b"[]",
    b"{}",
    b'{"run":"a"}',
    b'{"event":"failed"}',
    b'{"event":"failed","run":5}',
    b'{"event":"failed","run":["a"]}',
    b'{"event":["failed"],"run":"a"}',
    b'{"event":"of a later version","run":"a"}',
    b'{"event":"failed","run":"never planned"}',
)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_lines_that_are_not_entries_are_skipped(ledger: Ledger, garbage: bytes) -> None:
    ledger.append("planned", "a", recipe="scalerl", seed=7)
    ledger.append("started", "a")
    before = ledger.fold()
    add_bytes(ledger, garbage + b"\n")
    assert ledger.fold() == before
    ledger.append("finished", "a")
    assert ledger.fold() == {"a": MemberState("a", "scalerl", 7, "finished", 1, None)}


EVENTS = ("planned", "started", "finished", "failed")


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(EVENTS), st.sampled_from("abc")),
            st.tuples(st.just("torn"), st.integers(1, 30)),
            st.tuples(st.just("garbage"), st.sampled_from(GARBAGE)),
        ),
        max_size=25,
    )
)
def test_any_history_folds_run_by_run(history: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder, patch("sweeps.run.files.os.fsync"):
        ledger = Ledger(Path(folder))
        for number, (event, value) in enumerate(history):
            if event == "torn":
                line = json.dumps({"time": 1.0, "event": "failed", "run": "a", "reason": "torn"})
                add_bytes(ledger, b"\n" + line.encode()[: -value - 1])
            elif event == "garbage":
                add_bytes(ledger, b"\n" + value + b"\n")
            else:
                ledger.append(event, value, recipe=f"recipe {value}", seed=ord(value), reason=str(number))
        folded = ledger.fold()

    expected = {}
    for run in dict.fromkeys(value for event, value in history if event == "planned"):
        run_events = [
            (event, number) for number, (event, value) in enumerate(history) if value == run and event in EVENTS
        ]
        planned_events = run_events[[event for event, _ in run_events].index("planned") :]
        later_events = [(event, str(number)) for event, number in planned_events if event != "planned"]
        state, reason = later_events[-1] if later_events else ("planned", None)
        attempts = sum(event == "started" for event, _ in later_events)
        expected[run] = MemberState(run, f"recipe {run}", ord(run), state, attempts, reason)
    assert folded == expected
    assert list(folded) == list(expected)


@pytest.mark.parametrize("seed", ["Infinity", "NaN", "1e999", "true", "[1]", "null", '"one"'])
def test_a_line_whose_seed_is_not_an_integer_is_skipped(ledger: Ledger, seed: str) -> None:
    add_bytes(ledger, b'{"time": 1, "event": "planned", "run": "a", "recipe": "r", "seed": %s}\n' % seed.encode())
    ledger.append("planned", "b", recipe="r", seed=3)
    assert {run: state.seed for run, state in ledger.fold().items()} == {"b": 3}
