"""Read the output of verl's two loggers: console lines, and the JSONL of the `file` backend.

A console line is `step:10 - key:value - key:value ...`, after Ray's `(TaskRunner pid=123)` and colours, among other
output. Values are plain numbers or, where numpy printed them, `np.float64(0.62)`. The file backend writes `{"step": 10,
"data": {...}}`.
"""

from __future__ import annotations

import re
from typing import Any

from sweeps.errors import UserError
from sweeps.run.files import parse_json
from sweeps.run.journal import finite
from sweeps.source.collected import Collected
from sweeps.source.frame import is_binary
from sweeps.source.log import Log, add_logs, series_of_records
from sweeps.source.text import File, json_lines
from sweeps.source.vocabulary import VERL

CONSOLE, JSONL = "verl console log", "verl file log"
NAME = CONSOLE

_LINE_BYTES = re.compile(rb"(?:^|[\s)\0]|\x1b\[[0-9;]*m)step:\d+ - \S+:", re.MULTILINE)
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINE = re.compile(r"(?:^|[\s)])step:(\d+) - (?=\S+:)")
_NUMPY = re.compile(r"(?:np|numpy)\.\w+\((.*)\)")


def matches(file: File, into: Collected | None = None) -> bool:
    """Return whether the file has one of verl's console lines, or begins with an object of its file backend."""
    if file.start[:1] == b"{":
        return _begins_with_row(file)
    if (file.start[:1] == b"[" and file.suffix == ".json") or is_binary(file):
        return False
    # A plain search first, because it is faster in a large file.
    return b"step:" in file.raw and _LINE_BYTES.search(file.raw) is not None


def _begins_with_row(file: File) -> bool:
    line = file.content.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0]
    try:
        return is_row(parse_json(line))
    except ValueError:
        return False


def is_row(record: Any) -> bool:
    """Return whether a JSON value is a line of the file backend."""
    return isinstance(record, dict) and isinstance(record.get("data"), dict) and "step" in record


def read(file: File, into: Collected) -> None:
    """Add the validations of the run or, without validations, its training scores.

    Raises:
        UserError: no row has a reward.
    """
    console = file.start[:1] != b"{"
    records, rows, notes = _console(file) if console else _jsonl(file)
    names = list(dict.fromkeys(key for _, record in records for key in record))
    log = Log(name=into.run_name(file), names=names, rows=rows, series=series_of_records(records))
    add_logs([log], CONSOLE if console else JSONL, str(file.path), into, VERL, notes=notes)


# Step and metrics of each row.
Records = list[tuple[float, dict[str, Any]]]


def _console(file: File) -> tuple[Records, int, list[str]]:
    """Parse console lines. Return records with their steps, the number of lines, and notes."""
    # A progress bar may be cut off inside a character, so a job's output is not always UTF-8. We need only ASCII.
    text = COLOUR.sub("", file.content.decode("utf-8", errors="replace"))
    records: Records = []
    unread, others = 0, 0
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    for i, line in enumerate(lines):
        match = _LINE.search(line)
        if match is None:
            others += 1
            continue
        fields = line[match.end() :].rstrip().split(" - ")
        if i == len(lines) - 1 and not text.endswith(("\n", "\r")):
            fields.pop()  # the line was cut off while printing: its last number may lack digits
            unread += 1
        record = {}
        for field in fields:
            key, _, value = field.strip().rpartition(":")
            wrapped = _NUMPY.fullmatch(value)
            try:
                record[key] = float(wrapped[1] if wrapped else value)
            except ValueError:
                unread += 1
        records.append((float(match[1]), record))
    if not records:
        raise UserError(f"{file.path}: no line of verl's console logger (step:N - key:value); give another log")
    notes = [f"other lines: {others}"] if others else []
    if unread:
        notes.append(f"fields that are not numbers: {unread}")
    return records, len(records), notes


def _jsonl(file: File) -> tuple[Records, int, list[str]]:
    """Parse the file backend's lines. Return records with their steps, the number of lines, and notes."""
    entries, _, torn = json_lines(file)
    records: Records = []
    for entry in entries:
        step = finite(entry.get("step")) if isinstance(entry, dict) else None
        if step is not None and isinstance(entry.get("data"), dict):
            records.append((step, entry["data"]))
    notes = ["an incomplete last line was left out"] if torn else []
    if len(records) < len(entries):
        notes.append(f"lines without step and data: {len(entries) - len(records)}")
    return records, len(entries) + bool(torn), notes
