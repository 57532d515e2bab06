"""Placeholders: values of a configuration that stand as `{key}` in a command's words and in templates of files.

Other braces are left alone (`{"a": 1}`, `${HOME}`), and `{{key}}` is `{key}` as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sweeps.errors import UserError

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|(?<!\$)\{([A-Za-z_][\w.]*)\}")


def names_in(text: str) -> list[str]:
    """Return the names of the placeholders in a text, in order."""
    return [match[2] for match in _PLACEHOLDER.finditer(text) if match[2]]


def filled(text: str, values: Mapping[str, Any], field: str) -> str:
    """Fill the placeholders of a text.

    Args:
        text: with placeholders.
        values: by dotted key; what is no text is written as YAML and JSON have it (true, null, 1e-05).
        field: where the text stands, for the message.

    Raises:
        UserError: a placeholder without a value.
    """

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if match[2] not in values:
            valid = ", ".join(sorted(values))
            raise UserError(
                f"{field}: {{{match[2]}}} has no value; give the key {match[2]} one in your file, or write "
                f"{{{{{match[2]}}}}} for the text; valid: {valid}"
            )
        return as_text(values[match[2]])

    return _PLACEHOLDER.sub(value, text)


def as_text(value: Any) -> str:
    """Return a value as it is written on a command line and in a configuration file."""
    return value if isinstance(value, str) else json.dumps(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted key: those inside of groups, and the groups themselves."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
    return found
