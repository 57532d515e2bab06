"""Identifying a study's members: composed, checked and named before anything runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_scalerl.checks import ONE_TRAINER, ConfigurationError, check_scale, shown, whole_number
from lightning_scalerl.choices import AXES
from lightning_scalerl.composition import (
    SETTINGS,
    Composer,
    Folders,
    axes_of,
    build,
    build_recipe,
    chosen,
    compose,
    composer_of,
    use_folders,
)
from sweeps.run.activity import Patience
from sweeps.run.spec import OPERATIONAL_KEYS, RunSpec, changed_keys, make_spec, science

_LONGEST_NAME = 255  # bytes of a folder's name
# Operational settings, with the least that each may be.
_WHOLE_NUMBERS = {
    "checkpoint.every_n_steps": 1,
    "rollouts.groups": 0,
    "rollouts.every_n_steps": 1,
    "launch.max_parallel": 1,
    "launch.threads": 1,
}
# As in `distributed.start`, which imports torch.
STRATEGIES = ("ddp", "fsdp2")
CHECKPOINTS = ("shards", "whole")
# Settings whose classes import torch at most: seconds less to say what is wrong with them.
_WITHOUT_LIGHTNING = ("reward", "health", "verify", "optimizer", "schedule")
# A pool is said to be at risk from so many draws of each prompt on: one in two groups that pass exhausts it.
_DRAWN_OFTEN = 2.0
DEFAULT_RECIPE = "scalerl"  # as in conf/train.yaml
# Groups that never name a curve: its recipe does already, its seed does not, and the rest is not science.
UNLABELLED = OPERATIONAL_KEYS | {"recipe", "experiment", "variant", "cluster"}


def plan_members(override_lists: Sequence[Sequence[str]], folders: Folders = ()) -> list[RunSpec]:
    """Compose, check and identify members, and make what they share; no training starts before all of it holds.

    Members share the parts of their configurations that are equal: these are read, never written.

    Args:
        override_lists: one a member, as on the command line.
        folders: of the user's, beside `conf/`.

    Raises:
        ConfigurationError: the first problem found, in one line.
    """
    own = use_folders(folders)
    everywhere = set.intersection(*(set(overrides) for overrides in override_lists))
    composed = composer_of(own)
    # All of them first: what Hydra has to complain about is answered before anything heavy is imported.
    drafts = [_draft(list(overrides), everywhere, composed) for overrides in override_lists]
    builder = _Builder()
    for draft in drafts:
        _check_settings(draft.values)
        _check_light_parts(draft.values, builder)
    known: dict[bytes, dict[str, Any]] = {}
    clean: dict[tuple[str, int], Any] = {}
    specs = [
        replace(_identified(draft, own, builder, known, clean), overrides=_to_paste(overrides))
        for draft, overrides in zip(drafts, override_lists, strict=True)
    ]
    checked: set[str] = set()
    for spec in specs:
        if spec.curve not in checked:
            _check(spec, builder)
            checked.add(spec.curve)
    for spec in specs:
        builder(spec.config, "model")
    return [replace(spec, cautions=_cautions(spec, builder)) for spec in specs]


def _to_paste(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the part of a command that may be written down: without the tracking address, which may hold a login."""
    return tuple(entry for entry in overrides if group_of(entry) != "mlflow")


