"""Writes values as YAML for files of other trainers, whose parsers follow YAML 1.1."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def as_yaml(value: Any) -> str:
    """Format a value as one line of YAML, so that PyYAML reads the same value.

    The text is like JSON, except for numbers and characters that PyYAML would read as something else: it reads `1e-05`
    and `Infinity` as strings, and JSON's escape of an emoji as two characters.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{as_yaml(key)}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, str):
        # Python's escapes are also those of YAML.
        return '"' + value.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    if isinstance(value, float):
        text = re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
        return text if math.isfinite(value) else text.replace("inf", ".inf").replace("nan", ".nan")
    return json.dumps(value)
