"""`scalerl export RUN DIR`: the model of a run, as it is served and fine-tuned elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_scalerl.axes.adapter import NoAdapter
from lightning_scalerl.callbacks.checkpointing import checkpoints, newest_checkpoint, unusable
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, use_folders
from lightning_scalerl.distributed.checkpoint_folder import check_weights, fill, is_folder, outline
from lightning_scalerl.member.trust import check_run
from lightning_scalerl.model.adapter import adapt, plain_copy
from lightning_scalerl.model.chat import Chat, Rendering, told_of
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.model.save import free, save_model
from sweeps.errors import UserError
from sweeps.run.journal import JournalView, read_journal
from sweeps.run.spec import RunSpec

_PREFIX = "policy.model."


def export_run(
    run_dir: Path, directory: Path, dtype: str = "fp32", step: int | None = None, trust: bool = False
) -> str:
    """Write the model of a checkpoint of a run that `scalerl train` has made.

    Args:
        run_dir: of the run.
        directory: to be made.
        dtype: see `save_model`.
        step: of the checkpoint; the newest that can be read if None.
        trust: run whatever code the run names, see `member.trust`.

    Returns:
        One line: what was written.

    Raises:
        UserError: no such run or checkpoint, the folder is taken, or the run names code of somebody else's.
    """
    spec = RunSpec.read(run_dir)
    if not trust:
        check_run(run_dir, spec)
    view = read_journal(run_dir)
    path = _checkpoint(run_dir / "checkpoints", step, spec.run)
    try:
        free(directory)  # before a large model is read for nothing
        use_folders(spec.folders)
        config = OmegaConf.create(dict(spec.config))
        source = str(build(config, "model"))
        model, tokenizer = load_model(source), load_tokenizer(source)
        saved = outline(path) if is_folder(path) else torch.load(path, "cpu", weights_only=True, mmap=True)
        adapter = build(config, "adapter") if "adapter" in config else NoAdapter()
        adapt(model, adapter)
        _load(model, saved, path)
        model = plain_copy(model) if adapter.adapts else model
        at = int(saved["scalerl"]["stream"]["completed_steps"])
        rendering = Rendering(tokenizer, build(config, "chat") if "chat" in config else Chat(template="none"))
        save_model(model, rendering.to_save(), directory, dtype, _facts(spec, view, at) | told_of(rendering))
    except ConfigurationError as error:
        raise UserError(str(error)) from error
    return f"{spec.title}, step {at}: {directory} ({dtype}), for AutoModelForCausalLM.from_pretrained"


def _load(model: nn.Module, saved: Mapping[str, Any], path: Path) -> None:
    """Read the policy's weights of a checkpoint into a model; those of a folder of shards in their place."""
    given = {name: value for name, value in saved["state_dict"].items() if name.startswith(_PREFIX)}
    if not is_folder(path):
        model.load_state_dict({name.removeprefix(_PREFIX): value for name, value in given.items()})
        return
    own = {f"{_PREFIX}{name}": value for name, value in model.state_dict().items()}
    check_weights(path, {"state_dict": given}, own)
    fill(path, saved, {f"state_dict.{name}": value for name, value in own.items() if given[name].is_meta})
    whole = {name.removeprefix(_PREFIX): value for name, value in given.items() if not value.is_meta}
    model.load_state_dict(whole, strict=False)


def _checkpoint(folder: Path, step: int | None, run: str) -> Path:
    there = [int(path.stem.removeprefix("step-")) for path in checkpoints(folder)]
    listed = f"there are those of step {', '.join(map(str, sorted(there)))}" if there else "there is none"
    if step is not None:
        if step not in there:
            raise UserError(f"--step {step}: no such checkpoint in {folder}; {listed}")
        asked = folder / f"step-{step:08d}.ckpt"
        if (why := unusable(asked, run)) is not None:
            raise UserError(f"--step {step}: {asked} cannot be used, {why}; {listed}")
        return asked
    newest = newest_checkpoint(folder, run=run).path
    if newest is None:
        raise UserError(f"{folder}: no checkpoint that can be read; {listed}; train the run, or go on with it")
    return newest


def _facts(spec: RunSpec, view: JournalView, step: int) -> dict[str, Any]:
    """Return the facts on the model card: names, identities, and what was measured of these very weights."""
    measured = {
        name: value
        for record in view.of_kind("eval")
        if record.step == step
        for name, value in record.metrics.items()
        if name.startswith("eval/") and name.endswith("/pass_rate")
    }
    return {
        "recipe": spec.recipe,
        "departs from": f"{spec.baseline} on {json.dumps(spec.departures)}" if spec.departures else "",
        "curve": spec.curve,
        "run": spec.run,
        "seed": spec.seed,
        "optimizer steps": step,
        **{name: f"{value:.4g}" for name, value in measured.items()},
        "trained from": json.dumps(spec.config["model"]),
        "versions": json.dumps(view.header.get("versions", {})),
        "commit": view.header.get("commit") or "",
    }
