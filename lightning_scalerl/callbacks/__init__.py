"""Callbacks around the training step: evaluation, journal, checkpoints, progress, races."""

from lightning_scalerl.callbacks.base import Recorder

__all__ = ["Recorder"]
