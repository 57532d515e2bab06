"""A process that has the third-party packages imported, nothing of ours, and forks one child for each run of pytest.

Started with the tree as its working directory and in front of PYTHONPATH, and with the packages as arguments. A line on
standard input is a request, `{"tests": [...], "markers": ..., "timeout": ..., "cpu": ..., ...}`; a line on standard
output is its answer: pytest's exit code (None: timeout), the first test that failed, how many passed and were skipped,
seconds by the clock and of the processor. Whatever else runs on the machine, a loop without end meets the limit of its
own processor time (`cpu`). What a run leaves behind, its processes included, is gone before the answer.
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
    """A plugin that keeps what the answer says."""

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
    said = {"code": int(code), "failed": report.failed, "passed": report.passed, "skipped": report.skipped}
    os.write(answer, json.dumps(said).encode())


def _descendants(process: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, listed.read_text().split()):
                found += [*_descendants(child), child]
    return found


def _end_all() -> None:
    """End whatever a run has left; orphans have become children of this process."""
    while left := _descendants(os.getpid()):
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run pytest once, in a child."""
    began, before = time.monotonic(), _spent()
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
    deadline = began + request["timeout"]
    end = None
    while (end is None or end.si_pid != process) and time.monotonic() < deadline:
        if end is None:
            time.sleep(0.05)
        else:
            os.waitpid(end.si_pid, 0)  # an orphan: tests look whether such a process is gone
        end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    _end_all()
    ended = end is not None and end.si_pid == process and end.si_status != signal.SIGXCPU
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read() if ended else b""
    if ended:
        # A child that died without a word took pytest down with it.
        answer = json.loads(said) if said else {**answer, "code": 3, "failed": "(the process of pytest died)"}
    return {**answer, "seconds": round(time.monotonic() - began, 2), "cpu": round(_spent() - before, 2)}


def main() -> None:
    """Import what is asked for and serve until standard input ends."""
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
