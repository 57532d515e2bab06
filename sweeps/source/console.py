"""Consoles of TRL, Unsloth, ms-swift and others that print metrics as a Python or JSON object, anywhere in a line.

transformers' Trainer prints `{'loss': 0.1, 'reward': 0.5, ...}` without a step, around a progress bar: the step is what
the bar has counted. ms-swift prints the step along (`'global_step/max_steps': '5/400'`), and other programs theirs
(`{"step": 5, ...}`) behind a time or a logger's name.
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
# Files of these hold rows, and are read as such whatever stands in them.
TABLE_ENDINGS = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet", ".xlsx", ".xlsm")
_OBJECT = re.compile(r"""\{\s*(?:'[^'\n]{1,200}'|"[^"\n]{1,200}")\s*:""")
_IN_BYTES = re.compile(_OBJECT.pattern.encode())
_MOST_OTHERS = 20  # objects of a line that are no rows: a printed configuration may hold thousands, one in the other
_BAR = re.compile(r"\d+%\|[^|\r\n]*\|\s*(\d+)/(\d+) \[")
_OF_MOST = "global_step/max_steps"  # ms-swift's: 5/400
# What Python prints and `ast.literal_eval` does not read: values of NumPy and torch, and numbers that are none.
_WRAPPED = re.compile(r"\b(?:(?:np|numpy)\.\w+|tensor)\(([^(),]*)(?:,[^()]*)?\)")
_NO_NUMBER = re.compile(r"(?<=[\s:,\[(])-?(?:nan|inf)(?=\s*[,}\])])")
# Any of these shows that an object is a row of metrics, and no configuration that a program prints.
_OF_A_ROW = frozenset({"loss", "reward", "eval_loss", "eval_reward", _OF_MOST, *STEP_NAMES})


def matches(file: File, into: Collected | None = None) -> bool:
    """Return whether some line of a file, which is none of rows, holds an object with metrics.

    ms-swift's `logging.jsonl` is one as well: its rows are those of the console, and have no column of steps.
    """
    if file.start[:1] == b"{" and f'"{_OF_MOST}": "'.encode() in file.raw:
        return True
    if file.suffix in TABLE_ENDINGS or b"\0" in file.raw[:1024] or _IN_BYTES.search(file.raw) is None:
        return False
    if file.start[:1] in (b"{", b"[") and _is_json(file):
        return False
    return any(row is not None for _, row in _found(file))


def _is_json(file: File) -> bool:
    """Return whether a file is one JSON document, or one a line: rows of a table or a tracker."""
    if file.document is not None:
        return True
    try:
        values, _, torn = json_lines(file)
    except UserError:
        return False
    return bool(values) and (torn is None or len(values) > 1)


def read(file: File, into: Collected) -> None:
    """Add the evaluations of the run, or its training rewards.

    Raises:
        UserError: no row with a reward.
    """
    found = list(_found(file))
    steps, how = _steps(found)
    rows = [row for _, row in found if row is not None]
    records, notes = [(step, row) for step, row in zip(steps, rows, strict=True)], [how]
    names = list(dict.fromkeys(key for row in rows for key in row))
    if TRL.speaks(names):
        records, more = renamed(records)
        notes += more
        names = list(dict.fromkeys(key for _, row in records for key in row))
    spoken = vocabulary_of(names) or (TRL if "reward" in names else None)
    add_logs(
        logs=[Log(file.run_name, names, len(rows), series_of_records(records))],
        reader=NAME,
        where=str(file.path),
        into=into,
        vocabulary=spoken,
        named="the file's name",
        step="step",
        notes=notes,
    )


_Found = tuple[tuple[int, int] | None, dict[str, Any] | None]


def _found(file: File) -> Iterator[_Found]:
    """Yield what a console shows in its order: a count of a progress bar with its total, or a row of metrics."""
    if "console" not in file.kept:
        # A job's output is not always UTF-8: progress bars may be cut in the middle of a character.
        text = COLOUR.sub("", file.content.decode("utf-8", errors="replace"))
        file.kept["console"] = [found for line in re.split(r"[\r\n]+", text) for found in _in_line(line)]
    yield from file.kept["console"]


def _in_line(line: str) -> Iterator[_Found]:
    at = others = 0
    for match in _OBJECT.finditer(line):
        if match.start() < at or others > _MOST_OTHERS:  # inside of a row, or of a printed configuration
            continue
        end = _end(line, match.start())
        if (row := _row(line[match.start() : end])) is not None:
            yield from _bars(line[at : match.start()])
            yield None, row
            at = end
        others += row is None
    yield from _bars(line[at:])


def _bars(text: str) -> Iterator[_Found]:
    for match in _BAR.finditer(text):
        yield (int(match[1]), int(match[2])), None


def _end(line: str, at: int) -> int:
    """Return where the object that begins at a brace ends; the end of the line if it does not."""
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
    """Return the metrics in an object as it was printed; None for an object without any."""
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
    numbers = sum(number(cell) == number(cell) for cell in metrics.values())  # those that are not NaN
    is_row = not _OF_A_ROW.isdisjoint(metrics) or TRL.speaks(metrics)
    return metrics if is_row and numbers > 1 else None


def _steps(found: list[_Found]) -> tuple[list[float], str]:
    """Return the step of each row, and where it was found.

    A row says its step itself, or a progress bar of training does: the one with the total that stands before most rows.
    Evaluations have bars of their own, and their rows belong to the last step of training. Where there is neither, or
    the rows were buffered and stand behind later bars, training rows are counted.
    """
    total = _training_total(found)
    own: list[float | None] = []
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
        own.append(_own_step(row))
        by_bar.append(counted)
        by_row.append(float(trained))
    repeated = sum(one == other for one, other in pairwise(at_training))
    if total is None:
        others, how = by_row, "rows are numbered, for neither they nor a progress bar say one"
    elif 10 * repeated > trained:
        others, how = by_row, "rows are numbered, for they were buffered and stand behind later progress bars"
    else:
        others, how = by_bar, "the progress bar's"
    if None not in own:
        how = "in the rows"
    return [other if step is None else step for step, other in zip(own, others, strict=True)], f"step <- {how}"


def _training_total(found: list[_Found]) -> int | None:
    before: Counter[int] = Counter()
    last: tuple[int, int] | None = None
    for bar, row in found:
        last = bar or last
        if row is not None and last is not None and not _is_evaluation(row):
            before[last[1]] += 1
    return before.most_common(1)[0][0] if before else None


def _is_evaluation(row: dict[str, Any]) -> bool:
    return any(key.startswith("eval_") for key in row)


def _own_step(row: dict[str, Any]) -> float | None:
    if isinstance(text := row.get(_OF_MOST), str):
        return finite(number(text.partition("/")[0]))
    return next((finite(number(row[name])) for name in STEP_NAMES if name in row), None)
