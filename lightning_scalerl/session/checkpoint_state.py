"""State of a run in a checkpoint, in addition to the weights, optimizer and callbacks that Lightning saves.

    scalerl             rank 0's data path (`DataPath.saved`): prompts, stream, driver, generator, meter, counters
    scalerl_run         identity of the run; a checkpoint with another identity is refused
    scalerl_followers   random state of the other ranks
    scalerl_update      loss scale, skipped updates, health, and the reference's fingerprint
    scalerl_metrics     the last value of every metric, which callbacks may monitor

`Trainer.fit(ckpt_path=...)` continues the run. `load_from_checkpoint` and `Trainer.validate` load only the weights, and
a later fit starts a new run from them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from torch import nn

from lightning_scalerl.axes.adapter import LoRA
from lightning_scalerl.callbacks.checkpoint_file import IDENTITY
from lightning_scalerl.callbacks.checkpointing import refuse_unusable_path
from lightning_scalerl.callbacks.run import Run
from lightning_scalerl.callbacks.run_log import RunLog
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import AXES, axis_class
from lightning_scalerl.distributed.checkpoint_folder import INDEX, check_weights, load_outline
from lightning_scalerl.measure.semantics import default_label, resolved_choices
from lightning_scalerl.session.data_path import DataPath
from lightning_scalerl.session.models import Models, adapt_policy
from lightning_scalerl.session.placement import shard_models
from lightning_scalerl.session.records import Records
from lightning_scalerl.session.updates import Updates
from lightning_scalerl.state import TorchRandomState

# Settings that decide what a run learns, by group; None for all settings of the group. They must be the same when a run
# continues from a checkpoint. The user's code (rewards, environments) is not among them, so that a run can continue
# after an error in that code was corrected.
_LEARNING_SETTINGS: Mapping[str, tuple[str, ...] | None] = {
    "choices": None,
    "optimizer": None,
    "reward": None,
    "context": None,
    "batch": ("prompts", "completions"),
}
# A teacher's path may change: its weights are compared instead (`Models.restore_reference`).
_COMPARED_BY_CONTENT = {"reference"}


def save_state(
    checkpoint: dict[str, Any],
    path: DataPath | None,
    models: Models,
    updates: Updates,
    records: Records,
    identity: dict[str, Any],
) -> None:
    """Add the run's state to a checkpoint. All ranks call it, because their random states are saved too."""
    _, *others = models.ranks.gather(TorchRandomState().state_dict())
    if path is None:
        return
    checkpoint["scalerl"] = path.saved()
    checkpoint[IDENTITY] = identity
    checkpoint["scalerl_followers"] = others
    checkpoint["scalerl_update"] = {**updates.state_dict(), "reference": models.reference_fingerprint()}
    checkpoint["scalerl_metrics"] = dict(records.latest)


def load_state(
    checkpoint: Mapping[str, Any],
    path: DataPath | None,
    models: Models,
    updates: Updates,
    records: Records,
    from_parent: bool = False,
) -> None:
    """Restore the run's state from a checkpoint. A rank that the saved run did not have keeps its fresh random state.

    `from_parent`: whether the checkpoint belongs to the parent that this run branches from.
    """
    records.latest = dict(checkpoint.get("scalerl_metrics", {}))
    update = checkpoint.get("scalerl_update")
    if update is not None:
        updates.load_state_dict(update)
        models.restore_reference(update.get("reference"))
        shard_models(models)  # `restore_reference` may just have loaded the whole reference
    if path is not None:
        path.restore(checkpoint["scalerl"], from_parent)
        return
    states = checkpoint.get("scalerl_followers", [])
    if models.ranks.number <= len(states):
        TorchRandomState().load_state_dict(states[models.ranks.number - 1])


