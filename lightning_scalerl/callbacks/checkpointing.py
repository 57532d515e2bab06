"""Checkpoints from which a run resumes bit for bit, written so that a partial file is never taken for a whole one."""

from __future__ import annotations

import errno
import re
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_scalerl.callbacks.base import without_tips
from lightning_scalerl.callbacks.checkpoint_file import IDENTITY, damage, written_directly
from lightning_scalerl.callbacks.evaluate import owed
from lightning_scalerl.callbacks.run_log import PassedOver, RunLog
from lightning_scalerl.checks import ConfigurationError, said, whole_number
from lightning_scalerl.distributed.checkpoint_folder import META, VOID, WHOLE_ONE, fsync_folder, is_folder, move, remove
from lightning_scalerl.distributed.start import process_rank
from lightning_scalerl.run import Run, run_of
from sweeps.run.interruption import RunInterruptedError
from sweeps.run.journal import JOURNAL_FILE, covered_step

NAME = re.compile(r"step-(\d+)\.ckpt")
UNRECORDED = ".unrecorded"


class ResumableCheckpoint(Checkpoint):
    """Saves the whole run every n optimizer steps, when it is asked to stop, and at the end; keeps the newest two.

    Beside those two there is at most one `.part`, of a save that was killed, until the next process of the run saves,
    and what a run fell back from, as `.void`, until its next checkpoint is there. What lies behind a broken line of its
    journal stays, as `.unrecorded`.

    Lightning calls a `Checkpoint` after all other callbacks, so the step's records are written before they are
    declared durable. With several ranks rank 0 writes; each writes its own part where the model is sharded, and the
    checkpoint is a folder.

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
        without_tips()
        self.directory = Path(directory)
        self.every_n_steps = whole_number("checkpoint.every_n_steps", every_n_steps)
        self._guard = guard or (lambda: None)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Set newer checkpoints aside, and stop without another save if that was asked before the first step."""
        run = run_of(pl_module)
        run.ranks.share(lambda: self._set_aside(run.completed_steps))
        self._stop_if_asked(run, run.ranks.agree(run.stop_reason))

    def _set_aside(self, step: int) -> None:
        if any(_step(path) > step for path in checkpoints(self.directory)):
            self._guard()
            set_aside(self.directory, step)

    def _make_room(self) -> None:
        """Delete the `.part` files of killed processes: several of them could leave no room for a whole checkpoint."""
        if halves := list(self.directory.glob("step-*.part")):
            self._guard()
        for half in halves:
            remove(half)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if it is time; stop if the run is asked to, unless it has reached its end anyway."""
        run = run_of(pl_module)
        step = run.completed_steps
        # An evaluation of the last step that was broken off is still to be made.
        last = step >= trainer.max_steps and not owed(trainer, step)
        reason = run.ranks.agree(run.stop_reason)
        if last or trainer.should_stop or reason is not None or step % self.every_n_steps == 0:
            self._save(trainer, run, step)
        if not last:
            self._stop_if_asked(run, reason)

    def save(self, trainer: Trainer, run: Run) -> None:
        """Save the run as it is, at the end of a fit that ends before `max_steps`."""
        self._save(trainer, run, run.completed_steps)

    def stop_between_steps(self, trainer: Trainer, run: Run) -> None:
        """Save the stream in the middle of a generation, where a stop is requested between two steps.

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
            # A unique name: a process that has lost the run's lease to this one may still be writing its own.
            unfinished = self.directory / f"step-{step:08d}.{uuid.uuid4().hex[:8]}.part"
            failure: Exception | None = None
            run.ranks.share(self._make_room)
            try:
                with written_directly(trainer):
                    trainer.save_checkpoint(unfinished, weights_only=False)  # said, or Lightning says so each time
            except Exception as error:
                # The other ranks wait at Lightning's barrier after the write: join it, then tell them of the failure.
                failure = error
                trainer.strategy.barrier("Trainer.save_checkpoint")
            elsewhere = run.ranks.agree(None if failure is None else said(failure))
            if failure is None and elsewhere is not None:
                failure = RuntimeError(f"checkpoint: a rank could not write its part, {elsewhere}")
            run.ranks.share(lambda: self._put_in_place(trainer, unfinished, step, failure))

    def _put_in_place(self, trainer: Trainer, unfinished: Path, step: int, failure: Exception | None) -> None:
        try:
            if failure is not None:
                raise failure
            self._guard()
            move(unfinished, self.directory / f"step-{step:08d}.ckpt")
            fsync_folder(self.directory)
        except Exception:
            with suppress(OSError):
                remove(unfinished)
            raise
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunLog):
                callback.checkpointed(step)
        for old in [*checkpoints(self.directory)[self.KEEP :], *self.directory.glob(f"step-*{VOID}")]:
            remove(old)


