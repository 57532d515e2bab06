"""Roll back a refused launch: undo its changes in the study's folder.

An executor can refuse a launch only while it submits members: sbatch, for example, refuses an unknown partition. By
then specifications and ledger must be on disk, because a job may start at once, and must be found after a crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from sweeps.run.files import write_atomically
from sweeps.run.spec import SPEC_FILE


class Rollback:
    """Context manager that undoes registered changes when it exits, the last one first, unless `commit` was called.

    The caller must hold the study's lease, so that no other process writes to the study.

    Attributes:
        pending: whether the changes would be undone; False after `commit`.
    """

    def __init__(self) -> None:
        self.pending = True
        self._undo = ExitStack()

    def __enter__(self) -> Rollback:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def commit(self) -> None:
        """Keep all changes: from now on nothing is undone."""
        self.pending = False
        self._undo.pop_all()

    def call(self, undo: Callable[..., object], *arguments: object) -> None:
        """Register a function to call on rollback."""
        if self.pending:
            self._undo.callback(undo, *arguments)

    def restore_file_on_rollback(self, path: Path, content: bytes | None) -> None:
        """Register that a rollback restores this content of a file, or removes the file if the content is None."""
        self.call(_put_back, path, content)

    def remove(self, run_dir: Path) -> None:
        """Register that a rollback removes this folder, if it is new: a member's, with its specification, or `runs`."""
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
    with suppress(OSError):  # not empty if another process trains the same run outside of the study
        run_dir.rmdir()


def missing_folders(directory: Path) -> list[Path]:
    """Return those of a directory and its parents that do not exist yet, the innermost first."""
    return [folder for folder in (directory, *directory.parents) if not folder.exists()]


def remove_folders(folders: Sequence[Path]) -> None:
    """Remove the folders that `missing_folders` returned: the first with its content, the others if they are empty."""
    if folders:
        shutil.rmtree(folders[0], ignore_errors=True)
    for parent in folders[1:]:
        try:
            parent.rmdir()
        except OSError:
            return  # not empty
