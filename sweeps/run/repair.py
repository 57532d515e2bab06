"""Repair a journal with a broken line in the middle: cut it there, so that the run resumes from an earlier step.

The cause may be a lost disk block, an editor, or a copy that was cut off. Records after the broken line may be intact,
but without the lost record the curve would have a hole. The damaged file is kept next to the journal.
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
from sweeps.run.journal import JOURNAL_FILE, JournalError, JournalParser, finite

DAMAGED_FILE = "metrics.damaged-{}.jsonl"


@dataclass(frozen=True)
class Break:
    """First broken line of a journal, and the newest checkpoint from which the run may resume.

    Attributes:
        path: path of the journal.
        line: number, from 1, of the first line that is not a record.
        step: step of the newest checkpoint that matches the records before that line; -1 for none. The run must not
            resume from a later checkpoint.
        why: error message of the parser.
        metrics: metrics of the newest record in the whole file, from which the compute of lost records is counted.
    """

    path: Path
    line: int
    step: int
    why: str
    metrics: Mapping[str, float]


def find_break(run_dir: Path) -> Break | None:
    """Find the first broken line of a run's journal; None if the journal is intact or missing.

    A torn line at the end does not count, because the next writer cuts it off.

    Raises:
        JournalError: the header is broken, so it is unknown to which run the journal belongs.
        OSError: the file cannot be read.
    """
    path = run_dir / JOURNAL_FILE
    try:
        lines, _ = whole_lines(path.read_bytes())
    except FileNotFoundError:
        return None
    parser = JournalParser(path)
    why = None
    for line in lines:
        try:
            parser.take(parse_line(line))
        except JournalError as error:
            why = f"{path}, line {parser.lines + 1}: not a journal record ({error.__cause__})"
            break
    if why is None:
        return None
    if parser.lines == 0:
        raise JournalError(f"{why}, so it is unknown whose journal it is; restore the line, or move the file away")
    view = parser.view()
    later = [entry for line in lines[parser.lines + 1 :] if (entry := parse_line(line)) is not None]
    records = [entry for entry in later if _step(entry) is not None and isinstance(entry.get("metrics"), Mapping)]
    # Records after the break count too: the run loses them, but has spent their compute, which is recorded as lost.
    newest = max([*records, *({"step": r.step, "metrics": r.metrics} for r in view.records)], key=_step_key, default={})
    step = -1 if view.checkpoint_step is None else view.checkpoint_step
    for entry in later:
        # After the break, the run may have resumed from an earlier step and repeated steps. Checkpoints of repeated
        # steps may not match the records before the break.
        at = _step(entry)
        if at is not None and entry.get("kind") in ("resume", "eval", "train"):
            step = min(step, at - 1 if entry["kind"] == "train" else at)
    return Break(path, parser.lines + 1, max(step, -1), why, _finite_metrics(newest.get("metrics", {})))


def cut_broken_journal(damage: Break) -> Path:
    """Copy the damaged journal, cut the journal before the break, and return the path of the copy.

    The caller must first remove checkpoints after `damage.step`. Otherwise, if the process were killed at this point,
    nothing would prevent a resume from them.

    Raises:
        OSError: a file could not be written; the journal is unchanged.
    """
    raw = damage.path.read_bytes()
    # Copy first: if the process is killed before the cut, the journal is unchanged, and the copy is used again.
    copy = _copy_damaged(damage.path, raw)
    entry = {
        "kind": "mended",
        "time": time.time(),
        "step": damage.step,
        "line": damage.line,
        "kept": copy.name,
        "metrics": dict(damage.metrics),
    }
    intact = b"".join(line + b"\n" for line in raw.split(b"\n")[: damage.line - 1])
    unfinished = damage.path.with_name(f".{damage.path.name}.mended")
    try:
        _write(unfinished, intact + dump_line(entry, checksum=True), "wb")
        unfinished.rename(damage.path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return copy


def _copy_damaged(path: Path, raw: bytes) -> Path:
    """Write a copy under a new name. An identical copy, which a killed process may have left, is used again."""
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


def _finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, number in metrics.items() if (value := finite(number)) is not None}


def _step(entry: Mapping[str, Any]) -> int | None:
    step = entry.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _step_key(entry: Mapping[str, Any]) -> int:
    return int(entry["step"])
