"""Read Trackio's local store: one SQLite file per project, `~/.cache/huggingface/trackio/PROJECT.db`.

The file is only read. A row of its table `metrics` has the metrics of one step of a run, as JSON. The table `configs`
has the runs' initial configurations.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.source.collected import Collected
from sweeps.source.log import Log, add_logs
from sweeps.source.text import File, parse_json_text, short
from sweeps.source.wandb_local import of_run

NAME = "Trackio project"
_SQLITE = b"SQLite format 3\0"
_SUFFIX = ".db"


def databases(directory: Path) -> list[Path]:
    """Return Trackio's files in a directory, sorted by path. Other databases are left out."""
    return sorted(path for path in directory.glob(f"*{_SUFFIX}") if path.is_file() and _is_trackio(path))


def matches(file: File, into: Collected) -> bool:
    """Return whether the file is a SQLite database. `read` refuses databases of other programs."""
    return file.raw.startswith(_SQLITE)


def read(file: File, into: Collected) -> None:
    """Add the runs of a project.

    Raises:
        UserError: the database is not Trackio's, is damaged, or has no metrics.
    """
    if not _is_trackio(file.path):
        raise UserError(
            f"{file.path}: a SQLite database, and none of Trackio's; of MLflow's give mlflow:sqlite:///PATH#experiment"
        )
    try:
        logs = _logs(file.path)
    except (sqlite3.Error, ValueError) as error:
        raise UserError(f"{file.path}: not a readable file of Trackio ({short(str(error))}); give another") from error
    if not logs:
        raise UserError(f"{file.path}: no run with metrics; give another project")
    add_logs(logs, NAME, str(file.path), into, None, "the run's name", "step")


def _query(path: Path, query: str) -> list[tuple[Any, ...]]:
    # In immutable mode SQLite creates no files next to the store. But a run in progress has a -wal file, which must be
    # read.
    mode = "mode=ro" if Path(f"{path}-wal").exists() else "immutable=1"
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=30)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def _columns(path: Path, table: str) -> set[str]:
    return {row[1] for row in _query(path, f"PRAGMA table_info({table})")}


def _is_trackio(path: Path) -> bool:
    try:
        return {"run_name", "step", "metrics"} <= _columns(path, "metrics")
    except sqlite3.Error:
        return False


def _logs(path: Path) -> list[Log]:
    # Earlier versions of Trackio identify a run by its name only.
    key = "run_id" if "run_id" in _columns(path, "metrics") else "run_name"
    configs = {}
    if _columns(path, "configs"):
        rows_of = _query(path, f"SELECT {key}, config FROM configs ORDER BY id")
        configs = {run: parse_json_text(text) for run, text in rows_of}
    rows: dict[str, list[dict[str, Any]]] = {}
    names: dict[str, str] = {}
    for run, name, step, text in _query(path, f"SELECT {key}, run_name, step, metrics FROM metrics ORDER BY id"):
        names[run] = name
        rows.setdefault(run, []).append({**parse_json_text(text), "_step": step})
    return [
        of_run(names[run], configs.get(run, {}), logged, [], f"trackio:{run}" if key == "run_id" else "")
        for run, logged in rows.items()
    ]
