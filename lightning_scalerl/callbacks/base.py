"""Base class of callbacks that receive a run's records, and a filter that drops Lightning's tips from the log."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping

from lightning.pytorch import Callback


class Recorder(Callback):
    """Callback that receives every record of a run, on rank 0 only."""

    @abstractmethod
    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Receive one record; `kind` is "train" or "eval", `step` is the number of completed optimizer steps."""


def without_tips() -> None:
    """Filter Lightning's advice to install litlogger and litmodels out of its log, from now on.

    A Trainer logs the first tip in its constructor, possibly before the module is constructed. So the constructors of
    our callbacks, which come before the Trainer's, call this function as well.
    """
    # `lightning` and `pytorch_lightning` log through one logger, that of the package imported last: filter both.
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(is_no_tip)


def is_no_tip(record: logging.LogRecord) -> bool:
    """Return False for the two messages to drop."""
    return not re.search(r"Tip: For seamless .*\[lit(logger|models)\]", record.getMessage())
