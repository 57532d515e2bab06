"""The readers of files, in the order they are asked: the first whose `matches` says yes reads the file.

Another format is a module with `matches` and `read`, and one line here. A reader decides by content before the
name, and leaves to the next what it does not know; `table` takes the rest. Runs of ours, directories of event files
and MLflow are no files, and `load` tells them apart itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sweeps.source import event_files, foreign, table, trl, verl, wandb_export, wide
from sweeps.source.collected import Collected
from sweeps.source.text import File


class Reader(Protocol):
    """What a reader's module offers."""

    def matches(self, file: File, into: Collected, /) -> bool:
        """Whether the file is this reader's. Raises UserError for a damaged file that can be nobody else's."""

    def read(self, file: File, into: Collected, /) -> None:
        """Add the file's points. Raises UserError."""


READERS: Sequence[Reader] = (
    foreign,
    event_files,
    trl,
    verl,
    wandb_export,
    wide,
    table,
)
