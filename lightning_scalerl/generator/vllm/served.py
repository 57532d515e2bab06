"""Generators that sample with a vLLM server: one that they start, or one that announces its address in a file."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.base import SamplingSettings
from lightning_scalerl.generator.vllm.announced import Announcement
from lightning_scalerl.generator.vllm.client import VLLMServerGenerator
from lightning_scalerl.generator.vllm.engine import default_cache_gib
from lightning_scalerl.generator.vllm.generator import SCORING
from lightning_scalerl.generator.vllm.serve import serve, serve_on


class VLLMServedGenerator(VLLMServerGenerator):
    """Generator that samples with a vLLM server that it starts and ends.

    Args:
        model: a model in host memory, in the policy's dtype. Its configuration and initial weights are used; no
            reference to it is kept.
        precision: dtypes of the engine's weights and of its head.
        tensor_parallel: number of GPUs that share the model: the first GPUs that the server sees.
        node: node of this SLURM job on which the server runs as a step; empty for this node.
        gpus: numbers of the GPUs to use, among those that the step sees; empty for all.
        start_s: seconds that the server may take to start.
        sampling, slots, cache_gib: as for `VLLMGenerator`.
        settings: further arguments of `VLLMServerGenerator`.

    Raises:
        ConfigurationError: vLLM cannot be used here.
        CannotGoOnError: the server does not start.
    """

    # Keep the model in host memory: the server needs the GPUs.
    on_host: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        sampling: SamplingSettings,
        *,
        tensor_parallel: int,
        node: str = "",
        gpus: str = "",
        start_s: float = 600.0,
        slots: int,
        cache_gib: float | None = None,
        **settings: Any,
    ) -> None:
        capacity = sampling.capacity + 1  # scoring samples one token after the sequence
        token = secrets.token_hex(16)
        options: dict[str, Any] = {
            "slots": slots + SCORING,
            "capacity": capacity,
            "cache_gib": cache_gib or default_cache_gib(model, precision.policy_dtype, slots, capacity),
            "token": token,
            "tensor_parallel": tensor_parallel,
            "start_s": start_s,
        }
        if node:
            self._server = serve_on(node, model, precision, gpus=gpus, **options)
        else:
            self._server = serve(model, precision, **options)
        try:
            super().__init__(
                model, precision, sampling, address=self._server.address, token=token, slots=slots, **settings
            )
        except BaseException:
            self._server.close()
            raise

    def close(self) -> None:
        """End the server; everything in flight is kept for `state_dict`."""
        try:
            super().close()
        finally:
            self._server.close()


class VLLMAnnouncedGenerator(VLLMServerGenerator):
    """Generator that samples with the vLLM server that an announcement file names at construction time.

    Args:
        model: a model in host memory; its configuration and initial weights are used.
        precision: dtypes of the engine's weights and of its head.
        path: path of the file written by `serve --announce`.
        start_s: seconds that a server may take to announce itself and to answer.
        settings: further arguments of `VLLMServerGenerator`.

    Raises:
        ConfigurationError: the file is not an announcement, or not owned by this user alone.
        CannotGoOnError: no server answers in time.
    """

    on_host: ClassVar[bool] = True

    def __init__(self, model: nn.Module, precision: Precision, *, path: str, start_s: float, **settings: Any) -> None:
        began = time.monotonic()
        address, token = Announcement(Path(path)).find(start_s)
        left_s = max(1.0, start_s - (time.monotonic() - began))
        super().__init__(model, precision, address=address, token=token, away_s=left_s, **settings)
