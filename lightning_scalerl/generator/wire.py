"""Connections between trainer and engines: messages, time limits on them, and who may speak at all.

A child of this node has a pair of sockets that nobody else can reach. Over TCP both sides first show that they know
the token (HMAC, as `multiprocessing.connection` does it), then say in plain JSON what they are; only what comes after
that is unpickled. What is sent is authenticated once and not encrypted: it belongs on a network of one's own.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import platform
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import Empty, SimpleQueue
from typing import Any

import lightning_scalerl
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.generator.weights import Published

_log = logging.getLogger(__name__)

TOKEN = "SCALERL_ENGINE_TOKEN"
# Longest time that either side waits for the other's next words before work begins.
HANDSHAKE_S = 5.0
# Waits between two attempts to connect.
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
TAKEN = "it works for another run; give each run engines of its own"
# Longest greeting, in bytes.
GREETING = 4096


class RefusedError(ConfigurationError):
    """Raised when the other side will not talk to us, now or later: its token, its version, or its owner."""


class OtherTokenError(RefusedError):
    """Raised when the other side has another token; it may be another engine than was meant."""


class TakenError(RefusedError):
    """Raised when an engine works for another run; one that has just ended may be about to leave it."""


def send(connection: Connection, message: Any) -> None:
    """Send a pickled message; `Connection.send` would share tensors' memory, which is lost with a killed process."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive and unpickle the next message.

    Raises:
        EOFError: the other end is gone.
    """
    return pickle.loads(connection.recv_bytes())


def token_here() -> bytes:
    """Return the token that this process was given; empty without one."""
    return os.environ.get(TOKEN, "").encode()


# --- over TCP --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """The trainer's side of a connection: which run it is, and its limit on silence."""

    run: str
    silence_s: float


def versions() -> dict[str, str]:
    """Return what has to be the same on both sides for them to understand each other."""
    major, minor, _ = platform.python_version_tuple()
    return {"lightning-scalerl": lightning_scalerl.__version__, "python": f"{major}.{minor}"}


