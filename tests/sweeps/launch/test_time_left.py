"""Tests of the estimate of a study's remaining time: per-member pace, limited slots, no large jumps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest

from sweeps.launch.time_left import MAX_CHANGE, TimeLeft
from tests.paths import ROOT


def replayed(name: str) -> Iterator[tuple[float, float | None, float]]:
    """Replay a recorded study; yield the time, the estimate and the true remaining time every ten seconds.

    Each row of the file is a member: recipe, budget, begin and end in seconds, and its step at each multiple of ten
    seconds in between.
    """
    rows = json.loads((ROOT / "tests" / "data" / "time_left" / f"{name}.json").read_text())
    study_end = max(end for _, _, _, end, _ in rows)
    left, begun, ended = TimeLeft(), set(), set()
    for now in range(10, int(study_end), 10):
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
        yield now, left.left_s(running, waiting, now), study_end - now


@pytest.mark.parametrize("name", ["demo", "replication", "alone"])
def test_the_estimate_never_jumps_in_recorded_studies(name: str) -> None:
    """Two of the studies shared their machine with other work: members of 300 steps took 40 s to 500 s."""
    previous: tuple[float, float] | None = None
    for now, estimate, _ in replayed(name):
        if estimate is not None and previous is not None:
            expected = previous[1] - (now - previous[0])
            assert abs(estimate - expected) <= MAX_CHANGE * max(expected, 10.0) + 1e-6
        previous = None if estimate is None else (now, estimate)
    assert previous is not None


def test_on_an_idle_machine_the_estimate_is_good_after_the_first_minute() -> None:
    log_ratios = [(now, math.log(left / truth)) for now, left, truth in replayed("alone") if left and truth > 60]
    assert log_ratios[0][0] <= 60
    errors = sorted(abs(error) for _, error in log_ratios)
    assert errors[len(errors) // 2] < 0.25 and errors[-1] < math.log(2)


def test_the_longest_member_determines_the_estimate() -> None:
    """Two slots run a short and a long member at one second per step, and a short one waits."""
    left = TimeLeft()
    left.started("short", "a", 0, 100, 0.0)
    left.started("long", "b", 0, 1000, 0.0)
    for now in range(10, 60, 10):
        left.reached("short", now, now)
        left.reached("long", now, now)
    assert left.left_s({"short": 50, "long": 950}, [("a", 100)], 50.0) == pytest.approx(950)


def test_a_waiting_member_takes_the_first_free_slot() -> None:
    left = TimeLeft()
    for run, pace in (("slow", 2.0), ("fast", 1.0)):
        left.started(run, run, 0, 100, 0.0)
        for step in (10, 20, 30, 40, 50):
            left.reached(run, step, step * pace)
    # Slot of `fast`: 50 s, then a member of its recipe, 100 s. Slot of `slow`: 100 s, then a member of an unknown
    # recipe at the mean pace, (200 + 100) / 2 s.
    assert left.left_s({"slow": 50, "fast": 50}, [("fast", 100), ("new", 70)], 100.0) == pytest.approx(250)


def test_a_slow_first_step_does_not_count() -> None:
    left = TimeLeft()
    left.started("one", "a", 0, 100, 0.0)
    assert left.left_s({"one": 100}, [], 10.0) is None
    for step in range(1, 6):
        left.reached("one", step, 20.0 + 0.5 * step)
    assert left.left_s({"one": 95}, [], 22.5) == pytest.approx(47.5)


def test_one_slow_step_changes_the_estimate_little_and_an_ended_member_at_once() -> None:
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


def test_loading_and_evaluation_count_for_waiting_members() -> None:
    left = TimeLeft()
    left.started("one", "a", 0, 10, 0.0)
    for step in range(1, 11):
        left.reached("one", step, 20.0 + step)  # its first step is at 21 s, after 20 s of loading
    left.ended("one", 10, 35.0)  # 5 s of evaluation after its last step
    left.started("two", "a", 0, 10, 35.0)
    assert left.left_s({"two": 10}, [("a", 10)], 35.0) == pytest.approx(10 + 25 + 10)
