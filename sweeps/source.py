"""From what a user points at (runs, sweeps, CSV files) to curves, or one line that says why not."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweeps.curve import FLOPS, Curve, default_axis, make_curve
from sweeps.errors import UserError
from sweeps.journal import JournalError, JournalView, Record, find_runs, read_journal


@dataclass
class LoadedStudy:
    """What the sources hold: a curve per recipe, the journals, and what went unused and why."""

    curves: list[Curve] = field(default_factory=list)
    runs: list[JournalView] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass
class _Table:
    """Rows as they are read: one list a column."""

    axis: str
    metric: str
    compute: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    seed: list[str] = field(default_factory=list)
    sd: list[float | None] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def load(
    sources: Sequence[str | Path],
    metric: str | None = None,
    x: str | None = None,
    y: str | None = None,
    by: str | None = None,
) -> LoadedStudy:
    """Read run directories, sweep directories and tables (CSV, JSONL, Parquet) into one curve per recipe, by label.

    Args:
        sources: paths; journals and tables may be mixed if they share the compute axis.
        metric: of journals, `eval/<set>/pass_rate`; the first set found if not given.
        x: compute column of a table (default `compute`) or compute metric of journals.
        y: reward column of a table (default `reward`).
        by: recipe column of a table (default `recipe`); without one the file's name is the recipe.

    Raises:
        UserError: a source is missing or unusable, or two sources do not share an axis.
    """
    study = LoadedStudy()
    tables: dict[str, _Table] = {}
    run_dirs: list[Path] = []
    for source in sources:
        path = Path(source)
        if not _exists(path):
            raise UserError(
                f"{source}: no such file or directory; give a run, a sweep or a table (CSV, JSONL, Parquet)"
            )
        if path.is_dir() or path.name == "metrics.jsonl":
            found = find_runs(path) if path.is_dir() else [path.parent]
            if not found:
                raise UserError(f"{source}: no run in this directory (no metrics.jsonl); give a run or a sweep")
            run_dirs += found
        else:
            _read_table(path, tables, x=x, y=y, by=by)
    if run_dirs:
        _read_runs(run_dirs, study, tables, metric=metric, x=x)
    axes = sorted({table.axis for table in tables.values()})
    if len(axes) > 1:
        raise UserError(f"sources differ in their compute axis ({', '.join(axes)}); choose one with --x")
    for recipe in sorted(tables):
        table = tables[recipe]
        known = [value for value in table.sd if value is not None]
        sd = known if len(known) == len(table.sd) else None
        study.curves.append(
            make_curve(recipe, table.compute, table.reward, table.seed, sd, table.axis, table.metric, table.warnings)
        )
    if not study.curves:
        listed = ", ".join(str(source) for source in sources)
        reasons = f" ({study.warnings[0]})" if study.warnings else ""
        raise UserError(f"{listed}: no evaluations to fit{reasons}; wait for the first, or give another source")
    return study


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False


# --- tables -------------------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> list[list[str]]:
    """Header and rows of a CSV file; blank lines are no rows."""
    text = _text(path, "a CSV file with a header line")
    try:
        return [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if any(c.strip() for c in row)]
    except csv.Error as error:
        raise UserError(f"{path}: not a CSV file ({error}); check its quotes") from error


def _jsonl_rows(path: Path) -> list[list[str]]:
    """Header and rows of a file with a JSON object a line; the header is every key found, in order."""
    records: list[dict[str, Any]] = []
    # Not splitlines: it also cuts at separators that may stand inside a JSON string.
    for number, line in enumerate(_text(path, "a JSON object a line").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: line {number} is not JSON ({_short(str(error))}); repair or remove it") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; give one object a line")
        records.append(record)
    header = list(dict.fromkeys(key for record in records for key in record))
    return [header, *([_cell(record.get(key)) for key in header] for record in records)] if records else []


def _parquet_rows(path: Path) -> list[list[str]]:
    """Header and rows of a Parquet file."""
    import pandas  # slow to import, and only this format needs it

    try:
        frame = pandas.read_parquet(path)
    except Exception as error:  # whatever the reader makes of a damaged file
        raise UserError(f"{path}: not a readable Parquet file ({_short(str(error))})") from error
    columns = [[_cell(value) for value in frame.iloc[:, i].tolist()] for i in range(frame.shape[1])]
    return [[str(name) for name in frame.columns], *map(list, zip(*columns, strict=True))]


# By the file's ending; anything else is read as CSV.
READERS = {".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".parquet": _parquet_rows}


def _cell(value: object) -> str:
    """A value as a CSV file would hold it; what is no plain value can be no number either."""
    return "" if value is None else str(value)


def _text(path: Path, wanted: str) -> str:
    """A file's text."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give {wanted}") from error
    if "\0" in text:
        raise UserError(f"{path}: not a text file (it holds NUL bytes); give {wanted}")
    return text


