"""Parallel map: one function over many items, on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

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
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=multiply_on_one_thread) as pool:
        return list(pool.map(work, items, chunksize=_LEAST))
