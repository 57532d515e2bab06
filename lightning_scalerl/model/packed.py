"""Forward pass over rows laid one behind the other, in one sequence of real tokens: no padding is computed.

Position ids that begin anew at each row tell the model where one ends. transformers masks attention across rows by
them (`masking_utils.find_packed_sequence_indices`), in every attention that it has a mask for, windows included; what
reads the sequence in another way, such as a recurrent layer, does not. So each model is tried.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_scalerl.model.head import backbone, eval_mode, text_config
from lightning_scalerl.model.shared_prompt import SAME, sequences
from lightning_scalerl.model.windows import attention_windows
from lightning_scalerl.rollout import TrainBatch


def token_states(inner: nn.Module, batch: TrainBatch, row: Tensor, position: Tensor) -> Tensor:
    """Return hidden states (N, width) of the tokens at `position` (N,) of the rows `row` (N,), packed if the batch is.

    A row's last token goes through no model: there is nothing behind it to predict. Without `batch.packed` rows are
    padded to the longest.
    """
    tokens = batch.tokens[:, :-1]
    if not batch.packed:
        # No mask is needed: rows are left-aligned, and padding stands behind everything it could disturb.
        padded: Tensor = inner(input_ids=tokens, use_cache=False).last_hidden_state
        return padded[row, position]
    lengths = batch.lengths - 1
    column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    real = column < lengths.unsqueeze(1)
    # Neither mask nor cache: with either, transformers does not look for rows in the positions.
    line: Tensor = inner(
        input_ids=tokens[real].unsqueeze(0), position_ids=column[real].unsqueeze(0), use_cache=False
    ).last_hidden_state
    return line[0, (lengths.cumsum(0) - lengths)[row] + position]


@torch.no_grad()
def packs_rows(model: nn.Module) -> bool:
    """Return whether a model gives a row the same states in a packed sequence as in one of its own.

    Tried on three short rows. False as well where what holds for short rows fails for long ones: chunks of attention
    (Llama 4) are cut where they lie in the packed sequence, and a mask kept as a table (GPT-Neo) has an end.
    """
    config = text_config(model)
    if any(window.field == "attention_chunk_size" for window in attention_windows(config)):
        return False
    longest = getattr(config, "max_position_embeddings", None)
    if any(buffer.shape[-2:] == (longest, longest) for buffer in model.buffers()):
        return False
    device, limit = next(model.parameters()).device, int(config.vocab_size)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 0, 0], [5, 4, 3, 2, 1, 0]], device=device) % limit
    lengths = torch.tensor([6, 4, 5], device=device)
    batch = sequences(tokens, torch.ones_like(lengths), lengths, torch.arange(3, device=device))
    row, position = (torch.arange(5, device=device) < (lengths - 1).unsqueeze(1)).nonzero(as_tuple=True)
    try:
        with eval_mode(model):
            batch.packed = False
            expected = token_states(backbone(model), batch, row, position).float()
            batch.packed = True
            gap = token_states(backbone(model), batch, row, position).float() - expected
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # no positions can be given
    return bool(gap.abs().max() <= SAME * expected.abs().max().clamp(min=1.0))
