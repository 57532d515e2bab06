"""Generators in processes of their own: started, watched, replaced when lost, and together behind one protocol.

Every rollout that was submitted is handed out once, whatever becomes of the process that samples it: what a lost one
had not finished is sampled again, under the same random numbers, by whichever has room first. Weights go through a file
in shared memory; a process that starts gets the last that were published, before any prompt.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import CannotGoOnError, ConfigurationError
from lightning_scalerl.generator.base import (
    FinishedRollout,
    GroupRequest,
    StepReport,
    nothing_computed,
    request_from,
    request_state,
)
from lightning_scalerl.generator.server import Blueprint, read_weights, receive, send
from lightning_scalerl.rollout import packed, unpacked

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
# Give up after so many losses (times the number of processes) without a rollout in between.
MOST_LOSSES = 3
# Longest wait before messages and process states are looked at again.
POLL_S = 0.02
# The kernel closes a connection a moment before the exit status of its process can be read.
EXIT_S = 5.0


class GeneratorLostError(CannotGoOnError):
    """Raised when a generator's process cannot be kept alive."""


@dataclass(eq=False)
class _Open:
    """Group in flight: its rollouts that are still to come, and the process that samples them.

    `name` is its key in the processes: there the keys of evaluation and of training could collide.
    """

    name: int
    request: GroupRequest
    missing: set[int]
    engine: _Engine | None = None


class _Line:
    """Connection to a process, with a thread for each direction.

    So neither a process that does not read nor one that stops in the middle of a message can block this one.
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
            _log.warning("generator: what it said cannot be read (%s: %s)", type(error).__name__, error)
        finally:
            self.gone_at = time.monotonic()
            self._news.set()

    def _write(self) -> None:
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
        """Close the connection once the other end is gone."""
        self._out.put(None)
        self._connection.close()


@dataclass(eq=False)
class _Engine:
    """State of one generator process, as the parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    line: _Line
    log: Path
    started: float
    slots: int = 0
    ready: bool = False
    acknowledged: str = ""  # the file of weights that it uses
    aside: bool = False
    sampled: int = 0  # tokens of rollouts that it has not finished, by its last report
    replies: deque[Any] = field(default_factory=deque)


