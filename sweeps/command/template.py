"""Fill values of a configuration into placeholders `{key}`, in the words of a command and in templates of files.

Other braces are kept (`{"a": 1}`, `${HOME}`), and `{{key}}` becomes the text `{key}`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from sweeps.errors import UserError
from sweeps.run.as_yaml import as_yaml

# Group 1: the key in `{{key}}`, an escaped placeholder. Group 2: the key in `{key}`, but not in `${key}`.
_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|(?<!\$)\{([A-Za-z_][\w.]*)\}")


def names_in(text: str) -> list[str]:
    """Return the names of the placeholders in a text, in order."""
    return [match[2] for match in _PLACEHOLDER.finditer(text) if match[2]]


def fill(text: str, values: Mapping[str, Any], field: str, yaml: bool = False) -> str:
    """Fill in the placeholders of a text.

    Args:
        text: text with placeholders.
        values: values by dotted key. Values that are not strings are written as in JSON (true, null, 1e-05).
        field: the setting that contains the text, for the message.
        yaml: whether the text is a YAML file. Values that are not strings are then written as `as_yaml` does.

    Raises:
        UserError: a placeholder has no value.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return f"{{{match[1]}}}"
        if match[2] not in values:
            valid = ", ".join(sorted(values))
            raise UserError(
                f"{field}: {{{match[2]}}} has no value; give the key {match[2]} one in your file, or write "
                f"{{{{{match[2]}}}}} for the text; valid: {valid}"
            )
        value = values[match[2]]
        return as_yaml(value) if yaml and not isinstance(value, str) else as_text(value)

    return _PLACEHOLDER.sub(replacement, text)


def check_for_shell(text: str, values: Mapping[str, Any]) -> None:
    """Check values that are filled into a shell script, as in `bash -c "train {loss} | tee log"`.

    Raises:
        UserError: the shell would interpret part of a value.
    """
    for match in _PLACEHOLDER.finditer(text):
        name = match[2]
        if name not in values or text == match[0]:
            continue
        value, quote = as_text(values[name]), _quote_at(text[: match.start()])
        plain = {"": shlex.quote(value) == value, "'": "'" not in value, '"': not set('"$`\\') & set(value)}
        if not plain[quote]:
            raise UserError(
                f"command.line: {name}: {value[:80]!r} stands in words of a shell, which would read it otherwise; "
                f"give it as an argument: [bash, -c, 'train \"$1\"', bash, '{{{name}}}']"
            )


def _quote_at(text: str) -> str:
    """Return the quote that is open at the end of a piece of shell script; "" if none is open."""
    quote, index = "", 0
    while index < len(text):
        if text[index] == "\\" and quote != "'":
            index += 1
        elif text[index] in "'\"":
            quote = "" if quote == text[index] else quote or text[index]
        index += 1
    return quote


def as_text(value: Any) -> str:
    """Format a value as on a command line and in a configuration file."""
    return value if isinstance(value, str) else json.dumps(value)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all groups and values by dotted key. A group's key is followed by those inside it."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
    return flat
