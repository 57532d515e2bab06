"""Counting FLOPs: two a weight and token forward, and attention over the tokens it can see.

Useful work only: padding is not counted, so the number does not depend on how a batch was cut. A training token
costs three forward passes (forward, and twice that for the backward).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of one forward pass: `per_token` * tokens + `per_context` * (tokens attended to, summed over tokens).

    `head` is the part of `per_token` that the language-model head costs; it is not spent on prompt tokens.
    """

    per_token: float
    head: float
    per_context: float

    @classmethod
    def of(cls, model: nn.Module) -> FlopModel:
        """Count the linear layers of a dense transformer."""
        config: Any = model.config
        linear = sum(2.0 * module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        output = model.get_output_embeddings()  # type: ignore[operator]
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        # q k^T and the weighted sum of v: 2 FLOPs each a head dimension, head, layer and token attended to.
        per_context = 4.0 * heads * head_size * config.num_hidden_layers
        return cls(per_token=linear, head=2.0 * output.weight.numel(), per_context=per_context)

    def prefill(self, tokens: int, context: int) -> float:
        """Prompt tokens: everything but the head."""
        return (self.per_token - self.head) * tokens + self.per_context * context

    def decode(self, tokens: int, context: int) -> float:
        """Completion tokens, one forward pass each."""
        return self.per_token * tokens + self.per_context * context

    def train(self, lengths: list[int], prompt_lengths: list[int]) -> float:
        """Forward and backward over whole sequences; the head on completion tokens only."""
        tokens = sum(length - 1 for length in lengths)
        context = sum((length - 1) * length // 2 for length in lengths)
        completion = sum(length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True))
        forward = (self.per_token - self.head) * tokens + self.head * completion + self.per_context * context
        return 3.0 * forward
