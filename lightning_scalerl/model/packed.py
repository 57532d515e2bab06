"""Forward pass over rows laid one behind the other, in one sequence of real tokens: no padding is computed.

Position ids that begin anew at each row tell the model where one ends. transformers masks attention across rows by
them (`masking_utils.find_packed_sequence_indices`), in every attention that it has a mask for, windows included; what
reads the sequence in another way, such as a recurrent layer, does not. So each model is tried.

Under such a mask attention costs the square of the whole sequence. A model that attends by torch's
`scaled_dot_product_attention`, to all that goes before in rows as long as these, is given `RowMask` in its place: each
row then costs its own square, as with FlashAttention's kernels for rows of unlike length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_scalerl.model.head import backbone, eval_mode, text_config
from lightning_scalerl.model.shared_prompt import SAME, sequences
from lightning_scalerl.model.windows import attention_windows
from lightning_scalerl.rollout import TrainBatch

# `SAME` where the model computes in 16 bit: some roundings of BF16, 2^-8 each. Rows that see each other differ by more.
SAME_IN_16_BIT = 3e-2


class RowMask(Tensor):
    """Causal attention within rows: a mask (1, 1, N, N) without content, which computes the attention row by row.

    A tensor, and so handed through any model to the function of torch that it stands in; there it takes over. A model
    that reads it otherwise sees everything masked, and what it computes is not that of padded rows.
    """

    lengths: list[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        mask = options.get("attn_mask")
        if func is not F.scaled_dot_product_attention or not isinstance(mask, RowMask):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        options |= {"attn_mask": None, "is_causal": True}
        rows = zip(*(each.split(mask.lengths, dim=-2) for each in args), strict=True)
        return torch.cat([func(*row, **options) for row in rows], dim=-2)


def row_mask(inner: nn.Module, lengths: Sequence[int], device: torch.device) -> RowMask | None:
    """Return the mask for packed rows of these lengths; None where transformers has to make one of the positions."""
    config, longest = text_config(inner), max(lengths)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    if any(window.size < longest for window in attention_windows(config)):
        return None
    nothing = torch.zeros((), dtype=torch.bool, device=device)
    mask = nothing.expand(1, 1, sum(lengths), sum(lengths)).as_subclass(RowMask)
    mask.lengths = list(lengths)
    return mask


def token_states(inner: nn.Module, batch: TrainBatch, row: Tensor, position: Tensor, by_row: bool = True) -> Tensor:
    """Return hidden states (N, width) of the tokens at `position` (N,) of the rows `row` (N,), packed if the batch is.

    A row's last token goes through no model: there is nothing behind it to predict. Without `batch.packed` rows are
    padded to the longest. Unless `by_row`, the mask is transformers' in any case.
    """
    tokens = batch.tokens[:, :-1]
    if not batch.packed:
        # No mask is needed: rows are left-aligned, and padding stands behind everything it could disturb.
        padded: Tensor = inner(input_ids=tokens, use_cache=False).last_hidden_state
        return padded[row, position]
    lengths = batch.lengths - 1
    column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    real = column < lengths.unsqueeze(1)
    # No cache: with one, transformers does not look for rows in the positions.
    line: Tensor = inner(
        input_ids=tokens[real].unsqueeze(0),
        position_ids=column[real].unsqueeze(0),
        attention_mask=row_mask(inner, lengths.tolist(), tokens.device) if by_row else None,
        use_cache=False,
    ).last_hidden_state
    return line[0, (lengths.cumsum(0) - lengths)[row] + position]


@torch.no_grad()
def packs_rows(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether a model gives a row the same states in a packed sequence as in one of its own.

    Tried on three short rows. False as well where what holds for short rows fails for long ones: chunks of attention
    (Llama 4) are cut where they lie in the packed sequence, and a mask kept as a table (GPT-Neo) has an end.

    Args:
        model: a causal language model.
        dtype: that it is run in; in 16 bit the same are states that differ by rounding.
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
        with eval_mode(model), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            batch.packed = False
            expected = token_states(backbone(model), batch, row, position).float()
            batch.packed = True
            # Long rows of a model with windows go the second way.
            ways = (True, False) if attention_windows(config) else (True,)
            packed = [token_states(backbone(model), batch, row, position, by_row).float() for by_row in ways]
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # no positions can be given
    gap = (torch.stack(packed) - expected).abs().max()
    same = SAME if dtype == torch.float32 else SAME_IN_16_BIT
    return bool(gap <= same * expected.abs().max().clamp(min=1.0))
