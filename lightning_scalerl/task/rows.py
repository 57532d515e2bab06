"""Rows of a data set, from a Parquet, JSON or CSV file, a folder, the hub at a fixed revision, or in memory."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_scalerl.checks import ConfigurationError, error_line, looks_local, whole_number
from lightning_scalerl.task.base import file_digest
from sweeps.run.files import parse_json

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RowSource:
    """Location of a data set's rows: a file, a folder or the hub.

    Attributes:
        field: field of the configuration, for errors.
        path: a file, a folder that `datasets` can load, or a hub id.
        split, name: split and configuration name of a folder or hub id; None for the default.
        revision: commit of a hub id; another commit is another data set.
        rows: use only the first `rows` rows; None for all.
    """

    field: str
    path: str
    split: str | None = None
    name: str | None = None
    revision: str | None = None
    rows: int | None = None

    @classmethod
    def of(cls, field: str, location: Any) -> RowSource:
        """Build a source from a path, or a mapping of the attributes above.

        Raises:
            ConfigurationError: `location` is neither; the error describes the valid forms.
        """
        if isinstance(location, str):
            location = {"path": location}
        valid_keys = ("path", "split", "name", "revision", "rows")
        if not isinstance(location, Mapping) or "path" not in location or set(location) - set(valid_keys):
            raise ConfigurationError(
                f"{field}: {location!r} must be a file, a hub id, or a mapping of {', '.join(valid_keys)} with a path"
            )
        if location.get("rows") is not None:
            whole_number(f"{field}.rows", location["rows"])
        return cls(
            field,
            str(location["path"]),
            location.get("split"),
            location.get("name"),
            location.get("revision"),
            location.get("rows"),
        )

    @property
    def is_file(self) -> bool:
        """True if the path is a single file in one of the formats that are read directly."""
        return self.path.endswith(SUFFIXES)

    @property
    def is_folder(self) -> bool:
        """True if the path is a local folder."""
        return Path(self.path).expanduser().is_dir()

    def content(self) -> Any:
        """Return the rows' entry in a run's identity: digests of files, or the commit of a hub data set.

        Raises:
            ConfigurationError: a file cannot be read, or a hub id has no commit.
        """
        selection = {key: value for key in ("split", "name", "rows") if (value := getattr(self, key)) is not None}
        if self.is_file:
            digest_of_file = file_digest(self.field, self.path)
            return {**selection, "digest": digest_of_file} if selection else digest_of_file
        if self.is_folder:
            digest = hashlib.sha256()
            folder = Path(self.path).expanduser()
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                digest.update(f"{file.relative_to(folder)} {file_digest(self.field, file)}\n".encode())
            return {**selection, "digest": digest.hexdigest()}
        if looks_local(self.path):
            raise ConfigurationError(
                f"{self.field}: cannot read {self.path!r} (no such file or folder); give a file that ends in "
                f"{', '.join(SUFFIXES)}, or a folder"
            )
        if self.revision is None or not _COMMIT.fullmatch(self.revision):
            raise ConfigurationError(
                f"{self.field}: {self.path!r} is no file, so it is taken for a data set on the hub, and "
                f"revision={self.revision!r} is no commit; give its 40 digits (a branch's rows change), or a file that "
                f"ends in {', '.join(SUFFIXES)}"
            )
        return {**selection, "path": self.path, "revision": self.revision}

    def read(self) -> list[Row]:
        """Read all rows, in their order.

        Raises:
            ConfigurationError: a row is malformed; the error names field, file, line and problem.
        """
        self.content()
        rows = self._read_file() if self.is_file else self._load_by_datasets()
        rows = rows[: self.rows]
        if not rows:
            raise ConfigurationError(f"{self.field}: {self.path!r} holds no rows")
        return rows

    def _read_file(self) -> list[Row]:
        path = Path(self.path).expanduser()
        try:
            if path.suffix == ".parquet":
                import pyarrow.parquet as parquet

                # `read_table` would import pandas, which is slow.
                table: list[Row] = parquet.ParquetFile(path).read().to_pylist()
                return table
            if path.suffix == ".csv":
                return _read_csv(path)
            text = path.read_text(encoding="utf-8-sig")
        except Exception as error:
            raise ConfigurationError(f"{self.field}: cannot read {self.path!r} ({error_line(error)})") from error
        if path.suffix == ".json" and text.lstrip().startswith("["):
            return self._parse_list(text)
        return self._parse_lines(text)

    def _parse_list(self, text: str) -> list[Row]:
        try:
            rows = parse_json(text)
        except ValueError as error:
            raise ConfigurationError(f"{self.field}: {self.path!r} is no JSON ({error_line(error)})") from error
        if not all(isinstance(row, dict) for row in rows):
            raise ConfigurationError(f"{self.field}: {self.path!r} must hold a list of objects")
        objects: list[Row] = rows
        return objects

    def _parse_lines(self, text: str) -> list[Row]:
        rows: list[Row] = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ConfigurationError(f"{self.field}: {self.path}, line {number}: {error_line(error)}") from error
            if not isinstance(row, dict):
                raise ConfigurationError(f"{self.field}: {self.path}, line {number}: no object, but {line[:40]!r}")
            rows.append(row)
        return rows

    def _load_by_datasets(self) -> list[Row]:
        """Load the rows with the `datasets` library.

        Raises:
            ConfigurationError: the library is not installed, or cannot load the rows.
        """
        try:
            from datasets import DatasetDict, load_dataset
        except ModuleNotFoundError as error:
            if error.name != "datasets":
                raise
            raise ConfigurationError(
                f"{self.field}: {self.path!r} is a folder or on the hub, which the package datasets reads; it is not "
                f"installed; pip install datasets, or give a file that ends in {', '.join(SUFFIXES)}"
            ) from None

        dataset_location = str(Path(self.path).expanduser()) if self.is_folder else self.path
        try:
            loaded = load_dataset(dataset_location, self.name, split=self.split, revision=self.revision)
        except Exception as error:
            raise ConfigurationError(
                f"{self.field}: datasets cannot load {self.path!r} ({error_line(error)})"
            ) from error
        if isinstance(loaded, DatasetDict):
            raise ConfigurationError(
                f"{self.field}: {self.path!r} has the splits {', '.join(map(str, loaded))}; say which: "
                f"{self.field}={{path: {self.path}, split: ...}}"
            )
        rows: list[Row] = loaded.to_list()
        return rows


@dataclass(frozen=True)
class InMemory:
    """Rows passed in by a script: a list of dicts or a `datasets.Dataset`.

    Attributes:
        field: field of the configuration, for errors.
        rows: the object from the user.
    """

    field: str
    rows: Any
    path: ClassVar[str] = "the rows given"

    def content(self) -> str:
        """Return the digest of all rows, which represents them in a run's identity."""
        texts = (json.dumps(row, sort_keys=True, default=repr, ensure_ascii=False) for row in self.read())
        return hashlib.sha256("\n".join(texts).encode(errors="surrogatepass")).hexdigest()

    def read(self) -> list[Row]:
        """Return all rows, in their order.

        Raises:
            ConfigurationError: there are no rows, or the object is not a list of dicts or a data set.
        """
        data = self.rows
        if isinstance(data, Mapping):  # a DatasetDict
            first, names = next(iter(data)), ", ".join(map(str, data))
            raise ConfigurationError(f"{self.field}: has the splits {names}; say which, such as data[{first!r}]")
        rows = data.to_list() if hasattr(data, "to_list") and hasattr(data, "__len__") else data
        if not isinstance(rows, list | tuple):
            raise ConfigurationError(
                f"{self.field}: {type(data).__name__} must be a file, a datasets.Dataset or a list of dicts; of a "
                "stream give list(stream.take(1000))"
            )
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigurationError(f"{self.field}: row {number} is no dict, but {str(row)[:40]!r}")
        if not rows:
            raise ConfigurationError(f"{self.field}: holds no rows")
        return [dict(row) for row in rows]


