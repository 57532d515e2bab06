"""The ledger of a study: an append-only file of what was launched and how it ended.

One JSON object a line: `{"time": ..., "run": ..., "event": "planned" | "started" | "finished" | "failed", ...}`.
The state of a study is this file folded, not the memory of the process that launched it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LEDGER_FILE = "ledger.jsonl"
EVENTS = ("planned", "started", "finished", "failed")


@dataclass(frozen=True)
class MemberState:
    """Where a run stands, folded from its ledger entries."""

    run: str
    recipe: str
    seed: int
    state: str = "planned"
    attempts: int = 0
    reason: str | None = None


class Ledger:
    """Appends entries, one flushed line each, and folds them."""

    def __init__(self, study_dir: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = study_dir / LEDGER_FILE
        self._clock = clock

    def append(self, event: str, run: str, **fields: Any) -> None:
        """One entry, on disk when this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"time": self._clock(), "event": event, "run": run, **fields}, separators=(",", ":"))
        with self.path.open("ab") as handle:
            # A torn line of an earlier process must not swallow this one.
            if handle.tell() and not self._ends_with_newline():
                handle.write(b"\n")
            handle.write(line.encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as handle:
            handle.seek(-1, os.SEEK_END)
            return handle.read(1) == b"\n"

    def entries(self) -> list[dict[str, Any]]:
        """All entries, in order; torn lines and what is no entry are passed over."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_bytes().split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("run"), str) and entry.get("event") in EVENTS:
                found.append(entry)
        return found

    def fold(self) -> dict[str, MemberState]:
        """The state of every run the ledger knows, in order of planning."""
        states: dict[str, MemberState] = {}
        for entry in self.entries():
            run, event = entry["run"], entry["event"]
            if event == "planned":
                states.setdefault(run, MemberState(run, entry.get("recipe", ""), int(entry.get("seed", 0))))
            elif run in states:
                state = states[run]
                attempts = state.attempts + (event == "started")
                states[run] = replace(state, state=event, attempts=attempts, reason=entry.get("reason"))
        return states
