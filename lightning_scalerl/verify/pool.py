"""Verifiers in processes of their own: asynchronous, each of them killable, replaced when one is.

A thread of this process gives completions to whichever worker is free, and takes what comes back. Where grading is
quick a worker prefetches the next ones before it has answered: a round trip would cost more than grading.
A worker that is over its time is killed with everything that it has started, and another takes its place; so is one
that dies. Nobody else waits meanwhile: jobs prefetched behind a completion that takes long are given to others.
"""

from __future__ import annotations

import math
import os
import pickle
import secrets
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.sandbox.launch import SCRATCH, remove_left
from lightning_scalerl.verify.grade import Grader, Outcome, Sample
from sweeps.process import ended_with, kill_group
from sweeps.run.activity import activity

# Imports of a reward function may be heavy, on a busy machine.
START_S = 120.0
# Prefetch limits of a worker: expected wait of the last job, number of jobs, and bytes that fit into a pipe unread.
_AHEAD_S, _MOST_AHEAD, _AHEAD_BYTES = 0.01, 8, 32768
# Weight of the latest completion in the moving average of grading times.
_LATEST = 0.1
# After so many seconds a completion counts as long, and the jobs queued behind it are given to other workers.
_LONG_S = 0.1


@dataclass
class _Job:
    """Completion, or those of a group, being graded by one call, or waiting for it."""

    tickets: tuple[int, ...]
    samples: tuple[Sample, ...]
    attempts: int = 0
    seconds: float = 0.0

    @cached_property
    def message(self) -> memoryview:
        """Return the message that is sent to the worker."""
        return ForkingPickler.dumps(self.samples[0] if len(self.samples) == 1 else self.samples)


@dataclass
class _Worker:
    """Worker process, with the jobs that it has in hand."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    scratch: str  # part of the names of its sandboxes' folders, so that they can be found and deleted
    deadline: float  # of the start, or of the job that is being graded
    ready: bool = False
    jobs: deque[_Job] = field(default_factory=deque)  # the first is being graded, the others are prefetched
    given_away: deque[_Job] = field(default_factory=deque)  # prefetched, now given to others: answers ignored
    since: float = 0.0


@dataclass
class _Shared:
    """State that callers and the pool's thread share, under one lock."""

    queue: deque[_Job] = field(default_factory=deque)
    done: dict[int, Outcome] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # tickets that are given out and not fetched
    awaited: set[int] = field(default_factory=set)  # those of them that a caller is blocked on
    error: ConfigurationError | None = None
    closing: bool = False
    woken: bool = False


