"""Callbacks around the training step: evaluation, the journal, checkpoints, progress.

A callback gets the run from Lightning's module by `run.run_of`. `trainer` checks the settings of Lightning's Trainer.
"""

from lightning_scalerl.callbacks.base import Recorder

__all__ = ["Recorder"]
