"""Gradient checkpointing of a model of transformers: a layer's activations are computed again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn


def can_recompute(model: nn.Module) -> bool:
    """Return whether the model's class has gradient checkpointing."""
    return bool(getattr(model, "supports_gradient_checkpointing", False))


def recompute(model: nn.Module) -> None:
    """Turn gradient checkpointing on; it acts in the layers that `set_mode` leaves in training mode."""
    checkpointed: Any = model
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})


def set_mode(model: nn.Module, dropout: bool) -> None:
    """Put a model into the mode that it is trained in: dropout on or off, and activations recomputed where they are."""
    model.train(dropout)
    for part in model.modules():
        # Layers that recompute their activations do so in training mode only; what is in them stays as it is.
        part.training = part.training or bool(getattr(part, "gradient_checkpointing", False))
