"""Generator in a process of its own: it steps while it has rollouts, and handles messages in between.

`Fleet` starts it as a child and holds the other end of a pair of sockets that nobody else can reach; when that end
goes, whatever the reason, so does this process. Or somebody starts it on another node, where it listens:

    SCALERL_ENGINE_TOKEN=... python -m lightning_scalerl.generator.server --listen HOST:PORT

One run works with it at a time. When that run's connection ends, what is in flight is dropped and the next may come;
the generator stays, and is used again if that one asks for the same.

Messages to it, each a tuple with its name first: `submit` a request, `publish` (weights, recompute_kv), `score`
(prompt, tokens), `aside` and `back`, `state`, `load` a state, `stop`. It says: `ready` (slots, whether it can score),
`work` (finished rollouts, what was computed, seconds, tokens that unfinished rollouts have), `alive` (when there is
nothing else to say), `published` (number and digest of the weights that it uses now), `reply`, `failed`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.generator.base import FinishedRollout, Generator, Reusable, nothing_computed
from lightning_scalerl.generator.weights import Published, Received, Weights
from lightning_scalerl.generator.wire import TOKEN, answer, receive, send, token_here

# Interval of heartbeats while there is nothing else to report.
HEARTBEAT_S = 0.5
# Longest time that work done stays unreported.
REPORT_S = 0.1


@dataclass(frozen=True)
class Blueprint:
    """Parts from which another process builds a generator; its weights are published to it afterwards.

    `factory` takes the model and `arguments`; `model_class` is called with `config`.
    """

    factory: Any
    arguments: dict[str, Any]
    model_class: type
    config: Any
    device: str

    def build(self) -> Generator:
        """Build the generator, with weights that are nobody's yet."""
        model = self.model_class(self.config)
        generator: Generator = self.factory(model=model.to(self.device), **self.arguments)
        return generator


class ParentGoneError(Exception):
    """Raised when the parent process is gone and nobody reads the connection."""


def hear(connection: Connection) -> Any:
    """Receive the parent's next message.

    Raises:
        ParentGoneError: it says no more.
    """
    try:
        return receive(connection)
    except (EOFError, OSError) as error:
        raise ParentGoneError from error


class Server:
    """Main loop of a generator's process while it works for one trainer.

    Args:
        connection: to the trainer.
        generator: with nothing in flight.
        received: memory for weights that come over the connection; None to read them from their file on this node.
    """

    def __init__(self, connection: Connection, generator: Generator, received: Received | None = None) -> None:
        self._connection, self._generator, self._received = connection, generator, received
        self._aside: AbstractContextManager[None] | None = None
        self._finished: list[FinishedRollout] = []
        self._computed = nothing_computed()
        self._busy_s = 0.0
        self._said = time.monotonic()

    def serve(self) -> None:
        """Say that it is ready, then handle messages and step until told to stop.

        Raises:
            ParentGoneError: the trainer says no more.
        """
        self._say("ready", self._generator.free_slots, getattr(self._generator, "can_score", False))
        try:
            while True:
                idle = not self._generator.in_flight
                while self._connection.poll(HEARTBEAT_S if idle else 0):
                    message = hear(self._connection)
                    if message[0] == "stop":
                        return
                    self._handle(*message)
                    idle = False
                if self._generator.in_flight:
                    self._step()
                self._report()
        except OSError as error:  # of `poll`
            raise ParentGoneError from error
        finally:
            if self._aside is not None:  # left to the garbage collector it would bring back what was in flight, later
                self._aside.__exit__(None, None, None)

    def _step(self) -> None:
        began = time.monotonic()
        report = self._generator.step()
        self._busy_s += time.monotonic() - began
        self._finished += report.finished
        self._computed = [before + more for before, more in zip(self._computed, report.computed, strict=True)]

    def _report(self, at_once: bool = False) -> None:
        waited_s = time.monotonic() - self._said
        if self._finished or (self._busy_s and (at_once or waited_s >= REPORT_S)):
            in_flight = getattr(self._generator, "sampled_in_flight", 0)
            self._say("work", self._finished, tuple(self._computed), self._busy_s, in_flight)
            self._finished, self._computed, self._busy_s = [], nothing_computed(), 0.0
        else:
            self._live()

    def _live(self) -> None:
        """Say that nothing is wrong, if nothing else was said for a while."""
        if time.monotonic() - self._said >= HEARTBEAT_S:
            self._say("alive")

    def _say(self, *message: Any) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise ParentGoneError from error
        self._said = time.monotonic()

    def _weights(self, published: Published) -> Weights:
        """Return weights that the trainer has published: from their file, or from behind the message."""
        if self._received is None:
            return Weights(published.read(), published.digest_of_file())
        try:
            return self._received.read(self._connection, published, between=self._live)
        except (EOFError, OSError) as error:
            raise ParentGoneError from error

    def _handle(self, what: str, *rest: Any) -> None:
        """Act on one message of the parent, and reply where it waits for one."""
        if what == "submit":
            self._generator.submit(*rest)
        elif what == "publish":
            published, recompute_kv = rest
            fresh = self._weights(published)
            # Weights that are damaged sample nothing; the trainer hears which they are.
            if fresh.digest == published.digest:
                self._generator.publish(fresh.tensors, published.version, recompute_kv)
            self._say("published", published.number, fresh.digest)
        elif what == "score":
            self._say("reply", self._generator.score(*rest).tolist())  # type: ignore[attr-defined]
        elif what == "aside":
            # Rollouts that ended before belong to the work that is set aside: reported before it is.
            self._report(at_once=True)
            self._aside = self._generator.aside()
            self._aside.__enter__()
            self._say("reply", None)
        elif what == "back":
            assert self._aside is not None
            self._aside.__exit__(None, None, None)
            self._finished, self._aside = [], None
            self._say("reply", None)
        elif what == "state":
            self._report(at_once=True)
            # Without weights: the parent has them.
            state = self._generator.state_dict()
            self._say("reply", {name: part for name, part in state.items() if name != "weights"})
        elif what == "load":
            # States travel without weights: the rollouts go on under those that were published before.
            weights = self._generator.state_dict().get("weights")
            self._generator.load_state_dict({**rest[0], "weights": weights})
            self._say("reply", None)
        else:
            raise ValueError(f"generator server: no message {what!r}")


