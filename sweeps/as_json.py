"""Convert dataclasses to the JSON that commands print. Some fields are renamed or left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar


class AsJson:
    """Base class of dataclasses that are printed as JSON, field by field, in order.

    Attributes:
        JSON: by field, the name to print if it differs; None to leave the field out.
    """

    JSON: ClassVar[Mapping[str, str | None]] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object. Numbers are finite; unknown values and open bounds are None.

        Raises:
            ValueError: a number is not finite.
        """
        named = {field.name: self.JSON.get(field.name, field.name) for field in fields(self)}  # type: ignore[arg-type]  # subclasses are dataclasses
        return {name: as_json(getattr(self, field), name) for field, name in named.items() if name is not None}


def as_json(value: Any, name: str = "value") -> Any:
    """Convert a field's value to JSON types. Records, mappings, lists and tuples are converted recursively.

    Args:
        value: value of the field.
        name: name of the field, for the error message.

    Raises:
        ValueError: a number is not finite, which JSON does not allow.
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
