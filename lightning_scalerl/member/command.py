"""Planning of members that are commands of other trainers: Hydra composes them, `sweeps.command` identifies them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import Folders, compose, conf_dir, explain_other, use_folders
from sweeps.errors import UserError
from sweeps.run.spec import RunSpec

_log = logging.getLogger(__name__)
BASE = "command"
# Groups whose overrides Hydra must compose: they choose files, which may also set values in other groups.
_COMPOSED_GROUPS = ("cluster", "member", "hydra")
_DEFAULTS_LINE = "defaults: [{member: command}, _self_]"


def command_conf_dir() -> Path:
    """Return the folder of configurations for other trainers' commands: a base file, and an example per trainer."""
    return conf_dir() / BASE


def with_study_name(overrides: Sequence[str], file: Path) -> list[str]:
    """Add the study's name to the overrides, unless they or the file set one; the default is the name of the file."""
    is_named = "study" in _read(file) or any(word.startswith("study=") for word in overrides)
    return [*overrides] if is_named else [*overrides, f"study={file.stem}"]


def study_file(name: str | None, folders: Folders) -> Path | None:
    """Find the file of a study whose members are commands.

    Args:
        name: value of `--config-name`.
        folders: the user's folders of configuration files.

    Returns:
        Path of the file; None if `name` is None or the file does not choose a `member` in its defaults.

    Raises:
        ConfigurationError: the file has a command but does not choose `member: command`, or its defaults are invalid.
    """
    if name is None:
        return None
    for folder in (*folders, command_conf_dir()):
        path = Path(folder) / f"{name.removesuffix('.yaml')}.yaml"
        if not path.is_file():
            continue
        content = _read(path)
        defaults = content.get("defaults") if isinstance(content, Mapping) else None
        default_items = defaults if isinstance(defaults, list) else []
        if any(isinstance(item, Mapping) and "member" in item for item in default_items):
            for item in default_items:
                _check_default(path, item)
            hydra = content.get("hydra")
            for name in ("launcher", "sweeper") if isinstance(hydra, Mapping) else ():
                if not isinstance(hydra.get(name, {}), Mapping):
                    raise ConfigurationError(f"{path}: hydra.{name}: {hydra[name]!r} must be a group of settings")
            return path.resolve()
        if isinstance(content, Mapping) and "command" in content:
            raise ConfigurationError(f"{path}: has a command and no member; begin it with {_DEFAULTS_LINE}")
        if isinstance(content, Mapping) and not isinstance(content.get("defaults", []), list):
            raise ConfigurationError(
                f"{path}: defaults: {defaults!r} must be a list; begin the file with {_DEFAULTS_LINE} for a study of a "
                "command, else with defaults: [train, _self_]"
            )
        for item in default_items:
            _check_default(path, item, "for a study of a command, begin it")
    return None


