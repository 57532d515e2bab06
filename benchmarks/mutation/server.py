"""A server that imports third-party packages, but no package of the project, and forks a child per run of pytest.

It is started in the tree, with the tree first on PYTHONPATH and the packages as arguments. A line on standard input is
a request, `{"tests": [...], "markers": ..., "timeout": ..., "cpu": ..., ...}`. The answer is a line on standard output:
pytest's exit code (None for a timeout), the first test that failed, numbers of passed and skipped tests, and seconds of
wall-clock and CPU time. The limit on CPU time (`cpu`) ends an endless loop even on a busy machine. All processes that a
run leaves behind are killed before the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

_SUBREAPER = 36  # prctl: orphaned descendants become children of this process


class _Report:
    """A pytest plugin that collects the results for the answer."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.passed = self.skipped = 0

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid} (collection)"

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        self.skipped += report.skipped
        self.passed += report.passed and report.when == "call"


def _child(request: dict[str, Any], answer: int) -> None:
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu"], resource.RLIM_INFINITY))
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.dont_write_bytecode = request["keep_bytecode"] is False
    if not request["keep_bytecode"]:
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    report = _Report()
    options = [
        "-x",
        "-q",
        "--durations=15",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        f"--basetemp={request['temporary']}",
    ]
    code = pytest.main([*options, "-m", request["markers"], *request["tests"]], plugins=[report])
    outcome = {"code": int(code), "failed": report.failed, "passed": report.passed, "skipped": report.skipped}
    os.write(answer, json.dumps(outcome).encode())


def _descendants(process: int) -> list[int]:
    descendants = []
    for children_file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children_file.read_text().split()):
                descendants += [*_descendants(child), child]
    return descendants


def _end_all() -> None:
    """Kill all processes that a run left behind. Orphans have become children of this process."""
    while remaining := _descendants(os.getpid()):
        for process in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run pytest once in a child process and return the answer."""
    started_at, cpu_before = time.monotonic(), _spent()
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            _child(request, writing)
        finally:
            os._exit(0)
    os.close(writing)
    answer: dict[str, Any] = {"code": None, "failed": None, "passed": 0, "skipped": 0}
    deadline = started_at + request["timeout"]
    end = None
    while (end is None or end.si_pid != process) and time.monotonic() < deadline:
        if end is None:
            time.sleep(0.05)
        else:
            os.waitpid(end.si_pid, 0)  # reap an orphan: some tests check that such a process is gone
        end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    _end_all()
    ended = end is not None and end.si_pid == process and end.si_status != signal.SIGXCPU
    with os.fdopen(reading, "rb") as pipe:
        outcome_text = pipe.read() if ended else b""
    if ended:
        # The child died without an answer, so pytest crashed.
        answer = (
            json.loads(outcome_text)
            if outcome_text
            else {**answer, "code": 3, "failed": "(the process of pytest died)"}
        )
    return {**answer, "seconds": round(time.monotonic() - started_at, 2), "cpu": round(_spent() - cpu_before, 2)}


def main() -> None:
    """Import the packages and serve requests until standard input ends."""
    sys.path.pop(0)  # the folder of this file
    sys.path.insert(0, str(Path.cwd()))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    ours = [name for name in sys.modules if name.partition(".")[0] in ("lightning_scalerl", "sweeps", "tests")]
    assert not ours, ours
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
