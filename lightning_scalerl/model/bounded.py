"""Runs untrusted templates in a forked process with limits on time, memory and output length.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from files and Python internals, but
stops neither an endless loop nor an output of gigabytes.
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
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from sweeps.process import die_with_parent, end

T = TypeVar("T")

# Limits for one item: wall-clock seconds (generous, because the machine may be busy) and characters of output.
LIMIT_S = 20.0
MAX_CHARACTERS = 2**24
# Memory limit for all items together, in addition to the memory that the process has when it is forked.
MEMORY_BYTES = 2**30

_TOKENIZERS_VARIABLE = "TOKENIZERS_PARALLELISM"


class BoundedError(Exception):
    """Raised when the work on one item fails.

    Attributes:
        number: index of the item.
        limit: whether a limit was exceeded. Otherwise the work raised an exception, whose text is the message.
    """

    def __init__(self, message: str, number: int, limit: bool) -> None:
        super().__init__(message)
        self.number, self.limit = number, limit


def bounded(work: Callable[[T], str], items: Sequence[T]) -> Iterator[str]:
    """Yield the text `work(item)` for each item, computed in a fork of this process.

    Raises:
        BoundedError: `work` raised, or exceeded `LIMIT_S`, `MEMORY_BYTES` or `MAX_CHARACTERS`.
    """
    if not items:
        return
    context = multiprocessing.get_context("fork")
    answers, child_end = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(os.getpid(), child_end, work, items))
    with _quiet_fork():
        child.start()
    child_end.close()
    try:
        for number in range(len(items)):
            if not answers.poll(LIMIT_S):
                raise BoundedError(f"it has not ended after {LIMIT_S:g} s", number, True)
            try:
                answer = json.loads(answers.recv_bytes())
            except EOFError:  # the child ended without an answer, because it had no memory to send one
                raise BoundedError(_MEMORY_MESSAGE, number, True) from None
            if isinstance(answer, dict):
                raise BoundedError(answer["error"], number, answer["limit"])
            yield answer
    finally:
        end(child, (0.0, signal.SIGKILL))
        answers.close()


class BoundedWorker(Generic[T]):
    """Does what `bounded` does, in one child process for all calls, because a fork takes time.

    Args:
        work: function that turns an item into a text; items must be picklable.
    """

    def __init__(self, work: Callable[[T], str]) -> None:
        self._work = work
        self._end: Callable[[], Any] | None = None  # ends the child
        self._connection: Connection[Any, Any] | None = None

    def __call__(self, items: Sequence[T]) -> list[str]:
        """Return the text of each item.

        Raises:
            BoundedError: see `bounded`.
        """
        answers = []
        for number, item in enumerate(items):
            connection = self._connection or self._start()
            try:
                connection.send(item)
                if not connection.poll(LIMIT_S):
                    raise BoundedError(f"it has not ended after {LIMIT_S:g} s", number, True)
                answer = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                self.close()
                raise BoundedError(_MEMORY_MESSAGE, number, True) from None
            except BoundedError:
                self.close()
                raise
            if isinstance(answer, dict):
                raise BoundedError(answer["error"], number, answer["limit"])
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the child; the next call starts another one."""
        if self._end is not None:
            self._end()
        self._end = self._connection = None

    def _start(self) -> Connection[Any, Any]:
        context = multiprocessing.get_context("fork")
        self._connection, child_end = context.Pipe()
        child = context.Process(target=_serve, args=(os.getpid(), child_end, self._work), daemon=True)
        with _quiet_fork():
            child.start()
        child_end.close()
        # If `close` is never called, this finalizer ends the child when this process exits. `multiprocessing` would
        # send SIGTERM and then wait for ever: the child inherits the signal handler of `scalerl train`, which does not
        # end it.
        self._end = Finalize(self, _end_child, (child, self._connection), exitpriority=0)
        return self._connection


def _end_child(child: BaseProcess, connection: Connection[Any, Any]) -> None:
    end(child, (0.0, signal.SIGKILL))
    connection.close()


def _serve(parent: int, connection: Connection[Any, Any], work: Callable[[T], str]) -> NoReturn:
    try:
        die_with_parent(parent)
        # Close the parent's pipes and locks: if copies stayed open here, other processes would not see that the parent
        # closes its own.
        for descriptor in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {
            0,
            1,
            2,
            connection.fileno(),
        }:
            with suppress(OSError):
                os.close(descriptor)
        _limit_memory()
        gc.freeze()
        while True:
            connection.send_bytes(json.dumps(_answer(work, connection.recv())).encode())
    except (EOFError, OSError):  # the parent has gone
        pass
    finally:
        os._exit(0)


_MEMORY_MESSAGE = f"it takes more than {MEMORY_BYTES // 2**20} MiB"


def _work(parent: int, answers: Connection[Any, Any], work: Callable[[T], str], items: Sequence[T]) -> NoReturn:
    """Do the work in the child and exit, without the clean-up handlers that the child shares with its parent."""
    try:
        die_with_parent(parent)
        _limit_memory()
        gc.freeze()  # a garbage collection would touch, and thereby copy, all memory shared with the parent
        for item in items:
            answer = _answer(work, item)
            answers.send_bytes(json.dumps(answer).encode())
            if isinstance(answer, dict):
                break
    finally:
        os._exit(0)


def _answer(work: Callable[[T], str], item: T) -> str | dict[str, Any]:
    """Return the text of one item, or a mapping with the error."""
    try:
        text = work(item)
    except MemoryError:
        return {"error": _MEMORY_MESSAGE, "limit": True}
    except Exception as error:
        return {"error": (str(error) or type(error).__name__)[:1000], "limit": False}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"it writes {len(text)} characters, and {MAX_CHARACTERS} are allowed", "limit": True}
    return text


def _limit_memory() -> None:
    """Limit the address space to its current size plus `MEMORY_BYTES`, on systems that support it."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        new_limit = pages * resource.getpagesize() + MEMORY_BYTES
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS,
            (new_limit if hard_limit == resource.RLIM_INFINITY else min(new_limit, hard_limit), hard_limit),
        )


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Suppress fork warnings of Python and tokenizers: the child has one thread and does not tokenize."""
    previous = os.environ.get(_TOKENIZERS_VARIABLE)
    os.environ.setdefault(_TOKENIZERS_VARIABLE, "true")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if previous is None:
            os.environ.pop(_TOKENIZERS_VARIABLE, None)
