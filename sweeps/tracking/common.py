"""Helpers shared by tracking: the store's address, the clock, MLflow's environment, error texts."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from sweeps.errors import UserError

_REMEDY = "use sqlite:////absolute/path/mlflow.db, or the address of a server (http://host:port)"


def resolve_uri(uri: str) -> str:
    """Return the tracking URI as MLflow takes it, with a relative SQLite path made absolute.

    Raises:
        UserError: the file store, which MLflow 3 refuses, or no URI at all.
    """
    scheme, separator, rest = uri.partition(":")
    if not separator or scheme == "file" or len(scheme) == 1:
        raise UserError(
            f"tracking uri {uri!r} is a file store, which MLflow no longer opens; {_REMEDY}; "
            "`mlflow migrate-filestore` moves old runs"
        )
    if scheme.split("+")[0] == "sqlite":
        if not rest.startswith("///") or rest == "///" or rest.startswith("///:memory:"):
            raise UserError(f"tracking uri {uri!r} names no database file; {_REMEDY}")
        return f"{scheme}:///{Path(rest[3:]).expanduser().resolve()}"
    return uri.rstrip("/")


def without_credentials(uri: str) -> str:
    """Return the URI without user and password, safe to print or store."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def now_ms() -> int:
    """Return the wall-clock time in milliseconds, MLflow's unit."""
    return int(time.time() * 1000)


def quiet_environment() -> None:
    """Override MLflow's defaults that do not suit a mirror, unless the user has set them.

    These are minutes of retries against a dead server, usage reports over the network, migration logs on stderr.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    levels = {"mlflow.store.db.utils": logging.WARNING, "alembic": logging.WARNING, "urllib3": logging.ERROR}
    for name, level in levels.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)


def one_line(error: BaseException) -> str:
    """Format an exception as one short line: type, then the first line of its message."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"[:300]
