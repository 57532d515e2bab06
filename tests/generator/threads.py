"""Fleets whose engines are threads of this process, to test the loss of engines without starting processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_scalerl.generator.fleet import transport
from lightning_scalerl.generator.fleet.server import ParentGoneError, Server
from lightning_scalerl.generator.fleet.wire import receive


class Threads:
    """Replaces `subprocess` in a fleet: a generator's server runs in a thread of this process.

    Args:
        monkeypatch: installs the replacement.
        most_s: longest time that a start waits for `may_start`. Tests clear this event to hold back restarts.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_s: float = 3.0) -> None:
        self.started: list[ThreadProcess] = []
        self.may_start = threading.Event()
        self.may_start.set()
        self.most_s = most_s
        names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
        monkeypatch.setattr(transport, "subprocess", SimpleNamespace(Popen=self._start, **names))

    def _start(self, command: Sequence[str], pass_fds: Sequence[int], **options: Any) -> ThreadProcess:
        self.started.append(ThreadProcess(Connection(os.dup(pass_fds[0])), self))
        return self.started[-1]


class ThreadProcess:
    """Stands for one process. Its exit status becomes visible a few polls after its connection has closed."""

    pid = 0

    def __init__(self, connection: Connection, threads: Threads) -> None:
        self._connection, self._threads = connection, threads
        self._status: int | None = None
        self._polls_left = 3
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(ParentGoneError, EOFError, OSError):
            (blueprint,) = receive(self._connection)
            generator = blueprint.build()
            self._threads.may_start.wait(self._threads.most_s)
            Server(self._connection, generator).serve()

    def die(self, status: int = -signal.SIGKILL) -> None:
        """End as if the operating system had killed the process."""
        self._status = status
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def poll(self) -> int | None:
        self._polls_left -= self._status is not None
        return self._status if self._polls_left < 0 else None

    def kill(self) -> None:
        if self._status is None:
            self.die()

    def wait(self, timeout: float | None = None) -> int | None:
        self._thread.join(timeout)
        return self._status
