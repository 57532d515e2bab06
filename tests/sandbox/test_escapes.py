"""Tests that sandboxed code cannot escape: each attempt works without walls, and is contained by them."""

# ruff: noqa: E501 (programs are easier to compare with one or two lines each)
from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_scalerl.sandbox.jail import landlock_abi
from lightning_scalerl.sandbox.walls import Walls
from tests.sandbox.places import NOBODY, Place

# Every attempt is wrapped in this program. It prints "reached" if the attempt works, else the type of the error.
WRAPPER = """
import ctypes, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    libc.syscall.restype = ctypes.c_long
    # Plain ints would leave half of a word to chance.
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

def attempt():
{body}

try:
    attempt()
except (OSError, ValueError, RuntimeError) as error:
    print("contained", type(error).__name__)
else:
    print("reached")
"""


def attempt(body: str) -> str:
    return WRAPPER.format(body="\n".join("    " + line for line in body.strip().splitlines()))


# Results of attempts without walls, per user: they do not depend on the kind of walls.
TRIED: dict[tuple[str, int], str] = {}


def works_without_walls(place: Place, name: str, source: str) -> bool:
    if (name, place.uid) not in TRIED:
        TRIED[name, place.uid] = place.bare(source).stdout
    return "reached" in TRIED[name, place.uid]


def check_judge(place: Place) -> None:
    """Check that judging still works: a right program passes and a wrong one fails."""
    assert place.judge("def f(x):\n    return x * 2", "assert f(21) == 42").passed
    assert not place.judge("def f(x):\n    return x * 3", "assert f(21) == 42").passed


# Attempts on files. {secret} is a file that the user may read and write, in {folder}.
FILES = {
    "read": "assert open({secret!r}).read() == 'a secret'",
    "read by descriptor": "os.read(os.open({secret!r}, os.O_RDONLY), 10)",
    "write": "open({secret!r}, 'w').write('mine')",
    "append": "open({secret!r}, 'a').write('mine')",
    "truncate": "os.truncate({secret!r}, 0)",
    "truncate while opening": "os.open({secret!r}, os.O_RDONLY | os.O_TRUNC)",
    "make": "open({folder!r} + '/made', 'w')",
    "make a folder": "os.mkdir({folder!r} + '/made')",
    "delete": "os.unlink({secret!r})",
    "rename": "os.rename({secret!r}, {folder!r} + '/other')",
    "move in": "open('mine', 'w').close(); os.rename('mine', {folder!r} + '/mine')",
    "link out": "os.link({secret!r}, 'mine')",
    "symbolic link": "os.symlink({secret!r}, 'mine'); open('mine').read()",
    "list": "os.listdir({folder!r})",
    "change mode": "os.chmod({secret!r}, 0)",
    "change times": "os.utime({secret!r}, (1, 1))",
    "change attributes": "os.setxattr({secret!r}, 'user.mine', b'1')",
    "watch": "call(254, libc.inotify_init(), {secret!r}.encode(), 2)",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(attempted, marks=pytest.mark.slow if number % 9 else ()) for number, attempted in enumerate(FILES)],
)
def test_files_outside(place: Place, outside: Path, name: str) -> None:
    source = attempt(FILES[name].format(secret=str(outside / "secret"), folder=str(outside)))
    before = (outside / "secret").stat()
    result = place.run(source)
    assert result.status == "ok" and result.stdout.startswith("contained"), result
    assert (outside / "secret").read_text() == "a secret"
    after = (outside / "secret").stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert [p.name for p in outside.iterdir()] == ["secret"]
    assert works_without_walls(place, name, source)


def test_files_of_root_cannot_be_read(place: Place) -> None:
    source = attempt("open('/etc/shadow').read()")
    assert place.run(source).stdout == "contained PermissionError\n" or "FileNotFoundError" in place.run(source).stdout
    if place.uid == 0:
        assert place.bare(source).stdout == "reached\n"


def test_environment_and_memory_of_the_parent_cannot_be_read(place: Place) -> None:
    for path in ("environ", "mem", "maps", "fd/0"):
        source = attempt(f"open('/proc/{place.pid}/{path}', 'rb').read(1)")
        assert place.run(source).stdout.startswith("contained"), path
    reads_environment = attempt(f"assert b'PATH' in open('/proc/{place.pid}/environ', 'rb').read()")
    if place.uid != 0:  # Without walls too, root's program has given up its capabilities.
        assert place.bare(reads_environment).stdout == "reached\n"


