"""Tests of the system call filter with an interpreter of its own, also for the other architecture."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_scalerl.sandbox import jail
from lightning_scalerl.sandbox.jail import seccomp_program

ALLOW, KILL, EPERM, ENOSYS, EOPNOTSUPP = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x0005005F
PID = 4321
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None, bounded: bool = True) -> int:
    """Return the filter's decision on a system call, by interpreting classic BPF as the kernel does."""
    program = seccomp_program(machine, PID, bounded)
    words = {0: number, 4: ARCHITECTURE[machine] if architecture is None else architecture}
    for at, argument in enumerate((*arguments, 0, 0, 0, 0, 0, 0)[:6]):
        words[16 + 8 * at] = argument & 0xFFFFFFFF
    at, register = 0, 0
    while True:
        code, true, false, operand = program[at]
        at += 1
        if code == 0x20:
            register = words[operand]
        elif code == 0x54:
            register &= operand
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: register == operand, 0x35: register >= operand, 0x25: register > operand}[code]
            at += true if holds else false


@pytest.mark.parametrize("machine", ARCHITECTURE)
def test_every_path_of_the_filter_ends(machine: str) -> None:
    program = seccomp_program(machine, PID)
    assert len(program) < 4096
    for at, (code, true, false, _) in enumerate(program):
        assert max(true, false) < 256
        if code in (0x15, 0x35, 0x25):
            assert at + 1 + max(true, false) < len(program)
    assert program[-1][0] == 0x06
    assert {verdict(machine, n) for n in range(600)} == {ALLOW, EPERM, ENOSYS}


def test_a_call_of_another_architecture_kills_the_process() -> None:
    for machine in ARCHITECTURE:
        assert verdict(machine, 0, architecture=0x40000003) == KILL
    assert verdict("x86_64", 0x40000000 + 1) == KILL
    assert verdict("x86_64", 0xFFFFFFFF) == KILL
    assert verdict("x86_64", 463) == ENOSYS and verdict("x86_64", 0) == ALLOW


# Numbers from the kernel's tables: x86_64, aarch64.
CALLS = {
    "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131), "tkill": (200, 130), "openat": (257, 56),
    "socketpair": (53, 199), "fcntl": (72, 25), "ioctl": (16, 29), "prctl": (157, 167), "prlimit64": (302, 261), "read": (0, 63),
    "mmap": (9, 222), "futex": (202, 98), "exit_group": (231, 94), "socket": (41, 198), "execve": (59, 221), "ptrace": (101, 117),
    "bpf": (321, 280), "setsid": (112, 157), "mount": (165, 40), "unshare": (272, 97), "keyctl": (250, 219), "openat2": (437, 437),
    "getrandom": (318, 278), "fchmodat": (268, 53), "shmget": (29, 194), "pidfd_open": (434, 434), "setuid": (105, 146),
    "sched_setaffinity": (203, 122), "rt_sigqueueinfo": (129, 138), "memfd_create": (319, 279), "io_uring_setup": (425, 425),
    "epoll_create1": (291, 20), "pipe2": (293, 59), "getcwd": (79, 17), "rt_sigreturn": (15, 139), "reboot": (169, 142),
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_submit": (209, 2), "io_cancel": (210, 3), "io_getevents": (208, 4),
    "io_pgetevents": (333, 292), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "setsockopt": (54, 208),
}  # fmt: skip
EXPECTED = [
    ("read", (), ALLOW), ("mmap", (), ALLOW), ("futex", (), ALLOW), ("exit_group", (), ALLOW), ("getrandom", (), ALLOW),
    ("epoll_create1", (), ALLOW), ("pipe2", (), ALLOW), ("getcwd", (), ALLOW), ("rt_sigreturn", (), ALLOW),
    ("clone", (0x3D0F00,), ALLOW), ("clone", (17,), EPERM), ("clone", (0x4111,), EPERM), ("clone", (0x3D0F00 | 0x10000000,), EPERM),
    ("clone3", (), ENOSYS), ("openat2", (), ENOSYS),
    ("kill", (PID,), ALLOW), ("kill", (PID + 1,), EPERM), ("kill", (0,), EPERM), ("kill", (-1,), EPERM), ("kill", (-PID,), EPERM),
    ("tgkill", (PID, 9), ALLOW), ("tgkill", (1, PID), EPERM), ("tkill", (1,), EPERM), ("rt_sigqueueinfo", (1,), EPERM),
    ("openat", (-100, 0, 0), ALLOW), ("openat", (-100, 0, 0o1000), EPERM), ("openat", (-100, 0, 0o1001), ALLOW),
    ("openat", (-100, 0, 0o1002), ALLOW),
    ("socketpair", (1, 1), ALLOW), ("socketpair", (1, 0o2000001), ALLOW), ("socketpair", (1, 2), EPERM), ("socketpair", (1, 5), EPERM),
    ("socketpair", (2, 1), EPERM), ("socket", (1, 1), EPERM), ("socket", (16, 3), EPERM),
    ("fcntl", (3, 3), ALLOW), ("fcntl", (3, 8), EPERM), ("fcntl", (3, 10), EPERM), ("fcntl", (3, 15), EPERM), ("fcntl", (3, 1031), EPERM),
    ("ioctl", (0, 0x5401), ALLOW), ("ioctl", (0, 0x5412), EPERM), ("ioctl", (0, 0x8901), EPERM),
    ("prctl", (15,), ALLOW), ("prctl", (1,), EPERM), ("prctl", (4,), EPERM), ("prctl", (22,), EPERM),
    ("prlimit64", (0, 7), ALLOW), ("prlimit64", (PID, 7), ALLOW), ("prlimit64", (1, 7), EPERM),
    ("sched_setaffinity", (0,), ALLOW), ("sched_setaffinity", (1,), EPERM),
    *((name, (), EPERM) for name in (
        "execve", "ptrace", "bpf", "setsid", "mount", "unshare", "keyctl", "fchmodat", "shmget", "pidfd_open", "setuid",
        "memfd_create", "io_uring_setup", "reboot", "io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents",
        "io_pgetevents", "io_uring_enter", "io_uring_register", "setsockopt")),
]  # fmt: skip


