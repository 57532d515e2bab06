"""State of a run in a checkpoint, in addition to the weights, optimizer and callbacks that Lightning saves.

    scalerl             rank 0's data path (`DataPath.state`): prompts, stream, driver, generator, meter, counters
    scalerl_run         identity of the run; a checkpoint with another identity is refused
    scalerl_followers   random state of the other ranks
    scalerl_update      loss scale, skipped updates, health, and the reference's fingerprint
    scalerl_metrics     the last value of every metric, which callbacks may monitor

Saving maps a module to a checkpoint; loading maps a checkpoint to a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule

from lightning_scalerl.axes.adapter import LoRA
from lightning_scalerl.callbacks.checkpoint_file import IDENTITY
from lightning_scalerl.callbacks.checkpointing import check_whole
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.callbacks.trainer import count_from
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import AXES, axis_class
from lightning_scalerl.distributed.checkpoint_folder import INDEX, check_weights, outline
from lightning_scalerl.distributed.ranks import Follower
from lightning_scalerl.measure.semantics import own_label
from lightning_scalerl.session.models import adapt_policy
from lightning_scalerl.session.parts import Parts
from lightning_scalerl.session.placement import made_on, shard_models
from lightning_scalerl.state import TorchRandomState
from lightning_scalerl.stream.live_driver import LiveDriver


def save_state(module: Parts, checkpoint: dict[str, Any]) -> None:
    """Save the state of rank 0's data path and the random state of the other ranks. All ranks call it."""
    _, *others = module.ranks.gather(TorchRandomState().state_dict())
    if module.data_path is None:
        return
    with module.driver.quiet():
        state = checkpoint["scalerl"] = module.data_path.state.state_dict()
    # In virtual time, later rollouts depend on the last published weights, which may differ from the trainer's, so they
    # are saved. In real time they are not needed, and next to a folder of shards they would add a whole model.
    if module.ranks.writes_shards and isinstance(module.driver, LiveDriver):
        state["generator"]["weights"] = None
    checkpoint[IDENTITY] = identity(module)
    checkpoint["scalerl_followers"] = others
    checkpoint["scalerl_update"] = {
        "loss_scale": module.loss_scale.state_dict(),
        "skipped": module.skipped.state_dict(),
        "health": module.health.state_dict(),
        "reference": None if module.reference is None else module.reference_model.fingerprint(),
    }
    checkpoint["scalerl_metrics"] = dict(module.records.latest)


def _adapt_as(module: Parts, checkpoint: dict[str, Any]) -> None:
    """Add the adapter that a callback chose in the checkpoint's run; used when only weights are loaded."""
    saved = checkpoint.get("hyper_parameters", {}).get("choices", {}).get("adapter", {})
    if module.policy.adapter is None and saved.get("choice") == LoRA.__name__:
        own = (saved["rank"], saved["alpha"], saved["targets"], saved.get("modules_to_save", ()))
        adapt_policy(module.policy, LoRA(*own))


def load_state(module: Parts, checkpoint: dict[str, Any]) -> None:
    """Restore the run from a checkpoint; a rank that the saved run did not have keeps its fresh random state.

    `Trainer.fit(ckpt_path=...)` continues the run. `load_from_checkpoint` and `Trainer.validate` load only the weights,
    and a later fit starts a new run from them.

    Raises:
        ConfigurationError: the file is incomplete, contains no run, or contains another run.
    """
    trainer = module._trainer
    if trainer is None or trainer.state.fn != "fit":
        _adapt_as(module, checkpoint)
    check_whole(None if trainer is None else trainer.ckpt_path)
    if module.critic is None:
        # An evaluation, or a new run that starts from this policy, does not need the critic's weights.
        weights = checkpoint["state_dict"]
        for name in [name for name in weights if name.startswith("critic.")]:
            del weights[name]
    if INDEX in checkpoint and trainer is not None:
        check_weights(trainer.ckpt_path, checkpoint, module.state_dict())
    if trainer is None or trainer.state.fn != "fit":
        module.continuation.meaning = None
        steps = checkpoint.get("scalerl", {}).get("stream", {}).get("completed_steps", 0)
        module.stream = Follower(steps)  # type: ignore[assignment]
        return
    if "scalerl" not in checkpoint:
        raise ConfigurationError(
            "ckpt_path: this checkpoint holds no run to go on with; begin one with its weights: "
            "ScaleRL.load_from_checkpoint(path)"
        )
    check_identity(identity(module), checkpoint.get(IDENTITY), trainer.ckpt_path)
    module.records.latest = dict(checkpoint.get("scalerl_metrics", {}))
    steps = checkpoint["scalerl"]["stream"]["completed_steps"]
    # Set the step now: Lightning restores its counters only after the evaluation that may still be due.
    count_from(trainer, steps)
    update = checkpoint.get("scalerl_update")
    if update is not None:
        module.loss_scale.load_state_dict(update["loss_scale"])
        module.skipped.load_state_dict(update["skipped"])
        module.health.load_state_dict(update["health"])
        module.reference_model.restore(update.get("reference"), module.policy, module.choices, made_on(module))
        shard_models(module)  # the reference may just have been loaded whole
    if module.data_path is not None:
        state = checkpoint["scalerl"]
        published = state["generator"].get("weights", ...) is not None
        module.data_path.state.load_state_dict(state, later=() if published else ("generator",))
        module.continuation.generator = None if published else state["generator"]
        return
    module.stream.completed_steps = steps
    states = checkpoint.get("scalerl_followers", [])
    if module.ranks.number <= len(states):
        TorchRandomState().load_state_dict(states[module.ranks.number - 1])


