"""Muon for the matrices of a model's blocks, AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.distributed.sharded import blocks, shard_like, whole_tensor

# Coefficients of torch.optim.Muon's quintic iteration, and the constant that it adds to the norm.
COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7
# Functions from a matrix's size (rows, columns) to a factor on its learning rate, by the names of torch.optim.Muon.
ADJUSTMENTS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def hidden_matrices(root: nn.Module) -> list[nn.Parameter]:
    """Return the two-dimensional weights of linear layers inside a model's repeated blocks.

    Embeddings, the output head, norms, biases and the three-dimensional weights of fused experts are not among them.
    """
    modules = (module for block in blocks(root) for module in block.modules() if not isinstance(module, nn.Embedding))
    weights = (module._parameters.get("weight") for module in modules)
    return [weight for weight in weights if weight is not None and weight.ndim == 2]


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix by Newton-Schulz iterations in BF16.

    Args:
        matrix: (rows, columns).
        steps: number of iterations.

    Source: Jordan et al. 2024, Muon, as in torch.optim.Muon, which gives the same numbers bit for bit.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer. A parameter group with a key `momentum` is updated by Muon, others by AdamW.

    With M the momentum, G the gradient and f the adjustment of the rate by the matrix's size:

        M = mu M + (1 - mu) G,  O = orthogonalize((1 - mu) G + mu M),  W = W - lr weight_decay W - lr f O

    A step equals that of torch.optim.Muon bit for bit. torch's class is not used, because on a sharded matrix its
    products would sum in another order. Here every rank orthogonalizes the whole matrix and keeps its own part.

    Args:
        matrices: groups for Muon, each with its "lr".
        others: groups for AdamW, each with its "lr".
        momentum, ns_steps, adjust_lr_fn, weight_decay: as in torch.optim.Muon, with Nesterov momentum.
        betas, eps: as in torch.optim.AdamW, which has the same weight decay.

    Source: Jordan et al. 2024, Muon; arXiv 2502.16982, section 2.2, for weight decay and `match_rms_adamw`.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        momentum: float,
        ns_steps: int,
        adjust_lr_fn: str,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        muon_settings = {
            "momentum": momentum,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "weight_decay": weight_decay,
        }
        # Torch refuses an optimizer without any parameter, so a model without other parameters has no AdamW.
        self._adamw = torch.optim.AdamW(others, betas=betas, eps=eps, weight_decay=weight_decay) if others else None
        adamw_groups = [] if self._adamw is None else self._adamw.param_groups
        super().__init__([*({**group, **muon_settings} for group in matrices), *adamw_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; parameters without a gradient keep weights and momentum. All ranks call it."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if "momentum" in group:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._update(weight, weight.grad, group)
        if self._adamw is not None:
            # Loading a state dict replaces groups and states of this object, so pass them to AdamW in every step.
            self._adamw.param_groups = [group for group in self.param_groups if "momentum" not in group]
            self._adamw.state = self.state
            self._adamw.step()
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonalize(whole_tensor(gradient.lerp(momentum, group["momentum"])), group["ns_steps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * ADJUSTMENTS[group["adjust_lr_fn"]](*weight.shape)
        weight.add_(shard_like(update, weight), alpha=-rate)
