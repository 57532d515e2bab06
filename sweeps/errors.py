"""UserError, the exception that commands print as one line with exit code 1, and functions that raise it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class UserError(Exception):
    """Error in the user's input: a value, a file or a setting that cannot be used.

    The message is one line with the field, its value and the remedy. Commands print it without a traceback, and exit
    with 1.
    """


def require(module: str, what: str, install: str | None = None) -> None:
    """Check that an optional package is installed.

    Args:
        module: name of the module as it is imported.
        what: what the user has requested; the message begins with it.
        install: argument of `pip install`; None for the module's name.

    Raises:
        UserError: the module is not installed.
    """
    installed = sys.modules[module] is not None if module in sys.modules else find_spec(module) is not None
    if not installed:
        raise UserError(f"{what}: needs the package {module}, which is not installed; pip install {install or module}")


def require_training(what: str) -> None:
    """Check that lightning-scalerl is installed, and not only the study tool `sweeps`.

    Args:
        what: what the user has requested; the message begins with it.

    Raises:
        UserError: lightning-scalerl, or a package that it needs for training, is not installed.
    """
    for package in ("lightning_scalerl", "hydra", "torch", "lightning", "transformers"):
        require(package, what, "lightning-scalerl (in a checkout: pip install -e .)")


@contextmanager
def errors_naming(field: str) -> Iterator[None]:
    """Convert an OSError in a `with` block to a UserError whose message begins with `field`.

    Raises:
        UserError: an OSError with an errno was raised. An OSError without one passes unchanged.
    """
    try:
        yield
    except OSError as error:
        if (description := describe_os_error(error)) is None:
            raise
        raise UserError(f"{field}: {description}") from error


_ELSEWHERE = (
    "change its rights, or write elsewhere (scalerl train: output_dir=; other commands: -o, or a copy of the study)"
)
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
    errno.ENFILE: "the machine has reached its limit of open files; try again later",
    errno.EIO: "the file system fails; try again when it works",
    errno.ESTALE: "the file system fails; try again when it works",
    errno.ELOOP: "its symbolic links lead in a circle; give another place",
}


def describe_os_error(error: OSError, missing: bool = True) -> str | None:
    """Describe an OSError in one line: path, reason and remedy. Return None if the user cannot fix it.

    Args:
        error: the error. Some libraries raise OSErrors with a text but without an errno; the result is then None.
        missing: whether to describe the error of a missing file. False while the user's own code runs, because it is
            then an error of that code.
    """
    if error.errno is None or (error.errno == errno.ENOENT and not missing):
        return None
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    where = " -> ".join(name if len(name) <= 200 else f"{name[:100]}...{name[-60:]}" for name in names)
    prefix = f"{where}: " if where else ""
    remedy = _REMEDIES.get(error.errno)
    return f"{prefix}{os.strerror(error.errno)}{f'; {remedy}' if remedy else ''}"
