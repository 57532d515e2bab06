"""Planning a study's members: composed, checked and identified before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_scalerl.choice import AXES, ConfigurationError, whole_number
from lightning_scalerl.recipe import build, build_recipe, compose
from lightning_scalerl.task.base import check_task
from sweeps.spec import OPERATIONAL_KEYS, RunSpec, changed_keys, make_spec

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
