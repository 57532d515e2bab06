"""Policy of a run: log-probabilities of any causal language model of transformers, with a head of chosen precision."""

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
from lightning_scalerl.rollouts.rollout import TrainBatch
from sweeps.run.activity import activity

# With more logits (tokens x vocabulary) than this, the head works in chunks (`chunked_head`). 2^27 FP32 logits take
# 0.5 GB.
MAX_LOGITS = 2**27


class Policy(nn.Module):
    """A causal language model that returns log-probabilities of given tokens.

    Args:
        model: a causal language model of transformers; its weights stay FP32.
        precision: types of the forward pass (autocast) and of the head.
        temperature: the sampling temperature. With another one the importance ratio would not start at 1.
    """

    def __init__(self, model: nn.Module, precision: Precision, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.temperature = temperature
        # The adapter's semantics, from the design choice or, for an adapter that came with the model, `described`.
        self.adapter: Mapping[str, Any] | None = None
        # Whether rows are packed (`model.packed`): the recipe asks for it and the model can (`session.models`).
        self.packs = False
        # Whether the model has been tried on a few tokens (`session.trials`).
        self.tried = False
        self._shares: bool | None = None
        # With a sharded policy, all ranks must make the same forward calls. `agree` returns whether all of them can
        # share prompts in this pass.
        self.agree: Callable[[bool], bool] | None = None

    def autocast(self, precision: Precision) -> AbstractContextManager[Any]:
        """Return autocast to the policy's type on this policy's device; a null context for FP32."""
        device = next(self.model.parameters()).device.type
        dtype = precision.policy_dtype
        if dtype == torch.float32:
            return nullcontext()
        # Autocast's cache keeps 16-bit copies of all weights until the end of the pass. With sharding or gradient
        # checkpointing, where layers or activations exist only briefly, the copies would take most of the memory. The
        # cache would not help either, since each layer is used once.
        momentary = self.agree is not None or any(
            getattr(part, "gradient_checkpointing", False) for part in self.modules()
        )
        return torch.autocast(device, dtype=dtype, cache_enabled=not momentary)

    @property
    def shares_prompts(self) -> bool:
        """Return whether a prompt goes through the model once for all of its completions.

        False in training mode, in which dropout is active or layers recompute what a cache would have to keep.
        """
        if any(module.training for module in self.model.modules()):
            return False
        if self._shares is None:
            self._shares = shares_prompts(self.model)
        return self._shares

    def forward(
        self, batch: TrainBatch, precision: Precision | None = None, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the completion tokens, (R, T) each, zero after a completion's end.

        Args:
            batch: the sequences to score.
            precision: types to compute in; None for the policy's own.
            entropy_gradient: whether the entropies have a gradient, as the log-probabilities do.
        """
        activity.note("train")
        precision = precision or self.precision
        rollouts, width = batch.generator_logprobs.shape
        column = torch.arange(width, device=batch.tokens.device)
        real = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        row = torch.arange(rollouts, device=real.device).unsqueeze(1).expand(-1, width)[real]
        # The state at a token predicts the next token. No logits are computed for prompts and padding.
        position = (batch.completion_start.unsqueeze(1) - 1 + column)[real]
        share = self.shares_prompts and worthwhile(batch)
        if self.agree is not None:
            # With a shared prompt, completions of one token take one forward call and longer ones two. All ranks must
            # make the same number.
            share = self.agree(share and width > 1)
        with self.autocast(precision):
            if share:
                hidden = completion_states(self.model, batch)[real]
            else:
                hidden = token_states(backbone(self.model), batch, row, position)
        targets = batch.tokens[row, position + 1]
        logprobs, entropies = self._score(hidden, targets, precision, entropy_gradient)
        # masked_scatter fills in row-major order, like the indexing with `[real]`.
        like = batch.generator_logprobs
        return (
            torch.zeros_like(like).masked_scatter(real, logprobs),
            torch.zeros_like(like).masked_scatter(real, entropies),
        )

    def _score(
        self, hidden: Tensor, targets: Tensor, precision: Precision, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `targets` (N,) and entropies (N,) from hidden states (N, width)."""
        dtype = precision.head_dtype(precision.fp32_head_trainer)

        def score(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
            return token_scores(self.model, states, wanted, dtype, self.temperature, entropy_gradient)

        chunk = max(1, MAX_LOGITS // output_head(self.model).weight.shape[0])
        if hidden.shape[0] <= chunk:
            return score(hidden, targets)
        if (whole := head_weights(self.model)) is not None:
            scaling = scaling_of(self.model, self.temperature)
            return chunked_scores(hidden, *whole, targets, scaling, dtype, chunk, entropy_gradient)
        # A head that is split over the vocabulary: checkpoint each chunk. Its reductions over ranks are repeated when
        # the chunk is recomputed.
        head, types = local_weights(self.model), (dtype, self.temperature, entropy_gradient)
        pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        parts = [
            checkpoint(scores_in_parts, self.model, *head, *piece, *types, use_reentrant=False) for piece in pieces
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
