"""Parallel map: one function over many items, on several processes; and a clean end of pools at SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NoReturn, TypeVar

from sweeps.threads import multiply_on_one_thread

T = TypeVar("T")
R = TypeVar("R")

# With fewer items per worker the serial loop ends before a spawned process has finished its imports.
_LEAST = 4


def cores() -> int:
    """Return the number of CPU cores in this process's affinity mask (all cores where there is none)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def mapped(work: Callable[[T], R], items: Sequence[T], workers: int = 1) -> list[R]:
    """Return `work(item)` for every item, in order; results do not depend on the number of workers.

    With more than one, work, items and results must be picklable, and a script that calls this must guard its main
    part by `if __name__ == "__main__"`, for every worker imports it afresh.
    """
    workers = min(workers, len(items) // _LEAST)
    if workers < 2:
        return [work(item) for item in items]
    # Fresh processes: a fork would copy the locks of whatever threads the caller runs.
    with (
        exit_on_sigterm(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=multiply_on_one_thread) as pool,
    ):
        return list(pool.map(work, items, chunksize=_LEAST))


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Context manager: SIGTERM raises SystemExit inside, as Ctrl-C raises KeyboardInterrupt.

    By default SIGTERM ends a process at once. The semaphores of its pools are left over then, and Python's resource
    tracker warns of them on standard error. An existing handler stays in place.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second one does not wait for the clean-up
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
