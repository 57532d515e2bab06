"""KV cache for many rollouts that decode together, one token at a time, each at its own position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.model.head import backbone

# The cache's width grows in blocks of this many tokens.
BLOCK = 128
# Keys and values of one sequence (heads, tokens, head size), one pair per layer.
KeysValues = list[tuple[Tensor, Tensor]]


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (slots, heads, capacity, head size); each row writes at its own position."""

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, width = self.owner.reserved
        self.keys = key_states.new_zeros(rows, key_states.shape[1], width, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], width, value_states.shape[3])
        self.is_initialized = True

    def grow(self) -> None:
        """Grow to the size reserved by the owning cache."""
        keys, values = self.keys, self.values
        self.lazy_initialization(keys, values)
        self.keys[: keys.shape[0], :, : keys.shape[2]] = keys
        self.values[: values.shape[0], :, : values.shape[2]] = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one new token per row; return the keys and values that the rows may attend to."""
        rows, position, width = self.owner.rows, self.owner.position, self.owner.width
        self.keys[rows, :, position] = key_states[:, :, 0]
        self.values[rows, :, position] = value_states[:, :, 0]
        n = key_states.shape[0]
        return self.keys[:n, :, :width], self.values[:n, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_seq_length(self) -> int:
        return self.owner.width - 1

    def get_max_length(self) -> int:
        return self.owner.capacity


class SlotCache(Cache):  # type: ignore[misc]
    """KV cache of all slots; `set_positions` sets the rows and positions written by the next forward pass.

    The cache grows with the number of decoding rows and the length of the longest sequence, because few runs ever fill
    all slots to full length.
    """

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.rows = torch.empty(0, dtype=torch.long)
        self.position = torch.empty(0, dtype=torch.long)
        self.width = 1
        self.reserved = (0, 0)
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def set_positions(self, position: Tensor) -> None:
        """Set the position at which each of the first `len(position)` rows writes its next token."""
        self.rows = torch.arange(position.numel(), device=position.device)
        self.position = position
        self.width = int(position.max()) + 1
        self.reserve(position.numel(), self.width)

    def reserve(self, rows: int, width: int) -> None:
        """Grow the cache so that `rows` rows of `width` tokens fit."""
        have_rows, have_width = self.reserved
        if rows <= have_rows and width <= have_width:
            return
        # Grow by a factor, because each growth copies the whole cache.
        if rows > have_rows:
            have_rows = min(self.slots, max(rows, 2 * have_rows))
        if width > have_width:
            blocks = -(-max(width, have_width * 3 // 2) // BLOCK)
            have_width = min(self.capacity, blocks * BLOCK)
        self.reserved = (have_rows, have_width)
        for layer in self.layers:
            if layer.is_initialized:
                layer.grow()

    def fill(self, rows: slice, keys_values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write a sequence's keys and values (heads, tokens, head size), one pair per layer, into all rows `rows`."""
        self.reserve(rows.stop, keys_values[0][0].shape[1])
        for layer, (keys, values) in zip(self.layers, keys_values, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys.unsqueeze(0), values.unsqueeze(0))
            layer.keys[rows, :, : keys.shape[1]] = keys
            layer.values[rows, :, : values.shape[1]] = values

    def copy(self, row: int, tokens: int) -> KeysValues:
        """Return a copy of the keys and values of a row's first tokens."""
        return [(layer.keys[row, :, :tokens].clone(), layer.values[row, :, :tokens].clone()) for layer in self.layers]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the keys and values of rows `sources` over rows `targets`, in every layer."""
        for layer in self.layers:
            layer.keys[targets] = layer.keys[sources]
            layer.values[targets] = layer.values[sources]


def encode(
    model: nn.Module, sequences: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, list[list[tuple[Tensor, Tensor]]], tuple[int, int]]:
    """Make one forward pass over whole sequences.

    Returns:
        The hidden state of each sequence's last token (n, width); for each sequence its keys and values
        (heads, tokens, head size), one pair per layer; and the work done: tokens, and tokens attended to.
    """
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    # Pad on the right: attention is causal, so no real token sees the padding.
    padded = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    cache = DynamicCache()
    inputs = torch.tensor(padded, device=device)
    hidden = backbone(model)(input_ids=inputs, past_key_values=cache, use_cache=True).last_hidden_state
    last = hidden[torch.arange(len(lengths)), torch.tensor(lengths) - 1]
    caches = [
        [(layer.keys[number, :, :length], layer.values[number, :, :length]) for layer in cache.layers]
        for number, length in enumerate(lengths)
    ]
    # Token t attends to itself and all earlier tokens: 1 + 2 + ... + n.
    return last, caches, (sum(lengths), sum(length * (length + 1) // 2 for length in lengths))


def extend(
    model: nn.Module, pieces: Sequence[tuple[KeysValues | None, Sequence[int]]], device: torch.device
) -> tuple[Tensor, list[KeysValues], tuple[int, int]]:
    """Make one forward pass over tokens that follow cached ones.

    Args:
        model: the policy.
        pieces: for each sequence, the cached keys and values of its beginning (None if there are none), and the tokens
            after it.
        device: the model's device.

    Returns:
        The same as `encode`, where the work counts only the tokens after the cached ones.
    """
    starts = torch.tensor([0 if cached is None else cached[0][0].shape[1] for cached, _ in pieces], device=device)
    lengths = torch.tensor([len(tokens) for _, tokens in pieces], device=device)
    past, width = int(starts.max()), int(lengths.max())
    cache = DynamicCache()
    example = next((cached for cached, _ in pieces if cached is not None), ())
    for layer, pair in enumerate(example):
        # Pad the cached beginnings on the right; the mask hides the padding.
        keys, values = (
            tensor.new_zeros(len(pieces), tensor.shape[0], past, tensor.shape[2]).to(device) for tensor in pair
        )
        for row, (cached, _) in enumerate(pieces):
            if cached is not None:
                keys[row, :, : starts[row]], values[row, :, : starts[row]] = cached[layer]
        cache.update(keys, values, layer)
    padded = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for _, tokens in pieces], device=device)
    column = torch.arange(width, device=device)
    cached_part = torch.arange(past, device=device) < starts[:, None, None]
    visible = torch.cat(
        [cached_part.expand(-1, width, -1), (column <= column[:, None]).expand(len(pieces), -1, -1)], dim=2
    )
    hidden = backbone(model)(
        input_ids=padded,
        position_ids=starts[:, None] + column,
        attention_mask=_mask(model, visible)[:, None],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    last = hidden[torch.arange(len(pieces), device=device), lengths - 1]
    ends = (starts + lengths).tolist()
    caches: list[KeysValues] = []
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        columns = [*range(start), *range(past, past + length)]
        caches.append([(layer.keys[row][:, columns], layer.values[row][:, columns]) for layer in cache.layers])
    pairs = zip(starts.tolist(), ends, strict=True)
    return last, caches, (int(lengths.sum()), sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in pairs))


def decode(model: nn.Module, cache: SlotCache, tokens: Tensor, position: Tensor) -> Tensor:
    """Append one token to the first rows of the cache; return the last hidden states (rows, width).

    Shapes: tokens (rows,), position (rows,): the index of each token in its sequence.
    """
    cache.set_positions(position)
    visible = torch.arange(cache.width, device=position.device) <= position.unsqueeze(1)
    states: Tensor = backbone(model)(
        input_ids=tokens.unsqueeze(1),
        position_ids=position.unsqueeze(1),
        attention_mask=_mask(model, visible)[:, None, None, :],
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return states[:, 0]


def _mask(model: nn.Module, visible: Tensor) -> Tensor:
    """Return the attention mask in the form that the model expects: eager attention adds its mask to the scores."""
    config: Any = model.config
    if compat.attention_implementation(config) != "eager":
        return visible
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