def identity(module: Parts) -> dict[str, Any]:
    """Return the identity stored in checkpoints: the run's name in its study (if any), recipe, seed and choices."""
    logs = [each for each in module.trainer.callbacks if isinstance(each, RunLog)]  # type: ignore[attr-defined]
    given = logs[0].identity if logs else {}
    choices = {axis: str(choice.semantics()["choice"]) for axis, choice in module.choices.items()}
    named = {"run": given.get("run"), "title": str(given.get("recipe", own_label(module)))}
    return {**named, "recipe": own_label(module), "seed": module.seed, "choices": choices}


def check_identity(own: dict[str, Any], theirs: Any, ckpt_path: Any) -> None:
    """Refuse a checkpoint of another run. A checkpoint without identity, from an earlier version, is accepted.

    Args:
        own: identity of this run.
        theirs: identity in the checkpoint.
        ckpt_path: path of the checkpoint, for the error message.

    Raises:
        ConfigurationError: the checkpoint belongs to another run; the message names both.
    """
    if not isinstance(theirs, dict):
        return
    # If both runs belong to studies, compare only their run names: a new version may have renamed choices.
    named = None not in (own["run"], theirs.get("run"))
    keys = ("run",) if named else ("recipe", "seed", "choices")
    # For an axis that is newer than the checkpoint, assume the neutral choice.
    theirs = {**theirs, "choices": {**_neutral(), **(theirs.get("choices") or {})}}
    if all(own[key] == theirs.get(key) for key in keys):
        return
    both = [f"{each.get('title')} seed {each.get('seed')}" for each in (theirs, own)]
    if named:
        both = [f"{text} ({each['run']})" for text, each in zip(both, (theirs, own), strict=True)]
    now, saved = own["choices"], theirs.get("choices") or {}
    other = [axis for axis in now if saved.get(axis) not in (None, now[axis])]
    differ = ", ".join(f"{axis} {saved[axis]}, not {now[axis]}" for axis in other)
    raise ConfigurationError(
        f"ckpt_path: {ckpt_path} is of another run, {both[0]}, and this one is {both[1]}"
        f"{differ and f' ({differ})'}; give a checkpoint of this run, or begin another with the weights: "
        "ScaleRL.load_from_checkpoint(path)"
    )


def _neutral() -> dict[str, str]:
    """Return the name of the neutral choice by axis, for every axis that has one."""
    neutral = {axis: axis_class(axis).neutral for axis in AXES}
    return {axis: str(semantics["choice"]) for axis, semantics in neutral.items() if semantics is not None}


T = TypeVar("T", bound=LightningModule)


def from_folder(kind: type[T], folder: Path, strict: bool, weights_only: bool, arguments: Mapping[str, Any]) -> T:
    """Make a module with the weights of a folder of shards, loaded in place, for `ScaleRL.load_from_checkpoint`.

    Args:
        kind: class of the module.
        folder: folder of the checkpoint.
        strict: whether the names of all weights must agree.
        weights_only: whether torch may unpickle only plain values and tensors.
        arguments: arguments of the class that override those in the checkpoint.

    Raises:
        ConfigurationError: a file is missing in the folder, it belongs to another model, or an argument is missing.
    """
    from lightning_scalerl.distributed.shard_files import fill

    check_whole(folder)
    checkpoint = outline(folder, weights_only)
    saved = checkpoint.get("hyper_parameters", {})
    known = inspect.signature(kind.__init__).parameters
    module = kind(**{**{name: value for name, value in saved.items() if name in known}, **arguments})
    module.on_load_checkpoint(checkpoint)
    own = module.state_dict()
    if strict:
        check_weights(folder, checkpoint, own)
    given = checkpoint["state_dict"]
    module.load_state_dict({name: value for name, value in given.items() if not value.is_meta}, strict=False)
    fill(folder, checkpoint, {f"state_dict.{name}": own[name] for name in own if name in given and given[name].is_meta})
    return module