def limit_silence(connection: Connection, seconds: float) -> None:
    """End the connection when what was sent is not acknowledged for so long.

    The kernel does it: a peer whose network is gone sends no word of its end, and a heartbeat alone would only fill
    the socket's buffer.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # For who only waits: in the middle of weights, an engine says nothing that could stay unacknowledged.
        for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, option):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), max(1, min(3600, round(seconds / 3))))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds)))


def _limit_reads(connection: Connection, seconds: float) -> None:
    """Have a read or write fail after so many seconds; 0 lets it wait."""
    span = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, span)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)


def call(host: str, port: int, token: bytes, caller: Caller) -> Connection:
    """Connect to an engine and show each other who one is.

    Raises:
        OSError: it does not answer, or not in time.
        RefusedError: another token, another version of the package, or an engine that works for another run.
    """
    opened = socket.create_connection((host, port), timeout=HANDSHAKE_S)
    opened.setblocking(True)
    connection = Connection(opened.detach())
    try:
        _limit_reads(connection, HANDSHAKE_S)
        limit_silence(connection, caller.silence_s)
        try:
            answer_challenge(connection, token)
            deliver_challenge(connection, token)
        except AuthenticationError as error:
            raise OtherTokenError(f"it has another token ({TOKEN})") from error
        said = {"versions": versions(), "run": caller.run, "silence_s": caller.silence_s}
        connection.send_bytes(json.dumps(said).encode())
        answer = json.loads(connection.recv_bytes(GREETING))
        if problem := answer.get("refused"):
            raise TakenError(problem) if problem == TAKEN else RefusedError(problem)
        _limit_reads(connection, 0)
    except EOFError as error:
        connection.close()
        raise ConnectionResetError("it ended the connection") from error
    except BaseException:
        connection.close()
        raise
    return connection


def answer(connection: Connection, token: bytes, taken_by: str | None) -> Caller | None:
    """Let a trainer that has just connected show who it is; None if it is sent away.

    Args:
        connection: that it has opened.
        token: that it must know.
        taken_by: the run that this engine works for at the moment; another one is sent away.
    """
    try:
        _limit_reads(connection, HANDSHAKE_S)
        deliver_challenge(connection, token)
        answer_challenge(connection, token)
        said = json.loads(connection.recv_bytes(GREETING))
        problem = _problem(said, taken_by)
        connection.send_bytes(json.dumps({"refused": problem}).encode())
        if problem is None:
            _limit_reads(connection, 0)
            limit_silence(connection, float(said["silence_s"]))
            return Caller(str(said["run"]), float(said["silence_s"]))
    except (OSError, EOFError, AuthenticationError, ValueError, KeyError, AttributeError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    _log.warning("engine: sent a caller away (%s)", problem)
    connection.close()
    return None


def _problem(said: dict[str, Any], taken_by: str | None) -> str | None:
    """Return why a trainer with the right token is sent away; None if it is not."""
    for name, own in versions().items():
        if said["versions"].get(name) != own:
            return f"it has {name} {own}, and here it is {said['versions'].get(name)}; use one version on both sides"
    if taken_by not in (None, said["run"]):
        return TAKEN
    return None


def call_until(
    attempt: Callable[[], Connection],
    name: str,
    caller: Caller,
    seconds: float,
    closed: threading.Event,
    failed: Callable[[Exception], None],
) -> Connection:
    """Connect, again and again with growing waits, until it succeeds.

    Args:
        attempt: connects, by `call`.
        name: of the engine.
        caller: that connects.
        seconds: how long it is tried.
        closed: ends it when set.
        failed: hears why an attempt did not succeed.

    Raises:
        OSError: the last attempt's, after so many seconds or once `closed` is set.
        RefusedError: another attempt would not help.
    """
    began, wait_s, told = time.monotonic(), FIRST_WAIT_S, False
    while True:
        try:
            return attempt()
        except (OSError, TakenError) as error:
            failed(error)
            # A run whose node is gone holds its engine until its silence is noticed there.
            limit_s = caller.silence_s + HANDSHAKE_S if isinstance(error, TakenError) else seconds
            if closed.wait(wait_s) or time.monotonic() - began > min(limit_s, seconds):
                raise
            if not told:
                _log.warning("driver.engines: %s does not answer yet (%s); trying for %.0f s", name, error, seconds)
            told, wait_s = True, min(2 * wait_s, LONGEST_WAIT_S)


# --- messages --------------------------------------------------------------------------------------------------


class Line:
    """Connection to an engine, with a thread for each direction.

    So neither an engine that does not read nor one that stops in the middle of a message can block this process.

    Args:
        open_: returns the connection; called in a thread, as that may take long.
        news: set when something has arrived or ended.
        carries: whether weights that a message names are sent after it; else the other side reads their file.
    """

    def __init__(self, open_: Callable[[], Connection], news: threading.Event, *, carries: bool = False) -> None:
        self._open, self._news, self._carries = open_, news, carries
        self._connection: Connection | None = None
        self._out: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._in: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._closed = False
        self.heard = time.monotonic()
        self.gone_at: float | None = None
        self.why = ""
        self.opened = False
        self.refused = False
        self.sent = 0  # bytes of weights
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self, connection: Connection) -> None:
        """Receive messages until the other end is gone."""
        try:
            while True:
                self._in.put(receive(connection))
                self.heard = time.monotonic()
                self._news.set()
        except (EOFError, OSError) as error:
            self._end(error)
        except Exception as error:
            _log.warning("generator: what it said cannot be read (%s: %s)", type(error).__name__, error)
            self._end(error)

    def _write(self) -> None:
        """Open the connection, then send what is queued."""
        try:
            connection = self._open()
        except Exception as error:
            self.refused = isinstance(error, RefusedError)
            self._end(error)
            return
        self._connection, self.opened = connection, True
        if self._closed:
            connection.close()
            return
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()
        with suppress(OSError):
            while (message := self._out.get()) is not None:
                send(connection, message)
                for part in message if self._carries else ():
                    if isinstance(part, Published):
                        self._send_weights(connection, part)

    def _send_weights(self, connection: Connection, published: Published) -> None:
        for bucket in published.buckets():
            self.sent += len(bucket)
            connection.send_bytes(bucket)

    def _end(self, error: BaseException) -> None:
        self.why = str(error) or "it was ended on the other side"
        self.gone_at = time.monotonic()
        self._news.set()

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
        self._closed = True
        self._out.put(None)
        if self._connection is not None:
            # Ends the other thread's wait; closed alone, the number could be another file's by the time it reads.
            with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                self._connection.close()
