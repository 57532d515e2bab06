"""Composer of many override lists: the same result as Hydra's, with common parts composed only once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import AnyNode, DictConfig, ListConfig, OmegaConf

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import Folders, build_recipe, compose, is_group, use_folders

if TYPE_CHECKING:
    from lightning_scalerl.recipe import Recipe

_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


# An interpolation of a key, such as ${study} or ${..width}; all others are left to OmegaConf.
_REFERENCE = re.compile(r"\$\{\.*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")


def _plain(config: DictConfig) -> dict[str, Any]:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=...")
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return values


@dataclass(frozen=True)
class _Base:
    """Configuration in plain values (None: some are missing), and its free leaves by dotted key.

    A leaf is free if it holds a value of its own and no interpolation reads it: setting it changes nothing else.
    """

    values: dict[str, Any] | None
    free: frozenset[str]


class Composer:
    """Composes many override lists into resolved configurations; what they have in common is composed once.

    Args:
        folders: of the user's, beside `conf/`.
    """

    def __init__(self, folders: Folders = ()) -> None:
        self.folders = folders
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override | None] = {}
        self._groups: dict[str, bool] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._bases: dict[tuple[tuple[str, ...], tuple[str, ...]], _Base] = {}

    def resolved(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the configuration in plain values; parts are shared with other results.

        Raises:
            ConfigurationError: as `compose` does, or a key without a value.
        """
        found = self.known(overrides)
        return _plain(compose(overrides, self.folders)) if found is None else found

    def known(self, overrides: Sequence[str]) -> dict[str, Any] | None:
        """Return the configuration in plain values; None where only Hydra itself can compose the list, or refuse it."""
        try:
            return self._short_cut(overrides)
        except Exception:  # whatever it was: composed whole, the list fails with the message it deserves
            return None

    def _short_cut(self, overrides: Sequence[str]) -> dict[str, Any] | None:
        """Return the same without composing the whole list; None where that could make a difference."""
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
        """Parse an override that sets an existing key to one value, or picks a group's file; else return None."""
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
            self._groups[key] = is_group(key, self.folders)
        return self._groups[key]

    def _base(self, groups: tuple[str, ...], settings: Sequence[tuple[str, Override]]) -> _Base:
        """Return the configuration that Hydra composes of groups, with settings applied in order as it would."""
        key = groups, tuple(entry for entry, _ in settings)
        if key not in self._bases:
            if groups not in self._composed:
                self._composed[groups] = compose(groups, self.folders)
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
    """Return the top-level key of a dotted key."""
    key: str = override.key_or_group
    return key.split(".")[0]


def _is_plain(value: Any) -> bool:
    """Return whether a value is literal: no container, no interpolation, nothing missing."""
    if isinstance(value, str):
        return "$" not in value and "\\" not in value and value != "???"
    return value is None or isinstance(value, bool | int | float)


def _with(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy with one leaf changed, which shares everything else."""
    first, *rest = path
    return {**values, first: _with(values[first], rest, value) if rest else value}


def _free(config: DictConfig) -> frozenset[str]:
    """Return the free leaves (see `_Base`); a leaf is not free if an interpolation mentions part of its name."""
    leaves = list(_leaves(config))
    texts = [text for _, text in leaves if text is not None]
    if any("${" in _REFERENCE.sub("", text) for text in texts):
        return frozenset()
    read = {part for text in texts for name in _REFERENCE.findall(text) for part in name.split(".")}
    return frozenset(key for key, text in leaves if text is None and key and not read & set(key.split(".")))


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield every leaf of a mapping by its dotted key (an item of a list has none), and what it interpolates."""
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


@cache
def _shipped() -> Composer:
    """Return the composer of `conf/` alone, which does not change while a process runs."""
    return Composer()


def shared_composer(folders: Folders = ()) -> Composer:
    """Return the process's composer of `conf/`, or a new one: a user's folders may have been edited in between.

    Hydra takes half a second of CPU to compose `conf/`, so each row of groups is composed once a process.
    """
    return Composer(folders) if folders else _shipped()


def load_recipe(name: str, overrides: Sequence[str] = (), folders: Folders = ()) -> Recipe:
    """Build the recipe `recipe/<name>.yaml` of `conf/` or a folder of the user's.

    Args:
        name: of the recipe's file.
        overrides: such as `optimizer.lr=1e-3`.
        folders: of the user's, beside `conf/`.

    Raises:
        ConfigurationError: an unknown recipe, key or value.
    """
    folders = use_folders(folders)
    words = [f"recipe={name}", *overrides]
    values = shared_composer(folders).known(words)
    return build_recipe(compose(words, folders) if values is None else values, name)
