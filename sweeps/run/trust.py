"""Trust check for code that a study's folder names: whether it may run without `--trust`."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from sweeps.errors import UserError

REMEDY = "look at what it does, and give --trust to run it all the same"


def belongs_to_user(path: Path, outside: Path | None = None) -> bool:
    """Return whether a file or folder belongs to the user, and not everybody may write it.

    Args:
        path: file or folder to judge; False if it does not exist.
        outside: folder that it must not lie in, such as a study's: what a study brings along is not the user's own,
            whoever unpacked it. None for no such folder.
    """
    return _belongs_to(os.geteuid(), path, outside)


def belongs_to_system(path: Path, outside: Path | None = None) -> bool:
    """Return whether a file or folder belongs to root, and not everybody may write it; see `belongs_to_user`."""
    return _belongs_to(0, path, outside)


def _belongs_to(user: int, path: Path, outside: Path | None) -> bool:
    try:
        found = path.expanduser().resolve(strict=True)
        about = found.stat()
    except OSError:
        return False
    # A member of the same group may often write: many systems give each user a group of his own.
    own = about.st_uid == user and not about.st_mode & stat.S_IWOTH
    return own and (outside is None or not found.is_relative_to(outside))


def refusal(file: Path, field: str, value: Any, expected: str) -> UserError:
    """Return the error for something that is not run, as one line with the field, its value and the remedy."""
    return UserError(f"{file}: {field}: {str(value)[:200]!r} is not {expected} (docs/guide/study.md); {REMEDY}")
