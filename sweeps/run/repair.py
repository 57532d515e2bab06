"""Repair of a journal with a broken line in its middle: it is cut there, and the run resumes from before.

The cause may be a lost disk block, an editor, or a truncated copy. Records after the broken line may be intact, but
without the lost one they form a curve with a hole. The damaged file is kept next to the journal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sweeps.run.files import dump_line, parse_line, whole_lines
from sweeps.run.journal import JOURNAL_FILE, JournalError, Reading, finite

DAMAGED_FILE = "metrics.damaged-{}.jsonl"


@dataclass(frozen=True)
class Break:
    """Place of a journal's first broken line, and the newest checkpoint to resume from.

    Attributes:
        path: path of the journal.
        line: number, from 1, of the first line that is not a record.
        step: step of the newest checkpoint covered by the records before that line, -1 for none; the run must not be
            resumed from a later one.
        why: the journal's own error message.
        metrics: metrics of the newest record in the whole file, from which the lost compute is counted.
    """

    path: Path
    line: int
    step: int
    why: str
    metrics: Mapping[str, float]


def find_break(run_dir: Path) -> Break | None:
    """Find the first broken line of a run's journal; None if it is intact, or not begun.

    A torn line at the end does not count: the next writer cuts it off.

    Raises:
        JournalError: the header is broken, so it is unknown whose journal it is.
        OSError: the file cannot be read.
    """
    path = run_dir / JOURNAL_FILE
    try:
        lines, _ = whole_lines(path.read_bytes())
    except FileNotFoundError:
        return None
    reading = Reading(path)
    why = None
    for line in lines:
        try:
            reading.take(parse_line(line))
        except JournalError as error:
            why = f"{path}, line {reading.lines + 1}: not a journal record ({error.__cause__})"
            break
    if why is None:
        return None
    if reading.lines == 0:
        raise JournalError(f"{why}, so nobody knows whose journal it is; restore the line, or move the file away")
    view = reading.view()
    later = [entry for line in lines[reading.lines + 1 :] if (entry := parse_line(line)) is not None]
    records = [entry for entry in later if _step(entry) is not None and isinstance(entry.get("metrics"), Mapping)]
    # Include records after the break: the run loses them, but their compute was spent and is counted as lost.
    newest = max([*records, *({"step": r.step, "metrics": r.metrics} for r in view.records)], key=_newest, default={})
    step = -1 if view.checkpoint_step is None else view.checkpoint_step
    for entry in later:
        # Steps before which the run later resumed were repeated: checkpoints from there on may not match the kept
        # records.
        at = _step(entry)
        if at is not None and entry.get("kind") in ("resume", "eval", "train"):
            step = min(step, at - 1 if entry["kind"] == "train" else at)
    return Break(path, reading.lines + 1, max(step, -1), why, _numbers(newest.get("metrics", {})))


def mend(found: Break) -> Path:
    """Copy the damaged journal, cut the journal off before the break, and return the copy's path.

    Checkpoints beyond `found.step` must be removed first: if the process is killed here, or right after, nothing else
    would prevent their use.

    Raises:
        OSError: a file could not be written; the journal is unchanged.
    """
    raw = found.path.read_bytes()
    # Copy before cutting: if the process is killed in between, the journal is unchanged and the copy is reused.
    kept = _keep(found.path, raw)
    entry = {
        "kind": "mended",
        "time": time.time(),
        "step": found.step,
        "line": found.line,
        "kept": kept.name,
        "metrics": dict(found.metrics),
    }
    intact = b"".join(line + b"\n" for line in raw.split(b"\n")[: found.line - 1])
    unfinished = found.path.with_name(f".{found.path.name}.mended")
    try:
        _write(unfinished, intact + dump_line(entry, checksum=True), "wb")
        unfinished.rename(found.path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return kept


def _keep(path: Path, raw: bytes) -> Path:
    """Write a copy without overwriting others; an identical copy, left by a killed process, is reused."""
    number = 1
    while True:
        copy = path.with_name(DAMAGED_FILE.format(number))
        try:
            _write(copy, raw, "xb")
            return copy
        except FileExistsError:
            if copy.read_bytes() == raw:
                return copy
            number += 1
        except OSError:
            with suppress(OSError):
                copy.unlink()
            raise


def _write(path: Path, raw: bytes, mode: Literal["wb", "xb"]) -> None:
    with path.open(mode) as handle:
        handle.write(raw)
        handle.flush()
        os.fsync(handle.fileno())


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, number in metrics.items() if (value := finite(number)) is not None}


def _step(entry: Mapping[str, Any]) -> int | None:
    step = entry.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _newest(entry: Mapping[str, Any]) -> int:
    return int(entry["step"])