def failure(error: Exception) -> tuple[str, str]:
    """Return the message that says how a generator has failed."""
    return "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- a child of the trainer ------------------------------------------------------------------------------------


def _end_with(parent: int, folder: Path) -> None:
    """End this process when its parent is gone; in a thread, as a long step notices no closed connection."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)  # weights in shared memory outlive whoever wrote them
    os._exit(1)


def _leave_signals_to_the_trainer() -> None:
    """Ignore a scheduler's signal to save: it is for the trainer, which then asks what is in flight."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def serve_parent(connection: Connection, folder: Path) -> int:
    """Work for the process that has started this one, until it says stop or is gone."""
    _leave_signals_to_the_trainer()
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    try:
        (blueprint,) = hear(connection)
        generator = blueprint.build()
        Server(connection, generator).serve()
        generator.close()
    except ParentGoneError:
        _end_with(parent, folder)
    except Exception as error:
        traceback.print_exc()
        send(connection, failure(error))
        return 1
    return 0


# --- an engine with an address of its own ----------------------------------------------------------------------


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
        _leave_signals_to_the_trainer()
    door, engine = Door(host, port, token_here()), Engine(device)
    print(f"engine: listening on {host}:{door.port} (device {device})", flush=True)
    while (connection := door.next(once_s)) is not None:
        done = engine.work_for(connection)
        door.leave()
        if done and once_s is not None:
            break
    return 0


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the process: `--listen HOST:PORT`, or as `Fleet` starts it: `... FD FOLDER`."""
    if len(sys.argv) == 3 and sys.argv[1].isdigit():
        return serve_parent(Connection(int(sys.argv[1])), Path(sys.argv[2]))
    parser = argparse.ArgumentParser(prog="python -m lightning_scalerl.generator.server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="address to listen at; port 0: any free")
    parser.add_argument("--device", default=None, help="of the generator; default: cuda where there is one, else cpu")
    parser.add_argument("--once", type=float, metavar="SECONDS", help="end when no run is connected for so long")
    arguments = parser.parse_args()
    host, colon, port = arguments.listen.rpartition(":")
    if not (colon and port.isdigit()):
        parser.error(f"--listen: {arguments.listen!r} is no HOST:PORT")
    try:
        return listen(host, int(port), arguments.device or _default_device(), arguments.once)
    except (ConfigurationError, KeyboardInterrupt) as error:
        print(f"engine: ended ({said(error)})" if isinstance(error, KeyboardInterrupt) else error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