@dataclass(frozen=True)
class _Draft:
    """Member that is composed and not yet identified.

    Attributes:
        values: its configuration.
        reference: that of its recipe, with the same settings and without its departures.
        recipe: the recipe's name.
        variant: what its variant calls itself, such as `loss=dapo`; None if it has none.
        by_hand: overrides of axes on the command line, by axis.
        settings: other overrides, that not all members share.
    """

    values: dict[str, Any]
    reference: dict[str, Any]
    recipe: str
    variant: str | None
    by_hand: Mapping[str, Sequence[str]]
    settings: Sequence[str]


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Check the numbers that an identity is made with."""
    seed = values.get("seed")
    try:
        good = not isinstance(seed, bool) and seed is not None and int(seed) == float(seed)
    except (TypeError, ValueError, OverflowError):
        good = False
    if not good:
        raise ConfigurationError(f"seed: {seed!r} must be a whole number; give seed=0, or several: seed=0,1,2")
    whole_number("budget.steps", _setting(values, "budget.steps"))


def _setting(config: Mapping[str, Any], field: str) -> Any:
    """Return what stands at `GROUP.NAME`; None if the group is there and has no such name.

    Raises:
        ConfigurationError: the group is a value, or was taken away.
    """
    group, _, name = field.partition(".")
    part = config.get(group)
    if not isinstance(part, Mapping):
        raise ConfigurationError(f"{group}: {shown(part)} must be a group of settings; give {field}=...")
    return part.get(name)


def check_layout(config: Mapping[str, Any]) -> None:
    """Refuse several nodes of which it is not said how many ranks each has: nobody would start them.

    Raises:
        ConfigurationError: with what to give.
    """
    if "strategy" not in config or _setting(config, "strategy.devices") is not None:
        return
    if (nodes := _setting(config, "strategy.nodes")) not in (None, 1):
        raise ConfigurationError(
            f"strategy.nodes: {nodes}, and strategy.devices does not say how many ranks each has; give both, "
            f"strategy.nodes={nodes} strategy.devices=8, or hydra.launcher.nodes={nodes} in their place"
        )


def _check_settings(config: Mapping[str, Any]) -> None:
    """Check settings of where and how a member runs, which are no part of its identity. Needs no torch."""
    for field, least in _WHOLE_NUMBERS.items():
        whole_number(field, _setting(config, field), least)
    Patience.of(config)
    strict = _setting(config, "launch.strict_code")
    if not isinstance(strict, bool | None):
        raise ConfigurationError(f"launch.strict_code: {strict!r} must be true or false")
    if "strategy" in config and (name := _setting(config, "strategy.name")) not in STRATEGIES:
        raise ConfigurationError(f"strategy.name: {shown(name)} is unknown; valid: {', '.join(STRATEGIES)}")
    for field in ("strategy.nodes", "strategy.devices") if "strategy" in config else ():
        if (count := _setting(config, field)) is not None:
            whole_number(field, count)
    check_layout(config)
    form = _setting(config, "strategy.checkpoint") if "strategy" in config else None
    if form is not None and form not in CHECKPOINTS:
        raise ConfigurationError(f"strategy.checkpoint: {shown(form)} is unknown; valid: {', '.join(CHECKPOINTS)}")
    if "strategy" in config and (partners := _setting(config, "strategy.tensor_parallel")) is not None:
        whole_number("strategy.tensor_parallel", partners, 1)
    address = _setting(config, "mlflow.uri")
    if not isinstance(address, str | None):
        raise ConfigurationError(
            f"mlflow.uri: {address!r} must be an address such as sqlite:///outputs/mlflow.db, or null for none"
        )
    study = str(config["study"])
    if Path(study).name != study or not study.isprintable() or study in ("", "..") or config["study"] is None:
        raise ConfigurationError(
            f"study: {study!r} is not the name of one folder; choose a plain name, or say where with output_dir=..."
        )
    if len(study.encode()) > _LONGEST_NAME:
        raise ConfigurationError(
            f"study: {study[:60] + '...'!r} is a name of {len(study.encode())} bytes; file systems take {_LONGEST_NAME}"
        )
    _check_place(config)


def _check_light_parts(config: Mapping[str, Any], builder: _Builder) -> None:
    """Check data, scale and a model's place before the axes are built: importing Lightning for those takes seconds."""
    from lightning_scalerl.member.identity import part_of
    from lightning_scalerl.task.base import check_task

    check_task(builder(config, "task"))
    model = chosen(config, "model")
    check_scale(config.get("scaled_for"), model["_target_"] == config.get("scaled_for"))
    part_of("model", model)
    for group in _WITHOUT_LIGHTNING:
        if group in config:
            builder(config, group)


