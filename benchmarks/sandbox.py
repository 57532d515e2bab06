"""Measure the time of a judgement in the sandbox, and of a bare start of Python: `python benchmarks/sandbox.py`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from lightning_scalerl.sandbox import Limits, Mode, check_protections, judge, judge_stdio

PROGRAM = "def add(a, b):\n    return a + b\n"
TESTS = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
MODES: tuple[Mode, ...] = ("bubblewrap", "landlock", "none")


def milliseconds(act: Callable[[], object], times: int) -> float:
    """Return the median milliseconds of a call."""
    durations_ms = []
    for _ in range(times):
        started_at = time.perf_counter()
        act()
        durations_ms.append(1000 * (time.perf_counter() - started_at))
    return median(durations_ms)


def main() -> None:
    """Print a table of times, also as multiples of a bare start."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--times", type=int, default=15)
    times = options.parse_args().times
    bare = milliseconds(lambda: subprocess.run([sys.executable, "-I", "-c", "pass"], check=True), times)
    print(f"a bare start of Python: {bare:.0f} ms\n")
    print("| mode | judgement | with numpy | one case of stdin |\n|---|---|---|---|")
    limits = Limits(wall_s=30)
    for mode in MODES:
        walls = check_protections(allow_unprotected=mode == "none", mode=mode)

        def judged(program: str) -> None:
            result = judge(program, TESTS, entry_point="add", limits=limits, protections=walls)  # noqa: B023
            assert result.passed, result.reason

        def read() -> None:
            result = judge_stdio("print(int(input()) + 1)", [("1\n", "2\n")], limits, walls)  # noqa: B023
            assert result.passed, result.reason

        cells = [
            milliseconds(lambda: judged(PROGRAM), times),
            milliseconds(lambda: judged(f"import numpy\n{PROGRAM}"), times),
            milliseconds(read, times),
        ]
        print(f"| {mode} | " + " | ".join(f"{cell:.0f} ms ({cell / bare:.1f}x)" for cell in cells) + " |")


if __name__ == "__main__":
    main()
