"""TensorBoard event files: one file, or a directory in which every folder with event files is a run.

The package `tensorboard` reads them (an optional dependency, imported only here). It silently stops at the first
truncated or damaged record, so the records are also counted here, to warn of this.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.errors import UserError, require
from sweeps.source.collected import Collected
from sweeps.source.log import Log, Series, add_logs, series_of_points
from sweeps.source.run_names import is_bare_seed
from sweeps.source.text import File, run_of, short
from sweeps.terminal import counted

NAME = "TensorBoard event files"
WALL_TIME = "wall_time"
_MARK = "tfevents"


def event_files(directory: Path) -> list[Path]:
    """Return the event files at or below a directory, sorted by path."""
    return sorted(path for path in directory.rglob(f"*{_MARK}*") if path.is_file())


def matches(file: File, into: Collected) -> bool:
    """Return whether the file's name is one of TensorBoard's. The content has no magic bytes."""
    return _MARK in file.path.name


def read(file: File, into: Collected) -> None:
    """Add the run of one event file.

    Raises:
        UserError: no scalars, no metric that can be the reward, or tensorboard is not installed.
    """
    _add({into.run_name(file): [file.path]}, str(file.path), into, "the file's name")


def read_directory(directory: Path, files: list[Path], into: Collected) -> None:
    """Add one run per folder with event files.

    Raises:
        UserError: a run has no scalars or no metric that can be the reward, or tensorboard is not installed.
    """
    runs: dict[str, list[Path]] = {}
    for path in files:
        inner = path.parent.relative_to(directory).as_posix()
        name = run_of(directory.resolve() / inner) if inner == "." or is_bare_seed(inner) else inner
        runs.setdefault(name, []).append(path)
    _add(runs, str(directory), into, "the run's directory")


def _add(runs: dict[str, list[Path]], where: str, into: Collected, named: str) -> None:
    """Add runs, given by their event files. `named` says where the runs' names come from."""
    require("tensorboard", f"{where} (event files)")
    logs = []
    is_single = sum(map(len, runs.values())) == 1
    for name, paths in runs.items():
        scalars: dict[str, list[tuple[float, float, float]]] = {}
        warnings = []
        for path in paths:  # the names contain the time, so this is the order of writing
            try:
                if warning := _load(path, scalars):
                    warnings.append(warning)
            except UserError as error:
                if is_single:
                    raise
                into.study.warnings.append(str(error))  # a damaged file must not hide the other runs
        if scalars:
            logs.append(_log(name, scalars, warnings))
    if not logs:
        raise UserError(f"{where}: no scalar in {sum(map(len, runs.values()))} event files; give another source")
    add_logs(logs, NAME, where, into, None, named)


def _load(path: Path, scalars: dict[str, list[tuple[float, float, float]]]) -> str | None:
    """Add a file's scalars (step, wall time, value) by tag; return a warning if it was not read to the end."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    record_count, is_complete = _count_records(path)
    loaded = 0
    try:
        for event in EventFileLoader(str(path)).Load():
            loaded += 1
            for value in event.summary.value:
                number = _scalar(value, tensor_util.make_ndarray)
                if number is not None:
                    scalars.setdefault(value.tag, []).append((event.step, event.wall_time, number))
    except Exception as error:  # protobuf, struct and tensorboard raise various errors for damaged files.
        raise UserError(f"{path}: not a readable event file ({short(str(error))}); give another file") from error
    if not loaded:
        raise UserError(f"{path}: not an event file; give the file that TensorBoard's writer made")
    if loaded < record_count or not is_complete:
        return f"{path.name} is cut off or damaged after {counted(loaded, 'record')}; the rest was not read"
    return None


def _scalar(value: Any, as_array: Callable[[Any], Any]) -> float | None:
    """Return a summary's scalar, in TensorBoard's old or new form; None for other summaries."""
    if value.metadata.plugin_data.plugin_name not in ("scalars", ""):
        return None
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    array = np.asarray(as_array(value.tensor))
    return float(array.reshape(-1)[0]) if array.size == 1 and array.dtype.kind in "fiub" else None


def _log(name: str, scalars: dict[str, list[tuple[float, float, float]]], warnings: list[str]) -> Log:
    """Make a run's log from its scalars. The seconds since the first event are an additional metric."""
    events = np.unique(np.array([row[:2] for rows in scalars.values() for row in rows], dtype=float), axis=0)

    def series(tag: str) -> Series:
        if tag == WALL_TIME:
            return Series(events[:, 0], events[:, 1] - events[:, 1].min())
        points = [(step, value) for step, _, value in scalars[tag]]
        return series_of_points(points, absent=max(0, len(steps) - len(points)))

    steps = np.unique(events[:, 0])
    return Log(name=name, names=[*scalars, WALL_TIME], rows=len(steps), series=series, warnings=tuple(warnings))


def _count_records(path: Path) -> tuple[int, bool]:
    """Count complete records (8 bytes of length, checksum, data, checksum).

    Return also whether the file ends after the last.
    """
    try:
        size = path.stat().st_size
        count = position = 0
        with path.open("rb") as handle:
            while position + 16 <= size:
                handle.seek(position)
                (length,) = struct.unpack("<Q", handle.read(8))
                if position + 16 + length > size:
                    break
                position += 16 + length
                count += 1
        return count, position == size
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