@pytest.mark.parametrize("machine", ARCHITECTURE)
@pytest.mark.parametrize(("call", "arguments", "expected"), EXPECTED)
def test_decisions_on_calls(machine: str, call: str, arguments: tuple[int, ...], expected: int) -> None:
    assert verdict(machine, CALLS[call][machine == "aarch64"], *arguments) == expected


# Without a scratch directory of bounded size: calls that take space at once, or where a scan does not see it.
SHARED, PRIVATE, ANONYMOUS, FIXED = 1, 2, 0x20, 0x10
UNBOUNDED = [
    ("fallocate", (3, 0, 0, 4096), EOPNOTSUPP), ("openat", (-100, 0, 0o20200002), EOPNOTSUPP), ("openat", (-100, 0, 0o200000), ALLOW),
    ("openat", (-100, 0, 0o1000), EPERM), ("openat", (-100, 0, 0o1002), ALLOW),
    ("mmap", (0, 4096, 1, PRIVATE, 3), ALLOW), ("mmap", (0, 4096, 5, PRIVATE | FIXED | 0x800, 3), ALLOW),
    ("mmap", (0, 4096, 3, SHARED, 3), EPERM), ("mmap", (0, 4096, 3, 3, 3), EPERM), ("mmap", (0, 4096, 3, SHARED | FIXED, 3), EPERM),
    ("mmap", (0, 4096, 3, SHARED | ANONYMOUS, -1), ALLOW), ("mmap", (0, 4096, 3, PRIVATE | ANONYMOUS, -1), ALLOW),
]  # fmt: skip


@pytest.mark.parametrize("machine", ARCHITECTURE)
@pytest.mark.parametrize(("call", "arguments", "expected"), UNBOUNDED)
def test_decisions_on_calls_if_the_scratch_directory_is_not_bounded(
    machine: str, call: str, arguments: tuple[int, ...], expected: int
) -> None:
    number = {**CALLS, "fallocate": (285, 47)}[call][machine == "aarch64"]
    assert verdict(machine, number, *arguments, bounded=False) == expected
    assert verdict(machine, number, *arguments) == (EPERM if expected == EPERM and call == "openat" else ALLOW)


@pytest.mark.parametrize("call", ["fork", "vfork", "open", "chmod"])
def test_decisions_on_calls_that_only_x86_has(call: str) -> None:
    assert verdict("x86_64", {"fork": 57, "vfork": 58, "open": 2, "chmod": 90}[call], 0, 0o1000) == EPERM


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 1), ("/usr/include/asm-generic/unistd.h", 2)],
)
def test_call_numbers_are_the_kernels(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed")
    text = Path(header).read_text()
    known = {n: int(v) for n, v in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    ours = {row.split()[0]: row.split()[column] for row in jail._REFUSED_CALLS.split(",")}
    ours |= {n: str(v) for n, v in jail._CALL_NUMBERS["x86_64" if column == 1 else "aarch64"].items()}
    checked = {n: v for n, v in ours.items() if v != "-" and n in known}
    assert len(checked) > 100
    assert {n: known[n] for n in checked} == {n: int(v) for n, v in checked.items()}
    if column == 1:  # x86_64 has all calls; aarch64 lacks the older ones
        assert not [n for n, v in ours.items() if v == "-" and n in known]
