"""Listening end of an engine: trainers come in one run at a time, and its generator is kept from one to the next.

`python -m lightning_scalerl.generator.server --listen HOST:PORT` runs it.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.announced import Announcement, line_of
from lightning_scalerl.generator.base import Generator, Reusable
from lightning_scalerl.generator.server import (
    Blueprint,
    ParentGoneError,
    Server,
    failure,
    hear,
    leave_signals_to_the_trainer,
)
from lightning_scalerl.generator.weights import Received
from lightning_scalerl.generator.wire import TOKEN, answer, send, token_here
from sweeps.run import slurm_job


class Door:
    """Listening end of an engine: trainers that know the token come in, one run at a time.

    A run that comes again has lost the connection it had, which is then closed on this side as well.

    Args:
        host, port: to listen at.
        token: that a trainer must know.

    Raises:
        ConfigurationError: there is no token, or nobody can listen there.
    """

    def __init__(self, host: str, port: int, token: bytes) -> None:
        if not token:
            raise ConfigurationError(
                f"engine: {TOKEN} is not set; whoever can connect could run code here, so give the run and its engines "
                "one secret, such as that of: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
        try:
            self._listening = socket.create_server((host, port), backlog=16)
        except OSError as error:
            raise ConfigurationError(f"engine: cannot listen on {host}:{port} ({error})") from error
        self.port: int = self._listening.getsockname()[1]
        self._token = token
        self._lock = threading.Lock()
        self._inside: Connection | None = None
        self._run: str | None = None
        self._waiting: SimpleQueue[Connection] = SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            opened, _ = self._listening.accept()
            # In a thread each: one that says nothing holds up nobody.
            threading.Thread(target=self._let_in, args=(Connection(opened.detach()),), daemon=True).start()

    def _let_in(self, connection: Connection) -> None:
        caller = answer(connection, self._token, self._run)
        if caller is None:
            return
        with self._lock:
            if self._run not in (None, caller.run):  # two runs at the same moment
                connection.close()
                return
            self._run = caller.run
            if self._inside is not None:
                with suppress(OSError), socket.socket(fileno=os.dup(self._inside.fileno())) as before:
                    before.shutdown(socket.SHUT_RDWR)
            self._waiting.put(connection)

    def next(self, seconds: float | None = None) -> Connection | None:
        """Return the connection of the next trainer, or None if none comes within so many seconds."""
        with suppress(Empty):
            connection = self._waiting.get(timeout=seconds)
            with self._lock:
                # Only the newest of several is anybody's still.
                while not self._waiting.empty():
                    connection.close()
                    connection = self._waiting.get()
                self._inside = connection
            return connection
        return None

    def leave(self) -> None:
        """Close the connection of the trainer that is inside; another run may come."""
        with self._lock:
            if self._inside is not None:
                self._inside.close()
            self._inside = None
            if self._waiting.empty():
                self._run = None


class Engine:
    """Generator of a listening process, kept from one trainer's connection to the next.

    Args:
        device: where its model is put.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._generator: Generator | None = None
        self._made_of = b""
        self._received = Received()

    def work_for(self, connection: Connection) -> bool:
        """Work for one trainer until its connection ends; return whether it has said that it needs no more."""
        try:
            (blueprint,) = hear(connection)
            generator = self._generator_of(replace(blueprint, device=self._device))
            Server(connection, generator, self._received).serve()
            return True
        except ParentGoneError:
            pass
        except Exception as error:
            traceback.print_exc()
            self._discard()
            with suppress(OSError):
                send(connection, failure(error))
        return False

    def _generator_of(self, blueprint: Blueprint) -> Generator:
        """Return the generator that a blueprint asks for, with nothing in flight."""
        made_of = pickle.dumps(blueprint)
        if self._generator is not None and made_of == self._made_of:
            cast(Reusable, self._generator).clear()
            return self._generator
        self._discard()
        self._generator, self._made_of = blueprint.build(), made_of
        return self._generator

    def _discard(self) -> None:
        if self._generator is not None:
            with suppress(Exception):
                self._generator.close()
        self._generator, self._made_of = None, b""


def listen(host: str, port: int, device: str, once_s: float | None, announce: Path | None = None) -> int:
    """Work for whoever connects, one run after the other.

    Args:
        host, port: to listen at; port 0 for any that is free.
        device: of the generator.
        once_s: end when the first run has gone for so many seconds, or none has come by then; None to stay.
        announce: file for runs that attach to this engine, with a token that is made for it.

    Raises:
        ConfigurationError: nobody can listen there, or others could read the file.
    """
    if announce is not None:
        return _listen_announced(host, port, device, once_s, Announcement(announce))
    if once_s is not None:
        leave_signals_to_the_trainer()
    door = Door(host, port, token_here())
    print(line_of(host, door.port, device), flush=True)
    return _work(door, device, once_s)


def _listen_announced(host: str, port: int, device: str, once_s: float | None, announcement: Announcement) -> int:
    """Work for runs that find this engine in a file, which is there for as long as it is."""
    signal.signal(signal.SIGTERM, _end)  # its job is its own: a scheduler that ends it means this process
    token = secrets.token_hex(32)  # of each start: a file that is out of date leads to no other engine
    door = Door(host, port, token.encode())
    # On all addresses of its node: by the name under which others know that.
    line = line_of(slurm_job.node_name() if host in ("", "0.0.0.0") else host, door.port, device)
    try:
        announcement.write(line, token)
        print(f"{line}, announced in {announcement.path}", flush=True)
        return _work(door, device, once_s)
    finally:
        announcement.remove(line, token)


def _end(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: the file is to be removed
    sys.exit(128 + number)


def _work(door: Door, device: str, once_s: float | None) -> int:
    engine = Engine(device)
    while (connection := door.next(once_s)) is not None:
        done = engine.work_for(connection)
        door.leave()
        if done and once_s is not None:
            break
    return 0
