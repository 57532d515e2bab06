"""Gradient checkpointing of a model of transformers: a layer's activations are computed again in the backward pass.

What is kept of each layer is its input. With `hooks` that is kept elsewhere, such as on the host by torch's
`save_on_cpu`, until the layer is computed again. transformers' own setting for that is of 5.17 and fails without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

# Context within which tensors are saved for the backward pass, elsewhere than where they are.
Hooks = Callable[[], AbstractContextManager[Any]]


def can_recompute(model: nn.Module) -> bool:
    """Return whether the model's class has gradient checkpointing."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def recompute(model: nn.Module, hooks: Hooks | None = None) -> None:
    """Turn gradient checkpointing on; it acts in the layers that `set_mode` leaves in training mode.

    Args:
        model: of transformers.
        hooks: say where the inputs of the layers are kept; None for the device.
    """
    checkpointed: Any = model
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    if hooks is not None:
        for part in model.modules():
            if hasattr(part, "_gradient_checkpointing_func"):
                part._gradient_checkpointing_func = partial(_kept_elsewhere, hooks)  # type: ignore[assignment]


def recompute_like(model: nn.Module, other: nn.Module) -> None:
    """Recompute a model's activations as another's of its class are, if they are."""
    if not getattr(other, "is_gradient_checkpointing", False):
        return
    ways: list[Any] = [getattr(part, "_gradient_checkpointing_func", None) for part in other.modules()]
    recompute(model, next((way.args[0] for way in ways if getattr(way, "func", None) is _kept_elsewhere), None))


def _kept_elsewhere(hooks: Hooks, function: Callable[..., Any], *args: Any) -> Any:
    # Only a checkpoint's inputs are saved within these hooks: it has hooks of its own for what its function saves.
    with hooks():
        return checkpoint(function, *args, use_reentrant=False)


def on_host() -> AbstractContextManager[Any]:
    """Return hooks that keep tensors on the host, in memory from which a GPU copies while it computes."""
    return save_on_cpu(pin_memory=torch.cuda.is_available())


def set_mode(model: nn.Module, dropout: bool) -> None:
    """Put a model into the mode that it is trained in: dropout on or off, and activations recomputed where they are."""
    model.train(dropout)
    for part in model.modules():
        # Layers that recompute their activations do so in training mode only; what is in them stays as it is.
        part.training = part.training or bool(getattr(part, "gradient_checkpointing", False))