def test_a_program_cannot_see_its_own_process(place: Place) -> None:
    """The files of its process include the arguments of its start."""
    source = attempt("open('/proc/self/cmdline', 'rb')")
    assert place.run(source).stdout.startswith("contained")
    assert place.bare(source).stdout == "reached\n"


def test_environment_variables(place: Place) -> None:
    result = place.run("import os\nprint(sorted(os.environ))\nprint(os.environ['HOME'] == os.getcwd(), os.listdir())")
    names, home = result.stdout.splitlines()
    assert "SANDBOX_SECRET" not in names and "PYTHONPATH" not in names
    assert home == "True []"


@contextlib.contextmanager
def listening(kind: str, folder: Path) -> Iterator[tuple[str, list[socket.socket]]]:
    """Yield the address of a listening socket as a Python expression, and the socket in a list."""
    name = f"sandbox-{secrets.token_hex(8)}"
    family = socket.AF_INET if kind in ("tcp", "udp") else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_DGRAM if kind in ("udp", "datagram") else socket.SOCK_STREAM) as listener:
        listener.settimeout(0.02)
        address: Any = ("127.0.0.1", 0)
        if family == socket.AF_UNIX:
            address = f"\0{name}" if kind == "abstract" else str(folder / name)
        listener.bind(address)
        if kind in ("unix", "datagram"):
            (folder / name).chmod(0o777)
        if kind not in ("udp", "datagram"):
            listener.listen()
        reached = [listener]
        yield repr(listener.getsockname() if family == socket.AF_INET else address), reached


CONNECTS = {
    "tcp": "socket.create_connection({0}, 2)",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', {0})",
    "unix": "socket.socket(socket.AF_UNIX).connect({0})",
    "abstract": "socket.socket(socket.AF_UNIX).connect({0})",
    # A socket pair needs no address, but each end of a datagram pair can send to any address.
    "datagram": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {0})",
}


def was_contacted(listener: socket.socket, kind: str) -> bool:
    try:
        listener.recv(1) if kind in ("udp", "datagram") else listener.accept()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("kind", CONNECTS)
def test_sockets(place: Place, outside: Path, kind: str) -> None:
    with listening(kind, outside) as (address, (listener,)):
        source = attempt(CONNECTS[kind].format(address))
        result = place.run(source)
        assert result.status == "ok" and result.stdout.startswith("contained"), result
        assert not was_contacted(listener, kind)
        assert place.bare(source).stdout == "reached\n"
        assert was_contacted(listener, kind)


def test_each_wall_stands_alone(place: Place, outside: Path) -> None:
    """Walls overlap, so a gap in one wall is visible only without the others."""
    all_walls = place.protections.walls
    secret = str(outside / "secret")
    bubblewrap = replace(all_walls, landlock=0, seccomp=False)
    landlock = replace(all_walls, bubblewrap="", seccomp=False)
    seccomp = replace(all_walls, bubblewrap="", landlock=0)

    def contained(walls: Walls, source: str) -> None:
        result = place.behind(walls, attempt(source))
        assert result.stdout.startswith("contained"), (walls, source, result)

    for walls in [landlock] if place.mode == "landlock" else [landlock, bubblewrap]:
        for name in ("read", "write", "append", "truncate while opening", "make", "delete", "list", "move in"):
            contained(walls, FILES[name].format(secret=secret, folder=str(outside)))
        contained(walls, PROCESSES["signal"].format(pid=place.pid))
        for kind in ("tcp", "abstract") if all_walls.landlock >= 6 or walls is bubblewrap else ():
            with listening(kind, outside) as (address, _):
                contained(walls, CONNECTS[kind].format(address))
    for name in ("signal", "signal by input", "limits", "fork", "execute", "clone3"):
        contained(seccomp, PROCESSES[name].format(pid=place.pid))
    for kind in CONNECTS:
        with listening(kind, outside) as (address, _):
            contained(seccomp, CONNECTS[kind].format(address))
    assert (outside / "secret").read_text() == "a secret"


