"""Records as the JSON that the commands print: a dataclass by its fields, renamed or left out where a table says so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar


class AsJson:
    """A dataclass that is printed field by field, in the order of its fields.

    JSON: the name of a field where it is another than the field's own; None leaves the field out.
    """

    JSON: ClassVar[Mapping[str, str | None]] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object: numbers are finite, unknown values and open interval ends are None.

        Raises:
            ValueError: a number is not finite.
        """
        named = {field.name: self.JSON.get(field.name, field.name) for field in fields(self)}  # type: ignore[arg-type]  # it is a dataclass
        return {name: as_json(getattr(self, field), name) for field, name in named.items() if name is not None}


def as_json(value: Any, name: str = "value") -> Any:
    """Convert a field's value to JSON types, recursing into records, mappings, lists and tuples.

    Args:
        value: of the field.
        name: of the field, for the error.

    Raises:
        ValueError: a number is not finite, which no JSON may hold.
    """
    if isinstance(value, AsJson):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: as_json(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, name) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}: {value} cannot be printed as JSON")
    return value