def source_of(field: str, location: Any) -> RowSource | InMemory:
    """Return a reader of rows, from a path, a mapping with a path, or the rows themselves.

    Raises:
        ConfigurationError: `location` has none of these forms; the error describes them.
    """
    # A `datasets.Dataset` has `column_names`. Other classes of `datasets` have the attribute too; `InMemory` refuses
    # them with an explanation.
    if isinstance(location, list | tuple) or hasattr(location, "column_names"):
        return InMemory(field, location)
    return RowSource.of(field, str(location) if isinstance(location, Path) else location)


def _read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file. Cells stay strings, because an answer such as 007 must not become a number.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    csv.field_size_limit(1 << 30)
    rows: list[Row] = []
    with path.open(encoding="utf-8-sig", newline="") as handle:
        reader = csv.reader(handle, strict=True)
        names = next(reader, [])
        for cells in reader:
            if not cells:
                continue  # an empty line
            if len(cells) != len(names):
                raise ValueError(f"line {reader.line_num}: {len(cells)} cells, and the first row has {len(names)}")
            rows.append(dict(zip(names, cells, strict=True)))
    return rows


def fields_of(rows: Sequence[Row]) -> str:
    """Return the names of the columns, for error messages."""
    return ", ".join(map(str, rows[0])) if rows else "none"
