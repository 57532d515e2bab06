"""Generator in a process of its own: it steps while it has rollouts, and handles messages in between.

`Fleet` starts it and holds the other end of the connection, a pair of sockets that nobody else can reach. When that
end goes, whatever the reason, so does this process.

Messages to it, each a tuple with its name first: `submit` a request, `publish` (file, version, recompute_kv), `score`
(prompt, tokens), `aside` and `back`, `state`, `load` a state, `stop`. It says: `ready` (slots, whether it can score),
`work` (finished rollouts, what was computed, seconds, tokens that unfinished rollouts have), `alive` (when there is
nothing else to say), `published` (version and file), `reply`, `failed`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_scalerl.generator.base import FinishedRollout, Generator, nothing_computed

# Interval of heartbeats while there is nothing else to report.
HEARTBEAT_S = 0.5
# Longest time that work done stays unreported.
REPORT_S = 0.1


@dataclass(frozen=True)
class Blueprint:
    """Parts from which another process builds a generator; its weights are in a file.

    `factory` takes the model and `arguments`; `model_class` is called with `config`.
    """

    factory: Any
    arguments: dict[str, Any]
    model_class: type
    config: Any
    device: str

    def build(self, weights: Path) -> Generator:
        """Build the generator with the weights of a file."""
        model = self.model_class(self.config)
        model.load_state_dict(read_weights(weights), strict=False)
        model.tie_weights()
        generator: Generator = self.factory(model=model.to(self.device), **self.arguments)
        return generator


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that `Fleet` has written, mapped into memory."""
    from safetensors.torch import load_file

    return dict(load_file(path))


class ParentGoneError(Exception):
    """Raised when the parent process is gone and nobody reads the connection."""


def send(connection: Connection, message: Any) -> None:
    """Send a pickled message; `Connection.send` would share tensors' memory, which is lost with a killed process."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: Connection) -> Any:
    """Receive and unpickle the next message.

    Raises:
        EOFError: the other end is gone.
    """
    return pickle.loads(connection.recv_bytes())


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
    """Main loop of a generator's process."""

    def __init__(self, connection: Connection, generator: Generator) -> None:
        self._connection, self._generator = connection, generator
        self._aside: AbstractContextManager[None] | None = None
        self._finished: list[FinishedRollout] = []
        self._computed = nothing_computed()
        self._busy_s = 0.0
        self._said = time.monotonic()

    def serve(self) -> None:
        """Handle messages and step until told to stop."""
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
        elif waited_s >= HEARTBEAT_S:
            self._say("alive")

    def _say(self, *message: Any) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise ParentGoneError from error
        self._said = time.monotonic()

    def _handle(self, what: str, *rest: Any) -> None:
        """Act on one message of the parent, and reply where it waits for one."""
        if what == "submit":
            self._generator.submit(*rest)
        elif what == "publish":
            path, version, recompute_kv = rest
            self._generator.publish(read_weights(path), version, recompute_kv)
            self._say("published", version, str(path))
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


def _end_with(parent: int, folder: Path) -> None:
    """End this process when its parent is gone; in a thread, as a long step notices no closed connection."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)  # weights in shared memory outlive whoever wrote them
    os._exit(1)


def main() -> int:
    """Run the process as `Fleet` starts it: `python -m lightning_scalerl.generator.server FD FOLDER`."""
    # A scheduler's signal to save is for the trainer, which then asks what is in flight.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    parent, connection, folder = os.getppid(), Connection(int(sys.argv[1])), Path(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
    try:
        blueprint, weights = hear(connection)
        generator = blueprint.build(weights)
        send(connection, ("ready", generator.free_slots, getattr(generator, "can_score", False)))
        Server(connection, generator).serve()
        generator.close()
    except ParentGoneError:
        _end_with(parent, folder)
    except Exception as error:
        traceback.print_exc()
        send(connection, ("failed", f"{type(error).__name__}: {' '.join(str(error).split())}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
