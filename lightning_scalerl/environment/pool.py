"""Pool of environment processes, with one conversation per process at a time and a timeout per call.

A thread of the pool serves each process and waits for it. A process that hangs, dies or fails in another way is
killed with all processes that it has started, and the next conversation gets a new one. After a conversation without
failure the process is reused, because importing the user's modules may take seconds.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from lightning_scalerl.checks import ConfigurationError, positive, whole_number
from lightning_scalerl.environment.forms import Factory
from lightning_scalerl.environment.protocol import Declared, Failure, History, Observation, Turn
from lightning_scalerl.user_code import Source
from sweeps.process import ended_with, kill_group, start_worker
from sweeps.run.activity import activity

# Start timeout of a process: imports of the user's modules may be slow on a busy machine.
START_S = 120.0
# Default of `most_characters`.
MAX_CHARACTERS = 16384
# Limits in bytes: on an answer (observations are cut, so they are far smaller), and on the process's output that is
# kept for error messages.
_MAX_ANSWER_BYTES, _OUTPUT_BYTES = 2**26, 2048

Answer = Observation | Failure


class _LostError(Exception):
    """Raised when a process cannot answer any more."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.why)
        self.failure = failure


@dataclass(frozen=True)
class _Request:
    method: str
    arguments: tuple[Any, ...]
    calls: int  # number of calls of the user's methods; the timeout counts once for each


@dataclass(frozen=True)
class _Episode:
    number: int
    requests: SimpleQueue[_Request | None] = field(default_factory=SimpleQueue)


