"""Start and end of a fit, around the training steps: probe, first weights, compute meter, stop and failure.

The functions take a module after `setup`. At the end its meter is stopped, its engines are closed, and it has a record
of how the fit ended.
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
    """Check that all ranks resume at the same step; run the evaluation after the last step if it is still due."""
    trainer, steps = module.trainer, module.completed_steps
    module.exhausted = None
    module.ranks.check_alike("checkpoint: completed steps", steps)
    module.records.begin(trainer)
    module.ranks.share(partial(_publish_again, module))
    if steps >= trainer.max_steps and owed(trainer, steps):
        module.meter.start()
        if not validate_now(trainer):
            # Do not save: nothing is new, and Lightning's counters are not restored yet.
            raise RunInterruptedError(f"step {steps}: {module.stop_reason}")


def begin_training(module: Parts) -> None:
    """Probe the generator, publish the weights to it in a fresh run, and start the compute meter."""
    # The model's own dropout settings would make the trainer's policy differ from the generator's.
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
    """Restore a generator whose weights were not saved; it gets the trainer's weights, those of the last step."""
    state, module.continuation.generator = module.continuation.generator, None
    if state is not None:
        published = {"weights": module.trained.weights(), "version": module.completed_steps}
        module.generator.load_state_dict({**state, **published})


def _probe(module: Parts) -> None:
    """Check that trainer and generator compute the same log-probabilities, before any compute is counted."""
    given = generator_arguments(module.sampling.inputs)
    tokens = module.sampling.sets[TRAINING].tokens[0]
    interruption = (given["sampling"].phrase, given["sampling"].thinking_ended)
    with module.sampling.generating() as generator:
        start_probe(generator, module.trained, tokens, module.completed_steps, *interruption)


def stop_between_steps(module: Any) -> NoReturn:
    """Save the stream in the middle of generation, and end the run.

    Raises:
        RunInterruptedError: the run can be continued from the saved state.
        SIGTERMException: the run keeps no checkpoints to continue from, so it ends as Lightning does on SIGTERM.
    """
    for callback in module.trainer.callbacks:
        if isinstance(callback, ResumableCheckpoint):
            callback.stop_between_steps(module.trainer, module)
    if module.trainer.received_sigterm:
        raise SIGTERMException
    raise RunInterruptedError(f"step {module.completed_steps}: {module.stop_reason}")


def batch_or_why_none(module: Parts) -> TrainBatch | str | None:
    """Return the next batch, None if the run is to stop, or the reason why there is no further batch. Rank 0 only.

    Raises:
        PoolExhaustedError: the pool is exhausted before the first step, so the run has no curve.
    """
    try:
        return module.driver.next_batch(lambda: module.stop_reason is not None)
    except PoolExhaustedError as error:
        if module.completed_steps == 0:
            raise
        return f"pool exhausted, which a larger budget does not change: {error}"


def end_exhausted(module: Any, reason: str) -> None:
    """End a fit normally when its pool is exhausted: evaluate the last weights, save, and stop the Trainer.

    Raises:
        RunInterruptedError: a stop was requested meanwhile; resuming the run finishes it.
        PoolExhaustedError: the Trainer does not stop, because it has a minimum number of steps.
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
    """Evaluate all held-out sets: in a fit, write a record of the run; for `Trainer.validate`, log to Lightning."""
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
    """Stop the compute meter, so that time between two fits is not counted."""
    module.meter.stop()
    module.continuation.fit_ended()


def close_engines(module: Parts) -> None:
    """Close generators and verifiers that hold processes or memory; another fit starts them again."""
    if module.data_path is not None:
        module.data_path.driver.close()


def fail(module: Parts, error: BaseException) -> None:
    """Stop the meter and close the engines after an error, which may have occurred before they existed."""
    if hasattr(module, "meter"):
        module.meter.stop()
    close_engines(module)
    module.continuation.fit_ended(error)


def lines_at_start(module: Parts) -> list[str]:
    """Return the lines that a user sees once at the start of a fit: memory, prompts, the verifier trial."""
    given = module.arguments.get("model_adapter")
    trained = [] if given is None else [f"adapter: the model came with one, which is trained: {given}"]
    if module.read_whole is not None:
        trained.append(f"model: every rank reads the whole of it before it keeps its part: {module.read_whole}")
    if module.memory:
        trained.append(module.memory)
    return [] if module.data_path is None else [*trained, *module.data_path.began]