def _read(path: Path) -> Any:
    """Return the content of a configuration file as Hydra will read it, with interpolations unresolved.

    Raises:
        ConfigurationError: the file is not UTF-8 or not YAML; one line that names the file.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigurationError(f"{path}: {position}not YAML ({error.problem}); correct it there") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: nested too deep to be read; give plainer values") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConfigurationError(f"{path}: holds no settings; begin it with {_DEFAULTS_LINE}") from error
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(f"{path}: not YAML ({' '.join(str(error).split())}); correct it") from error


def _check_default(path: Path, item: Any, begin: str = "begin it") -> None:
    """Check an item of a file's `defaults`, because Hydra fails on some invalid items with an internal error.

    Raises:
        ConfigurationError: the item is neither a name nor a group with its choice, or it chooses another `member`.
    """
    choices = list(item.values()) if isinstance(item, Mapping) else [item]
    names = choices[0] if isinstance(item, Mapping) and isinstance(choices[0], list) else choices
    if len(choices) != 1 or not all(isinstance(name, str) or (name is None and item is not None) for name in names):
        raise ConfigurationError(
            f"{path}: defaults: {item!r} must be a name, or one group and its choice; {begin} with {_DEFAULTS_LINE}"
        )
    if isinstance(item, Mapping) and item.get("member", BASE) != BASE:
        raise ConfigurationError(
            f"{path}: defaults: member: {item['member']!r} must be {BASE}; begin it with {_DEFAULTS_LINE}"
        )


def plan_commands(override_lists: Sequence[Sequence[str]], folders: Folders = ()) -> list[RunSpec]:
    """Compose, check and identify members that are commands, before anything is started.

    Args:
        override_lists: overrides per member, as on the command line.
        folders: the user's folders of configuration files, followed by the study's file.

    Raises:
        ConfigurationError: the first problem, in one line.
    """
    # Imported here, because it needs NumPy, which most commands do not need.
    from sweeps.command.plan import ComposedMember, make_specs

    *user_folders, file = folders
    path = Path(file)
    use_folders(user_folders)
    try:
        base = _compose_file(with_study_name([], path), path, user_folders)
        file_values = _file_values(base)
        members = []
        for overrides in override_lists:
            config = _with_values(base, overrides)
            values = _values(_compose_file(overrides, path, user_folders) if config is None else config, path)
            members.append(ComposedMember(values, file_values, tuple(overrides)))
        return make_specs(members, path.stem, path.parent, tuple(map(str, folders)))
    except UserError as error:
        raise ConfigurationError(str(error)) from error


def run_command(run_dir: Path, progress: bool = False) -> None:
    """Run a member that is a command, from its directory; see `sweeps.command.runner`."""
    from sweeps.command.runner import run_member

    run_member(run_dir, progress)


@contextmanager
def shared_groups() -> Iterator[None]:
    """Hide this project's groups from Hydra in the `with` block, except launch settings and the base of commands.

    Then the user's keys may have the names of hidden groups, such as `loss`, `model` or `task`.
    """
    # Load plugins now: some add groups to the store, which would be lost when the store is restored.
    Plugins.instance()
    store = ConfigStore.instance()
    previous = store.repo
    store.repo = {key: copy.deepcopy(group) for key, group in previous.items() if key != "variant"}
    try:
        for folder, group in _shared_folders():
            for path in sorted(folder.glob("*.yaml")):
                text = path.read_text(encoding="utf-8")
                package = "_global_" if "@package _global_" in text else None
                store.store(path.stem, OmegaConf.create(text), group=group, package=package)
        yield
    finally:
        # Other compositions find these groups in `conf/`. Hydra would use a copy left in the store as their schema.
        store.repo = previous


def _shared_folders() -> list[tuple[Path, str]]:
    """Return the folders of the groups that stay visible, each with the name of its group."""
    shared = [(conf_dir() / group, group) for group in ("cluster", "hydra/launcher", "hydra/sweeper")]
    return [*shared, (command_conf_dir() / "base", "member")]


def _compose_file(overrides: Sequence[str], path: Path, folders: Folders) -> DictConfig:
    with shared_groups():
        config: DictConfig = compose(overrides, folders, base=(path.parent, path.stem))
    return config


def _with_values(base: DictConfig, overrides: Sequence[str]) -> DictConfig | None:
    """Set plain values in a copy of the configuration, without Hydra, which would take a tenth of a second longer.

    Returns:
        The copy; None if an override is invalid or does more than set a plain value. Hydra must compose it then.
    """
    config = copy.deepcopy(base)
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key, value = override.key_or_group, override.value()
            plain = (
                override.type == OverrideType.CHANGE and override.package is None and not override.is_sweep_override()
            )
            if (
                not plain
                or key.split(".")[0] in _COMPOSED_GROUPS
                or not isinstance(value, str | int | float | bool | None)
            ):
                return None
            if OmegaConf.is_config(OmegaConf.select(config, key)):
                return None
            OmegaConf.update(config, key, value)
    except Exception as error:  # the composition by Hydra will raise a proper error
        _log.debug("%s: not changed directly (%r); Hydra composes them", list(overrides), error)
        return None
    return config


def _file_values(config: DictConfig) -> dict[str, Any]:
    """Return the file's values. References in them are resolved, unless one of them needs an override."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(config)
    return dict(values)


def _values(config: DictConfig, path: Path) -> dict[str, Any]:
    """Return a member's configuration as resolved plain values; raise a ConfigurationError if a value is missing."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        values: Any = {} if missing else OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigurationError(f"{where}{explain_other(error)}; correct it in {path}") from error
    if missing:
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=..., or a value in {path}")
    return dict(values)
