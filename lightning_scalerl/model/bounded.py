"""Work of other people's programs in a process of its own, under a limit of time, memory and length.

A chat template is a program that came with a model. Its sandbox keeps it from files and from Python's insides; it ends
neither an endless loop nor a text of gigabytes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

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
    reading, writing = os.pipe()
    with _quiet_fork():
        child = os.fork()
    if child == 0:
        _work(writing, work, items)
    os.close(writing)
    number, status = 0, None
    try:
        with os.fdopen(reading, encoding="ascii") as answers:
            for line in answers:
                if not line.endswith("\n"):
                    break
                said = json.loads(line)
                if isinstance(said, dict):
                    raise BoundedError(said["error"], number, said["limit"])
                yield said
                number += 1
        _, status = os.waitpid(child, 0)
    finally:
        if status is None:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if number < len(items):
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        raise BoundedError(f"it has not ended after {LIMIT_S:g} s" if late else _MEMORY, number, True)


_MEMORY = f"it takes more than {MEMORY_BYTES // 2**20} MiB"


def _work(writing: int, work: Callable[[T], str], items: Sequence[T]) -> NoReturn:
    """Do the work in the child, and end it: nothing that it shares with its parent is to be cleaned up twice."""
    try:
        _limit_memory()
        # Its default action, which no loop can put off, and which comes too if the parent is gone.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        with os.fdopen(writing, "w", encoding="ascii") as answers:
            for item in items:
                signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
                said = _said(work, item)
                answers.write(json.dumps(said) + "\n")
                if isinstance(said, dict):
                    break
    except BaseException:
        os._exit(1)
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
