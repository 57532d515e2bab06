"""Starts sandboxed processes, reads from them, ends them and cleans up, from outside of the sandbox.

The code inside (`inside.py` and its imports) is sent as compiled code in an anonymous file. The sandbox therefore needs
no access to this package's folder, and starts faster.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import marshal
import os
import random
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Literal, Self

from lightning_scalerl.sandbox.inside import READY
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.walls import Walls

_PACKAGE = "lightning_scalerl.sandbox"
# Modules that run inside the sandbox; each comes after those that it imports.
_INSIDE = ("plain", "frames", "jail", "serve", "conduct", "examine", "inside")
_BOOT = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as sent:
    modules, config = marshal.load(sent)
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main(config)
"""

# System paths that are readable inside the sandbox.
_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib",
    "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
    "/etc/localtime", "/nix/store", "/gnu/store",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Start timeout, in seconds. It does not count as the program's time.
_START_S = 60.0
_END_S = 10.0  # seconds to wait for the end of bubblewrap's process
_TICK_S = 0.02  # seconds between checks of the scratch directory
_MAX_ENTRIES = 4096  # maximum number of files and folders in the scratch directory
# Number of threads that the user's other processes may start after they were counted. A correct program must not fail
# because of them.
_SPARE_THREADS = 200
# Limit on the length of a path below the scratch directory, because each check resolves all paths.
_MAX_PATH = 1024
_MEBIBYTE = 1 << 20
_PREFIX = "scalerl-sandbox-"
# Environment variable of a process that starts sandboxes. Its value is part of the names of their scratch folders, so
# that another process can find and delete the folders after it has killed this process.
SCRATCH = "SCALERL_SANDBOX_SCRATCH"
# Range of user numbers for sandboxes: above the numbers that systems and containers use, below the numbers that tools
# read as negative.
_USERS = (1_900_000_000, 2_100_000_000)


# Reason why `run_until` returned: its condition was met, or a limit was reached.
Ending = Literal["done", "timeout", "output_limit", "disk_limit"]


class SandboxError(RuntimeError):
    """Raised when the sandbox itself fails, as opposed to the program in it. The message is one line."""


@dataclass
class Capture:
    """Reader of one pipe of the sandbox, which keeps a limited number of bytes.

    Args:
        pipe: descriptor of the reading end; it is closed when the pipe ends.
        limit: number of bytes to keep.
        ends_at_limit: whether the run ends if more bytes arrive; otherwise they are dropped.

    Attributes:
        content: bytes kept so far.
        overflowed: whether there were more bytes than the limit.
        open: whether the pipe is open.
    """

    pipe: int
    limit: int
    ends_at_limit: bool = True
    content: bytearray = field(default_factory=bytearray)
    overflowed: bool = False
    open: bool = True

    def read(self) -> None:
        """Read available bytes; the caller has checked that there are some."""
        part = os.read(self.pipe, 1 << 16)
        if not part:
            self.close()
        room = self.limit - len(self.content)
        self.content += part[:room]
        self.overflowed |= len(part) > room

    def drain(self) -> None:
        """Read all available bytes without waiting."""
        while self.open and not self.overflowed and select.select([self.pipe], [], [], 0)[0]:
            self.read()

    def close(self) -> None:
        """Close the pipe; a second call does nothing."""
        if self.open:
            self.open = False
            os.close(self.pipe)

    @property
    def text(self) -> str:
        """Captured bytes as text; invalid UTF-8 is replaced."""
        return self.content.decode("utf-8", "replace")


