"""The one exception type a command turns into a single line and exit code 1."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class UserError(Exception):
    """An error in the user's input: a value, a file or a setting that cannot be used.

    The message is one line that names the field, the value and the remedy; commands print it without a
    traceback and exit with 1.
    """


def require(module: str, what: str, install: str | None = None) -> None:
    """Check that an optional package is installed, with a one-line error that names it if it is not.

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


def require_training(what: str) -> None:
    """Check that what trains is installed: lightning-scalerl, not its study tool `sweeps` alone.

    Args:
        what: the user wanted, to begin the sentence with.

    Raises:
        UserError: it, or what it trains with, is not installed.
    """
    for package in ("lightning_scalerl", "hydra", "torch", "lightning", "transformers"):
        require(package, what, "lightning-scalerl (in a checkout: pip install -e .)")


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Context manager: turn an OSError raised inside into a UserError that names this field.

    Raises:
        UserError: an OSError was raised that has an errno; others pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if (told := of_the_system(error)) is None:
            raise
        raise UserError(f"{field}: {told}") from error


_ELSEWHERE = "give a place that is yours to write (output_dir=, study=, -o), or change its rights"
_REMEDIES = {
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EROFS: _ELSEWHERE,
    errno.EEXIST: "a file is in the way of a folder; move it, or give another place",
    errno.ENOTDIR: "a file is in the way of a folder; move it, or give another place",
    errno.EISDIR: "a folder is in the way of a file; move it, or give another place",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOSPC: "make room, then give the same command again",
    errno.EDQUOT: "make room within your quota, then give the same command again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the machine has no more open files to give; try again later",
    errno.EIO: "the file system fails; try again when it is well",
    errno.ESTALE: "the file system fails; try again when it is well",
    errno.ELOOP: "its symbolic links lead in a circle; give another place",
}


def of_the_system(error: OSError, missing: bool = True) -> str | None:
    """Describe an OSError in one line: path, reason and remedy. Return None for an error of the program's own.

    Args:
        error: as it was raised; those that libraries derive from OSError and fill with words have no number.
        missing: whether a file that is not there is the user's matter; of a user's own program it is the program's.
    """
    if error.errno is None or (error.errno == errno.ENOENT and not missing):
        return None
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where = " -> ".join(name if len(name) <= 200 else f"{name[:100]}...{name[-60:]}" for name in names)
    said = f"{where}: " if where else ""
    remedy = _REMEDIES.get(error.errno)
    return f"{said}{os.strerror(error.errno)}{f'; {remedy}' if remedy else ''}"
