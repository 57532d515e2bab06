"""A pytest plugin that prints, at the end of a run, CPU time per folder, skipped and deselected tests, and retries.

A test's CPU time includes set-up, tear-down and the child processes that it waited for. Under xdist each worker
measures its own tests and sends the numbers to the printing process in its reports.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest

CPU = "cpu_s"
DEAREST = int(os.environ.get("DEAREST", "30"))  # number of the most CPU-intensive tests to list
# Marks that `make test` deselects, with the command that runs them and their requirements.
LEFT_OUT = {
    "full": "make test-full",
    "slow": "make test ALL=1",
    "slurm": "make test ALL=1: a SLURM cluster of its own",
    "browser": "make test ALL=1: Chromium",
    "environments": "make test ALL=1: verifiers, openenv-core and textarena",
    "peers": "make test ALL=1: TRL, verl and rliable",
    "vllm": "make test ALL=1: vLLM",
}
# Marks of tests that run real components. They get one retry, because a busy machine can make them fail.
REAL = ("slurm", "vllm", "browser", "live")
# Files in which every test waits for real processes.
LIVE = frozenset(
    {
        "tests/distributed/test_meeting.py",
        "tests/environment/test_pool.py",
        "tests/environment/test_trl.py",
        "tests/environments/test_packages.py",
        "tests/distributed/test_ranks.py",
        "tests/generator/test_engines.py",
        "tests/generator/test_fleet.py",
        "tests/generator/test_weights.py",
        "tests/member/test_kill.py",
        "tests/member/test_live_kill.py",
        "tests/stream/test_async_kill.py",
        "tests/stream/test_live_driver.py",
        "tests/sweeps/executor/test_local.py",
        "tests/sweeps/launch/test_planning.py",
        "tests/sweeps/run/test_activity.py",
        "tests/sweeps/run/test_lease_contention.py",
        "tests/sweeps/tracking/test_login.py",
        "tests/sandbox/test_escapes.py",
        "tests/verify/test_pool.py",
    }
)

_spent = pytest.StashKey[float]()
_left_out: Counter[str] = Counter()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _folder(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.split("::")[0]).parts
    return "/".join(parts[1 : 3 if parts[1] == "sweeps" else 2])


# --- in the process that runs tests --------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests of real components one retry, and run long tests first so that none starts last."""
    for item in items:
        if item.nodeid.split("::")[0] in LIVE:
            item.add_marker(pytest.mark.live)
        if any(item.get_closest_marker(mark) for mark in REAL):
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: (item.get_closest_marker("slurm") is None, item.get_closest_marker("slow") is None))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count deselected tests by the first of their marks that is in LEFT_OUT."""
    for item in items:
        mark = next((name for name in LEFT_OUT if item.get_closest_marker(name)), None)
        if mark is not None:
            _left_out[mark] += 1


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record the CPU time before the first fixture of a test."""
    item.stash[_spent] = _cpu_s()
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Put the CPU spent so far into the last report of a test."""
    if call.when == "teardown":
        item.user_properties.append((CPU, _cpu_s() - item.stash[_spent]))
    yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of deselected tests to the printing process."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(_left_out)


# --- in the printing process ---------------------------------------------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts of an xdist worker. Every worker collects all tests, so the counts are not added up."""
    _left_out.update(Counter(getattr(node, "workeroutput", {}).get("left_out", {})) - _left_out)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print CPU seconds per folder, the most expensive tests, each retry with its reason, and the tests left out."""
    stats = terminalreporter.stats
    spent = {
        report.nodeid: seconds
        for reports in stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, seconds in report.user_properties
        if name == CPU
    }
    if os.environ.get("CI_ALL") == "1":
        cpu_by_folder: Counter[str] = Counter()
        for nodeid, seconds in spent.items():
            cpu_by_folder[_folder(nodeid)] += seconds  # type: ignore[assignment]
        terminalreporter.section(f"CPU seconds by room, {sum(spent.values()):.0f} in all")
        for folder, seconds in cpu_by_folder.most_common():
            terminalreporter.line(f"{seconds:8.1f}  {folder}")
        terminalreporter.section(f"the {DEAREST} dearest tests, in CPU seconds")
        for nodeid, seconds in sorted(spent.items(), key=lambda each: -each[1])[:DEAREST]:
            terminalreporter.line(f"{seconds:8.1f}  {nodeid}")
    for report in stats.get("rerun", []):
        last = str(report.longrepr).strip().splitlines()[-1:] or ["no reason given"]
        terminalreporter.line(f"tried twice: {report.nodeid}: {last[0]}")
    left = [f"{count} {mark} ({LEFT_OUT[mark]})" for mark, count in _left_out.most_common()]
    skipped = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", []))
    left += [f"{count} skipped ({reason})" for reason, count in skipped.most_common()]
    terminalreporter.line(f"left out: {'; '.join(left) or 'nothing'}")
