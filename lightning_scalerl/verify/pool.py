"""Pool of verifier processes, with a timeout per completion. Workers that hang or die are replaced.

A thread of this process sends completions to free workers and collects their outcomes. If grading is quick, a worker
gets further completions in advance, because a round trip would cost more than grading. A worker that exceeds its
timeout is killed together with all processes that it has started, and replaced. A slow completion does not delay
others: the completions that its worker got in advance move to other workers.
"""

from __future__ import annotations

import math
import secrets
import select
import subprocess
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
from lightning_scalerl.rollouts.grade import Charge, Grader, Outcome, Sample
from lightning_scalerl.sandbox.launch import SCRATCH, remove_leftovers
from sweeps.process import ended_with, kill_group, start_worker
from sweeps.run.activity import activity

# Start timeout of a worker: imports of a reward function may be slow on a busy machine.
START_S = 120.0
# Limits on the jobs that a worker gets in advance: expected wait of the last job in seconds, number of jobs, and bytes
# that fit into a pipe unread.
_PREFETCH_S, _MAX_PREFETCHED, _PREFETCH_BYTES = 0.01, 8, 32768
# Weight of the latest completion in the moving average of grading times.
_LATEST_WEIGHT = 0.1
# When a completion takes longer than this many seconds, its worker's prefetched jobs move to other workers.
_REASSIGN_S = 0.1


@dataclass
class _Job:
    """Work for one call of the grader: a completion, or all completions of a group (of one prompt)."""

    tickets: tuple[int, ...]
    samples: tuple[Sample, ...]
    attempts: int = 0
    seconds: float = 0.0
    charges: dict[int, tuple[Charge, ...]] = field(default_factory=dict)  # charges of failed attempts, by ticket

    @cached_property
    def message(self) -> memoryview:
        """Pickled sample or samples for the worker."""
        return ForkingPickler.dumps(self.samples[0] if len(self.samples) == 1 else self.samples)


@dataclass
class _Worker:
    """Worker process and the jobs that were sent to it."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    scratch: str  # part of the names of its sandboxes' folders, to find and delete them
    deadline: float  # monotonic time at which its start, or the job that it is grading, times out
    ready: bool = False
    jobs: deque[_Job] = field(default_factory=deque)  # the first one is being graded, the others are prefetched
    reassigned: deque[_Job] = field(default_factory=deque)  # moved to other workers; this one's answers are ignored
    job_start: float = 0.0  # monotonic time at which it began its current job


@dataclass
class _Shared:
    """State shared by callers and the pool's thread, protected by one lock."""

    queue: deque[_Job] = field(default_factory=deque)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # tickets whose outcome was not fetched yet
    awaited: set[int] = field(default_factory=set)  # tickets on which a caller is blocked
    error: ConfigurationError | None = None
    closing: bool = False
    woken: bool = False  # the pool's thread has an unread wake-up message


