"""Planning in a separate process, so that the memory of what it imports, torch among it, is freed at its end.

A controller follows its study for days and needs none of that. Composing and checking members takes a minute at most,
and whatever the user's own choices import besides.

Where members run on this machine, the process is forked from the server that their processes are forked from
(`executor.local`): what both need is imported once. Elsewhere it is a new interpreter, and nothing stays behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Outcome, load_entry
from sweeps.executor.local import die_with_parent, forkserver
from sweeps.run.spec import RunSpec

_EXIT_S = 30.0  # after its answer, for what the libraries that it loaded do at the end
EXIT_CTRL_C = 130


class PlannerLostError(UserError):
    """Error: the planner's process ended without an answer, so the request itself may be sound."""


class Planner:
    """Planner in a separate process that takes any number of requests until it is closed.

    What it prints is seen here, Ctrl-C reaches it, and it ends when this process does.

    Args:
        planner: `module:function`, called with override lists and the user's folders; it returns run specs.
        folders: the user's configuration folders.
        preload: modules of the server that members on this machine are forked from, and the planner with them; None
            where members run elsewhere, for a new interpreter.
    """

    def __init__(self, planner: str, folders: Sequence[str], preload: Sequence[str] | None = None) -> None:
        self._planner, self._folders, self._preload = planner, list(folders), preload
        self._child: Any = None  # a process of a context whose class depends on the context
        self._line: Connection | None = None

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
        line = self._started()
        try:
            with suppress(BrokenPipeError):  # it is gone: how, is told below
                line.send_bytes(pickle.dumps((self._planner, [list(each) for each in override_lists], self._folders)))
            raw = line.recv_bytes()
        except (EOFError, ConnectionResetError):
            code = _ended(self._child)
            self.close()
            raise PlannerLostError(
                f"planner: its process ended without an answer ({Outcome('', code).how}); what it printed is above, "
                "and if it was killed for its memory, launch where there is more"
            ) from None
        except BaseException:
            _end(self._child)
            self.close()
            raise
        specs, error, told = pickle.loads(raw)
        if error is not None:
            error.add_note(told)
            raise error
        planned: list[RunSpec] = specs
        return planned

    def _started(self) -> Connection:
        """Return the connection to the child process, started at first use."""
        if self._line is None:
            context = multiprocessing.get_context("spawn") if self._preload is None else forkserver(self._preload)
            ours, theirs = context.Pipe()
            try:
                child = context.Process(target=_answer, args=(theirs,), name="planner")  # type: ignore[attr-defined]
                child.start()
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            self._child, self._line = child, ours
        return self._line

    def close(self) -> None:
        """Close the connection, by which the process ends, and wait for it."""
        child, line = self._child, self._line
        self._child = self._line = None
        if child is None or line is None:
            return
        line.close()
        try:
            _ended(child)
        except BaseException:
            _end(child)
            raise


def plan_apart(
    planner: str,
    override_lists: Sequence[Sequence[str]],
    folders: Sequence[str],
    preload: Sequence[str] | None = None,
) -> list[RunSpec]:
    """Call a planner once in a separate process; see `Planner`."""
    with Planner(planner, folders, preload) as ask:
        return ask(override_lists)


def _answer(line: Connection) -> None:
    """Serve requests in the child: answer each with specs or an exception, until the parent hangs up."""
    die_with_parent()
    try:
        while True:
            try:
                planner, override_lists, folders = pickle.loads(line.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            answer: tuple[list[RunSpec] | None, BaseException | None, str]
            try:
                answer = load_entry(planner)(override_lists, folders), None, ""
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                answer = None, error, "in the planner's process:\n" + traceback.format_exc()
            sys.stdout.flush()
            with suppress(BrokenPipeError):
                line.send_bytes(_packed(answer))
    except KeyboardInterrupt:  # whoever started this process says so
        os._exit(EXIT_CTRL_C)


def _packed(answer: tuple[Any, BaseException | None, str]) -> bytes:
    """Pickle an answer; an exception that cannot be unpickled becomes a RuntimeError. Specs keep their shared parts."""
    specs, error, told = answer
    if error is None:
        return pickle.dumps((specs, None, ""))
    try:
        raw = pickle.dumps((None, error, told))
        pickle.loads(raw)
    except Exception:
        raw = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), told))
    return raw


def _ended(child: Any) -> int:
    """Return the exit code, once it has ended by itself or was made to."""
    child.join(_EXIT_S)
    if child.exitcode is None:  # a thread that nobody has ended
        child.kill()
        child.join()
    return int(child.exitcode)


def _end(child: Any) -> None:
    """End the child after Ctrl-C: wait for its own clean-up, then SIGINT after 2 s, SIGKILL after 3 more.

    It has got the Ctrl-C as well, unless that was sent to this process alone.
    """
    for patience_s, number in ((2.0, signal.SIGINT), (3.0, signal.SIGKILL)):
        child.join(patience_s)
        if child.exitcode is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)
    child.join()
