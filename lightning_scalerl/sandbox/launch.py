"""Sandboxed processes from the outside: starting, reading, ending and cleaning up.

What runs inside (`inside.py` and what it imports) is sent along as compiled code in an anonymous file, so that the
sandbox needs nothing of this package's folder, and starting costs no reading of modules.
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
from typing import Any, Self

from lightning_scalerl.sandbox.inside import READY
from lightning_scalerl.sandbox.limits import Limits
from lightning_scalerl.sandbox.walls import Walls

_ROOM = "lightning_scalerl.sandbox"
# In the order in which they import each other.
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

_SYSTEM = (
    "/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib",
    "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
    "/etc/localtime", "/nix/store", "/gnu/store",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# Starting is not the program's time; a machine that takes longer is in trouble.
_START_S = 60.0
_END_S = 10.0
_TICK_S = 0.02
_MOST_ENTRIES = 4096
# A user's other processes start threads between the count and a program's own; one that gets none would fail unjustly.
_STARTED_MEANWHILE = 200
# Each look resolves every path anew.
_LONGEST_PATH = 1024
_MEBIBYTE = 1 << 20
_PREFIX = "scalerl-sandbox-"
# A variable of the process that starts sandboxes: stands in the names of their folders, so that whoever kills it can
# find them.
SCRATCH = "SCALERL_SANDBOX_SCRATCH"
# Above the users of systems and of containers, below what tools take for negative.
_USERS = (1_900_000_000, 2_100_000_000)


class SandboxError(RuntimeError):
    """Raised when the sandbox itself failed, not the program that was to run in it. One line."""


@dataclass
class Capture:
    """Reader of one pipe of the sandbox, with a limit on the bytes that it keeps.

    Args:
        pipe: descriptor of the reading end; closed when the pipe ends.
        limit: number of bytes that are kept.
        ends_at_limit: whether more bytes end the run; else they are dropped.
    """

    pipe: int
    limit: int
    ends_at_limit: bool = True
    taken: bytearray = field(default_factory=bytearray)
    full: bool = False
    open: bool = True

    def read(self) -> None:
        """Read what is there; the caller has checked that there is something."""
        part = os.read(self.pipe, 1 << 16)
        if not part:
            self.close()
        room = self.limit - len(self.taken)
        self.taken += part[:room]
        self.full |= len(part) > room

    def drain(self) -> None:
        """Read everything that is there now, without waiting."""
        while self.open and not self.full and select.select([self.pipe], [], [], 0)[0]:
            self.read()

    def close(self) -> None:
        """Close the pipe; a second call does nothing."""
        if self.open:
            self.open = False
            os.close(self.pipe)

    @property
    def text(self) -> str:
        """Captured bytes as text; invalid UTF-8 is replaced."""
        return self.taken.decode("utf-8", "replace")


class Sandboxed:
    """One sandboxed process and its scratch directory; both are gone when the context ends.

    Args:
        walls: walls around the process.
        limits: limits on what it takes of this machine.
        role: configuration for `inside.main`: plain data that `marshal` can write.
        pipes: descriptors that it inherits, under the same numbers.
        stdin: descriptor of its standard input; None for an empty one.
        stdout: descriptor of its standard output; None to discard it.
        stderr: descriptor of its standard error; None for standard output's. What comes before the start goes into the
            error message instead.

    Raises:
        SandboxError: it cannot be started.
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
        self._said = bytearray()
        self._bounded: int | None = None
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
        """Start the process, with its code and configuration in an anonymous file and its status on a socket."""
        self._line, theirs = socket.socketpair()
        self._closing.callback(self._line.close)
        self.status, status_in = self._line.fileno(), theirs.detach()
        self._about, about_in = os.pipe()
        self._closing.callback(os.close, self._about)
        with os.fdopen(status_in, "wb"), os.fdopen(about_in, "wb"):
            jail = {
                "scratch": self._scratch,
                "readable": _readable(),
                "devices": list(_DEVICES),
                "limits": {
                    "cpu_s": self._limits.cpu_s,
                    "memory_mib": self._limits.memory_mib,
                    "file_mib": self._limits.file_mib,
                    "processes": self._limits.processes + (0 if self._walls.own_user else _threads_of_others()),
                },
                "user": self._user,
                "keeps_read": self._walls.own_user and not self._walls.bubblewrap and not _open_to_all(),
                "landlock": self._walls.landlock,
                "seccomp": self._walls.seccomp,
                # In a namespace of its own there is the one that watches over it, the first.
                "parent": 1 if self._walls.bubblewrap else os.getpid(),
                # A little more than is looked for, so that a look sees what was too much.
                "bounded": (self._most_bytes + _MEBIBYTE, _MOST_ENTRIES + 64) if self._walls.bounded else None,
                "own_mounts": bool(self._walls.bubblewrap),
            }
            passed = [*pipes] if stderr is None else [*pipes, stderr]
            config = {"jail": jail, "status": status_in, "sys_path": _sys_path(), "pipes": list(pipes), **role}
            config |= {"stderr": stderr, "watched": bool(self._walls.bubblewrap)}
            payload = anonymous(marshal.dumps((_modules(), config)))
            try:
                python = [_python(), "-s", "-S", "-P", "-B", "-c", _BOOT, str(payload)]
                command = (
                    _bubblewrap(self._walls, self._scratch, about_in) + python if self._walls.bubblewrap else python
                )
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=subprocess.DEVNULL if stdout is None else stdout,
                    # What bubblewrap or Python say before the start is why there is none.
                    stderr=status_in,
                    pass_fds=(payload, status_in, about_in, *passed),
                    env=_environment(self._scratch),
                    cwd="/",
                    start_new_session=True,
                )
            finally:
                os.close(payload)
        # Linux before 5.3 has none, nor has Python that was built there: then each tick asks.
        with contextlib.suppress(OSError, AttributeError):
            self.ended = os.pidfd_open(self._process.pid)
            self._closing.callback(os.close, self.ended)
        self._closing.callback(self._kill)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill all its processes and delete its files; return when nothing is left. A second call does nothing."""
        self._closing.close()

    def hear(self) -> None:
        """Read from the status line, which has something; never once it is ready: foreign code could write there, too.

        Raises:
            SandboxError: it has ended without ever being ready.
        """
        part, sent, _, _ = socket.recv_fds(self._line, 1 << 12, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in sent:
            self._bounded = descriptor
            self._closing.callback(os.close, descriptor)
        self._said += part
        self.ready = READY in self._said
        if not self.ready and (not part or len(self._said) > 1 << 16):
            words = " ".join(self._said.decode("utf-8", "replace").split())
            raise SandboxError(f"the sandbox does not start: {words[-300:] or 'it says nothing'}")

    def over_quota(self) -> bool:
        """Return whether the scratch directory holds too much or, on a disk, is nested too deep."""
        if self._bounded is None:
            return _holds_more(self._scratch, self._most_bytes)
        about = os.fstatvfs(self._bounded)  # Files without a name are among it.
        used, entries = (about.f_blocks - about.f_bfree) * about.f_frsize, about.f_files - about.f_ffree
        return used > self._most_bytes or entries > _MOST_ENTRIES

    @property
    def _most_bytes(self) -> int:
        return (self._limits.file_mib + 1) * _MEBIBYTE

    def wait(self, options: int = 0) -> int | None:
        """Return its exit code, or minus the signal that ended it; None with `os.WNOHANG` while it runs."""
        if self.returncode is not None:
            return self.returncode
        try:
            waited, status = os.waitpid(self._process.pid, options)
        except ChildProcessError:  # Somebody else in this process waits for children, too.
            waited, status = self._process.pid, signal.SIGKILL
        if waited:
            self.returncode = os.waitstatus_to_exitcode(status)
            self._process.returncode = self.returncode
            # bubblewrap reports a signal inside as a shell does, 128 + its number.
            if self._walls.bubblewrap and 128 < self.returncode <= 128 + signal.SIGRTMAX:
                self.returncode = 128 - self.returncode
        return self.returncode

    def _kill(self) -> None:
        """Kill the process; return when nothing of it is left, not even a zombie for the machine's init."""
        until = time.monotonic() + _END_S
        if self._walls.bubblewrap and (inner := self._inside()) is not None:
            # Killing bubblewrap itself would orphan what it has started.
            while self.wait(os.WNOHANG) is None and time.monotonic() < until:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(inner, signal.SIGKILL)
                select.select([] if self.ended is None else [self.ended], [], [], _TICK_S)
        # Only before it was waited for: afterwards the kernel may give its pid to another process.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.wait()
        if self._user is not None and not self._walls.isolated:
            _sweep(self._user)

    def _inside(self) -> int | None:
        """Return the number of the process inside bubblewrap; None if it is not known yet."""
        if not select.select([self._about], [], [], 0)[0]:
            return None
        found = re.search(rb'"child-pid":\s*(\d+)', os.read(self._about, 1 << 12))
        return int(found[1]) if found else None


