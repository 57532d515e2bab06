"""Generator that starts a server of vLLM of its own where it runs: an engine of several GPUs."""

from __future__ import annotations

import secrets
from typing import Any, ClassVar

from torch import nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.generator.vllm_engine import default_cache_gib
from lightning_scalerl.generator.vllm_generator import SCORING
from lightning_scalerl.generator.vllm_serve import serve
from lightning_scalerl.generator.vllm_server import VLLMServerGenerator


class VLLMServedGenerator(VLLMServerGenerator):
    """Generator that samples with a server of vLLM that it starts, and ends, on this node.

    Args:
        model: on the host, in the policy's type: its configuration and first weights are used, and then it is dropped.
        precision: types of the engine's weights and of its head.
        tensor_parallel: number of GPUs that share the model: those that this process sees, in their order.
        slots, max_prompt_tokens, max_new_tokens, cache_gib: as `VLLMGenerator` has them.
        settings: further arguments of `VLLMServerGenerator`.

    Raises:
        ConfigurationError: vLLM cannot be used here.
        CannotGoOnError: the server does not come up.
    """

    # The model stays off the GPUs, which are the server's.
    on_host: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        *,
        tensor_parallel: int,
        slots: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        cache_gib: float | None = None,
        **settings: Any,
    ) -> None:
        capacity = max_prompt_tokens + max_new_tokens + 1  # scoring samples one token behind what it is asked for
        token = secrets.token_hex(16)
        self._server = serve(
            model,
            precision,
            slots=slots + SCORING,
            capacity=capacity,
            cache_gib=cache_gib or default_cache_gib(model, precision.policy_dtype, slots, capacity),
            token=token,
            tensor_parallel=tensor_parallel,
        )
        settings |= {"slots": slots, "max_prompt_tokens": max_prompt_tokens, "max_new_tokens": max_new_tokens}
        try:
            super().__init__(model, precision, address=self._server.address, token=token, **settings)
        except BaseException:
            self._server.close()
            raise

    def close(self) -> None:
        """End the server; what was in flight is kept for `state_dict`."""
        try:
            super().close()
        finally:
            self._server.close()
