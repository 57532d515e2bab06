"""Console logs with metrics as a Python or JSON object anywhere in a line: TRL, Unsloth, ms-swift and others.

transformers' Trainer prints `{'loss': 0.1, 'reward': 0.5, ...}` without a step, between updates of a progress bar: the
step is the bar's count. ms-swift prints its step (`'global_step/max_steps': '5/400'`); other programs print one too
(`{"step": 5, ...}`), after a time or a logger's name.
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
from sweeps.source.text import File, json_lines, parsed
from sweeps.source.trl import renamed
from sweeps.source.verl import COLOUR
from sweeps.source.vocabulary import STEP_NAMES, TRL, vocabulary_of

NAME = "console log with metrics as Python or JSON objects"
# Files with these endings hold rows, and are always read as tables.
TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".xlsx", ".xlsm")
_OBJECT = re.compile(r"""\{\s*(?:'[^'\n]{1,200}'|"[^"\n]{1,200}")\s*:""")
_IN_BYTES = re.compile(_OBJECT.pattern.encode())
_MOST_OTHERS = 20  # objects per line that are not rows: a printed configuration may nest thousands
_BAR = re.compile(r"\d+%\|[^|\r\n]*\|\s*(\d+)/(\d+) \[")
_OF_MOST = "global_step/max_steps"  # ms-swift: 5/400
# Python prints these, but `ast.literal_eval` cannot read them: values of NumPy and torch, nan and inf.
_WRAPPED = re.compile(r"\b(?:(?:np|numpy)\.\w+|tensor)\(([^(),]*)(?:,[^()]*)?\)")
_NO_NUMBER = re.compile(r"(?<=[\s:,\[(])-?(?:nan|inf)(?=\s*[,}\])])")
# Keys that mark an object as a row of metrics rather than a printed configuration.
_OF_A_ROW = frozenset({"loss", "reward", "eval_loss", "eval_reward", _OF_MOST, *STEP_NAMES})


def matches(file: File, into: Collected | None = None) -> bool:
    """Return whether a line of a file, which is not a table by its ending, contains an object with metrics.

    ms-swift's `logging.jsonl` also counts: it has the rows of the console, without a column of steps.
    """
    # ms-swift's file. Its steps are text such as "5/400", which no table reader understands.
    if file.start[:1] == b"{" and f'"{_OF_MOST}": "'.encode() in file.raw:
        return True
    if file.suffix in TABLE_ENDINGS or b"\0" in file.raw[:1024] or _IN_BYTES.search(file.raw) is None:
        return False
    if file.start[:1] in (b"{", b"[") and _is_json(file):
        return False
    return any(row is not None for _, row in _entries(file))


def _is_json(file: File) -> bool:
    """Return whether a file is one JSON document, or one per line: rows of a table or a tracker."""
    if file.document is not None:
        return True
    try:
        values, _, torn = json_lines(file)
    except UserError:
        return False
    return bool(values) and (torn is None or len(values) > 1)


def read(file: File, into: Collected) -> None:
    """Add the evaluations of the run; its training rewards if it has none.

    Raises:
        UserError: no row has a reward.
    """
    entries = list(_entries(file))
    steps, how = _steps(entries)
    rows = [row for _, row in entries if row is not None]
    records, notes = [(step, row) for step, row in zip(steps, rows, strict=True)], [how]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if TRL.speaks(names):
        records, more = renamed(records)
        notes += more
        names = list(dict.fromkeys(key for _, row in records for key in row))
    framework = vocabulary_of(names) or (TRL if "reward" in names else None)
    log = Log(name=file.run_name, names=names, rows=len(rows), series=series_of_records(records))
    add_logs([log], NAME, str(file.path), into, framework, notes=notes)


_Entry = tuple[tuple[int, int] | None, dict[str, Any] | None]


def _entries(file: File) -> Iterator[_Entry]:
    """Yield the console's entries in order: (count, total) of a progress bar, or a row of metrics."""
    if "console" not in file.kept:
        # A job's output is not always UTF-8: progress bars may be cut within a character.
        text = COLOUR.sub("", file.content.decode("utf-8", errors="replace"))
        file.kept["console"] = [entry for line in re.split(r"[\r\n]+", text) for entry in _in_line(line)]
    yield from file.kept["console"]


def _in_line(line: str) -> Iterator[_Entry]:
    at = others = 0
    for match in _OBJECT.finditer(line):
        if match.start() < at or others > _MOST_OTHERS:  # inside a row, or a printed configuration
            continue
        end = _end(line, match.start())
        if (row := _row(line[match.start() : end])) is not None:
            yield from _bars(line[at : match.start()])
            yield None, row
            at = end
        others += row is None
    yield from _bars(line[at:])


def _bars(text: str) -> Iterator[_Entry]:
    for match in _BAR.finditer(text):
        yield (int(match[1]), int(match[2])), None


def _end(line: str, at: int) -> int:
    """Return the end of the object that begins at a brace; the end of the line if it is not closed."""
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


def _row(text: str) -> dict[str, Any] | None:
    """Return the metrics in a printed object; None for an object without metrics."""
    try:
        value = parsed(text)
    except ValueError:
        try:
            value = ast.literal_eval(_NO_NUMBER.sub("None", _WRAPPED.sub(r"\1", text)))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    metrics = {key: cell for key, cell in value.items() if isinstance(cell, str | int | float | None)}
    count = sum(number(cell) == number(cell) for cell in metrics.values())  # not NaN
    is_row = not _OF_A_ROW.isdisjoint(metrics) or TRL.speaks(metrics)
    return metrics if is_row and count > 1 else None


def _steps(found: list[_Entry]) -> tuple[list[float], str]:
    """Return the step of each row, and where the steps were found.

    A row may contain its step; otherwise the progress bar of training gives it: the bar with the total that precedes
    most rows. Evaluations have their own bars, and their rows belong to the last step of training. Without any bar, or
    if the rows were buffered and printed after later bars, training rows are counted instead.
    """
    total = _training_total(found)
    own_steps: list[float | None] = []
    by_bar: list[float] = []
    by_row: list[float] = []
    counted, trained = 0.0, 0
    at_training: list[float] = []
    for bar, row in found:
        if bar is not None:
            counted = float(bar[0]) if bar[1] == total else counted
        if row is None:
            continue
        if not _is_evaluation(row):
            trained += 1
            at_training.append(counted)
        own_steps.append(_own_step(row))
        by_bar.append(counted)
        by_row.append(float(trained))
    # Buffered output: several training rows follow the same count of the bar.
    repeated = sum(one == other for one, other in pairwise(at_training))
    if total is None:
        others, how = by_row, "rows are numbered, for neither they nor a progress bar say one"
    elif 10 * repeated > trained:
        others, how = by_row, "rows are numbered, for they were buffered and stand behind later progress bars"
    else:
        others, how = by_bar, "the progress bar's"
    if None not in own_steps:
        how = "in the rows"
    return [other if step is None else step for step, other in zip(own_steps, others, strict=True)], f"step <- {how}"


def _training_total(found: list[_Entry]) -> int | None:
    rows_after: Counter[int] = Counter()
    last: tuple[int, int] | None = None
    for bar, row in found:
        last = bar or last
        if row is not None and last is not None and not _is_evaluation(row):
            rows_after[last[1]] += 1
    return rows_after.most_common(1)[0][0] if rows_after else None


def _is_evaluation(row: dict[str, Any]) -> bool:
    return any(key.startswith("eval_") for key in row)


def _own_step(row: dict[str, Any]) -> float | None:
    if isinstance(text := row.get(_OF_MOST), str):
        return finite(number(text.partition("/")[0]))
    return next((finite(number(row[name])) for name in STEP_NAMES if name in row), None)
