"""Journal of a run: an append-only `metrics.jsonl`, from which everything else is derived.

One JSON object per line, flushed when written. Kinds of record:

    {"kind": "run", "time": ..., "run": ..., "curve": ..., "recipe": ..., "seed": ..., "parameters": ...}
        "branch": if the run began with the records of another run, its parent: the parent's "run", the "step" of the
        last shared record, and all "ancestors" with such steps
    {"kind": "train", "time": ..., "step": 12, "metrics": {"train/loss": ..., "compute/flops": ...}}
    {"kind": "eval", "time": ..., "step": 12, "metrics": {"eval/heldout/pass_rate": ..., ...}}
    {"kind": "checkpoint", "time": ..., "step": 12}          every record up to step 12 is now durable
        "name": for a member that runs another trainer's command, the name of that trainer's checkpoint; "step" is then
        -1 if the checkpoint completes no step
    {"kind": "attempt", "time": ..., "step": 12}             another trainer's command is about to start; step 12 is its
        newest. "cuts": positions in the command's metrics file where earlier attempts left half a line
        (`sweeps.command.growing.HalfLineEnd`)
    {"kind": "resume", "time": ..., "step": 12}              earlier records of steps after 12 are void
        "code": the code from here on (`sweeps.run.provenance`; the header has it too), "passed_over": checkpoints that
        could not be used, each with the reason
    {"kind": "mended", "time": ..., "step": 8, "line": ..., "kept": ..., "metrics": ...}
        the journal was broken from "line" on and was cut there; "kept" is the name of the copy of the damaged file
        (`sweeps.run.repair`). The run resumes from step 8 or earlier. "metrics" are those of the newest record in the
        damaged file, from which the compute of lost records is counted. The next `resume` may repeat line, kept and
        step as "mended"
    {"kind": "end", "time": ..., "step": 150, "status": "finished" | "failed", "reason": ...}
        "final": true if, for this "reason", the run cannot be continued under any budget

Every line ends with `"crc"`, the CRC-32 of the line without this field (`sweeps.run.files`). A line that was changed
counts as broken. Lines of earlier versions have no checksum.

A torn last line (the process died while writing it) is ignored on reading, and cut off before the next append. If two
records have the same kind and step, the later one counts.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from sys import intern
from typing import Any

from sweeps.errors import UserError
from sweeps.redact import redact
from sweeps.run import fields
from sweeps.run.activity import activity
from sweeps.run.files import append_to, parse_line, whole_lines
from sweeps.run.provenance import code_changes

JOURNAL_FILE = "metrics.jsonl"
# Metric that is the reward of an evaluation. The regular expression's group is the name of the evaluation set.
PASS_RATE = re.compile(r"eval/(.+)/pass_rate")
CONFIG_FILE = "config.yaml"
SEMANTICS_FILE = "semantics.json"
# Name of the hyper-parameter with which loggers get the label in the journal's header. The hyper-parameter `recipe` is
# only the recipe's name.
LABEL = "recipe_label"

# Metrics that depend on the wall clock. In a deterministic mode all others must be equal, bit for bit, in a repetition.
WALL_CLOCK_PREFIXES = (
    *("compute/device_hours", "compute/wasted_", "time/"),
    # Duration of a judge's answers, and number of answers that were paid for because the cache did not have them.
    *("compute/judge_hours", "eval_cost/judge_hours", "verify/judge_"),
)


class JournalError(UserError):
    """Error: a journal cannot be read. The message names file, line and remedy."""


@dataclass(frozen=True)
class Record:
    """Metrics of one kind (`train` or `eval`) at one step, with the wall-clock time in seconds."""

    kind: str
    step: int
    time: float
    metrics: Mapping[str, float]

    def deterministic(self) -> tuple[str, int, dict[str, float]]:
        """Return kind, step, and the metrics that a repeated run must reproduce bit for bit (no wall-clock metrics)."""
        kept = {k: v for k, v in sorted(self.metrics.items()) if not k.startswith(WALL_CLOCK_PREFIXES)}
        return self.kind, self.step, kept


@dataclass(frozen=True)
class CodeChange:
    """A resume from `step` with other code than that of the records before it; `what` lists the changes."""

    step: int
    what: tuple[str, ...]


@dataclass
class JournalView:
    """Content of a journal in the order written, without records that a later line replaced or made void.

    Attributes:
        path, header: path of the file, and its first record.
        records: valid `train` and `eval` records.
        checkpoint_step: newest step covered by a checkpoint; None if there is no checkpoint.
        status, reason: `running`, `finished` or `failed`, and why the run failed or finished before its budget.
        final: whether the run finished before its budget and cannot be continued under a larger one.
        code: pairs of a step and the code provenance from that step on; step -1 is the start of the run. Empty in
            journals of earlier versions.
        passed_over: checkpoints that could not be used, from the newest `resume` record.
        mended: the `mended` record; None if there is none, or if the run has resumed since.
        attempts: for a run of another trainer's command, its `attempt` records in order.
        checkpoint_name: for such a run, the name of its newest checkpoint; None if none was recorded.
        holes: first and last step of each range without records: the run resumed from a later step than they reach.
    """

    path: Path
    header: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    checkpoint_step: int | None = None
    status: str = "running"
    reason: str | None = None
    final: bool = False
    code: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    passed_over: list[Mapping[str, Any]] = field(default_factory=list)
    mended: Mapping[str, Any] | None = None
    attempts: list[Mapping[str, Any]] = field(default_factory=list)
    checkpoint_name: str | None = None
    holes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def missing(self) -> str | None:
        """Description of the steps without records; None if `holes` is empty."""
        steps = [f"step {first}" if first == last else f"steps {first} to {last}" for first, last in self.holes]
        return f"no records of {', '.join(steps)}" if steps else None

    @property
    def code_changes(self) -> list[CodeChange]:
        """Changes of code within the valid records, with the steps from which they apply."""
        pairs = zip(self.code, self.code[1:], strict=False)
        changes = [CodeChange(step, code_changes(before, after)) for (_, before), (step, after) in pairs]
        return [change for change in changes if change.what]

    def code_before(self, step: int) -> Mapping[str, Any] | None:
        """Return the code provenance of the records before `step`; None if it was not recorded."""
        known = [facts for at, facts in self.code if at < step]
        return known[-1] if known else None

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of one kind, sorted by step."""
        return sorted((r for r in self.records if r.kind == kind), key=lambda r: r.step)

    def deterministic(self) -> list[tuple[str, int, dict[str, float]]]:
        """Return the records, sorted by step, in which two runs with the same identity must agree bit for bit."""
        return sorted((r.deterministic() for r in self.records), key=lambda r: (r[1], r[0]))

    def durable(self) -> list[Record]:
        """Return the records that no resume can make void, because a checkpoint or the run's end covers them."""
        if self.status == "finished":
            return list(self.records)
        covered = -1 if self.checkpoint_step is None else self.checkpoint_step
        return [r for r in self.records if r.step <= covered]