def _check_place(config: Mapping[str, Any]) -> None:
    """Check the folder of the runs: it must have a valid name, and not be the one that the command was given in."""
    place = config["output_dir"]
    if not isinstance(place, str) or not place.strip() or "\0" in place:
        raise ConfigurationError(f"output_dir: {place!r} names no folder; give one, or leave it out (outputs/STUDY)")
    for part in Path(place).parts:
        if len(part.encode()) > _LONGEST_NAME:
            raise ConfigurationError(
                f"output_dir: {place[:60] + '...'!r} has a name of {len(part.encode())} bytes in it; file systems take "
                f"{_LONGEST_NAME}"
            )


def _draft(overrides: list[str], everywhere: set[str], composed: Composer) -> _Draft:
    values = composed.resolved(overrides)
    _check_numbers(values)
    axes = axes_of(values)
    _check_keys(values, overrides, axes)
    departing = [entry for entry in overrides if group_of(entry) in (*axes, "variant")]
    reference = composed.resolved([entry for entry in overrides if entry not in departing]) if departing else values
    by_hand: dict[str, list[str]] = {}
    for entry in departing:
        if group_of(entry) != "variant":
            by_hand.setdefault(group_of(entry), []).append(entry.lstrip("+"))
    unlabelled = UNLABELLED | set(axes)
    own = [entry for entry in overrides if entry not in everywhere]
    settings = [entry.lstrip("+") for entry in own if group_of(entry) not in unlabelled]
    recipe = _value(overrides, "recipe") or DEFAULT_RECIPE
    for entry in overrides:
        if group_of(entry) == "label":
            raise ConfigurationError(
                f"{entry}: a run is named after what it changes in its recipe; leave it out, or give a file of yours "
                "in a folder variant/ the label (docs/guide/extend.md)"
            )
    return _Draft(values, reference, recipe, _label(values, overrides, composed.folders), by_hand, settings)


def check_shown(overrides: Sequence[str], folders: Folders = ()) -> None:
    """Refuse to show a configuration under a label of something else, as a run of it is refused.

    Raises:
        ConfigurationError: it cannot be composed, or its label and its choices contradict each other.
    """
    _check_label(_draft(list(overrides), set(overrides), composer_of(use_folders(folders))))


def _check_label(draft: _Draft) -> None:
    """Check that a label names what the variant's file changes, and that nothing else changes that."""
    axis = group_of(draft.variant) if draft.variant else ""
    if axis in draft.by_hand:
        raise ConfigurationError(
            f"{axis}: changed twice, by the variant {draft.variant} and by {' '.join(draft.by_hand[axis])}; keep one"
        )


def _check_keys(values: Mapping[str, Any], overrides: Sequence[str], axes: Sequence[str]) -> None:
    """Check that every top-level key is a setting or an axis: an unread key would silently have no effect."""
    known = {*AXES, *SETTINGS, *OPERATIONAL_KEYS}
    for entry in overrides:
        name = entry.lstrip("~").split("=")[0]
        if entry.startswith("~") and "." not in name and (name in AXES or name not in known):
            raise ConfigurationError(f"{entry}: an axis cannot be taken away; pick another of its choices instead")
    for key in values:
        if key == "trainer":
            raise ConfigurationError(ONE_TRAINER)
        if key not in known and key not in axes:
            raise ConfigurationError(
                f"{key}: neither a setting nor an axis; an axis of your own is a mapping with _target_ "
                "(docs/guide/extend.md)"
            )


