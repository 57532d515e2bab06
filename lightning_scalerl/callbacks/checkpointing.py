"""Checkpoints from which a run continues bit for bit, written so that a half-written one is never mistaken."""

from __future__ import annotations

import errno
import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_scalerl.callbacks.evaluate import owed
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.checks import whole_number
from lightning_scalerl.run import Run, run_of
from sweeps.run.interruption import RunInterruptedError

NAME = re.compile(r"step-(\d+)\.ckpt")


class ResumableCheckpoint(Checkpoint):
    """Saves the whole run every n optimizer steps, when it is asked to stop, and at the end; keeps the newest two.

    Lightning calls a `Checkpoint` after all other callbacks, so the step's records are written before they are
    declared durable. With several ranks rank 0 writes.

    This is where a request to stop (`sweeps.run.interruption`, or a SIGTERM that Lightning has taken) to any of the
    ranks is honoured: once the step it came in is saved, `Trainer.fit` raises `RunInterruptedError` on all of them. One
    that reaches rank 0 in the middle of a generation or an evaluation is honoured there: the one is saved as it is, the
    other is made again.

    Args:
        directory: of the checkpoint files.
        every_n_steps: optimizer steps between checkpoints.
        guard: called before a checkpoint takes its place; raises if another process has taken the run over.
    """

    KEEP = 2
    best_model_path = ""  # Lightning asks every `Checkpoint` for it; there is no best one here

    def __init__(self, directory: str | Path, every_n_steps: int, guard: Callable[[], None] | None = None) -> None:
        self.directory = Path(directory)
        self.every_n_steps = whole_number("checkpoint.every_n_steps", every_n_steps)
        self._guard = guard or (lambda: None)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """A request that came before the first step: all that there is to save is in the checkpoint already."""
        run = run_of(pl_module)
        run.ranks.share(lambda: self._set_aside(run.completed_steps))
        self._stop_if_asked(run, run.ranks.agree(run.stop_reason))

    def _set_aside(self, step: int) -> None:
        """Checkpoints beyond the step that the run goes on from (they could not be read) are void from now on."""
        beyond = [path for path in checkpoints(self.directory) if int(path.stem.removeprefix("step-")) > step]
        if beyond:
            self._guard()
        for path in beyond:
            path.replace(path.with_suffix(".void"))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if it is time, and stop if the run is asked to and not at its end anyway."""
        run = run_of(pl_module)
        step = run.completed_steps
        # An evaluation of the last step that was broken off is still to be made.
        last = step >= trainer.max_steps and not owed(trainer, step)
        reason = run.ranks.agree(run.stop_reason)
        if last or trainer.should_stop or reason is not None or step % self.every_n_steps == 0:
            self._save(trainer, run, step)
        if not last:
            self._stop_if_asked(run, reason)

    def stop_between_steps(self, trainer: Trainer, run: Run) -> None:
        """Asked to stop where no step has just ended: save the stream as it is, in the middle of a generation.

        Raises:
            RunInterruptedError: saved.
        """
        reason = run.ranks.agree(run.stop_reason)
        self._save(trainer, run, run.completed_steps)
        self._stop_if_asked(run, reason)

    @staticmethod
    def _stop_if_asked(run: Run, reason: str | None) -> None:
        if reason is not None:
            raise RunInterruptedError(f"step {run.completed_steps}: {reason}")

    def _save(self, trainer: Trainer, run: Run, step: int) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # as Lightning's own
        with run.meter.phase("checkpoint"):
            # A name of its own: a process that has lost the run to another may still be writing.
            unfinished = self.directory / f"step-{step:08d}.{uuid.uuid4().hex[:8]}.part"
            failure: Exception | None = None
            try:
                trainer.save_checkpoint(unfinished)
            except Exception as error:
                # The others wait at the barrier that Lightning has after the writing, before they can be told.
                failure = error
                trainer.strategy.barrier("Trainer.save_checkpoint")
            run.ranks.share(lambda: self._put_in_place(trainer, unfinished, step, failure))

    def _put_in_place(self, trainer: Trainer, unfinished: Path, step: int, failure: Exception | None) -> None:
        try:
            if failure is not None:
                raise failure
            with unfinished.open("rb") as handle:
                os.fsync(handle.fileno())
            self._guard()
            unfinished.rename(self.directory / f"step-{step:08d}.ckpt")
        except Exception:
            with suppress(OSError):
                unfinished.unlink()
            raise
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunLog):
                callback.checkpointed(step)
        for old in [*checkpoints(self.directory)[self.KEEP :], *self.directory.glob("*.part")]:
            old.unlink(missing_ok=True)


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    found = [path for path in directory.glob("step-*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest checkpoint of a run that can be read; a damaged or foreign one is passed over for the one before."""
    for path in checkpoints(directory):
        try:
            complete = "scalerl" in torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except MemoryError:
            raise
        except Exception as error:
            # Trouble of the machine, not of the file: what is fine must not be passed over.
            if getattr(error, "errno", None) in (errno.EIO, errno.ESTALE, errno.ENOMEM):
                raise
            continue
        if complete:
            return path
    return None
