"""Confinement that a sandboxed process applies to itself before untrusted code runs: limits, user, Landlock, seccomp.

Runs inside the child only, as its first action, and imports only the standard library. The parent sends the compiled
module (`launch.py`), so this package need not be visible in the sandbox. No step can be undone by the code that runs
afterwards.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from typing import Any

# System calls that return EPERM to untrusted code, with their numbers on x86_64 and aarch64 (- for none). They concern
# processes, sockets, memory and signals of other processes, mounts and the kernel's settings. Calls that change
# metadata are refused because Landlock does not control them. Calls that allocate memory or queues are refused if no
# limit of the process covers the allocation, or if it outlives the process. For example, contexts of asynchronous I/O
# come from a machine-wide budget, and setsockopt would let each socket hold as much as the machine's largest buffer.
_REFUSED_CALLS = """
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

# Numbers of the calls that are allowed or refused depending on their arguments.
_CALL_NUMBERS = {
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
# Calls with higher numbers, of kernels newer than this table, return ENOSYS to untrusted code.
_LAST_KNOWN = 462
_X32 = 0x40000000

_EPERM, _ENOSYS, _EOPNOTSUPP = 1, 38, 95
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _AND, _RETURN = 0x20, 0x15, 0x35, 0x25, 0x54, 0x06
_NR_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000
# F_SETOWN, F_SETSIG and F_SETOWN_EX make the kernel send signals to other processes. F_SETPIPE_SZ (1031) uses up a
# budget that the user's processes share.
_FCNTL_REFUSED = (8, 10, 15, 1031)
# TIOCSCTTY, TIOCSPGRP, TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP.
_IOCTL_REFUSED = (0x540E, 0x5410, 0x5412, 0x541C, 0x8901, 0x8902)
# PR_GET_PDEATHSIG, PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS, PR_SET_VMA.
_PRCTL_ALLOWED = (2, 3, 15, 16, 23, 39, 0x53564D41)

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 8, 22, 38
_CAP_DAC_READ_SEARCH = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
# Rights for the scratch directory. The rights to create devices, sockets and FIFOs are not among them.
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_MEBIBYTE = 1 << 20

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_NOSUID, _NODEV, _PRIVATE = 1 << 1, 1 << 2, 1 << 18 | 1 << 14  # MS_PRIVATE with MS_REC
# The kernel's __O_TMPFILE (O_TMPFILE is __O_TMPFILE | O_DIRECTORY), MAP_TYPE, MAP_PRIVATE and MAP_ANONYMOUS.
_TMPFILE = 0o20000000
_MAP_TYPE, _MAP_PRIVATE, _MAP_ANONYMOUS = 0xF, 0x2, 0x20

_libc = ctypes.CDLL(None, use_errno=True)


class JailError(RuntimeError):
    """Raised when a step of the confinement fails; untrusted code must not run then."""


def _check(step: str, result: int) -> int:
    if result < 0:
        raise JailError(f"{step}: {os.strerror(ctypes.get_errno())}")
    return result


def _prctl(step: str, option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _check(step, int(_libc.prctl(ctypes.c_int(option), *padded)))


def _syscall(number: int, *arguments: Any) -> int:
    _libc.syscall.restype = ctypes.c_long
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def landlock_abi() -> int:
    """Return the version of Landlock in this kernel; 0 if it has none or it is switched off."""
    return max(0, _syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def seccomp_obstacle() -> str | None:
    """Return the reason why system calls cannot be filtered on this machine, or None."""
    machine = os.uname().machine
    if machine not in _AUDIT_ARCH:
        return f"no filter exists for {machine}"
    if _libc.prctl(21, 0, 0, 0, 0) < 0:  # PR_GET_SECCOMP
        return f"prctl: {os.strerror(ctypes.get_errno())}"
    return None


def enter(config: Mapping[str, Any]) -> int | None:
    """Confine this process. Return a descriptor of its scratch directory if the directory's size is bounded, else None.

    Args:
        config: plain data from `launch.py`:
            `scratch`, `readable`, `devices`: paths;
            `limits`: cpu_s, memory_mib, file_mib and processes;
            `user`: number of both the user and the group to switch to, or None;
            `keeps_read`: whether to keep the capability to read all files;
            `landlock`: version of Landlock's interface; 0 to do without it;
            `seccomp`: whether to filter system calls;
            `parent`: the parent's pid in this namespace;
            `bounded`: maximum bytes and entries of an in-memory file system for the scratch directory, or None;
            `own_mounts`: whether this process already has its own mount namespace.

    Raises:
        JailError: a step of the confinement failed.
        OSError: a limit, a user or a directory could not be set, or a path could not be opened.
    """
    os.umask(0o077)
    # Set the limits before a user namespace is created, so that they apply to the user outside of it.
    _set_limits(config["limits"])
    scratch = _mount_scratch(config) if config["bounded"] else None
    # Open the paths before the user changes, because they may be below a folder that only root can enter.
    ruleset = _ruleset(config) if config["landlock"] else -1
    _drop_privileges(config["user"], config["keeps_read"])
    os.chdir(config["scratch"])
    # Landlock and seccomp require this of a process without CAP_SYS_ADMIN.
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    # A change of user resets `dumpable` and the parent's death signal, so they are set after it.
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)
    _prctl("parent's death signal", _PR_SET_PDEATHSIG, 9)
    if os.getppid() != config["parent"]:
        raise JailError("the parent has gone")
    if ruleset >= 0:
        flags = 1 if config["landlock"] >= 7 else 0  # do not fill the audit log with denials
        _check("landlock", _syscall(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(flags)))
        os.close(ruleset)
    if config["seccomp"]:
        _filter_calls(os.uname().machine, os.getpid(), scratch is not None)
    return scratch


def watch_over_a_child() -> None:
    """Fork and return in the child; the parent only waits for the child and exits with its status.

    The first process of a PID namespace calls this, because it must not run the program itself: it ignores most
    signals, and all other processes die with it. It drops its capabilities but keeps its user, so that the process that
    started it may kill it.
    """
    _prctl("dumpable", _PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child == 0:
        return
    _drop_privileges(None, False)
    os.closerange(0, 1024)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _mount_scratch(config: Mapping[str, Any]) -> int:
    """Mount a file system in memory on the scratch directory, visible to this process only; return a descriptor of it.

    The size of the file system limits everything that is written, even to deleted files that are still open.
    """
    uid, gid = os.geteuid(), os.getegid()
    if not config["own_mounts"]:
        own_rights = uid == 0
        _check("unshare", int(_libc.unshare(_NEW_MOUNTS if own_rights else _NEW_MOUNTS | _NEW_USER)))
        if not own_rights:
            for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 (pathlib takes time to load)
                    file.write(line)
        # Make the root private, because otherwise the mount below would also appear outside.
        _check("mount", int(_libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE), None)))
    size, entries = config["bounded"]
    owner = (uid, gid) if config["user"] is None else (config["user"],) * 2
    options = f"size={size},nr_inodes={entries},mode=0700,uid={owner[0]},gid={owner[1]}".encode()
    path = os.fsencode(config["scratch"])
    _check("tmpfs", int(_libc.mount(b"tmpfs", path, b"tmpfs", ctypes.c_ulong(_NOSUID | _NODEV), options)))
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _set_limits(limits: Mapping[str, Any]) -> None:
    """Set this process's resource limits, never above its present hard limits."""
    # RLIMIT_CPU counts whole seconds, so round up. SIGXCPU comes at the soft limit, SIGKILL a second later.
    cpu_s = max(1, -(-int(limits["cpu_s"] * 1000) // 1000))
    new_limits = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_AS: (limits["memory_mib"] * _MEBIBYTE,) * 2,
        resource.RLIMIT_FSIZE: (limits["file_mib"] * _MEBIBYTE,) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_SIGPENDING: (256, 256),
        resource.RLIMIT_NPROC: (limits["processes"],) * 2,
        # The stack is large, because correct programs may recurse deeply.
        resource.RLIMIT_STACK: (64 * _MEBIBYTE,) * 2,
    }
    for limit, (soft, hard) in new_limits.items():
        ceiling = resource.getrlimit(limit)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(limit, (soft, hard))


def _drop_privileges(user: int | None, keeps_read: bool) -> None:
    """Switch to the user number `user`, which no other process has, and drop all capabilities.

    With `keeps_read`, the capability to read all files is kept, for an interpreter in a folder that only root may
    enter. Only Landlock restricts reading then.
    """
    if user is not None:
        if keeps_read:
            _prctl("keep capabilities", _PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    capabilities = 1 << _CAP_DAC_READ_SEARCH if keeps_read else 0
    # _LINUX_CAPABILITY_VERSION_3: two sets of three words, effective, permitted and inheritable.
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(struct.pack("=6I", capabilities, capabilities, 0, 0, 0, 0))
    _check("capset", int(_libc.capset(header, sets)))


def _ruleset(config: Mapping[str, Any]) -> int:
    """Build a Landlock ruleset: read below `readable`, write below `scratch`, no network, no signals to the outside."""
    abi = config["landlock"]
    # The 13 rights of version 1, and the rights that later versions added. Rights that are not listed are allowed.
    handled = (1 << 13) - 1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if abi >= since else 0
    # Version 4 added binding and connecting TCP; version 6 added abstract sockets, and signals to the outside.
    fields = [handled] + ([3] if abi >= 4 else []) + ([3] if abi >= 6 else [])
    attribute = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields), 8 * len(fields))
    ruleset = _syscall(_LANDLOCK_CREATE, attribute, ctypes.c_size_t(8 * len(fields)), ctypes.c_uint32(0))
    _check("landlock_create_ruleset", ruleset)
    # Do not grant the right to execute: no program is started after this, and mapping a library does not need it.
    read = _READ_FILE | _READ_DIR
    write = _WRITE_FILE | _REMOVE_DIR | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
    # Allow deletion only if the directory's size is bounded: a check of the directory cannot see the space of a deleted
    # file that is still open or mapped.
    write |= _REMOVE_FILE if config["bounded"] else 0
    _add_rules(ruleset, config["readable"], read)
    _add_rules(ruleset, config["devices"], _READ_FILE | _WRITE_FILE)
    _add_rules(ruleset, [config["scratch"]], (read | write) & handled)
    return ruleset


def _add_rules(ruleset: int, paths: Sequence[str], rights: int) -> None:
    """Add these rights for each path to a Landlock ruleset; paths that cannot be opened are skipped."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            granted = rights if os.path.isdir(path) else rights & _OF_FILES  # noqa: PTH112 (pathlib takes time to load)
            rule = ctypes.create_string_buffer(struct.pack("=Qi", granted, descriptor), 12)
            result = _syscall(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
            _check(f"landlock_add_rule: {path}", result)
        finally:
            os.close(descriptor)


def _filter_calls(machine: str, own_pid: int, bounded: bool) -> None:
    program = seccomp_program(machine, own_pid, bounded)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    argument = Program(len(program), code)
    result = _libc.prctl(ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(2), ctypes.byref(argument), 0, 0)
    _check("seccomp", int(result))


Instruction = tuple[int, int, int, int]


def seccomp_program(machine: str, own_pid: int, bounded: bool = True) -> list[Instruction]:
    """Return the filter as classic BPF: (code, jump if true, jump if false, operand).

    Args:
        machine: `x86_64` or `aarch64`.
        own_pid: the only process to which signals may be sent.
        bounded: whether the scratch directory has a bounded size. Otherwise calls are refused if they use space that
            the checks cannot see, or use it faster than the checks can notice.
    """
    column = 1 if machine == "x86_64" else 2
    number = _CALL_NUMBERS[machine]
    refused_calls = [int(n) for row in _REFUSED_CALLS.split(",") if (n := row.split()[column]) != "-"]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH_AT),
        # Check the architecture first: call numbers differ between architectures, and int 0x80 enters as i386.
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR_AT),
        # Calls of the x32 ABI have other numbers, which are not in the table.
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_ABOVE, 0, 1, _LAST_KNOWN),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for call, body in _argument_rules(own_pid, bounded).items():
        if call in number:
            program += [(_EQUAL, 0, len(body), number[call]), *body]
    for call_number in refused_calls:
        program += [(_EQUAL, 0, 1, call_number), _refuse()]
    return [*program, _permit()]


def _argument(index: int) -> Instruction:
    """Return the instruction that loads an argument's low 32 bits; the kernel takes all checked arguments as ints."""
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index)


