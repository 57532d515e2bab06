"""A member of a study: run from its directory, to the end of its budget or to a clean border."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, newest_checkpoint
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.choice import AXES
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.module import ScaleRL
from lightning_scalerl.recipe import build, build_recipe
from sweeps.errors import UserError
from sweeps.journal import CONFIG_FILE
from sweeps.spec import RunSpec, write_atomically

LOCK_FILE = ".writer.lock"
LOCK_TIMEOUT_S = 60.0


def run_member(run_dir: Path, progress: bool = False) -> None:
    """Run the member frozen in `run_dir` to the end of its budget, from its newest checkpoint if it has one."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    spec = RunSpec.read(run_dir)
    config = OmegaConf.create(dict(spec.config))
    torch.set_num_threads(int(config.launch.threads))
    torch.manual_seed(spec.seed)
    try:
        # A writer that was orphaned a moment ago gets the time to notice.
        with FileLock(run_dir / LOCK_FILE, timeout=LOCK_TIMEOUT_S):
            write_atomically(run_dir / CONFIG_FILE, OmegaConf.to_yaml(config))
            # The recipe's own choices; what this run changes comes as callbacks, as in a user's script.
            own_choices = {axis: spec.reference[axis] for axis in AXES}
            reference = build_recipe(OmegaConf.create({**spec.config, **own_choices}), spec.baseline)
            changed = [build(config, axis) for axis in spec.axes if axis in AXES]
            module = ScaleRL(model=build(config, "model"), recipe=reference)
            task = build(config, "task")
            trainer = Trainer(
                max_steps=spec.steps,
                accelerator="auto",
                devices=1,
                logger=False,
                enable_progress_bar=progress,
                enable_model_summary=False,
                callbacks=[
                    *changed,
                    build(config, "evaluation"),
                    RunLog(run_dir, spec.header()),
                    ResumableCheckpoint(run_dir / "checkpoints", config.checkpoint.every_n_steps),
                ],
            )
            trainer.fit(
                module,
                datamodule=RolloutDataModule(task, seed=spec.seed),
                ckpt_path=newest_checkpoint(run_dir / "checkpoints"),
                weights_only=True,
            )
    except Timeout as error:
        raise UserError(f"{run_dir}: another process has been writing this run for {LOCK_TIMEOUT_S:.0f} s") from error
