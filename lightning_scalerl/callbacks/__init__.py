"""Callbacks around the training step: evaluation, the journal, checkpoints."""

from lightning_scalerl.callbacks.base import Recorder

__all__ = ["Recorder"]
