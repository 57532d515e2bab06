"""Start and end of a fit: probe of the generator, stop on request, end when the prompts are exhausted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint
from lightning_scalerl.callbacks.evaluate import evaluation_due, validate_now
from lightning_scalerl.callbacks.race import Race
from lightning_scalerl.callbacks.run import Run
from lightning_scalerl.measure.probe import start_probe
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.sampling import TRAINING
from lightning_scalerl.stream.prompts import PoolExhaustedError
from sweeps.run.interruption import RunInterruptedError

_log = logging.getLogger(__name__)


def probe(path: DataPath) -> None:
    """Check that trainer and generator compute the same log-probabilities, before any compute is counted."""
    sampling, trained = path.sampling, path.stage.models.trained
    settings, tokens = sampling.settings(), sampling.sets[TRAINING].tokens[0]
    with sampling.lend_generator() as generator:
        start_probe(generator, trained, tokens, path.stream.completed_steps, settings.phrase, settings.thinking_ended)


def stop_between_steps(trainer: Any, run: Run) -> NoReturn:
    """Save a checkpoint that includes the rollouts in flight, and end the fit by raising an error.

    Raises:
        RunInterruptedError: the run can be continued from the saved state.
        SIGTERMException: the run keeps no checkpoints to continue from, so it ends as Lightning does on SIGTERM.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, ResumableCheckpoint):
            callback.stop_between_steps(trainer, run)
    if trainer.received_sigterm:
        raise SIGTERMException
    raise RunInterruptedError(f"step {run.completed_steps}: {run.stop_reason}")


def next_batch_or_reason(path: DataPath, stop_reason: Callable[[], str | None]) -> TrainBatch | str | None:
    """Return the next batch, None if a stop was requested, or the reason (a string) why there is no further batch.

    Raises:
        PoolExhaustedError: the pool is exhausted before the first step, so the run has no curve.
    """
    try:
        return path.driver.next_batch(lambda: stop_reason() is not None)
    except PoolExhaustedError as error:
        if path.stream.completed_steps == 0:
            raise
        return f"pool exhausted, which a larger budget does not change: {error}"


def end_exhausted(trainer: Any, run: Run, reason: str) -> None:
    """End a fit normally when its pool is exhausted: evaluate the last weights, save, and stop the Trainer.

    Raises:
        RunInterruptedError: a stop was requested meanwhile; the run finishes when it is resumed.
        PoolExhaustedError: the Trainer does not stop, because it has a minimum number of steps.
    """
    if run.exhausted is not None:
        raise PoolExhaustedError(reason)
    run.exhausted = reason
    trainer.should_stop = True
    if run.ranks.leads:
        _log.warning("after step %d: %s", run.completed_steps, reason)
    _evaluate_and_save(trainer, run)


def end_stopped(trainer: Any, run: Run) -> None:
    """End a fit that a callback or `max_time` stops before `max_steps`: evaluate the last weights and save.

    A run that `Race` has stopped is not evaluated again. The race does not need it, and if the run is continued, it
    then equals a run that was never stopped.

    Raises:
        RunInterruptedError: a stop was requested meanwhile.
    """
    by_race = any(isinstance(callback, Race) and callback.has_stopped for callback in trainer.callbacks)
    stopped = trainer.should_stop and run.completed_steps < trainer.max_steps
    if stopped and not by_race and evaluation_due(trainer, run.completed_steps, last=True):
        _evaluate_and_save(trainer, run)


def _evaluate_and_save(trainer: Any, run: Run) -> None:
    if evaluation_due(trainer, run.completed_steps, last=True) and not validate_now(trainer, last=True):
        stop_between_steps(trainer, run)
    for callback in trainer.callbacks:
        if isinstance(callback, ResumableCheckpoint):
            callback.save(trainer, run)
