"""Confinement that a sandboxed process applies to itself before foreign code runs: limits, user, Landlock, seccomp.

Runs inside the child only, as its first act, and imports nothing but the standard library: the parent sends the
compiled module along (`launch.py`), so nothing of this package has to be visible in the sandbox. Every step is one way:
what has been given up here, the code that runs afterwards cannot take back.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from typing import Any

# Calls that foreign code gets EPERM for, with their numbers on x86_64 and aarch64 (-: it has none). Processes, sockets,
# other processes' memory and signals, mounts, the kernel's own settings; changes to metadata, which Landlock does not
# look at; and memory and queues that no limit of the process counts or that outlive it: contexts of asynchronous I/O
# are a budget of the whole machine, and setsockopt would let each socket hold as much as the machine's largest buffer.
_REFUSED = """
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281, unshare 272 97, setns 308 268, pivot_root 155 41,
chroot 161 51, mount 165 40, umount2 166 39, open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431,
fsmount 432 432, fspick 433 433, mount_setattr 442 442, statmount 457 457, listmount 458 458, socket 41 198,
connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, process_madvise 440 440, process_mrelease 448 448, kcmp 312 272, pidfd_open 434 434,
pidfd_getfd 438 438, pidfd_send_signal 424 424, bpf 321 280, perf_event_open 298 241, add_key 248 217,
request_key 249 218, keyctl 250 219, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
io_setup 206 0, io_destroy 207 1, io_submit 209 2, io_cancel 210 3, io_getevents 208 4, io_pgetevents 333 292,
setsockopt 54 208, userfaultfd 323 282, name_to_handle_at 303 264, open_by_handle_at 304 265,
personality 135 92, seccomp 317 277,
reboot 169 142, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273,
delete_module 176 106, setsid 112 157, setpgid 109 154, setuid 105 146, setgid 106 144, setreuid 113 145,
setregid 114 143, setresuid 117 147, setresgid 119 149, setgroups 116 159, setfsuid 122 151, setfsgid 123 152,
capset 126 91, setpriority 141 140, ioprio_set 251 30, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, migrate_pages 256 238, move_pages 279 239, chmod 90 -, fchmod 91 52, fchmodat 268 53,
fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -, utimes 235 -, futimesat 261 -,
utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15,
fremovexattr 199 16, truncate 76 45, mknod 133 -, mknodat 259 33, memfd_create 319 279, memfd_secret 447 447,
shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, semget 64 190, semop 65 193, semctl 66 191,
semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181,
mq_timedsend 242 182, mq_timedreceive 243 183, mq_notify 244 184, mq_getsetattr 245 185, fanotify_init 300 262,
fanotify_mark 301 263, inotify_add_watch 254 27, quotactl 179 60, quotactl_fd 443 443, swapon 167 224,
swapoff 168 225, acct 163 89, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171,
syslog 103 116, sethostname 170 161, setdomainname 171 162, iopl 172 -, ioperm 173 -, modify_ldt 154 -,
lookup_dcookie 212 18, nfsservctl 180 42, vhangup 153 58, sync 162 81, syncfs 306 267, vmsplice 278 75, tee 276 77,
uselib 134 -, ustat 136 -, sysfs 139 -, _sysctl 156 -, lsm_set_self_attr 460 460
"""

# Numbers of the calls whose arguments decide.
_NUMBERS = {
    "x86_64": {
        "clone": 56, "clone3": 435, "openat2": 437, "open": 2, "openat": 257, "kill": 62, "tkill": 200, "tgkill": 234,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "socketpair": 53, "fcntl": 72, "ioctl": 16, "prctl": 157,
        "prlimit64": 302, "sched_setaffinity": 203, "fallocate": 285, "mmap": 9,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "openat2": 437, "openat": 56, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "socketpair": 199, "fcntl": 25, "ioctl": 29, "prctl": 167,
        "prlimit64": 261, "sched_setaffinity": 122, "fallocate": 47, "mmap": 222,
    },
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Calls of kernels younger than this table do not exist for foreign code.
_LAST_KNOWN = 462
_X32 = 0x40000000

_EPERM, _ENOSYS, _EOPNOTSUPP = 1, 38, 95
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x54, 0x06
_NR_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000
# F_SETOWN, F_SETSIG and F_SETOWN_EX have the kernel send signals elsewhere; a pipe's size is a budget of the user.
_FCNTL_REFUSED = (8, 10, 15, 1031)
# TIOCSCTTY, TIOCSPGRP, TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP.
_IOCTL_REFUSED = (0x540E, 0x5410, 0x5412, 0x541C, 0x8901, 0x8902)
# PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS, PR_SET_VMA.
_PRCTL_GIVEN = (2, 3, 15, 16, 23, 39, 0x53564D41)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 22, 38
_CAP_DAC_READ_SEARCH = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
# Devices, sockets and FIFOs are not among what may be made in the scratch directory.
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_MEBIBYTE = 1 << 20

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_NOSUID, _NODEV, _PRIVATE = 1 << 1, 1 << 2, 1 << 18 | 1 << 14  # the last: and all below
# __O_TMPFILE, which O_TMPFILE has beside O_DIRECTORY; MAP_TYPE, MAP_PRIVATE, MAP_ANONYMOUS.
_TMPFILE = 0o20000000
_MAP_TYPE, _MAP_PRIVATE, _MAP_ANONYMOUS = 0xF, 0x2, 0x20

_libc = ctypes.CDLL(None, use_errno=True)


class JailError(RuntimeError):
    """Raised when a step of the confinement fails; foreign code must then not run."""


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise JailError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(what: str, option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(what, int(_libc.prctl(ctypes.c_int(option), *padded)))


def _syscall(number: int, *arguments: Any) -> int:
    _libc.syscall.restype = ctypes.c_long
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def landlock_abi() -> int:
    """Return the version of Landlock that this kernel gives; 0 if it has none or it is switched off."""
    return max(0, _syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def seccomp_obstacle() -> str | None:
    """Return why system calls cannot be filtered on this machine; None if no reason is known."""
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH:
        return f"no filter is written for {machine}"
    if _libc.prctl(21, 0, 0, 0, 0) < 0:  # PR_GET_SECCOMP
        return f"prctl: {os.strerror(ctypes.get_errno())}"
    return None


def enter(config: Mapping[str, Any]) -> int | None:
    """Confine this process; return a descriptor of its bounded scratch directory, if it has one.

    Args:
        config: plain data of `launch.py`: `scratch`, `readable`, `devices` (paths); `limits` (cpu_s, memory_mib,
            file_mib, processes); `user` (uid and gid in one, or None); `keeps_read`; `landlock` (ABI, 0: leave out);
            `seccomp`; `parent` (its pid as seen from here); `bounded` (bytes and entries of a file system in memory to
            be the scratch directory, or None); `own_mounts` (whether this process has a namespace of mounts by now).

    Raises:
        JailError: a step that was asked for did not work.
        OSError: a limit, a user or a directory could not be set, or a path not opened.
    """
    os.umask(0o077)
    # Before a namespace of users, so that they hold for the user outside of it.
    _set_limits(config["limits"])
    scratch = _bound_scratch(config) if config["bounded"] else None
    # Before the user changes: what is readable may lie below a folder that only root can enter.
    ruleset = _ruleset(config) if config["landlock"] else -1
    _drop(config["user"], config["keeps_read"])
    os.chdir(config["scratch"])
    # Landlock and seccomp ask for it of a process without CAP_SYS_ADMIN.
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    # Both are undone by a change of user, hence only now.
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)
    _prctl("parent's death signal", _PR_SET_PDEATHSIG, 9)
    if os.getppid() != config["parent"]:
        raise JailError("the parent has gone")
    if ruleset >= 0:
        flags = 1 if config["landlock"] >= 7 else 0  # What foreign code is denied would fill the audit log.
        _checked("landlock", _syscall(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(flags)))
        os.close(ruleset)
    if config["seccomp"]:
        _filter_calls(os.uname().machine, os.getpid(), scratch is not None)
    return scratch


def watch_over_a_child() -> None:
    """Fork, and return in the new process; this one only waits for it and exits with its status.

    For the first process of a pid namespace: signals mean something else to it, and with it all others end. It stays
    the user it is, so that the one who started it may end it, but gives up its rights.
    """
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child == 0:
        return
    _drop(None, False)
    os.closerange(0, 1024)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _bound_scratch(config: Mapping[str, Any]) -> int:
    """Mount a file system in memory on the scratch directory, visible to this process only; return a descriptor of it.

    Its size bounds what is written, whatever way: also to files that have no name any more, which nobody could find.
    """
    uid, gid = os.geteuid(), os.getegid()
    if not config["own_mounts"]:
        own_rights = uid == 0
        _checked("unshare", int(_libc.unshare(_NEW_MOUNTS if own_rights else _NEW_MOUNTS | _NEW_USER)))
        if not own_rights:
            for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 (pathlib takes time to load)
                    file.write(line)
        # Private, or the mount below would appear outside as well.
        _checked("mount", int(_libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None)))
    size, entries = config["bounded"]
    owner = (uid, gid) if config["user"] is None else (config["user"],) * 2
    options = f"size={size},nr_inodes={entries},mode=0700,uid={owner[0]},gid={owner[1]}".encode()
    place = os.fsencode(config["scratch"])
    _checked("tmpfs", int(_libc.mount(b"tmpfs", place, b"tmpfs", ctypes.c_ulong(_NOSUID | _NODEV), options)))
    return os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _set_limits(limits: Mapping[str, Any]) -> None:
    """Set this process's resource limits, never above the hard limits that it has."""
    # RLIMIT_CPU counts whole seconds: rounded up. SIGXCPU comes at the soft limit, SIGKILL a second later.
    cpu_s = max(1, -(-int(limits["cpu_s"] * 1000) // 1000))
    wanted = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_AS: (limits["memory_mib"] * _MEBIBYTE,) * 2,
        resource.RLIMIT_FSIZE: (limits["file_mib"] * _MEBIBYTE,) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (256, 256),
        resource.RLIMIT_NPROC: (limits["processes"],) * 2,
        # Correct programs may recurse deeply.
        resource.RLIMIT_STACK: (64 * _MEBIBYTE,) * 2,
    }
    for kind, (soft, hard) in wanted.items():
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(kind, (soft, hard))


def _drop(user: int | None, keeps_read: bool) -> None:
    """Become `user`, whom no other process has, and give up every capability.

    One may stay: where the interpreter lies below a folder that only root may enter, reading would end with root, so
    the right to read is kept and Landlock alone says what.
    """
    if user is not None:
        if keeps_read:
            _prctl("keep capabilities", _PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kept = 1 << _CAP_DAC_READ_SEARCH if keeps_read else 0
    # _LINUX_CAPABILITY_VERSION_3: two sets of three words, effective, permitted and inheritable.
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(struct.pack("=6I", kept, kept, 0, 0, 0, 0))
    _checked("capset", int(_libc.capset(header, sets)))


def _ruleset(config: Mapping[str, Any]) -> int:
    """Build a Landlock ruleset: read below `readable`, write below `scratch` only, no network, no signals outside."""
    abi = config["landlock"]
    # The thirteen rights of version 1, and below those that later versions added: what is not handled is allowed.
    handled = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if abi >= since else 0
    # Binding and connecting TCP from version 4; abstract sockets and signals to outside from version 6.
    fields = [handled] + ([3] if abi >= 4 else []) + ([3] if abi >= 6 else [])
    attribute = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields))
    ruleset = _syscall(_LANDLOCK_CREATE, attribute, ctypes.c_size_t(8 * len(fields)), ctypes.c_uint32(0))
    _checked("landlock_create_ruleset", ruleset)
    # No right to execute: nothing is started from here, and mapping a library takes no such right.
    read = _READ_FILE | _READ_DIR
    write = _WRITE_FILE | _REMOVE_DIR | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
    # A file that is deleted takes room as long as it is open or mapped, and no look at the directory sees it.
    write |= _REMOVE_FILE if config["bounded"] else 0
    _allow(ruleset, config["readable"], read)
    _allow(ruleset, config["devices"], _READ_FILE | _WRITE_FILE)
    _allow(ruleset, [config["scratch"]], (read | write) & handled)
    return ruleset


