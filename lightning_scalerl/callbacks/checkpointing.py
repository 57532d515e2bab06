"""Checkpoints from which a run continues bit for bit, written so that a half-written one is never mistaken."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.choice import whole_number

NAME = re.compile(r"step-(\d+)\.ckpt")


class ResumableCheckpoint(Checkpoint):
    """Saves the whole run every n optimizer steps and at the end; keeps the newest two.

    Lightning calls a `Checkpoint` after all other callbacks, so the step's records are written before they are
    declared durable.

    Args:
        directory: of the checkpoint files.
        every_n_steps: optimizer steps between checkpoints.
    """

    KEEP = 2

    def __init__(self, directory: str | Path, every_n_steps: int) -> None:
        self.directory = Path(directory)
        self.every_n_steps = whole_number("checkpoint.every_n_steps", every_n_steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """If it is time."""
        step = pl_module.completed_steps
        if step % self.every_n_steps and step < trainer.max_steps:
            return
        with pl_module.meter.phase("checkpoint"):
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / f"step-{step:08d}.ckpt"
            unfinished = path.with_suffix(".part")
            trainer.save_checkpoint(unfinished)
            with unfinished.open("rb") as handle:
                os.fsync(handle.fileno())
            unfinished.rename(path)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, RunLog):
                    callback.checkpointed(step)
            for old in checkpoints(self.directory)[self.KEEP :]:
                old.unlink()


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    found = [path for path in directory.glob("step-*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint that can be read; a damaged one is passed over for the one before it."""
    for path in checkpoints(directory):
        try:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception:
            continue
        return path
    return None
