"""Attention windows: layers whose tokens see a part of what goes before them, as a model's configuration names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# By the name of a layer's kind in `layer_types` (GPT-Neo: `attention_layers`), the field that has its window.
_FIELDS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
    "local": "window_size",
}


@dataclass(frozen=True)
class Window:
    """Number of layers that share one window of attention.

    Attributes:
        field: field of the model's configuration that holds the size, such as `sliding_window`.
        size: length of the window in tokens.
        layers: number of layers that have it.
    """

    field: str
    size: int
    layers: int

    def seen(self, tokens: int) -> int:
        """Return how many tokens the first `tokens` of a sequence attend to in one layer, all added up.

        A token sees itself. A sliding window holds the last `size` tokens; chunks do not overlap.
        """
        if self.field == "attention_chunk_size":
            whole, rest = divmod(tokens, self.size)
            return whole * _triangle(self.size) + _triangle(rest)
        inside = min(tokens, self.size)
        return _triangle(inside) + (tokens - inside) * self.size


def _triangle(tokens: int) -> int:
    """Return 1 + 2 + ... + tokens: the tokens attended to under causal attention without a window."""
    return tokens * (tokens + 1) // 2


def attention_windows(config: Any) -> tuple[Window, ...]:
    """Return the windows that a language model's layers have, none for a model that attends to everything.

    Where a configuration does not list its layers (Mistral, Mixtral, Phi-3), a window that it names is that of all.

    Args:
        config: configuration of the language model, of a multimodal model its text decoder's (`head.text_config`).
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds:
        named = Counter(_FIELDS[str(kind)] for kind in kinds if str(kind) in _FIELDS)
    else:
        everywhere = [field for field in dict.fromkeys(_FIELDS.values()) if _size(config, field)][:1]
        named = Counter({field: int(config.num_hidden_layers) for field in everywhere})
    return tuple(Window(field, _size(config, field), layers) for field, layers in named.items() if _size(config, field))


def _size(config: Any, field: str) -> int:
    """Return a window's size; 0 where there is none, or where it is switched off."""
    value = getattr(config, field, None)
    return value if isinstance(value, int) and value > 0 else 0


def outside(windows: Sequence[Window], start: int, end: int) -> int:
    """Return how many tokens the tokens from `start` to before `end` of a sequence do not attend to for the windows.

    Counted for each token and layer: 0 where no sequence is longer than any window.
    """
    return sum(
        window.layers * (_triangle(end) - _triangle(start) - window.seen(end) + window.seen(start))
        for window in windows
    )
