"""A source file with cached bytes and text, and functions for its content and for messages."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from sweeps.errors import UserError, require
from sweeps.run.files import parse_json
from sweeps.source.run_names import is_bare_seed
from sweeps.terminal import counted

# File names that the files of all runs have, so that the folder names the run.
_FIXED_NAMES = ("trainer_state.json", "metrics.jsonl")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Encodings by byte order mark. UTF-32 comes first, because one of its marks begins with a mark of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
# Escapes in a JSON text, surrogate pairs first. The group matches an unpaired surrogate.
_ESCAPES = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\(u[dD][89a-fA-F]\w\w)|\\.")
_BLANK = re.compile(rb"(?:\xef\xbb\xbf)?[\0\s]*")


def _unzip(raw: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
        if len(files) != 1:
            raise ValueError(f"{len(files)} files in it")
        return archive.read(files[0])


def _unzstd(raw: bytes) -> bytes:
    require("pyarrow", "a .zst file")
    import pyarrow  # slow to import, and only this format needs it

    with pyarrow.CompressedInputStream(pyarrow.BufferReader(raw), "zstd") as stream:
        return bytes(stream.read())


# Functions that unpack a file, by its ending, and the exceptions that they raise for damaged files.
_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress, ".zip": _unzip, ".zst": _unzstd,
}  # fmt: skip
_DAMAGED = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, RuntimeError)


class File:
    """A source file that is not one of this project's journals. Its bytes and text are read when first needed.

    Properties raise UserError if the file cannot be read or is not text.

    Args:
        path: path of the file.
        wanted: what to give instead, for the error about a file that is not text.

    Attributes:
        kept: data that a reader's `matches` parsed, for its `read`.
        nuls: number of NUL bytes that were dropped from the text.
        nul_lines: lines that had NUL bytes, counted from 1.
        cut_lines: numbers of the lines from which text was lost.
    """

    def __init__(self, path: Path, wanted: str = "a table or a log that one of the readers knows") -> None:
        self.path = path
        self.wanted = wanted
        self.kept: dict[str, Any] = {}
        self.nul_count = 0
        self.nul_lines: frozenset[int] = frozenset()
        self.cut_lines: set[int] = set()

    @property
    def suffix(self) -> str:
        """The file's ending in lower case, with the dot; for a compressed file, that of its content."""
        return self._unpacked.suffix.lower()

    @property
    def _unpacked(self) -> Path:
        """The path without the ending of a compressed file, such as `.gz`."""
        return self.path.with_suffix("") if self.path.suffix.lower() in _UNPACK else self.path

    @property
    def stem(self) -> str:
        """The file's name without its endings."""
        return self._unpacked.stem

    @property
    def is_named_by_folder(self) -> bool:
        """True if files of all runs have this name, so that the folder names the run."""
        return self.path.name in _FIXED_NAMES

    @property
    def run_name(self) -> str:
        """Name of the file's run: the file's name or, if `is_named_by_folder`, that of the run's folder."""
        if self.is_named_by_folder:
            return encodable(run_of(self.run_folder))
        return encodable(run_of(self.path.resolve().with_name(self.stem)))

    @property
    def run_folder(self) -> Path:
        """The run's folder, which contains the file or its `checkpoint-N` folder."""
        folder = self.path.resolve().parent
        return folder.parent if CHECKPOINT.fullmatch(folder.name) else folder

    @cached_property
    def raw(self) -> bytes:
        """The file's bytes, unpacked. UTF-16 (Excel's "Unicode text", PowerShell) and UTF-32 are converted to UTF-8."""
        try:
            raw = self.path.read_bytes()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read ({error.strerror})") from error
        ending = self.path.suffix.lower()
        if ending in _UNPACK:
            try:
                raw = _UNPACK[ending](raw)
            except _DAMAGED as error:
                raise UserError(f"{self.path}: cannot be unpacked ({short(str(error))}); unpack it first") from error
        encoding = next((encoding for mark, encoding in _MARKS.items() if raw.startswith(mark)), None)
        if encoding is not None:
            with suppress(UnicodeDecodeError):
                return raw.decode(encoding).encode() or raw
        return raw

    @cached_property
    def content(self) -> bytes:
        """The bytes of a text without NUL bytes, which are left by a crash, or by truncating a log while it is written.

        In a line with NUL bytes, the text before them was cut off and is dropped. The text after them is kept: it may
        be a complete line or the end of a lost one. The reader of the format can tell.
        """
        if b"\0" not in self.raw:
            return self.raw
        self.nul_count = self.raw.count(b"\0")
        lines = self.raw.rstrip(b"\0").split(b"\n")
        with_nul = [i for i, line in enumerate(lines) if b"\0" in line]
        for i in with_nul:
            before, _, lines[i] = lines[i].rpartition(b"\0")
            if before.strip(b"\0 \t\r"):
                self.cut_lines.add(i + 1)
        self.nul_lines = frozenset(i + 1 for i in with_nul)
        return b"\n".join(lines)

    @property
    def damage(self) -> str | None:
        """Message about dropped NUL bytes and lines; None if there were none."""
        if not self.nul_count:
            return None
        lost = f", and {counted(len(self.cut_lines), 'line')} cut off there" if self.cut_lines else ""
        return f"dropped {counted(self.nul_count, 'NUL byte')} left by a crash{lost}"

    @cached_property
    def text(self) -> str:
        """Text of the file, decoded from UTF-8, without NUL bytes and byte order mark."""
        try:
            return self.content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path}: not a text file in UTF-8; save it as UTF-8, or give {self.wanted}"
            ) from error

    @cached_property
    def start(self) -> bytes:
        """The first 64 bytes after leading blanks, NULs and byte order mark."""
        blank = _BLANK.match(self.raw)
        at = blank.end() if blank else 0
        return self.raw[at : at + 64]

    @cached_property
    def document(self) -> Any:
        """The file parsed as one JSON document; None if it is not one."""
        if self.start[:1] not in (b"{", b"["):
            return None
        try:
            return parse_json_text(self.content.decode("utf-8-sig"))
        except ValueError:
            return None


