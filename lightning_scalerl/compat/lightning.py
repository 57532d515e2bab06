"""Private members of Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any


def saves_by_time(checkpoint: Any) -> bool:
    """Return whether a ModelCheckpoint saves at intervals of time. It keeps its arguments under private names only."""
    return checkpoint._train_time_interval is not None


def saves_every_n_steps(checkpoint: Any) -> int:
    """Return after how many steps a ModelCheckpoint saves (0: never, or another callback). The number has no public
    name.
    """
    return int(getattr(checkpoint, "_every_n_train_steps", 0))


def stop_at_epoch_end(early_stopping: Any) -> None:
    """Make EarlyStopping check at the end of an epoch unless the user chose when; no public name sets this later."""
    if early_stopping._check_on_train_epoch_end is None:
        early_stopping._check_on_train_epoch_end = True


def save_at_epoch_end(checkpoint: Any) -> None:
    """Make ModelCheckpoint save at the end of an epoch unless the user chose when; no public name sets this later."""
    if checkpoint._save_on_train_epoch_end is None:
        checkpoint._save_on_train_epoch_end = True


def wandb_arguments(logger: Any) -> dict[str, Any]:
    """Return the arguments that a WandbLogger passes to `wandb.init`. `WandbLogger.experiment` would start a run."""
    arguments: dict[str, Any] = logger._wandb_init
    return arguments


def summary_depth(summary: Any) -> int:
    """Return the depth of a ModelSummary callback, so that another class can replace the callback. The depth has no
    public name.
    """
    return int(summary._max_depth)


def data_source(trainer: Any) -> Any:
    """Return the source of a Trainer's current data: a datamodule, dataloaders, or else the module. The source has no
    public name.
    """
    loops = {
        "fit": trainer.fit_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    return loops[trainer.state.fn.value]._data_source.instance


def set_batches_that_stepped(loop: Any, steps: int) -> None:
    """Set the counter that loggers use as the step. Only a checkpoint's `load_state_dict` sets it publicly."""
    loop._batches_that_stepped = steps


@contextmanager
def keep_first_iteration(trainer: Any) -> Iterator[None]:
    """Restore the logging state of the training loop after the `with` block, because a validation overwrites it.

    No public name restores it.
    """
    connector = trainer._logger_connector
    first = connector._first_loop_iter
    try:
        yield
    finally:
        connector._first_loop_iter = first


def restore_modes(loop: Any, module: Any) -> None:
    """Restore modules' training or evaluation mode. A validation loop does so itself, unless an exception ends it."""
    loop._module_mode.restore(module)


def timeout(strategy: Any) -> timedelta | None:
    """Return the timeout of a strategy's collectives, which is a public argument but no public attribute."""
    limit: timedelta | None = strategy._timeout
    return limit


def backend(strategy: Any) -> str:
    """Return the backend that a strategy uses. `process_group_backend` is None unless the user has set one."""
    return str(strategy._get_process_group_backend())


def start_method(strategy: Any) -> str:
    """Return how DDP starts its ranks, which is a public argument but no public attribute."""
    return str(strategy._start_method)


def ddp_arguments(strategy: Any) -> dict[str, Any]:
    """Return the arguments for torch's DDP. A strategy accepts them publicly and keeps them privately."""
    arguments: dict[str, Any] = strategy._ddp_kwargs
    return arguments
