"""How far something is: a bar on a terminal, a line a while elsewhere."""

from __future__ import annotations

import io
import re

import pytest

from sweeps.terminal import Bar, counted, duration


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


def test_on_a_terminal_it_is_a_bar() -> None:
    said = Terminal()
    bar = Bar("training", 10, done=4, stream=said)
    bar.update(7, "pass rate 0.500 [ok]")
    bar.close()
    shown = plain(said.getvalue())
    assert "training" in shown and "━" in shown and "7/10" in shown and "pass rate 0.500 [ok]" in shown
    bar.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (125, "2 min"), (5300, "88 min"), (5401, "1 h 30 min"), (7500, "2 h 05 min"),
     (180000, "2 d 2 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
