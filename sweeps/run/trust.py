"""Decide whether code that is named in a study's folder may run without `--trust`."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from sweeps.errors import UserError

REMEDY = "look at what it does, and give --trust to run it anyway"


def belongs_to_user(path: Path, outside: Path | None = None) -> bool:
    """Return whether a file or folder belongs to the user and is not writable by everyone.

    Args:
        path: file or folder to check; False if it does not exist.
        outside: folder that must not contain `path`, such as a study's folder: files in a study may come from someone
            else although they belong to the user, who unpacked them. None if there is no such folder.
    """
    return _belongs_to(os.geteuid(), path, outside)


def belongs_to_system(path: Path, outside: Path | None = None) -> bool:
    """Return whether a file or folder belongs to root and is not writable by everyone; see `belongs_to_user`."""
    return _belongs_to(0, path, outside)


def _belongs_to(user: int, path: Path, outside: Path | None) -> bool:
    try:
        resolved = path.expanduser().resolve(strict=True)
        status = resolved.stat()
    except OSError:
        return False
    # Write access of the group is accepted, because on many systems each user has a group of their own.
    safe = status.st_uid == user and not status.st_mode & stat.S_IWOTH
    return safe and (outside is None or not resolved.is_relative_to(outside))


def refusal(file: Path, field: str, value: Any, expected: str) -> UserError:
    """Return the error for code that may not run: one line with the field, its value and the remedy."""
    return UserError(f"{file}: {field}: {str(value)[:200]!r} is not {expected} (docs/guide/study.md); {REMEDY}")
