"""Generator in a child process: it steps while it has rollouts, and handles messages in between.

`Fleet` starts this process (`transport.Child`) and holds the other end of a socket pair. When that end closes for any
reason, this process ends too.

Each message is a tuple that starts with its name. Messages to the child:

- rollouts: `submit` (request), `insert` (key, index, tokens), `end` (key, index, truncated), `restart` (key, index),
  `drop` (key, index: end a rollout if it still waits)
- weights and scores: `publish` (weights, recompute_kv), `score` (prompt, tokens)
- `aside`: pause the rollouts in flight; `back`: resume them
- `state`: return everything in flight; `load` (state): restore it
- `stop`: end the process

Messages from the child:

- `ready` (slots, whether it can score)
- `work` (finished rollouts, counts of computed work, seconds, tokens of unfinished rollouts, rollouts that wait)
- `alive`: a heartbeat when there is nothing else to report
- `published` (number and digest of the current weights)
- `reply` (value), `failed` (reason)
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
import traceback
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_scalerl.generator.base import FinishedRollout, Generator, WaitingRollout, zero_counts
from lightning_scalerl.generator.fleet.weights import Published
from lightning_scalerl.generator.fleet.wire import receive, send

# Interval of heartbeats while there is nothing else to report, in seconds.
HEARTBEAT_S = 0.5
# Longest delay before finished work is reported, in seconds.
REPORT_S = 0.1


@dataclass(frozen=True)
class Blueprint:
    """Parts from which another process builds a generator; the weights are published to it afterwards.

    `factory` takes the model and `arguments`; `model_class` is called with `config`.
    """

    factory: Any
    arguments: dict[str, Any]
    model_class: type
    config: Any
    device: str

    def build(self) -> Generator:
        """Build the generator, with uninitialized weights that have the policy's dtype from the start."""
        from lightning_scalerl.generator.torch.policy import new_model

        precision = self.arguments.get("precision")
        model = new_model(self.model_class, self.config, None if precision is None else precision.policy_dtype)
        # A generator with `on_host` starts a server that needs the GPU memory; its own copy stays on the CPU.
        on_host = getattr(getattr(self.factory, "func", self.factory), "on_host", False)
        generator: Generator = self.factory(model=model.to("cpu" if on_host else self.device), **self.arguments)
        return generator


class ParentGoneError(Exception):
    """Raised when the parent process has ended or closed the connection."""


def receive_from_parent(connection: Connection) -> Any:
    """Receive the parent's next message.

    Raises:
        ParentGoneError: the connection has ended.
    """
    try:
        return receive(connection)
    except (EOFError, OSError) as error:
        raise ParentGoneError from error


