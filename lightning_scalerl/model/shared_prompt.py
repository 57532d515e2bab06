"""Forward pass over a prompt once for all of its completions, with gradient: exact, and a fraction of the work.

The prompts of a batch are computed once each, their keys and values repeated for the rollouts that share them, and the
completions computed behind them. The gradient of a prompt is then the sum of what its rollouts send back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lightning_scalerl.model.head import backbone, eval_mode, text_config
from lightning_scalerl.model.windows import attention_windows
from lightning_scalerl.rollout import Denominators, TrainBatch

# Two forward passes in place of one pay off if at least this share of all tokens need not be computed again.
WORTH = 0.15
# Relative tolerance in FP32 between two ways through a model, where they compute the same.
SAME = 1e-4


def worthwhile(batch: TrainBatch) -> bool:
    """Return whether rollouts that share prompts would save at least `WORTH` of a batch's tokens.

    Prompts and completions are padded then, which packed rows are not: beside those it counts as tokens.
    """
    if batch.group is None or not batch.rollouts:
        return False
    first, _ = prompts_of(batch.group)
    saved = batch.completion_start.sum() - batch.completion_start[first].sum()
    if batch.packed:
        padded = len(first) * batch.completion_start.max() + batch.generator_logprobs[:, 1:].numel()
        saved = (batch.lengths - 1).sum() - padded
    return bool(saved >= WORTH * batch.lengths.sum())


def prompts_of(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first rollout of each group (U,), and for each rollout (R,) the index of its group's there."""
    _, of = torch.unique(group, return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    # The smallest row of each group: `torch.unique` does not say where a value occurs first.
    first = torch.full((int(of.max()) + 1,), len(group), device=group.device)
    first.scatter_reduce_(0, of, rows, "amin")
    return first, of


def states(model: nn.Module, batch: TrainBatch) -> Tensor:
    """Return hidden states before the head, (R, T, width): those at column t predict a completion's token t.

    Args:
        model: a model for which `shares_prompts` is true.
        batch: sequences, with `group` set: rollouts of one group share a prompt.
    """
    assert batch.group is not None
    first, of = prompts_of(batch.group)
    inner = backbone(model)
    starts = batch.completion_start
    width, length = batch.generator_logprobs.shape[1], int(starts.max())
    cache = DynamicCache()
    # A shorter prompt is followed by its completion here; the mask below hides those keys from the completions.
    prompts = inner(input_ids=batch.tokens[first, :length], past_key_values=cache, use_cache=True).last_hidden_state
    # The state of a prompt's last token predicts the completion's first.
    last: Tensor = prompts[torch.arange(len(first), device=of.device), starts[first] - 1][of].unsqueeze(1)
    if width < 2:
        return last
    for layer in cache.layers:
        # Through FP32, so that the backward pass sums the rollouts' gradients of a prompt in it.
        layer.keys, layer.values = (kept.float()[of].to(kept.dtype) for kept in (layer.keys, layer.values))
    position = starts.unsqueeze(1) + torch.arange(width - 1, device=of.device)
    # Clamped: beyond a sequence's end any token will do, its states are not used.
    tokens = batch.tokens.gather(1, position.clamp(max=batch.tokens.shape[1] - 1))
    seen = torch.arange(length, device=of.device) < starts.unsqueeze(1)
    # The mask covers keys only: causality within the completion is applied by the model.
    mask = None if bool(seen.all()) else torch.cat([seen, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
    later = inner(
        input_ids=tokens, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True
    ).last_hidden_state
    return torch.cat([last, later], dim=1)


@torch.no_grad()
def shares_prompts(model: nn.Module) -> bool:
    """Return whether a model gives the same states from cached keys and values as from the prompt itself.

    Tried on one short batch. False where a layer has an attention window, or state other than keys and values.
    """
    if attention_windows(text_config(model)):
        return False
    device = next(model.parameters()).device
    limit = int(text_config(model).vocab_size)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 0], [4, 5, 6, 0, 0, 0]], device=device) % limit
    starts, lengths = torch.tensor([3, 3, 1], device=device), torch.tensor([6, 5, 3], device=device)
    batch = sequences(tokens, starts, lengths, torch.tensor([0, 0, 1], device=device))
    try:
        with eval_mode(model):
            plain = backbone(model)(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            shared = states(model, batch)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # another kind of cache
    column = torch.arange(shared.shape[1], device=device)
    real = column < (lengths - starts).unsqueeze(1)
    expected = plain.gather(1, (starts.unsqueeze(1) - 1 + column).clamp(max=4).unsqueeze(2).expand_as(shared))
    gap = (shared - expected)[real].float().abs().max()
    return bool(gap <= SAME * expected[real].float().abs().max().clamp(min=1.0))


def sequences(tokens: Tensor, starts: Tensor, lengths: Tensor, group: Tensor) -> TrainBatch:
    """Build a batch of which only the sequences matter."""
    width = int((lengths - starts).max())
    nothing, none = torch.zeros(len(lengths), width), torch.zeros(len(lengths))
    return TrainBatch(
        tokens, lengths, starts, nothing, nothing, nothing, nothing, nothing, none, none, none, none, none,
        Denominators(0.0, 0.0, 0.0, 0.0), group=group,
    )  # fmt: skip
