"""Servers that several connectors share out among themselves, one each."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

from lightning_scalerl.generator.vllm.client import VLLMServerGenerator


class Claimed(VLLMServerGenerator):
    """Connector to the first of these servers that no other process is connected to.

    The claim is a lock on a file, which the kernel gives back with the process. Weights go to servers in turns by file
    and over HTTP.
    """

    def __init__(self, model: Any, precision: Any, *, addresses: list[str], folder: str, **given: Any) -> None:
        while True:
            for number, address in enumerate(addresses):
                self._claim = (Path(folder) / f"claim-{number}").open("a")
                try:
                    fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                super().__init__(model, precision, address=address, transfer=("file", "http")[number % 2], **given)
                return
            time.sleep(0.1)