class Server:
    """Main loop of an engine process: serves one trainer.

    Args:
        connection: connection to the trainer.
        generator: the generator to serve, with nothing in flight.
    """

    def __init__(self, connection: Connection, generator: Generator) -> None:
        self._connection, self._generator = connection, generator
        self._aside: AbstractContextManager[None] | None = None
        self._finished: list[FinishedRollout] = []
        self._waiting: list[WaitingRollout] = []
        self._computed = zero_counts()
        self._busy_s = 0.0
        self._last_sent = time.monotonic()

    def serve(self) -> None:
        """Send `ready`, then handle messages and step until `stop` arrives.

        Raises:
            ParentGoneError: the connection to the trainer has ended.
        """
        self._send("ready", self._generator.free_slots, getattr(self._generator, "can_score", False))
        try:
            while True:
                idle = self._idle
                while self._connection.poll(HEARTBEAT_S if idle else 0):
                    message = receive_from_parent(self._connection)
                    if message[0] == "stop":
                        return
                    self._handle(*message)
                    idle = False
                if not self._idle:
                    self._step()
                self._report()
        except OSError as error:  # raised by `poll`
            raise ParentGoneError from error
        finally:
            # Exit `aside` explicitly: otherwise the garbage collector would restore the rollouts in flight at some
            # later time.
            if self._aside is not None:
                self._aside.__exit__(None, None, None)

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to sample until a message arrives."""
        return not self._generator.in_flight or getattr(self._generator, "idle", False)

    def _step(self) -> None:
        began = time.monotonic()
        report = self._generator.step()
        self._busy_s += time.monotonic() - began
        self._finished += report.finished
        self._waiting += report.waiting
        self._computed = [total + increment for total, increment in zip(self._computed, report.computed, strict=True)]

    def _report(self, at_once: bool = False) -> None:
        """Send a report of the work since the last report if one is due, or else a heartbeat if one is due.

        Ended and waiting rollouts are due at once; other work after `REPORT_S`, or now if `at_once`.
        """
        waited_s = time.monotonic() - self._last_sent
        if self._finished or self._waiting or (self._busy_s and (at_once or waited_s >= REPORT_S)):
            in_flight = getattr(self._generator, "sampled_in_flight", 0)
            self._send("work", self._finished, tuple(self._computed), self._busy_s, in_flight, self._waiting)
            self._finished, self._waiting, self._computed, self._busy_s = [], [], zero_counts(), 0.0
        elif waited_s >= HEARTBEAT_S:
            self._send("alive")

    def _send(self, *message: Any) -> None:
        try:
            send(self._connection, message)
        except OSError as error:
            raise ParentGoneError from error
        self._last_sent = time.monotonic()

    def _handle(self, name: str, *arguments: Any) -> None:
        """Handle one message of the parent, and send a reply if the parent waits for one."""
        if name == "submit":
            self._generator.submit(*arguments)
        elif name in ("insert", "end", "restart"):
            getattr(self._generator, name)(*arguments)
        elif name == "drop":
            with suppress(KeyError):
                self._generator.end(*arguments)  # type: ignore[attr-defined]
        elif name == "publish":
            published: Published = arguments[0]
            digest = published.digest_of_file()
            # Damaged weights are never used; the trainer compares the digests and ends the run.
            if digest == published.digest:
                self._generator.publish(published.read(), published.version, recompute_kv=arguments[1])
            self._send("published", published.number, digest)
        elif name == "score":
            self._send("reply", self._generator.score(*arguments).tolist())  # type: ignore[attr-defined]
        elif name == "aside":
            # Report first: rollouts that have already ended belong to the work that is paused.
            self._report(at_once=True)
            self._aside = self._generator.aside()
            self._aside.__enter__()
            self._send("reply", None)
        elif name == "back":
            assert self._aside is not None
            self._aside.__exit__(None, None, None)
            # Drop unreported rollouts of the evaluation or other work: the trainer no longer waits for them.
            self._finished, self._waiting, self._aside = [], [], None
            self._send("reply", None)
        elif name == "state":
            self._report(at_once=True)
            # Drop the weights: the parent has them.
            state = self._generator.state_dict()
            self._send("reply", {name: part for name, part in state.items() if name != "weights"})
        elif name == "load":
            # The state that the parent sends contains no weights: the rollouts resume with the weights published last.
            weights = self._generator.state_dict().get("weights")
            self._generator.load_state_dict({**arguments[0], "weights": weights})
            self._send("reply", getattr(self._generator, "waiting", []))
        else:
            raise ValueError(f"generator server: no message {name!r}")


def failure(error: Exception) -> tuple[str, str]:
    """Return the `failed` message for an error."""
    return "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"


# --- the process -----------------------------------------------------------------------------------------------


def _exit_with_parent(parent: int, folder: Path) -> None:
    """End this process when its parent is gone. Runs in a thread, because a long step cannot notice a closed socket."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)  # weights in shared memory outlive the process that wrote them
    os._exit(1)


def leave_signals_to_the_trainer() -> None:
    """Ignore signals by which a scheduler asks to save: the trainer handles them and asks for this process's state."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def serve_parent(connection: Connection, folder: Path) -> int:
    """Serve the parent process until it sends `stop` or ends; return the exit status."""
    leave_signals_to_the_trainer()
    parent = os.getppid()
    threading.Thread(target=_exit_with_parent, args=(parent, folder), daemon=True).start()
    try:
        (blueprint,) = receive_from_parent(connection)
        generator = blueprint.build()
        Server(connection, generator).serve()
        generator.close()
    except ParentGoneError:
        _exit_with_parent(parent, folder)
    except Exception as error:
        traceback.print_exc()
        send(connection, failure(error))
        return 1
    return 0
