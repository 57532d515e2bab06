"""Tests of terminal output: progress bars, or occasional lines where there is no terminal, and tables that fit."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from sweeps.terminal import Bar, Cell, Column, counted, duration, fitted, is_interactive, sparkline
from tests.examples import examples


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_progress_is_an_occasional_line() -> None:
    clock, output_stream = Clock(), io.StringIO()
    bar = Bar("training", 100, stream=output_stream, every_s=30, clock=clock)
    for step in range(1, 41):
        clock.now += 2.0
        bar.update(step, f"reward 0.{step:02d}")
    bar.close()
    assert output_stream.getvalue().splitlines() == [
        "training 0/100",
        "training 15/100: reward 0.15, 3 min left",
        "training 30/100: reward 0.30, 2 min left",
        "training 40/100: reward 0.40, 2 min left",
    ]


def test_time_left_ignores_earlier_processes_and_the_first_step() -> None:
    """Steps of an earlier process do not count for the pace, nor does the first step, which loads and compiles."""
    clock, output_stream = Clock(), io.StringIO()
    bar = Bar("training", 100, done=60, stream=output_stream, every_s=0, clock=clock)
    for step in range(61, 64):
        clock.now += 60.0 if step == 61 else 2.0
        bar.update(step)
    assert output_stream.getvalue().splitlines() == [
        "training 60/100", "training 61/100", "training 62/100: 76 s left", "training 63/100: 74 s left",
    ]  # fmt: skip


def test_counted_nouns_are_singular_or_plural() -> None:
    assert [counted(count, "group") for count in (0, 1, 2)] == ["0 groups", "1 group", "2 groups"]


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output_stream = Terminal()
    bar = Bar("training", 10, done=4, stream=output_stream)
    bar.update(7, "pass rate 0.500 [ok]")
    bar.close()
    shown = plain(output_stream.getvalue())
    assert "training" in shown and "━" in shown and "7/10" in shown and "pass rate 0.500 [ok]" in shown
    bar.close()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_bar_fits_its_terminal_and_keeps_the_time_left(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    clock, output_stream = Clock(), Terminal()
    bar = Bar("training", 10, stream=output_stream, clock=clock)
    for step in range(1, 4):
        clock.now += 2.0
        bar.update(step, "heldout 0.250 (step 2)", "pass rate 0.500, reward 0.500", "1.2e+12 FLOPs")
    bar.close()
    last = re.split(r"[\r\n]+", plain(output_stream.getvalue()).rstrip())[-1]
    assert cell_len(last) <= width and "3/10" in last and "0:00:14" in last
    assert ("heldout 0.250 (step 2)" in last) is (width >= 80)


@pytest.mark.parametrize(("term", "is_terminal"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_a_dumb_terminal_gets_lines_like_a_log(term: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert is_interactive(Terminal()) is is_terminal and not is_interactive(io.StringIO())
    output_stream = Terminal()
    Bar("training", 10, stream=output_stream).close()
    assert ("\x1b" in output_stream.getvalue()) is is_terminal


# --- tables that fit a terminal --------------------------------------------------------------------------------

# Unusual names: wide and combining characters, emoji, line breaks and escape sequences.
NAMES = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["scalerl+loss=dapo+aggregation=token", "配方" * 20, "\x1b[31mred\x1b[0m", "a\nb\tc", "é" * 30, "👩‍👩‍👧" * 9]
    ),
)
COLUMNS = [Column("state"), Column("recipe", soft=True), Column("step", right=True), Column("why", 60, soft=True)]


@settings(max_examples=examples(60))
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["running", "failed", ""]), NAMES, st.integers(0, 10**9), NAMES), max_size=4
    ),
    width=st.one_of(st.sampled_from([40, 80, 120, 200]), st.integers(10, 200)),
)
def test_no_row_is_wider_than_its_terminal(rows: list[tuple[str, str, int, str]], width: int) -> None:
    cells: list[list[Cell]] = [[(state, "red"), name, str(step), (why, "dim")] for state, name, step, why in rows]
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system="truecolor", legacy_windows=False)
    console.print(fitted(COLUMNS, cells, width))
    printed = plain(screen.getvalue()).split("\n")
    assert len(printed) == len(rows) + 2 or not rows, "no row is wrapped"
    assert all(cell_len(line) <= width for line in printed)
    assert all(character.isprintable() for line in printed for character in line)


def test_long_texts_are_cut_and_narrow_terminals_have_fewer_columns() -> None:
    rows: list[list[Cell]] = [["running", "scalerl+loss=dapo+batch.prompts=32", "120", "no sign of life"]]

    def shown(width: int) -> list[str]:
        screen = io.StringIO()
        Console(file=screen, width=width).print(fitted(COLUMNS, rows, width))
        return [line.rstrip() for line in screen.getvalue().splitlines()]

    assert shown(80)[1] == "running  scalerl+loss=dapo+batch.prompts=32   120  no sign of life"
    assert shown(40) == ["state    recipe                     step", "running  scalerl+loss=dapo+batch.…   120"]
    rows[0][3] = ""
    assert shown(80)[0].endswith("step"), "empty columns are omitted"


def test_a_sparkline_uses_the_given_scale() -> None:
    assert sparkline([0, 0.5, 1], 0, 1, 10) == "▁▅█"
    assert sparkline([0, 0.5, 1], 0, 2, 10) == "▁▃▅"
    assert sparkline([float(value) for value in range(100)], 0, 99, 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([], 0, 1, 8) == "" and sparkline([3.0], 3, 3, 8) == "▁"
    assert sparkline([-5.0, 9.0], 0, 1, 8) == "▁█"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (125, "2 min"), (5300, "88 min"), (5401, "1 h 30 min"), (7500, "2 h 05 min"),
     (180000, "2 d 2 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
