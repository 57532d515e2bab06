"""Messages between the trainer and an engine, over a pair of sockets that nobody else can reach."""

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
    """Send a pickled message; `Connection.send` would share tensors' memory, which is lost with a killed process."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive and unpickle the next message.

    Raises:
        EOFError: the other end is gone.
    """
    return pickle.loads(connection.recv_bytes())


class Line:
    """Connection to an engine, with a thread for each direction.

    So neither an engine that does not read nor one that stops in the middle of a message can block this process.

    Args:
        connection: this process's end.
        news: set when a message has arrived or the connection has ended.
    """

    def __init__(self, connection: Connection, news: threading.Event) -> None:
        self._connection, self._news = connection, news
        self._out: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._in: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.heard = time.monotonic()
        self.gone_at: float | None = None
        for work in (self._read, self._write):
            threading.Thread(target=work, daemon=True).start()

    def _read(self) -> None:
        """Receive messages until the other end is gone."""
        try:
            while True:
                self._in.put(receive(self._connection))
                self.heard = time.monotonic()
                self._news.set()
        except (EOFError, OSError):
            pass
        except Exception as error:
            _log.warning("generator: a message cannot be read (%s: %s)", type(error).__name__, error)
        self.gone_at = time.monotonic()
        self._news.set()

    def _write(self) -> None:
        """Send what is queued."""
        with suppress(OSError):
            while (message := self._out.get()) is not None:
                send(self._connection, message)

    def tell(self, *message: Any) -> None:
        """Queue a message for sending; it is dropped if the other end is gone."""
        self._out.put(message)

    def said(self) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that have arrived."""
        with suppress(Empty):
            while True:
                yield self._in.get_nowait()

    def close(self) -> None:
        """Close the connection; nothing more is sent or heard."""
        self._out.put(None)
        # Ends the other thread's wait; closed alone, the number could be another file's by the time it reads.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._connection.close()
