"""Console logs with metrics as a Python or JSON object anywhere in a line: TRL, Unsloth, ms-swift and others.

transformers' Trainer prints `{'loss': 0.1, 'reward': 0.5, ...}` without a step, between updates of a progress bar. The
step is then the count of this bar. ms-swift prints the step (`'global_step/max_steps': '5/400'`). Other programs print
it in the object (`{"step": 5, ...}`), after a time or a logger's name.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from sweeps.errors import UserError
from sweeps.run.journal import finite
from sweeps.source.cells import number
from sweeps.source.collected import Collected
from sweeps.source.log import Log, add_logs, series_of_records
from sweeps.source.text import File, json_lines, parse_json_text
from sweeps.source.trl import rename_metrics
from sweeps.source.verl import COLOUR
from sweeps.source.vocabulary import STEP_NAMES, TRL, vocabulary_of

NAME = "console log with metrics as Python or JSON objects"
# Files with these endings hold rows, and are always read as tables.
TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".xlsx", ".xlsm")
_OBJECT = re.compile(r"""\{\s*(?:'[^'\n]{1,200}'|"[^"\n]{1,200}")\s*:""")
_OBJECT_BYTES = re.compile(_OBJECT.pattern.encode())
_MOST_OTHERS = 20  # limit of objects in one line that are not rows, because a printed configuration may nest thousands
_BAR = re.compile(r"\d+%\|[^|\r\n]*\|\s*(\d+)/(\d+) \[")
_STEP_OF_TOTAL = "global_step/max_steps"  # ms-swift: 5/400
# Values of NumPy and torch, and nan and inf, which Python prints but `ast.literal_eval` cannot read.
_WRAPPED = re.compile(r"\b(?:(?:np|numpy)\.\w+|tensor)\(([^(),]*)(?:,[^()]*)?\)")
_NOT_FINITE = re.compile(r"(?<=[\s:,\[(])-?(?:nan|inf)(?=\s*[,}\])])")
# Keys that mark an object as a row of metrics rather than a printed configuration.
_ROW_KEYS = frozenset({"loss", "reward", "eval_loss", "eval_reward", _STEP_OF_TOTAL, *STEP_NAMES})


def matches(file: File, into: Collected | None = None) -> bool:
    """Return whether a line of the file contains an object with metrics, unless the file has the ending of a table.

    ms-swift's `logging.jsonl` also counts: it has the rows of the console, without a column of steps that a table
    needs.
    """
    # In ms-swift's file, steps are text such as "5/400", which no table reader understands.
    if file.start[:1] == b"{" and f'"{_STEP_OF_TOTAL}": "'.encode() in file.raw:
        return True
    if file.suffix in TABLE_ENDINGS or b"\0" in file.raw[:1024] or _OBJECT_BYTES.search(file.raw) is None:
        return False
    if file.start[:1] in (b"{", b"[") and _is_json(file):
        return False
    return any(row is not None for _, row in _entries(file))


def _is_json(file: File) -> bool:
    """Return whether a file is one JSON document, or one per line, as tables and trackers write."""
    if file.document is not None:
        return True
    try:
        values, _, torn = json_lines(file)
    except UserError:
        return False
    return bool(values) and (torn is None or len(values) > 1)


def read(file: File, into: Collected) -> None:
    """Add the evaluations of the log's run or, without evaluations, its training rewards.

    Raises:
        UserError: no row has a reward.
    """
    entries = list(_entries(file))
    steps, step_note = _steps(entries)
    rows = [row for _, row in entries if row is not None]
    records, notes = [(step, row) for step, row in zip(steps, rows, strict=True)], [step_note]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if TRL.recognizes(names):
        records, rename_notes = rename_metrics(records)
        notes += rename_notes
        names = list(dict.fromkeys(key for _, row in records for key in row))
    framework = vocabulary_of(names) or (TRL if "reward" in names else None)
    log = Log(name=into.run_name(file), names=names, rows=len(rows), series=series_of_records(records))
    add_logs([log], NAME, str(file.path), into, framework, notes=notes)


_Entry = tuple[tuple[int, int] | None, dict[str, Any] | None]


def _entries(file: File) -> Iterator[_Entry]:
    """Yield the log's entries in order. Each is (count, total) of a progress bar, or a row of metrics."""
    if "console" not in file.kept:
        # A progress bar may be cut off inside a character, so a job's output is not always UTF-8.
        text = COLOUR.sub("", file.content.decode("utf-8", errors="replace"))
        file.kept["console"] = [entry for line in re.split(r"[\r\n]+", text) for entry in _line_entries(line)]
    yield from file.kept["console"]


def _line_entries(line: str) -> Iterator[_Entry]:
    position = others = 0
    for match in _OBJECT.finditer(line):
        if match.start() < position or others > _MOST_OTHERS:  # inside a row, or in a printed configuration
            continue
        end = _end_of_object(line, match.start())
        if (row := _parse_metrics(line[match.start() : end])) is not None:
            yield from _parse_progress_bars(line[position : match.start()])
            yield None, row
            position = end
        others += row is None
    yield from _parse_progress_bars(line[position:])


def _parse_progress_bars(text: str) -> Iterator[_Entry]:
    for match in _BAR.finditer(text):
        yield (int(match[1]), int(match[2])), None


def _end_of_object(line: str, at: int) -> int:
    """Return the index after the object that begins at the brace `at`; the end of the line if it is not closed."""
    depth, quote = 0, ""
    for i in range(at, len(line)):
        char = line[i]
        if quote:
            quote = "" if char == quote and line[i - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return i + 1
    return len(line)


def _parse_metrics(text: str) -> dict[str, Any] | None:
    try:
        value = parse_json_text(text)
    except ValueError:
        try:
            value = ast.literal_eval(_NOT_FINITE.sub("None", _WRAPPED.sub(r"\1", text)))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    metrics = {key: cell for key, cell in value.items() if isinstance(cell, str | int | float | None)}
    count = sum(number(cell) == number(cell) for cell in metrics.values())  # not NaN
    is_row = not _ROW_KEYS.isdisjoint(metrics) or TRL.recognizes(metrics)
    return metrics if is_row and count > 1 else None


def _steps(entries: list[_Entry]) -> tuple[list[float], str]:
    """Find the step of each row. Return the steps, and a note on where they were found.

    A row may contain its step. Otherwise the step is the count of training's progress bar, which is recognized by its
    total: that of the bar before most training rows. Evaluations have bars of their own, and their rows belong to the
    last step of training. Training rows are counted instead if there is no bar, or if rows were buffered and printed
    after later bars.
    """
    total = _training_total(entries)
    own_steps: list[float | None] = []
    by_bar: list[float] = []
    by_row: list[float] = []
    bar_count, training_rows = 0.0, 0
    training_counts: list[float] = []
    for bar, row in entries:
        if bar is not None:
            bar_count = float(bar[0]) if bar[1] == total else bar_count
        if row is None:
            continue
        if not _is_evaluation(row):
            training_rows += 1
            training_counts.append(bar_count)
        own_steps.append(_own_step(row))
        by_bar.append(bar_count)
        by_row.append(float(training_rows))
    # With buffered output, several training rows follow the same count of the progress bar.
    repeated = sum(one == other for one, other in pairwise(training_counts))
    if total is None:
        fallback, note = by_row, "numbers of the rows, because neither the rows nor a progress bar has a step"
    elif 10 * repeated > training_rows:
        fallback, note = by_row, "numbers of the rows, because they were buffered and printed after later progress bars"
    else:
        fallback, note = by_bar, "the progress bar"
    if None not in own_steps:
        note = "in the rows"
    return [other if step is None else step for step, other in zip(own_steps, fallback, strict=True)], f"step <- {note}"


def _training_total(entries: list[_Entry]) -> int | None:
    """Return the total of training's progress bar, the one before most training rows; None without a bar."""
    rows_after: Counter[int] = Counter()
    last: tuple[int, int] | None = None
    for bar, row in entries:
        last = bar or last
        if row is not None and last is not None and not _is_evaluation(row):
            rows_after[last[1]] += 1
    return rows_after.most_common(1)[0][0] if rows_after else None


def _is_evaluation(row: dict[str, Any]) -> bool:
    return any(key.startswith("eval_") for key in row)


def _own_step(row: dict[str, Any]) -> float | None:
    if isinstance(text := row.get(_STEP_OF_TOTAL), str):
        return finite(number(text.partition("/")[0]))
    return next((finite(number(row[name])) for name in STEP_NAMES if name in row), None)
