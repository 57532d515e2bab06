"""A member of a study: run from its directory, to the end of its budget or to a clean border."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, newest_checkpoint
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.composition import axes_of, build, build_recipe, use_folders
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.distributed.start import process_rank, trainer_settings
from lightning_scalerl.module import ScaleRL
from sweeps.errors import UserError
from sweeps.run.files import write_atomically
from sweeps.run.interruption import RunInterruptedError, interruption
from sweeps.run.journal import CONFIG_FILE
from sweeps.run.lease import Lease, LeaseHeldError, alive
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec

LEASE_WAIT_S = 60.0


def run_member(run_dir: Path, progress: bool = False) -> None:
    """Run the member frozen in `run_dir` to the end of its budget, from its newest checkpoint if it has one.

    Of several processes that do so at once, one does, and another of them goes on if it dies: a scheduler that has
    lost sight of a job starts a second copy. The ranks of one job count as one.

    Raises:
        RunInterruptedError: the run was asked to stop and has saved itself.
        UserError: another process is running it.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    spec = RunSpec.read(run_dir)
    use_folders(spec.folders)
    config = OmegaConf.create(dict(spec.config))
    torch.set_num_threads(int(config.launch.threads))
    torch.manual_seed(spec.seed)
    with _alone(run_dir, spec.steps) as lease:
        if is_done(run_dir, spec.steps):
            print(f"{spec.title}: done already")
            return
        if lease is not None:
            write_atomically(run_dir / CONFIG_FILE, OmegaConf.to_yaml(config))
        _fit(run_dir, spec, config, lease, progress)


def _fit(run_dir: Path, spec: RunSpec, config: DictConfig, lease: Lease | None, progress: bool) -> None:
    # The recipe's own choices; what this run changes comes as callbacks, as in a user's script.
    shared = {key: value for key, value in spec.config.items() if key not in axes_of(spec.config)}
    own_choices = {axis: spec.reference[axis] for axis in axes_of(spec.reference)}
    reference = build_recipe(OmegaConf.create({**shared, **own_choices}), spec.baseline)
    changed = [build(config, axis) for axis in spec.departures]
    module = ScaleRL(model=build(config, "model"), recipe=reference)
    task = build(config, "task")
    guard = lease.check if lease is not None else None
    trainer = Trainer(
        max_steps=spec.steps,
        **trainer_settings(),
        logger=False,
        enable_progress_bar=progress,
        enable_model_summary=False,
        callbacks=[
            *changed,
            build(config, "evaluation"),
            RunLog(run_dir, spec.header(), guard),
            ResumableCheckpoint(run_dir / "checkpoints", config.checkpoint.every_n_steps, guard),
        ],
    )
    trainer.fit(
        module,
        datamodule=RolloutDataModule(task, seed=spec.seed),
        ckpt_path=newest_checkpoint(run_dir / "checkpoints"),
        weights_only=True,
    )


@contextmanager
def _alone(run_dir: Path, steps: int) -> Iterator[Lease | None]:
    """The right to write the run, for rank 0; None for the other ranks, which wait until it has it.

    A job of a cluster waits as long as it takes: if the other copy dies, nobody else will go on. Elsewhere a writer
    that was orphaned a moment ago gets the time to notice.
    """
    job, restart = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    who = {"job": job, "restart": restart, "step": os.environ.get("SLURM_STEP_ID")} if job else {}
    if process_rank() > 0:
        # Rank 0 may find the run done, and be gone before anyone sees its lease.
        while job and not _is(alive(run_dir), who) and not is_done(run_dir, steps):
            _stop_if_asked("while rank 0 waited for another process")
            time.sleep(0.5)
        yield None
        return
    lease = Lease(run_dir, owner=who)
    try:
        lease.acquire(None if job else LEASE_WAIT_S, give_up=lambda: interruption.requested)
    except LeaseHeldError as error:
        _stop_if_asked(f"while {lease.holder()} was writing this run")
        raise UserError(
            f"{run_dir}: another process has been writing this run for {LEASE_WAIT_S:.0f} s ({lease.holder()})"
        ) from error
    with lease:
        yield lease


def _is(facts: dict[str, object] | None, who: dict[str, str | None]) -> bool:
    return facts is not None and all(facts.get(key) == value for key, value in who.items())


def _stop_if_asked(when: str) -> None:
    if interruption.requested:
        raise RunInterruptedError(f"{interruption.reason} {when}")
