"""Read a table file as a pandas DataFrame, before reward, compute and labels are chosen among its columns.

pandas is imported when cells are first needed, because this project's journals do not need it.
"""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sweeps.errors import UserError, require
from sweeps.source.cells import is_blank, is_empty, is_numeric, number
from sweeps.source.collected import Request
from sweeps.source.text import File, json_lines, short
from sweeps.source.vocabulary import ORDER, RUN_COLUMNS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_EXCEL = (".xlsx", ".xlsm")
_JSON_LINES = (".jsonl", ".ndjson")
_JSON = (".json", *_JSON_LINES)
_LABELS = ("recipe", "seed", "baseline", *RUN_COLUMNS)
_LONGEST_HEADER = 10_000_000
# A whole number, or a number with a decimal comma.
_DECIMAL_COMMA = re.compile(r"\s*[+-]?(?:\d+(?:,\d*)?|,\d+)(?:[eE][+-]?\d+)?\s*%?\s*")
# A number whose commas may separate thousands, and a whole number that needs no such comma.
_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2}(?:,\d{3})+\s*")
_BELOW_1000 = re.compile(r"\s*[+-]?\d{1,3}\s*")
_DELIMITER_NAMES = {"\t": "tabs", " ": "blanks"}


@dataclass
class Table:
    """Header and cells of a table file.

    Attributes:
        names: the header; a name may occur more than once.
        load: function that reads the cells, one column per name. A CSV column that is not purely finite numbers holds
            the text of its cells, "" if empty.
        torn: error message on an incomplete last line, which is not among the rows; None without one.
        place: function that describes where a row (counted from 0) is in the file.
        rows_narrower_than: function that returns the indices of the rows with fewer cells than a given number.
        notes: unusual ways of parsing (delimiter, decimal commas); complete only after the cells were loaded.
        unclear: error messages, by index of a column, that its commas may be decimal or separate thousands; complete
            only after the cells were loaded.
    """

    names: list[str]
    load: Callable[[], DataFrame]
    torn: str | None = None
    place: Callable[[int], str] = lambda row: f"row {row + 1}"
    rows_narrower_than: Callable[[int], list[int]] = lambda width: []
    notes: list[str] = field(default_factory=list)
    unclear: dict[int, str] = field(default_factory=dict)

    @cached_property
    def frame(self) -> DataFrame:
        """The cells. Columns are numbered in the order of `names`."""
        return self.load()

    @property
    def count(self) -> int:
        """Number of rows below the header."""
        return len(self.frame)

    def column(self, name: str) -> Series[Any]:
        """Return the cells of the first column with this name.

        Raises:
            UserError: its commas may be decimal or separate thousands.
        """
        cells = self.frame.iloc[:, self.names.index(name)]
        if (error := self.unclear.get(self.names.index(name))) is not None:
            raise UserError(error)
        return cells

    def named(self, wanted: str) -> list[str]:
        """Return the distinct column names that equal `wanted`, ignoring case and outer blanks."""
        key = wanted.strip().casefold()
        return [name for name in dict.fromkeys(self.names) if name.strip().casefold() == key]

    def label(self, name: str) -> list[str]:
        """Return the cells of a column as text without outer blanks."""
        cells = self.frame.iloc[:, self.names.index(name)].tolist()
        if not set(map(type, cells)) <= {str}:
            return [str(cell).strip() for cell in cells]
        stripped = {
            cell: cell.strip() for cell in set(cells)
        }  # strip each distinct label once: a million rows have few
        return [stripped[cell] for cell in cells]

    def take(self, rows: NDArray[np.intp]) -> Table:
        """Select rows, which keep their numbers."""
        return Table(self.names, lambda: self.frame.iloc[rows], unclear=self.unclear)


def table_of(records: Sequence[Mapping[str, Any]], torn: str | None = None) -> Table:
    """Make a table from mappings. Its header is all keys in order of appearance, and None becomes an empty cell."""
    names = list(dict.fromkeys(key for record in records for key in record))

    def load() -> DataFrame:
        import pandas

        columns = [["" if (cell := record.get(name)) is None else cell for record in records] for name in names]
        return pandas.DataFrame(dict(enumerate(columns)), index=range(len(records)), dtype=object)

    return Table(names, load, torn)


