"""Rollback of a refused launch: whatever it has changed in the study's folder is put back as it was.

It is needed because executors refuse only when members are submitted (sbatch: an unknown partition), and by then the
specifications and the ledger must be on disk: a job may begin at once, and a crash must not hide it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from sweeps.run.files import write_atomically
from sweeps.run.spec import SPEC_FILE


class Rollback:
    """Context manager that at its end undoes what it was told of, the last first, unless the launch was accepted.

    Its owner holds the study's lease, so that nobody else writes there meanwhile.

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
        """Undo nothing, from now on: the launch was accepted, or something may have come of it."""
        self.pending = False
        self._undo.pop_all()

    def call(self, undo: Callable[..., object], *arguments: object) -> None:
        """Call a function at a rollback."""
        if self.pending:
            self._undo.callback(undo, *arguments)

    def put_back(self, path: Path, content: bytes | None) -> None:
        """Give a file this content at a rollback; None removes it, for it was not there."""
        self.call(_put_back, path, content)

    def remove(self, run_dir: Path) -> None:
        """Remove a folder at a rollback, if it does not exist yet: a member's, with its specification, or `runs`."""
        if self.pending and not run_dir.exists():
            self.call(_remove, run_dir)


def _put_back(path: Path, content: bytes | None) -> None:
    with suppress(OSError):  # why it was refused is to be told, whatever becomes of this
        if content is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, content)


def _remove(run_dir: Path) -> None:
    with suppress(OSError):
        (run_dir / SPEC_FILE).unlink(missing_ok=True)
    with suppress(OSError):  # somebody trains a run of it by itself, and has put something there
        run_dir.rmdir()


def missing_folders(directory: Path) -> list[Path]:
    """Return those of a directory and its parents that do not exist yet, the innermost first."""
    return [each for each in (directory, *directory.parents) if not each.exists()]


def remove_folders(made: Sequence[Path]) -> None:
    """Remove folders made for a refused launch: the innermost with its content, its parents if empty."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for above in made[1:]:
        try:
            above.rmdir()
        except OSError:
            return  # somebody has put something there
