"""Attention windows: which layers attend only to a part of the preceding tokens, from a model's configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The configuration field with the window size, by the layer's type in `layer_types` (GPT-Neo: `attention_layers`).
_FIELDS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "local": "window_size",
}


@dataclass(frozen=True)
class Window:
    """An attention window and the number of layers that have it.

    Attributes:
        field: configuration field with the window's size, such as `sliding_window`.
        size: length of the window in tokens.
        layers: number of layers that have the window.
    """

    field: str
    size: int
    layers: int

    def visible_pairs(self, tokens: int) -> int:
        """Return the number of (query, key) pairs that one layer computes for the first `tokens` tokens of a sequence.

        A token attends to itself. A sliding window covers the last `size` tokens; chunks do not overlap.
        """
        if self.field == "attention_chunk_size":
            chunks, remainder = divmod(tokens, self.size)
            return chunks * _triangle(self.size) + _triangle(remainder)
        growing = min(tokens, self.size)
        return _triangle(growing) + (tokens - growing) * self.size


def _triangle(tokens: int) -> int:
    """Return 1 + 2 + ... + tokens, the (query, key) pairs of causal attention without a window."""
    return tokens * (tokens + 1) // 2


def attention_windows(config: Any) -> tuple[Window, ...]:
    """Return the attention windows of a language model's layers; empty if all layers attend to everything.

    If a configuration does not list the types of its layers (Mistral, Mixtral, Phi-3), all layers have the configured
    window.

    Args:
        config: configuration of the language model (`head.text_config`).
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds:
        layers_by_field = Counter(_FIELDS[str(kind)] for kind in kinds if str(kind) in _FIELDS)
    else:
        common_fields = [field for field in dict.fromkeys(_FIELDS.values()) if _size(config, field)][:1]
        layers_by_field = Counter({field: int(config.num_hidden_layers) for field in common_fields})
    return tuple(
        Window(field, _size(config, field), layers) for field, layers in layers_by_field.items() if _size(config, field)
    )


def _size(config: Any, field: str) -> int:
    """Return a window's size; 0 if it does not exist or is switched off."""
    value = getattr(config, field, None)
    return value if isinstance(value, int) and value > 0 else 0


def outside(windows: Sequence[Window], start: int, end: int) -> int:
    """Return the number of (query, key) pairs that windows exclude, for queries from `start` to before `end`.

    Pairs are summed over layers. The result is 0 if no window is shorter than `end`.
    """
    return sum(
        window.layers * (_triangle(end) - _triangle(start) - window.visible_pairs(end) + window.visible_pairs(start))
        for window in windows
    )
