"""Lightning's CSVLogger: `lightning_logs/version_0/metrics.csv`, next to `hparams.yaml`.

The hyper-parameters give seed and recipe.
"""

from __future__ import annotations

import re
from pathlib import Path

from sweeps.run.files import read_yaml
from sweeps.source.cells import numbers
from sweeps.source.collected import Collected
from sweeps.source.frame import read_table
from sweeps.source.log import Log, add_logs, series_of
from sweeps.source.text import File

NAME = "Lightning's CSVLogger"
FILE, PARAMETERS_FILE = "metrics.csv", "hparams.yaml"
_VERSION = re.compile(r"version_\d+")


def log_files(directory: Path) -> list[Path]:
    """Return the logger's files at or below a directory, sorted by path."""
    return sorted(path for path in directory.rglob(FILE) if (path.parent / PARAMETERS_FILE).is_file())


def matches(file: File, into: Collected) -> bool:
    """Return whether the file has the name that the logger writes, `hparams.yaml` next to it, and a column of steps."""
    if file.path.name != FILE or not (file.path.parent / PARAMETERS_FILE).is_file():
        return False
    table = read_table(file, into.request)
    return table is not None and "step" in table.names


def read(file: File, into: Collected) -> None:
    """Add the run of one log.

    Raises:
        UserError: the log has no metric that can be the reward.
    """
    table = read_table(file, into.request)
    assert table is not None, "`matches` has read it"
    parameters = read_yaml(file.path.parent / PARAMETERS_FILE)
    labels = {key: str(value) for key, value in parameters.items() if isinstance(value, str | int | float)}
    folder = file.path.parent
    name = folder.parent.name if _VERSION.fullmatch(folder.name) and folder.parent.name else folder.name
    log = Log(
        name=name,
        names=table.names,
        rows=table.count,
        series=series_of(table, numbers(table.column("step"))),
        labels=tuple(labels),
        label=labels.get,
    )
    where, notes = str(file.path), ["an incomplete last line was left out"] if table.torn else []
    add_logs([log], NAME, where, into, None, "the logger's folder", "step", notes)
