"""The one exception type a command turns into a single line and exit code 1."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave cannot be used.

    The message is one line that names the field, the value and the remedy; commands print it without a
    traceback and exit with 1.
    """
