"""Read `mlflow:URI#experiment`: runs in an MLflow store, logged by this project's tracker or by others.

Runs by this project's tracker have the tags `kind=member`, recipe and seed. The evaluation at compute 0 is stored as
`eval/<set>/initial_pass_rate`, and the others as `eval/<set>/pass_rate` with `eval/<set>/log10_compute`. For other runs
any metric can be chosen, and tags and parameters are labels. The store is only read: it is neither created nor
migrated.
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sweeps.errors import UserError, require
from sweeps.source.collected import FAILED, FINISHED, RUNNING, Collected
from sweeps.source.log import Column, Log, Series, add_logs, series_of_points
from sweeps.source.text import listed, short

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

NAME = "MLflow"
PREFIX = "mlflow:"
_STATES = {"RUNNING": RUNNING, "SCHEDULED": RUNNING, "FINISHED": FINISHED, "FAILED": FAILED, "KILLED": FAILED}
_OURS = ("sweep", "member", "fit", "band")  # values of the tag `kind` that this project's tracker writes


def matches_text(source: str) -> bool:
    """Return whether a source is an MLflow experiment (`mlflow:...`) instead of a path."""
    return source.startswith(PREFIX)


def parts_of(source: str) -> tuple[str, str]:
    """Split `mlflow:URI#experiment` into the store's address and the experiment's name; "" without a name.

    Both may contain `#`: the address ends at the first `#` that follows an existing store, else at the first `#`.
    """
    text = source.removeprefix(PREFIX)
    positions = [position for position, char in enumerate(text) if char == "#"]
    if not positions:
        return text, ""
    position = next((position for position in positions if _may_be_store(text[:position])), positions[0])
    return text[:position], text[position + 1 :]


def _may_be_store(address: str) -> bool:
    """Return whether an address can be a store: an existing file or folder, or an address that is not a path."""
    scheme, mark, path = address.partition("://")
    if mark and scheme != "file" and not scheme.startswith("sqlite"):
        return True
    path = path[1:] if scheme.startswith("sqlite") else path if mark else address
    return not path or Path(path).exists()


def read_experiment(source: str, into: Collected) -> None:
    """Add the runs of an experiment.

    Raises:
        UserError: the store or experiment does not exist, or no run has the metric.
    """
    require("mlflow", short(source, 400))
    from sweeps.tracking.common import one_line, resolve_uri, without_credentials

    address, experiment = parts_of(source)
    uri = resolve_uri(address)
    where = f"{PREFIX}{without_credentials(uri)}#{experiment}"
    try:
        runs, client = _runs(uri, experiment, where)
        logs, unused = _logs(runs, client, into.request.x)
        notes = [f"runs of other kinds (sweeps, fits): {unused}"] if unused else []
        if not logs:
            raise UserError(f"{where}: no run with metrics; give an experiment with runs")
        axis = _study_axis(runs) if into.request.x is None else None
        compute = None if axis is None else Column(axis, "the study's axis of compute")
        add_logs(logs, NAME, where, into, named="the run's name", notes=notes, compute=compute)
    except UserError:
        raise
    except Exception as error:  # the client passes SQL, HTTP and OS errors through
        raise UserError(f"{where}: cannot be read ({one_line(error)}); check that the store is there") from error


def _runs(uri: str, experiment: str, where: str) -> tuple[list[Run], MlflowClient]:
    from sweeps.tracking.common import all_runs, quiet_environment

    scheme, _, file = uri.partition(":///")
    if scheme.split("+")[0] == "sqlite":
        _check_database(Path(file))
    quiet_environment()
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    match = client.get_experiment_by_name(experiment) if experiment else None
    if match is None:
        names = sorted(other.name for other in client.search_experiments())
        problem = f"no experiment {short(experiment)!r}" if experiment else "no experiment is named"
        raise UserError(f"{where}: {problem}; found {listed(names)}; give mlflow:URI#experiment")
    return all_runs(client, match.experiment_id, "", "attributes.start_time ASC"), client


def _check_database(path: Path) -> None:
    """Check a database before MLflow opens it: MLflow would create a missing file, or tables in another database.

    Raises:
        UserError: the file is missing, is not an MLflow database, or would have to be migrated.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such database; give mlflow:sqlite:///path/to/mlflow.db#experiment")
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=30)
        try:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"experiments", "runs", "metrics", "params", "tags", "alembic_version"} <= tables:
                raise UserError(f"{path}: not an MLflow database; give the file that MLflow's backend store uses")
            version = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise UserError(f"{path}: not an MLflow database ({short(str(error))}); give MLflow's backend store") from error
    from mlflow.store.db.utils import _get_latest_schema_revision

    if version is None or version[0] != _get_latest_schema_revision():
        raise UserError(
            f"{path}: written by another version of MLflow, which reading would change; run `mlflow db upgrade` on a "
            "copy and give that"
        )


