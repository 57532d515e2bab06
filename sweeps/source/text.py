"""A source file with cached bytes and text, and helpers that quote its content in messages."""

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

# Names that say which file this is, not which run: the run is the directory.
_FIXED_NAMES = ("trainer_state.json", "metrics.jsonl")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Of the two encodings that begin alike the longer mark comes first.
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
# Escapes of a JSON text, pairs first; the group is half of a pair.
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


# What unpacks a file, by its ending, and what is raised of a damaged one.
_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress, ".zip": _unzip, ".zst": _unzstd,
}  # fmt: skip
_DAMAGED = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, RuntimeError)


class File:
    """Source file that is no run of ours, with its bytes and text read at first use.

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
        """The file's ending in lower case, dot included; that of the unpacked file of a compressed one."""
        return self._unpacked.suffix.lower()

    @property
    def _unpacked(self) -> Path:
        return self.path.with_suffix("") if self.path.suffix.lower() in _UNPACK else self.path

    @property
    def run_name(self) -> str:
        """Name of the run behind the file: the file's, or its directory's where every run's file is named alike."""
        if self.path.name in _FIXED_NAMES:
            return encodable(run_of(self.run_folder))
        return encodable(run_of(self.path.resolve().with_name(self._unpacked.stem)))

    @property
    def run_folder(self) -> Path:
        """The run's directory, above a `checkpoint-N` folder."""
        folder = self.path.resolve().parent
        return folder.parent if CHECKPOINT.fullmatch(folder.name) else folder

    @cached_property
    def raw(self) -> bytes:
        """The file's bytes, unpacked; UTF-16 (Excel's "Unicode text", PowerShell) and UTF-32 are made UTF-8."""
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
        """Text on the NUL bytes and lines that were dropped; None if there were none."""
        if not self.nuls:
            return None
        lost = f", with {len(self.cut)} lines that they cut off" if self.cut else ""
        return f"{self.nuls} NUL bytes, as a crash leaves them, were dropped{lost}"

    @cached_property
    def text(self) -> str:
        """Text of the file, decoded from UTF-8 without NUL bytes and byte order mark."""
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
        """Value of the file parsed as one JSON document; None if it is not one."""
        if self.start[:1] not in (b"{", b"["):
            return None
        try:
            return parsed(self.content.decode("utf-8-sig"))
        except ValueError:
            return None


def json_lines(file: File) -> tuple[list[Any], Sequence[int], str | None]:
    """Parse a file with a JSON value a line; return them, their lines, and what is wrong with a torn last one.

    Raises:
        UserError: another line is no JSON, and none that NUL bytes cut off.
    """
    # Not splitlines: it also cuts at separators that may stand inside a JSON string.
    lines = [(number, line) for number, line in enumerate(file.text.split("\n"), start=1) if line.strip()]
    values: list[Any] = []
    numbers: list[int] = []
    for number, line in lines:
        try:
            values.append(parsed(line))
            numbers.append(number)
        except ValueError as error:
            said = f"{file.path}: line {number} is not JSON ({short(str(error))}); repair or remove it"
            if number == lines[-1][0]:
                return values, numbers, said
            if number not in file.holed:
                raise UserError(said) from error
            file.cut.add(number)
    return values, numbers, None


def parsed(given: str | bytes) -> Any:
    """Parse a JSON text; half of a surrogate pair in it, which no file can hold, becomes U+FFFD.

    Raises:
        ValueError: it is no JSON.
    """
    text = given.decode() if isinstance(given, bytes) else given
    return parse_json(_ESCAPES.sub(lambda match: "\\ufffd" if match[1] else match[0], text) if "\\u" in text else text)


def encodable(text: str) -> str:
    """Return a text that can be written as UTF-8: bytes of a file's name that are none become U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def run_of(path: Path) -> str:
    """Name a run by its file or folder, with the folder above it where the name is only a seed."""
    return f"{path.parent.name}/{path.name}" if path.parent.name and is_bare_seed(path.name) else path.name


def short(text: str, limit: int = 120) -> str:
    """Format text as one printable line of at most `limit` characters."""
    line = "".join(ch if ch.isprintable() else "?" for ch in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


_LIKELY = re.compile(r"eval|val|reward|score|acc|pass|token|flop|compute|step", re.IGNORECASE)


def listed(names: Iterable[str], limit: int = 300) -> str:
    """Join names for a message; of too many list likely rewards and compute first, with the total number."""
    every = list(names)
    text = ", ".join(every)
    if len(text) <= limit:
        return short(text, limit) or "none"
    every.sort(key=lambda name: _LIKELY.search(name) is None)
    return f"{short(', '.join(every), limit)} ({len(every)} in all)"