def json_lines(file: File) -> tuple[list[Any], Sequence[int], str | None]:
    """Parse a file with one JSON value per line.

    Return values, line numbers, and an error about an incomplete last line.

    Raises:
        UserError: a line before the last is not JSON, and was not cut off by NUL bytes.
    """
    # `splitlines` would also split at separators that are allowed inside JSON strings.
    lines = [(number, line) for number, line in enumerate(file.text.split("\n"), start=1) if line.strip()]
    values: list[Any] = []
    numbers: list[int] = []
    for number, line in lines:
        try:
            values.append(parse_json_text(line))
            numbers.append(number)
        except ValueError as error:
            message = f"{file.path}: line {number} is not JSON ({short(str(error))}); repair or remove it"
            if number == lines[-1][0]:
                return values, numbers, message
            if number not in file.nul_lines:
                raise UserError(message) from error
            file.cut_lines.add(number)
    return values, numbers, None


def parse_json_text(raw: str | bytes) -> Any:
    """Parse a JSON text. Unpaired surrogates, which cannot be encoded, become U+FFFD.

    Raises:
        ValueError: the text is not JSON.
    """
    text = raw.decode() if isinstance(raw, bytes) else raw
    return parse_json(_ESCAPES.sub(lambda match: "\\ufffd" if match[1] else match[0], text) if "\\u" in text else text)


def encodable(text: str) -> str:
    """Replace undecodable bytes of a file's name by U+FFFD, so that the text can be encoded as UTF-8."""
    return _SURROGATE.sub("\ufffd", text)


def run_of(path: Path) -> str:
    """Name a run by its file or folder. If that name is only a seed, the parent folder's name comes before it."""
    return f"{path.parent.name}/{path.name}" if path.parent.name and is_bare_seed(path.name) else path.name


def short(text: str, limit: int = 120) -> str:
    """Format text as one printable line of at most `limit` characters."""
    line = "".join(ch if ch.isprintable() else "?" for ch in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


_REWARD_OR_COMPUTE = re.compile(r"eval|val|reward|score|acc|pass|token|flop|compute|step", re.IGNORECASE)


def listed(names: Iterable[str], limit: int = 300) -> str:
    """Join names for a message. If it gets too long, likely rewards and compute come first, and the total is added."""
    all_names = list(names)
    text = ", ".join(all_names)
    if len(text) <= limit:
        return short(text, limit) or "none"
    all_names.sort(key=lambda name: _REWARD_OR_COMPUTE.search(name) is None)
    return f"{short(', '.join(all_names), limit)} ({len(all_names)} in all)"
