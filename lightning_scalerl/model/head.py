"""Language-model head, computed separately from the rest of the model so that its precision can be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_scalerl.checks import ConfigurationError, error_line
from lightning_scalerl.compat import transformers as compat
from lightning_scalerl.model.chunked_head import Scaling


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model; for a multimodal model, that of its text decoder."""
    config: Any = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def key_and_value_sizes(config: Any) -> tuple[int, int]:
    """Return the sizes of the key and the value of one attention head."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not getattr(config, "v_head_dim", None):
        return int(head_size), int(head_size)
    # DeepSeek: keys and values have different sizes.
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    keys = getattr(config, "qk_head_dim", None) or (sum(parts) if all(parts) else head_size)  # type: ignore[arg-type]
    return int(keys), int(config.v_head_dim)


def backbone(model: nn.Module) -> nn.Module:
    """Return the model without its head."""
    base: nn.Module = model.base_model  # type: ignore[assignment]
    inner = getattr(model, "model", None)
    # Llama 4's text model has the `base_model_prefix` of the whole model, so transformers returns the model itself.
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
    """Return FP32 logits (..., V) from hidden states, with the architecture's scaling; the product is in `dtype`."""
    # Autocast would override `dtype` with the policy's type.
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
    """Return the scaling of the head's product by the architecture (as in `head_logits`) and the temperature."""
    config = text_config(model)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return Scaling(factor, getattr(config, "final_logit_softcapping", None) or None, temperature)


def head_weights(model: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """Return weights and bias of the output head; None if they are split over the vocabulary between ranks."""
    head: Any = output_head(model)
    if not isinstance(head.weight, DTensor):
        return head.weight, head.bias
    if not head.weight.placements[0].is_replicate():
        return None
    return head.weight.to_local(), None if head.bias is None else head.bias.to_local()


def token_scores(
    model: nn.Module, hidden: Tensor, targets: Tensor, dtype: torch.dtype, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of tokens (N,) and entropies (N,) from hidden states (N, width), in FP32.

    Args:
        model: the model. Its head may be split over the vocabulary between ranks (`model.tensor_parallel`).
        hidden: states before the head; the same on all ranks that share the head.
        targets: token ids (N,).
        dtype: type of the head's product.
        temperature: divisor of the logits.
        entropy_gradient: whether the entropies have a gradient as well.
    """
    weights = head_weights(model)
    if weights is None:
        return token_scores_over_ranks(
            model, *local_weights(model), hidden, targets, dtype, temperature, entropy_gradient
        )
    logits = head_logits(model, hidden, *weights, dtype) / temperature
    logprobs = F.log_softmax(logits, dim=-1)
    scored = logprobs if entropy_gradient else logprobs.detach()
    entropies = -(scored.exp() * scored).sum(-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropies


def local_weights(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return this rank's part of the weights and bias of an output head that is split over the vocabulary."""
    head: Any = output_head(model)
    return head.weight.to_local(), None if head.bias is None else head.bias.to_local()


def token_scores_over_ranks(
    model: nn.Module,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `token_scores` if each rank has a part of the vocabulary; no rank computes all logits.

    For each token, the ranks reduce the largest logit, the sum of exponentials, the target's logit and, for the
    entropy, the sum of exponentials times logits. `weight` and `bias` come from `local_weights`. A caller that works in
    chunks should call `local_weights` only once, because each call creates another gradient tensor.
    """
    head: Any = output_head(model)
    mesh = head.weight.device_mesh
    # Each rank computes the gradient of the states for its part of the vocabulary; DTensor sums these gradients
    # (Partial).
    common = DTensor.from_local(hidden.to(dtype), mesh, [Replicate()], run_check=False)
    states = common.to_local(grad_placements=[Partial()])
    logits = head_logits(model, states, weight, bias, dtype) / temperature
    # Subtract the largest logit of all ranks before exp, against overflow.
    largest = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
    shifted = logits - largest
    exponentials = shifted.exp()
    # All parts have the same size: a vocabulary that the number of ranks does not divide is not split.
    local_targets = targets - mesh.get_local_rank() * weight.shape[0]
    not_local = (local_targets < 0) | (local_targets >= weight.shape[0])
    logit = (
        shifted.gather(-1, local_targets.masked_fill(not_local, 0).unsqueeze(-1))
        .squeeze(-1)
        .masked_fill(not_local, 0.0)
    )
    weighted = exponentials * shifted if entropy_gradient else exponentials.detach() * shifted.detach()
    parts = torch.stack([exponentials.sum(-1), logit, weighted.sum(-1)])
    summed = DTensor.from_local(parts, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    total, target_logit, moment = summed.to_local().unbind()
    # H = log sum exp y - sum p y, with y shifted by the largest logit.
    entropies = total.log() - moment / total
    return target_logit - total.log(), entropies if entropy_gradient else entropies.detach()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn dropout off for the `with` block, then restore every module's mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def computes_in_16_bit_only(model: nn.Module) -> bool:
    """Return whether the model's attention has kernels for 16-bit types only, as FlashAttention does."""
    return "flash_attention" in str(compat.attention_implementation(text_config(model)))


@torch.no_grad()
def check_head(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Check on one short input that our head computes the same logits as the model.

    Args:
        model: a causal language model in any mode.
        dtype: type to run the model in; FP32 unless its attention needs another.

    Raises:
        ConfigurationError: the architecture post-processes its logits in an unknown way. Training would optimise
            another distribution than the one that the model defines.
    """
    head = output_head(model)
    tokens = torch.arange(4, device=head.weight.device).unsqueeze(0)
    try:
        with eval_mode(model), torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
            expected = model(input_ids=tokens, use_cache=False).logits.float()
            hidden = backbone(model)(input_ids=tokens, use_cache=False).last_hidden_state
            weight, bias = (
                value.full_tensor() if isinstance(value, DTensor) else value for value in (head.weight, head.bias)
            )
            actual = head_logits(model, hidden, weight, bias, weight.dtype if dtype == torch.float32 else dtype)
    except Exception as error:
        raise ConfigurationError(
            f"model: {type(model).__name__} cannot be run on a few tokens ({error_line(error)}); it is not a "
            "causal language model that this project can train"
        ) from error
    close = torch.allclose(actual, expected, atol=1e-3, rtol=1e-3)
    if dtype != torch.float32:  # the model scales its logits in 16 bit, which rounds them again
        close = bool((actual - expected).abs().max() <= 2e-2 * expected.abs().max())
    if not close:
        raise ConfigurationError(
            f"model: {type(model).__name__} post-processes its logits in an unknown way "
            f"(largest difference {(actual - expected).abs().max():.3g}); it is not supported"
        )
