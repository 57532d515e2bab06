"""Language-model head apart from the rest of the model, so that its precision can be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

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


def head_weights(model: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Return weights and bias of the output head; None where they are split over the vocabulary."""
    head: Any = output_head(model)
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias
    if not head.weight.placements[0].is_replicate():
        return None
    return head.weight.to_local(), None if head.bias is None else head.bias.to_local()


def token_scores(
    model: nn.Module, hidden: Tensor, wanted: Tensor, dtype: torch.dtype, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of tokens (N,) and entropies (N,) from hidden states (N, width), in FP32.

    Args:
        model: whose head it is; its weights are whole, or split over the vocabulary (`model.tensor_parallel`).
        hidden: states before the head, on each rank that shares the head the same ones.
        wanted: tokens (N,).
        dtype: that the head multiplies in.
        temperature: that the logits are divided by.
        entropy_gradient: whether the entropies have a gradient, too.
    """
    whole = head_weights(model)
    if whole is None:
        return scores_in_parts(model, *local_weights(model), hidden, wanted, dtype, temperature, entropy_gradient)
    logits = head_logits(model, hidden, *whole, dtype) / temperature
    logprobs = F.log_softmax(logits, dim=-1)
    scored = logprobs if entropy_gradient else logprobs.detach()
    entropies = -(scored.exp() * scored).sum(-1)
    return logprobs.gather(-1, wanted.unsqueeze(-1)).squeeze(-1), entropies


def local_weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return this rank's part of weights and bias of an output head that is split over the vocabulary."""
    head: Any = output_head(model)
    return head.weight.to_local(), None if head.bias is None else head.bias.to_local()


def scores_in_parts(
    model: nn.Module,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    wanted: Tensor,
    dtype: torch.dtype,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `token_scores` does where each rank has a part of the vocabulary: no rank makes all logits.

    Reduced over the ranks are the largest logit, the sum of exponentials, the wanted logit, and for the entropy the
    sum of exponentials times logits. `weight` and `bias` are those of `local_weights`, which who works in chunks asks
    for once: each time a gradient of its own would be made of them.
    """
    head: Any = output_head(model)
    mesh = head.weight.device_mesh
    # Each rank's states get a gradient from its part of the vocabulary: the sum, in the head's type, is the gradient.
    common = DTensor.from_local(hidden.to(dtype), mesh, [Replicate()], run_check=False)
    states = common.to_local(grad_placements=[Partial()])
    logits = head_logits(model, states, weight, bias, dtype) / temperature
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
    shifted = logits - largest
    exponentials = shifted.exp()
    # Parts are of one size: a vocabulary that the ranks do not divide is not split.
    own = wanted - mesh.get_local_rank() * weight.shape[0]
    elsewhere = (own < 0) | (own >= weight.shape[0])
    chosen = shifted.gather(-1, own.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
    weighed = exponentials * shifted if entropy_gradient else exponentials.detach() * shifted.detach()
    parts = torch.stack([exponentials.sum(-1), chosen, weighed.sum(-1)])
    summed = DTensor.from_local(parts, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    total, target, moment = summed.to_local().unbind()
    entropies = total.log() - moment / total
    return target - total.log(), entropies if entropy_gradient else entropies.detach()


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


def computes_in_16_bit_only(model: nn.Module) -> bool:
    """Return whether the model's attention has kernels of 16-bit types alone: FlashAttention's."""
    return "flash_attention" in str(getattr(text_config(model), "_attn_implementation", None))


@torch.no_grad()
def check_head(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Compare our head with the model's own on one short input, whatever mode the model is in.

    Args:
        model: a causal language model.
        dtype: that the model is run in; FP32 unless its attention demands another.

    Raises:
        ConfigurationError: the architecture treats its logits in a way we do not know; training on would
            optimise another distribution than the one the model defines.
    """
    head = output_head(model)
    tokens = torch.arange(4, device=head.weight.device).unsqueeze(0)
    try:
        with eval_mode(model), torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            expected = model(input_ids=tokens, use_cache=False).logits.float()
            hidden = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
            weight, bias = (
                each.full_tensor() if isinstance(each, DTensor) else each for each in (head.weight, head.bias)
            )
            ours = head_logits(model, hidden, weight, bias, weight.dtype if dtype == torch.float32 else dtype)
    except Exception as error:
        raise ConfigurationError(
            f"model: {type(model).__name__} cannot be run on a few tokens ({said(error)}); it is not a "
            "causal language model that this project can train"
        ) from error
    close = torch.allclose(ours, expected, atol=1e-3, rtol=1e-3)
    if dtype != torch.float32:  # the model's own scaling rounds as well
        close = bool((ours - expected).abs().max() <= 2e-2 * expected.abs().max())
    if not close:
        raise ConfigurationError(
            f"model: {type(model).__name__} post-processes its logits in an unknown way "
            f"(largest difference {(ours - expected).abs().max():.3g}); it is not supported"
        )
