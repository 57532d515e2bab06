"""Lease on a directory: the right of one process, among all machines, to write there.

A lease combines two mechanisms. An operating-system lock (`flock`) works at once and ends with the process that holds
it. But on many cluster file systems such locks work only within one machine, and some file systems have none (Lustre
without `-o flock`, NFS without lockd). So the holder of a lease also sends heartbeats: every few seconds it rewrites a
small file. Another process takes over only if that file has not changed for `expiry_s` by its own clock, so clocks of
two machines are never compared.

Each holder has a numbered term. If several processes want to take over, the next term goes to the one that creates the
term's claim file: a file system lets only one process create a file. Before each durable write, the holder checks that
the lease's file still names it as the holder.

`filelock.SoftFileLease` (4.2) is not enough. It takes over by exchanging two names (`RENAME_EXCHANGE`), which NFS
refuses, so on NFS the lease of a dead holder would be held until its file is removed by hand.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from sweeps.errors import UserError, describe_os_error
from sweeps.run.files import parse_json
from sweeps.run.job import node_name

_log = logging.getLogger(__name__)

BEAT_S = 5.0
EXPIRY_S = 30.0
ANNOUNCED_S = 60.0  # a wait that may be longer is announced on stdout
_READS, _READ_PAUSE_S = 20, 0.25
_CHECKS = 5  # number of times that `held_leases` looks for heartbeats
# Errors of a file system that has no flock, or that cannot provide one at the moment.
_NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})
# Errors that mean that another process has the lock.
_LOCK_HELD = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES})

# On Linux, a clock that also runs while the machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _now() -> float:
    return time.clock_gettime(_CLOCK)


class LeaseLostError(Exception):
    """Error: another process has taken over the lease, so this process must not write any more."""

    # Tells the journal's writer not even to record this failure, because the journal now belongs to the other process.
    leave_journal = True


class LeaseHeldError(UserError):
    """Error: another process holds the lease. The message names it."""


class _Flock:
    """Operating-system lock on a file, if the file system has such locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool | None:
        """Try to lock without waiting.

        Returns:
            True if this process now has the lock, False if another has it, None if the file system has no locks.

        Raises:
            OSError: an error of the file server.
            UserError: the path of the lock file is a folder.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except IsADirectoryError as error:
            raise UserError(f"{describe_os_error(error)}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = os.fstat(descriptor).st_ino == self._path.stat().st_ino
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_FLOCK:
                _log.info("%s: this file system has no locks (%s); heartbeats alone guard it", self._path, error)
                return None
            if error.errno in _LOCK_HELD or isinstance(error, FileNotFoundError):
                return False
            raise
        if not current:  # the lock file was moved or replaced after it was opened
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def taken(self) -> bool | None:
        """Return whether some process has the lock; None if the file system has no locks. The lock is not kept."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return None if error.errno in _NO_FLOCK else True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Unlock the file, then close it. Closing alone would not unlock it if a child has inherited the descriptor."""
        if self._descriptor is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close()

    def close(self) -> None:
        """Close the file without unlocking it, in a child process: unlocking would also release its parent's lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Lease:
    """Lease on a directory: the exclusive right to write there, renewed by heartbeats.

    Args:
        directory: folder to lease, created if missing. The lease writes `.<name>.lock` and `.<name>.json` into it.
        name: name of the lease.
        owner: facts about the holder to show to other processes, such as a job id.
        beat_s: seconds between heartbeats.
        expiry_s: seconds without a heartbeat after which a holder on another machine counts as dead; several times
            `beat_s`.
        facts: called at each heartbeat; returns further facts to write. Its exceptions are ignored.
        trusted_s: seconds during which a successful check is not repeated; less than `beat_s`. This is safe, because
            the lease changes hands only after several missed heartbeats. After a suspension the process checks again,
            because the clock runs on meanwhile.
    """

    def __init__(
        self,
        directory: Path,
        name: str = "writer",
        owner: Mapping[str, Any] | None = None,
        beat_s: float = BEAT_S,
        expiry_s: float = EXPIRY_S,
        facts: Callable[[], Mapping[str, Any]] | None = None,
        trusted_s: float = 0.0,
    ) -> None:
        self._directory = directory
        self._file = directory / f".{name}.json"
        self._flock = _Flock(directory / f".{name}.lock")
        self._token = uuid.uuid4().hex
        self._own_facts = {
            "host": node_name(),
            "pid": os.getpid(),
            **_this_process(),
            **(owner or {}),
            "token": self._token,
        }
        self._further_facts = facts
        self._further_facts_failed = False
        self._beat_s = beat_s
        self._expiry_s = expiry_s
        self._trusted_s = trusted_s
        self._beats = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._descriptor: int | None = None
        self._length = 0
        self._last_check = self._last_beat = float("-inf")
        self._lost = False
        _leases.add(self)

    def acquire(self, wait_s: float | None = 0.0, give_up: Callable[[], bool] = lambda: False) -> None:
        """Acquire the lease and start the heartbeat thread. If another process holds it, wait.

        Args:
            wait_s: longest wait in seconds for a holder that is alive; None for no limit. It can take up to `expiry_s`
                more to find out whether a holder on another machine is alive.
            give_up: called twice per second; the wait ends if it returns True.

        Raises:
            LeaseHeldError: the holder is alive and the wait is over.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        printed = False
        while not self._try(give_up):
            if not printed and (wait_s is None or wait_s > ANNOUNCED_S):
                most = "" if wait_s is None else f" for at most {wait_s:.0f} s"
                print(f"waiting{most}: {self.holder()} is at work in {self._directory}", flush=True)
                printed = True
            if give_up() or (deadline is not None and time.monotonic() >= deadline):
                raise LeaseHeldError(f"{self._directory}: {self.holder()} is at work here")
            time.sleep(0.5)
        self._stop.clear()
        self._thread = threading.Thread(target=self._send_heartbeats, daemon=True, name=f"lease {self._file.name}")
        self._thread.start()

    def _try(self, give_up: Callable[[], bool]) -> bool:
        """Try once to acquire the lease, watching heartbeats if the lock is inconclusive; return whether taken."""
        locked = self._flock.acquire()
        if locked is False:
            return False
        self._own_facts["flock"] = locked is True
        taken = False
        try:
            state = self._read_state()
            # The holder's lock may be invisible on this machine, so watch for a heartbeat.
            free = state if self._is_free(*state) else self._await_heartbeat(state, give_up)
            taken = free is not None and self._take(*free)
            return taken
        finally:
            if not taken:
                self._flock.release()

    def _read_state(self) -> tuple[dict[str, Any], int]:
        """Return the facts in the lease's file, and the latest term that any process has claimed (0 if none)."""
        facts = self._read()
        return facts, max([_term(facts), *self._claims()])

    def _claim(self, term: int) -> Path:
        return self._file.with_name(f"{self._file.name}.term{term}")

    def _claims(self) -> list[int]:
        """Return the terms that have a claim file: of holders, alive or dead, and of processes that are taking over."""
        terms = [path.name.rpartition("term")[2] for path in self._directory.glob(f"{self._file.name}.term*")]
        return [int(term) for term in terms if term.isdecimal()]

    def _is_free(self, facts: Mapping[str, Any], claims: int) -> bool:
        """Return whether the lease is free for certain, without watching for a heartbeat."""
        if claims > _term(facts):
            return False  # a process is taking the lease now, or died while doing so
        if not facts or facts.get("released"):
            return True
        if not _same_machine(facts):
            return False
        # The holder is or was on this machine. If both processes could use the operating system's lock, the lease is
        # free, because this process now has the lock. Otherwise the lease is free only if the holder's process has
        # ended.
        return (self._own_facts["flock"] and facts.get("flock", True)) or _ended(facts)

    def _await_heartbeat(
        self, first_state: tuple[dict[str, Any], int], give_up: Callable[[], bool]
    ) -> tuple[dict[str, Any], int] | None:
        """Watch the lease for up to `expiry_s`.

        Returns:
            The state (see `_read_state`) if the lease was released or there was no heartbeat; None after a heartbeat,
            or if `give_up` returned True.
        """
        begin, until = time.monotonic(), time.time() + self._expiry_s
        printed = False
        while time.monotonic() - begin < self._expiry_s:
            if give_up():
                return None
            # A holder that is alive would have sent a heartbeat by now.
            if not printed and time.monotonic() - begin > 2 * self._beat_s:
                who = self.holder() if first_state[1] <= _term(first_state[0]) else "a process that was taking it over"
                print(
                    f"waiting until {datetime.fromtimestamp(until):%H:%M:%S}: {self._directory} was not "
                    f"released by {who}; it is free then, unless a heartbeat arrives",
                    flush=True,
                )
                printed = True
            time.sleep(min(0.5, self._beat_s))
            state = self._read_state()
            if self._is_free(*state):
                return state
            if state != first_state:
                return None
        return first_state

    def _take(self, facts: dict[str, Any], claims: int) -> bool:
        """Try to create the claim file of the next term, as only one process can; return whether it was taken."""
        begin = time.monotonic()
        term = claims + 1
        try:
            os.close(os.open(self._claim(term), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        taken = False
        try:
            # The claim does not count if the facts have changed: claim files of past terms are removed, so this process
            # may have created a past one again. Nor does it count if this took too long.
            if self._read() == facts and time.monotonic() - begin <= self._expiry_s / 2:
                self._own_facts["term"] = term
                self._replace_file()
                # This process may have been suspended here, and another may have taken over meanwhile: a later claim
                # wins.
                taken = max(self._claims(), default=term) <= term
            return taken
        finally:
            if not taken:
                self.close()
            for old_term in [old_term for old_term in self._claims() if old_term < term] if taken else [term]:
                with suppress(OSError):
                    self._claim(old_term).unlink(missing_ok=True)

    def check(self) -> None:
        """Verify that this process still holds the lease; call it before each durable write.

        Raises:
            LeaseLostError: another process has taken over.
        """
        now = _now()
        beats_arrive = now - self._last_beat < self._expiry_s / 2
        if not self._lost and beats_arrive and now - self._last_check < self._trusted_s:
            return
        for _ in range(_READS):
            facts = self._read()
            if not facts.get("unreadable"):
                break
            time.sleep(_READ_PAUSE_S)  # the file server may be unavailable for a moment
        if self._lost or facts.get("token") != self._token:
            self._lost = self._lost or not facts.get("unreadable")
            if not self._file.exists():
                raise LeaseLostError(
                    f"{self._directory}: renamed or removed while this process was at work in it, which therefore "
                    "stops; give the command again, with the new place, to go on there"
                )
            raise LeaseLostError(f"{self._directory}: taken over by {self.holder()}, or not to be read")
        self._last_check = now

    def holder(self) -> str:
        """Describe the lease's holder: job, process and host."""
        facts = self._read()
        if not facts:
            return "another process"
        job = f"job {facts['job']}, " if facts.get("job") else ""
        return f"{job}process {facts.get('pid')} on {facts.get('host')}"

    def release(self) -> None:
        """Release the lease, so that another process can acquire it immediately."""
        # Stop the heartbeats first: a heartbeat after the release would take the lease back.
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._descriptor is not None:
            try:
                is_holder = self._read().get("token") == self._token
                self._write({**self._own_facts, "released": True})
                if is_holder:
                    self._claim(self._own_facts["term"]).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s: not released (%s); the next holder waits until it expires", self._file, error)
        self.close()
        self._flock.release()

    def close(self) -> None:
        """Close the lease's file, but leave the lease held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _send_heartbeats(self) -> None:
        failing = False
        while not self._stop.wait(self._beat_s):
            try:
                self._send_heartbeat()
                failing = False
            except OSError as error:  # disk full or file server unavailable: the next heartbeat may succeed
                if not failing:
                    _log.warning(
                        "%s: heartbeat not written (%s); trying again until the lease expires", self._file, error
                    )
                failing = True

    def _send_heartbeat(self) -> None:
        self._beats += 1
        facts = {**self._own_facts, "beat": self._beats}
        try:
            self._write({**(self._further_facts() if self._further_facts is not None else {}), **facts})
        except OSError:
            raise
        except Exception as error:  # without further facts the heartbeat must be sent nevertheless
            if not self._further_facts_failed:
                _log.warning("%s: the heartbeat was written without the run's facts (%r)", self._file, error)
            self._further_facts_failed = True
            self._write(facts)

    def _replace_file(self) -> None:
        unfinished = self._file.with_name(f"{self._file.name}.{self._token[:8]}")
        self.close()
        self._descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            self._length = 0
            self._beats += 1
            self._write({**self._own_facts, "beat": self._beats})
            unfinished.replace(self._file)
        except OSError:
            self.close()
            unfinished.unlink(missing_ok=True)
            raise

    def _write(self, facts: Mapping[str, Any]) -> None:
        """Write facts by file descriptor, so that the file of a process that has taken over is not changed."""
        assert self._descriptor is not None
        now = _now()
        # Overwrite in place, padded with spaces so that nothing remains of a longer text.
        raw = json.dumps(facts).encode().ljust(self._length)
        if os.pwrite(self._descriptor, raw, 0) < len(raw):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
        self._length = len(raw)
        os.fsync(self._descriptor)  # makes the change visible on other machines
        self._last_beat = now

    def _read(self) -> dict[str, Any]:
        try:
            facts = parse_json(self._file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return {"token": None, "unreadable": True}  # the file exists, so the lease is not free
        return facts if isinstance(facts, dict) else {}


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _close_inherited_leases() -> None:
    """Close inherited leases in a forked child process, which must not keep the locks if it outlives its parent."""
    for lease in list(_leases):
        lease.close()
        lease._flock.close()


os.register_at_fork(after_in_child=_close_inherited_leases)


def holder_facts(directory: Path, name: str = "writer") -> dict[str, Any] | None:
    """Return the facts in a lease's file, even if the holder is dead; None if there is no lease or it was released."""
    for _ in range(3):
        try:
            facts = parse_json((directory / f".{name}.json").read_bytes())
        except OSError:
            return None
        except ValueError:
            time.sleep(0.01)  # the file was being rewritten
            continue
        return facts if isinstance(facts, dict) and not facts.get("released") else None
    return None


def heartbeat_time(directory: Path, name: str = "writer") -> float:
    """Return the time of the last heartbeat, in seconds by the file system's clock; 0 if there is no lease."""
    try:
        return (directory / f".{name}.json").stat().st_mtime
    except OSError:
        return 0.0


def is_held(directory: Path, name: str) -> bool | None:
    """Return whether a live process holds a lease; None if only heartbeats can show it (see `held_leases`)."""
    facts = holder_facts(directory, name)
    if facts is None:
        return False
    if not _same_machine(facts):
        return None
    taken = _Flock(directory / f".{name}.lock").taken() if facts.get("flock", True) else None
    return False if taken is None and _ended(facts) else taken


def held_leases(
    directories: Iterable[Path], name: str, watch_s: float, sleep: Callable[[float], None] = time.sleep
) -> set[Path]:
    """Return the directories whose lease a live process holds. Watch for heartbeats where nothing else shows it.

    The age of a lease's file is not used, because clocks of two machines may differ.

    Args:
        directories: folders that may be leased.
        name: name of the lease.
        watch_s: longest time to watch, in seconds; at least two intervals between heartbeats.
        sleep: called with seconds to wait.
    """
    states = {directory: is_held(directory, name) for directory in directories}
    facts_before = {directory: holder_facts(directory, name) for directory, taken in states.items() if taken is None}
    held_directories = {directory for directory, taken in states.items() if taken}
    for _ in range(_CHECKS):
        if not facts_before.keys() - held_directories:
            break
        sleep(watch_s / _CHECKS)
        held_directories |= {
            directory for directory, facts in facts_before.items() if holder_facts(directory, name) not in (None, facts)
        }
    return held_directories


def _term(facts: Mapping[str, Any]) -> int:
    """Return the term in a lease's facts; 0 if there is no valid one."""
    term = facts.get("term")
    return term if isinstance(term, int) and term > 0 else 0


def _this_process() -> dict[str, Any]:
    """Return boot id, pid namespace and start time. They distinguish this process from others with the same pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "pids": str(Path("/proc/self/ns/pid").readlink()), "start": _stat(os.getpid())[1]}
    except (OSError, IndexError):
        return {}


def _stat(pid: int) -> tuple[str, str]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _same_machine(facts: Mapping[str, Any]) -> bool:
    """Return whether a holder is, or since the last boot was, on this machine."""
    boot = _this_process().get("boot")
    # Facts written by earlier versions have no boot id.
    return facts.get("host") == node_name() and boot == facts.get("boot", boot)


def _ended(facts: Mapping[str, Any]) -> bool:
    """Return whether a holder's process on this machine has ended; False if it is in another pid namespace."""
    own, pid = _this_process(), facts.get("pid")
    if not own or own["pids"] != facts.get("pids") or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
        state, start = _stat(pid)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, IndexError):
        return False
    return state in "ZX" or start != facts.get("start")