class Sandboxed:
    """Sandboxed process and its scratch directory; the context manager removes both at its end.

    Args:
        walls: isolation of the process.
        limits: limits on its resources.
        role: configuration for `inside.main`, as plain data that `marshal` can write.
        pipes: descriptors that it inherits with the same numbers.
        stdin: descriptor of its standard input; None for empty input.
        stdout: descriptor of its standard output; None to discard it.
        stderr: descriptor of its standard error; None to join it with standard output. Output before the process is
            ready becomes part of an error message instead.

    Attributes:
        ready: whether the process has confined itself, so that its code runs.
        returncode: exit code, or minus the number of the signal that ended the process; None until `wait` has seen it.
        ended: pidfd of the process, readable when it has ended; None if the system has none.
        status: descriptor of the socket on which the process reports that it is ready.

    Raises:
        SandboxError: the process cannot be started.
    """

    def __init__(
        self,
        walls: Walls,
        limits: Limits,
        role: Mapping[str, Any],
        pipes: Sequence[int] = (),
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._walls, self._limits = walls, limits
        self.ready = False
        self.returncode: int | None = None
        self.ended: int | None = None
        self._user = _new_user() if walls.own_user else None
        self._status = bytearray()  # bytes from the status socket until the process is ready
        self._bounded: int | None = None  # descriptor of the scratch file system, if it is a bounded one
        self._closing = contextlib.ExitStack()
        try:
            self._scratch = _new_scratch(self._user)
            self._closing.callback(_remove, self._scratch)
            self._start(role, pipes, stdin, stdout, stderr)
        except OSError as error:
            self._closing.close()
            raise SandboxError(f"the sandbox does not start: {error}") from None
        except BaseException:
            self._closing.close()
            raise

    def _start(
        self,
        role: Mapping[str, Any],
        pipes: Sequence[int],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
    ) -> None:
        """Start the process, with code and configuration in an anonymous file and a socket for its status."""
        self._status_socket, child_socket = socket.socketpair()
        self._closing.callback(self._status_socket.close)
        self.status, status_in = self._status_socket.fileno(), child_socket.detach()
        self._info, info_in = os.pipe()
        self._closing.callback(os.close, self._info)
        with os.fdopen(status_in, "wb"), os.fdopen(info_in, "wb"):
            jail = {
                "scratch": self._scratch,
                "readable": _readable_paths(),
                "devices": list(_DEVICES),
                "limits": {
                    "cpu_s": self._limits.cpu_s,
                    "memory_mib": self._limits.memory_mib,
                    "file_mib": self._limits.file_mib,
                    "processes": self._limits.processes + (0 if self._walls.own_user else _threads_of_others()),
                },
                "user": self._user,
                "keeps_read": self._walls.own_user and not self._walls.bubblewrap and not _readable_by_all(),
                "landlock": self._walls.landlock,
                "seccomp": self._walls.seccomp,
                # In bubblewrap's PID namespace, the parent is the first process (`jail.watch_over_a_child`).
                "parent": 1 if self._walls.bubblewrap else os.getpid(),
                # Slightly above the quota, so that `over_quota` can see an excess.
                "bounded": (self._quota_bytes + _MEBIBYTE, _MAX_ENTRIES + 64) if self._walls.bounded else None,
                "own_mounts": bool(self._walls.bubblewrap),
            }
            passed = [*pipes] if stderr is None else [*pipes, stderr]
            config = {"jail": jail, "status": status_in, "sys_path": _sys_path(), "pipes": list(pipes), **role}
            config |= {"stderr": stderr, "watched": bool(self._walls.bubblewrap)}
            payload = anonymous_file(marshal.dumps((_modules(), config)))
            # A cluster sends these signals to all processes of a job as a warning. The new process inherits that they
            # are blocked, so they cannot end it before it has set up its signals (`inside.py`).
            earlier = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2, signal.SIGTERM))
            try:
                python = [_python(), "-s", "-S", "-P", "-B", "-c", _BOOT, str(payload)]
                command = (
                    _bubblewrap(self._walls, self._scratch, info_in) + python if self._walls.bubblewrap else python
                )
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=subprocess.DEVNULL if stdout is None else stdout,
                    # Messages of bubblewrap or Python before the start explain why the start failed.
                    stderr=status_in,
                    pass_fds=(payload, status_in, info_in, *passed),
                    env=_environment(self._scratch),
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
                os.close(payload)
        # pidfd_open is missing before Linux 5.3, and in a Python that was built on such a kernel. Without it, the
        # process is polled at each tick.
        with contextlib.suppress(OSError, AttributeError):
            self.ended = os.pidfd_open(self._process.pid)
            self._closing.callback(os.close, self.ended)
        self._closing.callback(self._kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill all processes of the sandbox, wait for their end, and delete its files. A second call does nothing."""
        self._closing.close()

    def read_status(self) -> None:
        """Read available bytes from the status socket.

        Do not call it after the process is ready, because the untrusted code could write there too.

        Raises:
            SandboxError: the process ended before it was ready.
        """
        part, sent, _, _ = socket.recv_fds(self._status_socket, 1 << 12, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in sent:
            self._bounded = descriptor
            self._closing.callback(os.close, descriptor)
        self._status += part
        self.ready = READY in self._status
        if not self.ready and (not part or len(self._status) > 1 << 16):
            message = " ".join(self._status.decode("utf-8", "replace").split())
            raise SandboxError(f"the sandbox does not start: {message[-300:] or 'it says nothing'}")

    def over_quota(self) -> bool:
        """Return whether the scratch directory is too large, has too many entries or, on disk, is nested too deep."""
        if self._bounded is None:
            return _exceeds_quota(self._scratch, self._quota_bytes)
        usage = os.fstatvfs(self._bounded)  # this includes unnamed files
        used_bytes, entries = (usage.f_blocks - usage.f_bfree) * usage.f_frsize, usage.f_files - usage.f_ffree
        return used_bytes > self._quota_bytes or entries > _MAX_ENTRIES

    @property
    def _quota_bytes(self) -> int:
        return (self._limits.file_mib + 1) * _MEBIBYTE

    def wait(self, options: int = 0) -> int | None:
        """Wait for the end of the process; return its exit code, or minus the number of the signal that ended it.

        With `os.WNOHANG` as `options`, do not wait, and return None while the process runs.
        """
        if self.returncode is not None:
            return self.returncode
        try:
            waited, status = os.waitpid(self._process.pid, options)
        except ChildProcessError:  # other code in this process has waited for all children
            waited, status = self._process.pid, signal.SIGKILL
        if waited:
            self.returncode = os.waitstatus_to_exitcode(status)
            self._process.returncode = self.returncode
            # bubblewrap reports a signal that ended the inner process as a shell does: 128 + the signal's number.
            if self._walls.bubblewrap and 128 < self.returncode <= 128 + signal.SIGRTMAX:
                self.returncode = 128 - self.returncode
        return self.returncode

    def _kill(self) -> None:
        """Kill the process and its children, and wait until none is left, not even as a zombie."""
        deadline = time.monotonic() + _END_S
        if self._walls.bubblewrap and (inner := self._inner_pid()) is not None:
            # Killing bubblewrap itself would orphan the processes that it has started.
            while self.wait(os.WNOHANG) is None and time.monotonic() < deadline:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(inner, signal.SIGKILL)
                select.select([] if self.ended is None else [self.ended], [], [], _TICK_S)
        # Kill only a process that was not waited for yet: afterwards the kernel may give its pid to another process.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait()
        if self._user is not None and not self._walls.isolated:
            _kill_processes_of(self._user)

    def _inner_pid(self) -> int | None:
        """Return the pid of the process inside bubblewrap, or None if it is not known yet."""
        if not select.select([self._info], [], [], 0)[0]:
            return None
        match = re.search(rb'"child-pid":\s*(\d+)', os.read(self._info, 1 << 12))
        return int(match[1]) if match else None


def run_until(
    children: Sequence[Sandboxed], captures: Sequence[Capture], wall_s: float, is_done: Callable[[], bool]
) -> tuple[Ending, float]:
    """Read from sandboxed processes until `is_done` returns True or a limit is reached.

    Args:
        children: the processes; time counts from the moment when all of them are ready.
        captures: pipes to read meanwhile.
        wall_s: limit in wall-clock seconds.
        is_done: returns whether to stop; called after each round of reading.

    Returns:
        The reason, "done" or the limit that was reached, and the wall-clock seconds since all processes were ready.

    Raises:
        SandboxError: a process did not become ready.
    """
    start = time.monotonic()
    ready_at: float | None = None
    last_check = start
    while True:
        now = time.monotonic()
        if ready_at is None and all(child.ready for child in children):
            ready_at = last_check = now
        if ready_at is None and now - start > _START_S:
            raise SandboxError(f"the sandbox does not start: not within {_START_S:g} s")
        if ready_at is not None and now - ready_at >= wall_s:
            return "timeout", now - ready_at
        _listen(children, captures, _TICK_S)
        for child in children:
            # The process has ended, perhaps after it reported that it was ready: read what is left of its status. This
            # raises an error if the process never was ready.
            while child.returncode is not None and not child.ready:
                child.read_status()
        now = time.monotonic()
        elapsed_s = now - (ready_at if ready_at is not None else now)
        if any(capture.overflowed and capture.ends_at_limit for capture in captures):
            return "output_limit", elapsed_s
        if is_done():
            return ("disk_limit" if any(child.over_quota() for child in children) else "done"), elapsed_s
        if now - last_check >= _TICK_S:
            last_check = now
            if any(child.over_quota() for child in children):
                return "disk_limit", elapsed_s


def _listen(children: Sequence[Sandboxed], captures: Sequence[Capture], timeout_s: float) -> None:
    """Read from captures and status sockets, waiting at most `timeout_s` seconds, and reap children that have ended."""
    poller = select.poll()
    readers: dict[int, Callable[[], None]] = {c.pipe: c.read for c in captures if c.open}
    readers |= {child.status: child.read_status for child in children if not child.ready}
    for pipe in readers:
        poller.register(pipe, select.POLLIN)
    for child in children:
        if child.returncode is None and child.ended is not None:
            poller.register(child.ended, select.POLLIN)
    for pipe, _ in poller.poll(timeout_s * 1000):
        if pipe in readers:
            readers[pipe]()
    for child in children:
        child.wait(os.WNOHANG)


def anonymous_file(content: bytes) -> int:
    """Return a descriptor of an unnamed, immutable file with this content; the caller closes it."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@cache
def _modules() -> list[tuple[str, CodeType]]:
    modules = []
    for name in (f"{_PACKAGE}.{module}" for module in _INSIDE):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        code: CodeType = spec.loader.get_code(name)  # type: ignore[attr-defined]
        modules.append((name, code))
    return modules


@cache
def _python() -> str:
    """Return the path of the real interpreter, with a virtual environment's link resolved."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _sys_path() -> list[str]:
    """Return the folders of installed packages, without folders from `.pth` files, such as editable installs."""
    folders = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]
    # Resolve links, because only the real folders are visible inside.
    return [os.path.realpath(p) for p in folders]


@cache
def _readable_paths() -> list[str]:
    """Return the paths of libraries and Python, which are readable in the sandbox besides the scratch directory."""
    libraries = [str(Path(sys.base_prefix) / name) for name in ("lib", "lib64")]
    libraries.append(str(sysconfig.get_config_var("LIBDIR") or ""))
    libraries.append(str(Path(os.__file__).parent))
    paths = [*_SYSTEM, _python(), *(os.path.realpath(p) for p in [*libraries, *_sys_path()] if p)]
    return [p for p in dict.fromkeys(paths) if Path(p).exists() and p != "/"]


@cache
def _readable_by_all() -> bool:
    """Return whether every user of this machine can read all of `_readable_paths`, and so start this Python."""
    for path in (Path(p) for p in _readable_paths()):
        for folder in path.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return False
        if not path.stat().st_mode & stat.S_IROTH:
            return False
    return True


def _environment(scratch: str) -> dict[str, str]:
    """Return the environment of a sandboxed process. It inherits no variable of the parent."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        environment["LD_LIBRARY_PATH"] = f"{sysconfig.get_config_var('LIBDIR')}:{Path(sys.base_prefix) / 'lib'}"
    return environment


def _bubblewrap(walls: Walls, scratch: str, info: int) -> list[str]:
    """Return bubblewrap's part of the command line, with options that its early versions support too.

    Python is the first process in the PID namespace, so it can watch and reap the program (`inside.py`). If bubblewrap
    were the first, its own zombie would be left to the machine's init, which in a container often never reaps it.
    """
    command = [walls.bubblewrap]
    if walls.user_namespace:
        command += ["--unshare-all", "--cap-drop", "ALL"]
    else:
        # Unshare all namespaces except the user namespace: inside one with a single user, root could not switch to
        # another user.
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if walls.bounded:
        command += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount the scratch directory; `jail.py` drops it again
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(info)]
    created: set[str] = set()
    for path in _topmost(_readable_paths()):
        # Create parent folders explicitly: bubblewrap would give them their original modes, and the new user cannot
        # enter folders that are open to root alone.
        for folder in [str(p) for p in reversed(Path(path).parents)][1:]:
            if folder not in created:
                created.add(folder)
                command += ["--dir", folder]
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
        else:
            command += ["--ro-bind", path, path]
    for folder in [str(p) for p in reversed(Path(scratch).parents)][1:]:
        command += [] if folder in created else ["--dir", folder]
    command += ["--dir", "/dev"]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    # The root is a writable file system in memory without a size limit, so remount it read-only.
    return [*command, "--bind", scratch, scratch, "--remount-ro", "/", "--chdir", "/", "--"]


