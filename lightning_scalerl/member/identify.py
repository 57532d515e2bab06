"""Planning of a study's members: compose, check, identify and name them before anything runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_scalerl.checks import ConfigurationError, check_layout, check_scale, shown, whole_number
from lightning_scalerl.choices import AXES
from lightning_scalerl.composition import (
    Composer,
    Folders,
    axes_of,
    build,
    build_recipe,
    check_keys,
    choice_overrides,
    chosen_node,
    compose,
    composer_of,
    group_of,
    use_folders,
)
from lightning_scalerl.member.branch import (
    FRESH,
    Parent,
    changed_groups,
    check_checkpoint,
    inherited_overrides,
    own_overrides,
    parent_of,
)
from lightning_scalerl.member.branch import GROUP as BRANCH
from sweeps.run.activity import HangTimeout
from sweeps.run.journal import JOURNAL_FILE
from sweeps.run.spec import OPERATIONAL_KEYS, RunSpec, changed_keys, check_finite, learning_config, make_spec

_LONGEST_NAME = 255  # limit of file systems on a folder's name, in bytes
# Operational settings that are whole numbers, with their minima.
_WHOLE_NUMBERS = {
    "checkpoint.every_n_steps": 1,
    "rollouts.groups": 0,
    "rollouts.every_n_steps": 1,
    "launch.max_parallel": 1,
    "launch.threads": 1,
}
# Copies of constants of `distributed.start` and `distributed.sharded`, which are not imported here because they import
# torch.
STRATEGIES = ("ddp", "fsdp2")
CHECKPOINTS = ("shards", "whole")
# Settings whose classes do not import Lightning: they are checked first, to report errors before that slow import.
_WITHOUT_LIGHTNING = ("reward", "health", "verify", "optimizer", "schedule")
# From this number of draws per prompt on, a warning is printed. With 2 draws per prompt, the pool is exhausted if every
# second group passes.
_EXHAUSTING_DRAWS = 2.0
DEFAULT_RECIPE = "scalerl"  # as in conf/train.yaml
# Groups whose overrides do not appear in a curve's label: the label starts with the recipe's name, is the same for all
# seeds, and does not depend on operational settings.
UNLABELLED = OPERATIONAL_KEYS | {"recipe", "experiment", "variant", "cluster"}


def plan_members(override_lists: Sequence[Sequence[str]], folders: Folders = ()) -> list[RunSpec]:
    """Compose, check and identify all members, and build their initial models, before any training starts.

    Equal parts of the members' configurations are one shared object, so do not modify them.

    Args:
        override_lists: overrides per member, as on the command line.
        folders: the user's folders of configuration files, in addition to `conf/`.

    Raises:
        ConfigurationError: the first problem, in one line.
    """
    from lightning_scalerl.member.identity import check_class_names

    common = set.intersection(*(set(overrides) for overrides in override_lists))
    parents = [_parent_of(overrides) for overrides in override_lists]
    used_folders = use_folders(
        dict.fromkeys([*folders, *(folder for parent in parents if parent for folder in parent.spec.folders)])
    )
    composer = composer_of(used_folders)
    # Compose all members first, so that errors from Hydra are reported before any slow import.
    drafts = [
        _draft(list(overrides), common, composer, parent)
        for overrides, parent in zip(override_lists, parents, strict=True)
    ]
    builder = _Builder()
    for draft in drafts:
        _check_study(draft.values["study"])
        check_finite(draft.values)
        _check_settings(draft.values)
        _check_light_parts(draft.values, builder)
    identities: dict[bytes, dict[str, Any]] = {}
    clean: dict[tuple[str, int], Any] = {}
    specs = [
        replace(
            _identified(draft, used_folders, builder, identities, clean),
            overrides=_without_tracking_address(draft.overrides),
        )
        for draft in drafts
    ]
    check_class_names([spec.config for spec in specs], used_folders)
    checked: set[str] = set()
    for spec in specs:
        if spec.curve not in checked:
            _check(spec, builder)
            checked.add(spec.curve)
    for spec, parent in zip(specs, parents, strict=True):
        # A branch with a journal already has a copy of the checkpoint.
        if parent is not None and not (Path(spec.config["output_dir"]) / "runs" / spec.run / JOURNAL_FILE).exists():
            check_checkpoint(parent)
    for spec in specs:
        builder(spec.config, "model")
    return [replace(spec, cautions=_cautions(spec, builder)) for spec in specs]


def _parent_of(overrides: Sequence[str]) -> Parent | None:
    """Return the run that a member branches from; None if it is not a branch."""
    if not any(group_of(entry) == BRANCH for entry in overrides):
        return None
    study = _value(overrides, "study")
    output_dir = Path(_value(overrides, "output_dir") or Path("outputs") / (study or "local"))
    seed = _value(overrides, "seed")
    return parent_of(overrides, output_dir, int(seed) if seed is not None and seed.isdecimal() else None)


def _without_tracking_address(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides without the tracking address, which may contain a password and must not be stored."""
    return tuple(entry for entry in overrides if group_of(entry) != "mlflow")