class VerifierPool:
    """Grades completions in `workers` processes, with a timeout for each.

    Args:
        grader: grades one completion; sent to each worker by value (cloudpickle), functions of a script included.
        workers: number of processes.
        timeout_s: wall-clock seconds for one attempt, times the completions that it grades; more where the grader asks
            for more for a completion (`needs_s`).
        retries: number of further attempts after an error.
        memory_gib: data that a worker may hold, in GiB; None for no limit.

    Raises:
        ConfigurationError: the grader cannot be sent, or (by `wait` and `done`) none of the workers can load it.
    """

    def __init__(
        self, grader: Grader, workers: int, timeout_s: float, retries: int = 1, memory_gib: float | None = None
    ) -> None:
        import cloudpickle

        try:
            pickled = cloudpickle.dumps(grader)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"task: the verifier of {type(grader).__name__} cannot be sent to a process of its own "
                f"({type(error).__name__}: {error}); hold less in it, or say verify.workers=0 to have it grade in the "
                "trainer's own process, where nothing can stop it if it hangs"
            ) from error
        # Handed over as a file in memory: a pipe would hold the pool up until the new process reads.
        self._message = pickle.dumps((list(sys.path), memory_gib, pickled))
        self._timeout_s, self._retries = timeout_s, retries
        self._needs_s = getattr(grader, "needs_s", lambda sample: 0.0)
        # A process that was killed cannot say in which function it was.
        functions = getattr(grader, "functions", ())
        self._named = f" (in reward function {' or '.join(functions)})" if functions else ""
        self._shared = _Shared()
        self._changed = threading.Condition()
        # A pipe, because poll() can wait for it together with the workers.
        self._next = 0
        self._wake_r, self._wake_w = Pipe(duplex=False)
        # One for the pool's life: `multiprocessing.connection.wait` makes one a call, which takes longer than grading.
        self._readable = select.poll()
        self._readable.register(self._wake_r, select.POLLIN)
        self._workers: list[_Worker] = []
        self._count = workers
        self._mean_s = _AHEAD_S  # nothing is given out ahead until grading is seen to be quick
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()

    def submit(self, sample: Sample) -> int:
        """Queue a completion for grading; return its ticket at once."""
        return self.submit_group([sample])[0]

    def submit_group(self, samples: Sequence[Sample]) -> Sequence[int]:
        """Queue the completions of a group, to be graded by one call; return their tickets at once."""
        with self._changed:
            tickets = tuple(range(self._next, self._next + len(samples)))
            self._next += len(samples)
            self._shared.queue.append(_Job(tickets, tuple(samples)))
            self._shared.waiting.update(tickets)
            self._wake()
        return tickets

    def wait(self, ticket: int) -> Outcome:
        """Return the outcome of a ticket, once, as soon as there is one.

        Raises:
            ConfigurationError: no worker can load the grader.
            KeyError: the ticket is unknown, forgotten or fetched already.
            RuntimeError: the pool is closed.
        """
        with self._changed:
            if ticket not in self._shared.waiting:
                raise KeyError(f"ticket {ticket} is not waited for")
            shared = self._shared
            shared.awaited.add(ticket)
            self._changed.wait_for(lambda: ticket in shared.done or shared.error is not None or shared.closing)
            shared.awaited.discard(ticket)
            self._raise()
            if ticket not in shared.done:
                raise RuntimeError("the pool of verifiers is closed")
            self._shared.waiting.discard(ticket)
            return self._shared.done.pop(ticket)

    def done(self) -> Sequence[tuple[int, Outcome]]:
        """Return all outcomes that were not fetched, with their tickets.

        Raises:
            ConfigurationError: no worker can load the grader.
        """
        with self._changed:
            self._raise()
            fetched = list(self._shared.done.items())
            self._shared.done.clear()
            self._shared.waiting.difference_update(ticket for ticket, _ in fetched)
            return fetched

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop these tickets; a completion in hand is still graded, and its outcome dropped."""
        gone = set(tickets)
        with self._changed:
            self._shared.queue = deque(job for job in self._shared.queue if not gone.issuperset(job.tickets))
            self._shared.waiting -= gone
            for ticket in gone:
                self._shared.done.pop(ticket, None)

    def close(self) -> None:
        """End all workers, whatever they have in hand."""
        with self._changed:
            self._shared.closing = True
            self._wake()
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._shared.error is not None:
            raise self._shared.error

    def _wake(self) -> None:
        """Wake the pool's thread, under the lock; once is enough until it has woken."""
        if not self._shared.woken:
            self._shared.woken = True
            self._wake_w.send_bytes(b".")

    # --- in the pool's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the workers and serve them until the pool is closed or fails; then kill them."""
        # The kernel ends a worker with the thread that started it: all of them are started in this one.
        try:
            self._workers = [self._started() for _ in range(self._count)]
            while not self._shared.closing:
                self._assign()
                self._listen()
                self._end_overruns()
        except BaseException as error:
            self._fail(f"verify: the pool of verifiers has ended ({type(error).__name__}: {error})")
        finally:
            for worker in self._workers:
                _kill(worker)

    def _started(self) -> _Worker:
        """Start a worker process; it has `START_S` seconds to load the grader."""
        process, ours, scratch = _process(self._message)
        self._readable.register(ours, select.POLLIN)
        return _Worker(process, ours, scratch, time.monotonic() + START_S)

    def _assign(self) -> None:
        """Give one job to each worker, then another to each, so that they end together."""
        ahead = int(min(_MOST_AHEAD, max(1.0, _AHEAD_S / max(self._mean_s, 1e-6))))
        for held in range(ahead):
            for worker in self._workers:
                free = worker.ready and not worker.given_away and len(worker.jobs) == held
                if free and sum(len(job.message) for job in worker.jobs) < _AHEAD_BYTES:
                    with self._changed:
                        queue = self._shared.queue
                        # A large message would block in the pipe until the busy worker reads.
                        if not queue or (held and len(queue[0].message) > _AHEAD_BYTES):
                            return
                        job = queue.popleft()
                    worker.jobs.append(job)
                    if not held:
                        self._begins(worker)
                    # A dead worker is noticed in `_listen`, by its closed pipe.
                    with suppress(OSError):
                        worker.connection.send_bytes(job.message)

    def _begins(self, worker: _Worker) -> None:
        """Start the timeout of a worker's first job."""
        job = worker.jobs[0]
        job.attempts += 1
        worker.since = time.monotonic()
        worker.deadline = worker.since + self._allowed_s(job)

    def _allowed_s(self, job: _Job) -> float:
        return sum(max(self._timeout_s, float(self._needs_s(sample))) for sample in job.samples)

    def _listen(self) -> None:
        """Wait until a worker has sent something, or a timeout has passed."""
        busy = [worker.deadline for worker in self._workers if worker.jobs or worker.given_away or not worker.ready]
        busy += [worker.since + _LONG_S for worker in self._workers if len(worker.jobs) > 1]
        timeout_s = max(0.0, min(busy) - time.monotonic()) if busy else None
        heard = self._heard_from(timeout_s)
        for _ in range(_MOST_AHEAD):
            if self._wake_r.fileno() in heard:
                with self._changed:
                    self._wake_r.recv_bytes()
                    self._shared.woken = False
            for number, worker in enumerate(self._workers):
                if worker.connection.fileno() in heard:
                    self._take_answer(number, worker)
            # What has come meanwhile is taken too, before workers are given more: `_assign` looks at all of them.
            heard = self._heard_from(0.0)
            if not heard:
                break

    def _heard_from(self, timeout_s: float | None) -> set[int]:
        """Return descriptors with something to read, waiting at most so long for one; None for without limit."""
        return {fd for fd, _ in self._readable.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))}

    def _take_answer(self, number: int, worker: _Worker) -> None:
        """Read one message of a worker, and replace the worker if there is none to read."""
        try:
            said = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(number, "its process died", died=True)
        except Exception as error:  # what it sent cannot be read
            self._replace(number, f"its answer cannot be read ({type(error).__name__}: {error})")
        else:
            self._heard(worker, said)

    def _heard(self, worker: _Worker, said: Any) -> None:
        """Handle a worker's message: that it is ready, that it cannot load the grader, or an outcome."""
        if not worker.ready:
            worker.ready = True
            if said is not None:
                self._fail(f"task: the verifier cannot be loaded in a process of its own: {said}")
            return
        # A worker answers in order, and what was given away came behind what it kept.
        if worker.jobs:
            outcomes = said if isinstance(said, list) else [said]
            self._mean_s += _LATEST * (sum(outcome.seconds for outcome in outcomes) - self._mean_s)
            self._ended(worker.jobs.popleft(), outcomes)
            if worker.jobs:
                self._begins(worker)
        elif worker.given_away:
            worker.given_away.popleft()
        if worker.given_away and not worker.jobs:
            worker.deadline = time.monotonic() + self._allowed_s(worker.given_away[0])

    def _end_overruns(self) -> None:
        """Give away jobs that wait behind a long one, and replace workers that are over their time."""
        now = time.monotonic()
        for number, worker in enumerate(self._workers):
            if len(worker.jobs) > 1 and now >= worker.since + _LONG_S:
                behind = [worker.jobs.pop() for _ in range(len(worker.jobs) - 1)]
                worker.given_away.extendleft(behind)
                with self._changed:
                    self._shared.queue.extendleft(behind)
            if (worker.jobs or worker.given_away) and now >= worker.deadline:
                self._replace(number, f"timed out after {worker.deadline - worker.since:g} s")
            elif not worker.ready and now >= worker.deadline:
                self._fail(f"task: the verifier was not loaded within {START_S:g} s")

    def _replace(self, number: int, why: str, died: bool = False) -> None:
        """Kill a worker and start another; its first job ends in an error, those behind it are queued again."""
        worker = self._workers[number]
        if died:
            with suppress(subprocess.TimeoutExpired):
                why += f" ({ended_with(worker.process.wait(1.0))})"
        self._readable.unregister(worker.connection)  # while it has its number, which a later file may be given
        status = _kill(worker)
        if not worker.ready:
            self._fail(f"task: the verifier's process ended while it was loaded ({ended_with(status)})")
            return
        self._workers[number] = self._started()
        if worker.jobs:
            job = worker.jobs.popleft()
            lost = Outcome("error", why=why + self._named, seconds=(time.monotonic() - worker.since) / len(job.tickets))
            self._ended(job, [lost] * len(job.tickets))
        with self._changed:
            # extendleft reverses: the oldest stands first again.
            self._shared.queue.extendleft(reversed(worker.jobs))

    def _ended(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        """Record a job's outcomes, or queue the job again after an error if it has an attempt left."""
        activity.note("grade")
        with self._changed:
            if not self._shared.waiting.intersection(job.tickets):
                return
            if any(outcome.kind == "error" for outcome in outcomes) and job.attempts <= self._retries:
                job.seconds += sum(outcome.seconds for outcome in outcomes)
                self._shared.queue.append(job)
                return
            before_s = job.seconds / len(job.tickets)
            for ticket, outcome in zip(job.tickets, outcomes, strict=True):
                if ticket in self._shared.waiting:
                    seconds = before_s + outcome.seconds
                    self._shared.done[ticket] = replace(outcome, seconds=seconds, attempts=job.attempts)
            if self._shared.awaited.intersection(job.tickets):
                self._changed.notify_all()

    def _fail(self, why: str) -> None:
        with self._changed:
            self._shared.error = self._shared.error or ConfigurationError(" ".join(why.split()))
            self._shared.closing = True
            self._changed.notify_all()


def _process(message: bytes) -> tuple[subprocess.Popen[bytes], Connection[Any, Any], str]:
    """Start a worker's process with what it loads; return it, our end of its pipe, and its sandboxes' mark."""
    ours, theirs = Pipe()
    with os.fdopen(os.memfd_create("grader"), "w+b") as handed:
        handed.write(message)
        handed.flush()
        handed.seek(0)
        numbers = [theirs.fileno(), handed.fileno()]
        command = [sys.executable, "-m", "lightning_scalerl.verify.worker", str(numbers[0]), str(os.getpid())]
        scratch = secrets.token_hex(8)
        # A group of its own: it is killed as one, and Ctrl-C is not for it.
        process = subprocess.Popen(
            [*command, str(numbers[1])], pass_fds=numbers, stdin=subprocess.DEVNULL, start_new_session=True,
            env=_environment() | {SCRATCH: scratch},
        )  # fmt: skip
    # Open here as well it would hide the end of the process: no end of file, only a time-out.
    theirs.close()
    return process, ours, scratch


def _kill(worker: _Worker) -> int:
    """Kill a worker with its process group and its sandboxes' scratch folders; return the exit status."""
    kill_group(worker.process.pid)
    worker.connection.close()
    status = worker.process.wait()
    remove_left(worker.scratch)
    return status


def _environment() -> dict[str, str]:
    """Return this process's environment without settings that would make each worker use all cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
