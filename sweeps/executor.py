"""Running members on this machine: one process each, a cap on how many at a time.

An executor answers `submit` and `poll`; a cluster's will answer the same. Members are forked from a server
process that has imported the training code once, so starting one costs no import. A member dies with the
process that launched it: nobody is left to write into a study that looks abandoned.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from sweeps.errors import UserError

LOG_FILE = "log.txt"


@dataclass(frozen=True)
class Outcome:
    """How a member's process ended: exit code 0, another one, or minus the signal that killed it."""

    run: str
    exit_code: int

    @property
    def reason(self) -> str:
        """In words."""
        if self.exit_code < 0:
            names = {number.value: number.name for number in signal.Signals}
            return f"killed by {names.get(-self.exit_code, f'signal {-self.exit_code}')}"
        return f"exit code {self.exit_code}"


class Executor(Protocol):
    """Starts members and says which have ended."""

    def has_room(self) -> bool:
        """Whether another member may be submitted now."""
        ...

    def submit(self, run: str, run_dir: Path) -> None:
        """Start the member frozen in `run_dir`."""
        ...

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Members that have ended since the last call; waits up to `timeout_s` for the first."""
        ...

    def running(self) -> list[str]:
        """Members submitted and not ended."""
        ...

    def close(self) -> None:
        """End what still runs."""
        ...


class LocalExecutor:
    """Members as processes of this machine.

    Args:
        entry: `module:function`, called in the member with its run directory; an exception is a failure.
        max_parallel: members at a time.
        threads: CPU threads a member. With more threads than cores, members slow each other down tenfold.
        preload: modules that the members' parent imports once.

    Raises:
        UserError: a number that is not 1 or more.
    """

    def __init__(self, entry: str, max_parallel: int, threads: int, preload: Sequence[str] = ()) -> None:
        for field, value in (("max_parallel", max_parallel), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"launch.{field}: {value!r} must be a whole number, 1 or more")
        self._entry = entry
        self._max_parallel = max_parallel
        self._threads = threads
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._processes: dict[str, Any] = {}

    def has_room(self) -> bool:
        """Whether fewer than `max_parallel` run."""
        return len(self._processes) < self._max_parallel

    def submit(self, run: str, run_dir: Path) -> None:
        """Fork a member."""
        # The server reads the thread count from the environment it starts in, when the first member is forked.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(self._threads)
        process = self._context.Process(target=_member, args=(self._entry, str(run_dir)), name=run)
        process.start()
        self._processes[run] = process

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Members that have ended."""
        sentinels = [process.sentinel for process in self._processes.values()]
        multiprocessing.connection.wait(sentinels, timeout=timeout_s)
        ended = [(run, process) for run, process in self._processes.items() if process.exitcode is not None]
        for run, process in ended:
            process.join()
            del self._processes[run]
        return [Outcome(run, process.exitcode) for run, process in ended]

    def running(self) -> list[str]:
        """Members that have not ended."""
        return list(self._processes)

    def close(self) -> None:
        """Terminate what still runs."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(timeout=10)
            if process.exitcode is None:
                process.kill()
        self._processes.clear()


def load_entry(name: str) -> Any:
    """Import `module:function`."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def _member(entry: str, run_dir: str) -> None:
    """A member's process."""
    _die_with_parent()
    with (Path(run_dir) / LOG_FILE).open("a", buffering=1, encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # The server's standard output may be no terminal: a killed member's last lines would stay in its buffer.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        try:
            load_entry(entry)(Path(run_dir))
        except BaseException:
            sys.stdout.flush()
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        sys.stderr.flush()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
