"""Base class of callbacks that receive a run's records."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from lightning.pytorch import Callback


class Recorder(Callback):
    """Callback that receives every record of a run; with several ranks only rank 0's is called."""

    @abstractmethod
    def on_record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Take one record: `kind` is "train" or "eval", `step` counts completed optimizer steps."""
