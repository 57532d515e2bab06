"""Loading of all sources of a study into one set of curves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from sweeps.errors import UserError
from sweeps.run.journal import JOURNAL_FILE, JournalView, find_runs, read_journal
from sweeps.source import event_files, journals, mlflow_runs
from sweeps.source.collected import Asked, Collected, LoadedStudy
from sweeps.source.readers import READERS
from sweeps.source.text import File, short
from sweeps.terminal import counted


def load(
    sources: Sequence[str | Path],
    metric: str | None = None,
    x: str | None = None,
    y: str | None = None,
    by: str | None = None,
    factors: Sequence[str] = (),
    seed_from: str | None = None,
    read: Callable[[Path], JournalView] = read_journal,
) -> LoadedStudy:
    """Read runs, sweeps, tables, logs of other frameworks and MLflow experiments into one curve per recipe, by label.

    What is known of each format stands in its reader and in docs/reference/sources.md. Nothing is guessed in silence:
    every column that was chosen is in the study's `mapping`, and where several could be meant it is an error.

    Args:
        sources: paths and `mlflow:URI#experiment`; they may be mixed if they share the compute axis.
        metric: reward of journals, `eval/<set>/pass_rate` (the first set if not given), and without journals that of
            tables and logs too; `all` gives a curve for every evaluation set, with the factor `set`.
        x: compute: a column of a table (default `compute`), a metric of a journal or log.
        y: reward column of a table (default `reward`) or log.
        by: recipe column of a table or log (default `recipe`), tag or parameter in MLflow; without one the name of
            the file or run is the recipe.
        factors: what else groups the points: columns, fields of a journal's header or dotted keys of its
            configuration, tags or parameters. A curve's label is then `<recipe> <name>=<value>`.
        seed_from: a regular expression with one group for seeds hidden in the names of other people's runs: what it
            matches leaves the recipe's name, and what its group matches is the seed.
        read: what reads a journal: one that remembers, for whoever loads the same sources again and again.

    Raises:
        UserError: a source is missing or unusable, the pattern is no pattern, or two sources do not share an axis.
    """
    run_dirs: list[Path] = []
    files: list[File | tuple[Path, list[Path]] | str] = []
    for source in sources:
        if mlflow_runs.matches_text(str(source)):
            files.append(str(source))
        else:
            _find(Path(source), run_dirs, files)
    study = LoadedStudy()
    named = y if y is not None or run_dirs else metric
    into = Collected(Asked(metric, x, named, by, tuple(dict.fromkeys(factors)), _pattern(seed_from)), study)
    known: set[object] = set()
    for file in files:
        key = file if isinstance(file, str) else (file.path if isinstance(file, File) else file[0]).resolve()
        if key in known:
            study.warnings.append(f"{key}: given twice, read once")
            continue
        known.add(key)
        if isinstance(file, str):
            mlflow_runs.read_experiment(file, into)
        elif isinstance(file, tuple):
            event_files.read_directory(*file, into)
        else:
            _read(file, into)
    if run_dirs:
        journals.read_runs(run_dirs, into, read)
    study.curves = into.curves()
    if not study.curves:
        listed = ", ".join(str(source) for source in sources)
        reasons = f" ({study.warnings[0]})" if study.warnings else ""
        raise UserError(f"{listed}: no evaluations to fit{reasons}; wait for the first, or give another source")
    return study


def _read(file: File, into: Collected) -> None:
    """Read a file by the first reader that matches it, and add a warning about dropped text."""
    try:
        next(reader for reader in READERS if reader.matches(file, into)).read(file, into)
    except UserError as error:
        if file.damage is None:
            raise
        raise UserError(f"{error} ({file.damage})") from error
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


def _find(path: Path, run_dirs: list[Path], files: list[File | tuple[Path, list[Path]] | str]) -> None:
    """Add what a path holds to `run_dirs` or `files`: our runs, event files, or one file for a reader."""
    if not _exists(path):
        raise UserError(
            f"{short(str(path), 400)}: no such file or directory; give a run, a sweep, a table (CSV, JSONL, Parquet), "
            "a log, or mlflow:URI#experiment"
        )
    if not path.is_dir():
        if path.name == JOURNAL_FILE and journals.is_journal(path):
            run_dirs.append(path.parent)
        else:
            files.append(File(path))
        return
    found = find_runs(path)
    ours = [run for run in found if journals.is_journal(run / JOURNAL_FILE)]
    run_dirs += ours
    files += [File(run / JOURNAL_FILE) for run in found if run not in ours]
    if not found:
        events = event_files.event_files(path)
        if not events:
            raise UserError(
                f"{path}: no run in this directory (no metrics.jsonl, no TensorBoard event file); "
                "give a run, a sweep or a file"
            )
        files.append((path, events))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL in it
        return False
