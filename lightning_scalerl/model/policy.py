"""Policy of a run: any causal language model of transformers, its log-probabilities, and its head's precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model.chunked_head import chunked_scores
from lightning_scalerl.model.head import (
    backbone,
    head_weights,
    local_weights,
    output_head,
    scaling_of,
    scores_in_parts,
    token_scores,
)
from lightning_scalerl.model.packed import token_states
from lightning_scalerl.model.shared_prompt import shares_prompts, worthwhile
from lightning_scalerl.model.shared_prompt import states as completion_states
from lightning_scalerl.rollout import TrainBatch
from sweeps.run.activity import activity

# Above this many logits (tokens x vocabulary) the head works in chunks (`chunked_head`). 2^27 FP32 logits are 0.5 GB.
MAX_LOGITS = 2**27


class Policy(nn.Module):
    """A causal language model that returns log-probabilities of given tokens.

    Args:
        model: a causal language model of transformers; its weights stay FP32.
        precision: types of the forward pass (autocast) and of the head.
        temperature: that of sampling; with another one the importance ratio would not start at 1.
    """

    def __init__(self, model: nn.Module, precision: Precision, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.temperature = temperature
        # Meaning of the model's adapter: a choice's semantics, or `adapter.described` of one that it came with.
        self.adapter: Mapping[str, Any] | None = None
        # Whether rows go through the model packed (`model.packed`): it is asked to, and can (`session.models`).
        self.packs = False
        # Whether its model has been run on a few tokens (`session.trials`).
        self.tried = False
        self._shares: bool | None = None
        # Ranks that share a sharded policy gather its layers in lockstep, and agree on each pass's way through them.
        self.agree: Callable[[bool], bool] | None = None

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        """Return the policy type's autocast on this policy's device; a null context for FP32."""
        device = next(self.model.parameters()).device.type
        dtype = precision.policy_dtype
        if dtype == torch.float32:
            return nullcontext()
        # The cache keeps the 16-bit copies of all weights to the end of the pass. Where layers are whole, or have
        # activations, for a moment only, that would be most of the memory, and no layer is used twice.
        momentary = self.agree is not None or any(
            getattr(part, "gradient_checkpointing", False) for part in self.modules()
        )
        return torch.autocast(device, dtype=dtype, cache_enabled=not momentary)

    @property
    def shares_prompts(self) -> bool:
        """Return whether a prompt goes through the model once for all of its completions.

        Not in training mode, where dropout acts, or layers recompute what a cache would have to keep.
        """
        if any(module.training for module in self.model.modules()):
            return False
        if self._shares is None:
            self._shares = shares_prompts(self.model)
        return self._shares

    def forward(
        self, batch: TrainBatch, precision: Precision | None = None, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the completion, with gradient, and entropies, with one only if asked for.

        Shapes: (R, T) each, zero beyond a completion's end.

        Args:
            batch: the sequences to score.
            precision: types to compute in, to compare two; None for the policy's own.
            entropy_gradient: whether the entropies have a gradient, too.
        """
        activity.note("train")
        precision = precision or self.precision
        rollouts, width = batch.generator_logprobs.shape
        column = torch.arange(width, device=batch.tokens.device)
        real = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        row = torch.arange(rollouts, device=real.device).unsqueeze(1).expand(-1, width)[real]
        # The state at a token predicts the next one. Prompts and padding are left out: no logits are made for them.
        position = (batch.completion_start.unsqueeze(1) - 1 + column)[real]
        share = self.shares_prompts and worthwhile(batch)
        if self.agree is not None:
            share = self.agree(share and width > 1)  # one token of a shared prompt takes one pass, more take two
        with self.autocast(precision):
            if share:
                hidden = completion_states(self.model, batch)[real]
            else:
                hidden = token_states(backbone(self.model), batch, row, position)
        targets = batch.tokens[row, position + 1]
        logprobs, entropies = self._score(hidden, targets, precision, entropy_gradient)
        # masked_scatter fills in row-major order, the order in which `[real]` has taken them.
        shape = batch.generator_logprobs
        return (
            torch.zeros_like(shape).masked_scatter(real, logprobs),
            torch.zeros_like(shape).masked_scatter(real, entropies),
        )

    def _score(
        self, hidden: Tensor, targets: Tensor, precision: Precision, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `targets` (N,) and entropies (N,), from hidden states (N, width)."""
        dtype = precision.head_dtype(precision.fp32_head_trainer)

        def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            return token_scores(self.model, states, wanted, dtype, self.temperature, entropy_gradient)

        chunk = max(1, MAX_LOGITS // output_head(self.model).weight.shape[0])
        if hidden.shape[0] <= chunk:
            return score(hidden, targets)
        if (whole := head_weights(self.model)) is not None:
            scaling = scaling_of(self.model, self.temperature)
            return chunked_scores(hidden, *whole, targets, scaling, dtype, chunk, entropy_gradient)
        # Split over the vocabulary: its reductions are repeated as the chunk is recomputed.
        own, types = local_weights(self.model), (dtype, self.temperature, entropy_gradient)
        pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        parts = [checkpoint(scores_in_parts, self.model, *own, *each, *types, use_reentrant=False) for each in pieces]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