def read_journal(run_dir: str | Path) -> JournalView:
    """Read and validate the journal of a run.

    Args:
        run_dir: the run's directory, or its `metrics.jsonl`.

    Raises:
        JournalError: there is no journal, no header record, or a broken line that is not the last line.
    """
    path = Path(run_dir)
    if path.name != JOURNAL_FILE:
        path = path / JOURNAL_FILE
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot read the journal ({error.strerror}); give a run directory") from error
    lines, _ = whole_lines(raw)
    reading = JournalParser(path)
    for line in lines:
        reading.take(parse_line(line))
    return reading.view()


class JournalParser:
    """Incremental parser of a journal. It is given one entry after the other.

    Attributes:
        lines: number of lines parsed so far.
        forgotten: by kind, the step up to which records are dropped.
    """

    def __init__(self, path: Path) -> None:
        self.lines = 0
        self.forgotten: dict[str, int] = {}
        self._view = JournalView(path=path, header={})
        self._records: dict[tuple[str, int], Record] = {}
        self._reached = 0  # newest step of a valid record

    def view(self) -> JournalView:
        """Return the journal's content according to the entries so far.

        Raises:
            JournalError: there was no header.
        """
        view = self._view
        if not view.header:
            raise JournalError(f"{view.path}: the journal has no header record yet; the run has not started writing")
        return replace(view, records=list(self._records.values()))

    def take(self, entry: Mapping[str, Any] | None) -> None:
        """Apply the entry of the next line; None for a damaged line.

        Raises:
            JournalError: the entry is None or not a journal record. `lines` does not count it.
        """
        try:
            self._take(entry)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise JournalError(
                f"{self._view.path}, line {self.lines + 1}: not a journal record ({error!r}); restore the file or "
                "delete the run"
            ) from error
        self.lines += 1

    def _take(self, entry: Mapping[str, Any] | None) -> None:
        """Apply one entry to the view. A malformed entry raises one of the errors that `take` catches."""
        if entry is None:
            raise ValueError("no JSON object, or not as it was written: its checksum differs")
        view, kind = self._view, entry["kind"]
        if kind == "run":
            _check_header(entry)
            view.header = dict(entry)
            _note_code(view, -1, entry)
        elif kind in ("train", "eval"):
            # Store each metric name once: all records have the same names, and the journals of a study may be
            # gigabytes.
            metrics = {intern(name): value for name, value in dict(entry["metrics"]).items()}
            _check_numbers(metrics)
            record = Record(kind, fields.whole(entry, "step", least=-1), fields.number(entry, "time"), metrics)
            self._reached = max(self._reached, record.step)
            # Remove the old record first: a dict would keep its position, but records must be in the order written.
            self._records.pop((kind, record.step), None)
            if record.step > self.forgotten.get(kind, record.step - 1):
                self._records[kind, record.step] = record
        elif kind == "checkpoint":
            view.checkpoint_step = fields.whole(entry, "step", least=-1)
            view.checkpoint_name = None if entry.get("name") is None else fields.text(entry, "name")
        elif kind == "attempt":
            view.attempts.append(entry)
            view.status, view.reason, view.final = "running", None, False
        elif kind == "resume":
            step = fields.whole(entry, "step", least=-1)
            self._records = {key: r for key, r in self._records.items() if r.step <= step}
            view.checkpoint_step = step if step >= 0 else None
            view.status, view.reason, view.final, view.mended = "running", None, False, None
            self._note_hole(step)
            _note_code(view, step, entry)
            passed_over = entry.get("passed_over")
            view.passed_over = list(passed_over) if isinstance(passed_over, list) else []
        elif kind == "mended":
            view.mended = entry
            step = fields.whole(entry, "step", least=-1)
            view.checkpoint_step = step if step >= 0 else None
        elif kind == "end":
            view.status = fields.text(entry, "status")
            view.reason = None if entry.get("reason") is None else fields.text(entry, "reason")
            view.final = view.status == "finished" and entry.get("final") is True

    def skip(self, step: int) -> None:
        """Count the line of a record that is not parsed."""
        self.lines += 1
        self._reached = max(self._reached, step)

    def _note_hole(self, step: int) -> None:
        """Note the steps without records if the run resumes from a later step than its records reach."""
        holes = [(first, min(last, step)) for first, last in self._view.holes if first <= step]
        self._view.holes = [*holes, (self._reached + 1, step)] if step > self._reached else holes
        self._reached = max(step, 0)

    def forget(self, steps: Mapping[str, int]) -> None:
        """For each kind, drop the records up to a step, now and whenever such records are read later."""
        self.forgotten = {
            kind: max(step, self.forgotten.get(kind, step)) for kind, step in {**self.forgotten, **steps}.items()
        }
        self._records = {key: r for key, r in self._records.items() if r.step > self.forgotten.get(r.kind, r.step - 1)}


