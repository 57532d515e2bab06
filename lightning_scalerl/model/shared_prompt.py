"""Forward pass that computes each prompt once for all of its completions, with exact gradients.

First the distinct prompts of a batch are computed. Their keys and values are then repeated for the rollouts that share
them, and the completions are computed with this cache. The gradients of the rollouts add up in their prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from lightning_scalerl.model.head import backbone, eval_mode, text_config
from lightning_scalerl.model.windows import attention_windows
from lightning_scalerl.rollouts.rollout import Denominators, TrainBatch

# Two forward passes instead of one pay off if they save at least this fraction of all tokens.
MIN_SAVED_FRACTION = 0.15
# Relative tolerance in FP32 between two computations of the same states.
RELATIVE_TOLERANCE = 1e-4


def sharing_pays_off(batch: TrainBatch) -> bool:
    """Return whether sharing prompts would save at least the fraction `MIN_SAVED_FRACTION` of a batch's tokens.

    Shared prompts and their completions are padded, while packed rows are not. For a packed batch, this padding
    therefore counts as tokens that sharing adds.
    """
    if batch.group is None or not batch.rollouts:
        return False
    first, _ = prompts_of(batch.group)
    saved_tokens = batch.completion_start.sum() - batch.completion_start[first].sum()
    if batch.packed:
        padded = len(first) * batch.completion_start.max() + batch.generator_logprobs[:, 1:].numel()
        saved_tokens = (batch.lengths - 1).sum() - padded
    return bool(saved_tokens >= MIN_SAVED_FRACTION * batch.lengths.sum())


def prompts_of(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first rollout of each group (U,), and for each rollout the index of its group (R,)."""
    _, index = torch.unique(group, return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    # Find the smallest row of each group here, because `torch.unique` does not return first occurrences.
    first = torch.full((int(index.max()) + 1,), len(group), device=group.device)
    first.scatter_reduce_(0, index, rows, "amin")
    return first, index


def states(model: nn.Module, batch: TrainBatch) -> Tensor:
    """Return hidden states before the head, (R, T, width); the state at column t predicts the completion's token t.

    Args:
        model: a model for which `shares_prompts` is true.
        batch: sequences with `group` set; rollouts of one group share a prompt.
    """
    assert batch.group is not None
    first, index = prompts_of(batch.group)
    inner = backbone(model)
    starts = batch.completion_start
    width, length = batch.generator_logprobs.shape[1], int(starts.max())
    cache = DynamicCache()
    # Rows with a shorter prompt include part of their completion here. The mask below hides the keys of that part.
    prompts = inner(input_ids=batch.tokens[first, :length], past_key_values=cache, use_cache=True).last_hidden_state
    # The state of a prompt's last token predicts the completion's first token.
    last: Tensor = prompts[torch.arange(len(first), device=index.device), starts[first] - 1][index].unsqueeze(1)
    if width < 2:
        return last
    for layer in cache.layers:
        # Index in FP32, so that the backward pass sums the rollouts' gradients of a prompt in FP32.
        layer.keys, layer.values = (table.float()[index].to(table.dtype) for table in (layer.keys, layer.values))
    position = starts.unsqueeze(1) + torch.arange(width - 1, device=index.device)
    # Clamp the positions: after a sequence's end any token will do, because its state is not used.
    tokens = batch.tokens.gather(1, position.clamp(max=batch.tokens.shape[1] - 1))
    is_prompt = torch.arange(length, device=index.device) < starts.unsqueeze(1)
    # The mask only hides keys; the model itself makes attention within the completion causal.
    mask = None if bool(is_prompt.all()) else torch.cat([is_prompt, torch.ones_like(tokens, dtype=torch.bool)], dim=1)
    later = inner(
        input_ids=tokens, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True
    ).last_hidden_state
    return torch.cat([last, later], dim=1)


@torch.no_grad()
def shares_prompts(model: nn.Module) -> bool:
    """Return whether a model computes the same states from cached keys and values as from the prompt itself.

    The model is tried on one short batch. The result is False if a layer has an attention window, or state other than
    keys and values.
    """
    if attention_windows(text_config(model)):
        return False
    device = next(model.parameters()).device
    limit = int(text_config(model).vocab_size)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 0], [4, 5, 6, 0, 0, 0]], device=device) % limit
    starts, lengths = torch.tensor([3, 3, 1], device=device), torch.tensor([6, 5, 3], device=device)
    batch = batch_of_sequences(tokens, starts, lengths, torch.tensor([0, 0, 1], device=device))
    try:
        with eval_mode(model):
            unshared = backbone(model)(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            shared = states(model, batch)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # for example because the model has another kind of cache
    column = torch.arange(shared.shape[1], device=device)
    is_token = column < (lengths - starts).unsqueeze(1)
    expected = unshared.gather(1, (starts.unsqueeze(1) - 1 + column).clamp(max=4).unsqueeze(2).expand_as(shared))
    gap = (shared - expected)[is_token].float().abs().max()
    return bool(gap <= RELATIVE_TOLERANCE * expected[is_token].float().abs().max().clamp(min=1.0))


def batch_of_sequences(tokens: Tensor, starts: Tensor, lengths: Tensor, group: Tensor) -> TrainBatch:
    """Build a batch for a forward pass, with zeros in all tensors except the sequences."""
    width = int((lengths - starts).max())
    table, column = torch.zeros(len(lengths), width), torch.zeros(len(lengths))
    return TrainBatch(
        tokens=tokens,
        lengths=lengths,
        completion_start=starts,
        generator_logprobs=table,
        weight_versions=table,
        loss_mask=table,
        forced_mask=table,
        advantages=table,
        sample_tokens=column,
        group_tokens=column,
        row=column,
        rewards=column,
        pass_rates=column,
        denominators=Denominators(0.0, 0.0, 0.0, 0.0),
        group=group,
    )
