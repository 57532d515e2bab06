"""Planning a study's members: composed, checked and identified before anything runs.

A grid of a thousand members has few distinct rows of groups and many values on top of them. Hydra composes each row
of groups once; values are then set on copies, as Hydra would. Overrides of any other kind, and all that fail, go
through Hydra whole, so that what is planned and what is complained about never depends on the short cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_scalerl.choice import AXES, ConfigurationError, whole_number
from lightning_scalerl.composition import build, build_recipe, compose
from lightning_scalerl.member.composer import Composer
from lightning_scalerl.task.base import check_task
from sweeps.run.spec import OPERATIONAL_KEYS, RunSpec, changed_keys, make_spec

DEFAULT_RECIPE = "scalerl"  # as in conf/train.yaml
# Groups that never name a curve: its recipe does already, its seed does not, and the rest is not science.
UNLABELLED = OPERATIONAL_KEYS | {"recipe", "experiment", "variant", *AXES}


def plan(override_lists: Sequence[Sequence[str]]) -> list[RunSpec]:
    """Compose, check and identify members, and make what they share; no training starts before all of it holds.

    Members share the parts of their configurations that are equal: these are read, never written.

    Raises:
        ConfigurationError: the first problem found, in one line.
    """
    everywhere = set.intersection(*(set(overrides) for overrides in override_lists))
    composer = Composer()
    specs = [_plan_one(list(overrides), everywhere, composer) for overrides in override_lists]
    builder = _Builder()
    checked: set[str] = set()
    for spec in specs:
        if spec.curve not in checked:
            _check(spec, builder)
            checked.add(spec.curve)
    for spec in specs:
        builder(spec.config, "model")
    return specs


def _plan_one(overrides: list[str], everywhere: set[str], composer: Composer) -> RunSpec:
    """One member; overrides that not all members share are part of its label."""
    values = composer.resolved(overrides)
    departures = [entry for entry in overrides if _group(entry) in (*AXES, "variant")]
    recipe = _value(overrides, "recipe") or DEFAULT_RECIPE
    reference = composer.resolved([entry for entry in overrides if entry not in departures]) if departures else values
    label = _label(values, overrides)
    axes = changed_keys(values, reference)
    variant = [label] if label else []
    if label and [_group(label)] != [axis for axis in axes if axis not in map(_group, departures)]:
        changed = ", ".join(axes) or "nothing"
        raise ConfigurationError(f"variant: {label} changes {changed} of {recipe}; a variant is one change")
    by_hand = [entry.lstrip("+") for entry in departures if _group(entry) in axes]
    swept = [entry.lstrip("+") for entry in overrides if entry not in everywhere and _group(entry) not in UNLABELLED]
    name = "+".join([recipe, *variant, *by_hand, *swept])
    return make_spec(config=values, reference=reference, label=name, baseline=recipe)


def _group(override: str) -> str:
    return override.lstrip("+~").split("=")[0].split(".")[0].split("@")[0]


def _value(overrides: Sequence[str], key: str) -> str | None:
    values = [entry.split("=", 1)[1] for entry in overrides if entry.split("=")[0] == key]
    return values[-1] if values else None


def _label(values: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """What the variant calls itself."""
    if isinstance(values.get("label", False), str | None):
        return values["label"]  # type: ignore[no-any-return]
    named: str | None = compose(overrides).label  # gone or no text: OmegaConf has the words for that
    return named


class _Builder:
    """Builds each distinct part of many configurations once."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __call__(self, config: Mapping[str, Any], group: str) -> Any:
        """As `build`, of plain values."""
        part = {group: config[group]} if group in config else {}
        key = repr(part)
        if "${" in key:  # text that reads like an interpolation, of anything
            return build(OmegaConf.create(dict(config)), group)
        if key not in self._built:
            self._built[key] = build(OmegaConf.create(part), group)
        return self._built[key]


def _check(spec: RunSpec, builder: _Builder) -> None:
    fields = ("budget.steps", "checkpoint.every_n_steps", "launch.max_parallel", "launch.threads")
    tops = {field.split(".")[0] for field in fields} & spec.config.keys()
    numbers = OmegaConf.create({top: spec.config[top] for top in tops})
    for field in fields:
        whole_number(field, OmegaConf.select(numbers, field))
    study = str(spec.config["study"])
    if Path(study).name != study or not study.isprintable() or study == "..":
        raise ConfigurationError(
            f"study: {study!r} is not the name of one folder; choose a plain name, or say where with output_dir=..."
        )
    recipe = build_recipe(spec.config, spec.recipe, builder)
    recipe.check(recipe.choices)
    check_task(builder(spec.config, "task"))
    builder(spec.config, "evaluation")
