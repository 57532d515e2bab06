"""Tests of the detection of hanging processes: the allowed silence, and the end of a process that exceeds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.run.activity import HUNG_CODE, Activity, HangTimeout


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(st.floats(0.001, 1e4), min_size=1, max_size=30),
    st.floats(1.1, 20.0),
    st.floats(0.1, 1e4),
    st.floats(0.0, 1e6),
)
def test_a_run_hangs_if_it_is_silent_for_longer_than_the_limit(
    pauses: Sequence[float], factor: float, at_least_s: float, silence_s: float
) -> None:
    clock = Clock()
    activity, patience = Activity(clock), HangTimeout(factor, at_least_s)
    for pause in pauses:
        clock.now += pause
        # The limit follows from the earlier pauses, so a pause longer than all of them may count as a hang.
        allowed = max(at_least_s, factor * activity.longest_s)
        assert (activity.hang_message(patience) is not None) == (activity.idle_s > allowed)
        activity.note("decode")
    limit_s = max(at_least_s, factor * activity.longest_s)
    assert activity.longest_s == pytest.approx(max(pauses))
    clock.now += silence_s
    message = activity.hang_message(patience)
    assert (message is not None) == (activity.idle_s > limit_s)
    assert message is None or "last activity: decode" in message
    assert activity.hang_message(HangTimeout(None, at_least_s)) is None


def test_activity_before_a_run_begins_does_not_count() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now += 5000.0
    activity.note("train")
    activity.begin()
    assert activity.longest_s == 0.0 and activity.facts() == {"doing": "starting", "idle_s": 0.0}


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"hang_factor": 1}, "launch.hang_factor: 1 must be a number above 1, or null"),
        ({"hang_factor": "ten"}, "launch.hang_factor: 'ten'"),
        ({"hang_min_s": 0}, "launch.hang_min_s: 0 must be a number above 0"),
        ({"hang_min_s": None}, "launch.hang_min_s: None"),
        ({"hang_min_s": float("nan")}, "launch.hang_min_s: nan"),
        ({"hang_min_s": float("inf")}, "launch.hang_min_s: inf"),
        ({"hang_factor": float("inf")}, "launch.hang_factor: inf"),
    ],
)
def test_invalid_values_are_refused(launch: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        HangTimeout.of({"launch": launch})


def test_an_older_configuration_has_the_defaults() -> None:
    assert HangTimeout.of({}) == HangTimeout.of({"launch": {"threads": 1}}) == HangTimeout()
    assert HangTimeout.of({"launch": {"hang_factor": None}}).factor is None


HANGS = """
import sys, threading, time, ctypes
from sweeps.run.activity import HangTimeout, activity
activity.last_word = lambda reason: print("last word:", reason, flush=True)
def a_collective_that_waits():
    {hang}
with activity.watched(HangTimeout(4.0, {at_least}), lambda: print("left", flush=True)):
    for _ in range({signs}):
        activity.note("decode")
        time.sleep({pause})
    a_collective_that_waits()
print("went on")
"""
WAIT_FOREVER = "threading.Event().wait(60)"
# A C call that sleeps without releasing Python's global lock.
SLEEP_WITH_THE_LOCK = "ctypes.PyDLL(None).sleep(60)"


def run_hanging(
    hang: str, at_least: float = 0.5, signs: int = 3, pause: float = 0.05
) -> subprocess.CompletedProcess[str]:
    code = HANGS.format(hang=hang, at_least=at_least, signs=signs, pause=pause)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)


def test_a_hanging_process_prints_its_stacks_and_ends() -> None:
    result = run_hanging(WAIT_FOREVER)
    assert result.returncode == HUNG_CODE
    assert "last word: no sign of life for" in result.stdout and "last activity: decode" in result.stdout
    assert result.stdout.endswith("left\n"), "the callback that frees resources was called"
    assert "a_collective_that_waits" in result.stderr, "the stacks are printed"
    assert "went on" not in result.stdout


def test_a_process_that_hangs_with_pythons_lock_prints_its_stacks_and_ends() -> None:
    began = time.monotonic()
    result = run_hanging(SLEEP_WITH_THE_LOCK)
    assert result.returncode not in (0, -signal.SIGALRM) and "went on" not in result.stdout
    assert "a_collective_that_waits" in result.stderr
    assert time.monotonic() - began < 40


def test_a_slow_process_continues() -> None:
    """The silence is twice the minimum, but less than four times the longest pause."""
    result = run_hanging("time.sleep(1.0)", at_least=0.5, signs=3, pause=0.4)
    assert (result.returncode, result.stdout) == (0, "went on\n"), result.stderr


SLOW = """
import sys, time
from sweeps.run import activity as module
from sweeps.run.activity import HangTimeout, activity
module._LAST_WORDS_S = 1.0
with activity.watched(HangTimeout(4.0, 1.0)):
    for number in range(30):
        activity.note("decode")
        print(number, flush=True)
        {each}
    longest = activity.longest_s
print("went on", longest, flush=True)
"""


@contextmanager
def slow_process(each: str, **given: Any) -> Iterator[subprocess.Popen[str]]:
    code = SLOW.format(each=each)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, **given)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_blocked_log_does_not_keep_a_hanging_process_alive() -> None:
    """The log may be on the file server that the process waits for, so that writing to it blocks."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    with slow_process("time.sleep(60)", stderr=writing) as child:
        assert child.wait(40) == HUNG_CODE
    os.close(reading)
    os.close(writing)


def test_a_suspended_process_continues() -> None:
    with slow_process("time.sleep(0.05)", stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(5):
            child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(1.6)
        child.send_signal(signal.SIGCONT)
        out, err = child.communicate(timeout=40)
        assert child.returncode == 0, err
        assert float(out.split()[-1]) < 1.0, "time while suspended does not count as a pause of the run"


def test_a_process_in_a_debugger_is_not_ended() -> None:
    each = "breakpoint() if number == 3 else None"
    with slow_process(each, stderr=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        time.sleep(5.0)
        assert child.poll() is None
        out, err = child.communicate("c\n", timeout=40)
        assert child.returncode == 0 and "went on" in out, err
