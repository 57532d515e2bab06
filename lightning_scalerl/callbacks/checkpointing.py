"""Checkpoints from which a run resumes bit for bit. An incomplete file is never taken for a complete one."""

from __future__ import annotations

import errno
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from lightning_scalerl.callbacks.base import filter_lightning_tips
from lightning_scalerl.callbacks.checkpoint_file import IDENTITY, damage, written_directly
from lightning_scalerl.callbacks.evaluate import evaluation_due
from lightning_scalerl.callbacks.run import Run, run_of
from lightning_scalerl.callbacks.run_log import PassedOver, RunLog
from lightning_scalerl.checks import ConfigurationError, error_line, whole_number
from lightning_scalerl.distributed.checkpoint_folder import META, VOID, WHOLE_ONE, fsync_folder, is_folder, move, remove
from lightning_scalerl.distributed.start import process_rank
from sweeps.run.checkpoint_names import checkpoint_name, step_of
from sweeps.run.checkpoint_names import checkpoints as checkpoints
from sweeps.run.interruption import RunInterruptedError
from sweeps.run.journal import JOURNAL_FILE, covered_step

UNRECORDED = ".unrecorded"


class ResumableCheckpoint(Checkpoint):
    """Saves the whole run every n optimizer steps, when asked to stop, and at the end. Keeps the newest two
    checkpoints.

    The directory may also contain:

    - `.part` files, left by a process that was killed while it saved; the next save deletes them;
    - `.void` checkpoints, which could not be used on resuming; the next save deletes them;
    - `.unrecorded` checkpoints, whose records come after a broken line of the journal; they are never deleted.

    Lightning calls a `Checkpoint` after all other callbacks, so a step's records are written before the checkpoint that
    covers them. With several ranks, rank 0 writes. The checkpoint of a sharded model is a folder, in which each rank
    writes its own part.

    This callback also obeys requests to stop (`sweeps.run.interruption`, or a SIGTERM that Lightning received) on any
    rank: after the current step is saved, `Trainer.fit` raises `RunInterruptedError` on all ranks. During generation,
    rank 0 saves at once, with the rollouts in flight. An evaluation is aborted, and repeated when the run resumes.

    Args:
        directory: folder of the checkpoints.
        every_n_steps: optimizer steps between checkpoints.
        guard: called before a checkpoint gets its final name. It raises if another process has taken over the run.
        keep_steps: steps at which a checkpoint is always saved and never deleted, so that runs can branch from it.
    """

    KEEP = 2
    best_model_path = ""  # Lightning reads this attribute of every `Checkpoint`; there is no best model here

    def __init__(
        self,
        directory: str | Path,
        every_n_steps: int,
        guard: Callable[[], None] | None = None,
        keep_steps: Sequence[int] = (),
    ) -> None:
        filter_lightning_tips()
        self.keep_steps = frozenset(whole_number("checkpoint.keep_steps", step) for step in keep_steps)
        self.directory = Path(directory)
        self.every_n_steps = whole_number("checkpoint.every_n_steps", every_n_steps)
        self._guard = guard or (lambda: None)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Rename checkpoints that are newer than the current step. If a stop is already requested, stop at once."""
        run = run_of(pl_module)
        run.ranks.share(lambda: self._set_aside(run.completed_steps))
        self._raise_if_stopped(run, run.ranks.agree(run.stop_reason))

    def _set_aside(self, step: int) -> None:
        # Check the lease first, because the files may belong to another process by now.
        if any(step_of(path) > step for path in checkpoints(self.directory)):
            self._guard()
            mark_unusable(self.directory, step)

    def _remove_partial_files(self) -> None:
        """Delete `.part` files of killed processes, because they could fill the disk."""
        if unfinished := list(self.directory.glob("step-*.part")):
            self._guard()
        for path in unfinished:
            remove(path)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a checkpoint is due. If a stop is requested, save and stop (after the last step only save)."""
        run = run_of(pl_module)
        step = run.completed_steps
        # If the evaluation after the last step was interrupted, the run must be resumed to repeat it: it is not the
        # last.
        last = step >= trainer.max_steps and not evaluation_due(trainer, step)
        reason = run.ranks.agree(run.stop_reason)
        due = step % self.every_n_steps == 0 or step in self.keep_steps
        if last or trainer.should_stop or reason is not None or due:
            self._save(trainer, run, step)
        if not last:
            self._raise_if_stopped(run, reason)

    def save(self, trainer: Trainer, run: Run) -> None:
        """Save the run at the end of a fit that ends before `max_steps`."""
        self._save(trainer, run, run.completed_steps)

    def stop_between_steps(self, trainer: Trainer, run: Run) -> None:
        """Save the run between two optimizer steps, in the middle of a generation, because a stop was requested.

        Raises:
            RunInterruptedError: always, after the run is saved.
        """
        reason = run.ranks.agree(run.stop_reason)
        self._save(trainer, run, run.completed_steps)
        self._raise_if_stopped(run, reason)

    @staticmethod
    def _raise_if_stopped(run: Run, reason: str | None) -> None:
        if reason is not None:
            raise RunInterruptedError(f"step {run.completed_steps}: {reason}")

    def _save(self, trainer: Trainer, run: Run, step: int) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return  # like Lightning's own checkpoint callback
        with run.meter.phase("checkpoint"):
            # A unique name, because a process that has lost the run's lease may still be writing a checkpoint.
            unfinished = self.directory / f"step-{step:08d}.{uuid.uuid4().hex[:8]}.part"
            failure: Exception | None = None
            run.ranks.share(self._remove_partial_files)
            try:
                with written_directly(trainer):
                    # `weights_only` is given, because otherwise Lightning logs a message each time.
                    trainer.save_checkpoint(unfinished, weights_only=False)
            except Exception as error:
                # The other ranks wait at Lightning's barrier after the write: go there too, then share the error.
                failure = error
                trainer.strategy.barrier("Trainer.save_checkpoint")
            first_failure = run.ranks.agree(None if failure is None else error_line(failure))
            if failure is None and first_failure is not None:
                failure = RuntimeError(f"checkpoint: a rank could not write its part, {first_failure}")
            run.ranks.share(lambda: self._publish(trainer, unfinished, step, failure))

    def _publish(self, trainer: Trainer, unfinished: Path, step: int, failure: Exception | None) -> None:
        """Give a written checkpoint its final name, record it in the journal, and delete old ones."""
        try:
            if failure is not None:
                raise failure
            self._guard()
            move(unfinished, self.directory / checkpoint_name(step))
            fsync_folder(self.directory)
        except Exception:
            with suppress(OSError):
                remove(unfinished)
            raise
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunLog):
                callback.checkpointed(step)
        deletable = [path for path in checkpoints(self.directory) if step_of(path) not in self.keep_steps]
        for old in [*deletable[self.KEEP :], *self.directory.glob(f"step-*{VOID}")]:
            remove(old)


