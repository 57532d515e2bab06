"""Load all sources of a study into one set of curves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.run.journal import JournalView, read_journal
from sweeps.source import (
    console,
    event_files,
    journals,
    mlflow_runs,
    table,
    trl,
    verl,
    wandb_export,
    wandb_local,
    wandb_project,
    wide,
)
from sweeps.source.collected import Collected, LoadedStudy, Request
from sweeps.source.console import TABLE_ENDINGS
from sweeps.source.places import Kind, Place
from sweeps.source.readers import READERS
from sweeps.source.run_names import seed_in_name
from sweeps.source.table import NoTableError
from sweeps.source.text import File, encodable
from sweeps.terminal import counted

# Readers of text files, for the error message on a file that none of them can read.
_TEXT_READERS = (trl, verl, console, wandb_export, wide, table)
# A source that is not one of this project's runs: a key that identifies it, to detect duplicates, and the function that
# adds its points.
_Reading = tuple[str | Path, Callable[[Collected], None]]


def load(
    sources: Sequence[str | Path],
    metric: str | None = None,
    x: str | None = None,
    y: str | None = None,
    by: str | None = None,
    factors: Sequence[str] = (),
    seed_from: str | None = None,
    read: Callable[[Path], JournalView] = read_journal,
    bounds: tuple[float, float] | None = None,
    lower_is_better: bool = False,
    factor_options: Mapping[str, str] | None = None,
) -> LoadedStudy:
    """Read runs, studies, tables, logs of other frameworks, W&B and MLflow into one curve per recipe, sorted by label.

    The formats are described in the readers and in docs/reference/sources.md. Nothing is guessed silently: every chosen
    column is listed in the study's `mapping`, and an ambiguous column is an error.

    Args:
        sources: paths, `mlflow:URI#experiment` or `wandb:entity/project`; they may be mixed if they share the compute
            axis.
        metric: metric that is the reward in journals, `eval/<set>/pass_rate` (default: of the first set). Without
            journals, it is also the reward of tables and logs. `all` gives one curve per evaluation set, with the
            factor `set`.
        x: compute: a column of a table (default `compute`), or a metric of a journal or log.
        y: reward column of a table (default `reward`) or log.
        by: recipe column of a table or log (default `recipe`), or a tag or parameter in MLflow; without one, the name
            of the file or run is the recipe.
        factors: further grouping of the points: columns, fields of a journal's header, dotted keys of its
            configuration, tags or parameters. A curve's label is then `<recipe> <name>=<value>`.
        seed_from: regular expression with one group, for names of other trainers' runs that contain the seed: its group
            is the seed, and its match is removed from the recipe's name.
        read: function that reads a journal; pass one with a cache to load the same sources repeatedly.
        bounds: lowest and highest possible value of the metric in the sources; None to infer them. Pass rates of
            journals keep the bounds 0 and 1.
        lower_is_better: whether the metric is a loss or an error rate. If so, rewards are minus the metric.
        factor_options: option of the command line that named a factor, for messages, by factor; `--group` for others.

    Raises:
        UserError: a source is missing or unusable, the pattern is invalid, two sources have different axes, or a
            metric is outside its bounds.
    """
    if bounds is not None:
        bounds = check_bounds(bounds)
    run_dirs: list[Path] = []
    readings: list[_Reading] = []
    files: list[Path] = []
    for source in sources:
        place = Place(source)
        place.check()
        run_dirs += place.runs
        files += place.files
        readings += readings_of(place, _read)
    study = LoadedStudy()
    request = Request(
        metric=metric,
        x=x,
        y=y if y is not None or run_dirs else metric,
        by=by,
        factors=tuple(dict.fromkeys(factors)),
        seed_from=_pattern(seed_from),
        bounds=bounds,
        lower_is_better=lower_is_better,
        factor_options=factor_options or {},
    )
    into = Collected(request, study, _distinct_names(files, request))
    known: set[str | Path] = set()
    for key, add in readings:
        if key in known:
            study.warnings.append(f"{key}: given twice, read once")
            continue
        known.add(key)
        add(into)
    if run_dirs:
        journals.read_runs(run_dirs, into, read)
    study.curves = into.curves()
    if not study.curves:
        listed = ", ".join(str(source) for source in sources)
        reasons = f" ({study.warnings[0]})" if study.warnings else ""
        raise UserError(f"{listed}: no evaluations to fit{reasons}; wait for the first, or give another source")
    return study


def check_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    """Check the bounds of a reward and return them as a pair.

    Raises:
        UserError: the bounds are not two finite numbers in increasing order.
    """
    values = tuple(bounds)
    if len(values) != 2 or not all(math.isfinite(value) for value in values) or not values[0] < values[1]:
        listed = " ".join(f"{value:g}" for value in values)
        raise UserError(f"--bounds {listed}: must be two numbers, the lowest possible reward before the highest: 0 1")
    return float(values[0]), float(values[1])


def _distinct_names(paths: Sequence[Path], request: Request) -> dict[Path, str]:
    """Return distinct names for files of the same name in different folders, by resolved path.

    A name has as many folders as it takes: `grpo/curve` and `dapo/curve`. Seeds in names are ignored when files of the
    same name are searched, so that all seeds of a recipe get the same folders.
    """
    groups: dict[str, dict[Path, Path]] = {}
    for path in paths:
        file = File(path)
        if not file.is_named_by_folder:
            hidden = seed_in_name(file.run_name)
            rest = hidden[0] if hidden is not None else file.run_name
            key = rest if request.seed_from is None else request.split_seed(file.run_name)[0]
            # Use the path as given, because links may lead to files with meaningless names.
            groups.setdefault(key, {}).setdefault(path.resolve(), path.absolute())
    names: dict[Path, str] = {}
    for group in groups.values():
        if len({File(path).run_name for path in group.values()}) < len(group):
            names.update(zip(group, _shortest_names(list(group.values())), strict=True))
    return names


def _shortest_names(paths: Sequence[Path]) -> list[str]:
    """Return distinct names of files: the ends of their paths, with the same number of folders for all."""
    # Files in one folder differ only in their endings, such as `grpo.csv` and `grpo.jsonl`.
    for ends in ([File(path).stem for path in paths], [path.name for path in paths]):
        parts = [[*path.parts[1:-1], end] for path, end in zip(paths, ends, strict=True)]
        for count in range(1, max(map(len, parts)) + 1):
            names = [encodable("/".join(part[-count:])) for part in parts]
            if len(set(names)) == len(names):
                return names
    return [encodable(str(path)) for path in paths]


def readings_of(place: Place, read: Callable[[File, Any], None]) -> list[_Reading]:
    """Return functions that read everything in a place except this project's runs. `read` reads one file."""
    if place.kind is Kind.EXPERIMENT:
        return [(place.text, partial(mlflow_runs.read_experiment, place.text))]
    if place.kind is Kind.PROJECT:
        return [(place.text, partial(wandb_project.read_project, place.text))]
    if place.wandb_logs:
        where = str(place.path)
        return [(place.path.resolve(), partial(wandb_local.read_all, place.wandb_logs, where))]
    if place.event_files:
        return [(place.path.resolve(), partial(event_files.read_directory, place.path, place.event_files))]
    if place.files and place.files == place.collected:
        return [(place.path.resolve(), partial(_read_files, place.files, read))]
    return [(path.resolve(), partial(read, File(path))) for path in place.files]