def _allow(ruleset: int, paths: Sequence[str], rights: int) -> None:
    """Add a rule with these rights for each path to a Landlock ruleset; paths that cannot be opened are skipped."""
    for path in paths:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            granted = rights if os.path.isdir(path) else rights & _OF_FILES  # noqa: PTH112 (pathlib takes time to load)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", granted, place), 12)
            result = _syscall(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            _checked(f"landlock_add_rule: {path}", result)
        finally:
            os.close(place)


def _filter_calls(machine: str, own_pid: int, bounded: bool) -> None:
    program = seccomp_program(machine, own_pid, bounded)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    given = Program(len(program), code)
    result = _libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(2), ctypes.byref(given), 0, 0)
    _checked("seccomp", int(result))


Instruction = tuple[int, int, int, int]


def seccomp_program(machine: str, own_pid: int, bounded: bool = True) -> list[Instruction]:
    """Return the filter as classic BPF: (code, jump if true, jump if false, operand).

    Args:
        machine: `x86_64` or `aarch64`.
        own_pid: signals may go to this process only.
        bounded: whether the scratch directory is; otherwise what takes room unseen, or all at once, is refused.
    """
    column = 1 if machine == "x86_64" else 2
    number = _NUMBERS[machine]
    refused = [int(n) for row in _REFUSED.split(",") if (n := row.split()[column]) != "-"]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        # First of all the architecture: a number means another call in another one, such as i386's by int 0x80.
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR_AT),
        # x32's calls have numbers of their own, which the table does not know.
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_ABOVE, 0, 1, _LAST_KNOWN),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for call, body in _by_argument(own_pid, bounded).items():
        if call in number:
            program += [(_EQUAL, 0, len(body), number[call]), *body]
    for one in refused:
        program += [(_EQUAL, 0, 1, one), _refuse()]
    return [*program, _give()]


