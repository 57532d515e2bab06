"""A command and all that it starts, ended together: `guard.py` stands between it and the member's process."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.errors import UserError

_GUARD = Path(__file__).with_name("guard.py")


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
        return f"exit code {self.code}" if self.code >= 0 else f"killed by {signal.Signals(-self.code).name}"


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
        UserError: it cannot be started.
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
            [sys.executable, "-I", "-S", str(_GUARD)],
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
            raise UserError(f"command.line: {words[0]!r} cannot be started in {folder}: {said['failed']}")
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
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)
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
