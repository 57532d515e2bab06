"""Callbacks around the training step: evaluation, the journal, checkpoints, progress.

They reach the run through `run.run_of`. `trainer` checks the settings of Lightning's Trainer.
"""

from lightning_scalerl.callbacks.base import Recorder

__all__ = ["Recorder"]
