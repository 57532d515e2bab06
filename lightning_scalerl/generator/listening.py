"""Listening end of an engine: trainers come in one run at a time, and its generator is kept from one to the next.

`python -m lightning_scalerl.generator.server --listen HOST:PORT` runs it.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import cast

from lightning_scalerl.checks import ConfigurationError
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


def listen(host: str, port: int, device: str, once_s: float | None) -> int:
    """Work for whoever connects, one run after the other.

    Args:
        host, port: to listen at; port 0 for any that is free.
        device: of the generator.
        once_s: end when the first run has gone for so many seconds, or none has come by then; None to stay.
    """
    if once_s is not None:
        leave_signals_to_the_trainer()
    door, engine = Door(host, port, token_here()), Engine(device)
    print(f"engine: listening on {host}:{door.port} (device {device})", flush=True)
    while (connection := door.next(once_s)) is not None:
        done = engine.work_for(connection)
        door.leave()
        if done and once_s is not None:
            break
    return 0
