"""`scalerl export RUN DIR`: writes the model of a run as a folder that transformers and other libraries can load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from lightning_scalerl.axes.adapter import NoAdapter
from lightning_scalerl.callbacks.checkpointing import newest_checkpoint, unusable
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import build, use_folders
from lightning_scalerl.distributed.checkpoint_folder import check_weights, is_folder, load_outline
from lightning_scalerl.distributed.shard_files import read_into
from lightning_scalerl.member.trust import check_run
from lightning_scalerl.model.adapter import adapt, merged_copy
from lightning_scalerl.model.chat import Chat, Rendering, model_card_facts
from lightning_scalerl.model.load import load_model, load_tokenizer
from lightning_scalerl.model.save import free, save_in_parts, save_model
from sweeps.errors import UserError
from sweeps.run.checkpoint_names import checkpoint_name, checkpoints, step_of
from sweeps.run.journal import JournalView, read_journal
from sweeps.run.spec import RunSpec

_PREFIX = "policy.model."


def export_run(
    run_dir: Path, directory: Path, dtype: str = "fp32", step: int | None = None, trust: bool = False
) -> str:
    """Write the model in a checkpoint of a run of `scalerl train`.

    Args:
        run_dir: directory of the run.
        directory: folder to create.
        dtype: see `save_model`.
        step: step of the checkpoint; None for the newest readable one.
        trust: run any code that the run names, without the checks of `member.trust`.

    Returns:
        One line about the written files.

    Raises:
        UserError: there is no such run or checkpoint, the folder exists, or the run names untrusted code.
    """
    spec = RunSpec.read(run_dir)
    if not trust:
        check_run(run_dir, spec)
    view = read_journal(run_dir)
    path = _checkpoint(run_dir / "checkpoints", step, spec.run)
    disable_progress_bar()  # no bars of loading weights and writing shards: the command prints one line only
    try:
        free(directory)  # raises if the folder exists, before a large model is read
        use_folders(spec.folders)
        config = OmegaConf.create(dict(spec.config))
        source = str(build(config, "model"))
        tokenizer = load_tokenizer(source)
        saved = load_outline(path) if is_folder(path) else torch.load(path, "cpu", weights_only=True, mmap=True)
        adapter = build(config, "adapter") if "adapter" in config else NoAdapter()
        step_of_weights = int(saved["scalerl"]["stream"]["completed_steps"])
        rendering = Rendering(tokenizer, build(config, "chat") if "chat" in config else Chat(template="none"))
        facts = _facts(spec, view, step_of_weights) | model_card_facts(rendering)
        model = load_model(source, blank=is_folder(path) and not adapter.adapts)
        adapt(model, adapter)
        weights = {
            name.removeprefix(_PREFIX): value for name, value in saved["state_dict"].items() if name.startswith(_PREFIX)
        }
        if is_folder(path):
            check_weights(path, {"state_dict": weights}, model.state_dict())
        weight = partial(_weight, path, saved)
        if is_folder(path) and not adapter.adapts:
            save_in_parts(model, weight, rendering.tokenizer_to_save(), directory, dtype, facts)
        else:
            model.load_state_dict({name: weight(name) for name in weights})
            model = merged_copy(model) if adapter.adapts else model
            save_model(model, rendering.tokenizer_to_save(), directory, dtype, facts)
    except ConfigurationError as error:
        raise UserError(str(error)) from error
    where = f"{spec.title}, step {step_of_weights}: {directory} ({dtype})"
    return f"{where}; load it with AutoModelForCausalLM.from_pretrained"


def _weight(path: Path, saved: Mapping[str, Any], name: str) -> Tensor:
    """Return a weight of the policy's model by name, read from disk if the checkpoint is a folder of shards."""
    value: Tensor = saved["state_dict"][f"{_PREFIX}{name}"]
    if not value.is_meta:
        return value
    whole = torch.empty_like(value, device="cpu")
    read_into(path, saved, {f"state_dict.{_PREFIX}{name}": whole})
    return whole


def _checkpoint(folder: Path, step: int | None, run: str) -> Path:
    steps = [step_of(path) for path in checkpoints(folder)]
    available = f"there are those of step {', '.join(map(str, sorted(steps)))}" if steps else "there is none"
    if step is not None:
        if step not in steps:
            raise UserError(f"--step {step}: no such checkpoint in {folder}; {available}")
        path = folder / checkpoint_name(step)
        if (why := unusable(path, run)) is not None:
            raise UserError(f"--step {step}: {path} cannot be used, {why}; {available}")
        return path
    newest = newest_checkpoint(folder, run=run).path
    if newest is None:
        raise UserError(f"{folder}: no checkpoint that can be read; {available}; train the run, or go on with it")
    return newest


def _facts(spec: RunSpec, view: JournalView, step: int) -> dict[str, Any]:
    """Return the facts for the model card: names, identities, and pass rates evaluated at `step`."""
    pass_rates = {
        name: value
        for record in view.of_kind("eval")
        if record.step == step
        for name, value in record.metrics.items()
        if name.startswith("eval/") and name.endswith("/pass_rate")
    }
    return {
        "recipe": spec.recipe,
        "based on": f"{spec.baseline}, with {json.dumps(spec.departures)}" if spec.departures else "",
        "curve": spec.curve,
        "run": spec.run,
        "seed": spec.seed,
        "optimizer steps": step,
        **{name: f"{value:.4g}" for name, value in pass_rates.items()},
        "trained from": json.dumps(spec.config["model"]),
        "versions": json.dumps(view.header.get("versions", {})),
        "commit": view.header.get("commit") or "",
    }
