"""What a launch has changed in its study before it was accepted: taken back if it is refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from sweeps.launch.ledger import Ledger
from sweeps.run.files import write_atomically
from sweeps.run.spec import SPEC_FILE


class Before:
    """A study's folder as it was before a launch, as far as the launch has touched it.

    Whoever keeps it holds the study: nobody else writes into the ledger meanwhile.

    Args:
        ledger: of the study.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._size = ledger.size()
        self._made: list[Path] = []
        self._begun: list[Path] = []
        self._texts: dict[Path, bytes] = {}

    def making(self, folder: Path) -> None:
        """A folder is about to be made, if it is not there yet."""
        if not folder.exists():
            self._made.append(folder)

    def writing(self, path: Path) -> None:
        """A file is about to be written, or to be begun."""
        if path.exists():
            self._texts[path] = path.read_bytes()
        else:
            self._begun.append(path)

    def replaced(self, path: Path, text: bytes) -> None:
        """A file held this until just now; if it was replaced before, what it held first is kept."""
        self._texts.setdefault(path, text)

    def forget(self) -> None:
        """The launch was accepted: what it has changed stays."""
        self._made, self._begun, self._texts = [], [], {}

    def restore(self) -> None:
        """Put everything back: the ledger ends where it did, files hold what they held, folders go.

        In this order: whoever is cut off here leaves no member in the ledger without its specification.
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
