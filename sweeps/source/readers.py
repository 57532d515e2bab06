"""Registry of file readers, in the order in which they are tried. The first whose `matches` is true reads the file.

To add a format, write a module with `matches` and `read`, and add a line here. A reader decides by content before name,
and leaves files that it does not know to the next one. The last, `table`, takes all remaining files. This project's
runs, directories of event files, W&B projects and MLflow are not files: `load` handles them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sweeps.source import (
    console,
    csv_logger,
    event_files,
    foreign,
    table,
    trackio,
    trl,
    verl,
    wandb_export,
    wandb_local,
    wide,
)
from sweeps.source.collected import Collected
from sweeps.source.text import File


class Reader(Protocol):
    """The two functions that a reader's module has."""

    def matches(self, file: File, into: Collected, /) -> bool:
        """Return whether this reader reads the file; raise UserError for a damaged file of its format."""

    def read(self, file: File, into: Collected, /) -> None:
        """Add the file's points to the collected curves; raise UserError if it has none."""


READERS: Sequence[Reader] = (
    foreign,
    event_files,
    wandb_local,
    trackio,
    csv_logger,
    trl,
    verl,
    console,
    wandb_export,
    wide,
    table,
)
