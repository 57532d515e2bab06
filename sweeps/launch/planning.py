"""Planning in a process of its own: what it imports, and it imports torch, is gone when it ends.

A controller follows its study for days and needs none of that. Composing and checking members takes a minute at most,
and whatever the user's own choices import besides.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO

from sweeps.errors import UserError
from sweeps.executor.base import Outcome, load_entry
from sweeps.run.spec import RunSpec

# Interrupted while it still imports, it has nothing to say.
_CHILD = """
import json, os, sys
try:
    sys.path[:] = json.loads(sys.argv[3])
    from sweeps.launch.planning import answer
    answer(int(sys.argv[1]), int(sys.argv[2]))
except KeyboardInterrupt:
    os._exit(130)
"""
_LENGTH = 8  # bytes that say how long a message is
_EXIT_S = 30.0  # after its answer, for what the libraries that it loaded do at the end


class PlannerLostError(UserError):
    """The process that plans is gone: it says nothing of what it was asked."""


class Planner:
    """A planner in a process of its own, which may be asked again and again; closed, it is gone with all it imported.

    What it prints is seen here, Ctrl-C reaches it, and it ends when this process does.

    Args:
        planner: `module:function`, from override lists and the user's folders to run specs.
        folders: the user's.
    """

    def __init__(self, planner: str, folders: Sequence[str]) -> None:
        self._planner, self._folders = planner, list(folders)
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: BinaryIO | None = None

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        """Ask for the members of these override lists.

        Raises:
            PlannerLostError: the process was killed, or ended without an answer.
            Exception: whatever the planner raises; a note says where.
        """
        child, answers = self._started()
        assert child.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it is gone: how, is told below
                _send(
                    child.stdin, pickle.dumps((self._planner, [list(each) for each in override_lists], self._folders))
                )
            raw = _receive(answers)
        except BaseException:
            _end(child)
            self.close()
            raise
        if raw is None:
            code = _ended(child)
            self.close()
            raise PlannerLostError(
                f"planner: its process ended without an answer ({Outcome('', code).how}); what it printed is above, "
                "and if it was killed for its memory, launch where there is more"
            )
        specs, error, told = pickle.loads(raw)
        if error is not None:
            error.add_note(told)
            raise error
        planned: list[RunSpec] = specs
        return planned

    def _started(self) -> tuple[subprocess.Popen[bytes], BinaryIO]:
        if self._child is None or self._answers is None:
            reading, writing = os.pipe()
            words = [str(writing), str(os.getpid()), json.dumps([str(each) for each in sys.path])]
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", _CHILD, *words], stdin=subprocess.PIPE, pass_fds=[writing]
                )
            except BaseException:
                os.close(reading)
                raise
            finally:
                os.close(writing)
            self._answers = os.fdopen(reading, "rb")
        return self._child, self._answers

    def close(self) -> None:
        """End the process, and wait for it."""
        child, answers = self._child, self._answers
        self._child = self._answers = None
        if child is None or answers is None:
            return
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.close()
        try:
            _ended(child)
        except BaseException:
            _end(child)
            raise
        finally:
            answers.close()


def plan_apart(planner: str, override_lists: Sequence[Sequence[str]], folders: Sequence[str]) -> list[RunSpec]:
    """Call a planner once in a process of its own; see `Planner`."""
    with Planner(planner, folders) as ask:
        return ask(override_lists)


def answer(descriptor: int, parent: int) -> None:
    """In the child: read what is asked from stdin, and write specs or an exception to the descriptor, until its end."""
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="parent-watch").start()
    with os.fdopen(descriptor, "wb") as answers:
        while (asked := _receive(sys.stdin.buffer)) is not None:
            planner, override_lists, folders = pickle.loads(asked)
            found: tuple[list[RunSpec] | None, BaseException | None, str]
            try:
                found = load_entry(planner)(override_lists, folders), None, ""
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                found = None, error, "in the planner's process:\n" + traceback.format_exc()
            sys.stdout.flush()
            with suppress(BrokenPipeError):
                _send(answers, _packed(found))


def _packed(found: tuple[Any, BaseException | None, str]) -> bytes:
    """For the parent, who may not be able to rebuild any exception. Parts that specs share, they share there too."""
    specs, error, told = found
    if error is None:
        return pickle.dumps((specs, None, ""))
    try:
        raw = pickle.dumps((None, error, told))
        pickle.loads(raw)
    except Exception:
        raw = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), told))
    return raw


def _send(stream: Any, message: bytes) -> None:
    stream.write(len(message).to_bytes(_LENGTH, "big") + message)
    stream.flush()


def _receive(stream: BinaryIO) -> bytes | None:
    """A message; None if the other side ended before it was whole. Its end need not be the stream's."""
    length = int.from_bytes(stream.read(_LENGTH), "big")
    message = stream.read(length) if length else b""
    return message if length and len(message) == length else None


def _ended(child: subprocess.Popen[bytes]) -> int:
    try:
        return child.wait(_EXIT_S)
    except subprocess.TimeoutExpired:  # a thread that nobody has ended
        child.kill()
        return child.wait()


def _end(child: subprocess.Popen[bytes]) -> None:
    """After Ctrl-C, which it has got as well unless it was meant for this process alone; then let it clean up."""
    for patience_s, number in ((2.0, signal.SIGINT), (3.0, signal.SIGKILL)):
        try:
            child.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            child.send_signal(number)
    child.wait()


def _end_with(parent: int) -> None:
    """It may be in the middle of its work, where nothing tells it that nobody waits for an answer."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