def _topmost(paths: Sequence[str]) -> list[str]:
    """Return the paths that are not below another path of the list."""
    return [p for p in paths if not any(str(parent) in paths for parent in Path(p).parents)]


def remove_leftovers(name: str) -> None:
    """Delete the scratch folders of a killed process; `name` was the value of its environment variable `SCRATCH`."""
    for folder in _temporary_folders():
        for scratch in Path(folder).glob(f"{_PREFIX}{name}-*"):
            _remove(str(scratch))


def _temporary_folders() -> list[str]:
    return list(dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]))


def _new_scratch(user: int | None) -> str:
    """Create a scratch directory and return its path. If `user` is given, it owns the directory and can enter it."""
    candidates = _temporary_folders()
    folder = next((c for c in candidates if user is None or _enterable_by_all(c)), candidates[0])
    scratch = os.path.realpath(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.environ.get(SCRATCH, '')}-", dir=folder))
    try:
        if user is not None:
            os.chown(scratch, user, user)
    except OSError:
        _remove(scratch)
        raise
    return scratch


def _enterable_by_all(folder: str) -> bool:
    path = Path(os.path.realpath(folder))
    return path.is_dir() and all(p.stat().st_mode & stat.S_IXOTH for p in (path, *path.parents))


def user_range() -> tuple[int, int] | None:
    """Return a range of unused user numbers, or None if root cannot switch to any.

    In a container only some numbers exist; the range is then the last quarter of the longest sequence of them.
    """
    rows = []
    for name in ("uid_map", "gid_map"):
        try:
            lines = Path("/proc/self", name).read_text().splitlines()
        except OSError:
            return None
        first, length = max(((int(f), int(n)) for f, _, n in (line.split() for line in lines)), key=lambda row: row[1])
        if length < 256:
            return None
        rows.append(_USERS if first + length > _USERS[1] else (first + length - length // 4, first + length - 2))
    low, high = max(row[0] for row in rows), min(row[1] for row in rows)
    return (low, high) if low < high else None


def _new_user() -> int:
    numbers = user_range()
    if numbers is None:
        raise SandboxError("the sandbox does not start: there are no user numbers to spare")
    # The global generator is not used, because its state belongs to a training run.
    return random.SystemRandom().randrange(*numbers)


def _threads_of_others() -> int:
    """Return how many threads to allow for the user's other processes, which count towards a sandbox's limit too."""
    return _count_threads(os.geteuid(), int(time.monotonic())) + _SPARE_THREADS


@lru_cache(maxsize=1)
def _count_threads(user: int, second: int) -> int:
    """Count the threads of a user on this machine; the cache key `second` limits counting to once per second."""
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if process.stat().st_uid == user:
                    total += sum(1 for _ in (process / "task").iterdir())
    return total


def _kill_processes_of(user: int) -> None:
    """Kill all processes of a sandbox's own user, because without a PID namespace nothing else kills them."""
    for _ in itertools.repeat(None, 100):
        killed = False
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    lines = (process / "status").read_text().splitlines()
                    uid = next(line for line in lines if line.startswith("Uid:")).split()[1]
                    state = next(line for line in lines if line.startswith("State:")).split()[1]
                    if int(uid) == user and state != "Z":
                        os.kill(int(process.name), signal.SIGKILL)
                        killed = True
        if not killed:
            return


def _walk(folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield every entry of a folder and of its subfolders, at any depth and in any order, without following links."""
    # A list of pending folders, not recursion, because a program may nest folders deeper than Python's stack.
    pending = [folder]
    while pending:
        with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry, entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)


def _exceeds_quota(folder: str, limit: int) -> bool:
    """Return whether a folder has more than `limit` bytes, too many entries, or too deep nesting."""
    total = 0
    try:
        for count, (entry, entry_stat) in enumerate(_walk(folder), start=1):
            total += entry_stat.st_blocks * 512
            too_deep = len(entry.path) > len(folder) + _MAX_PATH
            if total > limit or count > _MAX_ENTRIES or too_deep:
                return True
    except OSError:  # nested deeper than the longest possible path
        return True
    return False


def _remove(scratch: str) -> None:
    """Delete a folder, whatever its depth, names and permissions.

    Nested folders are moved up before they are emptied, so that neither recursion nor the length of paths matters.
    """
    try:
        top = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        numbers = itertools.count()
        # Stop after a round without success: what is left cannot be deleted, not even by its owner.
        while any([_flatten(top, name, numbers) for name in _names(top)]):
            pass
    finally:
        os.close(top)
    shutil.rmtree(scratch, ignore_errors=True)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _flatten(top: int, name: str, numbers: Iterator[int]) -> bool:
    """Remove one entry of the folder `top`, moving nested folders up into `top`; returns whether that worked."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=top)
            return True
        os.chmod(name, 0o700, dir_fd=top)
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        try:
            for inner in _names(folder):
                if stat.S_ISDIR(os.stat(inner, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.chmod(inner, 0o700, dir_fd=folder)
                    os.rename(inner, f".moved-{next(numbers)}", src_dir_fd=folder, dst_dir_fd=top)
                else:
                    os.unlink(inner, dir_fd=folder)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=top)
    except OSError:
        return False
    return True
