"""AdamW of torchao, whose moments are 8-bit numbers with one scale per block of 256 values."""

from __future__ import annotations

from typing import Any

import torch
from torchao.optim import AdamW8bit as TorchAOAdamW8bit


class EagerAdamW8bit(TorchAOAdamW8bit):  # type: ignore[misc]  # torchao has no types
    """torchao's AdamW8bit, run without torch.compile, and with learning rates that are plain numbers.

    A compiled step would need a compiler where the run is, and its rounding would depend on that compiler. Schedules,
    callbacks and checkpoints expect plain numbers, and torchao's step expects tensors.

    Source: arXiv 2110.02861 (block-wise dynamic quantization); torchao 0.18, `optim/adam.py`.
    """

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._plain_rates()

    def _plain_rates(self) -> None:
        for group in self.param_groups:
            group["lr"] = float(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; parameters without a gradient keep weights and moments."""
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        with torch.compiler.set_stance("force_eager"):
            loss = super().step(closure)
        self._plain_rates()
        return loss