def _check_header(entry: Mapping[str, Any]) -> None:
    for name in ("recipe", "curve", "baseline", "axis", "compute_is"):
        if entry.get(name) is not None:
            fields.text(entry, name)
    if entry.get("run") is not None:
        fields.run_name(entry)
    if entry.get("seed") is not None:
        fields.whole(entry, "seed")


def _check_numbers(metrics: Mapping[str, Any]) -> None:
    """Raise ValueError if a metric is not a finite number, because `Journal.record` writes only finite numbers."""
    for name, value in metrics.items():
        # Test for float first: nearly all values are floats, and journals can be gigabytes.
        if not (type(value) is float and math.isfinite(value)) and finite(value) is None:
            raise ValueError(f"metrics.{name}: {value!r} is no finite number")


def _note_code(view: JournalView, step: int, entry: Mapping[str, Any]) -> None:
    """Set the code provenance from `step` on, in place of what earlier entries said about these steps."""
    view.code = [(at, facts) for at, facts in view.code if at < step]
    if isinstance(entry.get("code"), Mapping):
        view.code.append((step, entry["code"]))


class Journal:
    """Writer of a run's `metrics.jsonl`. It appends one line per record and flushes it.

    Args:
        run_dir: the run's folder, created if missing. A torn last line of an earlier process is cut off first.
        clock: returns wall-clock seconds; tests replace it.
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
        activity.note(f"journal: {entry['kind']}")
        append_to(self._handle.fileno(), [entry], durable, checksum=True)

    def header(self, **facts: Any) -> None:
        """Write the first record durably: the run's identity (run, curve, recipe, seed, parameters, ...)."""
        self._append({"kind": "run", "time": self._clock(), **facts}, durable=True)

    def record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics of kind `train` or `eval`. A metric that is not finite is listed by name only."""
        if kind not in ("train", "eval"):
            raise ValueError(f"kind: {kind!r} is not a journal record; valid: train, eval")
        finite = {k: float(v) for k, v in metrics.items() if math.isfinite(v)}
        dropped = sorted(set(metrics) - set(finite))
        entry: dict[str, Any] = {"kind": kind, "time": self._clock(), "step": int(step), "metrics": finite}
        if dropped:
            entry["not_finite"] = dropped
        # Not synced to disk here: the next `checkpoint` record syncs all records before it.
        self._append(entry)

    def checkpoint(self, step: int, **facts: Any) -> None:
        """Record that a durable checkpoint covers all records up to `step`; `facts` are further fields."""
        self._append({"kind": "checkpoint", "time": self._clock(), "step": int(step), **facts}, durable=True)

    def attempt(self, step: int, **facts: Any) -> None:
        """Record durably that another trainer's command is about to start; `facts` has the field `cuts`."""
        self._append({"kind": "attempt", "time": self._clock(), "step": int(step), **facts}, durable=True)

    def resume(self, step: int, **facts: Any) -> None:
        """Record a resume from the checkpoint at `step` (-1: from the start); later records become void.

        `facts` are further fields: `code`, `passed_over`.
        """
        self._append({"kind": "resume", "time": self._clock(), "step": int(step), **facts}, durable=True)

    def end(self, step: int, status: str, reason: str | None = None, final: bool = False) -> None:
        """Record the end of the run.

        Args:
            step: newest step.
            status: `finished` or `failed`.
            reason: why the run failed, or finished before its budget; None if there is no reason. Secrets are removed.
            final: whether the run finished before its budget and cannot be continued.
        """
        entry = {"step": int(step), "status": status, "reason": reason and redact(reason)}
        self._append(
            {"kind": "end", "time": self._clock(), **entry, **({"final": True} if final else {})}, durable=True
        )

    def close(self) -> None:
        """Flush the journal to disk and close it."""
        if not self._handle.closed:
            try:
                os.fsync(self._handle.fileno())
            finally:
                self._handle.close()


