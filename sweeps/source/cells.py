"""Cells and rows of a table file, before its columns are assigned roles."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sweeps.curve import Array
from sweeps.errors import UserError, require
from sweeps.run.files import parse_json
from sweeps.run.journal import finite
from sweeps.source.text import File, short

_JSON_LINES = (".jsonl", ".ndjson")

# What stands for no value in exports: what pandas takes for one when it reads, and a dash.
_NO_VALUE = frozenset(["nan", "-nan", "na", "n/a", "<na>", "#na", "#n/a", "null", "none", "-", "–", "—"])
# A whole number, or one with a decimal comma.
_COMMA = re.compile(r"\s*[+-]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][+-]?\d+)?\s*%?\s*")


@dataclass(frozen=True)
class Rows:
    """Header and cells of a table file. A cell is "" where it is empty, None where its row is too short to have it.

    names: the header, a repeated name as often as it occurs. cells: the first column of a name. torn: what is
    wrong with a last line that does not parse; the line is not among the rows. place: where a row (counted from 0)
    stands in the file. notes: how the cells were told apart, where that is not as in every CSV file.
    """

    names: Sequence[str]
    count: int
    cells: Callable[[str], list[Any]]
    torn: str | None = None
    place: Callable[[int], str] = lambda row: f"row {row + 1}"
    notes: Sequence[str] = ()

    def named(self, wanted: str) -> list[str]:
        """Return the distinct columns of a name, compared without case."""
        key = wanted.strip().casefold()
        return [name for name in dict.fromkeys(self.names) if name.strip().casefold() == key]

    def label(self, name: str) -> list[str]:
        """Return the cells of a column as stripped text."""
        return [str(cell).strip() for cell in self.cells(name)]


def numbers(cells: Sequence[Any]) -> Array:
    """Convert a column to numbers, "21%" to 0.21, NaN for what is not a finite number (a truth value is none)."""
    values = floats(cells)
    if values is None:
        values = np.array([_number(cell) for cell in cells], dtype=float)
    values[~np.isfinite(values)] = np.nan
    return values


def floats(cells: Sequence[Any]) -> Array | None:
    """Convert a column whose cells are all numbers, or texts that Python parses as such; None for any other column."""
    if not set(map(type, cells)) <= {str, int, float}:
        return None
    try:
        return np.fromiter(map(float, cells), float, len(cells))
    except (ValueError, OverflowError):
        return None


def _number(cell: Any) -> float:
    if isinstance(cell, str):
        try:
            text = cell.rstrip()
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            return math.nan
    number = finite(cell)
    return math.nan if number is None else number


def mixed_percent(cells: Sequence[Any], values: Array) -> tuple[int, int] | None:
    """Find an ambiguous column: return its first cell with a percent sign and its first above 1 without, else None."""
    signed = np.array([isinstance(cell, str) and cell.rstrip().endswith("%") for cell in cells], dtype=bool)
    plain = ~signed & (values > 1)
    return (int(signed.argmax()), int(plain.argmax())) if signed.any() and plain.any() else None


def is_empty(cell: object) -> bool:
    """Return whether a cell is None or blank text, so that nothing was logged there."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def is_blank(cell: object) -> bool:
    """Return whether a cell is empty, NaN, or a word that exports write for no value."""
    if isinstance(cell, str):
        text = cell.strip()
        return not text or text.casefold() in _NO_VALUE
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def records_as_rows(records: Sequence[Mapping[str, Any]], torn: str | None = None) -> Rows:
    """Make rows from mappings; the header is every key found, in order."""
    names = list(dict.fromkeys(key for record in records for key in record))

    def cells(name: str) -> list[Any]:
        column = [record.get(name) for record in records]
        return ["" if cell is None else cell for cell in column]

    return Rows(names, len(records), cells, torn)


def read_rows(file: File) -> Rows | None:
    """Read the rows of a CSV, JSONL, JSON or Parquet file, by its content and ending; None for an empty file.

    Raises:
        UserError: the file is none of them, or damaged.
    """
    if "rows" not in file.kept:
        file.kept["rows"] = _parse(file)
    rows: Rows | None = file.kept["rows"]
    return rows


def is_parquet(file: File) -> bool:
    """Return whether a file is Parquet, by its magic bytes or its ending."""
    return file.start.startswith(b"PAR1") or file.suffix == ".parquet"


def _parse(file: File) -> Rows | None:
    if is_parquet(file):
        return _parquet(file)
    if file.suffix in _JSON_LINES:
        return _json_lines(file)
    if file.suffix == ".json" or file.start[:1] in (b"{", b"["):
        return _json(file)
    return _csv(file)


