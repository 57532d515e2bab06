"""Read W&B's local folders: `wandb/offline-run-*` and `wandb/run-*`, each with the log `run-ID.wandb` of one run.

The log has LevelDB's format: records are split into fragments, each with a checksum, in blocks of 32 KiB. The records
are protobuf messages, which the package `wandb` defines (an optional dependency, imported only here). A truncated log
is read up to the break.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.errors import UserError, require
from sweeps.run.spec import flatten_config
from sweeps.source.collected import FAILED, FINISHED, RUNNING, Collected
from sweeps.source.log import Log, add_logs, series_of_records
from sweeps.source.text import File, parse_json_text
from sweeps.terminal import counted

NAME = "W&B run"
SUFFIX = ".wandb"
# _IDENT: first bytes of the file. _HEADER: size of the file's header. _BLOCK: size of a block. _FRAGMENT: format of a
# fragment's header (checksum, length, kind).
_IDENT, _HEADER = b":W&B", 7
_BLOCK, _FRAGMENT = 32768, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def run_files(directory: Path) -> list[Path]:
    """Return the logs of W&B's runs at or below a directory, sorted by path. The link `latest-run` adds no log."""
    return sorted({path.resolve() for path in directory.rglob(f"*{SUFFIX}") if path.is_file()})


def matches(file: File, into: Collected) -> bool:
    """Return whether the file begins like W&B's logs."""
    return file.raw.startswith(_IDENT)


def read(file: File, into: Collected) -> None:
    """Add the run of one log.

    Raises:
        UserError: the log has no metrics, or wandb is not installed.
    """
    read_all([file.path], str(file.path), into)


def read_all(paths: list[Path], where: str, into: Collected) -> None:
    """Add the runs of several logs.

    Raises:
        UserError: no log has metrics, or wandb is not installed.
    """
    require("wandb", f"{where} (a log of W&B)")
    logs = [log for path in paths if (log := _log(path)) is not None]
    if not logs:
        raise UserError(f"{where}: no metric in {counted(len(paths), 'log')} of W&B; give another source")
    add_logs(logs, NAME, where, into, None, "the run's name", "_step")


def of_run(
    name: str,
    config: dict[str, Any],
    rows: list[dict[str, Any]],
    warnings: list[str],
    key: str = "",
    state: str = "",
) -> Log:
    """Make the log of a run.

    Args:
        name: name of the run.
        config: configuration, whose values become labels by dotted key.
        rows: metrics by name of each logged row; the step is its `_step` or, without it, the row's number.
        warnings: remarks on damage.
        key, state: see `sweeps.source.collected.ForeignRun`.
    """
    records = [(float(row.get("_step", number)), row) for number, row in enumerate(rows)]
    names = list(dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, int | float)))
    plain = {name: value for name, value in flatten_config(config).items() if isinstance(value, str | int | float)}
    labels = {name: str(value) for name, value in plain.items()}
    return Log(
        name=name,
        names=names,
        rows=len(rows),
        series=series_of_records(records),
        labels=tuple(labels),
        label=labels.get,
        warnings=tuple(warnings),
        key=key,
        state=state,
    )


def _log(path: Path) -> Log | None:
    from wandb.proto import wandb_internal_pb2

    name = path.stem.removeprefix("run-")
    key, state = f"wandb:{name}", RUNNING  # a killed process stays "running", because it wrote no exit record
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    warnings: list[str] = []
    for message in _messages(path, warnings):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]  # protobuf makes the class at import
        try:
            record.ParseFromString(message)
        except Exception as error:  # protobuf raises an error of its own.
            raise UserError(f"{path}: not a readable log of W&B ({type(error).__name__}); give another file") from error
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or name
            config |= {"group": record.run.run_group} if record.run.run_group else {}
            config |= _values(record.run.config.update)
        elif kind == "config":
            config |= _values(record.config.update)
        elif kind == "history":
            row = _values(record.history.item)
            rows.append({"_step": float(record.history.step.num), **row} if record.history.HasField("step") else row)
        elif kind == "exit":
            state = FAILED if record.exit.exit_code else FINISHED
    if any(len(row) > 1 for row in rows):
        return of_run(name, config, rows, warnings, key, state)
    return None


def _values(items: Any) -> dict[str, Any]:
    """Return a message's values by key. Nested keys are joined by slashes."""
    return {item.key or "/".join(item.nested_key): parse_json_text(item.value_json) for item in items}


def _messages(path: Path, warnings: list[str]) -> Iterator[bytes]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    at = _HEADER
    parts: list[bytes] = []
    while at < len(raw):
        if _BLOCK - at % _BLOCK < _FRAGMENT.size:  # the rest of the block is padding, too small for a fragment
            at += _BLOCK - at % _BLOCK
            continue
        head = raw[at : at + _FRAGMENT.size].ljust(_FRAGMENT.size, b"\0")
        checksum, length, kind = _FRAGMENT.unpack(head)
        data = raw[at + _FRAGMENT.size : at + _FRAGMENT.size + length]
        if (
            len(data) < length
            or at + _FRAGMENT.size > len(raw)
            or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum
        ):
            warnings.append(f"{path.name} is cut off or damaged at byte {at}; the rest was not read")
            return
        at += _FRAGMENT.size + length
        # A record may be split into fragments across blocks.
        parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