def covered_step(run_dir: str | Path) -> int | None:
    """Return the newest step with a recorded checkpoint. All records up to that step are in the journal.

    A checkpoint file becomes visible before the journal records it. After a power failure in between, the journal may
    lack its last lines: a run that resumes from a checkpoint beyond this step has steps without records.

    Returns:
        The step; -1 if no checkpoint is recorded; None if there is no journal or it cannot be read.
    """
    try:
        view = read_journal(run_dir)
    except JournalError:
        path = Path(run_dir) / JOURNAL_FILE
        return -1 if path.is_file() and not whole_lines(path.read_bytes())[0] else None
    return -1 if view.checkpoint_step is None else view.checkpoint_step


def find_runs(source: str | Path) -> list[Path]:
    """Return the run directories at or below `source` (a run, a study, or a folder of studies), sorted.

    Folders below a run are not searched, because a trainer started by the run may write a file of the same name there.
    """
    root = Path(source)
    if (root / JOURNAL_FILE).is_file():
        return [root]
    folders = {path.parent for path in root.glob(f"**/{JOURNAL_FILE}")}
    return sorted(path for path in folders if folders.isdisjoint(path.parents))


LOG_FILE = "log.txt"


def finite(value: object) -> float | None:
    """Return a finite number as float, and None for any other value of a journal."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None