def test_names_are_not_looked_up(place: Place) -> None:
    assert place.run(attempt("socket.getaddrinfo('localhost', 80)[0] and socket.socket()")).stdout.startswith(
        "contained"
    )


# Attempts on other processes. {pid} is the parent. All are harmless if they work.
PROCESSES = {
    "signal": "os.kill({pid}, 0)",
    "signal the group": "os.kill(0, signal.SIGCONT)",
    "signal all": "os.kill(-1, 0)",
    "signal a thread": "call(200, {pid}, 0)",
    "signal with a value": "call(129, {pid}, 0, struct.pack('3i', 0, 0, -1) + bytes(128))",
    "signal by descriptor": "signal.pidfd_send_signal(os.pidfd_open({pid}), 0)",
    "signal by input": (
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {pid})\nfcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGURG)"
    ),
    "limits": "import resource\nresource.prlimit({pid}, resource.RLIMIT_CORE)",
    "priority": "os.setpriority(os.PRIO_PROCESS, {pid}, os.getpriority(os.PRIO_PROCESS, {pid}))",
    "processors": "os.sched_setaffinity({pid}, os.sched_getaffinity({pid}))",
    "read memory": "call(310, {pid}, 0, 0, 0, 0, 0)",
    "fork": "os.fork() or os._exit(0)",
    "fork by number": "call(57) or os._exit(0)",
    "clone": "call(56, signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)",
    "clone3": "call(435, struct.pack('11Q', 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0), 88) or os._exit(0)",
    "execute": "os.posix_spawn('/bin/true', ['true'], {{}})",
    "session": "os.fork() or (os.setsid(), os._exit(0))",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSES)
def test_other_processes(place: Place, name: str) -> None:
    source = attempt(PROCESSES[name].format(pid=place.pid))
    result = place.run(source)
    assert result.status == "ok" and result.stdout.startswith("contained"), result
    # Without walls too, root's program has given up its capabilities, but its parent has not.
    if not (place.uid == 0 and name in ("priority", "processors", "read memory")):
        assert works_without_walls(place, name, source)


# System calls by their number on x86_64: interfaces with many known exploits. EFAULT or EINVAL would mean "let in".
KERNEL = {
    "execve": 59, "ptrace": 101, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323,
    "keyctl": 250, "add_key": 248, "unshare": 272, "setns": 308, "mount": 165, "pivot_root": 155, "chroot": 161,
    "personality": 135, "memfd_create": 319, "shmget": 29, "mq_open": 240, "open_by_handle_at": 304, "setsid": 112,
    "socket": 41, "kexec_load": 246, "fsopen": 430, "seccomp": 317, "fchmodat2": 452,
    "io_setup": 206, "io_submit": 209, "io_uring_enter": 426, "setsockopt": 54,
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_the_kernels_interfaces_are_closed(place: Place) -> None:
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {KERNEL!r}.items():\n"
        "    ctypes.set_errno(0)\n"
        "    print(name, libc.syscall(number, -1, -1, -1, -1, -1), ctypes.get_errno())\n"
        "print('young', libc.syscall(9999, 0), ctypes.get_errno())\n"
    )
    results = dict(line.split(" ", 1) for line in place.run(source).stdout.splitlines())
    assert results.pop("young") == "-1 38"
    assert results == dict.fromkeys(KERNEL, "-1 1")
    foreign = "import ctypes\nprint('before', flush=True)\nctypes.CDLL(None).syscall(0x40000000 + 39)\nprint('after')"
    result = place.run(foreign)
    assert (result.status, result.stdout) == ("killed", "before\n")


def test_a_program_has_an_unprivileged_user(place: Place) -> None:
    source = (
        "import ctypes, os, struct\nheader = ctypes.create_string_buffer(struct.pack('=Ii', 0x20080522, 0))\n"
        "sets = ctypes.create_string_buffer(24)\nassert ctypes.CDLL(None).capget(header, sets) == 0\n"
        "print(os.getuid(), os.getgroups(), struct.unpack('=6I', sets.raw)[:2])"
    )
    uid, remainder = place.run(source).stdout.split(maxsplit=1)
    groups, rights = remainder.strip().rsplit("] (", 1)
    if place.uid == 0:
        assert int(uid) not in (0, NOBODY) and groups == "["
        assert place.run(source).stdout.split()[0] != uid, "every sandbox has a user of its own"
    # The capability to read is kept if Python is in root's private folder; Landlock then decides what may be read.
    assert rights in ("0, 0)", "4, 4)") and (rights == "0, 0)" or (place.mode, place.uid) == ("landlock", 0))