def _read_table(path: Path, tables: dict[str, _Table], x: str | None, y: str | None, by: str | None) -> None:
    """Add the rows of a CSV, JSONL or Parquet file to the tables, by recipe."""
    rows = READERS.get(path.suffix.lower(), _csv_rows)(path)
    if not rows:
        raise UserError(f"{path}: the file is empty; give a table with columns and rows")
    header = [name.strip() for name in rows[0]]
    wanted = {"compute": x or "compute", "reward": y or "reward"}
    if by is not None:
        wanted["recipe"] = by
    missing = sorted({name for name in wanted.values() if name not in header})
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(_short(m) for m in missing)}; found {_short(', '.join(header))}; "
            "name them with --x, --y, --by"
        )
    used = dict(wanted)
    used.update((k, k) for k in ("recipe", "seed", "sd") if k not in wanted and k in header)
    twice = sorted({name for name in used.values() if header.count(name) > 1})
    if twice:
        raise UserError(f"{path}: column {', '.join(twice)} occurs more than once; rename one")
    if len(rows) == 1:
        raise UserError(f"{path}: a header and no rows; give a file with points")
    column = {key: header.index(name) for key, name in used.items()}
    ragged = [i for i, row in enumerate(rows) if len(row) <= max(column.values())]
    if ragged:
        raise UserError(f"{path}: {len(ragged)} rows have too few cells, first row {ragged[0]}; repair them")
    numbers: dict[str, list[float]] = {}
    for key in ("compute", "reward", "sd"):
        if key in column:
            numbers[key] = _numbers(path, used[key], [row[column[key]] for row in rows[1:]])
    for key in ("compute", "sd"):
        below = [i for i, value in enumerate(numbers.get(key, []), start=1) if value < 0]
        if below:
            raise UserError(
                f"{path}: column {used[key]} is negative in {len(below)} rows, first row {below[0]} "
                f"({numbers[key][below[0] - 1]:g}); it starts at 0"
            )
    for i, row in enumerate(rows[1:]):
        recipe = row[column["recipe"]].strip() if "recipe" in column else path.stem
        table = tables.setdefault(recipe, _Table(used["compute"], used["reward"]))
        if table.axis != used["compute"]:
            raise UserError(f"{path}: recipe {recipe!r} has another compute axis elsewhere ({table.axis})")
        table.compute.append(numbers["compute"][i])
        table.reward.append(numbers["reward"][i])
        table.sd.append(numbers["sd"][i] if "sd" in numbers else None)
        table.seed.append(row[column["seed"]].strip() if "seed" in column else "0")


def _numbers(path: Path, name: str, cells: Sequence[str]) -> list[float]:
    """A column as finite numbers; rows are counted from 1 below the header."""
    values, bad = [], []
    for i, cell in enumerate(cells, start=1):
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            bad.append(i)
        values.append(value)
    if bad:
        raise UserError(
            f"{path}: column {name} is not a finite number in {len(bad)} of {len(cells)} rows, "
            f"first row {bad[0]} ({_short(cells[bad[0] - 1])!r}); correct or remove them"
        )
    return values