def table_of_rows(file: File, names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table from rows of text cells. As commas do not separate the cells, decimal commas are read.

    Missing cells become "", and cells beyond the header are ignored.
    """
    width = len(names)
    notes: list[str] = []
    unclear: dict[int, str] = {}

    def load() -> DataFrame:
        import pandas

        padded = [[*row[:width], *[""] * (width - len(row))] for row in rows]
        frame = pandas.DataFrame(padded, columns=range(width), dtype=object)
        _read_commas(file, names, frame, notes, unclear)
        return frame

    return Table(list(names), load, notes=notes, unclear=unclear)


def group_rows(labels: Sequence[Sequence[str]]) -> dict[tuple[str, ...], NDArray[np.intp]]:
    """Return the row numbers of each combination of labels, in order of first appearance."""
    import pandas

    frame = pandas.DataFrame(dict(enumerate(labels)), dtype=object)
    return {tuple(map(str, key)): part.index.to_numpy() for key, part in frame.groupby(list(frame), sort=False)}


def read_table(file: File, request: Request) -> Table | None:
    """Read a CSV, JSONL, JSON, Excel or Parquet file, by its content and ending; None for an empty file.

    Raises:
        UserError: the file has none of these formats, or is damaged. Damaged cells of a CSV file raise when first read.
    """
    if "table" not in file.kept:
        file.kept["table"] = _parse(file, request)
    table: Table | None = file.kept["table"]
    return table


def with_order(table: Table, request: Request, labels: Sequence[str]) -> Table:
    """For `--x order`, add a column that numbers the rows from 1, separately for each combination of these labels.

    For another `--x`, or if the table has a column `order`, it is returned unchanged.
    """
    if request.x != ORDER or table.named(ORDER):
        return table
    keys = [table.names.index(name) for name in table.names if name.strip().casefold() in labels]

    def load() -> DataFrame:
        frame = table.frame
        rows = frame.groupby(keys, sort=False).cumcount() + 1 if keys else np.arange(1, len(frame) + 1)
        return frame.assign(_order=rows).set_axis(range(len(table.names) + 1), axis=1)

    return replace(table, names=[*table.names, ORDER], load=load)


def is_binary(file: File) -> bool:
    """Return whether a file is Parquet or Excel, by its first bytes or its ending."""
    return file.start.startswith(b"PAR1") or file.suffix in (".parquet", *_EXCEL)


def _parse(file: File, request: Request) -> Table | None:
    if is_binary(file):
        return _excel(file) if file.suffix in _EXCEL else _parquet(file)
    if file.suffix in _JSON or file.start[:1] in (b"{", b"["):
        return _json(file)
    # Labels stay text, because seed 01 is not seed 1.
    labels = {name.strip().casefold() for name in (request.by, *request.factors, *_LABELS) if name}
    return _csv(file, labels)


def _csv(file: File, labels: Collection[str]) -> Table | None:
    """Parse a CSV file. Blank lines are skipped; the delimiter and decimal commas are detected."""
    file.wanted = "a CSV file with a header line, or a log that one of the readers knows"
    text = _whole_lines(file)
    lines = [line[0][:100_000] for line in islice(re.finditer(r"\S[^\r\n]*", text), 2)]
    # Excel may write the delimiter in a separate first line, `sep=;`.
    separator_line = re.fullmatch(r'"?sep=([,;|\t])"?\s*', lines[0]) if lines else None
    delimiter = separator_line[1] if separator_line else _delimiter(lines)
    notes = [] if delimiter == "," else [f"cells separated by {_DELIMITER_NAMES.get(delimiter, repr(delimiter))}"]
    if delimiter == " ":  # columns may be aligned by several blanks
        text, delimiter = "\n".join("\t".join(line.split()) for line in text.split("\n")), "\t"
    header_lines = 2 if separator_line else 1
    handle = io.StringIO(text[:_LONGEST_HEADER], newline="")
    header_rows = list(islice(_records(file, handle, delimiter), header_lines))
    if len(header_rows) < header_lines:
        return None
    names, body = [name.strip() for name in header_rows[-1][1]], text[handle.tell() :]
    as_text = [column for column, name in enumerate(names) if name.casefold() in labels]
    unclear: dict[int, str] = {}

    def load() -> DataFrame:
        try:
            frame = _cells(body, delimiter, len(names), as_text)
        except ValueError as error:  # the parser's error is a subclass of ValueError
            raise _no_csv(file, error) from error
        if delimiter != ",":
            _read_commas(file, names, frame, notes, unclear)
        return frame

    def records() -> Iterator[tuple[int, list[str]]]:
        # Parsed again, because a line number kept for every row would serve only error messages.
        return islice(_records(file, io.StringIO(text, newline=""), delimiter), header_lines, None)

    def place(row: int) -> str:
        return next((f"line {line}" for line, _ in islice(records(), row, None)), f"row {row + 1}")

    def rows_narrower_than(width: int) -> list[int]:
        return [row for row, (_, cells) in enumerate(records()) if len(cells) < width]

    return Table(names, load, None, place, rows_narrower_than, notes, unclear)


def _no_csv(file: File, error: Exception) -> UserError:
    return UserError(f"{file.path}: not a CSV file ({short(str(error).strip())}); check its quotes")


def _records(file: File, handle: io.StringIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row of a CSV file that has a filled cell, with the number of its first line."""
    reader, end = csv.reader(handle, delimiter=delimiter, strict=True), 0
    try:
        for row in reader:
            if any(cell and not cell.isspace() for cell in row):
                yield end + 1, row
            end = reader.line_num
    except csv.Error as error:
        raise _no_csv(file, error) from error


def _delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter that splits the header into most names: comma, semicolon or tab, else a bar, else blanks.

    Names that contain a quote do not count, because a wrong delimiter splits quoted names. Blanks count only if they
    split the next line into as many cells, because names may contain blanks.
    """

    def names(delimiter: str) -> int:
        return sum('"' not in name for line in lines[:1] for name in next(csv.reader([line], delimiter=delimiter)))

    delimiter = max(",;\t", key=names)
    delimiter = delimiter if names(delimiter) > 1 else "|"
    if names(delimiter) > 1:
        return delimiter
    widths = {len(line.split()) for line in lines}
    return " " if len(lines) > 1 and len(widths) == 1 and widths != {1} else ","


def _cells(body: str, delimiter: str, width: int, as_text: Sequence[int]) -> DataFrame:
    """Parse the rows below a header. A column has finite numbers only, or the text of its cells.

    Rows without a filled cell are dropped, cells beyond the header are ignored, and missing cells become "".

    Args:
        body: the rows.
        delimiter: separator of cells.
        width: number of columns.
        as_text: columns to keep as text even if they are numbers.

    Raises:
        ValueError: a quote is not closed.
    """
    import pandas

    # A numbered header of the right width makes pandas ignore cells beyond the header.
    numbered = delimiter.join(map(str, range(width))) + "\n" + body

    def parsed(columns: Sequence[int], text: Sequence[int]) -> DataFrame:
        with warnings.catch_warnings():
            # pandas 3.1 and later always parse exactly, and deprecate the argument float_precision.
            warnings.simplefilter("ignore", DeprecationWarning)
            frame = pandas.read_csv(
                io.StringIO(numbered), sep=delimiter, usecols=list(columns), index_col=False, na_filter=False,
                dtype={str(column): object for column in text}, low_memory=False, float_precision="round_trip",
            )  # fmt: skip
        return frame.set_axis(list(columns), axis=1)

    frame = parsed(range(width), as_text)
    # Booleans, columns with inf or nan, and integers beyond 64 bits are kept as they are written.
    odd_columns = [column for column in range(width) if _is_odd(frame[column])]
    if odd_columns:
        frame[odd_columns] = parsed(odd_columns, odd_columns)
    if not any(is_numeric(frame[column]) for column in range(width)):
        frame = _without_blank_rows(frame).reset_index(drop=True)
    return frame


def _is_odd(cells: Series[Any]) -> bool:
    """Return whether pandas converted a column to something other than text or finite numbers."""
    if is_numeric(cells):
        return not np.isfinite(cells).all()
    return len(cells) > 0 and not isinstance(cells.iloc[0], str)


def _read_commas(file: File, names: Sequence[str], frame: DataFrame, notes: list[str], unclear: dict[int, str]) -> None:
    """Replace decimal commas by points in place, with a note.

    Add an error message for each column whose commas are unclear.

    A column that also has decimal points is left alone, because its commas may separate thousands.
    """
    changed_columns = []
    for column in range(frame.shape[1]):
        cells = [] if is_numeric(frame[column]) else frame[column].tolist()
        if not any("," in cell and _DECIMAL_COMMA.fullmatch(cell) for cell in cells):
            continue
        if any("." in cell and not math.isnan(number(cell.replace(",", ""))) for cell in cells):
            continue
        if (example := _maybe_thousands(cells)) is not None:
            whole, decimal = example.replace(",", ""), example.replace(",", ".", 1)
            unclear[column] = (
                f"{file.path}: column {short(names[column])} has {short(example)!r}, whose comma may be decimal or "
                f"separate thousands; write {short(whole)} or {short(decimal)}"
            )
            continue
        changed_columns.append(column)
        frame[column] = [cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell for cell in cells]
    if changed_columns:
        notes.append(f"decimal commas in {short(', '.join(names[column] for column in changed_columns), 200)}")


def _maybe_thousands(cells: Sequence[str]) -> str | None:
    """Return the first cell with a comma if the column's commas may separate thousands of whole numbers, else None.

    The commas are decimal if some cell begins with 0, has not exactly three digits after a comma, or has a whole number
    above 999 without a comma. A single cell with a comma is not enough evidence of thousands.
    """
    filled = [cell for cell in cells if not is_blank(cell)]
    with_comma = [cell.strip() for cell in filled if "," in cell]
    if len(with_comma) < 2 or not all((_THOUSANDS if "," in cell else _BELOW_1000).fullmatch(cell) for cell in filled):
        return None
    return with_comma[0]


def _whole_lines(file: File) -> str:
    """Return a CSV file's text without lines that had NUL bytes, because a cell cut off there looks complete."""
    text = file.text
    if not file.nul_lines:
        return text
    lines = text.split("\n")
    for line in file.nul_lines:
        if lines[line - 1].strip():
            file.cut_lines.add(line)
        lines[line - 1] = ""
    return "\n".join(lines)


def _json(file: File) -> Table | None:
    file.wanted = "one JSON object per line"
    document = None if file.suffix in _JSON_LINES else file.document
    if document is None and file.start[:1] == b"[" and file.suffix not in _JSON_LINES:
        raise UserError(f"{file.path}: not JSON, or cut off; give a list of objects, or one object per line")
    if isinstance(document, dict) and not any(isinstance(value, dict | list) for value in document.values()):
        document = [document]
    if document is not None and not isinstance(document, list):
        raise UserError(
            f"{file.path}: a JSON object with {short(', '.join(map(str, document)))}; give TRL's trainer state "
            "(it has log_history), a list of rows, or one object per line"
        )
    if document is None:
        records, lines, torn = json_lines(file)
        where, of_container, expected = "line", "", "one object per line"
    else:
        records, lines, torn = document, range(1, len(document) + 1), None
        where, of_container, expected = "entry", " of the list", "a list of objects"
    for position, record in zip(lines, records, strict=True):
        if not isinstance(record, dict):
            raise UserError(f"{file.path}: {where} {position}{of_container} is not a JSON object; give {expected}")
    if torn and not records:
        raise UserError(torn)
    return replace(table_of(records, torn), place=lambda row: f"{where} {lines[row]}") if records else None


def _parquet(file: File) -> Table:
    require("pyarrow", f"{file.path} (Parquet)")
    import pyarrow.parquet  # slow to import, and only this format needs it

    try:
        table = pyarrow.parquet.read_table(io.BytesIO(file.raw))
        # Keep every column, including an index that pandas wrote. Integers stay integers next to nulls.
        frame = table.to_pandas(ignore_metadata=True, integer_object_nulls=True)
    except Exception as error:  # the reader raises many types of errors for damaged files
        raise UserError(f"{file.path}: not a readable Parquet file ({short(str(error))})") from error
    return Table([str(name) for name in frame.columns], lambda: _fill_nulls(frame))


def _excel(file: File) -> Table | None:
    require("openpyxl", f"{file.path} (Excel)")
    import pandas

    try:
        sheets = pandas.read_excel(
            io.BytesIO(file.raw), sheet_name=None, header=None, dtype=object, na_filter=False, engine="openpyxl"
        )
    except Exception as error:  # the reader raises many types of errors for damaged files
        raise UserError(
            f"{file.path}: a spreadsheet, which is not read; save its sheet as CSV (UTF-8) and give that file "
            f"({short(str(error))})"
        ) from error
    sheet, frame = next(iter(sheets.items()))
    frame = _without_blank_rows(frame)
    if not len(frame):
        return None
    names, body = [str(cell).strip() for cell in frame.iloc[0]], frame.iloc[1:]
    notes = [f"sheet {short(str(sheet))}, the first of {len(sheets)}"] if len(sheets) > 1 else []
    return Table(
        names,
        lambda: _fill_nulls(body.reset_index(drop=True)),
        place=lambda row: f"row {body.index[row] + 1}",
        notes=notes,
    )


def _without_blank_rows(frame: DataFrame) -> DataFrame:
    blank = frame
    for at in frame:  # column by column, because nearly all rows have a filled first cell
        blank = blank[blank[at].map(is_empty).to_numpy(bool)]
    return frame.drop(blank.index)


def _fill_nulls(frame: DataFrame) -> DataFrame:
    """Number the columns, and replace nulls (NaN in pandas) by ""."""
    frame = frame.set_axis(range(frame.shape[1]), axis=1)
    for at, column in frame.items():
        if not is_numeric(column) or column.isna().any():
            frame[at] = column.astype(object).where(column.notna(), "")
    return frame