BOMBS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "forks": ("import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", {"wall_s": 0.4}, ("timeout",)),
    "memory": ("held = []\nwhile True:\n    held.append(bytearray(1 << 24))", {"memory_mib": 256}, ("nonzero",)),
    "memory mapped": (
        "import mmap\nheld = []\nwhile True:\n    held.append(mmap.mmap(-1, 1 << 26))", {"memory_mib": 256}, ("nonzero",),
    ),
    "threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True:\n    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        {"wall_s": 8}, ("nonzero", "timeout", "killed"),
    ),
    "output": ("while True:\n    print('x' * 1000)", {}, ("output_limit",)),
    "error output": ("import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", {}, ("output_limit",)),
    "a loop": ("while True:\n    pass", {"wall_s": 0.2}, ("timeout",)),
    "a loop by the processor": ("while True:\n    pass", {"cpu_s": 1, "wall_s": 20}, ("timeout",)),
    "a loop that ignores signals": (
        "import signal\nfor s in set(signal.Signals) - {9, 19}:\n    signal.signal(s, signal.SIG_IGN)\nwhile True:\n    pass",
        {"cpu_s": 1, "wall_s": 20}, ("timeout",),
    ),
    "sleep": ("import time\ntime.sleep(1000)", {"wall_s": 0.2}, ("timeout",)),
    "input that does not come": ("import os\nos.read(os.pipe()[0], 1)", {"wall_s": 0.2}, ("timeout",)),
    "recursion": ("def f():\n    f()\nf()", {}, ("nonzero",)),
    "recursion without limit": (
        "import sys\nsys.setrecursionlimit(1 << 30)\nclass A:\n    def __repr__(self):\n        return repr(self)\nrepr(A())",
        {"cpu_s": 5}, ("killed", "nonzero", "timeout"),
    ),
    "recursion in C": (
        "x = ()\nfor _ in range(1 << 21):\n    x = (x,)\nhash(x)",
        {}, ("killed", "nonzero"),
    ),
    "nested source": ("eval('(' * 100000 + ')' * 100000)", {}, ("nonzero", "killed")),
    "nested json": ("import json\njson.loads('[' * 1000000)", {}, ("nonzero", "killed")),
    "a large file": ("with open('f', 'wb') as f:\n    while True:\n        f.write(bytes(1 << 20))", {"file_mib": 4}, ("nonzero", "disk_limit")),
    "many files": (
        "n = 0\nwhile True:\n    n += 1\n    with open(str(n), 'wb') as f:\n        f.write(bytes(1 << 20))",
        {"file_mib": 4}, ("disk_limit",),
    ),
    "empty files": ("n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').close()", {}, ("disk_limit",)),
    "folders within folders": ("import os\nwhile True:\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)", {}, ("disk_limit",)),
    "descriptors": ("import os\nwhile True:\n    os.pipe()", {}, ("nonzero",)),
    "its own end": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", {}, ("killed",)),
    "a wild pointer": ("import ctypes\nctypes.string_at(0)", {}, ("killed",)),
}  # fmt: skip


SLOW = (
    "a loop by the processor",
    "a loop that ignores signals",
    "recursion without limit",
    "recursion in C",
    "threads",
    "empty files",
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in BOMBS])
def test_programs_that_use_too_much_of_a_resource_end(place: Place, name: str) -> None:
    source, limits, statuses = BOMBS[name]
    marker, print_folder = f"b{secrets.token_hex(6)}", "import os\nprint(os.getcwd(), flush=True)\n"
    set_name = f"import ctypes\nctypes.CDLL(None).prctl(15, {marker.encode()!r}, 0, 0, 0)\n"
    began = time.monotonic()
    result = place.run(print_folder + set_name + source, **limits)
    assert result.status in statuses, result
    assert time.monotonic() - began < 20
    assert not running(marker)
    assert not Path(result.stdout.split()[0]).exists()
    assert len(result.stdout) <= 256 << 10


