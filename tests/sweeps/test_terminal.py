"""How far something is: a bar on a terminal, a line a while elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from sweeps.terminal import BLOCKS, Bar, Cell, Column, counted, duration, fitted, on_screen, shortened, sparkline
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


def test_without_a_terminal_it_is_a_line_a_while() -> None:
    clock, said = Clock(), io.StringIO()
    bar = Bar("training", 100, stream=said, every_s=30, clock=clock)
    for step in range(1, 41):
        clock.now += 2.0
        bar.update(step, f"reward 0.{step:02d}")
    bar.close()
    assert said.getvalue().splitlines() == [
        "training 0/100",
        "training 15/100: reward 0.15, 3 min left",
        "training 30/100: reward 0.30, 2 min left",
        "training 40/100: reward 0.40, 2 min left",
    ]


def test_time_left_is_at_the_pace_of_this_process() -> None:
    """What an earlier one has done says nothing of how fast this one is."""
    clock = Clock()
    bar = Bar("training", 100, done=60, stream=io.StringIO(), clock=clock)
    for step in range(61, 69):
        assert bar.left_s is None
        clock.now += 2
        bar.update(step)
    assert bar.left_s == 64
    bar.update(100)
    assert bar.left_s == 0


def test_time_left_is_withheld_until_it_is_known() -> None:
    """A first step that loads and compiles for a minute, then 0.5 s each: "73 min left", and done in one."""
    clock, said = Clock(), io.StringIO()
    bar = Bar("training", 100, stream=said, every_s=0, clock=clock)
    for step in range(1, 101):
        clock.now += 60.0 if step == 1 else 0.5
        bar.update(step)
    lines = said.getvalue().splitlines()
    assert not any("left" in line for line in lines[:8]) and lines[8] == "training 8/100: 46 s left"
    assert lines[50] == "training 50/100: 25 s left"


def test_time_left_is_withheld_while_the_pace_changes() -> None:
    clock = Clock()
    bar = Bar("training", 100, stream=io.StringIO(), clock=clock)
    for step in range(1, 11):
        clock.now += 10.0 if step < 9 else 1.0
        bar.update(step)
    assert bar.left_s is None
    for step in range(11, 20):
        clock.now += 1.0
        bar.update(step)
    assert bar.left_s == 81


def test_a_count_has_its_noun() -> None:
    assert [counted(count, "group") for count in (0, 1, 2)] == ["0 groups", "1 group", "2 groups"]


def test_on_a_terminal_it_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    said = Terminal()
    bar = Bar("training", 10, done=4, stream=said)
    bar.update(7, "pass rate 0.500 [ok]")
    bar.close()
    shown = plain(said.getvalue())
    assert "training" in shown and "━" in shown and "7/10" in shown and "pass rate 0.500 [ok]" in shown
    bar.close()


@pytest.mark.parametrize(
    ("width", "shown", "hidden"),
    [
        (40, ["3/10", "about 14 s left"], ["heldout"]),
        (80, ["3/10", "about 14 s left", "heldout 0.250 (step 2)"], ["FLOPs"]),
        (120, ["3/10", "about 14 s left", "heldout 0.250 (step 2)", "reward 0.5", "FLOPs"], []),
    ],
)
def test_a_bar_fits_its_terminal_and_keeps_the_time_left(
    width: int, shown: list[str], hidden: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sweeps.terminal.Bar.left_s", 14.0)
    said = Terminal()
    bar = Bar("training", 10, stream=said)
    bar.update(3, "heldout 0.250 (step 2)", "pass rate 0.500, reward 0.500", "1.2e+12 FLOPs")
    bar.close()
    last = re.split(r"[\r\n]+", plain(said.getvalue()).rstrip())[-1]
    assert cell_len(last) <= width
    assert all(text in last for text in shown) and not any(text in last for text in hidden)


@pytest.mark.parametrize(("term", "is_terminal"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_a_dumb_terminal_is_written_to_as_a_log_is(
    term: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    assert on_screen(Terminal()) is is_terminal and not on_screen(io.StringIO())
    said = Terminal()
    Bar("training", 10, stream=said).close()
    assert ("\x1b" in said.getvalue()) is is_terminal


def test_without_rich_a_terminal_is_written_to_as_a_log_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five packages suffice for looking at curves, and it is none of them."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sweeps.terminal.find_spec", lambda name: None)
    assert not on_screen(Terminal())


# --- what fits a terminal --------------------------------------------------------------------------------------

# Names as people and their tools make them: wide, combining, right to left, with line breaks and escape sequences.
NAMES = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        ["scalerl+loss=dapo+aggregation=token", "配方" * 20, "\x1b[31mred\x1b[0m", "a\nb\tc", "é" * 30, "👩‍👩‍👧" * 9]
    ),
)
COLUMNS = [Column("state", 1), Column("recipe", least=8), Column("step", right=True), Column("why", 2, least=6)]


@settings(max_examples=examples(120))
@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["running", "failed", ""]), NAMES, st.integers(0, 10**9), NAMES), max_size=4
    ),
    width=st.one_of(st.sampled_from([40, 80, 120, 200]), st.integers(1, 200)),
    head=st.booleans(),
)
def test_no_row_is_wider_than_its_terminal(rows: list[tuple[str, str, int, str]], width: int, head: bool) -> None:
    cells: list[list[Cell]] = [[(state, "red"), name, str(step), (why, "dim")] for state, name, step, why in rows]
    lines = fitted(COLUMNS, cells, width, head)
    assert len(lines) == len(rows) + head
    screen = io.StringIO()
    console = Console(file=screen, width=width, force_terminal=True, color_system="truecolor", legacy_windows=False)
    for line in lines:
        console.print(line)
    printed = plain(screen.getvalue()).split("\n")
    assert len(printed) == len(lines) + 1, "none is wrapped"
    assert all(cell_len(line) <= width for line in printed)
    assert all(character.isprintable() for line in printed for character in line)


@settings(max_examples=examples(120))
@given(text=NAMES, width=st.integers(0, 60))
def test_a_text_is_shortened_in_its_middle(text: str, width: int) -> None:
    short = shortened(text, width)
    assert cell_len(short) <= width and short.isprintable()
    if short.count("…") == 1 and "…" not in text and width > 2:
        begin, _, end = short.partition("…")
        clean = shortened(text, 10**6)
        assert clean.startswith(begin) and clean.endswith(end) and len(begin) + len(end) < len(clean)


def test_columns_go_by_what_they_are_worth() -> None:
    rows: list[list[Cell]] = [["running", "scalerl+loss=dapo", "120", "no sign of life"]]

    def shown(width: int) -> list[str]:
        return [str(line) for line in fitted(COLUMNS, rows, width)]

    assert shown(80)[1] == "running  scalerl+loss=dapo   120  no sign of life"
    assert shown(40) == ["state    recipe       step  why", "running  scale…=dapo   120  no sig… life"]
    assert shown(20) == ["recipe          step", "scalerl…s=dapo   120"]
    assert shown(12)[1] == "scal…apo  1…"
    assert not str(fitted(COLUMNS, [["running", "a", "1", ""]], 80)[0]).endswith("why"), (
        "what nothing fills is left out"
    )


def test_a_sparkline_is_on_the_scale_that_it_is_given() -> None:
    assert sparkline([0, 0.5, 1], 0, 1, 10) == "▁▅█"
    assert sparkline([0, 0.5, 1], 0, 2, 10) == "▁▃▅"
    assert sparkline([float(value) for value in range(100)], 0, 99, 8) == BLOCKS
    assert sparkline([], 0, 1, 8) == "" and sparkline([3.0], 3, 3, 8) == "▁"
    assert sparkline([-5.0, 9.0], 0, 1, 8) == "▁█"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (125, "2 min"), (5300, "88 min"), (5401, "1 h 30 min"), (7500, "2 h 05 min"),
     (180000, "2 d 2 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
