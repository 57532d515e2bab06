"""Base class of callbacks that get a run's records, and a filter that removes Lightning's tips from the log."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping

from lightning.pytorch import Callback


class Recorder(Callback):
    """Callback that gets every record of a run, on rank 0 only."""

    @abstractmethod
    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Handle one record. `kind` is "train" or "eval", `step` the number of completed optimizer steps."""


def filter_lightning_tips() -> None:
    """Remove Lightning's advice to install litlogger and litmodels from its log, from now on.

    A Trainer logs the first tip in its constructor, perhaps before our module exists. So our callbacks, which are
    constructed before the Trainer, call this function too.
    """
    # `lightning` and `pytorch_lightning` share one logger, that of the package imported last, so filter both.
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(is_no_tip)


def is_no_tip(record: logging.LogRecord) -> bool:
    """Return False for the two messages to drop."""
    return not re.search(r"Tip: For seamless .*\[lit(logger|models)\]", record.getMessage())