def _one_at_a_time(method: Callable[Concatenate[Fleet, P], T]) -> Callable[Concatenate[Fleet, P], T]:
    """Lock a method: training and the thread that collects rollouts must not read one connection at the same time."""

    @wraps(method)
    def locked(self: Fleet, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Fleet:
    """Several generator processes behind the protocol of one generator. Threads may share it.

    Args:
        factory: builds a generator from a model and `arguments`, such as `TorchGenerator` with its slots.
        model: the trainer's model; its class, configuration and first weights are used.
        arguments: further arguments of the factory; they are pickled for the other processes.
        generators: number of processes.
        silence_s: seconds without any message, not even a heartbeat, after which a process is replaced.
        start_s: seconds that a process may take to start.
        devices: CUDA_VISIBLE_DEVICES of the processes in turn; empty to share the device of this process.

    Raises:
        ConfigurationError: a part of the generator cannot be pickled, or it reports at its start that it is unusable.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        model: nn.Module,
        arguments: dict[str, Any],
        *,
        generators: int,
        silence_s: float,
        start_s: float,
        devices: Sequence[str] = (),
    ) -> None:
        device = next(model.parameters()).device
        # With CUDA_VISIBLE_DEVICES set, a process's own device is number 0.
        place = device.type if devices else str(device)
        self._blueprint = _picklable(Blueprint(factory, arguments, type(model), model.config, place))
        self._silence_s, self._start_s = silence_s, start_s
        self._devices = list(devices)
        self._folder = Path(tempfile.mkdtemp(prefix=f"scalerl-{os.getpid()}-", dir=_place_for(model)))
        self._outdated: list[Path] = []
        self._next_name = 0
        # While set, nothing is dispatched: the queues are being swapped, or saved.
        self._held = False
        self._asides = 0
        self._lock = threading.RLock()
        self._news = threading.Event()
        self._open: dict[int, _Open] = {}
        self._orphans: deque[_Open] = deque()
        self._inbox: list[FinishedRollout] = []
        self._computed = nothing_computed()
        self._losses = 0
        self._lost_tokens = 0
        self._closed: dict[str, Any] | None = None
        self.can_score = False
        self.lost = 0
        self.busy_s = 0.0
        self.publish_s = 0.0
        self._engines: list[_Engine] = []
        try:
            self._published = (self._write(dict(model.state_dict())), 0)
            self._engines = [self._start(number) for number in range(generators)]
            self._await(lambda: all(engine.ready for engine in self._engines), at_start=True)
        except BaseException:
            self._end()
            raise

    # --- the protocol of a generator ---------------------------------------------------------------------

    @property
    def generators(self) -> int:
        """Number of generator processes in the fleet."""
        return len(self._engines)

    @property
    def pids(self) -> list[int]:
        """Process ids of the generators that run at the moment."""
        return [engine.process.pid for engine in self._engines]

    @property
    def version(self) -> int:
        """Version of the weights that every process that samples has acknowledged."""
        return self._published[1]

    @property
    @_one_at_a_time
    def in_flight(self) -> int:
        """Number of rollouts submitted and not handed out."""
        return sum(len(each.missing) for each in self._open.values()) + len(self._inbox)

    @property
    @_one_at_a_time
    def free_slots(self) -> int:
        """Number of rollouts that would start at once, in processes that are up."""
        waiting = sum(len(each.missing) for each in self._orphans)
        return max(0, sum(self._room(engine) for engine in self._engines if engine.ready) - waiting)

    @_one_at_a_time
    def submit(self, request: GroupRequest) -> None:
        """Queue a group; it goes whole to the process with most free slots, once one has room."""
        entry = _Open(self._name(), request, set(range(request.completions)))
        self._open[entry.name] = entry
        self._orphans.append(entry)
        self._dispatch()

    def wait(self, seconds: float) -> None:
        """Wait until a process has sent something, at most `seconds` seconds."""
        self._news.wait(seconds)
        self._news.clear()

    def step(self) -> StepReport:
        """Return the rollouts that have ended; if none has, wait up to `POLL_S` for one."""
        if not self._inbox:
            self.wait(POLL_S)
        return self.collect()

    @_one_at_a_time
    def collect(self) -> StepReport:
        """Return the rollouts that have ended and the work done since the last report, without waiting."""
        self._hear()
        finished, self._inbox = self._inbox, []
        report = replace(StepReport(finished, *self._computed), lost_tokens=self._lost_tokens)
        self._computed, self._lost_tokens = nothing_computed(), 0
        return report

    @_one_at_a_time
    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        """Send weights to all processes and wait until each has them; one that does not answer is replaced."""
        began = time.monotonic()
        self._outdated.append(self._published[0])
        # Set before the messages go out, so that a process that comes up meanwhile gets these.
        self._published = (self._write(weights), version)
        told = [engine for engine in self._engines if engine.ready]
        for engine in told:
            engine.line.tell("publish", *self._published, recompute_kv)
        file = str(self._published[0])
        self._await(lambda: all(engine.acknowledged == file for engine in told if engine in self._engines))
        # Old files stay while a process that starts may read one, and inside `aside`, which returns to one.
        if not self._asides and all(engine.ready for engine in self._engines):
            for path in {*self._outdated} - {self._published[0]}:
                path.unlink(missing_ok=True)
            self._outdated.clear()
        self.publish_s = time.monotonic() - began

    @_one_at_a_time
    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
        """Return log-probabilities (T,) of a completion under the weights in use, from any process that is up.

        None where no process is up, or the one that is asked is lost before it answers: a new one may take minutes to
        start, and whoever asks has other work.
        """
        self._hear()
        engine = next((each for each in self._engines if each.ready), None)
        reply = None if engine is None else self._ask(engine, "score", tuple(prompt_tokens), tuple(tokens))
        return None if reply is None else torch.tensor(reply, dtype=torch.float32)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Lend the processes for other work: rollouts in flight wait, and resume under the weights of before."""
        with self._lock:
            self._hear()
            self._held = True
            for engine in [engine for engine in self._engines if engine.ready]:
                self._ask(engine, "aside")
                engine.aside = True
            self._asides += 1
            books = (self._open, self._orphans, self._inbox, self._computed, self._published, self.busy_s)
            self._open, self._orphans, self._inbox, self._computed = {}, deque(), [], nothing_computed()
            self._held = False
        try:
            yield
        finally:
            with self._lock:
                self._held = True
                self._outdated.append(self._published[0])
                self._open, self._orphans, self._inbox, self._computed, self._published, self.busy_s = books
                self._asides -= 1
                back = []
                for engine in [engine for engine in self._engines if engine.ready]:
                    if engine.aside:
                        engine.aside = False
                        self._ask(engine, "back")
                        back.append(engine)
                    else:  # it was started meanwhile, with the weights of meanwhile
                        engine.line.tell("publish", *self._published, False)
                for entry in self._open.values():
                    if entry.engine not in back:
                        entry.engine = None
                self._held = False
                self._adopt_orphans()

    @_one_at_a_time
    def close(self) -> None:
        """End the processes; what was in flight is kept for `state_dict`."""
        if self._closed is None:
            # An error of closing must not hide the one that ended the run.
            try:
                with suppress(GeneratorLostError, ConfigurationError):
                    self._closed = self.state_dict()
            finally:
                self._end()

    # --- processes ---------------------------------------------------------------------------------------

    def _start(self, number: int) -> _Engine:
        """Start process `number` and send it its blueprint; return it before it is ready."""
        ours, theirs = Pipe()
        log = self._folder / f"generator-{number}.log"
        weights, _ = self._published
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[number % len(self._devices)]
        with log.open("ab") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning_scalerl.generator.server", str(theirs.fileno()), str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        # Open here as well it would stay open when the process ends, and its end would not be read.
        theirs.close()
        now = time.monotonic()
        engine = _Engine(number, process, _Line(ours, self._news), log, started=now)
        engine.line.tell(self._blueprint, weights)
        return engine

    def _ask(self, engine: _Engine, *message: Any) -> Any:
        """Return a process's answer to a message, or None if it is lost first."""
        engine.replies.clear()
        engine.line.tell(*message)
        self._await(lambda: engine.replies or engine not in self._engines)
        return engine.replies.popleft() if engine.replies else None

    def _await(self, done: Callable[[], object], at_start: bool = False) -> None:
        """Handle messages until a condition holds. Each process answers before its timeout, or is replaced."""
        while not done():
            self.wait(POLL_S)
            self._hear(at_start)

    def _hear(self, at_start: bool = False) -> None:
        """Handle what the processes have sent, and replace those that have ended or timed out."""
        for engine in list(self._engines):
            # Polled before reading, so that no last message is missed.
            gone_at, status = engine.line.gone_at, engine.process.poll()
            for message in engine.line.said():
                self._take(engine, at_start, *message)
            if status is None and gone_at is not None:
                engine.ready = False  # no message can reach it
                if time.monotonic() - gone_at < EXIT_S:
                    continue
            silent_s = time.monotonic() - (engine.line.heard if engine.ready else engine.started)
            limit_s = self._silence_s if engine.ready else self._start_s
            if status is not None:
                self._replace(engine, f"ended with status {status}", at_start)
            elif gone_at is not None:
                self._replace(engine, "closed its connection and did not end", at_start)
            elif silent_s > limit_s:
                self._replace(engine, f"said nothing for {silent_s:.0f} s", at_start)

    def _take(self, engine: _Engine, at_start: bool, what: str, *rest: Any) -> None:
        """Handle one message of a process, as `server` lists them."""
        if what == "ready":
            engine.ready, (engine.slots, self.can_score) = True, rest
            # It has the weights of when it was started; newer ones may have been published since.
            engine.line.tell("publish", *self._published, False)
            self._dispatch()
        elif what == "work":
            finished, computed, busy_s, sampled = rest
            self.busy_s += busy_s
            if not engine.aside:  # inside `aside` the count is of an evaluation's rollouts
                engine.sampled = sampled
            self._computed = [before + more for before, more in zip(self._computed, computed, strict=True)]
            for each in finished:
                self._finished(each)
            self._dispatch()
        elif what == "published":
            engine.acknowledged = rest[1]
        elif what == "reply":
            engine.replies.append(rest[0])
        elif what == "failed":
            if at_start or rest[0].startswith("ConfigurationError"):
                raise ConfigurationError(rest[0].removeprefix("ConfigurationError: "))
            self._replace(engine, rest[0], at_start)

    def _finished(self, each: FinishedRollout) -> None:
        """Take a finished rollout once: it may arrive twice if a replaced process had sampled it already."""
        entry = self._open.get(each.key)
        if entry is None or each.index not in entry.missing:
            return
        self._losses = 0
        entry.missing.remove(each.index)
        if not entry.missing:
            del self._open[each.key]
        self._inbox.append(replace(each, key=entry.request.key))

    def _replace(self, engine: _Engine, why: str, at_start: bool) -> None:
        """Kill a process and start another in its place; give up after too many losses without a rollout."""
        # Replaced already in this round, because of its own `failed` message.
        if engine not in self._engines:
            return
        self._kill(engine)
        self.lost += 1
        self._losses += 1
        self._lost_tokens += engine.sampled
        words = _last_line(engine.log)
        if at_start or self._losses > MOST_LOSSES * len(self._engines):
            raise GeneratorLostError(f"generator: process {engine.number} {why}{words}")
        _log.warning("generator %d %s%s: it is started again", engine.number, why, words)
        self._engines[self._engines.index(engine)] = self._start(engine.number)
        self._adopt_orphans()

    def _adopt_orphans(self) -> None:
        """Queue again all open groups whose process is gone, the oldest first."""
        waiting = {entry.name for entry in self._orphans}
        for name in sorted(self._open):
            entry = self._open[name]
            if entry.engine not in self._engines and name not in waiting:
                entry.engine = None
                self._orphans.append(entry)
        self._dispatch()

    def _room(self, engine: _Engine) -> int:
        return engine.slots - sum(len(each.missing) for each in self._open.values() if each.engine is engine)

    def _dispatch(self) -> None:
        """Give waiting groups to the process with most room; what does not fit waits here, where all can take it."""
        while self._orphans and not self._held:
            up = [engine for engine in self._engines if engine.ready]
            best = max(up, key=self._room, default=None)
            if best is None or self._room(best) <= 0:
                return
            entry = self._orphans.popleft()
            entry.engine = best
            best.line.tell("submit", replace(entry.request, key=entry.name))

    def _kill(self, engine: _Engine) -> None:
        engine.process.kill()
        engine.process.wait()
        engine.line.close()

    def _end(self) -> None:
        # All get the message before any is waited for, so that they end at the same time.
        for engine in self._engines:
            engine.line.tell("stop")
        for engine in self._engines:
            with suppress(subprocess.TimeoutExpired):
                engine.process.wait(timeout=5)
            self._kill(engine)
        self._engines = []
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- weights and state -------------------------------------------------------------------------------

    def _name(self) -> int:
        """Return a name that was never given before."""
        self._next_name += 1
        return self._next_name

    def _write(self, weights: dict[str, Tensor]) -> Path:
        """Write weights to a file by rename, so that no reader sees half of it; tied tensors are written once."""
        from safetensors.torch import save_file

        once: dict[tuple[int, tuple[int, ...]], tuple[str, Tensor]] = {}
        for name, tensor in weights.items():
            once.setdefault((tensor.data_ptr(), tuple(tensor.shape)), (name, tensor))
        path = self._folder / f"weights-{self._name()}.safetensors"
        partial = path.with_suffix(".partial")
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in once.values()}, partial)
        partial.rename(path)
        return path

    @_one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return everything in flight, as each process holds it, and the weights once."""
        if self._closed is not None:
            return self._closed
        # A rollout that ends while other processes are asked is in the inbox and in the saved state; when the restored
        # process samples it again, `_finished` drops it.
        self._held = True
        try:
            states = [self._ask(engine, "state") if engine.ready else None for engine in list(self._engines)]
        finally:
            self._held = False
        state = {
            "next_name": self._next_name,
            "version": self.version,
            "weights": read_weights(self._published[0]),
            "generators": [each if engine.ready else None for each, engine in zip(states, self._engines, strict=True)],
            "finished": [(each.key, each.index) for each in self._inbox],
            "rollouts": packed([each.rollout for each in self._inbox]),
            "open": [
                (each.name, request_state(each.request), sorted(each.missing), each.engine and each.engine.number)
                for each in self._open.values()
            ],
        }
        self._dispatch()
        return state

    @_one_at_a_time
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything in flight; rollouts whose process saved no state, or is not there, are sampled again."""
        rollouts = unpacked(state["rollouts"])
        self._inbox = [
            FinishedRollout(key, index, rollout)
            for (key, index), rollout in zip(state["finished"], rollouts, strict=True)
        ]
        self._open = {
            name: _Open(name, request_from(request), set(missing)) for name, request, missing, _ in state["open"]
        }
        self._orphans.clear()
        # Beyond both counters: names that come back with the state must not be given again.
        self._next_name += state["next_name"]
        # Before the states, which come without weights: a process goes on under those that it has.
        self.publish(state["weights"], state["version"])
        for engine, own in zip(list(self._engines), state["generators"], strict=False):
            if own is None or not engine.ready:
                continue
            self._ask(engine, "load", own)
            for name, _, _, number in state["open"]:
                if number == engine.number:
                    self._open[name].engine = engine
        self._adopt_orphans()


