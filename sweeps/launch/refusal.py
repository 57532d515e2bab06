"""Rollback of a refused launch: restores what it has changed in the study before it was accepted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sweeps.launch.ledger import Ledger
from sweeps.run.files import write_atomically
from sweeps.run.spec import SPEC_FILE


class Before:
    """Backup of what a launch changes in a study's folder, until it is accepted.

    Its owner holds the study's lease, so that nobody else writes into the ledger meanwhile.

    Args:
        ledger: the study's ledger, to be cut back to its present size.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._size = ledger.size()
        self._made: list[Path] = []
        self._begun: list[Path] = []
        self._texts: dict[Path, bytes] = {}

    def making(self, folder: Path) -> None:
        """Record a folder that is about to be made, if it does not exist yet."""
        if not folder.exists():
            self._made.append(folder)

    def writing(self, path: Path) -> None:
        """Back up a file that is about to be written, or record that it does not exist yet."""
        if path.exists():
            self._texts[path] = path.read_bytes()
        else:
            self._begun.append(path)

    def replaced(self, path: Path, text: bytes) -> None:
        """Back up the content of a file that was just replaced; only the first content of a file is kept."""
        self._texts.setdefault(path, text)

    def forget(self) -> None:
        """Drop the backup: the launch was accepted, and its changes stay."""
        self._made, self._begun, self._texts = [], [], {}

    def restore(self) -> None:
        """Roll back: cut the ledger, restore files, remove new files and empty new folders.

        In this order, so that a crash half-way leaves no member in the ledger without its specification.
        """
        self._ledger.cut(self._size)
        for path, text in self._texts.items():
            with suppress(OSError):  # why it was refused is to be told, whatever becomes of this
                write_atomically(path, text.decode("utf-8"))
        for path in self._begun:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for folder in reversed(self._made):
            with suppress(OSError):
                (folder / SPEC_FILE).unlink(missing_ok=True)
            with suppress(OSError):  # somebody trains a run of it by itself, and has put something there
                folder.rmdir()
