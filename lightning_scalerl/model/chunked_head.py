"""Log-probabilities and entropies from hidden states in chunks of tokens, without logits of all tokens at once.

With a real vocabulary the logits are the largest tensor of a step. The forward pass computes, reads and drops the
logits of one chunk at a time. The backward pass computes them again and overwrites them with their gradient. So only
one chunk of logits exists at a time, besides inputs, weights and their gradients. With logits y, p = softmax(y) and
entropy H:

    d log p_t / dy = onehot(t) - p        dH / dy = -p (log p + H)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Map from a head's matrix product z to logits: cap tanh(factor z / cap) / temperature, or factor z / temperature.

    Cohere and Granite models have a factor, Gemma models a cap.
    """

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def apply(self, product: Tensor) -> Tensor:
        """Overwrite the head's product with the logits and return them."""
        if self.factor != 1:
            product.mul_(self.factor)
        if self.cap is not None:
            product.div_(self.cap).tanh_().mul_(self.cap)
        return product if self.temperature == 1 else product.div_(self.temperature)

    def backward(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Convert the gradient of the logits to the gradient of the product, in place.

        Args:
            gradient: gradient of the logits; it is overwritten.
            logits: the logits; needed only with a cap, else None.
        """
        if self.cap is not None:
            assert logits is not None
            # d tanh(u) / du = 1 - tanh(u)^2, and tanh(u) = logits * temperature / cap.
            gradient.mul_(1 - (logits * (self.temperature / self.cap)).square_())
        return gradient.mul_(self.factor / self.temperature)


def chunked_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scaling: Scaling,
    dtype: torch.dtype,
    chunk: int,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `targets` and entropies in FP32, (N,) each, with gradient.

    Args:
        hidden: states before the head, (N, width).
        weight, bias: parameters of the head, (V, width) and (V,) or None.
        targets: token ids, (N,).
        scaling: map from the head's product to logits.
        dtype: type of the head's product.
        chunk: tokens per chunk.
        entropy_gradient: whether the entropies have a gradient as well.
    """
    scored: tuple[Tensor, Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, scaling, dtype, chunk, entropy_gradient
    )
    return scored


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scaling: Scaling,
        dtype: torch.dtype,
        chunk: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, norms = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        # Autocast would override `dtype` with the policy's type.
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                logits = scaling.apply(F.linear(hidden[part].to(dtype), *head).float())
                norm = norms[part] = logits.logsumexp(-1)
                logprobs[part] = logits.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1) - norm
                # H = log sum exp y - sum p y
                probabilities = (logits - norm.unsqueeze(-1)).exp_()
                entropies[part] = norm - torch.einsum("nv,nv->n", probabilities, logits)
                del logits, probabilities  # free them before the next chunk is computed
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.settings = scaling, dtype, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        scaling, dtype, chunk, entropy_gradient = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        # A frozen head has no gradient.
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                states, grad_part = hidden[part].to(dtype), grad_logprobs[part].unsqueeze(-1)
                logits = scaling.apply(F.linear(states, *head).float())
                capped = None if scaling.cap is None else logits.clone()
                # Work in place, to save memory: the memory of `logits` becomes that of `log_p`, of the probabilities,
                # then of the gradient.
                log_p = logits.sub_(norms[part].unsqueeze(-1))
                if entropy_gradient:
                    factor = log_p + entropies[part].unsqueeze(-1)
                    gradient = log_p.exp_().mul_(factor.mul_(grad_entropies[part].unsqueeze(-1)).add_(grad_part).neg_())
                else:
                    gradient = log_p.exp_().mul_(-grad_part)
                gradient.scatter_add_(-1, targets[part].unsqueeze(-1), grad_part)
                gradient = scaling.backward(gradient, capped).to(dtype)
                grad_hidden[part] = gradient @ head[0]
                if grad_weight is not None and grad_weight.dtype == dtype:
                    grad_weight.addmm_(gradient.T, states)
                elif grad_weight is not None:
                    grad_weight.add_(gradient.T @ states)
                if grad_bias is not None:
                    grad_bias.add_(gradient.sum(0))
                del logits, log_p, gradient, capped  # free them before the next chunk is computed
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None
