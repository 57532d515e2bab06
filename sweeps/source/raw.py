"""Read whole logs of a source, to follow a run of another trainer. Reward and compute are not chosen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.source import table, wandb_export, wide
from sweeps.source.cells import numbers
from sweeps.source.collected import Collected, LoadedStudy, Request
from sweeps.source.frame import Table, read_table
from sweeps.source.load import readings_of
from sweeps.source.log import Log, series_of
from sweeps.source.places import Place
from sweeps.source.readers import READERS
from sweeps.source.text import File, listed, short
from sweeps.source.vocabulary import STEP_NAMES, VOCABULARIES, step_column

# Readers of plain tables, in which a step is an ordinary column.
_TABLES = (wandb_export, wide, table)


class _Logs(Collected):
    """Collector that keeps the logs of a source as they are, and makes no curves from them."""

    def __init__(self) -> None:
        super().__init__(Request(), LoadedStudy())
        self.logs: list[Log] = []

    def takes(self, logs: Sequence[Any]) -> bool:
        """Keep the logs; return True, so that the reader makes no points."""
        self.logs += logs
        return True


def read_logs(source: str | Path, step: str | None = None) -> list[Log]:
    """Read the logs of any source that `scalerl fit` reads, with all their metrics by step.

    Args:
        source: a file, a folder, `mlflow:URI#experiment` or `wandb:entity/project[/run]`; not this project's journal.
        step: step column of a table; None for the first name that a tracker or framework uses.

    Raises:
        UserError: the source does not exist, or cannot be read.
    """
    place = Place(source)
    place.check()
    into = _Logs()
    for _, add in readings_of(place, partial(_read, step)):
        add(into)
    return into.logs


def _read(step: str | None, file: File, into: _Logs) -> None:
    """Read a file by the reader of its format, or else as a table with a column of steps."""
    formats = (reader for reader in READERS if reader not in _TABLES)
    reader = next((reader for reader in formats if reader.matches(file, into)), None)
    if reader is not None:
        reader.read(file, into)
        return
    rows = read_table(file, into.request)
    if rows is not None and rows.count:
        into.logs.append(log_of_table(rows, file.run_name, str(file.path), step))


def log_of_table(rows: Table, name: str, where: str, step: str | None = None) -> Log:
    """Make a log from a table with one row per step.

    Raises:
        UserError: a column of steps is missing.
    """
    column = step_column(rows.names, step)
    if column is None:
        raise no_steps(where, rows.names, step)
    return Log(name=name, names=rows.names, rows=rows.count, series=series_of(rows, numbers(rows.column(column))))


# All names that a column of steps may have if the user gives none.
STEP_COLUMNS = frozenset([*STEP_NAMES, *(name for each in VOCABULARIES for name in each.step)])


def no_steps(where: str, names: Sequence[str], step: str | None) -> UserError:
    """Return the error about a log without a column of steps. `step` is the name that the user gave, if any."""
    column = "of steps" if step is None else short(step)
    return UserError(f"{where}: no column {column}; found {listed(names)}")
