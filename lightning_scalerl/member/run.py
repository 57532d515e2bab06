"""Execution of a study's member from its directory, to the end of its budget or to a request to stop."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from transformers.utils.logging import disable_progress_bar

from lightning_scalerl.callbacks.checkpointing import UNRECORDED, ResumableCheckpoint, mark_unusable, newest_checkpoint
from lightning_scalerl.callbacks.rollout_log import RolloutLog
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.compat.imports import collect_garbage_as_usual
from lightning_scalerl.composition import axes_of, build, build_recipe, use_folders
from lightning_scalerl.data import RolloutDataModule
from lightning_scalerl.distributed.sharded import ShardedStrategy
from lightning_scalerl.distributed.start import process_rank, trainer_settings
from lightning_scalerl.member.branch import Branch, begin, branch_of, parent_checkpoint, shared_checkpoint
from lightning_scalerl.member.identity import check_identity
from lightning_scalerl.module import ScaleRL
from sweeps.run.files import write_atomically
from sweeps.run.journal import CONFIG_FILE, covered_step
from sweeps.run.lease import Lease
from sweeps.run.progress import check_journal_owner, is_done
from sweeps.run.provenance import files_named
from sweeps.run.repair import Break, cut_broken_journal, find_break
from sweeps.run.spec import RunSpec
from sweeps.run.writer import hold_run_lease


def silence_libraries() -> None:
    """Silence start-up messages and progress bars of Lightning and transformers that do not help users of a command."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    # Lightning suggests `srun` wherever SLURM is installed, but a study starts its ranks itself.
    warnings.filterwarnings("ignore", message=".*`srun` command.*")
    disable_progress_bar()  # the bar of loading weights would mix with the lines of the run


def run_member(run_dir: Path, progress: bool = False) -> None:
    """Run the member in `run_dir` to the end of its budget, from its newest checkpoint if it has one.

    Several processes may call this at the same time, for example if a scheduler loses contact to a job and starts a
    second copy. One of them then runs the member, and another takes over if that process dies. All ranks of one job
    count as one process.

    Raises:
        RunInterruptedError: the run received a request to stop, and has saved a checkpoint.
        UserError: another process is running the member, the journal in `run_dir` belongs to another run, or the
            specification does not have the identity that it names.
    """
    silence_libraries()
    spec = RunSpec.read(run_dir)
    use_folders(spec.folders)
    config = OmegaConf.create(dict(spec.config))
    torch.set_num_threads(int(config.launch.threads))
    torch.manual_seed(spec.seed)
    with hold_run_lease(run_dir, spec, process_rank()) as lease:
        check_journal_owner(run_dir, spec.run)
        if is_done(run_dir, spec.steps, spec.run):
            print(f"{spec.title}: done already")
            return
        check_identity(spec, run_dir)
        if lease is not None:
            write_atomically(run_dir / CONFIG_FILE, OmegaConf.to_yaml(config))
        # Prepare the folder before any rank looks for a checkpoint: a late rank must not find a checkpoint that is
        # newer than a break of the journal.
        branch = branch_of(spec)
        if branch is not None and lease is not None:
            begin(run_dir, spec, branch)
        broken = find_break(run_dir)
        covered = covered_step(run_dir) if broken is None else broken.step
        if broken is not None and lease is not None:
            _repair_journal(broken, run_dir / "checkpoints", lease)
        # Pass -1 without a journal. A member writes one from its first step, so checkpoints without a journal are
        # ignored.
        _fit(run_dir, spec, config, lease, progress, -1 if covered is None else covered, branch)


def _repair_journal(broken: Break, checkpoints: Path, lease: Lease) -> None:
    """Cut off the journal at its first damaged record, and rename later checkpoints so that the run ignores them."""
    lease.check()
    mark_unusable(checkpoints, broken.step, UNRECORDED)
    damaged_copy = cut_broken_journal(broken)
    start = f"from step {broken.step} or earlier" if broken.step >= 0 else "from the start: no older checkpoint exists"
    checkpoint_note = ", later checkpoints as *.unrecorded" if any(checkpoints.glob(f"step-*{UNRECORDED}")) else ""
    print(f"{broken.why}; kept as {damaged_copy.name}{checkpoint_note}; the run continues {start}", flush=True)


def _fit(
    run_dir: Path,
    spec: RunSpec,
    config: DictConfig,
    lease: Lease | None,
    progress: bool,
    covered: int,
    branch: Branch | None,
) -> None:
    """Build module, callbacks and trainer, and fit from the newest checkpoint whose step is at most `covered`."""
    # The module gets the recipe's choices. Choices in which the member differs are passed as callbacks, as in a script.
    settings = {key: value for key, value in spec.config.items() if key not in axes_of(spec.config)}
    recipe_choices = {axis: spec.reference[axis] for axis in axes_of(spec.reference)}
    reference = build_recipe(OmegaConf.create({**settings, **recipe_choices}), spec.baseline)
    # A variant may also change settings other than axes; the configuration already has them.
    changed = [build(config, axis) for axis in spec.departures if axis in axes_of(spec.config)]
    # Nodes and devices are not arguments of the strategy: they are requested from the launcher (`spec.layout`).
    strategy_config = config.get("strategy", {"name": "ddp"})
    strategy = {str(key): value for key, value in strategy_config.items() if key not in ("nodes", "devices")}
    devices = trainer_settings(strategy.pop("name"), spec.layout, **strategy)
    sharded = isinstance(devices.get("strategy"), ShardedStrategy)
    module = ScaleRL(model=build(config, "model"), recipe=reference, streamed=sharded)
    task = build(config, "task")
    check_lease = lease.check if lease is not None else None
    newest = newest_checkpoint(
        run_dir / "checkpoints", run=spec.run, at_most=covered, parent_checkpoint=shared_checkpoint(branch)
    )
    if branch is not None and newest.path is None:
        newest = replace(newest, path=parent_checkpoint(run_dir, branch, covered, leads=lease is not None))
    log = RunLog(
        run_dir,
        spec.header(),
        check_lease,
        announce=True,
        passed_over=newest.passed_over,
        code=[*spec.folders, *files_named(spec.config)],
        strict_code=bool(config.launch.get("strict_code", False)),
    )
    trainer = Trainer(
        max_steps=spec.steps,
        **devices,
        logger=False,
        enable_progress_bar=progress,
        enable_model_summary=False,
        callbacks=[
            *changed,
            build(config, "evaluation"),
            log,
            RolloutLog(run_dir, guard=check_lease, **config.get("rollouts", {})),
            ResumableCheckpoint(
                run_dir / "checkpoints",
                config.checkpoint.every_n_steps,
                check_lease,
                keep_steps=config.checkpoint.get("keep_steps", ()),
            ),
        ],
    )
    collect_garbage_as_usual()
    trainer.fit(
        module,
        datamodule=RolloutDataModule(task, seed=spec.seed),
        ckpt_path=newest.path,
        weights_only=True,
    )