def _logs(runs: Sequence[Run], client: MlflowClient, x: str | None) -> tuple[list[Log], int]:
    """Return the logs of runs with measurements, and the number of the other runs (studies, fits)."""
    members = [run for run in runs if run.data.tags.get("kind") == "member"]
    chosen = members or [run for run in runs if run.data.tags.get("kind") not in _OURS]
    logs = []
    for run in chosen:
        if run.data.metrics:
            logs.append(_log(run, client, ours=bool(members) and x is None))
    return logs, len(runs) - len(chosen)


def _axis(run: Run) -> str:
    """Return the compute axis that a member of one of our studies recorded."""
    return str(run.data.tags.get("compute.axis", "compute/flops"))


def _study_axis(runs: Sequence[Run]) -> str | None:
    axes = {_axis(run) for run in runs if run.data.tags.get("kind") == "member" and run.data.metrics}
    return axes.pop() if len(axes) == 1 else None


def _log(run: Run, client: MlflowClient, ours: bool) -> Log:
    """Make a run's log. `ours` is whether to restore the metric names and compute of this project's journals."""
    labels = {**run.data.params, **run.data.tags}
    fetch = _metric_fetcher(client, run.info.run_id)
    keys = sorted(run.data.metrics)
    names = keys
    series = fetch
    if ours:
        from sweeps.tracking.common import is_chart_key

        axis = _axis(run)
        names = [key for key in keys if not key.startswith("compute/") and not is_chart_key(key)]
        names = [re.sub(r"/initial_pass_rate$", "/pass_rate", key) for key in names]
        names = [*dict.fromkeys(names), axis]
        series = _journal_reader(fetch, keys, axis)
    name = run.info.run_name or run.info.run_id
    warnings = ["failed; its points are used"] if run.info.status == "FAILED" else []
    return Log(
        name=name,
        names=names,
        rows=0,
        series=series,
        labels=tuple(sorted(labels, key=lambda key: (key.startswith("mlflow."), key))),
        label=labels.get,
        warnings=warnings,
        key=f"mlflow:{run.info.run_id}",
        state=_STATES.get(run.info.status, ""),
    )


def _metric_fetcher(client: MlflowClient, run_id: str) -> Callable[[str], Series]:
    def series(key: str) -> Series:
        points = sorted(client.get_metric_history(run_id, key), key=lambda point: (point.timestamp, point.step))
        return series_of_points([(point.step, _stored(point.value)) for point in points])

    return series


def _stored(value: float) -> float:
    """Return the value that was logged. A database cannot hold infinity, for which MLflow writes the largest float."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value


def _journal_reader(fetch: Callable[[str], Series], keys: Sequence[str], axis: str) -> Callable[[str], Series]:
    """Return a function that reads a metric as in a member's journal, with compute and the evaluation at 0.

    Args:
        fetch: function that fetches a metric as it is stored.
        keys: names of the stored metrics.
        axis: name of the axis of compute.
    """

    def series(name: str) -> Series:
        if name == axis:
            parts = [fetch(key) for key in keys if re.fullmatch(r"eval/.+/log10_compute", key)]
            parts = [Series(part.steps, 10.0**part.values) for part in parts]
            starts = [fetch(key) for key in keys if key.endswith("/initial_pass_rate")]
            parts += [Series(part.steps, np.zeros(len(part.steps))) for part in starts]
            return _concatenate(parts)
        first = re.sub(r"/pass_rate$", "/initial_pass_rate", name)
        present = [key for key in dict.fromkeys([first, name]) if key in keys]
        return _concatenate([fetch(key) for key in present])

    return series


def _concatenate(parts: Sequence[Series]) -> Series:
    empty = np.empty(0)
    return Series(
        np.concatenate([empty, *(part.steps for part in parts)]),
        np.concatenate([empty, *(part.values for part in parts)]),
        0,
        sum(part.bad for part in parts),
        next((part.first_bad for part in parts if part.bad), ""),
    )
