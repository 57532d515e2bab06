"""Forward pass over rows that are concatenated into one sequence, without padding.

Position ids restart at each row. From them transformers derives a mask that blocks attention across rows
(`masking_utils.find_packed_sequence_indices`), for every kind of attention that it has a mask for, including windows.
Layers that read the sequence in another way, such as recurrent ones, ignore the mask. Therefore each model is first
tried on short rows (`packs_rows`).

With such a mask, the cost of attention grows with the square of the whole sequence's length. A model that uses torch's
`scaled_dot_product_attention` without windows shorter than the rows gets a `RowMask` instead. Each row then costs only
the square of its own length, as with FlashAttention's kernels for variable lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.model.head import backbone, eval_mode, text_config
from lightning_scalerl.model.shared_prompt import RELATIVE_TOLERANCE, batch_of_sequences
from lightning_scalerl.model.windows import attention_windows
from lightning_scalerl.rollouts.rollout import TrainBatch

# Like `RELATIVE_TOLERANCE`, for models that compute in 16 bit: a few roundings of BF16, 2^-8 each. If rows attend to
# each other, their states differ by more.
SAME_IN_16_BIT = 3e-2


class RowMask(Tensor):
    """Attention mask (1, 1, N, N) that has no data and makes torch compute causal attention row by row.

    As a tensor it passes through any model to `scaled_dot_product_attention`, where `__torch_function__` replaces the
    call. A model that reads the mask's values sees everything masked. Its states then differ from those of padded rows,
    which `packs_rows` detects.
    """

    lengths: list[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        mask = options.get("attn_mask")
        if func is not F.scaled_dot_product_attention or not isinstance(mask, RowMask):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        options |= {"attn_mask": None, "is_causal": True}
        # Query, key and value are split along the sequence into the rows.
        rows = zip(*(table.split(mask.lengths, dim=-2) for table in args), strict=True)
        return torch.cat([func(*row, **options) for row in rows], dim=-2)


def row_mask(inner: nn.Module, lengths: Sequence[int], device: torch.device) -> RowMask | None:
    """Return the mask for packed rows of these lengths; None if transformers must derive one from the position ids."""
    config, longest = text_config(inner), max(lengths)
    if compat.attention_implementation(config) != "sdpa":
        return None
    if any(window.size < longest for window in attention_windows(config)):
        return None
    # Expand a scalar: the mask then has its full shape, but takes no memory.
    scalar = torch.zeros((), dtype=torch.bool, device=device)
    mask = scalar.expand(1, 1, sum(lengths), sum(lengths)).as_subclass(RowMask)
    mask.lengths = list(lengths)
    return mask


def token_states(inner: nn.Module, batch: TrainBatch, row: Tensor, position: Tensor, by_row: bool = True) -> Tensor:
    """Return hidden states (N, width) of the tokens at `position` (N,) of the rows `row` (N,).

    The last token of a row is not run through the model, because it predicts nothing. Rows are packed if
    `batch.packed`, else padded to the longest row. With `by_row=False`, packed rows always use transformers' mask.
    """
    tokens = batch.tokens[:, :-1]
    if not batch.packed:
        # No mask is needed: padding comes after all real tokens, and attention is causal, so no real token sees it.
        padded: Tensor = inner(input_ids=tokens, use_cache=False).last_hidden_state
        return padded[row, position]
    lengths = batch.lengths - 1
    column = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_token = column < lengths.unsqueeze(1)
    # Disable the cache: with one, transformers does not derive a mask from the position ids.
    states: Tensor = inner(
        input_ids=tokens[is_token].unsqueeze(0),
        position_ids=column[is_token].unsqueeze(0),
        attention_mask=row_mask(inner, lengths.tolist(), tokens.device) if by_row else None,
        use_cache=False,
    ).last_hidden_state
    # Start of the row in the sequence, plus the position in the row.
    return states[0, (lengths.cumsum(0) - lengths)[row] + position]


@torch.no_grad()
def packs_rows(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether a model computes the same states for a row in a packed sequence as for the row alone.

    The model is tried on three short rows. The result is also False for models that would pass this test but fail on
    long rows: chunked attention (Llama 4) cuts chunks by the position in the packed sequence, and a mask stored as a
    table (GPT-Neo) is too short for the packed sequence.

    Args:
        model: a causal language model.
        dtype: type to run it in. In 16 bit, states that differ by rounding count as the same.
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
    batch = batch_of_sequences(tokens, torch.ones_like(lengths), lengths, torch.arange(3, device=device))
    row, position = (torch.arange(5, device=device) < (lengths - 1).unsqueeze(1)).nonzero(as_tuple=True)
    try:
        with eval_mode(model), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            batch.packed = False
            expected = token_states(backbone(model), batch, row, position).float()
            batch.packed = True
            # In a model with windows, rows longer than the window use transformers' mask, so both masks are tried.
            masks = (True, False) if attention_windows(config) else (True,)
            packed = [token_states(backbone(model), batch, row, position, by_row).float() for by_row in masks]
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # for example because the model does not take position ids
    gap = (torch.stack(packed) - expected).abs().max()
    tolerance = RELATIVE_TOLERANCE if dtype == torch.float32 else SAME_IN_16_BIT
    return bool(gap <= tolerance * expected.abs().max().clamp(min=1.0))
