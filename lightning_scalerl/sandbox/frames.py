"""Messages over a pair of pipes: a length, then the bytes. Runs inside the sandbox (standard library only)."""

from __future__ import annotations

import os
import struct

from lightning_scalerl.sandbox.plain import MAX_BYTES

# Maximum size of a message in bytes. A message contains encoded values and a few fields of its own.
_MAX_FRAME = 3 * MAX_BYTES


def send(pipe: int, message: bytes) -> None:
    """Write one message to a pipe, its length first.

    Raises:
        OSError: the reading end is closed.
    """
    remaining = memoryview(struct.pack("<I", len(message)) + message)
    # A pipe may accept only a part.
    while remaining:
        remaining = remaining[os.write(pipe, remaining) :]


def receive(pipe: int) -> bytes | None:
    """Read the next message; None at the end, and for a message that is incomplete or too long."""
    head = _read_exactly(pipe, 4)
    if head is None:
        return None
    (size,) = struct.unpack("<I", head)
    return None if size > _MAX_FRAME else _read_exactly(pipe, size)


def _read_exactly(pipe: int, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(pipe, min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
