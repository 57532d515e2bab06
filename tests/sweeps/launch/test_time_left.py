"""The time left of a study: at each member's own pace, over the slots there are, without wild jumps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from sweeps.launch.time_left import MAX_CHANGE, TimeLeft
from tests.paths import ROOT


def replayed(name: str) -> Iterator[tuple[float, float | None, float]]:
    """A study as it was recorded, looked at every ten seconds: now, what is told, and what was left in truth.

    A row a member: recipe, budget, seconds of its begin and end, and the step it had come to at each look between.
    """
    rows = json.loads((ROOT / "tests" / "data" / "time_left" / f"{name}.json").read_text())
    over = max(end for _, _, _, end, _ in rows)
    left, begun, ended = TimeLeft(), set(), set()
    for now in range(10, int(over), 10):
        running = {}
        for number, (recipe, steps, begin, end, looks) in enumerate(rows):
            run = str(number)
            if begin <= now and run not in begun:
                begun.add(run)
                left.started(run, recipe, 0, steps, begin)
            if end <= now and run not in ended:
                ended.add(run)
                left.ended(run, steps, end)
            if begin <= now < end:
                step = looks[(now - 10 * (int(begin // 10) + 1)) // 10]
                left.reached(run, step, now)
                running[run] = steps - step
        waiting = [(row[0], row[1]) for number, row in enumerate(rows) if str(number) not in begun]
        yield now, left.left_s(running, waiting, now), over - now


@pytest.mark.parametrize("name", ["demo", "replication", "alone"])
def test_of_recorded_studies_it_never_jumps(name: str) -> None:
    """Two of them shared their machine: members of 300 steps took 40 s to 500 s each."""
    before: tuple[float, float] | None = None
    for now, told, _ in replayed(name):
        if told is not None and before is not None:
            expected = before[1] - (now - before[0])
            assert abs(told - expected) <= MAX_CHANGE * max(expected, 10.0) + 1e-6
        before = None if told is None else (now, told)
    assert before is not None


def test_of_a_study_that_had_its_machine_alone_it_is_right_from_the_first_minute_on() -> None:
    told = [(now, math.log(left / truth)) for now, left, truth in replayed("alone") if left and truth > 60]
    assert told[0][0] <= 60
    errors = sorted(abs(error) for _, error in told)
    assert errors[len(errors) // 2] < 0.25 and errors[-1] < math.log(2)


def test_the_longest_member_decides_and_not_the_mean() -> None:
    """Two slots, a short and a long member at a second a step each, and a short one that waits."""
    left = TimeLeft()
    left.started("short", "a", 0, 100, 0.0)
    left.started("long", "b", 0, 1000, 0.0)
    for now in range(10, 60, 10):
        left.reached("short", now, now)
        left.reached("long", now, now)
    assert left.left_s({"short": 50, "long": 950}, [("a", 100)], 50.0) == pytest.approx(950)


def test_what_waits_takes_the_slot_that_is_free_first() -> None:
    left = TimeLeft()
    for run, pace in (("slow", 2.0), ("fast", 1.0)):
        left.started(run, run, 0, 100, 0.0)
        for step in (10, 20, 30, 40, 50):
            left.reached(run, step, step * pace)
    # fast: 50 s, then one of its recipe, 100 s; slow: 100 s, then one of an unknown recipe, (200 + 100) / 2 s.
    assert left.left_s({"slow": 50, "fast": 50}, [("fast", 100), ("new", 70)], 100.0) == pytest.approx(250)


def test_a_slow_first_step_is_no_pace() -> None:
    left = TimeLeft()
    left.started("one", "a", 0, 100, 0.0)
    assert left.left_s({"one": 100}, [], 10.0) is None
    for step in range(1, 6):
        left.reached("one", step, 20.0 + 0.5 * step)
    assert left.left_s({"one": 95}, [], 22.5) == pytest.approx(47.5)


def test_one_slow_step_moves_it_little_and_a_member_given_up_at_once() -> None:
    left = TimeLeft()
    left.started("one", "a", 0, 100, 0.0)
    left.started("two", "b", 0, 1000, 0.0)
    for step in range(1, 11):
        left.reached("one", step, step)
        left.reached("two", step, step)
    assert left.left_s({"one": 90, "two": 990}, [], 10.0) == pytest.approx(990)
    left.reached("two", 11, 20.0)  # ten times as long
    assert left.left_s({"one": 90, "two": 989}, [], 20.0) == pytest.approx(980 * (1 + MAX_CHANGE))
    left.ended("two", 11, 20.0)
    assert left.left_s({"one": 90}, [], 20.0) == pytest.approx(90)


def test_what_a_member_takes_beside_its_steps_is_counted_for_those_that_wait() -> None:
    left = TimeLeft()
    left.started("one", "a", 0, 10, 0.0)
    for step in range(1, 11):
        left.reached("one", step, 20.0 + step)  # it loads for 20 s
    left.ended("one", 10, 35.0)  # and is evaluated for 5 s
    left.started("two", "a", 0, 10, 35.0)
    assert left.left_s({"two": 10}, [("a", 10)], 35.0) == pytest.approx(10 + 25 + 10)
