"""Weights as a worker of vLLM's server gets them: in buckets, from a file on a shared path or over HTTP.

vLLM brings no such engine for a CPU, and none that needs neither a GPU nor a common disk. `weights` is the other
side. A bucket is a file in safetensors' format, on a path or at an address, that names what it holds.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from lightning_scalerl.generator.vllm.engine import after_reload, before_reload


@dataclass
class ScaleRLInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Trial of a way before it is used.

    Attributes:
        path, content: a file that this worker must be able to read, and what is in it; empty over HTTP.
        url, key: an address that must give `content` to whoever has the key; empty for files.
        timeout_s: longest wait for an answer, or for the next bytes of one.
    """

    path: str = ""
    content: str = ""
    url: str = ""
    key: str = ""
    timeout_s: float = 60.0


@dataclass
class ScaleRLUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A bucket of weights: where it is. With neither, the update under way is given up."""

    path: str = ""
    url: str = ""


class ScaleRLWeightTransferEngine(WeightTransferEngine[ScaleRLInitInfo, ScaleRLUpdateInfo]):  # type: ignore[misc]
    """Engine that loads buckets in checkpoint format, layer by layer, as vLLM's own engines for GPUs do."""

    init_info_cls = ScaleRLInitInfo
    update_info_cls = ScaleRLUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._from = ScaleRLInitInfo()
        self._open = False

    def init_transfer_engine(self, init_info: ScaleRLInitInfo) -> None:
        """Try whether the bytes of the trainer reach this worker.

        Raises:
            ValueError: they do not; the trainer then tries another way.
        """
        self._from = init_info
        try:
            content = Path(init_info.path).read_bytes() if init_info.path else self._fetched(init_info.url)
        except OSError as error:
            raise ValueError(f"the trainer's weights cannot be read ({error})") from error
        if content != init_info.content.encode():
            raise ValueError(f"{init_info.path or init_info.url} has not what the trainer has written")

    def start_weight_update(self) -> None:
        """Prepare all layers for new weights; what an update that was given up has left is dropped."""
        if self._open:
            # Layers count the weights they have got: half of an old update would end the new one too early.
            finalize_layerwise_reload(self.model, self.model_config)
        self._open = True
        before_reload(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket; without the synchronization of the base class, which a machine without a GPU refuses."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ScaleRLUpdateInfo) -> None:
        """Read one bucket and load it into the model."""
        if update_info.path:
            tensors = load_file(update_info.path)
        elif update_info.url:
            tensors = load(self._fetched(update_info.url))
        else:
            raise RuntimeError("the weight update is given up")
        self.model.load_weights(iter(tensors.items()))

    def finish_weight_update(self) -> None:
        """Finish all layers, those that vLLM forgets on a CPU included."""
        finalize_layerwise_reload(self.model, self.model_config)
        after_reload(self.model)
        self._open = False

    def shutdown(self) -> None:
        """Nothing is kept open between buckets."""

    def _fetched(self, url: str) -> bytes:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._from.key}"})
        # No proxy: the trainer's address is within the cluster, whatever the environment says of the way out.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self._from.timeout_s) as answer:
            body: bytes = answer.read()
        return body