def prepare_weights(
    checkpoint: dict[str, Any], models: Models, root: nn.Module, ckpt_path: Any, resumes_run: bool
) -> None:
    """Make a checkpoint's weights and the models match, so that Lightning can load the weights.

    Args:
        checkpoint: the checkpoint; a critic's weights are dropped from it if the models have no critic.
        models: the models. If only weights are loaded, the policy gets the adapter that the run was trained with.
        root: the module that has policy and critic as children.
        ckpt_path: path of the checkpoint; None if there is no Trainer.
        in_fit: True if the run continues, False if only its weights are loaded.

    Raises:
        ConfigurationError: the file is incomplete, or the weights belong to another model.
    """
    if not resumes_run and models.policy.adapter is None:
        saved = checkpoint.get("hyper_parameters", {}).get("choices", {}).get("adapter", {})
        if saved.get("choice") == LoRA.__name__:
            arguments = (saved["rank"], saved["alpha"], saved["targets"], saved.get("modules_to_save", ()))
            adapt_policy(models.policy, LoRA(*arguments))
    refuse_unusable_path(ckpt_path)
    if models.critic is None:
        # An evaluation, or a new run that starts from this policy, does not need the critic's weights.
        weights = checkpoint["state_dict"]
        for name in [name for name in weights if name.startswith("critic.")]:
            del weights[name]
    if INDEX in checkpoint and ckpt_path is not None:
        check_weights(ckpt_path, checkpoint, root.state_dict())


def steps_of(checkpoint: Mapping[str, Any]) -> int:
    """Return the number of completed steps of the run in a checkpoint; 0 for a checkpoint without a run."""
    return int(checkpoint.get("scalerl", {}).get("stream", {}).get("completed_steps", 0))


