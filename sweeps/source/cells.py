"""Cells and rows: what a table file holds, before anybody knows which column means what."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweeps.curve import Array
from sweeps.errors import UserError, require
from sweeps.run.journal import finite
from sweeps.source.text import File, short

_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Rows:
    """A table as read. A cell is "" where it is empty, None where its row is too short to have it.

    names: the header, a repeated name as often as it occurs. cells: the first column of a name. torn: what is
    wrong with a last line that does not parse; the line is not among the rows.
    """

    names: Sequence[str]
    count: int
    cells: Callable[[str], list[Any]]
    torn: str | None = None

    def label(self, name: str) -> list[str]:
        """A column as text."""
        return [str(cell).strip() for cell in self.cells(name)]


def numbers(cells: Sequence[Any]) -> Array:
    """A column as numbers, NaN for what is not a finite number (a truth value is none)."""
    if set(map(type, cells)) <= {str, int, float}:
        try:
            values = np.fromiter(map(float, cells), float, len(cells))
        except (ValueError, OverflowError):
            values = np.array([_number(cell) for cell in cells], dtype=float)
    else:
        values = np.array([_number(cell) for cell in cells], dtype=float)
    values[~np.isfinite(values)] = np.nan
    return values


def _number(cell: Any) -> float:
    if isinstance(cell, str):
        try:
            return float(cell)
        except ValueError:
            return math.nan
    number = finite(cell)
    return math.nan if number is None else number


def is_empty(cell: object) -> bool:
    """No value at all: nothing was logged there."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def records_as_rows(records: Sequence[Mapping[str, Any]], torn: str | None = None) -> Rows:
    """Rows from objects with keys; the header is every key found, in order."""
    names = list(dict.fromkeys(key for record in records for key in record))

    def cells(name: str) -> list[Any]:
        column = [record.get(name) for record in records]
        return ["" if cell is None else cell for cell in column]

    return Rows(names, len(records), cells, torn)


def read_rows(file: File) -> Rows | None:
    """The rows of a CSV, JSONL, JSON or Parquet file, told apart by content and ending; None for an empty file.

    Raises:
        UserError: the file is none of them, or damaged.
    """
    if "rows" not in file.kept:
        file.kept["rows"] = _parse(file)
    rows: Rows | None = file.kept["rows"]
    return rows


def _parse(file: File) -> Rows | None:
    if file.start.startswith(b"PAR1") or file.suffix == ".parquet":
        return _parquet(file)
    if file.suffix in _JSON_LINES:
        return _json_lines(file)
    if file.suffix == ".json" or file.start[:1] in (b"{", b"["):
        return _json(file)
    return _csv(file)


def _csv(file: File) -> Rows | None:
    """Header and rows of a CSV file; blank lines are no rows."""
    file.wanted = "a CSV file with a header line, or a log that one of the readers knows"
    try:
        reader = csv.reader(io.StringIO(file.text, newline=""), strict=True)
        table = [row for row in reader if any(cell and not cell.isspace() for cell in row)]
    except csv.Error as error:
        raise UserError(f"{file.path}: not a CSV file ({error}); check its quotes") from error
    if not table:
        return None
    header, body = [name.strip() for name in table[0]], table[1:]
    narrowest = min(map(len, body), default=0)

    def cells(name: str) -> list[Any]:
        at = header.index(name)
        if narrowest > at:
            return [row[at] for row in body]
        return [row[at] if len(row) > at else None for row in body]

    return Rows(header, len(body), cells)


def _json_lines(file: File) -> Rows | None:
    """Rows of a file with a JSON object a line."""
    file.wanted = "a JSON object a line"
    records: list[dict[str, Any]] = []
    torn = None
    # Not splitlines: it also cuts at separators that may stand inside a JSON string.
    lines = [(number, line) for number, line in enumerate(file.text.split("\n"), start=1) if line.strip()]
    for number, line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            said = f"{file.path}: line {number} is not JSON ({short(str(error))}); repair or remove it"
            if number == lines[-1][0] and records:
                torn = said
                break
            raise UserError(said) from error
        if not isinstance(record, dict):
            raise UserError(f"{file.path}: line {number} is not a JSON object; give one object a line")
        records.append(record)
    return records_as_rows(records, torn) if records else None


def _json(file: File) -> Rows | None:
    """Rows of a JSON list of objects; a file that is no single document is read as an object a line."""
    document = file.document
    if document is None:
        if not file.start:
            return None
        if file.start[:1] == b"[":
            raise UserError(f"{file.path}: not JSON, or cut off; give a list of objects, or an object a line")
        return _json_lines(file)
    if isinstance(document, dict) and not any(isinstance(value, dict | list) for value in document.values()):
        document = [document]
    if not isinstance(document, list):
        raise UserError(
            f"{file.path}: a JSON object with {short(', '.join(map(str, document)))}; give TRL's trainer state "
            "(it has log_history), a list of rows, or an object a line"
        )
    for number, record in enumerate(document, start=1):
        if not isinstance(record, dict):
            raise UserError(f"{file.path}: entry {number} of the list is not a JSON object; give a list of objects")
    return records_as_rows(document) if document else None


def _parquet(file: File) -> Rows:
    """Rows of a Parquet file."""
    require("pyarrow", f"{file.path} (Parquet)")
    import pyarrow.parquet  # slow to import, and only this format needs it

    try:
        table = pyarrow.parquet.read_table(io.BytesIO(file.raw))
    except Exception as error:  # whatever the reader makes of a damaged file
        raise UserError(f"{file.path}: not a readable Parquet file ({short(str(error))})") from error
    names = [str(name) for name in table.column_names]

    def cells(name: str) -> list[Any]:
        """Nulls are empty cells, and so is what pandas wrote for them."""
        column = table.column(names.index(name)).to_pylist()
        return ["" if cell is None or (isinstance(cell, float) and cell != cell) else cell for cell in column]

    return Rows(names, table.num_rows, cells)
