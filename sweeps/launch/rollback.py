"""Rollback of a refused launch: all its changes in the study's folder are undone.

It is needed because executors refuse only when members are submitted (sbatch: an unknown partition). By then the
specifications and the ledger must be on disk: a job may start immediately, and must be found after a crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from sweeps.run.files import write_atomically
from sweeps.run.spec import SPEC_FILE


class Rollback:
    """Context manager that at its end undoes the registered changes, the last first, unless the launch was accepted.

    Its owner holds the study's lease, so no other process writes there meanwhile.

    Attributes:
        pending: whether the launch may still be refused.
    """

    def __init__(self) -> None:
        self.pending = True
        self._undo = ExitStack()

    def __enter__(self) -> Rollback:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def forget(self) -> None:
        """Undo nothing from now on: the launch was accepted, or jobs may exist."""
        self.pending = False
        self._undo.pop_all()

    def call(self, undo: Callable[..., object], *arguments: object) -> None:
        """Register a function to call on rollback."""
        if self.pending:
            self._undo.callback(undo, *arguments)

    def put_back(self, path: Path, content: bytes | None) -> None:
        """On rollback, restore this content of a file; None removes the file, which did not exist."""
        self.call(_put_back, path, content)

    def remove(self, run_dir: Path) -> None:
        """On rollback, remove a folder that does not exist yet: a member's, with its specification, or `runs`."""
        if self.pending and not run_dir.exists():
            self.call(_remove, run_dir)


def _put_back(path: Path, content: bytes | None) -> None:
    with suppress(OSError):  # the refusal must be reported even if this fails
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, content)


def _remove(run_dir: Path) -> None:
    with suppress(OSError):
        (run_dir / SPEC_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # not empty: the run is also trained separately
        run_dir.rmdir()


def missing_folders(directory: Path) -> list[Path]:
    """Return those of a directory and its parents that do not exist yet, the innermost first."""
    return [folder for folder in (directory, *directory.parents) if not folder.exists()]


def remove_folders(made: Sequence[Path]) -> None:
    """Remove folders made for a refused launch: the innermost with its content, its parents if empty."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for above in made[1:]:
        try:
            above.rmdir()
        except OSError:
            return  # not empty
