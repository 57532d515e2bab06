"""Work of other people's programs in a process of its own, under a limit of time, memory and length.

A chat template is a program that came with a model. Its sandbox keeps it from files and from Python's insides; it ends
neither an endless loop nor a text of gigabytes.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from sweeps.process import die_with_parent, end

T = TypeVar("T")

# For one item: wall clock, a busy machine's delays included, and characters of its text.
LIMIT_S = 20.0
MOST_CHARACTERS = 2**24
# For all together, beyond what the process holds when it is forked.
MEMORY_BYTES = 2**30

_TOKENIZERS = "TOKENIZERS_PARALLELISM"


class BoundedError(Exception):
    """Raised when the work on one item did not succeed.

    Attributes:
        number: place of the item.
        limit: whether it went beyond a limit; else the work raised an exception, which is in the message.
    """

    def __init__(self, message: str, number: int, limit: bool) -> None:
        super().__init__(message)
        self.number, self.limit = number, limit


def bounded(work: Callable[[T], str], items: Sequence[T]) -> Iterator[str]:
    """Yield the text that `work` makes of each item, computed in a fork of this process.

    Raises:
        BoundedError: the work on an item raised, or took more than `LIMIT_S`, `MEMORY_BYTES` or `MOST_CHARACTERS`.
    """
    if not items:
        return
    context = multiprocessing.get_context("fork")
    answers, writing = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(os.getpid(), writing, work, items))
    with _quiet_fork():
        child.start()
    writing.close()
    try:
        for number in range(len(items)):
            if not answers.poll(LIMIT_S):
                raise BoundedError(f"it has not ended after {LIMIT_S:g} s", number, True)
            try:
                said = json.loads(answers.recv_bytes())
            except EOFError:
                raise BoundedError(_MEMORY, number, True) from None
            if isinstance(said, dict):
                raise BoundedError(said["error"], number, said["limit"])
            yield said
    finally:
        end(child, (0.0, signal.SIGKILL))
        answers.close()


_MEMORY = f"it takes more than {MEMORY_BYTES // 2**20} MiB"


def _work(parent: int, answers: Connection[Any, Any], work: Callable[[T], str], items: Sequence[T]) -> NoReturn:
    """Do the work in the child, and end it: nothing that it shares with its parent is to be cleaned up twice."""
    try:
        die_with_parent(parent)
        _limit_memory()
        gc.freeze()  # a garbage collection would look through, and so copy, all that the parent holds
        for item in items:
            said = _said(work, item)
            answers.send_bytes(json.dumps(said).encode())
            if isinstance(said, dict):
                break
    finally:
        os._exit(0)


def _said(work: Callable[[T], str], item: T) -> str | dict[str, Any]:
    """Return the text of one item, or what went wrong."""
    try:
        text = work(item)
    except MemoryError:
        return {"error": _MEMORY, "limit": True}
    except Exception as error:
        return {"error": (str(error) or type(error).__name__)[:1000], "limit": False}
    if len(text) > MOST_CHARACTERS:
        return {"error": f"it writes {len(text)} characters, and {MOST_CHARACTERS} are allowed", "limit": True}
    return text


def _limit_memory() -> None:
    """Limit the address space to what this process has, and `MEMORY_BYTES` more, where the system can do that."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Fork without the warnings of Python and of tokenizers: the child runs on alone, and tokenizes nothing."""
    before = os.environ.get(_TOKENIZERS)
    os.environ.setdefault(_TOKENIZERS, "true")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            os.environ.pop(_TOKENIZERS, None)
