"""A file as its reader needs it, read once; and how a message quotes what a file held."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from sweeps.errors import UserError

# Names that say which file this is, not which run: the run is the directory.
_FIXED_NAMES = ("trainer_state.json", "metrics.jsonl")
_CHECKPOINT = re.compile(r"checkpoint-\d+")


class File:
    """A file that is no run of ours, with its bytes and text read at first use.

    Raises:
        UserError: from the attributes; the file cannot be read, or is not text.
    """

    def __init__(self, path: Path, wanted: str = "a table or a log that one of the readers knows") -> None:
        self.path = path
        self.wanted = wanted
        self.kept: dict[str, Any] = {}  # what a reader parsed while it was asked whether the file is its own

    @property
    def suffix(self) -> str:
        """The ending, in lower case."""
        return self.path.suffix.lower()

    @property
    def run_name(self) -> str:
        """The name of the run behind the file: its own, or its directory's where every run's file is named alike."""
        return self.path.stem if self.path.name not in _FIXED_NAMES else self.run_folder.name

    @property
    def run_folder(self) -> Path:
        """The directory of the run, above its checkpoints."""
        folder = self.path.resolve().parent
        return folder.parent if _CHECKPOINT.fullmatch(folder.name) else folder

    @cached_property
    def raw(self) -> bytes:
        """The bytes."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error

    @cached_property
    def text(self) -> str:
        """The text, as UTF-8."""
        try:
            text = self.raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: not a text file; give {self.wanted}") from error
        if "\0" in text:
            raise UserError(f"{self.path}: not a text file (it holds NUL bytes); give {self.wanted}")
        return text

    @cached_property
    def start(self) -> bytes:
        """The first bytes that are not blank."""
        return self.raw[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()[:64]

    @cached_property
    def document(self) -> Any:
        """The file as one JSON document; None if it is none."""
        if self.start[:1] not in (b"{", b"["):
            return None
        try:
            return json.loads(self.raw.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None


def short(text: str, limit: int = 120) -> str:
    """One printable line of bounded length, whatever the file held."""
    line = "".join(ch if ch.isprintable() else "?" for ch in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


_LIKELY = re.compile(r"eval|val|reward|score|acc|pass|token|flop|compute|step", re.IGNORECASE)


def listed(names: Iterable[str], limit: int = 300) -> str:
    """Names for a message; of very many those first that look like a reward or compute, and how many there were."""
    every = list(names)
    text = ", ".join(every)
    if len(text) <= limit:
        return short(text, limit) or "none"
    every.sort(key=lambda name: _LIKELY.search(name) is None)
    return f"{short(', '.join(every), limit)} ({len(every)} in all)"