@dataclass(frozen=True)
class _Draft:
    """Member that is composed but not yet identified.

    Attributes:
        values: the member's configuration.
        reference: configuration of the unchanged recipe, with the member's settings but without its changes on axes.
        recipe: name of the recipe; for a branch, the parent's label.
        variant: label of the member's variant, such as `loss=dapo`; None without a variant.
        by_hand: overrides of axes on the command line, by axis.
        settings: other overrides that are not common to all members.
        overrides: all overrides. For a branch, the parent's come first, so that branches of the branch inherit them.
        parent: the run that the member branches from; None if it is not a branch. With a parent, `reference` has the
            parent's overrides, too.
    """

    values: dict[str, Any]
    reference: dict[str, Any]
    recipe: str
    variant: str | None
    by_hand: Mapping[str, Sequence[str]]
    settings: Sequence[str]
    overrides: Sequence[str]
    parent: Parent | None = None


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Check that the seed is a whole number of 0 or more, and that the number of steps is one of 1 or more."""
    seed = values.get("seed")
    try:
        is_whole = not isinstance(seed, bool) and seed is not None and int(seed) == float(seed) and int(seed) >= 0
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise ConfigurationError(
            f"seed: {seed!r} must be a whole number, 0 or more; give seed=0, or several: seed=0,1,2"
        )
    whole_number("budget.steps", _setting(values, "budget.steps"))


def _setting(config: Mapping[str, Any], field: str) -> Any:
    """Return the value of the key `field` (GROUP.NAME); None if the group has no such name.

    Raises:
        ConfigurationError: the group is a plain value or was removed.
    """
    group, _, name = field.partition(".")
    part = config.get(group)
    if not isinstance(part, Mapping):
        raise ConfigurationError(f"{group}: {shown(part)} must be a group of settings; give {field}=...")
    return part.get(name)


def _check_settings(config: Mapping[str, Any]) -> None:
    """Check operational settings, which are not part of a member's identity. Does not import torch."""
    for field, least in _WHOLE_NUMBERS.items():
        whole_number(field, _setting(config, field), least)
    HangTimeout.of(config)
    strict = _setting(config, "launch.strict_code")
    if not isinstance(strict, bool | None):
        raise ConfigurationError(f"launch.strict_code: {strict!r} must be true or false")
    if "strategy" in config and (name := _setting(config, "strategy.name")) not in STRATEGIES:
        raise ConfigurationError(f"strategy.name: {shown(name)} is unknown; valid: {', '.join(STRATEGIES)}")
    if "strategy" in config:
        check_layout(config["strategy"])
    checkpoint_form = _setting(config, "strategy.checkpoint") if "strategy" in config else None
    if checkpoint_form is not None and checkpoint_form not in CHECKPOINTS:
        raise ConfigurationError(
            f"strategy.checkpoint: {shown(checkpoint_form)} is unknown; valid: {', '.join(CHECKPOINTS)}"
        )
    if "strategy" in config and (tensor_parallel := _setting(config, "strategy.tensor_parallel")) is not None:
        whole_number("strategy.tensor_parallel", tensor_parallel, 1)
    address = _setting(config, "mlflow.uri")
    if not isinstance(address, str | None):
        raise ConfigurationError(
            f"mlflow.uri: {address!r} must be an address such as sqlite:///outputs/mlflow.db, or null for none"
        )
    _check_output_dir(config)