def _refuse(error: int = _EPERM) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _permit() -> Instruction:
    return (_RETURN, 0, 0, _ALLOW)


def _allow_values(index: int, *values: int) -> list[Instruction]:
    """Return instructions that allow the call if the argument is one of `values`, and refuse it otherwise."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_argument(index), *tests, _refuse(), _permit()]


def _refuse_values(index: int, *values: int) -> list[Instruction]:
    """Return instructions that refuse the call if the argument is one of `values`, and allow it otherwise."""
    tests = [(_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
    return [_argument(index), *tests, _permit(), _refuse()]


def _argument_rules(own_pid: int, bounded: bool) -> dict[str, list[Instruction]]:
    """Return the filter's instructions for calls that are allowed or refused by their arguments, by name of call."""
    # Opening for reading with O_TRUNC truncates the file, but early versions of Landlock check only the right to read.
    refuse_truncation = [(_AND, 0, 0, os.O_ACCMODE | os.O_TRUNC), (_EQUAL, 0, 1, os.O_TRUNC), _refuse(), _permit()]
    # Rules for a scratch directory whose size is not bounded: they refuse calls that use space which a check of the
    # directory cannot see. Private mappings of files are allowed, because libraries need them.
    unbounded: dict[str, list[Instruction]] = {
        "fallocate": [_refuse(_EOPNOTSUPP)],
        "mmap": [
            _argument(3),
            (_AND, 0, 0, _MAP_TYPE | _MAP_ANONYMOUS),
            (_EQUAL, 3, 0, _MAP_PRIVATE),
            (_AND, 0, 0, _MAP_ANONYMOUS),
            (_EQUAL, 1, 0, _MAP_ANONYMOUS),
            _refuse(),
            _permit(),
        ],
    }
    refuse_unnamed: list[Instruction] = [(_AND, 0, 0, _TMPFILE), (_EQUAL, 0, 1, _TMPFILE), _refuse(_EOPNOTSUPP)]
    signals = _allow_values(0, own_pid)
    thread = [
        _argument(0),
        (_AND, 0, 0, _CLONE_THREAD | _CLONE_NEW),
        (_EQUAL, 1, 0, _CLONE_THREAD),
        _refuse(),
        _permit(),
    ]
    # asyncio needs a connected pair of stream sockets. Datagram pairs are refused, as they could send to other sockets.
    pair = [
        _argument(0),
        (_EQUAL, 1, 0, 1),
        _refuse(),
        _argument(1),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, 1),
        _refuse(),
        _permit(),
    ]
    return {
        "clone": thread,
        # The flags of clone3 are in memory, which a filter cannot read; libraries fall back to clone.
        "clone3": [_refuse(_ENOSYS)],
        "openat2": [_refuse(_ENOSYS)],
        **({} if bounded else unbounded),
        "open": [*([] if bounded else [_argument(1), *refuse_unnamed]), _argument(1), *refuse_truncation],
        "openat": [*([] if bounded else [_argument(2), *refuse_unnamed]), _argument(2), *refuse_truncation],
        "kill": signals,
        "tkill": signals,
        "tgkill": signals,
        "rt_sigqueueinfo": signals,
        "rt_tgsigqueueinfo": signals,
        "socketpair": pair,
        "fcntl": _refuse_values(1, *_FCNTL_REFUSED),
        "ioctl": _refuse_values(1, *_IOCTL_REFUSED),
        "prctl": _allow_values(0, *_PRCTL_ALLOWED),
        # Allow the call only for this process: otherwise limits of the user's other processes could be changed.
        "prlimit64": _allow_values(0, 0, own_pid),
        "sched_setaffinity": _allow_values(0, 0, own_pid),
    }
