"""Value network: the body of a causal language model with a linear head that returns one number per token."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model.head import backbone, output_head
from lightning_scalerl.model.packed import token_states
from lightning_scalerl.rollouts.rollout import TrainBatch


class ValueModel(nn.Module):
    """Value network V(s_t), where the state s_t is the prompt and the completion before token t.

    Args:
        model: a causal language model; its body is copied, its head is not.
        precision: defines the type that the critic computes in; its weights are FP32.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        width = output_head(model).weight.shape[1]
        self.body = copy.deepcopy(backbone(model))
        self.head = nn.Linear(width, 1, device=output_head(model).weight.device)
        # Start from zeros, so that the first values do not depend on a seed.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.precision = precision

    def forward(self, batch: TrainBatch) -> Tensor:
        """Return values (R, T) in FP32, zero after a completion's end."""
        rollouts, width = batch.generator_logprobs.shape
        dtype = self.precision.value_dtype
        device = self.head.weight.device
        with torch.autocast(
            device.type, dtype=dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32
        ):
            column = torch.arange(width, device=device)
            is_token = column < (batch.lengths - batch.completion_start).unsqueeze(1)
            row = torch.arange(rollouts, device=device).unsqueeze(1).expand(-1, width)[is_token]
            # Take the state one position before token t, because V(s_t) must not depend on token t.
            position = (batch.completion_start.unsqueeze(1) - 1 + column)[is_token]
            values = self.head(token_states(self.body, batch, row, position)).squeeze(-1).float()
        return torch.zeros_like(batch.generator_logprobs).masked_scatter(is_token, values)
