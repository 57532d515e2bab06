"""The journal of a run: an append-only `metrics.jsonl`, the source of truth for everything downstream.

One JSON object a line, flushed as it is written. Kinds of record:

    {"kind": "run", "time": ..., "run": ..., "curve": ..., "recipe": ..., "seed": ..., "parameters": ...}
    {"kind": "train", "time": ..., "step": 12, "metrics": {"train/loss": ..., "compute/flops": ...}}
    {"kind": "eval", "time": ..., "step": 12, "metrics": {"eval/heldout/pass_rate": ..., ...}}
    {"kind": "checkpoint", "time": ..., "step": 12}          every record up to step 12 is durable now
    {"kind": "resume", "time": ..., "step": 12}              records after step 12 written so far are void
    {"kind": "end", "time": ..., "step": 150, "status": "finished" | "failed", "reason": ...}

A torn last line (the process died while writing it) is dropped on reading and cut off before the next
append. Of two records of one kind and step the later wins.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.redact import redact
from sweeps.run.files import append_to, parse_line, whole_lines

JOURNAL_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
SEMANTICS_FILE = "semantics.json"

# Metrics that depend on the wall clock: everything else must repeat bit for bit in a deterministic mode.
WALL_CLOCK_PREFIXES = ("compute/device_hours", "compute/wasted_", "time/")


class JournalError(UserError):
    """A journal that cannot be read: names file, line and remedy."""


@dataclass(frozen=True)
class Record:
    """One step's metrics of one kind (`train` or `eval`), with its wall-clock time in seconds."""

    kind: str
    step: int
    time: float
    metrics: Mapping[str, float]

    def deterministic(self) -> tuple[str, int, dict[str, float]]:
        """The part that a repeated run must reproduce bit for bit: no wall clock in it."""
        kept = {k: v for k, v in sorted(self.metrics.items()) if not k.startswith(WALL_CLOCK_PREFIXES)}
        return self.kind, self.step, kept


@dataclass
class JournalView:
    """A journal as read: superseded records gone, the rest in order of writing."""

    path: Path
    header: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    checkpoint_step: int | None = None
    status: str = "running"
    reason: str | None = None

    def of_kind(self, kind: str) -> list[Record]:
        """Records of one kind, by step."""
        return sorted((r for r in self.records if r.kind == kind), key=lambda r: r.step)

    def deterministic(self) -> list[tuple[str, int, dict[str, float]]]:
        """What two runs of one identity must have in common, bit for bit."""
        return sorted((r.deterministic() for r in self.records), key=lambda r: (r[1], r[0]))

    def durable(self) -> list[Record]:
        """Records that a checkpoint (or the end of the run) covers: safe to send where nothing can be unsent."""
        if self.status == "finished":
            return list(self.records)
        covered = -1 if self.checkpoint_step is None else self.checkpoint_step
        return [r for r in self.records if r.step <= covered]


def read_journal(run_dir: str | Path) -> JournalView:
    """Read a run's journal.

    Args:
        run_dir: the run's directory, or its `metrics.jsonl`.

    Raises:
        JournalError: no journal there, no header record, or a broken line that is not the last.
    """
    path = Path(run_dir)
    if path.name != JOURNAL_FILE:
        path = path / JOURNAL_FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot read the journal ({error.strerror}); give a run directory") from error
    lines, _ = whole_lines(raw)
    view = JournalView(path=path, header={})
    kept: dict[tuple[str, int], Record] = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = parse_line(line)
            if entry is None:
                raise ValueError("no JSON object")
            kind = entry["kind"]
            if kind == "run":
                view.header = entry
            elif kind in ("train", "eval"):
                record = Record(kind, int(entry["step"]), float(entry["time"]), dict(entry["metrics"]))
                kept.pop((kind, record.step), None)
                kept[kind, record.step] = record
            elif kind == "checkpoint":
                view.checkpoint_step = int(entry["step"])
            elif kind == "resume":
                step = int(entry["step"])
                kept = {key: r for key, r in kept.items() if r.step <= step}
                view.checkpoint_step = step if step >= 0 else None
                view.status, view.reason = "running", None
            elif kind == "end":
                view.status, view.reason = entry["status"], entry.get("reason")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise JournalError(
                f"{path}, line {number}: not a journal record ({error!r}); restore the file or delete the run"
            ) from error
    if not view.header:
        raise JournalError(f"{path}: the journal has no header record yet; the run has not started writing")
    view.records = list(kept.values())
    return view


class Journal:
    """Appends records to a run's `metrics.jsonl`, one flushed line each.

    Args:
        run_dir: created if missing; a torn last line from an earlier process is cut off first.
        clock: wall-clock seconds, replaceable in tests.
    """

    def __init__(self, run_dir: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(run_dir) / JOURNAL_FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        if self.path.exists():
            _, length = whole_lines(self.path.read_bytes())
            if length < self.path.stat().st_size:
                with self.path.open("r+b") as handle:
                    handle.truncate(length)
        self._handle: FileIO = self.path.open("a+b", buffering=0)

    def _append(self, entry: dict[str, Any], durable: bool = False) -> None:
        append_to(self._handle.fileno(), [entry], durable)

    def header(self, **fields: Any) -> None:
        """The first record: who this run is (run, curve, recipe, seed, parameters, ...)."""
        self._append({"kind": "run", "time": self._clock(), **fields}, durable=True)

    def record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One step's metrics of kind `train` or `eval`. Values that are not finite are left out, by name."""
        if kind not in ("train", "eval"):
            raise ValueError(f"kind: {kind!r} is not a journal record; valid: train, eval")
        finite = {k: float(v) for k, v in metrics.items() if math.isfinite(v)}
        dropped = sorted(set(metrics) - set(finite))
        entry: dict[str, Any] = {"kind": kind, "time": self._clock(), "step": int(step), "metrics": finite}
        if dropped:
            entry["not_finite"] = dropped
        self._append(entry)

    def checkpoint(self, step: int) -> None:
        """A durable checkpoint exists that covers every record up to `step`."""
        self._append({"kind": "checkpoint", "time": self._clock(), "step": int(step)}, durable=True)

    def resume(self, step: int) -> None:
        """The run goes on from a checkpoint at `step` (-1: from the start); later records are void."""
        self._append({"kind": "resume", "time": self._clock(), "step": int(step)}, durable=True)

    def end(self, step: int, status: str, reason: str | None = None) -> None:
        """The run is over: `finished`, or `failed` with its reason."""
        self._append(
            {
                "kind": "end",
                "time": self._clock(),
                "step": int(step),
                "status": status,
                "reason": reason and redact(reason),
            },
            durable=True,
        )

    def close(self) -> None:
        """Flush to disk and close."""
        if not self._handle.closed:
            try:
                os.fsync(self._handle.fileno())
            finally:
                self._handle.close()


def find_runs(source: str | Path) -> list[Path]:
    """Run directories at or below `source` (a run, a sweep, or a folder of sweeps), sorted."""
    root = Path(source)
    if (root / JOURNAL_FILE).is_file():
        return [root]
    return sorted(path.parent for path in root.glob(f"**/{JOURNAL_FILE}"))


LOG_FILE = "log.txt"


def finite(value: object) -> float | None:
    """A finite number, or None for anything else a journal's line may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond what a float holds
        return None
