"""Distinguish the kinds of sources: an MLflow experiment, a W&B project, a folder of runs, a journal, a file.

A command makes one `Place` per source that the user names. Loading, watching and the title of the report use the
`Place` instead of the path.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from pathlib import Path

from sweeps.errors import UserError
from sweeps.run.journal import JOURNAL_FILE, find_runs
from sweeps.source import (
    console,
    csv_logger,
    event_files,
    journals,
    mlflow_runs,
    trackio,
    trl,
    verl,
    wandb_local,
    wandb_project,
)
from sweeps.source.text import File, short

# Endings of console logs in a directory. A file named by the user may have any ending.
_CONSOLES = (".log", ".out", ".txt")


def is_console(file: File) -> bool:
    """Return whether a file is a console log that a reader knows. A file that cannot be read is not."""
    try:
        return verl.matches(file) or console.matches(file)
    except UserError:
        return False


class Kind(Enum):
    """Kinds of sources that a user can give."""

    EXPERIMENT = "mlflow:URI#experiment"
    PROJECT = "wandb:entity/project"
    FOLDER = "a directory"
    JOURNAL = "the journal of one of our runs"
    FILE = "a file for one of the readers"
    MISSING = "nothing that exists"


class Place:
    """One source as given by the user. Its content is inspected when first needed, and cached.

    Args:
        source: a path, `mlflow:URI#experiment` or `wandb:entity/project`.
    """

    def __init__(self, source: str | Path) -> None:
        self.text = str(source)
        self.path = Path(source)

    @cached_property
    def kind(self) -> Kind:
        """Kind of the source. An impossible file name counts as missing."""
        if mlflow_runs.matches_text(self.text):
            return Kind.EXPERIMENT
        if wandb_project.matches_text(self.text):
            return Kind.PROJECT
        try:
            if self.path.is_dir():
                return Kind.FOLDER
            if not self.path.exists():
                return Kind.MISSING
        except (OSError, ValueError):  # the name is too long, or contains a NUL
            return Kind.MISSING
        if self.path.name == JOURNAL_FILE and journals.is_journal(self.path):
            return Kind.JOURNAL
        return Kind.FILE

    @property
    def folder(self) -> Path | None:
        """Folder of a run or study, also if the source is the `metrics.jsonl` in it; None for any other source."""
        if self.kind is Kind.FOLDER:
            return self.path
        named_journal = self.path.name == JOURNAL_FILE and self.kind not in (Kind.EXPERIMENT, Kind.PROJECT)
        return Place(self.path.parent).folder if named_journal else None

    @cached_property
    def run_folders(self) -> list[Path]:
        """Folders in a directory that contain a `metrics.jsonl`, of our runs or of other frameworks, sorted."""
        return find_runs(self.path) if self.kind is Kind.FOLDER else []

    @cached_property
    def runs(self) -> list[Path]:
        """Folders of this project's runs."""
        if self.kind is Kind.JOURNAL:
            return [self.path.parent]
        return [run for run in self.run_folders if journals.is_journal(run / JOURNAL_FILE)]

    @cached_property
    def files(self) -> list[Path]:
        """Files for the readers: the source itself, or the files in a directory that a reader knows."""
        if self.kind is Kind.FILE:
            return [self.path]
        if self.kind is Kind.FOLDER and not self.run_folders:
            if self.wandb_logs or self.event_files:
                return []
            return [*csv_logger.log_files(self.path), *trackio.databases(self.path)] or self.collected
        return [run / JOURNAL_FILE for run in self.run_folders if run not in self.runs]

    @cached_property
    def collected(self) -> list[Path]:
        """Files found in a directory: the last state of each TRL run, else console logs.

        Unusable files are left out.
        """
        if self.kind is not Kind.FOLDER:
            return []
        return trl.last_states(self.path) or [
            path
            for path in sorted(self.path.rglob("*"))
            if path.suffix.lower() in _CONSOLES and path.is_file() and is_console(File(path))
        ]

    @cached_property
    def wandb_logs(self) -> list[Path]:
        """Logs in W&B's local folders, in a directory without this project's runs."""
        return wandb_local.run_files(self.path) if self.kind is Kind.FOLDER and not self.run_folders else []

    @cached_property
    def event_files(self) -> list[Path]:
        """TensorBoard's event files, in a directory without this project's runs and without logs of W&B."""
        if self.kind is not Kind.FOLDER or self.run_folders or self.wandb_logs:
            return []
        return event_files.event_files(self.path)

    @property
    def title(self) -> str:
        """Name for the study: that of the experiment, project, file or folder."""
        if self.kind is Kind.PROJECT:
            return self.text.rpartition("/")[2]
        return mlflow_runs.parts_of(self.text)[1] if self.kind is Kind.EXPERIMENT else self.path.resolve().stem

    @property
    def is_known(self) -> bool:
        """True if there is something to read: a file, or a directory with content that a reader knows."""
        if self.kind is Kind.FOLDER:
            return bool(self.run_folders or self.event_files or self.wandb_logs or self.files)
        return self.kind is not Kind.MISSING

    def check(self) -> None:
        """Check that there is something to read.

        Raises:
            UserError: nothing exists there, or a directory contains nothing that a reader knows.
        """
        if self.kind is Kind.MISSING:
            raise UserError(
                f"{short(self.text, 400)}: no such file or directory; give a run, a sweep, a table (CSV, JSONL, "
                "Parquet), a log, or mlflow:URI#experiment"
            )
        if not self.is_known:
            raise UserError(
                f"{self.path}: no run in this directory (no metrics.jsonl, no TensorBoard event file, no folder of "
                "W&B, no metrics.csv of Lightning, no database of Trackio, no trainer_state.json, no console log "
                f"{', '.join(f'*{ending}' for ending in _CONSOLES)}); give a run, a sweep or a file"
            )
