"""Encodes plain data, so that the judge rebuilds a program's values from built-in types alone.

Unlike a pickle, a message cannot name a class or a function. So an object whose `__eq__` cheats arrives as a plain
value, or as a handle that is equal to nothing else. Runs inside the sandbox (standard library only).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

MAX_BYTES = 8 << 20
MAX_DEPTH = 100
MAX_ITEMS_OF_ITERATOR = 10_000
_MAX_NAME = 200


class NotPlainError(Exception):
    """Raised for a value that cannot be sent: it has another type, is nested too deep or is too large."""


class MalformedError(Exception):
    """Raised for bytes that are not a valid message."""


class Handle:
    """Reference in a message to an object that stays in the program's process.

    Attributes:
        number: number by which the program's process finds the object.
        kind: name of the object's type; "type" for a class.
    """

    __slots__ = ("kind", "number")

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind


ToHandle = Callable[[Any], Handle | None]
FromHandle = Callable[[Handle], Any]


def encode(value: Any, handle: ToHandle = lambda _: None) -> bytes:
    """Encode a value of built-in types as bytes.

    Subclasses of the built-in types (Counter, namedtuple, IntEnum) and NumPy's scalars are sent as the built-in value,
    and iterators as their items.

    Args:
        value: None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, an
            iterator, or an object that `handle` accepts.
        handle: returns the handle for any other object, or None to refuse the object.

    Raises:
        NotPlainError: something in the value cannot be sent.
    """
    message = bytearray()
    _write(message, value, MAX_DEPTH, handle)
    return bytes(message)


def decode(message: bytes, handle: FromHandle | None = None) -> Any:
    """Decode a value from bytes of `encode`.

    Args:
        message: bytes from any sender, including untrusted code.
        handle: returns the object that a handle refers to; None to treat a message with handles as malformed.

    Raises:
        MalformedError: the bytes are not exactly one message, or the message is nested too deep or too large.
    """
    if len(message) > MAX_BYTES:
        raise MalformedError(f"more than {MAX_BYTES} bytes")
    reader = _Reader(message, handle)
    try:
        value = reader.value(MAX_DEPTH)
    # Rebuilding a malformed value raises one of these, such as a TypeError for a key that cannot be hashed.
    except (struct.error, UnicodeDecodeError, TypeError, OverflowError, IndexError) as error:
        raise MalformedError(type(error).__name__) from None
    if reader.position != len(message):
        raise MalformedError("bytes left over")
    return value


def _write_size(out: bytearray, tag: bytes, size: int) -> None:
    if len(out) + size > MAX_BYTES:
        raise NotPlainError(f"more than {MAX_BYTES} bytes")
    out += tag
    out += struct.pack("<I", size)


def _write_items(out: bytearray, tag: bytes, items: Iterable[Any], count: int, depth: int, handle: ToHandle) -> None:
    _write_size(out, tag, count)
    for item in items:
        _write(out, item, depth - 1, handle)
        if len(out) > MAX_BYTES:
            raise NotPlainError(f"more than {MAX_BYTES} bytes")


def _write_integer(out: bytearray, tag: bytes, value: int) -> None:
    # Add space for the sign, which bit_length() does not count.
    size = value.bit_length() // 8 + 1
    _write_size(out, tag, size)
    out += value.to_bytes(size, "little", signed=True)


def _write_integers(out: bytearray, value: list[Any]) -> bool:
    """Append a long list of 64-bit integers, the bulk of messages, in one C call; return False for any other list."""
    # Exactly int: bools have their own tag, and subclasses are converted one by one.
    if list.__len__(value) < 16 or set(map(type, list.__iter__(value))) != {int}:
        return False
    try:
        numbers = array("q", list.__iter__(value)).tobytes()
    except OverflowError:
        return False
    _write_size(out, b"q", len(numbers))
    out += numbers
    return True


def _write(out: bytearray, value: Any, depth: int, handle: ToHandle) -> None:
    """Append a value to the message: a tag of one byte, the size if it varies, and the content."""
    if depth <= 0:
        raise NotPlainError(f"nested more than {MAX_DEPTH} deep")
    if value is None:
        out += b"N"
    elif value is True:
        out += b"T"
    elif value is False:
        out += b"F"
    # Call the methods of the built-in class, because a subclass may override them with anything.
    elif isinstance(value, int):
        _write_integer(out, b"i", int.__pos__(value))
    elif isinstance(value, float):
        out += b"f" + struct.pack("<d", value)
    elif isinstance(value, str):
        text = str.__str__(value).encode("utf-8", "surrogatepass")
        _write_size(out, b"s", len(text))
        out += text
    elif isinstance(value, list):
        if _write_integers(out, value):
            return
        _write_items(out, b"l", list.__iter__(value), list.__len__(value), depth, handle)
    elif isinstance(value, tuple):
        _write_items(out, b"t", tuple.__iter__(value), tuple.__len__(value), depth, handle)
    elif isinstance(value, dict):
        pairs = list(dict.items(value))
        _write_items(out, b"d", (item for pair in pairs for item in pair), 2 * len(pairs), depth, handle)
    elif isinstance(value, set):
        _write_items(out, b"S", set.__iter__(value), set.__len__(value), depth, handle)
    elif isinstance(value, frozenset):
        _write_items(out, b"Z", frozenset.__iter__(value), frozenset.__len__(value), depth, handle)
    else:
        _write_rarer(out, value, depth, handle)


def _write_rarer(out: bytearray, value: Any, depth: int, handle: ToHandle) -> None:
    """Append a complex, bytes, range, NumPy scalar or iterator, or the handle of any other object."""
    if isinstance(value, complex):
        out += b"c" + struct.pack("<dd", value.real, value.imag)
    elif isinstance(value, bytes | bytearray):
        _write_size(out, b"b" if isinstance(value, bytes) else b"B", len(value))
        out += value
    elif isinstance(value, range):
        out += b"r"
        for number in (value.start, value.stop, value.step):
            _write_integer(out, b"i", int(number))
    elif type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        item = value.item()
        # Some scalars, such as longdouble, return themselves from `item`, which would recurse for ever.
        if type(item) is type(value):
            raise NotPlainError(f"{type(value).__name__} is not plain data")
        _write(out, item, depth - 1, handle)
    elif isinstance(value, Iterator):
        # An iterator may be endless.
        items = list(islice(value, MAX_ITEMS_OF_ITERATOR + 1))
        if len(items) > MAX_ITEMS_OF_ITERATOR:
            raise NotPlainError(f"an iterator of more than {MAX_ITEMS_OF_ITERATOR} items")
        _write_items(out, b"I", items, len(items), depth, handle)
    else:
        reference = handle(value)
        if reference is None:
            raise NotPlainError(f"{type(value).__name__[:_MAX_NAME]} is not plain data")
        kind = reference.kind[:_MAX_NAME].encode("utf-8", "replace")
        out += b"h" + struct.pack("<IH", reference.number, len(kind)) + kind


class _Reader:
    """Reader of one message, which creates only built-in types and the results of `handle`."""

    def __init__(self, message: bytes, handle: FromHandle | None) -> None:
        self.message, self.position, self._handle = message, 0, handle

    def _take(self, size: int) -> bytes:
        content = self.message[self.position : self.position + size]
        if len(content) != size:
            raise MalformedError("cut short")
        self.position += size
        return content

    def _size(self) -> int:
        size = int(struct.unpack("<I", self._take(4))[0])
        # Every item takes at least one byte, so refuse a size beyond the end of the message before allocating anything.
        if size > len(self.message) - self.position:
            raise MalformedError("cut short")
        return size

    def _integer(self) -> int:
        return int.from_bytes(self._take(self._size()), "little", signed=True)

    def _items(self, depth: int) -> list[Any]:
        return [self.value(depth - 1) for _ in range(self._size())]

    def value(self, depth: int) -> Any:
        """Read the value that begins at the current position."""
        if depth <= 0:
            raise MalformedError(f"nested more than {MAX_DEPTH} deep")
        tag = self._take(1)
        if tag in b"NTF":
            return {b"N": None, b"T": True, b"F": False}[tag]
        if tag == b"i":
            return self._integer()
        if tag == b"f":
            return float(struct.unpack("<d", self._take(8))[0])
        if tag == b"s":
            return self._take(self._size()).decode("utf-8", "surrogatepass")
        if tag in b"ltSZI":
            items = self._items(depth)
            return {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset, b"I": iter}[tag](items)  # type: ignore[operator]
        if tag == b"d":
            keys_and_values = self._items(depth)
            if len(keys_and_values) % 2:
                raise MalformedError("a key without its value")
            return dict(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))
        return self._rarer_value(tag)

    def _rarer_value(self, tag: bytes) -> Any:
        """Read the content of a value whose tag is one of the rarer ones."""
        if tag == b"q":
            size = self._size()
            if size % 8:
                raise MalformedError("a part of a number")
            return array("q", self._take(size)).tolist()
        if tag == b"c":
            return complex(*struct.unpack("<dd", self._take(16)))
        if tag in b"bB":
            content = self._take(self._size())
            return content if tag == b"b" else bytearray(content)
        if tag == b"r":
            numbers = []
            for _ in range(3):
                if self._take(1) != b"i":
                    raise MalformedError("a range of something else")
                numbers.append(self._integer())
            if numbers[2] == 0:
                raise MalformedError("a range that does not move")
            return range(*numbers)
        if tag == b"h" and self._handle is not None:
            number, length = struct.unpack("<IH", self._take(6))
            return self._handle(Handle(number, self._take(length).decode("utf-8", "replace")))
        raise MalformedError("an unknown tag")
