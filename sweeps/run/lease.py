"""A lease on a directory: of two processes that want to write there, one does, on whatever machines they run.

Two mechanisms together. An operating-system lock (`flock`) is instant and dies with its holder, but many cluster file
systems keep it to one machine. So the holder also beats: it rewrites a small file every few seconds, and a contender
from elsewhere takes over only when that file has not changed for `expiry_s` of its own clock (no clocks are compared).
The holder checks, before each durable write, that the file still names it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from sweeps.errors import UserError, require

BEAT_S = 5.0
EXPIRY_S = 30.0
_READS, _READ_PAUSE_S = 20, 0.25


def here() -> str:
    """This machine: as SLURM calls it, for a container may have a name of its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


class LeaseLostError(Exception):
    """Another process has taken over what this one was writing; nothing more may be written."""

    # Read by the journal's writer: not even the failure is recorded, the journal belongs to the other now.
    leave_journal = True


class LeaseHeldError(UserError):
    """Another process holds the lease; the message says which."""


class Lease:
    """The right to write in a directory.

    Args:
        directory: created if missing; holds `.<name>.lock` and `.<name>.json`.
        name: of the lease.
        owner: facts about the holder, shown to contenders (a job id, say).
        beat_s: seconds between beats.
        expiry_s: seconds without a beat after which a holder elsewhere counts as gone; several beats.
    """

    def __init__(
        self,
        directory: Path,
        name: str = "writer",
        owner: dict[str, Any] | None = None,
        beat_s: float = BEAT_S,
        expiry_s: float = EXPIRY_S,
    ) -> None:
        _need_filelock(directory)
        from filelock import FileLock

        self._directory = directory
        self._file = directory / f".{name}.json"
        self._flock = FileLock(directory / f".{name}.lock", thread_local=False)
        self._token = uuid.uuid4().hex
        self._facts = {"host": here(), "pid": os.getpid(), **(owner or {}), "token": self._token}
        self._beat_s = beat_s
        self._expiry_s = expiry_s
        self._beats = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lost = False

    def acquire(self, wait_s: float | None = 0.0, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait for the lease.

        Args:
            wait_s: at most so long (None: for ever); a holder that died elsewhere still costs `expiry_s`.
            give_up: asked twice a second; True ends the waiting.

        Raises:
            LeaseHeldError: the holder is alive, and the waiting is over.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        deadline = None if wait_s is None else time.monotonic() + wait_s
        told = False
        while not self._try(deadline, give_up):
            if wait_s is None and not told:
                print(f"waiting: {self.holder()} is at work in {self._directory}", flush=True)
                told = True
            if give_up() or (deadline is not None and time.monotonic() >= deadline):
                raise LeaseHeldError(f"{self._directory}: {self.holder()} is at work here")
            time.sleep(0.5)
        try:
            self._beat()
        except OSError:
            self._flock.release()
            raise
        self._thread = threading.Thread(target=self._keep, daemon=True, name=f"lease {self._file.name}")
        self._thread.start()

    def _try(self, deadline: float | None, give_up: Callable[[], bool]) -> bool:
        from filelock import Timeout

        try:
            self._flock.acquire(timeout=0)
        except Timeout:
            return False
        last = self._read()
        if not last or last.get("released") or last.get("host") == self._facts["host"]:
            return True  # on one machine the operating system's lock is proof enough
        # Its lock may not reach this machine: watch for a sign of life.
        begin = time.monotonic()
        while time.monotonic() - begin < self._expiry_s:
            if give_up():
                break
            time.sleep(min(0.5, self._beat_s))
            now = self._read()
            if now.get("released"):
                return True
            if now != last:
                break
        else:
            return True
        self._flock.release()
        return False

    def check(self) -> None:
        """Before each durable write.

        Raises:
            LeaseLostError: another process has taken over.
        """
        for _ in range(_READS):
            facts = self._read()
            if not facts.get("unreadable"):
                break
            time.sleep(_READ_PAUSE_S)  # a file server that is away for a moment
        if self._lost or facts.get("token") != self._token:
            self._lost = self._lost or not facts.get("unreadable")
            raise LeaseLostError(f"{self._directory}: taken over by {self.holder()}, or not to be read")

    def holder(self) -> str:
        """Who holds the lease, for people."""
        facts = self._read()
        if not facts:
            return "another process"
        job = f"job {facts['job']}, " if facts.get("job") else ""
        return f"{job}process {facts.get('pid')} on {facts.get('host')}"

    def release(self) -> None:
        """Let the next one in at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        try:
            if not self._lost and self._read().get("token") == self._token:
                self._write({**self._facts, "released": True})
        except OSError:
            pass  # a full disk: the next one waits for the expiry
        self._flock.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._stop.wait(self._beat_s):
            try:
                facts = self._read()
                if facts.get("unreadable"):
                    continue
                if facts.get("token") != self._token:
                    self._lost = True
                    return
                self._beat()
            except OSError:
                continue  # a full disk or a file server that is away: the next beat may come through

    def _beat(self) -> None:
        self._beats += 1
        self._write({**self._facts, "beat": self._beats})

    def _write(self, facts: dict[str, Any]) -> None:
        unfinished = self._file.with_name(f"{self._file.name}.{self._token[:8]}")
        try:
            unfinished.write_text(json.dumps(facts))
            unfinished.replace(self._file)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def _read(self) -> dict[str, Any]:
        try:
            facts = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            return {"token": None, "unreadable": True}  # there is one: not ours as far as we know, and not free
        return facts if isinstance(facts, dict) else {}


def alive(directory: Path, name: str = "writer") -> dict[str, Any] | None:
    """The facts of a lease that was not released, or None; whether its holder lives is not said."""
    try:
        facts = json.loads((directory / f".{name}.json").read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and not facts.get("released") else None


def held(directory: Path, name: str, expiry_s: float = EXPIRY_S) -> bool:
    """Whether somebody holds a lease, as far as one can tell without waiting."""
    facts = alive(directory, name)
    if facts is None:
        return False
    if facts.get("host") == here():
        _need_filelock(directory)
        from filelock import FileLock, Timeout

        lock = FileLock(directory / f".{name}.lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, OSError):
            return True
        lock.release()
        return False
    try:
        return time.time() - (directory / f".{name}.json").stat().st_mtime < 2 * expiry_s
    except OSError:
        return False


def _need_filelock(directory: Path) -> None:
    """Only whoever writes or looks at a study needs it: curves are fitted without."""
    require("filelock", str(directory))
