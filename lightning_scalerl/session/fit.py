"""A fit from its start to its end, around the training steps: probe, first weights, compute meter, stop and failure.

In comes a module that is set up; out goes one whose meter has stopped and whose engines are closed, with a note of how
the fit ended.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint
from lightning_scalerl.callbacks.evaluate import Evaluate, evaluation_of, owed, validate_now
from lightning_scalerl.callbacks.trainer import count_from
from lightning_scalerl.measure.probe import start_probe
from lightning_scalerl.model.recompute import set_mode
from lightning_scalerl.rollouts.rollout import TrainBatch
from lightning_scalerl.session.parts import Parts
from lightning_scalerl.session.sampling import TRAINING, generator_arguments
from lightning_scalerl.stream.prompts import PoolExhaustedError
from sweeps.run.interruption import RunInterruptedError

_log = logging.getLogger(__name__)


def begin_fit(module: Parts) -> None:
    """Check that all ranks resume at the same step; make an evaluation after the last step that is still due."""
    trainer, steps = module.trainer, module.completed_steps
    module.exhausted = None
    module.ranks.check_alike("checkpoint: completed steps", steps)
    module.records.begin(trainer)
    module.ranks.share(partial(_publish_again, module))
    if steps >= trainer.max_steps and owed(trainer, steps):
        module.meter.start()
        if not validate_now(trainer):
            # Nothing new to save; and Lightning's counters are not restored yet.
            raise RunInterruptedError(f"step {steps}: {module.stop_reason}")


def begin_training(module: Parts) -> None:
    """Probe the generator, publish the current weights to that of a fresh run, and start the compute meter."""
    # The model's own dropout would make trainer and generator two policies.
    set_mode(module.policy, module.recipe.optimizer.dropout)
    if module.critic is not None:
        set_mode(module.critic, False)
    module.ranks.share(partial(_probe, module))
    if module.completed_steps == 0 and module.trainer.ckpt_path is None:
        module.ranks.share(lambda: module.generator.publish(module.trained.weights(), 0))
    module.ranks.restore_sigterm(module.sigterm_handler)
    module.meter.start()
    module.continuation.fit_began()


def _publish_again(module: Parts) -> None:
    """Restore a generator whose weights were not saved under the trainer's, which are those of the last step."""
    state, module.continuation.generator = module.continuation.generator, None
    if state is not None:
        published = {"weights": module.trained.weights(), "version": module.completed_steps}
        module.generator.load_state_dict({**state, **published})


def _probe(module: Parts) -> None:
    """Check that trainer and generator compute the same, before any compute is counted."""
    given = generator_arguments(module.sampling.inputs)
    tokens = module.sampling.sets[TRAINING].tokens[0]
    interruption = (given["sampling"].phrase, given["sampling"].thinking_ended)
    with module.sampling.generating() as generator:
        start_probe(generator, module.trained, tokens, module.completed_steps, *interruption)


def stop_between_steps(module: Any) -> NoReturn:
    """Save the stream in the middle of a generation, and end the run.

    Raises:
        RunInterruptedError: the run can be continued from there.
        SIGTERMException: Lightning's own way, where the run keeps no checkpoints that could be continued.
    """
    for callback in module.trainer.callbacks:
        if isinstance(callback, ResumableCheckpoint):
            callback.stop_between_steps(module.trainer, module)
    if module.trainer.received_sigterm:
        raise SIGTERMException
    raise RunInterruptedError(f"step {module.completed_steps}: {module.stop_reason}")


def batch_or_why_none(module: Parts) -> TrainBatch | str | None:
    """Return the next batch, None if the run is asked to stop, or why there is no further batch; rank 0's alone.

    Raises:
        PoolExhaustedError: before the first step: such a run has no curve.
    """
    try:
        return module.driver.next_batch(lambda: module.stop_reason is not None)
    except PoolExhaustedError as error:
        if module.completed_steps == 0:
            raise
        return f"pool exhausted, which a larger budget does not change: {error}"


def end_exhausted(module: Any, reason: str) -> None:
    """End a fit whose pool is exhausted as one that is done: evaluate the last weights, save, and stop the Trainer.

    Raises:
        RunInterruptedError: the run is asked to stop meanwhile; a resume ends it.
        PoolExhaustedError: the Trainer does not stop, for it has a minimum of steps.
    """
    trainer = module.trainer
    if module.exhausted is not None:
        raise PoolExhaustedError(reason)
    module.exhausted = reason
    trainer.should_stop = True
    if module.ranks.leads:
        _log.warning("after step %d: %s", module.completed_steps, reason)
    if owed(trainer, module.completed_steps, last=True) and not validate_now(trainer):
        stop_between_steps(module)
    for callback in trainer.callbacks:
        if isinstance(callback, ResumableCheckpoint):
            callback.save(trainer, module)


def validate(module: Parts) -> None:
    """Evaluate all held-out sets: a record of the run in a fit, Lightning's own metrics for `Trainer.validate`."""
    trainer = module.trainer
    evaluation = evaluation_of(trainer)
    if evaluation is None:
        evaluation = Evaluate()
        evaluation.follow(module.recipe.evaluation)
    if trainer.state.fn == "fit":
        metrics = evaluation.measure(module)
        module.records.record(module, "eval", lambda: metrics)
        return
    metrics = evaluation.measure(module, in_fit=False)
    count_from(trainer, module.completed_steps)
    several = module.ranks.count > 1
    module.log_dict(metrics, batch_size=1, sync_dist=several, rank_zero_only=several)


def end_fit(module: Parts) -> None:
    """Stop the compute meter; time between two fits is not charged."""
    module.meter.stop()
    module.continuation.fit_ended()


def close_engines(module: Parts) -> None:
    """Close generators and verifiers with processes or memory of their own; another fit starts them again."""
    if module.data_path is not None:
        module.data_path.driver.close()


def fail(module: Parts, error: BaseException) -> None:
    """Stop the meter and close the engines after an error, which may have come before there were any."""
    if hasattr(module, "meter"):
        module.meter.stop()
    close_engines(module)
    module.continuation.fit_ended(error)


def lines_at_start(module: Parts) -> list[str]:
    """Return what a user is shown once at the start of a fit: memory, prompts, the verifier's trial."""
    given = module.arguments.get("model_adapter")
    trained = [] if given is None else [f"adapter: the model came with one, which is trained: {given}"]
    if module.read_whole is not None:
        trained.append(f"model: every rank reads the whole of it before it keeps its part: {module.read_whole}")
    if module.memory:
        trained.append(module.memory)
    return [] if module.data_path is None else [*trained, *module.data_path.began]
