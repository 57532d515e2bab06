"""Receives weights in a worker of vLLM's server: buckets from a file on a shared path or over HTTP.

vLLM has no weight-transfer engine for CPUs, and none that works without a GPU or a shared disk. `weights` is the
sending side. A bucket is in safetensors format, at a path or a URL; its header names its tensors.
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
    """Settings of a transfer method, and a text that tests whether it works.

    Attributes:
        path: a file that this worker must be able to read; empty over HTTP.
        content: the expected content of the file, or of the answer over HTTP.
        url, key: a URL that must return `content` to a request with the key; empty for files.
        timeout_s: longest wait for an answer, or for its next bytes, in seconds.
    """

    path: str = ""
    content: str = ""
    url: str = ""
    key: str = ""
    timeout_s: float = 60.0


@dataclass
class ScaleRLUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Location of a bucket of weights: a path or an address. If both are empty, the current update is aborted."""

    path: str = ""
    url: str = ""


class ScaleRLWeightTransferEngine(WeightTransferEngine[ScaleRLInitInfo, ScaleRLUpdateInfo]):  # type: ignore[misc]
    """Weight-transfer engine that loads buckets in checkpoint format, layer by layer, as vLLM's GPU engines do."""

    init_info_cls = ScaleRLInitInfo
    update_info_cls = ScaleRLUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._init_info = ScaleRLInitInfo()
        self._open = False

    def init_transfer_engine(self, init_info: ScaleRLInitInfo) -> None:
        """Test whether the trainer's bytes reach this worker.

        Raises:
            ValueError: the bytes do not arrive; the trainer then tries another method.
        """
        self._init_info = init_info
        try:
            content = Path(init_info.path).read_bytes() if init_info.path else self._fetch(init_info.url)
        except OSError as error:
            raise ValueError(f"the trainer's weights cannot be read ({error})") from error
        if content != init_info.content.encode():
            raise ValueError(f"{init_info.path or init_info.url} has not what the trainer has written")

    def start_weight_update(self) -> None:
        """Prepare all layers for new weights, and discard an update that was not finished."""
        if self._open:
            # Layers count the weights they have received: leftovers of an old update would end the new one too early.
            finalize_layerwise_reload(self.model, self.model_config)
        self._open = True
        before_reload(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket, without the base class's synchronization, which fails on a machine without a GPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ScaleRLUpdateInfo) -> None:
        """Read one bucket and load it into the model."""
        if update_info.path:
            tensors = load_file(update_info.path)
        elif update_info.url:
            tensors = load(self._fetch(update_info.url))
        else:
            raise RuntimeError("the weight update is given up")
        self.model.load_weights(iter(tensors.items()))

    def finish_weight_update(self) -> None:
        """Finish all layers, including those that vLLM does not repack on a CPU (`after_reload`)."""
        finalize_layerwise_reload(self.model, self.model_config)
        after_reload(self.model)
        self._open = False

    def shutdown(self) -> None:
        """Do nothing: no file or connection stays open between buckets."""

    def _fetch(self, url: str) -> bytes:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._init_info.key}"})
        # Ignore proxy settings of the environment: the trainer is inside the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=self._init_info.timeout_s) as answer:
            body: bytes = answer.read()
        return body
