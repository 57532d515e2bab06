"""Base class of callbacks that receive a run's records, and the filter of Lightning's tips."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping

from lightning.pytorch import Callback


class Recorder(Callback):
    """Callback that receives every record of a run; with several ranks only rank 0's is called."""

    @abstractmethod
    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Take one record: `kind` is "train" or "eval", `step` counts completed optimizer steps."""


def without_tips() -> None:
    """Drop Lightning's advice to install litlogger and litmodels from what it logs, from now on.

    A Trainer logs the first of them when it is made. The module may be made later, but callbacks are made before it.
    """
    # Both packages log by the logger of the one that was imported last.
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(f"{package}.utilities.rank_zero").addFilter(is_no_tip)


def is_no_tip(record: logging.LogRecord) -> bool:
    """Return False for the two messages that are dropped."""
    return not re.search(r"Tip: For seamless .*\[lit(logger|models)\]", record.getMessage())
