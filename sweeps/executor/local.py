"""Executors for this machine. They run members as child processes, or one after the other in this process."""

from __future__ import annotations

import io
import multiprocessing.connection
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Launch, Outcome, load_entry
from sweeps.executor.failure import KINDS, failure_text, first_line, kind_of
from sweeps.process import THREADS, die_with_parent, end, forkserver
from sweeps.run.activity import HUNG_CODE
from sweeps.run.interruption import RunInterruptedError, ask_to_stop, requested_stop
from sweeps.run.journal import LOG_FILE

# Exit code of a member that stopped because its study asked it to.
STOPPED_CODE = 87


class LocalExecutor:
    """Executor that runs members as parallel processes on this machine.

    Args:
        entry: `module:function` that runs one member, given its folder, in the member's process; an exception is a
            failure.
        max_parallel: number of members that run at the same time.
        threads: CPU threads of each member. If all members together have more threads than there are cores, they slow
            each other down tenfold.
        preload: modules imported once, in the server process from which members are forked.

    Raises:
        UserError: `max_parallel` or `threads` is not a whole number of 1 or more.
    """

    outlives = False

    def __init__(self, entry: str, max_parallel: int, threads: int, preload: Sequence[str] = ()) -> None:
        for name, value in (("max_parallel", max_parallel), ("threads", threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"launch.{name}: {value!r} must be a whole number, 1 or more")
        self._entry = entry
        self._max_parallel = max_parallel
        self._threads = threads
        self._context = forkserver(preload)
        self._processes: dict[str, Any] = {}
        self._run_dirs: dict[str, Path] = {}
        self._errors: dict[str, Connection] = {}

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many waiting members may start now, so that at most `max_parallel` run."""
        return min(len(waiting), self._max_parallel - len(self._processes))

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Start a process for each member. There are no job ids, so every value is None."""
        for member in members:
            # The error's kind comes through a pipe, because on a full disk neither journal nor log can be written.
            receiver, sender = self._context.Pipe(duplex=False)
            arguments = (self._entry, str(member.run_dir), self._threads, sender)
            process = self._context.Process(target=_member, args=arguments, name=member.run)
            process.start()
            sender.close()
            self._processes[member.run] = process
            self._run_dirs[member.run] = member.run_dir
            self._errors[member.run] = receiver
        return {member.run: None for member in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Return an empty dict, because members of an earlier process ended with that process."""
        return {}

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Wait up to `timeout_s` for a process to end, and return the outcomes of all that have ended."""
        sentinels = [process.sentinel for process in self._processes.values()]
        multiprocessing.connection.wait(sentinels, timeout=timeout_s)
        ended = [(run, process) for run, process in self._processes.items() if process.exitcode is not None]
        for run, process in ended:
            process.join()
            del self._processes[run]
        return [
            _outcome(run, process.exitcode, self._run_dirs.pop(run), self._errors.pop(run)) for run, process in ended
        ]

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Write a stop file for each member, which checks for it at step boundaries."""
        for run in runs:
            if run in self._processes:
                ask_to_stop(self._run_dirs[run], reason)

    def running(self) -> list[str]:
        """Return the members whose outcomes `poll` has not returned yet."""
        return list(self._processes)

    def queued(self) -> frozenset[str]:
        """Return an empty set, because every submitted member runs at once."""
        return frozenset()

    def settled(self) -> bool:
        """Return True, because it is always known whether a child process has ended."""
        return True

    def close(self) -> None:
        """Terminate the processes that still run, and kill those that do not end within 10 s."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            end(process, (10.0, signal.SIGKILL))
        self._processes.clear()
        self._errors.clear()


class InProcessExecutor:
    """Executor that runs members one after the other in this process, for a debugger. Their output is not captured.

    Args:
        entry: `module:function` that runs one member, given the member's folder. An exception ends the whole study.
    """

    outlives = False

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._waiting: list[Launch] = []
        self._stopped: list[Outcome] = []

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return 1 while no member is submitted, else 0, because members run one at a time."""
        return min(len(waiting), 1 - len(self._waiting))

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Queue the members; the next `poll` runs them."""
        self._waiting.extend(members)
        return {member.run: None for member in members}

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Return an empty dict, because members end with the process that runs them."""
        return {}

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Run the submitted members to their end, and return their outcomes. An exception of a member propagates."""
        outcomes, self._stopped = self._stopped, []
        while self._waiting:
            load_entry(self._entry)(self._waiting[0].run_dir)
            outcomes.append(Outcome(self._waiting.pop(0).run, 0))
        return outcomes

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Drop queued members, with an outcome of kind `stopped`. No member can be running during this call."""
        self._stopped += [Outcome(launch.run, 1, "stopped", reason) for launch in self._waiting if launch.run in runs]
        self._waiting = [launch for launch in self._waiting if launch.run not in runs]

    def running(self) -> list[str]:
        """Return the submitted members whose outcomes `poll` has not returned yet."""
        return [*(member.run for member in self._waiting), *(outcome.run for outcome in self._stopped)]

    def queued(self) -> frozenset[str]:
        """Return an empty set, because the next poll runs all submitted members."""
        return frozenset()

    def settled(self) -> bool:
        """Return True, because members run only inside `poll`."""
        return True

    def close(self) -> None:
        """Do nothing: members run inside this process."""


def _outcome(run: str, exit_code: int, run_dir: Path, errors: Connection) -> Outcome:
    """Return the outcome of a member's process, from its exit code and the error that it has sent."""
    with errors:
        try:
            kind, line = errors.recv() if errors.poll() else (None, "")
        except EOFError:  # the process has sent nothing
            kind, line = None, ""
    if exit_code == STOPPED_CODE:
        return Outcome(run, exit_code, "stopped", requested_stop(run_dir))
    if kind == "disk_full":  # the reason may be missing in journal and log
        return Outcome(run, exit_code, kind, f"{KINDS[kind][0]}: {line}")
    return Outcome(run, exit_code, "hang" if exit_code == HUNG_CODE else kind)


def _use_threads(count: int) -> None:
    for name in THREADS:
        os.environ[name] = str(count)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def _member(entry: str, run_dir: str, threads: int, errors: Connection) -> None:
    """Run one member in its own process. If an error ends it, send the error's kind and first line."""
    die_with_parent()
    _use_threads(threads)
    try:
        _run_logged(entry, run_dir, errors)
    except OSError as error:  # the log cannot be written
        errors.send((kind_of(error), first_line(error)))
        raise


def _run_logged(entry: str, run_dir: str, errors: Connection) -> None:
    # Readable by the owner only: members and their libraries may print secrets.
    descriptor = os.open(Path(run_dir) / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a", buffering=1, encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # Unless stdout is a terminal, it is block-buffered, and the last lines of a killed member would be lost.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        try:
            load_entry(entry)(Path(run_dir))
        except RunInterruptedError as error:
            print(f"stopped: {error}", flush=True)
            # Not os._exit, because exit handlers release what libraries share with other processes.
            raise SystemExit(STOPPED_CODE if requested_stop(Path(run_dir)) else 1) from None
        except BaseException as error:
            errors.send((kind_of(error), first_line(error)))
            sys.stdout.flush()
            print(failure_text(error), end="", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        sys.stderr.flush()
