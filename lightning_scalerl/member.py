"""A member of a study: planned and checked before anything runs, then run from its directory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf

from lightning_scalerl.callbacks.checkpointing import ResumableCheckpoint, newest_checkpoint
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.choice import AXES, ConfigurationError, whole_number
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.module import ScaleRL
from lightning_scalerl.recipe import build, build_recipe, compose
from lightning_scalerl.task.base import check_task
from sweeps.errors import UserError
from sweeps.journal import CONFIG_FILE
from sweeps.spec import OPERATIONAL_KEYS, RunSpec, changed_keys, make_spec, write_atomically

LOCK_FILE = ".writer.lock"
LOCK_TIMEOUT_S = 60.0
DEFAULT_RECIPE = "scalerl"  # as in conf/train.yaml
# Groups that never name a curve: its recipe does already, its seed does not, and the rest is not science.
UNLABELLED = OPERATIONAL_KEYS | {"recipe", "experiment", "variant", *AXES}


def plan(override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
    """Compose, check and identify members, and make what they share; no training starts before all of it holds.

    Raises:
        ConfigurationError: the first problem found, in one line.
    """
    everywhere = set.intersection(*(set(overrides) for overrides in override_lists))
    specs = [_plan_one(list(overrides), everywhere) for overrides in override_lists]
    checked: set[str] = set()
    for spec in specs:
        if spec.curve not in checked:
            _check(spec)
            checked.add(spec.curve)
    for spec in specs:
        build(OmegaConf.create(dict(spec.config)), "model")
    return specs


def _plan_one(overrides: list[str], everywhere: set[str]) -> RunSpec:
    """One member; overrides that not all members share are part of its label."""
    config = compose(overrides)
    departures = [entry for entry in overrides if _group(entry) in (*AXES, "variant")]
    recipe = _value(overrides, "recipe") or DEFAULT_RECIPE
    values, reference = _plain(config), _plain(compose([entry for entry in overrides if entry not in departures]))
    axes = changed_keys(values, reference)
    variant = [config.label] if config.label else []
    if variant and [_group(config.label)] != [axis for axis in axes if axis not in map(_group, departures)]:
        changed = ", ".join(axes) or "nothing"
        raise ConfigurationError(f"variant: {config.label} changes {changed} of {recipe}; a variant is one change")
    by_hand = [entry.lstrip("+") for entry in departures if _group(entry) in axes]
    swept = [entry.lstrip("+") for entry in overrides if entry not in everywhere and _group(entry) not in UNLABELLED]
    label = "+".join([recipe, *variant, *by_hand, *swept])
    return make_spec(config=values, reference=reference, label=label, baseline=recipe)


def _group(override: str) -> str:
    return override.lstrip("+~").split("=")[0].split(".")[0].split("@")[0]


def _value(overrides: Sequence[str], key: str) -> str | None:
    values = [entry.split("=", 1)[1] for entry in overrides if entry.split("=")[0] == key]
    return values[-1] if values else None


def _plain(config: DictConfig) -> dict[str, Any]:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=...")
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


def _check(spec: RunSpec) -> None:
    config = OmegaConf.create(dict(spec.config))
    for field in ("budget.steps", "checkpoint.every_n_steps", "launch.max_parallel", "launch.threads"):
        whole_number(field, OmegaConf.select(config, field))
    recipe = build_recipe(config, spec.recipe)
    recipe.check(recipe.choices)
    check_task(build(config, "task"))
    build(config, "evaluation")


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
