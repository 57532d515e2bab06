"""Planning a study's members: composed, checked and identified before anything runs.

A grid of a thousand members has few distinct rows of groups and many values on top of them. Hydra composes each row
of groups once; values are then set on copies, as Hydra would. Overrides of any other kind, and all that fail, go
through Hydra whole, so that what is planned and what is complained about never depends on the short cut.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf

from lightning_scalerl.choice import AXES, ConfigurationError, whole_number
from lightning_scalerl.composition import build, build_recipe, compose, conf_dir
from lightning_scalerl.task.base import check_task
from sweeps.spec import OPERATIONAL_KEYS, RunSpec, changed_keys, make_spec

DEFAULT_RECIPE = "scalerl"  # as in conf/train.yaml
# Groups that never name a curve: its recipe does already, its seed does not, and the rest is not science.
UNLABELLED = OPERATIONAL_KEYS | {"recipe", "experiment", "variant", *AXES}

_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# An interpolation of a key, such as ${study} or ${..width}; all others are left to OmegaConf.
_REFERENCE = re.compile(r"\$\{\.*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")


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


def _plain(config: DictConfig) -> dict[str, Any]:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=...")
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


@dataclass(frozen=True)
class _Base:
    """A configuration in plain values (None: some are missing), and its free leaves by dotted key.

    A leaf is free if it holds a value of its own and no interpolation reads it: setting it changes nothing else.
    """

    values: dict[str, Any] | None
    free: frozenset[str]


class Composer:
    """Resolved configurations of many override lists; what they have in common is composed once."""

    def __init__(self) -> None:
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override | None] = {}
        self._groups: dict[str, bool] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._bases: dict[tuple[tuple[str, ...], tuple[str, ...]], _Base] = {}

    def resolved(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The configuration in plain values; parts are shared with other results.

        Raises:
            ConfigurationError: as `compose` does, or a key without a value.
        """
        try:
            found = self._short_cut(overrides)
        except Exception:  # whatever it was: composed whole, the list fails with the message it deserves
            found = None
        return _plain(compose(overrides)) if found is None else found

    def _short_cut(self, overrides: Sequence[str]) -> dict[str, Any] | None:
        """The same without composing the whole list; None where that could make a difference."""
        groups: list[str] = []
        settings: list[tuple[str, Override]] = []
        for entry in overrides:
            parsed = self._parse(entry)
            if parsed is None:
                return None
            # A group set to a mapping is no choice of a file but of values.
            if self._is_group(parsed.key_or_group) and not isinstance(parsed.value(), dict):
                groups.append(entry)
            else:
                settings.append((entry, parsed))
        late = {entry for entry, parsed in settings if _is_plain(parsed.value())}
        while True:
            early = [(entry, parsed) for entry, parsed in settings if entry not in late]
            base = self._base(tuple(groups), early)
            touched = {_first(parsed) for _, parsed in early}
            held = {
                entry
                for entry, parsed in settings
                if entry in late and (parsed.key_or_group not in base.free or _first(parsed) in touched)
            }
            if not held:
                break
            # Others are computed from these, or lie where an early one writes: set in order, then resolved.
            late -= held
        values = base.values
        if values is not None:
            for entry, parsed in settings:
                if entry in late:
                    values = _with(values, parsed.key_or_group.split("."), parsed.value())
        return values

    def _parse(self, entry: str) -> Override | None:
        """An override that sets what exists to one value, or picks a group's file; None for any other kind."""
        if entry not in self._parsed:
            (parsed,) = self._parser.parse_overrides([entry])
            usual = (
                parsed.type == OverrideType.CHANGE
                and parsed.package is None
                and not parsed.is_sweep_override()
                and _PLAIN_KEY.fullmatch(parsed.key_or_group) is not None
                and _first(parsed) != "hydra"
            )
            self._parsed[entry] = parsed if usual else None
        return self._parsed[entry]

    def _is_group(self, key: str) -> bool:
        if key not in self._groups:
            self._groups[key] = (conf_dir() / key).is_dir()
        return self._groups[key]

    def _base(self, groups: tuple[str, ...], settings: Sequence[tuple[str, Override]]) -> _Base:
        """What Hydra makes of groups, with settings applied in order, as it would do itself."""
        key = groups, tuple(entry for entry, _ in settings)
        if key not in self._bases:
            if groups not in self._composed:
                self._composed[groups] = compose(groups)
            config = self._composed[groups]
            if settings:
                config = copy.deepcopy(config)
                for _, parsed in settings:
                    OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=True)
            if OmegaConf.missing_keys(config):
                self._bases[key] = _Base(None, frozenset())
            else:
                self._bases[key] = _Base(_plain(config), _free(config))
        return self._bases[key]


def _first(override: Override) -> str:
    """The top-level key."""
    key: str = override.key_or_group
    return key.split(".")[0]


def _is_plain(value: Any) -> bool:
    """Whether a value means itself: no container, no interpolation, nothing missing."""
    if isinstance(value, str):
        return "$" not in value and "\\" not in value and value != "???"
    return value is None or isinstance(value, bool | int | float)


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy with one leaf changed, which shares everything else."""
    first, *rest = path
    return {**values, first: _with(values[first], rest, value) if rest else value}


def _free(config: DictConfig) -> frozenset[str]:
    """See `_Base`; a leaf with any part of its name in an interpolation is not free."""
    leaves = list(_leaves(config))
    texts = [text for _, text in leaves if text is not None]
    if any("${" in _REFERENCE.sub("", text) for text in texts):
        return frozenset()
    read = {part for text in texts for name in _REFERENCE.findall(text) for part in name.split(".")}
    return frozenset(key for key, text in leaves if text is None and key and not read & set(key.split(".")))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Every leaf of a mapping by its dotted key (an item of a list has none), and what it interpolates, if anything."""
    if node._is_interpolation():
        yield "", node._value()
    elif isinstance(node, DictConfig) and not node._is_none():
        for key in node:
            yield from _leaves(node._get_node(key), prefix + (key if isinstance(key, str) else repr(key)) + ".")
    elif isinstance(node, ListConfig) and not node._is_none():
        for number in range(len(node)):
            yield from ((("", text)) for _, text in _leaves(node._get_node(number)))
    else:
        yield prefix[:-1] if type(node) is AnyNode else "", None


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
