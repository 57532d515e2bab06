"""Connector for tests in which several processes share a list of servers, one server each."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

from lightning_scalerl.generator.vllm.client import VLLMServerGenerator


class Claimed(VLLMServerGenerator):
    """Connects to the first server of `addresses` that no other process uses.

    The claim is a lock on a file, which the kernel releases when the process ends. Servers with an even number get
    weights as files, the others over HTTP.
    """

    def __init__(self, model: Any, precision: Any, *, addresses: list[str], folder: str, **options: Any) -> None:
        while True:
            for number, address in enumerate(addresses):
                self._claim = (Path(folder) / f"claim-{number}").open("a")
                try:
                    fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                super().__init__(model, precision, address=address, transfer=("file", "http")[number % 2], **options)
                return
            time.sleep(0.1)