def _short(text: str, limit: int = 120) -> str:
    """One printable line of bounded length, whatever the file held."""
    line = "".join(ch if ch.isprintable() else "?" for ch in text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


# --- journals -----------------------------------------------------------------------------------------------


def _read_runs(
    run_dirs: Sequence[Path], study: LoadedStudy, tables: dict[str, _Table], metric: str | None, x: str | None
) -> None:
    """Add the evaluations of runs to the tables, by recipe label."""
    for run_dir in dict.fromkeys(path.resolve() for path in run_dirs):
        try:
            study.runs.append(read_journal(run_dir))
        except JournalError as error:
            # One run that has not started, or a damaged file, must not hide the rest of a sweep.
            if len(run_dirs) == 1:
                raise
            study.warnings.append(str(error))
    usable = [view for view in study.runs if view.of_kind("eval")]
    study.warnings += [f"{v.path.parent}: no evaluation yet" for v in study.runs if not v.of_kind("eval")]
    if not usable:
        return
    axis = x or _default_axis(usable)
    name = metric or _default_metric(usable)
    labels = _seed_labels(usable)
    identities: dict[str, set[str]] = {}
    for view, seed in zip(usable, labels, strict=True):
        recipe = str(view.header.get("recipe", view.path.parent.name))
        identities.setdefault(recipe, set()).add(str(view.header.get("curve", "")))
        table = tables.setdefault(recipe, _Table(axis, name))
        if table.axis != axis:
            raise UserError(f"{view.path}: recipe {recipe!r} has another compute axis elsewhere; choose it with --x")
        if view.status == "failed":
            reason = f": {_short(str(view.reason))}" if view.reason else ""
            table.warnings.append(f"run {view.path.parent.name} (seed {seed}) failed{reason}; its points are used")
        for record in view.of_kind("eval"):
            table.compute.append(_metric(view, record, axis, "--x", ("compute/",)))
            table.reward.append(_metric(view, record, name, "--metric", ("eval/",)))
            table.sd.append(finite(record.metrics.get(f"{name}_se")))
            table.seed.append(seed)
    for recipe, curves in identities.items():
        if len(curves) > 1:
            tables[recipe].warnings.append(
                f"{len(curves)} different configurations share the label {recipe!r} and are fitted together"
            )


def _seed_labels(views: Sequence[JournalView]) -> list[str]:
    """A label per run: its seed, numbered where two different runs of a recipe share one."""
    known: dict[tuple[str, str], list[str]] = {}
    labels = []
    for view in views:
        seed = str(view.header.get("seed", "0"))
        runs = known.setdefault((str(view.header.get("recipe", view.path.parent.name)), seed), [])
        run = str(view.header.get("run", view.path))
        if run not in runs:
            runs.append(run)
        at = runs.index(run)
        labels.append(seed if at == 0 else f"{seed}#{at + 1}")
    return labels


def _default_axis(views: Sequence[JournalView]) -> str:
    """That of the device, or FLOPs where not every run has it."""
    on_gpu = all(str(view.header.get("device", "")).startswith("cuda") for view in views)
    for axis in (default_axis(on_gpu), FLOPS):
        if all(axis in record.metrics for view in views for record in view.of_kind("eval")):
            return axis
    found = sorted({k for v in views for r in v.of_kind("eval") for k in r.metrics if k.startswith("compute/")})
    raise UserError(
        f"{views[0].path}: the runs share none of the default compute axes; "
        f"found {_short(', '.join(found)) or 'none'}; choose one with --x"
    )


def _default_metric(views: Sequence[JournalView]) -> str:
    """The first evaluation set of the first run."""
    for name in views[0].of_kind("eval")[0].metrics:
        if name.startswith("eval/") and name.endswith("/pass_rate"):
            return name
    found = ", ".join(sorted(views[0].of_kind("eval")[0].metrics))
    raise UserError(f"{views[0].path}: no eval/<set>/pass_rate; found {_short(found) or 'none'}; choose with --metric")


def _metric(view: JournalView, record: Record, name: str, option: str, prefixes: tuple[str, ...]) -> float:
    value = finite(record.metrics.get(name))
    if value is None:
        found = ", ".join(sorted(k for k in record.metrics if k.startswith(prefixes)))
        raise UserError(
            f"{view.path}: {name} is missing or not a number in the evaluation at step {record.step}; "
            f"found {_short(found) or 'none'}; choose with {option}"
        )
    return value


def finite(value: object) -> float | None:
    """A finite number, or None for anything else a journal's line may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
