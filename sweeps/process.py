"""Start, observe, stop and kill child processes. They end when their parent ends.

`Tree` runs a command, and with it all processes that the command starts. Their parent is a guard process. It runs this
file as a script without site packages, and therefore starts in 30 ms. It reads one JSON object per line from standard
input. When standard input ends, the process that uses `Tree` has ended, and the guard kills everything at once.

    in   {"words": [...], "env": {...}, "folder": "...", "out": "path or null", "stops_by": 15}
                                            out null: our standard error; stops_by: signal of a later "stop", or null
    in   {"stop": 15, "within_s": 60}          send the signal (null: none), and kill everything after this time
    out  {"started": 4711} or {"failed": "..."}
    out  {"ended": 0, "behind": 3, "left": 2, "killed": false}     exit code, or minus the signal's number; number of
                                            processes that outlived the command, and of those that had to be killed
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext
    from multiprocessing.process import BaseProcess

# Signals by which a cluster warns of a time limit or a preemption. They go to every process of a job's step, but only
# the run's own process acts on them.
WARNINGS = (signal.SIGUSR2, signal.SIGTERM)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Environment variables that keep a worker from using several cores.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # options of prctl
_PROC = Path("/proc")
_GRACE_S = 2.0  # after a command has ended, seconds for its other processes to end by themselves


def ended_with(code: int) -> str:
    """Describe an exit code: "exit code 1", or "killed by SIGKILL" if it is minus the number of a signal."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def end(process: BaseProcess, *signals: tuple[float, signal.Signals]) -> None:
    """Wait for a child process to end. Each of `signals` is a timeout in seconds and the signal to send after it."""
    for timeout_s, number in signals:
        process.join(timeout_s)
        if process.exitcode is None and process.pid is not None:
            _send(process.pid, number)
    process.join()


@contextmanager
def block_signals(*signals: signal.Signals) -> Iterator[None]:
    """Block signals (default: `WARNINGS`) in processes that this thread starts in a `with` block.

    A new process inherits the blocking, so no signal reaches it before it can ignore signals itself.
    """
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, signals or WARNINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def die_with_parent(started_by: int | None = None) -> None:
    """End this process as soon as its parent is gone.

    Args:
        started_by: id of the parent, of which one thread has started this process: Linux then kills this process even
            if it hangs. None for a child of `multiprocessing`, whose parent may be a server: then a thread watches the
            process that requested it.
    """
    if started_by is not None:
        _prctl(_DEATH_SIGNAL, signal.SIGKILL)
        # If the parent ended before prctl was called, no signal arrives.
        if os.getppid() != started_by:
            os._exit(1)
        return
    from multiprocessing import connection, parent_process

    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        # Not sys.exit, which would end only this thread.
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def forkserver(preload: Sequence[str]) -> ForkServerContext:
    """Return the context of processes that are forked from one server, which imports `preload` before the first fork.

    Planner and members of a study use the same server, because importing Lightning alone takes a dozen seconds of CPU.
    """
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # Libraries read these variables on import. One thread is enough for the server, which computes nothing. Each member
    # sets its own number of threads.
    for name in THREADS:
        os.environ[name] = "1"
    return context


def start_worker(
    module: str, content: bytes, memory_gib: float | None, env: Mapping[str, str], stderr: int | None = None
) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Start `python -m module` in a new session. The module must call `begin_worker` first.

    Args:
        module: name of one of our modules.
        content: bytes that `begin_worker` returns, such as a pickled object.
        memory_gib: limit of the process's data segment in GiB; None for no limit.
        env: environment variables that are added to this process's own.
        stderr: file descriptor for standard output and standard error; None for those of this process.

    Returns:
        The process, and our end of a pipe to it. The process is killed when the thread that started it ends.
    """
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    # A file in memory, because a write to a pipe would block until the new process reads.
    with os.fdopen(os.memfd_create("worker"), "w+b") as memory_file, block_signals():
        memory_file.write(pickle.dumps((list(sys.path), memory_gib, content)))
        memory_file.flush()
        memory_file.seek(0)
        descriptors = [theirs.fileno(), memory_file.fileno()]
        # In a session of its own, the process can be killed together with its children, and gets no Ctrl-C.
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(descriptors[0]), str(os.getpid()), str(descriptors[1])],
            pass_fds=descriptors, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
            env={**os.environ, **_ONE_THREAD, **env},
        )  # fmt: skip
    # Close the child's end here, so that the death of the child shows as end of file. Otherwise only a timeout would
    # show it.
    theirs.close()
    return process, ours


def begin_worker() -> tuple[Connection[Any, Any], bytes]:
    """Begin a process of `start_worker`: set its limits and module path. Return its end of the pipe, and `content`."""
    import resource
    from multiprocessing.connection import Connection

    # If its parent ends, the kernel kills this process: a worker that hangs would not notice the end of the pipe.
    die_with_parent(int(sys.argv[2]))
    # The cluster's warnings must not end this process, because the run needs it to save. Processes that it starts
    # ignore SIGUSR2 as well. SIGTERM ends them, because graders and environments use it to end their own processes.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    os.dup2(2, 1)  # prints must go to stderr, not into the run's output
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with os.fdopen(int(sys.argv[3]), "rb") as memory_file:
        path, memory_gib, content = pickle.load(memory_file)
    # The parent's path, so that the user's modules are found here too.
    sys.path[:] = path
    if memory_gib is not None:
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return connection, content


def last_log_line(log: Path) -> str:
    """Return the last line of a process's log, at most 300 characters; "" if there is none."""
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else ""
    return ""


