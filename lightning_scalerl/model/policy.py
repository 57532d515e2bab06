"""Policy of a run: log-probabilities of any causal language model of transformers, with a head of chosen precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model.chunked_head import chunked_scores
from lightning_scalerl.model.head import (
    backbone,
    head_logits,
    head_weights,
    local_weights,
    output_head,
    scaling_of,
    token_scores,
    token_scores_over_ranks,
)
from lightning_scalerl.model.packed import token_states
from lightning_scalerl.model.shared_prompt import shares_prompts, sharing_pays_off
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
        temperature: the sampling temperature. With a different temperature the importance ratio would not start at 1.
    """

    def __init__(self, model: nn.Module, precision: Precision, temperature: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.temperature = temperature
        # Parameters of the adapter: `semantics()` of the design choice, or `adapter_description` for an adapter that
        # came with the model.
        self.adapter: Mapping[str, Any] | None = None
        # Whether rows are packed (`model.packed`). True if the recipe asks for it and the model supports it
        # (`session.models`).
        self.packs = False
        # Whether the model has been checked on a few tokens (`session.trials`).
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
        short_lived = self.agree is not None or any(
            getattr(part, "gradient_checkpointing", False) for part in self.modules()
        )
        return torch.autocast(device, dtype=dtype, cache_enabled=not short_lived)

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt goes through the model once for all of its completions.

        False in training mode, in which dropout is active or layers recompute states that a cache would have to keep.
        """
        if any(module.training for module in self.model.modules()):
            return False
        if self._shares is None:
            self._shares = shares_prompts(self.model)
        return self._shares

    def forward(
        self,
        batch: TrainBatch,
        precision: Precision | None = None,
        entropy_gradient: bool = False,
        teacher: Policy | None = None,
    ) -> tuple[Tensor, ...]:
        """Return log-probabilities and entropies of the completion tokens, (R, T) each, zero after a completion's end.

        With a teacher there is a third tensor: KL(this policy, teacher) over the vocabulary at each of these tokens,
        with gradient.

        Args:
            batch: the sequences to score.
            precision: types to compute in; None for the policy's own.
            entropy_gradient: whether the entropies have a gradient, as the log-probabilities do.
            teacher: a frozen policy with the same vocabulary; None for none. With a teacher, neither policy may be
                sharded.
        """
        activity.note("train")
        precision = precision or self.precision
        hidden, targets, is_token = self._states(batch, precision)
        scores = list(self._score(hidden, targets, precision, entropy_gradient))
        if teacher is not None:
            with torch.no_grad():
                teacher_batch = replace(batch, packed=batch.packed and teacher.packs)
                teacher_states = teacher._states(teacher_batch, precision)[0]
            scores.append(self._divergences(hidden, teacher, teacher_states, precision))
        # masked_scatter fills in row-major order, like the indexing with `[is_token]` in `_states`.
        return tuple(torch.zeros_like(batch.generator_logprobs).masked_scatter(is_token, score) for score in scores)

    def _states(self, batch: TrainBatch, precision: Precision) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the head for the N completion tokens.

        Returns:
            States before the head (N, width), token ids (N,), and the mask (R, T) of the completion tokens.
        """
        rollouts, width = batch.generator_logprobs.shape
        column = torch.arange(width, device=batch.tokens.device)
        is_token = column < (batch.lengths - batch.completion_start).unsqueeze(1)
        row = torch.arange(rollouts, device=is_token.device).unsqueeze(1).expand(-1, width)[is_token]
        # The state at a token predicts the next token. No logits are computed for prompts and padding.
        position = (batch.completion_start.unsqueeze(1) - 1 + column)[is_token]
        share_prompts = self.shares_prompts and sharing_pays_off(batch)
        if self.agree is not None:
            # With a shared prompt, completions of one token take one forward call, and longer completions take two. All
            # ranks must make the same number of calls.
            share_prompts = self.agree(share_prompts and width > 1)
        with self.autocast(precision):
            if share_prompts:
                hidden = completion_states(self.model, batch)[is_token]
            else:
                hidden = token_states(backbone(self.model), batch, row, position)
        return hidden, batch.tokens[row, position + 1], is_token

    def _divergences(self, hidden: Tensor, teacher: Policy, teacher_states: Tensor, precision: Precision) -> Tensor:
        """Return KL(this policy, teacher) over the vocabulary (N,) from the states of both before their heads."""
        dtype = precision.head_dtype(precision.fp32_head_trainer)
        sizes = [output_head(policy.model).weight.shape[0] for policy in (self, teacher)]

        def divergence(states: Tensor, other_states: Tensor) -> Tensor:
            # A model may have more logits than its tokenizer has tokens: compare the tokens that both models have.
            own_logprobs, teacher_logprobs = (
                F.log_softmax(policy.logits(policy_states, dtype)[:, : min(sizes)], dim=-1)
                for policy, policy_states in ((self, states), (teacher, other_states))
            )
            return (own_logprobs.exp() * (own_logprobs - teacher_logprobs)).sum(-1)

        # The logits of both models exist at the same time, so chunks are smaller. The logits are recomputed in the
        # backward pass.
        chunk = max(1, MAX_LOGITS // sum(sizes))
        if hidden.shape[0] <= chunk:
            return divergence(hidden, teacher_states)
        pieces = zip(torch.split(hidden, chunk), torch.split(teacher_states, chunk), strict=True)
        return torch.cat([checkpoint(divergence, *piece, use_reentrant=False) for piece in pieces])

    def logits(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits (N, V) / temperature from states before the head; the head's product is in `dtype`."""
        weights = head_weights(self.model)
        assert weights is not None, "a head that is split over the vocabulary"
        return head_logits(self.model, hidden, *weights, dtype) / self.temperature

    def _score(
        self, hidden: Tensor, targets: Tensor, precision: Precision, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `targets` (N,) and entropies (N,) from hidden states (N, width)."""
        dtype = precision.head_dtype(precision.fp32_head_trainer)

        def score(states: Tensor, part_targets: Tensor) -> tuple[Tensor, Tensor]:
            return token_scores(self.model, states, part_targets, dtype, self.temperature, entropy_gradient)

        chunk = max(1, MAX_LOGITS // output_head(self.model).weight.shape[0])
        if hidden.shape[0] <= chunk:
            return score(hidden, targets)
        if (weights := head_weights(self.model)) is not None:
            scaling = scaling_of(self.model, self.temperature)
            return chunked_scores(hidden, *weights, targets, scaling, dtype, chunk, entropy_gradient)
        # A head that is split over the vocabulary: checkpoint each chunk. Its reductions over ranks are repeated when
        # the chunk is recomputed.
        head, types = local_weights(self.model), (dtype, self.temperature, entropy_gradient)
        pieces = zip(torch.split(hidden, chunk), torch.split(targets, chunk), strict=True)
        parts = [
            checkpoint(token_scores_over_ranks, self.model, *head, *piece, *types, use_reentrant=False)
            for piece in pieces
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