def _check_study(value: Any) -> None:
    """Check that the name of the study is the name of a folder.

    Raises:
        ConfigurationError: the name is invalid.
    """
    study = str(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(
            f"study: {study} is read as a number; choose another name, or write study=\"'{study}'\""
        )
    if Path(study).name != study or not study.isprintable() or study in ("", "..") or value is None:
        raise ConfigurationError(
            f"study: {study!r} is not the name of one folder; choose a plain name, or say where with output_dir=..."
        )
    if len(study.encode()) > _LONGEST_NAME:
        raise ConfigurationError(
            f"study: {study[:60] + '...'!r} is a name of {len(study.encode())} bytes; file systems take {_LONGEST_NAME}"
        )


def _check_light_parts(config: Mapping[str, Any], builder: _Builder) -> None:
    """Check data, scale and the model's path first, because building axes imports Lightning, which is slow."""
    from lightning_scalerl.member.identity import group_identity
    from lightning_scalerl.task.base import check_task

    # A scale may set values of a task, so a scale for another model is refused before the task refuses these values.
    model = chosen_node(config, "model")
    check_scale(config.get("scaled_for"), model["_target_"] == config.get("scaled_for"))
    check_task(builder(config, "task"))
    group_identity("model", model)
    for group in _WITHOUT_LIGHTNING:
        if group in config:
            builder(config, group)


def _check_output_dir(config: Mapping[str, Any]) -> None:
    output_dir = config["output_dir"]
    if not isinstance(output_dir, str) or not output_dir.strip() or "\0" in output_dir:
        raise ConfigurationError(
            f"output_dir: {output_dir!r} names no folder; give one, or leave it out (outputs/STUDY)"
        )
    for part in Path(output_dir).parts:
        if len(part.encode()) > _LONGEST_NAME:
            raise ConfigurationError(
                f"output_dir: {output_dir[:60] + '...'!r} has a name of {len(part.encode())} bytes in it; file systems "
                f"take {_LONGEST_NAME}"
            )


def _draft(overrides: list[str], common: set[str], composer: Composer, parent: Parent | None = None) -> _Draft:
    """Compose a member and its unchanged recipe, and sort its overrides into changes on axes and other settings.

    Args:
        overrides: the member's overrides.
        common: overrides that all members share; they are left out of labels.
        composer: composes configurations.
        parent: the run that the member branches from; None if it is not a branch. A branch inherits the parent's
            overrides, and is compared with the parent instead of the recipe.
    """

    def with_parent(entries: list[str]) -> list[str]:
        return entries if parent is None else inherited_overrides(entries, parent)

    own_entries = overrides if parent is None else own_overrides(overrides, parent)
    branch_entries = [] if parent is None else [entry for entry in overrides if group_of(entry) == BRANCH]
    overrides = with_parent(own_entries)
    branch = {} if parent is None else {BRANCH: parent.values}
    values = {**composer.resolved(overrides), **branch}
    _check_numbers(values)
    axes = axes_of(values)
    check_keys(values, overrides)
    departures = choice_overrides(own_entries, axes)
    reference = values
    if departures:
        without_departures = with_parent([entry for entry in own_entries if entry not in departures])
        reference = {**composer.resolved(without_departures), **branch}
    by_hand: dict[str, list[str]] = {}
    for entry in departures:
        if group_of(entry) != "variant":
            by_hand.setdefault(group_of(entry), []).append(entry.lstrip("+"))
    unlabelled = UNLABELLED | set(axes)
    distinctive = [entry for entry in own_entries if parent is not None or entry not in common]
    settings = [entry.lstrip("+") for entry in distinctive if group_of(entry) not in unlabelled]
    recipe = _value(overrides, "recipe") or DEFAULT_RECIPE
    for entry in overrides:
        if group_of(entry) == "label":
            raise ConfigurationError(
                f"{entry}: a run is named after what it changes in its recipe; leave it out, or give a file of yours "
                "in a folder variant/ the label (docs/guide/extend.md)"
            )
    has_variant = parent is None or any(group_of(entry) == "variant" for entry in own_entries)
    variant = _label(values, overrides, composer.folders) if has_variant else None
    label = parent.label if parent else recipe
    return _Draft(values, reference, label, variant, by_hand, settings, [*overrides, *branch_entries], parent)


def check_printed_config(overrides: Sequence[str], folders: Folders = ()) -> None:
    """Check a configuration before Hydra prints it, as before a run.

    Raises:
        ConfigurationError: the configuration cannot be composed, or its label contradicts its choices.
    """
    _check_label(_draft(list(overrides), set(overrides), composer_of(use_folders(folders))))


def _check_label(draft: _Draft) -> None:
    """Refuse an override of the axis that the variant changes, because it would make the label wrong."""
    axis = group_of(draft.variant) if draft.variant else ""
    if axis in draft.by_hand:
        raise ConfigurationError(
            f"{axis}: changed twice, by the variant {draft.variant} and by {' '.join(draft.by_hand[axis])}; keep one"
        )


def _identified(
    draft: _Draft,
    folders: Sequence[str],
    builder: _Builder,
    identities: dict[bytes, dict[str, Any]],
    clean: dict[tuple[str, int], Any],
) -> RunSpec:
    """Compute a member's identity, the axes on which it differs from its recipe, and its label.

    Args:
        draft: the composed member.
        folders: the user's folders of configuration files.
        builder: builds the parts of the configuration.
        identities: cache of identity forms, by a digest of the values.
        clean: see `make_spec`.
    """
    from lightning_scalerl.member.identity import identity_of

    def cached_identity(values: Mapping[str, Any]) -> dict[str, Any]:
        key = hashlib.blake2b(repr(learning_config(values)).encode(errors="surrogatepass"), digest_size=16).digest()
        if key not in identities:
            identities[key] = identity_of(values)
        return identities[key]

    for axis in axes_of(draft.values):
        builder(draft.values, axis)  # raises for a value out of range, or for a class that is not a choice on this axis
    identity = cached_identity(draft.values)
    changed = changed_keys(identity, cached_identity(draft.reference))
    departures: dict[str, str] = {}
    _check_label(draft)
    settings = draft.settings
    if draft.parent is not None:
        if draft.values["race"]["mode"] != "none":
            raise ConfigurationError("race.mode: branches cannot be raced; give race.mode=none")
        parent_identity = cached_identity(draft.parent.spec.config)
        groups = changed_groups(identity, parent_identity, int(draft.values["budget"]["steps"]), draft.parent)
        settings = [entry for entry in settings if group_of(entry) in groups]
        if draft.parent.optimizer == FRESH:
            settings.append(f"{BRANCH}.optimizer={FRESH}")
    if draft.variant:
        axis = group_of(draft.variant)
        if [axis] != [key for key in changed if key not in draft.by_hand]:
            changes = ", ".join(key for key in changed if key not in draft.by_hand) or "nothing"
            raise ConfigurationError(
                f"variant: {draft.variant} changes {changes} of {draft.recipe}; a variant is one change"
            )
        departures[axis] = draft.variant.removeprefix(f"{axis}=").removeprefix(f"{axis}.")
    for axis, entries in draft.by_hand.items():
        if axis in changed:
            departures[axis] = ", ".join(entry.removeprefix(f"{axis}=").removeprefix(f"{axis}.") for entry in entries)
    label_parts = [draft.variant] if draft.variant else []
    label_parts += [entry for axis, entries in draft.by_hand.items() if axis in changed for entry in entries]
    return make_spec(
        config=draft.values,
        reference=draft.reference,
        identity=identity,
        label="+".join([draft.recipe, *label_parts, *settings]),
        baseline=draft.recipe,
        departures=departures,
        settings={key: value for key, _, value in (entry.partition("=") for entry in settings)},
        folders=folders,
        clean=clean,
    )


def _value(overrides: Sequence[str], key: str) -> str | None:
    """Return the value of the last override of a key; None if there is none."""
    values = [entry.split("=", 1)[1] for entry in overrides if entry.split("=")[0] == key]
    return values[-1] if values else None


def _label(values: Mapping[str, Any], overrides: Sequence[str], folders: Folders) -> str | None:
    """Return the label that the variant's file sets, or None."""
    if isinstance(values.get("label", False), str | None):
        return values["label"]  # type: ignore[no-any-return]
    # The label is missing or not a string. Composing the configuration again returns it, or raises an error with the
    # reason.
    label: str | None = compose(overrides, folders).label
    return label


class _Builder:
    """Builds objects from groups of configurations; equal groups give the same object."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __call__(self, config: Mapping[str, Any], group: str) -> Any:
        """Build the object of a group from plain values, as `build` does."""
        part = {group: config[group]} if group in config else {}
        key = repr(part)
        if "${" in key:  # looks like an interpolation, which may refer to any other part
            return build(OmegaConf.create(dict(config)), group)
        if key not in self._built:
            self._built[key] = build(OmegaConf.create(part), group)
        return self._built[key]


def _cautions(spec: RunSpec, builder: _Builder) -> tuple[str, ...]:
    """Return warnings about settings that are valid but probably have an unwanted effect."""
    user_axes = [builder(spec.config, axis) for axis in axes_of(spec.config) if axis not in AXES]
    idle = tuple(f"warning: {line}" for choice in user_axes if (line := choice.without_effect()) is not None)
    return (*_exhausted_pool(spec, builder), *_idle_penalty(spec, builder), *_idle_rewards(spec, builder), *idle)


def _idle_penalty(spec: RunSpec, builder: _Builder) -> tuple[str, ...]:
    """Return a warning if completions are too short for the length penalty, always or in the curriculum's first
    stage.
    """
    from lightning_scalerl.axes.length_control import Penalty

    control, limit = builder(spec.config, "length_control"), spec.config["context"]["max_new_tokens"]
    first = builder(spec.config, "curriculum").max_new_tokens(limit, 0)
    if not isinstance(control, Penalty) or first > (unpenalised := control.limit - control.buffer):
        return ()
    if limit <= unpenalised:
        return (
            f"warning: length_control: completions have at most {limit} tokens, and length_control=penalty acts from "
            f"{unpenalised} tokens on: nothing is penalised. A larger length_control.buffer, or a smaller "
            "length_control.limit",
        )
    return (
        f"warning: curriculum: completions of the first stage have at most {first} tokens, and length_control=penalty "
        f"acts from {unpenalised} tokens on: nothing is penalised before a later stage. A larger "
        "thinking.penalty_buffer, or larger curriculum.shares",
    )


def _idle_rewards(spec: RunSpec, builder: _Builder) -> tuple[str, ...]:
    """Return a warning if the task has weighted rewards but the environment's reward is used instead of them."""
    if "environment" not in spec.config or not builder(spec.config, "environment").gives_reward:
        return ()
    names = [name for names in builder(spec.config, "task").reward_sums() for name in names]
    if not names:
        return ()
    return (
        f"warning: environment.reward: environment, so none of the task's rewards ({', '.join(names)}) is used. To use "
        "them and their weights, set environment.reward=task",
    )


def _exhausted_pool(spec: RunSpec, builder: _Builder) -> tuple[str, ...]:
    """Return a warning if the prompt pool may be exhausted within the budget, which would end the run early."""
    resampling, pool = builder(spec.config, "resampling"), builder(spec.config, "task").train_prompts()
    prompts = len({prompt.copy_of or prompt.prompt_id for prompt in pool})
    batch = spec.config["batch"]
    draws = spec.steps * batch["prompts"] / prompts
    if draws < _EXHAUSTING_DRAWS or not resampling.retires((1.0,)):
        return ()
    return (
        f"warning: the pool may be exhausted: {spec.steps} steps of {batch['prompts']} prompts draw each of {prompts} "
        f"prompts {draws:.0f} times, and resampling retires a prompt for good once its group of {batch['completions']} "
        "has passed. The run ends when no prompt is left. Use a larger pool, fewer budget.steps, or resampling=uniform",
    )


def _check(spec: RunSpec, builder: _Builder) -> None:
    """Check a member's recipe, the neutral choices of the user's axes, its curriculum and its evaluation."""
    recipe = build_recipe(spec.config, spec.recipe, builder)
    recipe.check(recipe.choices)
    for choice in recipe.choices.user_axes.values():
        choice.neutral_choice()
    from lightning_scalerl.task.base import check_curriculum

    check_curriculum(builder(spec.config, "task"), recipe.choices.curriculum)
    builder(spec.config, "evaluation")
