"""Log-probabilities and entropies from hidden states in chunks of tokens: logits of all tokens are never there.

At a real vocabulary the logits are the largest tensor of a step. Each chunk's are made, read and dropped in the forward
pass, and made again in the backward pass, where their gradient is written over them: beyond inputs, weights and their
gradients one chunk is alive. With y the logits, p = softmax(y) and H the entropy

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
    """From a head's product z to the logits: cap tanh(factor z / cap) / temperature, or factor z / temperature."""

    factor: float = 1.0
    cap: float | None = None
    temperature: float = 1.0

    def over(self, product: Tensor) -> Tensor:
        """Write the logits over the head's product, and return them."""
        if self.factor != 1:
            product.mul_(self.factor)
        if self.cap is not None:
            product.div_(self.cap).tanh_().mul_(self.cap)
        return product if self.temperature == 1 else product.div_(self.temperature)

    def back(self, gradient: Tensor, logits: Tensor | None) -> Tensor:
        """Turn a gradient of the logits into one of the product, in place; a cap needs the logits for it."""
        if self.cap is not None:
            assert logits is not None
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
        weight, bias: of the head, (V, width) and (V,) or None.
        targets: token ids, (N,).
        scaling: from the head's product to logits.
        dtype: type of the head's product.
        chunk: tokens at a time.
        entropy_gradient: whether the entropies have a gradient, too.
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
        # Without autocast, which would multiply in the policy's type whatever `dtype` is.
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                logits = scaling.over(F.linear(hidden[part].to(dtype), *head).float())
                norm = norms[part] = logits.logsumexp(-1)
                logprobs[part] = logits.gather(-1, targets[part].unsqueeze(-1)).squeeze(-1) - norm
                # H = log sum exp y - sum p y
                share = (logits - norm.unsqueeze(-1)).exp_()
                entropies[part] = norm - torch.einsum("nv,nv->n", share, logits)
                del logits, share  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, targets, norms, entropies)
        ctx.settings = scaling, dtype, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, norms, entropies = ctx.saved_tensors
        scaling, dtype, chunk, entropy_gradient = ctx.settings
        of_hidden = torch.empty_like(hidden)
        # A frozen head has no gradient.
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(hidden), chunk):
                part = slice(start, start + chunk)
                states, given = hidden[part].to(dtype), of_logprobs[part].unsqueeze(-1)
                logits = scaling.over(F.linear(states, *head).float())
                kept = None if scaling.cap is None else logits.clone()
                share = logits.sub_(norms[part].unsqueeze(-1))
                if entropy_gradient:
                    factor = share + entropies[part].unsqueeze(-1)
                    gradient = share.exp_().mul_(factor.mul_(of_entropies[part].unsqueeze(-1)).add_(given).neg_())
                else:
                    gradient = share.exp_().mul_(-given)
                gradient.scatter_add_(-1, targets[part].unsqueeze(-1), given)
                gradient = scaling.back(gradient, kept).to(dtype)
                of_hidden[part] = gradient @ head[0]
                if of_weight is not None and of_weight.dtype == dtype:
                    of_weight.addmm_(gradient.T, states)
                elif of_weight is not None:
                    of_weight.add_(gradient.T @ states)
                if of_bias is not None:
                    of_bias.add_(gradient.sum(0))
                del logits, share, gradient, kept  # before the next chunk's are made
        return of_hidden, of_weight, of_bias, None, None, None, None, None