def _argument(index: int) -> Instruction:
    """Load the low half of an argument: all those looked at are ints to the kernel."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _refuse(error: int = _EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _give() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def _only(index: int, *values: int) -> list[Instruction]:
    """Allow the call if the argument is one of `values`, else refuse it."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_argument(index), *tests, _refuse(), _give()]


def _none_of(index: int, *values: int) -> list[Instruction]:
    """Refuse the call if the argument is one of `values`, else allow it."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_argument(index), *tests, _give(), _refuse()]


def _by_argument(own_pid: int, bounded: bool) -> dict[str, list[Instruction]]:
    """Return the filter's parts for calls that are judged by their arguments, by the call's name."""
    # Opened for reading only, but truncated: early versions of Landlock take that for reading.
    truncates = [(_AND, 0, 0, os.O_ACCMODE | os.O_TRUNC), (_EQUAL, 0, 1, os.O_TRUNC), _refuse(), _give()]
    # Private mappings stay: libraries are mapped so.
    unbounded: dict[str, list[Instruction]] = {
        "fallocate": [_refuse(_EOPNOTSUPP)],
        "mmap": [
            _argument(3),
            (_AND, 0, 0, _MAP_TYPE | _MAP_ANONYMOUS),
            (_EQUAL, 3, 0, _MAP_PRIVATE),
            (_AND, 0, 0, _MAP_ANONYMOUS),
            (_EQUAL, 1, 0, _MAP_ANONYMOUS),
            _refuse(),
            _give(),
        ],
    }
    unnamed: list[Instruction] = [(_AND, 0, 0, _TMPFILE), (_EQUAL, 0, 1, _TMPFILE), _refuse(_EOPNOTSUPP)]
    signals = _only(0, own_pid)
    thread = [
        _argument(0),
        (_AND, 0, 0, _CLONE_THREAD | _CLONE_NEW),
        (_EQUAL, 1, 0, _CLONE_THREAD),
        _refuse(),
        _give(),
    ]
    # A connected pair of this very process, which asyncio wants; datagram pairs could send to other sockets.
    pair = [
        _argument(0),
        (_EQUAL, 1, 0, 1),
        _refuse(),
        _argument(1),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, 1),
        _refuse(),
        _give(),
    ]
    return {
        "clone": thread,
        # Its flags lie in memory, where a filter cannot look; libraries fall back to clone.
        "clone3": [_refuse(_ENOSYS)],
        "openat2": [_refuse(_ENOSYS)],
        **({} if bounded else unbounded),
        "open": [*([] if bounded else [_argument(1), *unnamed]), _argument(1), *truncates],
        "openat": [*([] if bounded else [_argument(2), *unnamed]), _argument(2), *truncates],
        "kill": signals,
        "tkill": signals,
        "tgkill": signals,
        "rt_sigqueueinfo": signals,
        "rt_tgsigqueueinfo": signals,
        "socketpair": pair,
        "fcntl": _none_of(1, *_FCNTL_REFUSED),
        "ioctl": _none_of(1, *_IOCTL_REFUSED),
        "prctl": _only(0, *_PRCTL_GIVEN),
        # Own process only: limits of other processes of the same user could be changed otherwise.
        "prlimit64": _only(0, 0, own_pid),
        "sched_setaffinity": _only(0, 0, own_pid),
    }
