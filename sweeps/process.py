"""Child processes that end with their parent: started, heard, and ended politely and then by force.

`Tree` is a command with all that it starts. A guard stands between the command and this process: this file, run as a
script without site packages, so that it starts in 30 ms. It reads a JSON object per line on standard input. When
standard input ends, the parent is gone, and the guard kills everything at once, before another process takes over.

    in   {"words": [...], "env": {...}, "folder": "...", "out": "path or null"}     null: on our standard error
    in   {"stop": 15, "within_s": 60}          send the signal (null: none), and kill everything after so long
    out  {"started": 4711} or {"failed": "..."}
    out  {"ended": 0, "behind": 3, "left": 2, "killed": false}     exit code, or minus the signal's number; processes
                                            that it left behind, and those of them that did not end when they were asked
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext
    from multiprocessing.process import BaseProcess

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl
_PROC = Path("/proc")
_LEFT_S = 2.0  # what the command leaves behind may end itself for so long


def ended_with(code: int) -> str:
    """Return an exit code in words, such as "exit code 1"; minus a signal's number is "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def end(process: BaseProcess, *signals: tuple[float, signal.Signals]) -> None:
    """Wait for the end of a child process; after so many seconds each, send it the next signal."""
    for timeout_s, number in signals:
        process.join(timeout_s)
        if process.exitcode is None and process.pid is not None:
            _send(process.pid, number)
    process.join()


def die_with_parent(started_by: int | None = None) -> None:
    """End this process as soon as its parent is gone.

    Args:
        started_by: process whose thread started this one; Linux then kills even a process that hangs. None for a child
            of `multiprocessing`, which may be forked from a server: a thread watches the process that asked for it.
    """
    if started_by is not None:
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        # It may have gone before prctl, and then no signal comes.
        if os.getppid() != started_by:
            os._exit(1)
        return
    from multiprocessing import connection, parent_process

    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        # Not sys.exit, which would end this thread alone.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def forkserver(preload: Sequence[str]) -> ForkServerContext:
    """Return the context whose processes are forked from one server, which imports `preload` when the first one starts.

    Planner and members of a study share it: Lightning alone costs a dozen seconds of CPU to import.
    """
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # Libraries read it when they are imported. A server computes nothing; each member sets its own number.
    for name in THREADS:
        os.environ[name] = "1"
    return context


def kill_group(leader: int) -> None:
    """Kill all processes of a group, if there are any."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """End of a command: exit code, or minus the number of the signal that killed it.

    left: processes that it left behind, which were killed; killed: whether it had to be killed when asked to stop;
    behind: processes that were at work when it ended, those that ended themselves when asked among them.
    """

    code: int
    left: int
    killed: bool
    behind: int = field(default=0, compare=False)

    @property
    def how(self) -> str:
        """Text on the end, such as "exit code 1"."""
        return ended_with(self.code)


def locked(path: Path) -> int | None:
    """Return a descriptor that locks a file, once what an earlier process has started under its lock has ended.

    None where the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class Tree:
    """A command that runs, with all the processes that it starts.

    Context manager: on its way out, and when this process dies in whatever way, everything is killed.

    Args:
        words, env, folder: of the command.
        out: file that its standard output is appended to; None for this process's standard error, where its own goes.
        lock: descriptor of a lock that is held until all of the command has ended, whatever becomes of this process.

    Raises:
        ChildProcessError: it cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        out: Path | None = None,
        lock: int | None = None,
    ) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )
        self._rest = b""
        self._tell(
            {"words": list(words), "env": dict(env), "folder": str(folder), "out": None if out is None else str(out)}
        )
        said = self._hear(None) or {"failed": "the process that starts it has ended"}
        if "failed" in said:
            self._guard.wait()
            raise ChildProcessError(f"{words[0]!r} cannot be started in {folder}: {said['failed']}")
        self.pid: int = said["started"]

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._guard.wait()

    def stop(self, number: signal.Signals | None, within_s: float) -> None:
        """Ask the command to stop by a signal (None: it was asked otherwise); what is left after so long is killed."""
        self._tell({"stop": number, "within_s": within_s})

    def wait(self, timeout_s: float) -> Ended | None:
        """Wait for the end of the command, at most so long; return None while it runs."""
        said = self._hear(timeout_s)
        if said is None:
            return None
        if not said:
            # Somebody has killed the guard: its session has the command, and what is known of it.
            kill_group(self._guard.pid)
            return Ended(-signal.SIGKILL, 0, False)
        return Ended(said["ended"], said["left"], said["killed"], said["behind"])

    def _tell(self, what: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(what).encode() + b"\n")

    def _hear(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the guard's next line; None if there is none within the time, empty if it has ended without one."""
        assert self._guard.stdout is not None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._guard.stdout], [], [], left)[0]:
                return None
            block = os.read(self._guard.stdout.fileno(), 65536)
            if not block:
                return {}
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told


