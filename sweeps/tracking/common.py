"""Functions shared by tracking: the store's address, the time, MLflow's environment, error messages."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from sweeps.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

# Metrics that repeat others for MLflow's charts: compute with its unit, and the pass rate including compute 0.
_CHART_KEY = re.compile(r"Pass rate/.+|eval/.+/(log10 )?compute in .+")
_REMEDY = "use sqlite:////absolute/path/mlflow.db, or the address of a server (http://host:port)"


def resolve_uri(uri: str) -> str:
    """Return the tracking URI for MLflow. A relative SQLite path is made absolute.

    Raises:
        UserError: the argument is not a URI, or names a file store, which MLflow 3 refuses.
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
    """Return the URI without user and password, which is safe to print or store."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def now_ms() -> int:
    """Return the wall-clock time in milliseconds, MLflow's unit."""
    return int(time.time() * 1000)


def quiet_environment() -> None:
    """Shorten MLflow's retries when a server does not answer, and switch off its usage reports and migration logs.

    Values that the user has set are kept.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    levels = {"mlflow.store.db.utils": logging.WARNING, "alembic": logging.WARNING, "urllib3": logging.ERROR}
    for name, level in levels.items():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(level)


def all_runs(client: MlflowClient, experiment_id: str, filter_string: str, order: str) -> list[Run]:
    """Return all runs of an experiment that match a filter, over all pages of the store's answers."""
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], filter_string, order_by=[order], page_token=token)
        runs.extend(page)
        token = page.token
        if not token:
            return runs


def one_line(error: BaseException) -> str:
    """Format an exception as one short line: its type and the first line of its message."""
    message = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}"[:300]


def entity_key(name: str) -> str:
    """Make a valid metric or parameter name for MLflow: invalid characters become underscores.

    Names are cut after 250 characters.
    """
    return re.sub(r"[^/\w.\- :]", "_", name).strip("/")[:250]


def is_chart_key(name: str) -> bool:
    """Return whether a metric of this name only repeats another one for a chart."""
    return _CHART_KEY.fullmatch(name) is not None


@dataclass(frozen=True)
class ChartKeys:
    """Names of the metrics in the charts of one evaluation set. `unit` is the unit of compute.

    `rate` and `x` are the evaluations at compute above 0, `start` is the evaluation at compute 0, and `whole` is all
    evaluations. MLflow labels an axis with the metric's name, so the names of the axes (`log10`, `compute`) contain the
    unit. The name of `whole` begins with a capital, so that its section comes first on a run's page.
    """

    eval_set: str
    unit: str

    @property
    def rate(self) -> str:
        """Name of the metric with the pass rate at compute above 0."""
        return entity_key(f"eval/{self.eval_set}/pass_rate")

    @property
    def x(self) -> str:
        """Name of the metric with the decimal logarithm of compute; the same name for every unit."""
        return entity_key(f"eval/{self.eval_set}/log10_compute")

    @property
    def start(self) -> str:
        """Name of the metric with the pass rate at compute 0."""
        return entity_key(f"eval/{self.eval_set}/initial_pass_rate")

    @property
    def whole(self) -> str:
        """Name of the metric with the pass rate of every evaluation, including the one before training."""
        return entity_key(f"Pass rate/{self.eval_set}")

    @property
    def log10(self) -> str:
        """Name, with the unit, of the metric with the decimal logarithm of compute at the evaluations in `rate`."""
        return entity_key(f"eval/{self.eval_set}/log10 compute in {self.unit}")

    @property
    def compute(self) -> str:
        """Name, with the unit, of the metric with the compute at the evaluations in `whole`."""
        return entity_key(f"eval/{self.eval_set}/compute in {self.unit}")