def attend(
    children: Sequence[Sandboxed], captures: Sequence[Capture], wall_s: float, done: Callable[[], bool]
) -> tuple[str, float]:
    """Read from the children until `done`, or until a limit ends it.

    Args:
        children: the processes; the clock starts when all of them are ready.
        captures: pipes to read meanwhile.
        wall_s: wall-clock seconds that they have.
        done: called whenever something has happened, after everything readable has been read.

    Returns:
        `done`, `timeout`, `output_limit` or `disk_limit`; and wall-clock seconds since all were ready.

    Raises:
        SandboxError: one did not become ready.
    """
    started = time.monotonic()
    began: float | None = None
    looked = started
    while True:
        now = time.monotonic()
        if began is None and all(child.ready for child in children):
            began = looked = now
        if began is None and now - started > _START_S:
            raise SandboxError(f"the sandbox does not start: not within {_START_S:g} s")
        if began is not None and now - began >= wall_s:
            return "timeout", now - began
        _listen(children, captures, _TICK_S)
        for child in children:
            # Ended already: it was ready before, or it never will be, which is not the program's failure.
            while child.returncode is not None and not child.ready:
                child.hear()
        now = time.monotonic()
        since = now - (began if began is not None else now)
        if any(capture.full and capture.ends_at_limit for capture in captures):
            return "output_limit", since
        if done():
            return ("disk_limit" if any(child.over_quota() for child in children) else "done"), since
        if now - looked >= _TICK_S:
            looked = now
            if any(child.over_quota() for child in children):
                return "disk_limit", since