# --- the guard ---------------------------------------------------------------------------------------------------


def _guard() -> None:
    """Start the command that standard input names, and follow it to its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    _prctl(_SUBREAPER, 1)
    with os.fdopen(0, "rb", buffering=0, closefd=False) as orders:
        asked = json.loads(orders.readline())
    try:
        out = os.open(asked["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if asked["out"] else 2
        child = subprocess.Popen(
            asked["words"],
            cwd=asked["folder"],
            env={**os.environ, **asked["env"]},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=2,
            preexec_fn=_in_the_child,
        )
    except (OSError, ValueError) as error:
        _say({"failed": str(error)})
        return
    _say({"started": child.pid})
    deadline = None
    killed = False
    rest = b""
    while child.poll() is None:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([0, wake], [], [], wait_s)
        if wake in ready:
            os.read(wake, 4096)
            _reap(0, child.pid)
        if 0 in ready:
            block = os.read(0, 65536)
            if not block:
                _kill_all()
                if not _PROC.is_dir():  # descendants are not known here; this process is among the session's
                    kill_group(0)
                return
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                order = json.loads(line)
                deadline = time.monotonic() + order["within_s"]
                if order["stop"] is not None:
                    child.send_signal(order["stop"])
        if deadline is not None and time.monotonic() >= deadline and child.poll() is None:
            killed = True
            _kill_all(but=child.pid)
            child.kill()
    behind = len(_descendants())
    left = _end_rest()
    _say({"ended": child.returncode, "behind": behind, "left": left, "killed": killed})


def _in_the_child() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere what a command leaves behind is known by its process group alone."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _say(what: dict[str, object]) -> None:
    with suppress(OSError):  # nobody may be left to hear it
        os.write(1, json.dumps(what).encode() + b"\n")


def _descendants() -> list[int]:
    """Return the processes below this one; those whose parents have ended are its children."""
    parents: dict[int, list[int]] = {}
    for process in _PROC.iterdir() if _PROC.is_dir() else ():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                parents.setdefault(int(fields[1]), []).append(int(process.name))
    found: list[int] = []
    open_ones = [os.getpid()]
    while open_ones:
        mine = parents.get(open_ones.pop(), [])
        found += mine
        open_ones += mine
    return found


def _end_rest() -> int:
    """Let what the command has left behind end for a moment, kill what does not, and return how many were killed."""
    deadline = time.monotonic() + _LEFT_S
    asked: set[int] = set()  # once each: to many programs a second request means at once
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in set(left) - asked:
            _send(process, signal.SIGTERM)
        asked.update(left)
        _reap(0.05)
    _kill_all()
    return len(left)


def _kill_all(but: int | None = None) -> None:
    """Kill every process below this one, again until there is none: they may start others meanwhile."""
    while left := [process for process in _descendants() if process != but]:
        for process in left:
            _send(process, signal.SIGKILL)
        _reap(0.02, but)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _reap(wait_s: float, but: int | None = None) -> None:
    """Take the ended children off the list, `but` one whose end another call is to see."""
    time.sleep(wait_s)
    for process in _children():
        if process != but:
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def _children() -> list[int]:
    try:
        return [int(word) for word in (_PROC / f"self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


if __name__ == "__main__":
    _guard()
