"""What a configuration must hold, and the error that says so. Light: the command line answers without Lightning."""

from __future__ import annotations

from typing import Any


class ConfigurationError(ValueError):
    """A configuration that cannot run. One line: the field, the value and what is valid."""


class CannotGoOnError(RuntimeError):
    """Training has met something that it cannot go on with and that its user can mend; one line."""


def said(error: BaseException) -> str:
    """What somebody else's error says, in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def positive(field: str, value: float) -> float:
    """`value`, if it is a finite number above zero.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigurationError(f"{field}: {value!r} must be a number above 0")
    return value


def not_negative(field: str, value: float) -> float:
    """`value`, if it is a finite number of 0 or more.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"{field}: {value!r} must be a number, 0 or more")
    return value


def whole_number(field: str, value: Any) -> int:
    """`value`, if it is a whole number of 1 or more.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{field}: {value!r} must be a whole number, 1 or more")
    return value