# Each way holds up to 24 MiB of disk space that no scan of the scratch directory sees in time, and prints how much.
HOLDS = """
import mmap, os

def named(n):
    return os.open(f"f{n}", os.O_RDWR | os.O_CREAT)

def nameless(n):
    return os.open(".", os.O_RDWR | os.O_TMPFILE)

def whole(file):
    os.posix_fallocate(file, 0, 1 << 20)

def written(file):
    os.write(file, bytes(1 << 20))

def through_a_page(file):
    os.ftruncate(file, 1 << 20)
    with mmap.mmap(file, 1 << 20) as pages:
        pages[:] = bytes(1 << 20)

def tried(make, fill, keep, flags=mmap.MAP_PRIVATE):
    held, kept = 0, []
    try:
        for n in range(24):
            file = make(n)
            fill(file)
            if keep:
                kept.append(mmap.mmap(file, 4096, flags=flags, prot=mmap.PROT_READ))
                if make is named:
                    os.unlink(f"f{n}")
                os.close(file)
            held += 1
    except OSError:
        pass
    if not keep:
        for n in range(24):
            try:
                os.unlink(f"f{n}")
            except OSError:
                pass
    return held

print(*(tried(*way) for way in (
    (named, whole, False), (named, whole, True), (nameless, whole, True), (named, written, True),
    (nameless, written, True), (named, written, True, mmap.MAP_SHARED), (named, through_a_page, True),
)[WAY:WAY + 1]))
"""
WAYS = range(7)


@pytest.mark.parametrize("way", WAYS)
def test_no_more_disk_space_than_the_limit(place: Place, way: int) -> None:
    source = HOLDS.replace("WAY", str(way))
    all_walls = place.protections.walls
    assert all_walls.bounded, place.protections.lines()
    unbounded = replace(all_walls, bubblewrap="", bounded=False, landlock=landlock_abi(), seccomp=True)
    for result in (
        place.run(source, file_mib=2),
        *([place.behind(unbounded, source, file_mib=2)] if place.uid else []),
    ):
        # A scan allows one MiB beyond the limit, and the file system holds one more.
        held = int(result.stdout or 0)
        # A write to a mapped page without room raises a signal.
        assert result.status in ("disk_limit", "killed") or (result.status == "ok" and held <= 4), result
    if place.uid == 0:
        assert place.bare(source, file_mib=2).stdout in ("24\n", ""), "all 24 MiB can be held without walls"


SOCKETS = """
import socket
pairs, held = [], 0
try:
    while True:
        pairs.append(socket.socketpair())
except OSError:
    pass
for one in (half for pair in pairs for half in pair):
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
    except OSError:
        pass
    one.setblocking(False)
    try:
        while True:
            held += one.send(bytes(1 << 14))
    except OSError:
        pass
print(held >> 20)
"""


def test_socket_buffers_cannot_be_enlarged(place: Place) -> None:
    by_default = int(place.run(SOCKETS.replace("setsockopt", "getsockopt")).stdout)
    assert int(place.run(SOCKETS).stdout) == by_default <= 16
    assert int(place.bare(SOCKETS).stdout) > by_default, "buffers can be enlarged without walls"


def running(marker: str) -> list[int]:
    """Return the processes that have a thread of this name, once per such thread."""
    process_ids = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                process_ids += [
                    int(process.name)
                    for t in (process / "task").iterdir()
                    if (t / "comm").read_text().strip() == marker
                ]
    return process_ids


def test_the_number_of_threads_is_limited(place: Place) -> None:
    source = (
        "import threading, time\nthreading.stack_size(32768)\nn = 0\ntry:\n    while n < 1000:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        n += 1\n"
        "except RuntimeError:\n    pass\nprint(n)\nimport os, sys\nsys.stdout.flush()\nos._exit(0)"
    )
    started = int(place.run(source, processes=16).stdout)
    assert 8 <= started <= (16 if place.uid == 0 else 300)
    assert int(place.bare(source, memory_mib=4096, processes=5000).stdout) > 300


def test_threads_work(place: Place) -> None:
    source = (
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "print(sum(ThreadPoolExecutor(4).map(lambda x: x * x, range(10))))\n"
        "threading.stack_size(1 << 26)\nt = threading.Thread(target=lambda: print('deep'))\nt.start()\nt.join()"
    )
    assert place.run(source).stdout == "285\ndeep\n"