def _csv(file: File) -> Rows | None:
    """Parse header and rows of a CSV file; blank lines are skipped, delimiter and decimal commas detected."""
    file.wanted = "a CSV file with a header line, or a log that one of the readers knows"
    text = _whole_lines(file)
    top_line = re.search(r"\S[^\r\n]*", text)
    first = top_line[0][:100_000] if top_line else ""
    # Excel says in a line of its own by what the cells are parted.
    said = re.fullmatch(r'"?sep=([,;|\t])"?\s*', first)
    delimiter = said[1] if said else _delimiter(first)
    records = partial(csv.reader, delimiter=delimiter, strict=True)
    try:
        table = [
            row for row in records(io.StringIO(text, newline="")) if any(cell and not cell.isspace() for cell in row)
        ]
    except csv.Error as error:
        raise UserError(f"{file.path}: not a CSV file ({error}); check its quotes") from error
    top = 2 if said else 1
    if len(table) < top:
        return None
    header, body = [name.strip() for name in table[top - 1]], table[top:]
    narrowest = min(map(len, body), default=0)
    notes = []
    if delimiter != ",":
        notes.append("cells parted by tabs" if delimiter == "\t" else f"cells parted by {delimiter!r}")
        if with_commas := _decimal_commas(header, body):
            notes.append(f"decimal commas in {short(', '.join(with_commas), 200)}")

    def cells(name: str) -> list[Any]:
        at = header.index(name)
        if narrowest > at:
            return [row[at] for row in body]
        return [row[at] if len(row) > at else None for row in body]

    def place(row: int) -> str:
        # Read once more rather than keep a line number for every row: only messages ask.
        reader, seen, end = records(io.StringIO(text, newline="")), -top, 0
        for record in reader:
            if any(cell and not cell.isspace() for cell in record):
                seen += 1
                if seen > row:
                    return f"line {end + 1}"
            end = reader.line_num
        return f"row {row + 1}"

    return Rows(header, len(body), cells, place=place, notes=notes)


def _delimiter(header: str) -> str:
    """Return the delimiter that splits a header into the most names: comma, semicolon or tab.

    Names with a quote in them do not count: the wrong character parts what is quoted for the right one.
    """

    def names(delimiter: str) -> int:
        return sum('"' not in name for name in next(csv.reader([header], delimiter=delimiter)))

    return max(",;\t", key=names)


def _decimal_commas(header: Sequence[str], body: Sequence[list[str]]) -> list[str]:
    """Replace decimal commas by points in the rows, in place; return the names of the columns concerned.

    A column with any decimal point stays as it is: its commas may separate thousands.
    """
    found = []
    for at, name in enumerate(header):
        column = [row[at] if len(row) > at else "" for row in body]
        if not any("," in cell and _COMMA.fullmatch(cell) for cell in column):
            continue
        if any("." in cell and not math.isnan(_number(cell.replace(",", ""))) for cell in column):
            continue
        found.append(name)
        for row in body:
            if len(row) > at and _COMMA.fullmatch(row[at]):
                row[at] = row[at].replace(",", ".")
    return found


def _whole_lines(file: File) -> str:
    """Return a CSV file's text without lines that held NUL bytes: a cut-off cell looks like a whole one."""
    text = file.text
    if not file.holed:
        return text
    lines = text.split("\n")
    for number in file.holed:
        if lines[number - 1].strip():
            file.cut.add(number)
        lines[number - 1] = ""
    return "\n".join(lines)


def _json_lines(file: File) -> Rows | None:
    """Rows of a file with a JSON object a line."""
    file.wanted = "a JSON object a line"
    records: list[dict[str, Any]] = []
    places: list[int] = []
    torn = None
    # Not splitlines: it also cuts at separators that may stand inside a JSON string.
    lines = [(number, line) for number, line in enumerate(file.text.split("\n"), start=1) if line.strip()]
    for number, line in lines:
        try:
            record = parse_json(line)
        except ValueError as error:
            said = f"{file.path}: line {number} is not JSON ({short(str(error))}); repair or remove it"
            if number == lines[-1][0] and records:
                torn = said
                break
            if number in file.holed:
                file.cut.add(number)
                continue
            raise UserError(said) from error
        if not isinstance(record, dict):
            raise UserError(f"{file.path}: line {number} is not a JSON object; give one object a line")
        records.append(record)
        places.append(number)
    return replace(records_as_rows(records, torn), place=lambda row: f"line {places[row]}") if records else None


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
    return replace(records_as_rows(document), place=lambda row: f"entry {row + 1}") if document else None


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
