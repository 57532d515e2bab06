"""Plan members in a separate process, so that the memory of its imports (torch and others) is freed when it ends.

To plan is to compose and check the members' configurations. This takes at most a minute, plus the import of the user's
own choices. The controller needs none of these imports, and then runs for days.

If members run on this machine, planner and members are forked from the same server process (`executor.local`), which
has imported the modules that they share. Otherwise the planner is a new interpreter.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import load_entry
from sweeps.parallel import exit_on_sigterm
from sweeps.process import die_with_parent, end, ended_with, forkserver
from sweeps.run.spec import RunSpec

# After Ctrl-C: seconds to wait for the planner, then the signal to send. Ctrl-C usually reaches the planner as well,
# which then cleans up; SIGINT is sent in case that it did not.
_AFTER_CTRL_C = ((2.0, signal.SIGINT), (3.0, signal.SIGKILL))
_EXIT_S = 30.0  # seconds that exit handlers of the planner's libraries may take after the last answer
EXIT_CTRL_C = 130


class PlannerLostError(UserError):
    """Error: the planner's process ended without an answer. The request itself may have been valid."""


class Planner:
    """Planner in a separate process. It answers any number of calls until it is closed.

    The planner prints to this process's terminal, receives its Ctrl-C, and ends when this process ends.
    While it is open, SIGTERM raises SystemExit in this process.

    Args:
        planner: the planning function as `module:function`; it takes lists of overrides and the user's folders, and
            returns run specs.
        folders: the user's configuration folders.
        preload: modules that the server has imported before it forks the planner; None for a new interpreter.
    """

    def __init__(self, planner: str, folders: Sequence[str], preload: Sequence[str] | None = None) -> None:
        self._planner, self._folders, self._preload = planner, list(folders), preload
        self._child: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._signals = ExitStack()

    def __enter__(self) -> Planner:
        self._signals.enter_context(exit_on_sigterm())
        return self

    def __exit__(self, *error: object) -> None:
        with self._signals:
            self.close()

    def __call__(self, override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
        """Plan one member for each list of overrides.

        Raises:
            PlannerLostError: the process was killed, or ended without an answer.
            Exception: any exception of the planner; its traceback is added as a note.
        """
        try:
            if self._child is None or self._connection is None:
                self._child, self._connection = self._start()
            self._connection.send([list(each) for each in override_lists])
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            child = self._child
            self.close()
            how = ended_with(child.exitcode) if child is not None and child.exitcode is not None else "at once"
            raise PlannerLostError(
                f"planner: its process ended without an answer ({how}); what it printed is above, and if it was killed "
                "for its memory, launch where there is more"
            ) from None
        except BaseException:
            self._end(*_AFTER_CTRL_C)
            raise
        if isinstance(answer, BaseException):
            raise answer
        planned: list[RunSpec] = answer
        return planned

    def close(self) -> None:
        """Close the connection, which makes the process end, and wait for it."""
        try:
            self._end((_EXIT_S, signal.SIGKILL))  # killed if a thread keeps it from ending
        except BaseException:
            self._end(*_AFTER_CTRL_C)
            raise

    def _start(self) -> tuple[BaseProcess, Connection[Any, Any]]:
        context = get_context("spawn") if self._preload is None else forkserver(self._preload)
        parent_end, child_end = context.Pipe()
        child = context.Process(target=_serve, args=(child_end, self._planner, self._folders))
        child.start()
        child_end.close()
        return child, parent_end

    def _end(self, *signals: tuple[float, signal.Signals]) -> None:
        """Close the connection and wait for the process. `signals`: a timeout in seconds, then the signal to send."""
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            end(self._child, *signals)
        self._child = self._connection = None


def plan_in_subprocess(
    planner: str,
    override_lists: Sequence[Sequence[str]],
    folders: Sequence[str],
    preload: Sequence[str] | None = None,
) -> list[RunSpec]:
    """Call a planner once in a separate process. For the arguments see `Planner`."""
    with Planner(planner, folders, preload) as process:
        return process(override_lists)


def _serve(connection: Connection[Any, Any], planner: str, folders: list[str]) -> None:
    """Answer requests in the child process until the parent closes the connection. Ctrl-C works only in a request."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):  # the other end was closed
        while True:
            connection.send(_answer(planner, connection.recv(), folders))


def _answer(planner: str, override_lists: list[list[str]], folders: list[str]) -> list[RunSpec] | BaseException:
    """Return the planned members, or the exception to raise; one that cannot be pickled becomes a RuntimeError."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        planned: list[RunSpec] = load_entry(planner)(override_lists, folders)
        return planned
    except KeyboardInterrupt:  # the parent process reports it
        os._exit(EXIT_CTRL_C)
    except BaseException as error:
        note = "in the planner's process:\n" + traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(note)
        return error
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stdout.flush()