def _read_files(paths: Sequence[Path], read: Callable[[File, Any], None], into: Collected) -> None:
    """Read the files of a directory one by one. Unusable files are left out with a warning.

    Raises:
        UserError: no file is usable. It is the error of the first file.
    """
    errors: list[UserError] = []
    for path in paths:
        try:
            read(File(path), into)
        except UserError as error:
            errors.append(error)
    if len(errors) == len(paths):
        raise errors[0]
    into.study.warnings += [f"left out: {error}" for error in errors]


def _read(file: File, into: Collected) -> None:
    """Read a file by the first reader that matches it, and warn of damaged parts that were left out."""
    try:
        next(reader for reader in READERS if reader.matches(file, into)).read(file, into)
    except UserError as error:
        # A file with the ending of a table is meant as a table: do not list the other formats that were tried.
        no_table = isinstance(error, NoTableError) and file.suffix not in TABLE_ENDINGS
        tried = f"; it was tried as: {', '.join(reader.NAME for reader in _TEXT_READERS)}" if no_table else ""
        damage = f" ({file.damage})" if file.damage is not None else ""
        if not tried + damage:
            raise
        raise UserError(f"{error}{tried}{damage}") from error
    if file.damage is not None:
        into.study.warnings.append(f"{file.path}: {file.damage}")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UserError(f"--seed-from {text!r}: {error}; give a regular expression such as 'ppo-s(\\d+)'") from error
    if pattern.groups != 1:
        raise UserError(
            f"--seed-from {text!r}: has {counted(pattern.groups, 'group')}; put what is the seed in one: 'ppo-s(\\d+)'"
        )
    return pattern
