"""Generator's copy of the policy, in the dtypes of the `precision` axis."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_scalerl.axes.precision import Precision
from lightning_scalerl.model.head import head_logits, output_head

# Models made only for a generator, which uses them directly instead of copying them.
_generator_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def new_model(make: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype | None) -> nn.Module:
    """Make a model that a generator will not copy. Its uninitialized weights have their final dtype from the start.

    Args:
        make: class of the model, called with its configuration.
        config: the model's configuration.
        dtype: dtype of the parameters; None for the model's default. Each parameter is cast as it is registered, so at
            most one exists in another dtype at a time.
    """

    def cast(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
            return None  # keep the parameter object, so that tied parameters stay tied
        return nn.Parameter(parameter.detach().to(dtype), requires_grad=False)

    if dtype is None:
        model = make(config)
    else:
        handle = register_module_parameter_registration_hook(cast)  # type: ignore[arg-type]  # None leaves it as it is
        try:
            model = make(config)
        finally:
            handle.remove()
    _generator_models.add(model)
    return model


class GeneratorPolicy:
    """Generator's copy of the policy: weights in the policy's dtype, and the head in its own dtype.

    An FP32 head keeps all bits of the master weights, which a cast to BF16 and back would lose. With tied embeddings
    the head gets a separate copy, refreshed on every `load`. A model made by `new_model` is used directly.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.dtype = precision.policy_dtype
        self.head_dtype = precision.head_dtype(precision.fp32_head_generator)
        policy_model = model if model in _generator_models else copy.deepcopy(model)
        self.model = policy_model.to(self.dtype).eval().requires_grad_(False)
        self._separate_head = self.head_dtype != self.dtype
        self._head_weight: Tensor | None = None
        self._head_bias: Tensor | None = None
        self.load(dict(model.state_dict()))

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Load new weights (a state dict of the trainer's model, in any dtype)."""
        own_weights = self.model.state_dict()
        for name, tensor in weights.items():
            own_weights[name].copy_(tensor)
        if self._separate_head:
            head = output_head(self.model)
            self._head_weight = self._head_copy(weights, own_weights, head.weight)
            self._head_bias = None if head.bias is None else self._head_copy(weights, own_weights, head.bias)

    def _head_copy(self, weights: dict[str, Tensor], own_weights: dict[str, Tensor], part: Tensor) -> Tensor:
        """Return a copy of the head's weight or bias in the head's dtype.

        The copy is made from `weights`, because the tensors of this object's model have been rounded.
        """
        name = next(key for key, value in own_weights.items() if value.data_ptr() == part.data_ptr())
        return weights[name].detach().to(self.head_dtype, copy=True)

    def weights(self) -> dict[str, Any]:
        """Return all weights of this object in host memory, for a checkpoint taken while rollouts are in flight."""
        return {
            "model": {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()},
            "head_weight": None if self._head_weight is None else self._head_weight.cpu(),
            "head_bias": None if self._head_bias is None else self._head_bias.cpu(),
        }

    def load_weights(self, state: dict[str, Any]) -> None:
        """Restore the weights that `weights` returned."""
        self.model.load_state_dict(state["model"])
        # A checkpoint is loaded to the CPU, so move the head to the model's device.
        device = next(self.model.parameters()).device
        self._head_weight, self._head_bias = (
            None if state[name] is None else state[name].to(device) for name in ("head_weight", "head_bias")
        )

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return FP32 logits (rows, vocabulary), computed in the head's dtype."""
        head = output_head(self.model)
        weight = head.weight if self._head_weight is None else self._head_weight
        bias = head.bias if self._head_weight is None else self._head_bias
        return head_logits(self.model, hidden, weight, bias, self.head_dtype)
