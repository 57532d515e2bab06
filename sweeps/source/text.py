"""A file as its reader needs it, read once; and how a message quotes what a file held."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.run.files import parse_json
from sweeps.source.run_names import is_bare_seed

# Names that say which file this is, not which run: the run is the directory.
_FIXED_NAMES = ("trainer_state.json", "metrics.jsonl")
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?[\0\s]*")


class File:
    """A file that is no run of ours, with its bytes and text read at first use.

    Raises:
        UserError: from the attributes; the file cannot be read, or is not text.
    """

    def __init__(self, path: Path, wanted: str = "a table or a log that one of the readers knows") -> None:
        self.path = path
        self.wanted = wanted
        self.kept: dict[str, Any] = {}  # what a reader parsed while it was asked whether the file is its own
        self.nuls = 0  # NUL bytes that were dropped from the text
        self.holed: frozenset[int] = frozenset()  # the lines that held them, counted from 1
        self.cut: set[int] = set()  # those of them of which text is lost

    @property
    def suffix(self) -> str:
        """The ending, in lower case."""
        return self.path.suffix.lower()

    @property
    def run_name(self) -> str:
        """The name of the run behind the file: its own, or its directory's where every run's file is named alike."""
        if self.path.name in _FIXED_NAMES:
            return run_of(self.run_folder)
        return run_of(self.path.resolve().with_name(self.path.stem))

    @property
    def run_folder(self) -> Path:
        """The directory of the run, above its checkpoints."""
        folder = self.path.resolve().parent
        return folder.parent if _CHECKPOINT.fullmatch(folder.name) else folder

    @cached_property
    def raw(self) -> bytes:
        """The bytes; of a text in UTF-16, as Excel's "Unicode text" and PowerShell write it, those in UTF-8."""
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error
        if raw.startswith(_UTF_16):
            with suppress(UnicodeDecodeError):
                return raw.decode("utf-16").encode() or raw
        return raw

    @cached_property
    def content(self) -> bytes:
        """The bytes of a text without the NUL bytes that a crash, or a log cut short under its writer, leaves in it.

        What stands before them in its line was cut off by them; what stands behind them is kept, and may be whole
        or the end of something lost: the reader of its format can tell.
        """
        if b"\0" not in self.raw:
            return self.raw
        self.nuls = self.raw.count(b"\0")
        lines = self.raw.rstrip(b"\0").split(b"\n")
        holed = [i for i, line in enumerate(lines) if b"\0" in line]
        for i in holed:
            before, _, lines[i] = lines[i].rpartition(b"\0")
            if before.strip(b"\0 \t\r"):
                self.cut.add(i + 1)
        self.holed = frozenset(i + 1 for i in holed)
        return b"\n".join(lines)

    @property
    def damage(self) -> str | None:
        """What was dropped from the text, if anything was."""
        if not self.nuls:
            return None
        lost = f", with {len(self.cut)} lines that they cut off" if self.cut else ""
        return f"{self.nuls} NUL bytes, as a crash leaves them, were dropped{lost}"

    @cached_property
    def text(self) -> str:
        """The text, as UTF-8."""
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path}: not a text file in UTF-8; save it as UTF-8, or give {self.wanted}"
            ) from error

    @cached_property
    def start(self) -> bytes:
        """The first bytes that are neither blank nor NUL."""
        blank = _BLANK.match(self.raw)
        at = blank.end() if blank else 0
        return self.raw[at : at + 64]

    @cached_property
    def document(self) -> Any:
        """The file as one JSON document; None if it is none."""
        if self.start[:1] not in (b"{", b"["):
            return None
        try:
            return parse_json(self.content.decode("utf-8-sig"))
        except ValueError:
            return None


def run_of(path: Path) -> str:
    """A run by the name of its file or folder; with the folder above where that is nothing but a seed."""
    return f"{path.parent.name}/{path.name}" if path.parent.name and is_bare_seed(path.name) else path.name


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