def _place_for(model: nn.Module) -> Path | None:
    """Return the folder of shared memory if three copies of the weights fit there; None for a folder on a disk.

    Three: those in use, the next ones, and those that an evaluation returns to.
    """
    needed = 3.5 * sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return None
    if shutil.disk_usage(SHARED_MEMORY).free < needed:
        _log.warning("driver: %s has no %.1f GiB for weights; they go through files", SHARED_MEMORY, needed / 2**30)
        return None
    return SHARED_MEMORY


def _picklable(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint; refuse one that another process could not unpickle."""
    made_of = (blueprint.model_class, type(blueprint.config), getattr(blueprint.factory, "func", blueprint.factory))
    remedy = (
        "models, generators and tokenizers of your own must be importable from a module that is no script, or use "
        "driver=virtual"
    )
    script = next((each for each in made_of if getattr(each, "__module__", "") == "__main__"), None)
    if script is not None:
        raise ConfigurationError(f"driver: {script.__name__} is known to this script alone; {remedy}")
    try:
        pickle.dumps(blueprint)
    except Exception as error:
        raise ConfigurationError(
            f"driver: what the generator is made of cannot be sent to another process ({error}); {remedy}"
        ) from error
    return blueprint


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f" ({lines[-1].strip()[:300]})" if lines else ""
    return ""