def _identified(
    draft: _Draft,
    folders: Sequence[str],
    builder: _Builder,
    known: dict[bytes, dict[str, Any]],
    clean: dict[tuple[str, int], Any],
) -> RunSpec:
    """Compute the member's identity, and its departures as fields and as a label.

    `known`: identities so far, by a digest of the values; `clean`: see `make_spec`.
    """
    from lightning_scalerl.member.identity import identity_of

    def lasting(values: Mapping[str, Any]) -> dict[str, Any]:
        key = hashlib.blake2b(repr(science(values)).encode(errors="surrogatepass"), digest_size=16).digest()
        if key not in known:
            known[key] = identity_of(values)
        return known[key]

    for axis in axes_of(draft.values):
        builder(draft.values, axis)  # a value out of range, or no choice on this axis at all
    identity = lasting(draft.values)
    changed = changed_keys(identity, lasting(draft.reference))
    departures: dict[str, str] = {}
    _check_label(draft)
    if draft.variant:
        axis = group_of(draft.variant)
        if [axis] != [key for key in changed if key not in draft.by_hand]:
            found = ", ".join(key for key in changed if key not in draft.by_hand) or "nothing"
            raise ConfigurationError(
                f"variant: {draft.variant} changes {found} of {draft.recipe}; a variant is one change"
            )
        departures[axis] = draft.variant.removeprefix(f"{axis}=").removeprefix(f"{axis}.")
    for axis, entries in draft.by_hand.items():
        if axis in changed:
            departures[axis] = ", ".join(entry.removeprefix(f"{axis}=").removeprefix(f"{axis}.") for entry in entries)
    shown = [draft.variant] if draft.variant else []
    shown += [entry for axis, entries in draft.by_hand.items() if axis in changed for entry in entries]
    return make_spec(
        config=draft.values,
        reference=draft.reference,
        identity=identity,
        label="+".join([draft.recipe, *shown, *draft.settings]),
        baseline=draft.recipe,
        departures=departures,
        settings={key: value for key, _, value in (entry.partition("=") for entry in draft.settings)},
        folders=folders,
        clean=clean,
    )


def group_of(override: str) -> str:
    """Return the group that an override is of, the first word of its key."""
    return override.lstrip("+~").split("=")[0].split(".")[0].split("@")[0]


def _value(overrides: Sequence[str], key: str) -> str | None:
    values = [entry.split("=", 1)[1] for entry in overrides if entry.split("=")[0] == key]
    return values[-1] if values else None


def _label(values: Mapping[str, Any], overrides: Sequence[str], folders: Folders) -> str | None:
    """Return the variant's name for itself."""
    if isinstance(values.get("label", False), str | None):
        return values["label"]  # type: ignore[no-any-return]
    named: str | None = compose(overrides, folders).label  # gone or no text: OmegaConf has the words for that
    return named


class _Builder:
    """Builds each distinct part of many configurations once."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __call__(self, config: Mapping[str, Any], group: str) -> Any:
        """Build an object from plain values, as `build` does."""
        part = {group: config[group]} if group in config else {}
        key = repr(part)
        if "${" in key:  # text that reads like an interpolation, of anything
            return build(OmegaConf.create(dict(config)), group)
        if key not in self._built:
            self._built[key] = build(OmegaConf.create(part), group)
        return self._built[key]


def _cautions(spec: RunSpec, builder: _Builder) -> tuple[str, ...]:
    """Return a line if the pool may be exhausted within the budget: the run would end there, and not be continued."""
    resampling, prompts = builder(spec.config, "resampling"), len(builder(spec.config, "task").train_prompts())
    batch = spec.config["batch"]
    # Of each prompt that is left. A prompt need not pass the first time, so one pass over the pool exhausts none.
    drawn = spec.steps * batch["prompts"] / prompts
    if drawn < _DRAWN_OFTEN or not resampling.retires((1.0,)):
        return ()
    return (
        f"warning: the pool may be exhausted: {spec.steps} steps of {batch['prompts']} prompts draw each of {prompts} "
        f"prompts {drawn:.0f} times, and resampling retires one for good once its group of {batch['completions']} has "
        "passed; a run with no prompt left ends there. A larger pool, fewer budget.steps, or resampling=uniform",
    )


def _check(spec: RunSpec, builder: _Builder) -> None:
    recipe = build_recipe(spec.config, spec.recipe, builder)
    recipe.check(recipe.choices)
    for choice in recipe.choices.own.values():
        choice.neutral_choice()
    from lightning_scalerl.task.base import check_curriculum

    check_curriculum(builder(spec.config, "task"), recipe.choices.curriculum)
    builder(spec.config, "evaluation")