class VerifierPool:
    """Grades completions in `workers` processes, with a timeout for each attempt.

    Args:
        grader: the grader; it is pickled by value (cloudpickle) for each worker, including functions of a script.
        workers: number of processes.
        timeout_s: wall-clock timeout of one attempt, per completion. A grader may ask for more time for a completion
            (`needs_s`).
        retries: number of further attempts after an error.
        memory_gib: limit on a worker's data segment in GiB; None for no limit.

    Raises:
        ConfigurationError: the grader cannot be pickled, or (from `wait` and `done`) no worker can load it.
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
        self._pickled, self._memory_gib = pickled, memory_gib
        self._timeout_s, self._retries = timeout_s, retries
        self._needs_s = getattr(grader, "needs_s", lambda sample: 0.0)
        # A killed process cannot report in which function it was, so errors name all candidates.
        functions = getattr(grader, "functions", ())
        self._function_hint = f" (in reward function {' or '.join(functions)})" if functions else ""
        self._shared = _Shared()
        self._changed = threading.Condition()
        self._next_ticket = 0
        # Wakes the thread. It is a pipe because poll() can wait for it together with the workers.
        self._wake_r, self._wake_w = Pipe(duplex=False)
        # Poll object for the pool's life: `multiprocessing.connection.wait` creates one per call, which is slower.
        self._readable = select.poll()
        self._readable.register(self._wake_r, select.POLLIN)
        self._workers: list[_Worker] = []
        self._worker_count = workers
        self._mean_grading_s = _PREFETCH_S  # so high that nothing is prefetched until grading proves to be quick
        self._thread = threading.Thread(target=self._run, name="verifiers", daemon=True)
        self._thread.start()

    def submit(self, sample: Sample) -> int:
        """Queue a completion for grading and return its ticket, the number by which `wait` fetches the outcome."""
        return self.submit_group([sample])[0]

    def submit_group(self, samples: Sequence[Sample]) -> Sequence[int]:
        """Queue the completions of a group, to be graded by one call, and return their tickets immediately."""
        with self._changed:
            tickets = tuple(range(self._next_ticket, self._next_ticket + len(samples)))
            self._next_ticket += len(samples)
            self._shared.queue.append(_Job(tickets, tuple(samples)))
            self._shared.waiting.update(tickets)
            self._wake()
        return tickets

    def wait(self, ticket: int) -> Outcome:
        """Block until a ticket has an outcome and return it. An outcome can be fetched once.

        Raises:
            ConfigurationError: no worker can load the grader.
            KeyError: the ticket is unknown, forgotten or already fetched.
            RuntimeError: the pool is closed.
        """
        with self._changed:
            if ticket not in self._shared.waiting:
                raise KeyError(f"ticket {ticket} is not waited for")
            shared = self._shared
            shared.awaited.add(ticket)
            self._changed.wait_for(lambda: ticket in shared.outcomes or shared.error is not None or shared.closing)
            shared.awaited.discard(ticket)
            self._raise_error()
            if ticket not in shared.outcomes:
                raise RuntimeError("the pool of verifiers is closed")
            self._shared.waiting.discard(ticket)
            return self._shared.outcomes.pop(ticket)

    def done(self) -> Sequence[tuple[int, Outcome]]:
        """Return (ticket, outcome) for all outcomes that were not fetched yet, without blocking.

        Raises:
            ConfigurationError: no worker can load the grader.
        """
        with self._changed:
            self._raise_error()
            fetched = list(self._shared.outcomes.items())
            self._shared.outcomes.clear()
            self._shared.waiting.difference_update(ticket for ticket, _ in fetched)
            return fetched

    def forget(self, tickets: Iterable[int]) -> None:
        """Drop these tickets. Completions that a worker already has are still graded; their outcomes are dropped."""
        dropped = set(tickets)
        with self._changed:
            self._shared.queue = deque(job for job in self._shared.queue if not dropped.issuperset(job.tickets))
            self._shared.waiting -= dropped
            for ticket in dropped:
                self._shared.outcomes.pop(ticket, None)

    def close(self) -> None:
        """End all workers, even while they are grading."""
        with self._changed:
            self._shared.closing = True
            self._wake()
            self._changed.notify_all()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._shared.error is not None:
            raise self._shared.error

    def _wake(self) -> None:
        """Wake the pool's thread, unless a wake-up message is unread already. Call it with the lock held."""
        if not self._shared.woken:
            self._shared.woken = True
            self._wake_w.send_bytes(b".")

    # --- in the pool's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the workers and serve them until the pool is closed or fails; then kill them."""
        # A worker dies with the thread that started it (PR_SET_PDEATHSIG), so only this thread starts workers.
        try:
            self._workers = [self._start_worker() for _ in range(self._worker_count)]
            while not self._shared.closing:
                self._assign()
                self._listen()
                self._handle_timeouts()
        except BaseException as error:
            self._fail(f"verify: the pool of verifiers has ended ({type(error).__name__}: {error})")
        finally:
            for worker in self._workers:
                _kill(worker)

    def _start_worker(self) -> _Worker:
        scratch = secrets.token_hex(8)
        process, connection = start_worker(
            "lightning_scalerl.verify.worker", self._pickled, self._memory_gib, {SCRATCH: scratch}
        )
        self._readable.register(connection, select.POLLIN)
        return _Worker(process=process, connection=connection, scratch=scratch, deadline=time.monotonic() + START_S)

    def _assign(self) -> None:
        """Send one job to every worker, then a second job to every worker, and so on, to keep them equally busy."""
        prefetched = int(min(_MAX_PREFETCHED, max(1.0, _PREFETCH_S / max(self._mean_grading_s, 1e-6))))
        for job_count in range(prefetched):
            for worker in self._workers:
                free = worker.ready and not worker.reassigned and len(worker.jobs) == job_count
                if free and sum(len(job.message) for job in worker.jobs) < _PREFETCH_BYTES:
                    with self._changed:
                        queue = self._shared.queue
                        # A large message would block in the pipe until the busy worker reads it.
                        if not queue or (job_count and len(queue[0].message) > _PREFETCH_BYTES):
                            return
                        job = queue.popleft()
                    worker.jobs.append(job)
                    if not job_count:
                        self._start_timeout(worker)
                    # A dead worker is detected in `_listen`, by its closed pipe.
                    with suppress(OSError):
                        worker.connection.send_bytes(job.message)

    def _start_timeout(self, worker: _Worker) -> None:
        job = worker.jobs[0]
        job.attempts += 1
        worker.job_start = time.monotonic()
        worker.deadline = worker.job_start + self._job_timeout_s(job)

    def _job_timeout_s(self, job: _Job) -> float:
        return sum(max(self._timeout_s, float(self._needs_s(sample))) for sample in job.samples)

    def _listen(self) -> None:
        """Wait for messages of workers until the next timeout, and handle them."""
        busy = [worker.deadline for worker in self._workers if worker.jobs or worker.reassigned or not worker.ready]
        busy += [worker.job_start + _REASSIGN_S for worker in self._workers if len(worker.jobs) > 1]
        timeout_s = max(0.0, min(busy) - time.monotonic()) if busy else None
        readable = self._readable_descriptors(timeout_s)
        for _ in range(_MAX_PREFETCHED):
            if self._wake_r.fileno() in readable:
                with self._changed:
                    self._wake_r.recv_bytes()
                    self._shared.woken = False
            for number, worker in enumerate(self._workers):
                if worker.connection.fileno() in readable:
                    self._receive(number, worker)
            # Also handle messages that have arrived meanwhile, before `_assign` goes through all workers again.
            readable = self._readable_descriptors(0.0)
            if not readable:
                break

    def _readable_descriptors(self, timeout_s: float | None) -> set[int]:
        """Wait until a descriptor is readable, at most `timeout_s` (None: no limit), and return all readable ones."""
        return {fd for fd, _ in self._readable.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))}

    def _receive(self, number: int, worker: _Worker) -> None:
        """Read one message of a worker and handle it, or replace the worker if it is dead or the message unreadable."""
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(number, "its process died", died=True)
        except Exception as error:  # the message cannot be unpickled
            self._replace(number, f"its answer cannot be read ({type(error).__name__}: {error})")
        else:
            self._handle(worker, message)

    def _handle(self, worker: _Worker, message: Any) -> None:
        """Handle a message of a worker.

        The first message is None if the worker is ready, or the error that prevented it from loading the grader. Later
        messages are an outcome or the list of a group's outcomes.
        """
        if not worker.ready:
            worker.ready = True
            if message is not None:
                self._fail(f"task: the verifier cannot be loaded in a process of its own: {message}")
            return
        # A worker answers in order: answers to reassigned jobs come after the answer to its current job.
        if worker.jobs:
            outcomes = message if isinstance(message, list) else [message]
            self._mean_grading_s += _LATEST_WEIGHT * (
                sum(outcome.seconds for outcome in outcomes) - self._mean_grading_s
            )
            self._record(worker.jobs.popleft(), outcomes)
            if worker.jobs:
                self._start_timeout(worker)
        elif worker.reassigned:
            worker.reassigned.popleft()
        if worker.reassigned and not worker.jobs:
            worker.deadline = time.monotonic() + self._job_timeout_s(worker.reassigned[0])

    def _handle_timeouts(self) -> None:
        """Reassign jobs that wait behind a slow one, and replace workers that have exceeded their timeout."""
        now = time.monotonic()
        for number, worker in enumerate(self._workers):
            if len(worker.jobs) > 1 and now >= worker.job_start + _REASSIGN_S:
                waiting_jobs = [worker.jobs.pop() for _ in range(len(worker.jobs) - 1)]
                worker.reassigned.extendleft(waiting_jobs)
                with self._changed:
                    self._shared.queue.extendleft(waiting_jobs)
            if (worker.jobs or worker.reassigned) and now >= worker.deadline:
                self._replace(number, f"timed out after {worker.deadline - worker.job_start:g} s")
            elif not worker.ready and now >= worker.deadline:
                self._fail(f"task: the verifier was not loaded within {START_S:g} s")

    def _replace(self, number: int, reason: str, died: bool = False) -> None:
        """Kill a worker and start another. Its current job's attempt counts as failed; its prefetched jobs are queued
        again.
        """
        worker = self._workers[number]
        if died:
            with suppress(subprocess.TimeoutExpired):
                reason += f" ({ended_with(worker.process.wait(1.0))})"
        self._readable.unregister(worker.connection)  # before it is closed: another file may get its descriptor
        status = _kill(worker)
        if not worker.ready:
            self._fail(f"task: the verifier's process ended while it was loaded ({ended_with(status)})")
            return
        self._workers[number] = self._start_worker()
        if worker.jobs:
            job = worker.jobs.popleft()
            error_outcome = Outcome(
                "error",
                why=reason + self._function_hint,
                seconds=(time.monotonic() - worker.job_start) / len(job.tickets),
            )
            self._record(job, [error_outcome] * len(job.tickets))
        with self._changed:
            # extendleft reverses the order, so it gets the jobs reversed: the oldest job is first again.
            self._shared.queue.extendleft(reversed(worker.jobs))

    def _record(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        """Record a job's outcomes, or queue the job again after an error if it has attempts left."""
        activity.note("grade")
        with self._changed:
            if not self._shared.waiting.intersection(job.tickets):
                return
            if any(outcome.kind == "error" for outcome in outcomes) and job.attempts <= self._retries:
                job.seconds += sum(outcome.seconds for outcome in outcomes)
                for ticket, outcome in zip(job.tickets, outcomes, strict=True):
                    job.charges[ticket] = job.charges.get(ticket, ()) + outcome.charges
                self._shared.queue.append(job)
                return
            earlier_s = job.seconds / len(job.tickets)  # time of failed attempts, per completion
            for ticket, outcome in zip(job.tickets, outcomes, strict=True):
                if ticket in self._shared.waiting:
                    seconds = earlier_s + outcome.seconds
                    charges = job.charges.get(ticket, ()) + outcome.charges
                    self._shared.outcomes[ticket] = replace(
                        outcome, seconds=seconds, attempts=job.attempts, charges=charges
                    )
            if self._shared.awaited.intersection(job.tickets):
                self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._shared.error = self._shared.error or ConfigurationError(" ".join(reason.split()))
            self._shared.closing = True
            self._changed.notify_all()


def _kill(worker: _Worker) -> int:
    """Kill a worker's process group, delete the scratch folders of its sandboxes, and return its exit status."""
    kill_group(worker.process.pid)
    worker.connection.close()
    status = worker.process.wait()
    remove_leftovers(worker.scratch)
    return status