def _listen(children: Sequence[Sandboxed], captures: Sequence[Capture], timeout_s: float) -> None:
    """Read what captures and status lines have, waiting at most `timeout_s` for it, and reap children that ended."""
    poller = select.poll()
    heard: dict[int, Callable[[], None]] = {c.pipe: c.read for c in captures if c.open}
    heard |= {child.status: child.hear for child in children if not child.ready}
    for pipe in heard:
        poller.register(pipe, select.POLLIN)
    for child in children:
        if child.returncode is None and child.ended is not None:
            poller.register(child.ended, select.POLLIN)
    for pipe, _ in poller.poll(timeout_s * 1000):
        if pipe in heard:
            heard[pipe]()
    for child in children:
        child.wait(os.WNOHANG)


def anonymous(content: bytes) -> int:
    """Return a descriptor of an unnamed, immutable file that holds `content`; the caller closes it."""
    sealed = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(sealed, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(sealed, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, seals)
    return sealed


@cache
def _modules() -> list[tuple[str, CodeType]]:
    modules = []
    for name in (f"{_ROOM}.{short}" for short in _INSIDE):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        code: CodeType = spec.loader.get_code(name)  # type: ignore[attr-defined]
        modules.append((name, code))
    return modules


@cache
def _python() -> str:
    """Return the path of the interpreter itself, not of a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def _sys_path() -> list[str]:
    """Return where installed packages are, without what `.pth` files add (this very project, if editable)."""
    places = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]
    # Links are resolved: of a linked environment only the folder itself is visible inside.
    return [os.path.realpath(p) for p in places]


@cache
def _readable() -> list[str]:
    """Return all paths visible inside, apart from the scratch directory: libraries and Python."""
    libraries = [str(Path(sys.base_prefix) / name) for name in ("lib", "lib64")]
    libraries.append(str(sysconfig.get_config_var("LIBDIR") or ""))
    libraries.append(str(Path(os.__file__).parent))
    wanted = [*_SYSTEM, _python(), *(os.path.realpath(p) for p in [*libraries, *_sys_path()] if p)]
    return [p for p in dict.fromkeys(wanted) if Path(p).exists() and p != "/"]


@cache
def _open_to_all() -> bool:
    """Return whether a user with no rights of its own can use this Python."""
    for path in (Path(p) for p in _readable()):
        for folder in path.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return False
        if not path.stat().st_mode & stat.S_IROTH:
            return False
    return True


def _environment(scratch: str) -> dict[str, str]:
    """Return all environment variables of a sandboxed process; none is the parent's."""
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


def _bubblewrap(walls: Walls, scratch: str, about: int) -> list[str]:
    """Return bubblewrap's part of the command line, with options that its early versions know, too.

    Python is the first process of its namespace (`inside.py` watches from there): one of bubblewrap's in between would
    be left for the machine's first process to wait for, which in a container often never does.
    """
    command = [walls.bubblewrap]
    if walls.user_namespace:
        command += ["--unshare-all", "--cap-drop", "ALL"]
    else:
        # All namespaces but the user's: in one with a single user, root could become nobody else.
        command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if walls.bounded:
        command += ["--cap-add", "CAP_SYS_ADMIN"]  # for the one mount; given up with all others (`jail.py`)
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(about)]
    made: set[str] = set()
    for path in _topmost(_readable()):
        # Left to itself, bubblewrap gives parents the mode of the originals, and root's are closed to the new user.
        for folder in [str(p) for p in reversed(Path(path).parents)][1:]:
            if folder not in made:
                made.add(folder)
                command += ["--dir", folder]
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
        else:
            command += ["--ro-bind", path, path]
    for folder in [str(p) for p in reversed(Path(scratch).parents)][1:]:
        command += [] if folder in made else ["--dir", folder]
    command += ["--dir", "/dev"]
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    # The root is a file system in memory, where only its owner's rights would limit what is written.
    return [*command, "--bind", scratch, scratch, "--remount-ro", "/", "--chdir", "/", "--"]


