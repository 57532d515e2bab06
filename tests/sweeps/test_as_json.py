"""Tests of records as JSON: `JSON` renames or omits fields, and NaN and infinity are errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest

from sweeps.as_json import AsJson, as_json


@dataclass(frozen=True)
class Bounds(AsJson):
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Entry(AsJson):
    recipe: str
    a: Bounds | None
    rows: tuple[Bounds, ...]
    by_name: dict[str, Bounds]
    hidden: object = None

    JSON: ClassVar = {"a": "A", "hidden": None}


def test_fields_are_renamed_or_omitted_by_the_table() -> None:
    bounds = Bounds(0.5, None)
    entry = Entry("scalerl", None, (bounds, bounds), {"B": bounds}, hidden=object())
    bounds_json = {"low": 0.5, "high": None}
    assert entry.to_json() == {
        "recipe": "scalerl",
        "A": None,
        "rows": [bounds_json, bounds_json],
        "by_name": {"B": bounds_json},
    }
    assert list(entry.to_json()) == ["recipe", "A", "rows", "by_name"]
    assert as_json([entry]) == [entry.to_json()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_an_error_naming_the_field(value: float) -> None:
    with pytest.raises(ValueError, match="high"):
        Entry("x", Bounds(0.0, value), (), {}).to_json()
