"""Gradient checkpointing of transformers models: a layer's activations are recomputed in the backward pass.

Only each layer's input is kept. With `hooks` the inputs are kept elsewhere, such as on the host by torch's
`save_on_cpu`. transformers has a setting for that since 5.17, but it fails without a GPU.
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

from lightning_scalerl.compat import transformers as compat

# Function that returns a context manager in which tensors for the backward pass are saved in another place.
Hooks = Callable[[], AbstractContextManager[Any]]


def can_recompute(model: nn.Module) -> bool:
    """Return whether the model's class supports gradient checkpointing."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def recompute(model: nn.Module, hooks: Hooks | None = None) -> None:
    """Turn gradient checkpointing on. It is active in the layers that `set_mode` leaves in training mode.

    Args:
        model: a transformers model.
        hooks: context manager that decides where the layers' inputs are kept; None to keep them on the device.
    """
    checkpointed: Any = model
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    if hooks is not None:
        for part in model.modules():
            compat.set_checkpoint_function(part, partial(_checkpoint_with_hooks, hooks))


def recompute_like(model: nn.Module, reference: nn.Module) -> None:
    """Set up gradient checkpointing as in another model of the same class, if that model has it."""
    if not getattr(reference, "is_gradient_checkpointing", False):
        return
    functions: list[Any] = [compat.checkpoint_function(part) for part in reference.modules()]
    recompute(
        model,
        next(
            (function.args[0] for function in functions if getattr(function, "func", None) is _checkpoint_with_hooks),
            None,
        ),
    )


def _checkpoint_with_hooks(hooks: Hooks, function: Callable[..., Any], *args: Any) -> Any:
    # The hooks see only the checkpoint's inputs: `checkpoint` has hooks of its own for tensors inside its function.
    with hooks():
        return checkpoint(function, *args, use_reentrant=False)


def on_host() -> AbstractContextManager[Any]:
    """Return hooks that keep tensors in host memory, pinned if there is a GPU, so that copies overlap with compute."""
    return save_on_cpu(pin_memory=torch.cuda.is_available())


def set_mode(model: nn.Module, dropout: bool) -> None:
    """Set a model's mode for training: dropout on or off. Gradient checkpointing works in either mode."""
    model.train(dropout)
    for part in model.modules():
        # Layers recompute only in training mode. Their submodules, such as dropout, keep the mode set above.
        part.training = part.training or bool(getattr(part, "gradient_checkpointing", False))