def _topmost(paths: Sequence[str]) -> list[str]:
    """Return the paths without those that lie below another one of them."""
    return [p for p in paths if not any(str(parent) in paths for parent in Path(p).parents)]


def remove_left(name: str) -> None:
    """Delete the scratch folders of a process that was killed; `name` was its `SCRATCH`."""
    for place in _places():
        for scratch in Path(place).glob(f"{_PREFIX}{name}-*"):
            _remove(str(scratch))


def _places() -> list[str]:
    return list(dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"]))


def _new_scratch(user: int | None) -> str:
    """Make a scratch directory and return its path; `user`, if there is one, owns and can reach it."""
    candidates = _places()
    place = next((c for c in candidates if user is None or _passable(c)), candidates[0])
    scratch = os.path.realpath(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.environ.get(SCRATCH, '')}-", dir=place))
    try:
        if user is not None:
            os.chown(scratch, user, user)
    except OSError:
        _remove(scratch)
        raise
    return scratch


def _passable(place: str) -> bool:
    path = Path(os.path.realpath(place))
    return path.is_dir() and all(p.stat().st_mode & stat.S_IXOTH for p in (path, *path.parents))


def user_range() -> tuple[int, int] | None:
    """Return a range of user numbers that nobody has; None where root can become nobody else.

    In a container only some numbers exist: the last quarter of the longest row of them is taken.
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
    found = user_range()
    if found is None:
        raise SandboxError("the sandbox does not start: there are no user numbers to spare")
    # Not the global generator: a training run's seed is not touched.
    return random.SystemRandom().randrange(*found)


def _threads_of_others() -> int:
    """Return the threads to allow beside a sandbox that shares its user's limit: those now, and a margin."""
    return _count_threads(os.geteuid(), int(time.monotonic())) + _STARTED_MEANWHILE


@lru_cache(maxsize=1)
def _count_threads(user: int, second: int) -> int:
    """Return the number of threads that the user has on this machine; counted once a second at most."""
    total = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if process.stat().st_uid == user:
                    total += sum(1 for _ in (process / "task").iterdir())
    return total


def _sweep(user: int) -> None:
    """Kill all processes of a user that only one sandbox has; without a pid namespace nothing else would."""
    for _ in itertools.repeat(None, 100):
        found = False
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    lines = (process / "status").read_text().splitlines()
                    uid = next(line for line in lines if line.startswith("Uid:")).split()[1]
                    state = next(line for line in lines if line.startswith("State:")).split()[1]
                    if int(uid) == user and state != "Z":
                        os.kill(int(process.name), signal.SIGKILL)
                        found = True
        if not found:
            return


def _entries(folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield all entries below a folder without recursion, in no order; links are not followed."""
    waiting = [folder]
    while waiting:
        with contextlib.suppress(FileNotFoundError, PermissionError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry, entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)


def _holds_more(folder: str, limit: int) -> bool:
    """Return whether a folder holds more than `limit` bytes, too many entries, or is nested too deep."""
    total = 0
    try:
        for count, (entry, found) in enumerate(_entries(folder), start=1):
            total += found.st_blocks * 512
            deep = len(entry.path) > len(folder) + _LONGEST_PATH
            if total > limit or count > _MOST_ENTRIES or deep:
                return True
    except OSError:  # Nested deeper than a path can say.
        return True
    return False


def _remove(scratch: str) -> None:
    """Delete a folder, whatever depth, names and permissions it holds.

    Folders within folders are moved up before they are emptied, so that neither recursion nor a path's length matters.
    """
    try:
        top = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        numbers = itertools.count()
        # A round without any success ends it: something that not even its owner may delete.
        while any([_flatten(top, name, numbers) for name in _names(top)]):
            pass
    finally:
        os.close(top)
    shutil.rmtree(scratch, ignore_errors=True)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _flatten(top: int, name: str, numbers: Iterator[int]) -> bool:
    """Remove one entry of the folder `top`, moving folders in it up to `top`; return whether that worked."""
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