def refuse_unusable_path(path: Any) -> None:
    """Refuse to load what an interrupted save has left (`.part`), or a checkpoint found unusable (`.void`).

    Args:
        path: path of the checkpoint to load; None if there is none.

    Raises:
        ConfigurationError: the path has one of these suffixes.
    """
    if str(path or "").endswith((".part", VOID)):
        raise ConfigurationError(
            f"ckpt_path: {str(path)!r} is what a broken save has left, or was found damaged; {WHOLE_ONE}"
        )


def mark_unusable(directory: Path, step: int, suffix: str = VOID) -> None:
    """Add a suffix to the checkpoints after `step`, from which a run resumes, because the run will repeat their steps.

    `VOID` marks unusable checkpoints, which are deleted after the next save. `UNRECORDED` marks intact checkpoints
    whose records are lost. They are not deleted, because the records may be recovered.
    """
    for path in checkpoints(directory):
        if step_of(path) > step:
            move(path, path.with_suffix(suffix))


@dataclass(frozen=True)
class Newest:
    """Newest usable checkpoint (None if there is none), and newer ones that are unusable, with the reasons."""

    path: Path | None
    passed_over: tuple[PassedOver, ...] = ()


def newest_checkpoint(
    directory: str | Path,
    run: str | None = None,
    at_most: int | None = None,
    parent_checkpoint: tuple[str, int] | None = None,
) -> Newest:
    """Find the newest intact checkpoint of a run. Report newer ones that are skipped on stderr.

    The whole checkpoint is read once, and every record must match its checksum. If the parent folder has the run's
    journal, the journal must record the checkpoint; otherwise the run would continue from a step whose records were
    lost.

    Args:
        directory: folder of the checkpoints.
        run: identity of the run; checkpoints of other runs are skipped. A checkpoint without an identity (from an
            earlier version or a script) is accepted.
        at_most: latest step that may be used; None for the step of the last checkpoint in the journal, or for any step
            if there is no journal.
        shared: for a branch, run and step of the parent's checkpoint, which is accepted too.

    Raises:
        OSError: the machine cannot read the file at the moment. The checkpoint may be intact, and must not be skipped.
    """
    why_beyond = f"beyond step {at_most}"
    if at_most is None:
        at_most = covered_step(Path(directory).parent)
        why_beyond = f"beyond step {at_most}, the last checkpoint that {JOURNAL_FILE} records"
    if at_most is not None and at_most < 0:
        why_beyond = f"not recorded in {JOURNAL_FILE}"
    passed_over = []
    newest = None
    for path in checkpoints(Path(directory)):
        owner = parent_checkpoint[0] if parent_checkpoint is not None and parent_checkpoint[1] == step_of(path) else run
        reason = why_beyond if at_most is not None and step_of(path) > at_most else unusable(path, owner)
        if reason is None:
            newest = path
            break
        passed_over.append(PassedOver(path.name, reason))
    if process_rank() == 0:
        replacement = "no older checkpoint is left" if newest is None else f"using {newest.name} instead"
        for passed in passed_over:
            print(
                f"checkpoint {passed.checkpoint} is skipped, {passed.why}; {replacement}",
                file=sys.stderr,
                flush=True,
            )
    return Newest(newest, tuple(passed_over))


def unusable(path: Path, run: str | None = None) -> str | None:
    """Return why a checkpoint cannot be used; None if it can. The whole checkpoint is read.

    Args:
        path: the checkpoint.
        run: identity of the run, as in `newest_checkpoint`.

    Raises:
        OSError: the machine cannot read the file at the moment. The checkpoint may be intact.
    """
    try:
        reason = damage(path)
        if reason is not None:
            return reason
        saved = torch.load(path / META if is_folder(path) else path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict) or "scalerl" not in saved:
            return "contains no run to continue"
    except MemoryError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in (errno.EIO, errno.ESTALE, errno.ENOMEM):
            raise
        return f"cannot be read: {error_line(error)}"
    identity = saved.get(IDENTITY)
    owner = identity.get("run") if isinstance(identity, dict) else None
    return f"of another run, {owner}" if None not in (run, owner) and run != owner else None
