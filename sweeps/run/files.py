"""Write files so that a crash leaves no half-written content: replace them atomically, or append whole lines."""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Replace a file atomically: a reader sees the old or the new content, never a part of it.

    Args:
        path: path of the file.
        text: new content; a str is encoded as UTF-8.
        mode: permission bits of the new file, before the process's umask.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(text.encode() if isinstance(text, str) else text)
            handle.flush()
            # Sync before the rename. Otherwise the new name may refer to an empty file after a power cut.
            os.fsync(handle.fileno())
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file's content to the disk, whichever process wrote it. A file that cannot be opened is ignored."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700; an existing directory keeps its mode."""
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically: even after a crash, readers see either the old file or the new one."""
    write_atomically(path, json.dumps(content, indent=1, sort_keys=True, allow_nan=False))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty dict if the file is missing, unreadable or not an object."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping with PyYAML's safe loader; return an empty dict if missing, unreadable or not a mapping."""
    import yaml  # slow to import, and needed by few readers

    try:
        content = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep to be read") from None


# --- JSON lines ---------------------------------------------------------------------------------------------

# Last field of a line with a checksum: CRC-32 of the line without this field, eight hexadecimal digits.
CHECKSUM = "crc"
_CHECKSUM_NAME = f'"{CHECKSUM}"'.encode()
_CHECKSUM_FIELD = b"," + _CHECKSUM_NAME + b':"'
_CHECKSUM_DIGITS = 8


def append_lines(
    path: Path, entries: Sequence[Mapping[str, Any]], durable: bool = False, checksum: bool = False
) -> None:
    """Append entries, one line each, to a file to which other processes may append too; see `append_to`."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        append_to(descriptor, entries, durable, checksum)
    finally:
        os.close(descriptor)


def append_to(
    descriptor: int, entries: Sequence[Mapping[str, Any]], durable: bool = False, checksum: bool = False
) -> None:
    """Append entries, one line each, to an open file. If the disk is full, none of them is appended.

    Args:
        descriptor: file descriptor opened for reading and appending (O_RDWR, O_APPEND).
        entries: JSON objects with finite numbers.
        durable: whether to return only after the lines are on the disk.
        checksum: whether to end each line with its CRC-32, which readers verify.

    Raises:
        OSError: the entries could not be written. What was written of them is removed, so that a retry does not
            duplicate anything. If another process has appended since, it stays as a torn line.
        ValueError: a number is not finite.
    """
    raw = b"".join(dump_line(entry, checksum) for entry in entries)
    old_size = os.fstat(descriptor).st_size
    # An earlier process may have left a torn line. Start a new line, so that the first entry is not lost with it.
    if old_size and os.pread(descriptor, 1, old_size - 1) != b"\n":
        raw = b"\n" + raw
    remaining = memoryview(raw)
    try:
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        if durable:
            os.fsync(descriptor)
    except OSError:
        with suppress(OSError):  # the original error is raised, not one from the clean-up
            written, end = len(raw) - len(remaining), os.fstat(descriptor).st_size
            # Remove this process's bytes only if they are still last: another process may have appended after them.
            if os.pread(descriptor, written, end - written) == raw[:written]:
                os.ftruncate(descriptor, end - written)
        raise


def dump_line(entry: Mapping[str, Any], checksum: bool = False) -> bytes:
    """Encode an entry as one line, including the line break.

    Raises:
        ValueError: a number is not finite.
    """
    line = json.dumps(entry, allow_nan=False, separators=(",", ":")).encode()
    if checksum:
        line = line[:-1] + _CHECKSUM_FIELD + b'%08x"}' % zlib.crc32(line)
    return line + b"\n"


def has_wrong_checksum(line: bytes) -> bool:
    """Return whether a line ends with a wrong checksum; False if it has no checksum."""
    line = line.rstrip()
    start = max(0, len(line) - len(_CHECKSUM_FIELD) - _CHECKSUM_DIGITS - 2)
    if _CHECKSUM_NAME not in line[start:]:
        return False
    return line[start:] != _CHECKSUM_FIELD + b'%08x"}' % zlib.crc32(line[:start] + b"}")


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line and remove its checksum; return None if it is torn, damaged or not a JSON object.

    A line without a checksum, from an earlier version, is accepted.
    """
    if has_wrong_checksum(line):
        return None
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    entry.pop(CHECKSUM, None)
    return entry


def parse_lines(raw: bytes) -> list[dict[str, Any]]:
    """Parse the objects of a file, in order, without torn lines and lines that are not objects."""
    return [entry for line in raw.split(b"\n") if (entry := parse_line(line)) is not None]


def numbered_lines(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """Read a file of JSON lines. A missing file counts as empty.

    Returns:
        Pairs of line number (from 1) and object, and the numbers of damaged lines. A torn last line, which a killed
        process may leave, is in neither list.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    entries, damaged = [], []
    for number, line in enumerate(lines, start=1):
        entry = parse_line(line)
        if entry is not None:
            entries.append((number, entry))
        elif line.strip():
            damaged.append(number)
    if (entry := parse_line(torn)) is not None:
        entries.append((len(lines) + 1, entry))
    return entries, damaged


def named_lines(numbers: Sequence[int]) -> str:
    """Format line numbers for a message: `line 3`, `lines 3, 5`."""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def lines_from_end(handle: BinaryIO, most_bytes: int | None = None, block_bytes: int = 8192) -> Iterator[bytes]:
    """Yield the complete lines of an open file, the last one first, and read only as much as needed.

    Args:
        handle: file opened for reading bytes.
        most_bytes: read at most this many bytes from the end; a line that begins before them is left out. None for no
            limit.
        block_bytes: number of bytes in the first read; later reads are larger.
    """
    at = handle.seek(0, os.SEEK_END)
    first = 0 if most_bytes is None else max(0, at - most_bytes)
    ends = False  # whether a line break was found; what comes after the last one is a torn line
    rest = b""  # beginning not read yet: the end of that line
    while at > first:
        size = min(block_bytes, at - first)
        at = handle.seek(at - size)
        lines = (handle.read(size) + rest).split(b"\n")
        block_bytes = min(2 * block_bytes, 1 << 20)
        if not ends and len(lines) > 1:
            ends = True
            lines.pop()
        rest = lines[0]
        if ends:
            yield from reversed(lines[1:])
    if ends and first == 0:
        yield rest


def read_end(path: Path, most_bytes: int, begin: int = 0) -> str:
    """Return at most the last `most_bytes` of a text file, from position `begin` on; "" if it cannot be read."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(begin, handle.seek(0, os.SEEK_END) - most_bytes))
            return handle.read().decode(errors="replace")
    except OSError:
        return ""


def whole_lines(raw: bytes) -> tuple[list[bytes], int]:
    """Return the lines of a file up to its last valid JSON line, and their total length in bytes.

    A writer truncates the file to that length before it appends. Damaged lines before the last valid one are included,
    so that the reader can report them.
    """
    end = raw.rfind(b"\n") + 1
    lines = raw[:end].split(b"\n")[:-1]
    # After a power failure the last line may consist of zeros, or be half a record that still ends in a line break.
    while lines and parse_line(lines[-1]) is None:
        end -= len(lines.pop()) + 1
    return lines, end