def test_usual_libraries_work(place: Place) -> None:
    source = (
        "import asyncio, random, re, json, decimal, collections, itertools, math, tempfile, subprocess, multiprocessing\n"
        "async def main():\n    await asyncio.sleep(0.01)\n    return 5\nprint(asyncio.run(main()))\n"
        "with tempfile.NamedTemporaryFile('w+') as f:\n    f.write('kept')\n    f.seek(0)\n    print(f.read())\n"
        "import os\nos.makedirs('a/b')\nos.rename('a/b', 'c')\nprint(sorted(os.listdir()))\n"
        "import shutil\nshutil.rmtree('a')\nwith open('c/x', 'w') as f:\n    f.write('1')\nopen('c/x', 'w').close()\nopen(os.devnull, 'w').write('x')\n"
        "print(len(os.urandom(4)), os.path.getsize('c/x'))\nexit()"
    )
    result = place.run(source)
    assert (result.status, result.stdout) == ("ok", "5\nkept\n['a', 'c']\n4 0\n"), result


def test_no_process_outlives_its_sandbox(place: Place) -> None:
    """A program tries every way to leave a process behind."""
    marker = f"l{secrets.token_hex(6)}"
    name = f"import ctypes, os, time\nlibc = ctypes.CDLL(None)\nlibc.prctl(15, {marker.encode()!r}, 0, 0, 0)\n"
    # Each process has detached before the next one starts, so that they all exist when the program ends.
    stay = (
        "gone, left = os.pipe()\n"
        "for leave in (os.fork, lambda: libc.fork(), lambda: libc.syscall(57), lambda: libc.syscall(56, 17, 0, 0, 0, 0)):\n"
        "    try:\n        pid = leave()\n    except OSError:\n        continue\n"
        "    if pid == 0:\n        os.setsid()\n        libc.prctl(1, 0)\n        os.write(left, b'.')\n"
        "        os.closerange(0, 256)\n        time.sleep(30)\n        os._exit(0)\n"
        "    if pid > 0:\n        os.read(gone, 1)\n"
    )
    result = place.run(name + stay + "print('done')")
    assert (result.status, result.stdout) == ("ok", "done\n")
    assert not running(marker)
    # Without walls the processes stay, and this test must kill them.
    bare = place.bare(name + stay, processes=5000)  # the limit counts all processes of a user, and other tests share it
    deadline = time.monotonic() + 10
    while not (left := running(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)  # the machine may be busy
    assert left, bare
    for pid in left:
        os.kill(pid, 9)


def test_files_with_odd_permissions_and_names_are_deleted(place: Place) -> None:
    source = (
        "import os\nprint(os.getcwd(), flush=True)\nos.mkdir('closed', 0)\nos.mkdir('d')\nos.mkdir('d/e')\n"
        "open('d/e/\\udcff\\n', 'w').close()\nos.symlink('/', 'root')\nos.symlink('..', 'd/up')\n"
        "for i in range(300):\n    os.mkdir('n')\n    os.chdir('n')\n"
    )
    result = place.run(source)
    assert result.status == "ok", result
    assert not Path(result.stdout.strip()).exists()


def test_programs_end_if_their_parent_is_killed(place: Place, outside: Path) -> None:
    """The parent is a process of this test, killed while its program runs."""
    import subprocess

    from tests.paths import ROOT
    from tests.sandbox.places import interpreter_for_all

    marker = f"p{secrets.token_hex(6)}"
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, {marker.encode()!r}, 0, 0, 0)\ntime.sleep(60)"
    script = (
        "from lightning_scalerl.sandbox import *\n"
        f"run_program({program!r}, '', Limits(wall_s=60), check_protections(False, {place.mode!r}))"
    )
    other = os.geteuid() == 0 and place.uid == NOBODY
    options: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if other else {}
    python = interpreter_for_all() if other else os.sys.executable  # type: ignore[attr-defined]
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(outside), "PATH": os.environ["PATH"]}
    with subprocess.Popen([str(python), "-B", "-c", script], env=environment, cwd="/", **options) as parent:
        wait_for(lambda: bool(running(marker)))
        parent.kill()
    wait_for(lambda: not running(marker))


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_judging_works_after_all_attempts(place: Place) -> None:
    check_judge(place)
