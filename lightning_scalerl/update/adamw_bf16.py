"""AdamW whose weights and moments keep only BF16 values, with or without Kahan summation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq", "compensation")


def round_to_bf16(tensor: Tensor) -> Tensor:
    """Return the nearest BF16 values, in the tensor's own type; a tensor that is not floating-point is unchanged."""
    return tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor


@torch.no_grad()
def round_weights(root: nn.Module) -> None:
    """Round all trained weights of a module to the nearest BF16 values, in place."""
    for parameter in root.parameters():
        if parameter.requires_grad:
            parameter.copy_(round_to_bf16(parameter))


class StoredInBF16(torch.optim.Optimizer):
    """AdamW that rounds weights and moments to BF16 after every step, as if they were stored in BF16.

    With t the step, g the gradient, and all arithmetic in FP32:

        m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2
        u = - lr (weight_decay w + m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps))

    Without Kahan summation w becomes bf16(w + u): an update below half of the distance between two BF16 numbers is
    lost. With it, the compensation c keeps the lost part: c = bf16(c + u), w' = bf16(w + c), c = bf16(c - (w' - w)).

    The weights stay in FP32 tensors that hold BF16 values, so gradients, forward pass and publishing work as with the
    other optimizers, under any strategy. Moments and compensation are BF16 tensors.

    Args:
        parameters: parameters, or groups of them; their values are rounded.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        kahan: whether to use Kahan summation.

    Source: arXiv 2010.06192, algorithms 1 (nearest rounding) and 3 (Kahan summation); the order of operations is that
    of torchao 0.18 (`optim/adam.py`, `single_param_adam`).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        kahan: bool,
    ) -> None:
        self._kahan = kahan
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make one step; parameters without a gradient keep weights and moments."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return loss

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS if self._kahan else MOMENTS[:2]:
                state[name] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["step"] += 1
        (beta1, beta2), step = group["betas"], float(state["step"])
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().lerp_(gradient.square(), 1 - beta2)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**step)).div_(denominator).add_(weight, alpha=group["weight_decay"])
        update.mul_(-group["lr"])
        if not self._kahan:
            weight.copy_(round_to_bf16(weight + update))
            return
        compensation = round_to_bf16(state["compensation"].float() + update)
        old_weight = weight.clone()
        weight.copy_(round_to_bf16(weight + compensation))
        state["compensation"].copy_(compensation - (weight - old_weight))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; moments stay BF16, where torch would cast them to the type of the weights."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in state.keys() & set(MOMENTS):
                state[name] = state[name].bfloat16()