class EnvironmentPool:
    """Pool of processes for conversations with environments, one conversation per process at a time.

    A conversation has a number, from `open` to `close`, and at most one request at a time: `open` itself, `act` or
    `finish`. The answer to a request is fetched once, by `wait` or `done`. A `Failure` closes the conversation.

    Args:
        factory: class or function that makes an instance, in TRL's form or in text form, or the location of one. A
            mapping has several factories by name. The row's column `environment` then selects one of them, and is not
            passed on, as in TRL.
        most: maximum number of processes. Each open conversation has one process; further conversations wait.
        timeout_s: wall-clock timeout of one call. A turn with several tool calls may take this long per call.
        memory_gib: limit on a process's data segment in GiB; None for no limit.
        most_characters: characters of an observation's texts that are kept.

    Attributes:
        counts: number of observations, malformed calls, tools that raised (`raised`), characters cut, and failures by
            kind (`failed_timeout`, ...).

    Raises:
        ConfigurationError: a value cannot be used, or the factory cannot be pickled.
    """

    def __init__(
        self,
        factory: Factory | Source | Mapping[str, Factory | Source],
        most: int,
        timeout_s: float,
        memory_gib: float | None = None,
        most_characters: int = MAX_CHARACTERS,
    ) -> None:
        import cloudpickle

        self._most = whole_number("environment.most", most)
        self._timeout_s = positive("environment.timeout_s", timeout_s)
        self._memory_gib = memory_gib
        self._by_column = isinstance(factory, Mapping)
        factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
        self._names = frozenset(factories)
        try:
            self._content = pickle.dumps((most_characters, cloudpickle.dumps(factories)))
        except Exception as error:
            raise ConfigurationError(
                f"environment: it cannot be sent to a process of its own ({type(error).__name__}: {error}); hold less "
                "in it, and open connections and files in its methods"
            ) from error
        self.counts: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._open: dict[int, _Episode] = {}
        self._answers: dict[int, Answer] = {}
        self._waiting: SimpleQueue[_Episode | None] = SimpleQueue()
        self._next = 0
        self._free = 0  # idle threads minus conversations that wait for a thread
        self._threads: list[threading.Thread] = []
        self._processes: list[_Process] = []
        self._closing = False

    def declare(self) -> Mapping[str, Declared]:
        """Start a process and return the properties of each environment by name; a single one has the name "".

        Raises:
            ConfigurationError: an environment cannot be loaded or made, or has neither form.
        """
        process = None
        try:
            process = self._start()
            answer = process.ask("declare", (), START_S)
        except _LostError as error:
            answer = f"environment: {error.failure.why}"
        finally:
            if process is not None:
                self._end(process)
        if isinstance(answer, Failure):
            answer = f"environment: {answer.why}"
        if isinstance(answer, str):
            raise ConfigurationError(answer)
        properties: Mapping[str, Declared] = answer
        return properties

    def open(self, row: Mapping[str, Any], seed: int, history: History | None = None) -> int:
        """Begin a conversation and return its number immediately.

        Args:
            row: row of the data set.
            seed: seed of the conversation.
            history: earlier part of the conversation to replay; None for a new conversation. The answer is the replay's
                last observation, or a failure of kind "replay" if the environment cannot be replayed or answers
                differently.

        Raises:
            ConfigurationError: the row names no environment, or an unknown one.
        """
        name, row = "", dict(row)
        if self._by_column:
            known = ", ".join(sorted(self._names))
            if "environment" not in row:
                raise ConfigurationError(
                    "environment: a row has no column environment, which selects one of several environments; give "
                    f"each row one of {known}"
                )
            name = str(row.pop("environment"))
            if name not in self._names:
                raise ConfigurationError(f"environment: a row's column environment is {name!r}; known are {known}")
        exchanges = () if history is None else history.exchanges
        calls = 1 + sum(_calls(turn) for turn, _ in exchanges)
        with self._changed:
            episode = _Episode(self._next)
            self._next += 1
            self._open[episode.number] = episode
            episode.requests.put(_Request("open", (name, row, seed, history), calls))
            self._free -= 1
            if self._free < 0 and len(self._threads) < self._most:
                self._free += 1
                thread = threading.Thread(target=self._serve, name="environment", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._waiting.put(episode)
        return episode.number

    def act(self, number: int, turn: Turn) -> None:
        """Send a turn of the model to the environment.

        Raises:
            KeyError: the conversation is not open.
        """
        self._open[number].requests.put(_Request("step", (turn,), _calls(turn)))

    def finish(self, number: int) -> None:
        """End a conversation that has reached a limit; the answer has the reward, if the environment gives one now.

        Raises:
            KeyError: the conversation is not open.
        """
        self._open[number].requests.put(_Request("finish", (), 1))

    def wait(self, number: int) -> Answer:
        """Block until the conversation's request is answered, and return the answer.

        Raises:
            KeyError: the conversation is not open.
            RuntimeError: the pool is closed.
        """
        with self._changed:
            if number not in self._open and number not in self._answers and not self._closing:
                raise KeyError(f"conversation {number} is not open")
            self._changed.wait_for(lambda: number in self._answers or self._closing)
            if number not in self._answers:
                raise RuntimeError("the pool of environments is closed")
            return self._answers.pop(number)

    def done(self) -> Sequence[tuple[int, Answer]]:
        """Return (number, answer) for all answers that were not fetched yet, without blocking."""
        with self._changed:
            fetched = list(self._answers.items())
            self._answers.clear()
            return fetched

    def close(self, number: int) -> None:
        """Forget a conversation. A call in progress runs on until its end or timeout; its answer is dropped."""
        with self._changed:
            self._answers.pop(number, None)
            episode = self._open.pop(number, None)
        if episode is not None:
            episode.requests.put(None)

    def shutdown(self) -> None:
        """End all processes, even during a call."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            open_numbers = list(self._open)
            for process in self._processes:
                kill_group(process.pid)
        for number in open_numbers:
            self.close(number)
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    # --- in a thread per process -------------------------------------------------------------------------

    def _serve(self) -> None:
        """Run conversations one after another in one process; replace the process after a failure."""
        process: _Process | None = None
        while (episode := self._waiting.get()) is not None:
            while (request := episode.requests.get()) is not None and episode.number in self._open:
                answer: Answer
                try:
                    process = process or self._start()
                    answer = process.ask(request.method, request.arguments, request.calls * self._timeout_s)
                except _LostError as error:
                    answer = error.failure
                if isinstance(answer, Failure):
                    if process is not None:
                        self._end(process)
                    process = None
                self._record(episode.number, answer)
                if isinstance(answer, Failure):
                    break
            # The conversation is over, so a failure to drop its instance does not count as its failure.
            if process is not None and not self._closing:
                try:
                    process.ask("close", (), self._timeout_s)
                except _LostError:
                    self._end(process)
                    process = None
            with self._changed:
                self._free += 1
        if process is not None:
            self._end(process)

    def _start(self) -> _Process:
        """Start a process and wait until it has loaded the environment."""
        process = None
        try:
            process = _Process(self._content, self._memory_gib)
            with self._changed:
                self._processes.append(process)
            problem = process.ask(None, (), START_S)
        except OSError as error:
            raise _LostError(Failure("died", f"its process cannot be started ({error})")) from error
        except _LostError:
            self._end(process)
            raise
        if problem is not None:
            self._end(process)
            raise _LostError(Failure("died", f"it cannot be loaded in a process of its own: {problem}"))
        return process

    def _end(self, process: _Process | None) -> None:
        if process is not None:
            with self._changed:
                self._processes.remove(process)
            process.kill()

    def _record(self, number: int, answer: Answer) -> None:
        activity.note("environment")
        with self._changed:
            if self._closing:  # `shutdown` has killed the processes
                return
            if isinstance(answer, Failure):
                self.counts[f"failed_{answer.kind}"] += 1
            else:
                self.counts.update(
                    observations=1, malformed=answer.malformed, raised=answer.raised, characters_cut=answer.cut
                )
            # If the conversation is not open, it was closed during the call, and the answer is dropped.
            if number in self._open:
                self._answers[number] = answer
                if isinstance(answer, Failure):
                    del self._open[number]
                self._changed.notify_all()


class _Process:
    """Worker process, used by one thread. It is killed after a failure, so that a late answer is never read."""

    def __init__(self, content: bytes, memory_gib: float | None) -> None:
        self._output, child_end = os.pipe()
        try:
            self._process, self._connection = start_worker(
                "lightning_scalerl.environment.worker", content, memory_gib, {}, stderr=child_end
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(child_end)
        self.pid = self._process.pid
        self._output_end = b""  # last bytes of the process's output

    def ask(self, method: str | None, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Send a request and return its result; without a method, wait for the first message.

        Raises:
            _LostError: the process has not answered in time, has died, or its answer cannot be read.
        """
        deadline = time.monotonic() + timeout_s
        if method is not None:
            # A dead process is noticed below, by its closed pipe.
            with suppress(OSError):
                self._connection.send((method, arguments))
        sources: list[Connection[Any, Any] | int] = [self._connection, self._output]
        while True:
            left_s = deadline - time.monotonic()
            ready = wait(sources, left_s) if left_s > 0 else []
            if not ready:
                raise self._lost_error("timeout", f"timed out after {timeout_s:g} s")
            # Read the process's output, so that it never blocks on a full pipe; keep only the end.
            if self._output in ready:
                block = os.read(self._output, 65536)
                self._output_end = (self._output_end + block)[-_OUTPUT_BYTES:]
                if not block:
                    sources.remove(self._output)
            if self._connection in ready:
                try:
                    return pickle.loads(self._connection.recv_bytes(_MAX_ANSWER_BYTES))
                except (EOFError, OSError):
                    raise self._lost_error("died", f"its process died ({ended_with(self._exit_status())})") from None
                except Exception as error:
                    raise self._lost_error("answer", f"its answer cannot be read ({type(error).__name__})") from error

    def _exit_status(self) -> int:
        """Wait for the process to end, else kill its process group; return the exit code."""
        with suppress(Exception):
            return self._process.wait(1.0)
        kill_group(self.pid)
        return self._process.wait()

    def _lost_error(self, kind: Any, reason: str) -> _LostError:
        last = self._output_end.decode(errors="replace").strip().rpartition("\n")[2][:200]
        return _LostError(Failure(kind, f"{reason}; its last output: {last}" if last else reason))

    def kill(self) -> None:
        """Kill the process with all that it has started."""
        kill_group(self.pid)
        self._connection.close()
        self._process.wait()
        os.close(self._output)


def _calls(turn: Turn) -> int:
    return max(1, len(turn.calls))