def checkpoints(directory: Path) -> list[Path]:
    """Return the paths of complete checkpoints, newest first."""
    found = [path for path in directory.glob("step-*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def check_whole(path: Any) -> None:
    """Refuse a file left by an interrupted save, and a checkpoint that a run has fallen back from.

    Args:
        path: of a checkpoint that is to be loaded by name; None if there is none.

    Raises:
        ConfigurationError: it is one of these.
    """
    if str(path or "").endswith((".part", VOID)):
        raise ConfigurationError(
            f"ckpt_path: {str(path)!r} is what a broken save has left, or was found damaged; {WHOLE_ONE}"
        )


def set_aside(directory: Path, step: int, suffix: str = VOID) -> None:
    """Rename checkpoints beyond the step that a run resumes from: they are no longer its own.

    `VOID` is for those that cannot be used: they go with the next that is saved. `UNRECORDED` stays until somebody
    cleans up: of a sound one only the records are lost, and they may turn up.
    """
    for path in checkpoints(directory):
        if _step(path) > step:
            move(path, path.with_suffix(suffix))


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


@dataclass(frozen=True)
class Newest:
    """Newest usable checkpoint, or None; and the newer unusable ones, with the reasons."""

    path: Path | None
    passed_over: tuple[PassedOver, ...] = ()


def newest_checkpoint(directory: str | Path, run: str | None = None, at_most: int | None = None) -> Newest:
    """Find the newest whole checkpoint of a run; each newer one that is passed over is named on stderr.

    All of it is read once: every record must have the checksum that it was written with. Where the folder above holds
    the run's journal, a checkpoint must be recorded there: else the run would go on beyond records that were lost.

    Args:
        directory: of the checkpoint files.
        run: identity of the run; a checkpoint that is of another one is passed over. One that does not say whose it
            is (of an earlier version, of a script) is taken.
        at_most: the latest step that may be used; None for what the journal says, any if there is none.

    Raises:
        OSError: the machine's trouble, not the file's: what is fine must not be passed over.
    """
    beyond = f"beyond step {at_most}"
    if at_most is None:
        at_most = covered_step(Path(directory).parent)
        beyond = f"beyond step {at_most}, the last checkpoint that {JOURNAL_FILE} records"
    if at_most is not None and at_most < 0:
        beyond = f"not recorded in {JOURNAL_FILE}"
    passed_over = []
    found = None
    for path in checkpoints(Path(directory)):
        why = beyond if at_most is not None and _step(path) > at_most else unusable(path, run)
        if why is None:
            found = path
            break
        passed_over.append(PassedOver(path.name, why))
    if process_rank() == 0:
        instead = "no older one is left" if found is None else f"{found.name} in its place"
        for each in passed_over:
            print(f"checkpoint {each.checkpoint} is passed over, {each.why}; {instead}", file=sys.stderr, flush=True)
    return Newest(found, tuple(passed_over))


def unusable(path: Path, run: str | None = None) -> str | None:
    """Return the reason why a checkpoint cannot be used, read to its last bit; None if it can.

    Arguments as of `newest_checkpoint`.

    Raises:
        OSError: the machine's trouble, not the file's.
    """
    try:
        why = damage(path)
        if why is not None:
            return why
        saved = torch.load(path / META if is_folder(path) else path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict) or "scalerl" not in saved:
            return "holds no run to go on with"
    except MemoryError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in (errno.EIO, errno.ESTALE, errno.ENOMEM):
            raise
        return f"cannot be read: {said(error)}"
    theirs = saved.get(IDENTITY)
    theirs = theirs.get("run") if isinstance(theirs, dict) else None
    return f"of another run, {theirs}" if None not in (run, theirs) and run != theirs else None
