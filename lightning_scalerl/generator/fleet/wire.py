"""Messages between the trainer and an engine, over a socket pair that no other process can reach."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

_log = logging.getLogger(__name__)


def send(connection: Connection, message: Any) -> None:
    """Send a pickled message. `Connection.send` would share tensor memory, which is lost if its process is killed."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive and unpickle the next message.

    Raises:
        EOFError: the other end has closed.
    """
    return pickle.loads(connection.recv_bytes())


class Channel:
    """Connection to an engine, with one thread per direction.

    The threads keep an engine that does not read, or that stops in the middle of a message, from blocking this process.

    Args:
        connection: this process's end.
        arrival: set when a message has arrived or the connection has ended.

    Attributes:
        heard_at: monotonic time of the last message from the other end.
        closed_at: monotonic time at which the connection ended; None while it is open.
    """

    def __init__(self, connection: Connection, arrival: threading.Event) -> None:
        self._connection, self._arrival = connection, arrival
        self._out: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._in: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.heard_at = time.monotonic()
        self.closed_at: float | None = None
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._in.put(receive(self._connection))
                self.heard_at = time.monotonic()
                self._arrival.set()
        except (EOFError, OSError):
            pass
        except Exception as error:
            _log.warning("generator: a message cannot be read (%s: %s)", type(error).__name__, error)
        self.closed_at = time.monotonic()
        self._arrival.set()

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._out.get()) is not None:
                send(self._connection, message)

    def send(self, *message: Any) -> None:
        """Queue a message for sending; it is dropped if the other end has closed."""
        self._out.put(message)

    def received(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that have arrived."""
        with suppress(Empty):
            while True:
                yield self._in.get_nowait()

    def close(self) -> None:
        """Close the connection; no more messages are sent or received."""
        self._out.put(None)
        # Shut down first, which ends the reading thread's wait. After a close alone, the descriptor number could
        # already belong to another file when the thread reads.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as channel_socket:
            channel_socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._connection.close()