def identity_of(trainer: Any, run: Run, run_settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the identity stored in checkpoints: the run's name in its study (if any), title, recipe, seed, choices.

    The title is the label in the run's journal. With `run_settings` (see `Continuation`), the identity also has
    settings and prompts.
    """
    logs = [callback for callback in trainer.callbacks if isinstance(callback, RunLog)]
    logged = logs[0].identity if logs else {}
    choices = {axis: str(choice.semantics()["choice"]) for axis, choice in run.choices.items()}
    names = {"run": logged.get("run"), "title": str(logged.get("recipe", default_label(run)))}
    if "branch" in logged:
        names["branch"] = logged["branch"]
    return {
        **names,
        "recipe": run.recipe.name,
        "seed": run.seed,
        "choices": choices,
        "settings": _settings(run, run_settings),
    }


def _settings(run: Run, run_settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings and the digest of prompts that decide what the run learns; empty without `run_settings`."""
    if run_settings is None:
        return {}
    resolved = resolved_choices(run.recipe, run.choices)
    settings = {
        f"{group}.{name}".removeprefix("choices."): value
        for group, names in _LEARNING_SETTINGS.items()
        for name, value in resolved.get(group, {}).items()
        if names is None or name in names
    }
    # Include only the task's prompts, not its reward functions: a run may continue after an error in one was corrected.
    _, prompts, _ = run_settings["task"]
    return {**settings, "prompts": prompts}


def branches_from(identity: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the entry `branch` of this run's identity if the run branches from this checkpoint, else None.

    Args:
        identity: identity of this run.
        checkpoint: the checkpoint.
    """
    branch, saved_identity = identity.get("branch"), checkpoint.get(IDENTITY)
    if branch is None or not isinstance(saved_identity, dict) or saved_identity.get("run") != branch["run"]:
        return None
    return dict(branch) if steps_of(checkpoint) == branch["step"] else None


def _comparable_value(identity: Mapping[str, Any], key: str) -> Any:
    """Return an identity's value. Of a recipe's name, leave out the `+axis=choice` that earlier versions appended."""
    value = identity.get(key)
    return str(value).partition("+")[0] if key == "recipe" else value


def check_run(identity: dict[str, Any], checkpoint: Mapping[str, Any], ckpt_path: Any) -> None:
    """Refuse a checkpoint that has no run, or whose run is neither this run nor this run's parent (`branches_from`).

    A checkpoint without identity, from an earlier version, is accepted.

    Args:
        identity: identity of this run.
        checkpoint: the checkpoint.
        ckpt_path: path of the checkpoint, for the error message.

    Raises:
        ConfigurationError: the checkpoint has no run, or belongs to another run; the message names both.
    """
    if "scalerl" not in checkpoint:
        raise ConfigurationError(
            "ckpt_path: this checkpoint holds no run to continue; begin one with its weights: "
            "ScaleRL.load_from_checkpoint(path)"
        )
    saved_identity = checkpoint.get(IDENTITY)
    if not isinstance(saved_identity, dict) or branches_from(identity, checkpoint) is not None:
        return
    # If both runs belong to studies, compare only their run names: a new version may have renamed choices.
    in_studies = None not in (identity["run"], saved_identity.get("run"))
    keys = ("run",) if in_studies else ("recipe", "seed", "choices")
    # For an axis that is newer than the checkpoint, assume the neutral choice.
    saved_identity = {**saved_identity, "choices": {**_neutral(), **(saved_identity.get("choices") or {})}}
    if all(_comparable_value(identity, key) == _comparable_value(saved_identity, key) for key in keys):
        if not in_studies:
            _check_settings(identity["settings"], saved_identity.get("settings", {}), ckpt_path)
        return
    descriptions = [f"{each.get('title')} seed {each.get('seed')}" for each in (saved_identity, identity)]
    if in_studies:
        descriptions = [
            f"{text} ({each['run']})" for text, each in zip(descriptions, (saved_identity, identity), strict=True)
        ]
    choices, saved_choices = identity["choices"], saved_identity.get("choices") or {}
    changed_axes = [axis for axis in choices if saved_choices.get(axis) not in (None, choices[axis])]
    differ = ", ".join(f"{axis} {saved_choices[axis]}, not {choices[axis]}" for axis in changed_axes)
    raise ConfigurationError(
        f"ckpt_path: {ckpt_path} is of another run, {descriptions[0]}, and this one is {descriptions[1]}"
        f"{differ and f' ({differ})'}; give a checkpoint of this run, or begin another with the weights: "
        "ScaleRL.load_from_checkpoint(path)"
    )


def _check_settings(settings: Mapping[str, Any], saved: Mapping[str, Any], ckpt_path: Any) -> None:
    """Refuse settings or prompts other than those of the checkpoint's run.

    Only settings that both runs have are compared, because checkpoints of earlier versions lack some.
    """
    changed = [text for key in settings if key in saved for text in _differences(key, saved[key], settings[key])]
    if not changed:
        return
    raise ConfigurationError(
        f"ckpt_path: {ckpt_path} does not fit this run, whose settings have changed: {'; '.join(changed[:4])}; give "
        "the settings and prompts of its run, or begin another run with the weights: ScaleRL.load_from_checkpoint(path)"
    )


def _differences(key: str, saved: Any, now: Any) -> Iterator[str]:
    """Yield a text for each difference between two values of a setting; names that only one mapping has are skipped."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for name in sorted(saved.keys() & now.keys() - _COMPARED_BY_CONTENT):
            yield from _differences(f"{key}.{name}", saved[name], now[name])
    # Compare as JSON, in which a tuple equals a list: a checkpoint may contain a list in place of a tuple.
    elif json.dumps(saved, default=str) != json.dumps(now, default=str):
        yield key if key == "prompts" else f"{key} {saved!r}, now {now!r}"


def _neutral() -> dict[str, str]:
    """Return the name of the neutral choice by axis, for every axis that has one."""
    neutral = {axis: axis_class(axis).neutral for axis in AXES}
    return {axis: str(semantics["choice"]) for axis, semantics in neutral.items() if semantics is not None}


T = TypeVar("T", bound=LightningModule)


def from_folder(
    module_class: type[T], folder: Path, strict: bool, weights_only: bool, arguments: Mapping[str, Any]
) -> T:
    """Make a module with the weights of a checkpoint that is a folder of shards (`ScaleRL.load_from_checkpoint`).

    Args:
        module_class: class of the module.
        folder: folder of the checkpoint.
        strict: whether the names of all weights must agree.
        weights_only: whether torch may unpickle only plain values and tensors.
        arguments: arguments of the class that override those in the checkpoint.

    Raises:
        ConfigurationError: a file of the folder is missing, the weights belong to another model, or an argument of the
            class is missing.
    """
    from lightning_scalerl.distributed.shard_files import read_into

    refuse_unusable_path(folder)
    checkpoint = load_outline(folder, weights_only)
    hyper_parameters = checkpoint.get("hyper_parameters", {})
    parameters = inspect.signature(module_class.__init__).parameters
    module = module_class(
        **{**{name: value for name, value in hyper_parameters.items() if name in parameters}, **arguments}
    )
    module.on_load_checkpoint(checkpoint)
    own_state = module.state_dict()
    if strict:
        check_weights(folder, checkpoint, own_state)
    saved_weights = checkpoint["state_dict"]
    module.load_state_dict({name: value for name, value in saved_weights.items() if not value.is_meta}, strict=False)
    read_into(
        folder,
        checkpoint,
        {
            f"state_dict.{name}": own_state[name]
            for name in own_state
            if name in saved_weights and saved_weights[name].is_meta
        },
    )
    return module
