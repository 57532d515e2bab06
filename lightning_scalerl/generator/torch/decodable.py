"""Check, before any compute is spent, that the torch generator can decode a model token by token.

Architectures known not to work are refused by name. Any other model is tried on a few tokens: its ordinary forward pass
must agree with decoding through the generator's cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.generator.torch.slot_cache import SlotCache, decode, encode
from lightning_scalerl.model.head import backbone, eval_mode, head_logits, output_head, text_config
from lightning_scalerl.model.windows import attention_windows

ATTENTION = ("sdpa", "eager")
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layer types without attention that keep no state between tokens.
OTHER_LAYERS = {"dense", "sparse", "moe"}
REMEDY = "use another model, or another generator"
# Allowed difference between FP32 log-probabilities from decoding and from a whole forward pass. Rounding stays far
# below it; a wrong mask or position exceeds it by far.
TOLERANCE = 1e-3
# Matches the names of position tables, learned or precomputed.
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_emb|embed_position)$")


def check_decodable(model: nn.Module, capacity: int) -> None:
    """Refuse a model whose decoding through the generator's cache differs from a whole forward pass.

    Args:
        model: a causal language model, with weights of any dtype.
        capacity: tokens of the longest prompt plus the longest completion.

    Raises:
        ConfigurationError: the model cannot be decoded; one line with its name and the reason.
    """
    _check_architecture(model)
    _check_context(model, capacity)
    previous_precision = torch.get_float32_matmul_precision()
    try:
        # The comparison checks cache bookkeeping. TF32 rounding could hide an error in it, or look like one.
        torch.set_float32_matmul_precision("highest")
        with eval_mode(model), torch.no_grad():
            difference = _largest_difference(model)
    except Exception as error:
        raise _refusal(model, f"decoding token by token fails ({error_line(error)})") from error
    finally:
        torch.set_float32_matmul_precision(previous_precision)
    tolerance = TOLERANCE if next(model.parameters()).dtype == torch.float32 else 0.5
    # "not <=" also refuses NaN.
    if not difference <= tolerance:
        raise _refusal(
            model, f"decoded token by token its log-probabilities differ by {difference:.3g} from a whole forward pass"
        )


def _refusal(model: nn.Module, reason: str) -> ConfigurationError:
    return ConfigurationError(f"model: {type(model).__name__} does not work with generator=torch: {reason}; {REMEDY}")


def _check_architecture(model: nn.Module) -> None:
    """Refuse features known not to work: other attention kernels, encoders, recurrent layers, ALiBi."""
    config = text_config(model)
    implementation = compat.attention_implementation(config)
    if implementation is not None and implementation not in ATTENTION:
        raise ConfigurationError(
            f"model: attn_implementation={implementation!r} takes no mask of generator=torch; load the model with "
            f"attn_implementation={ATTENTION[0]!r}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(model, "it is an encoder with a decoder")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    kinds |= {str(kind) for kind in getattr(config, "layers_block_type", None) or ()} - {"attention"}
    unsupported = sorted(kinds - ATTENTION_LAYERS - OTHER_LAYERS)
    if unsupported or compat.is_stateful(model):
        description = ", ".join(unsupported) or "a state-space or recurrent model"
        raise _refusal(
            model, f"its layers keep a state from token to token ({description}), which cannot be cut or copied"
        )
    base = backbone(model)
    if any(hasattr(base, name) for name in ("build_alibi_tensor", "build_mpt_alibi_tensor")) or getattr(
        config, "alibi", False
    ):
        raise _refusal(model, "its positions are ALiBi, which is built from another kind of mask")


def _check_context(model: nn.Module, capacity: int) -> None:
    """Refuse a context that exceeds a sliding window, the learned positions, or the range of fixed rotary positions."""
    config = text_config(model)
    for window in attention_windows(config):
        if window.size < capacity:
            raise ConfigurationError(
                f"generator: torch does not know sliding windows; the model's {window.field} of {window.size} tokens "
                f"is shorter than the context of {capacity}; shorten the context or use another generator"
            )
    fixed_length = _fixed_rotation_length(config)
    if fixed_length is not None and fixed_length < capacity:
        raise ConfigurationError(
            f"context: max_prompt_tokens and max_new_tokens make {capacity} tokens, and {type(model).__name__} turns "
            f"all its positions anew once a sequence is longer than {fixed_length}, so that what is in a cache or in a "
            "micro-batch with a longer sequence counts otherwise; shorten the context"
        )
    # Precomputed position tables are buffers; learned ones are embeddings.
    tables = {name: buffer.shape[0] for name, buffer in model.named_buffers() if buffer.dim() == 2}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            # OPT's table has `offset` extra rows before the first position.
            tables[name] = module.num_embeddings - int(getattr(module, "offset", 0) or 0)
    for name, positions in tables.items():
        if _POSITIONS.search(name) and positions < capacity:
            raise ConfigurationError(
                f"context: max_prompt_tokens and max_new_tokens make {capacity} tokens, and {type(model).__name__} "
                f"has {positions} positions; shorten the context"
            )


def _fixed_rotation_length(config: Any) -> int | None:
    """Return the sequence length, in tokens, beyond which the rotary embedding changes; None if it never does."""
    parameters = getattr(config, "rope_parameters", None) or {}
    lengths = []
    # Some configurations have one entry per layer type.
    for rope in (parameters, *(part for part in parameters.values() if isinstance(part, Mapping))):
        kind = str(rope.get("rope_type"))
        if kind == "longrope":
            lengths.append(rope.get("original_max_position_embeddings"))
        elif "dynamic" in kind:
            lengths.append(config.max_position_embeddings)
    return min((int(length) for length in lengths if length is not None), default=None)


def _largest_difference(model: nn.Module) -> float:
    """Return the largest difference of log-probabilities between decoding through the cache and a whole forward pass.

    Compares two sequences of different lengths, which are prefilled in part and then decoded together.
    """
    config = text_config(model)
    device = next(model.parameters()).device
    vocab_size = int(config.vocab_size)
    # Tokens vary with position and row, and lengths differ, so that a wrong row, position or mask changes the result.
    sequences = [
        [1 + (7 * position + 3 * row) % max(1, vocab_size - 1) for position in range(9 - 2 * row)] for row in range(2)
    ]
    prompts = [5, 2]
    cache = SlotCache(int(config.num_hidden_layers), 2, len(sequences[0]))
    last, caches, _ = encode(
        model, [tokens[:length] for tokens, length in zip(sequences, prompts, strict=True)], device
    )
    for row, keys_values in enumerate(caches):
        cache.fill(slice(row, row + 1), keys_values)
    decoded = [_logprobs(model, last)]
    position = torch.tensor(prompts, device=device)
    for step in range(4):
        tokens = torch.tensor([tokens[length + step] for tokens, length in zip(sequences, prompts, strict=True)])
        decoded.append(_logprobs(model, decode(model, cache, tokens.to(device), position + step)))
    largest = 0.0
    for row, (tokens_of_row, length) in enumerate(zip(sequences, prompts, strict=True)):
        inputs = torch.tensor([tokens_of_row], device=device)
        expected = _logprobs(model, backbone(model)(input_ids=inputs, use_cache=False).last_hidden_state[0])
        decoded_logprobs = torch.stack([step[row] for step in decoded])
        largest = max(largest, float((decoded_logprobs - expected[length - 1 : length + 4]).abs().max()))
    return largest


def _logprobs(model: nn.Module, hidden: Tensor) -> Tensor:
    """Return log-probabilities (n, V) of the next tokens after hidden states (n, width)."""
    head = output_head(model)
    logits: Any = head_logits(model, hidden, head.weight, head.bias, head.weight.dtype)
    return torch.log_softmax(logits, dim=-1)