def kill_group(leader: int) -> None:
    """Kill all processes of a group, if there are any."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """End of a command.

    Attributes:
        code: exit code, or minus the number of the signal that killed it.
        killed_survivors: number of processes that outlived the command and had to be killed.
        killed: whether the command itself was killed, because it did not end when asked to stop.
        survivors: number of processes that outlived the command.
    """

    code: int
    killed_survivors: int
    killed: bool
    survivors: int = field(default=0, compare=False)

    @property
    def how(self) -> str:
        """Description of the end, such as "exit code 1"."""
        return ended_with(self.code)


def locked(path: Path) -> int | None:
    """Lock a file, and return its descriptor; None if the file system has no locks.

    Waits until all processes that hold an earlier lock on the file have ended.
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

    A context manager. When it exits, or when this process dies in any way, all these processes are killed.

    Args:
        words, env, folder: command line, environment variables and working directory.
        out: file to which standard output is appended; None for this process's standard error, where the command's
            standard error goes as well.
        lock: descriptor of a lock that is held until all the processes have ended, even if this process dies.
        stops_by: signal that asks the command to stop. If it is not SIGUSR2, the command ignores SIGUSR2 unless it sets
            a handler of its own.

    Raises:
        ChildProcessError: the command cannot be started.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        out: Path | None = None,
        lock: int | None = None,
        stops_by: signal.Signals | None = signal.SIGTERM,
    ) -> None:
        with block_signals():
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )
        self._rest = b""
        text = {"folder": str(folder), "out": None if out is None else str(out)}
        self._send_order({"words": list(words), "env": dict(env), **text, "stops_by": stops_by})
        reply = self._read_reply(None) or {"failed": "the process that starts it has ended"}
        if "failed" in reply:
            self._guard.wait()
            raise ChildProcessError(f"{words[0]!r} cannot be started in {folder}: {reply['failed']}")
        self.pid: int = reply["started"]

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in (self._guard.stdin, self._guard.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._guard.wait()

    def stop(self, number: signal.Signals | None, within_s: float) -> None:
        """Send a signal to stop (None: the command was asked in another way); kill its processes after `within_s`."""
        self._send_order({"stop": number, "within_s": within_s})

    def wait(self, timeout_s: float) -> Ended | None:
        """Wait up to `timeout_s` for the end of the command; return None while it runs."""
        reply = self._read_reply(timeout_s)
        if reply is None:
            return None
        if not reply:
            # The guard was killed from outside, so nothing is known of the command. It runs in the guard's session:
            # kill that.
            kill_group(self._guard.pid)
            return Ended(-signal.SIGKILL, 0, False)
        return Ended(reply["ended"], reply["left"], reply["killed"], reply["behind"])

    def _send_order(self, what: Mapping[str, Any]) -> None:
        assert self._guard.stdin is not None
        with suppress(BrokenPipeError):
            self._guard.stdin.write(json.dumps(what).encode() + b"\n")

    def _read_reply(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the guard's next line; None if there is none in time, and {} if the guard has ended."""
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
        message: dict[str, Any] = json.loads(line)
        return message


# --- the guard ---------------------------------------------------------------------------------------------------


def _guard() -> None:
    """Run the guard: start the command that is given on standard input, and follow it to its end."""
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
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
            preexec_fn=lambda: _reset_signals(asked["stops_by"]),
        )
    except (OSError, ValueError) as error:
        _write_reply({"failed": str(error)})
        return
    _write_reply({"started": child.pid})
    deadline = None
    killed = False
    rest = b""
    while child.poll() is None:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([0, wake_reader], [], [], wait_s)
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            _reap(0, child.pid)
        if 0 in ready:
            block = os.read(0, 65536)
            if not block:
                _kill_all()
                # Without /proc the processes of the command are unknown: kill the whole session, this process included.
                if not _PROC.is_dir():
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
    left = _end_survivors()
    _write_reply({"ended": child.returncode, "behind": behind, "left": left, "killed": killed})


def _reset_signals(stops_by: int | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if stops_by == signal.SIGUSR2:  # otherwise it stays ignored: the member passes on the warning in its own way
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux. Elsewhere do nothing; what a command leaves behind is then found only by its group."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _write_reply(what: dict[str, object]) -> None:
    with suppress(OSError):  # the reader may be gone
        os.write(1, json.dumps(what).encode() + b"\n")


def _descendants() -> list[int]:
    """Return all processes below this one. They include orphans, which became its children (subreaper)."""
    parents: dict[int, list[int]] = {}
    for process in _PROC.iterdir() if _PROC.is_dir() else ():
        if process.name.isdigit():
            try:
                # After the name in parentheses come state, parent, ... Zombies (Z) and dead processes (X) do not count.
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


def _end_survivors() -> int:
    """Give processes that outlive the command some time to end, kill the rest, and return how many were killed."""
    deadline = time.monotonic() + _GRACE_S
    asked: set[int] = set()  # one signal for each, because many programs take a second one as a request to end at once
    while (left := _descendants()) and time.monotonic() < deadline:
        for process in set(left) - asked:
            _send(process, signal.SIGTERM)
        asked.update(left)
        _reap(0.05)
    _kill_all()
    return len(left)


def _kill_all(but: int | None = None) -> None:
    """Kill all processes below this one, repeatedly, because they may start others until they are dead."""
    while left := [process for process in _descendants() if process != but]:
        for process in left:
            _send(process, signal.SIGKILL)
        _reap(0.02, but)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _reap(wait_s: float, but: int | None = None) -> None:
    """Wait `wait_s` seconds, then reap children that have ended, except `but`, which the caller polls itself."""
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
