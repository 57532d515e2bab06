"""Map a function over items in several processes, and end pools of processes cleanly at SIGTERM."""

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

# With fewer items per worker, a loop in this process takes less time than the imports of the workers.
_LEAST = 4


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parallel_map(work: Callable[[T], R], items: Sequence[T], workers: int = 1) -> list[R]:
    """Return `work(item)` for every item, in order. The results do not depend on the number of workers.

    With more than one worker, work, items and results must be picklable. A script that calls this must guard its main
    part by `if __name__ == "__main__"`, because every worker imports the script again.
    """
    workers = min(workers, len(items) // _LEAST)
    if workers < 2:
        return [work(item) for item in items]
    # Processes are spawned, because a fork would copy locks that the caller's threads hold.
    with (
        exit_on_sigterm(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=multiply_on_one_thread) as pool,
    ):
        return list(pool.map(work, items, chunksize=_LEAST))


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """In a `with` block, let SIGTERM raise SystemExit, as Ctrl-C raises KeyboardInterrupt.

    By default SIGTERM ends a process at once. The semaphores of its pools are then not released, and Python's resource
    tracker warns of them on stderr. A handler that is already set stays in place.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
