"""Repair of a journal with a broken line in its middle: it is cut there, and the run resumes from before it.

A disk that lost a block, an editor, a copy that was cut: the records behind the broken line may be sound, but without
the lost one they are a curve with a hole. The damaged file is kept beside the journal.
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
        line: number, from 1, of the first line that is no record.
        step: step of the newest checkpoint that the records before that line cover, -1 for none; the run must not be
            resumed from a later one.
        why: the journal's own error message.
        metrics: metrics of the newest record of all, from which the lost compute is counted.
    """

    path: Path
    line: int
    step: int
    why: str
    metrics: Mapping[str, float]


def find_break(run_dir: Path) -> Break | None:
    """Find the first broken line of a run's journal; None if it is whole, or has not begun.

    A torn line at the end does not count, for the next writer cuts it off.

    Raises:
        JournalError: it is the header that is broken, so nobody knows whose journal it is.
        OSError: the file cannot be read.
    """
    path = run_dir / JOURNAL_FILE
    try:
        lines, _ = whole_lines(path.read_bytes())
    except FileNotFoundError:
        return None
    before = Reading(path)
    why = None
    for line in lines:
        try:
            before.take(parse_line(line))
        except JournalError as error:
            why = f"{path}, line {before.lines + 1}: not a journal record ({error.__cause__})"
            break
    if why is None:
        return None
    if before.lines == 0:
        raise JournalError(f"{why}, so nobody knows whose journal it is; restore the line, or move the file away")
    view = before.view()
    behind = [entry for line in lines[before.lines + 1 :] if (entry := parse_line(line)) is not None]
    records = [entry for entry in behind if _step(entry) is not None and isinstance(entry.get("metrics"), Mapping)]
    # Behind the break, too: the run loses these records, but their compute was spent, and is counted as lost.
    newest = max([*records, *({"step": r.step, "metrics": r.metrics} for r in view.records)], key=_newest, default={})
    step = -1 if view.checkpoint_step is None else view.checkpoint_step
    for entry in behind:
        # What was gone back behind later was made again: checkpoints from there on need not fit what is before.
        at = _step(entry)
        if at is not None and entry.get("kind") in ("resume", "eval", "train"):
            step = min(step, at - 1 if entry["kind"] == "train" else at)
    return Break(path, before.lines + 1, max(step, -1), why, _numbers(newest.get("metrics", {})))


def mend(found: Break) -> Path:
    """Copy the damaged journal aside, cut the journal off before the break, and return the copy's path.

    Checkpoints beyond `found.step` must be out of the way before: a process that is killed here, or right after, would
    leave nothing that forbids them.

    Raises:
        OSError: it could not be written; the journal is as it was.
    """
    raw = found.path.read_bytes()
    # The copy before the cut: a process killed in between leaves the journal as it was, and the copy is used again.
    kept = _keep(found.path, raw)
    entry = {
        "kind": "mended",
        "time": time.time(),
        "step": found.step,
        "line": found.line,
        "kept": kept.name,
        "metrics": dict(found.metrics),
    }
    before = b"".join(line + b"\n" for line in raw.split(b"\n")[: found.line - 1])
    unfinished = found.path.with_name(f".{found.path.name}.mended")
    try:
        _write(unfinished, before + dump_line(entry, checksum=True), "wb")
        unfinished.rename(found.path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return kept


def _keep(path: Path, raw: bytes) -> Path:
    """Write a copy that overwrites no other; an equal one, left by a process that was killed, is used instead."""
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
    return {name: value for name, given in metrics.items() if (value := finite(given)) is not None}


def _step(entry: Mapping[str, Any]) -> int | None:
    step = entry.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _newest(entry: Mapping[str, Any]) -> int:
    return int(entry["step"])
