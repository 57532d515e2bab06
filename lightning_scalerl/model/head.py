"""Language-model head apart from the rest of the model, so that its precision can be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_scalerl.checks import ConfigurationError, said
from lightning_scalerl.model.chunked_head import Scaling


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model: of a multimodal model, the text decoder's."""
    config: Any = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the sizes of a key and of a value of one attention head."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not getattr(config, "v_head_dim", None):
        return int(head_size), int(head_size)
    # DeepSeek: keys and values of unlike size
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    keys = getattr(config, "qk_head_dim", None) or (sum(parts) if all(parts) else head_size)  # type: ignore[arg-type]
    return int(keys), int(config.v_head_dim)


def backbone(model: nn.Module) -> nn.Module:
    """Return the model without its head."""
    base: nn.Module = model.base_model  # type: ignore[assignment]
    inner = getattr(model, "model", None)
    # Llama 4's text model names its base as the whole model does, so transformers returns the model itself.
    return inner if base is model and isinstance(inner, nn.Module) else base


def output_head(model: nn.Module) -> nn.Linear:
    """Return the linear language-model head.

    Raises:
        ConfigurationError: the model has none.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise ConfigurationError(f"model: {type(model).__name__} has no linear language-model head")
    return head


def head_logits(model: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return logits in FP32 from hidden states, multiplied in `dtype`, with the scaling some architectures add."""
    # Without autocast, which would multiply in the policy's type whatever `dtype` is.
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).float()
    config = text_config(model)
    if getattr(config, "logit_scale", None):  # Cohere
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):  # Gemma
        cap = config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits


def scaling_of(model: nn.Module, temperature: float) -> Scaling:
    """Return what `head_logits` and the temperature do to the head's product."""
    config = text_config(model)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Scaling(factor, getattr(config, "final_logit_softcapping", None) or None, temperature)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off in the `with` block, then restore every module's own mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Compare our head with the model's own on one short input, whatever mode the model is in.

    Raises:
        ConfigurationError: the architecture treats its logits in a way we do not know; training on would
            optimise another distribution than the one the model defines.
    """
    head = output_head(model)
    tokens = torch.arange(4, device=head.weight.device).unsqueeze(0)
    try:
        with eval_mode(model):
            expected = model(input_ids=tokens, use_cache=False).logits.float()
            hidden = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
            ours = head_logits(model, hidden, head.weight, head.bias, head.weight.dtype)
    except Exception as error:
        raise ConfigurationError(
            f"model: {type(model).__name__} cannot be run on a few tokens ({said(error)}); it is not a "
            "causal language model that this project can train"
        ) from error
    if not torch.allclose(ours, expected, atol=1e-3, rtol=1e-3):
        raise ConfigurationError(
            f"model: {type(model).__name__} post-processes its logits in an unknown way "
            f"(largest difference {(ours - expected).abs().max():.3g}); it is not supported"
        )
