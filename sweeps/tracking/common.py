"""What all of tracking needs: the store's address, files written whole, MLflow's environment."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from sweeps.errors import UserError

_REMEDY = "use sqlite:////absolute/path/mlflow.db, or the address of a server (http://host:port)"


def resolve_uri(uri: str) -> str:
    """The tracking URI as MLflow takes it, a relative SQLite path made absolute.

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
    """The URI without user and password: what may be printed or kept in a file."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def now_ms() -> int:
    """Wall clock in MLflow's unit."""
    return int(time.time() * 1000)


def quiet_environment() -> None:
    """MLflow's own defaults that do not suit a mirror, each left alone if the user set it.

    Minutes of retries against a dead server, usage reports over the network, migration logs on stderr.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    levels = {"mlflow.store.db.utils": logging.WARNING, "alembic": logging.WARNING, "urllib3": logging.ERROR}
    for name, level in levels.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)


def one_line(error: BaseException) -> str:
    """An exception as one short line: type, then the first line of its message."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"[:300]
