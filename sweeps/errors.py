"""The one exception type a command turns into a single line and exit code 1."""

from __future__ import annotations

import sys
from importlib.util import find_spec


class UserError(Exception):
    """Something the user gave cannot be used.

    The message is one line that names the field, the value and the remedy; commands print it without a
    traceback and exit with 1.
    """


def require(module: str, what: str, install: str | None = None) -> None:
    """Say in one line what is missing, before an import that not every command needs.

    Args:
        module: as it is imported.
        what: the user wanted, to begin the sentence with.
        install: what to give pip; the module's name if not given.

    Raises:
        UserError: the module is not installed.
    """
    found = sys.modules[module] is not None if module in sys.modules else find_spec(module) is not None
    if not found:
        raise UserError(f"{what}: needs the package {module}, which is not installed; pip install {install or module}")
