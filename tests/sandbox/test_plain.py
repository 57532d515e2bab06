"""Tests of values sent from a program to its judge: they are rebuilt from built-in types, or refused."""

from __future__ import annotations

import collections
import enum
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_scalerl.sandbox.plain import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_ITEMS_OF_ITERATOR,
    Handle,
    MalformedError,
    NotPlainError,
    decode,
    encode,
)

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
values = st.recursive(
    hashable | st.lists(st.integers(), min_size=16),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(hashable, inner, max_size=5)
        | st.sets(hashable, max_size=5)
        | st.builds(bytearray, st.binary())
        | st.builds(range, st.integers(), st.integers(), st.integers(min_value=1))
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal and of equal types at all levels: 1, 1.0 and True differ."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one.items(), other.items()))
    return bool(one == other) and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


@given(values)
def test_round_trip(value: Any) -> None:
    assert same(decode(encode(value)), value)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_to_a_value_or_are_refused(message: bytes) -> None:
    try:
        decode(message)
    except MalformedError:
        return


@given(values, st.data())
def test_a_damaged_message_decodes_to_a_value_or_is_refused(value: Any, data: st.DataObject) -> None:
    message = bytearray(encode(value))
    message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(message))
    except MalformedError:
        return


def test_not_a_number_and_lone_surrogates() -> None:
    assert math.isnan(decode(encode(float("nan"))))
    assert decode(encode("\ud800")) == "\ud800"


class LyingInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __pos__(self) -> int:
        return 7

    __hash__ = int.__hash__


class LyingList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([99])

    def __eq__(self, other: object) -> bool:
        return True


class LyingText(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __str__(self) -> str:
        return "another"

    def encode(self, *_: Any) -> bytes:
        return b"another"

    __hash__ = str.__hash__


class Colour(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (LyingInt(3), 3),
        (LyingList([1, 2]), [1, 2]),
        (LyingText("a"), "a"),
        (Colour.RED, 3),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.namedtuple("Pair", "a b")(1, 2), (1, 2)),
        (np.float64(1.5), 1.5),
        (np.int32(4), 4),
        (np.bool_(True), True),
    ],
)
def test_subclasses_become_their_base_types(value: Any, plain: Any) -> None:
    assert same(decode(encode(value)), plain)


def test_iterators_become_lists() -> None:
    assert list(decode(encode(i * i for i in range(4)))) == [0, 1, 4, 9]
    with pytest.raises(NotPlainError, match="iterator of more"):
        encode(iter(range(MAX_ITEMS_OF_ITERATOR + 1)))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_nested_too_deep_are_refused() -> None:
    assert decode(encode(nested(MAX_DEPTH - 1))) == nested(MAX_DEPTH - 1)
    with pytest.raises(NotPlainError, match="deep"):
        encode(nested(MAX_DEPTH))
    with pytest.raises(NotPlainError, match="deep"):
        encode(nested(100_000))
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(NotPlainError, match="deep"):
        encode(cyclic)
    message = b"l\x01\x00\x00\x00" * 100_000 + b"N"
    with pytest.raises(MalformedError, match="deep"):
        decode(message)


@pytest.mark.slow
def test_values_that_are_too_large_are_refused() -> None:
    for large in ("a" * (MAX_BYTES + 1), [0.5] * MAX_BYTES, 1 << (8 * MAX_BYTES), [1] * MAX_BYTES):
        with pytest.raises(NotPlainError, match="more than"):
            encode(large)
    bomb: Any = [0.5, 1.5]
    for _ in range(60):
        bomb = [bomb, bomb]
    with pytest.raises(NotPlainError, match="more than"):
        encode(bomb)
    with pytest.raises(MalformedError, match="more than"):
        decode(b"s" + bytes(MAX_BYTES + 5))


def test_a_false_length_allocates_nothing() -> None:
    for tag in b"lstSZIdbBq":
        with pytest.raises(MalformedError):
            decode(bytes([tag]) + b"\xff\xff\xff\xff")


def test_objects_are_refused_or_become_handles() -> None:
    thing = object()
    with pytest.raises(NotPlainError, match="object"):
        encode([thing])
    message = encode([thing], lambda _: Handle(5, "object"))
    with pytest.raises(MalformedError):
        decode(message)
    assert decode(message, lambda handle: (handle.number, handle.kind)) == [(5, "object")]


def test_a_dict_with_unhashable_keys_is_malformed() -> None:
    with pytest.raises(MalformedError):
        decode(b"d\x02\x00\x00\x00l\x00\x00\x00\x00N")
