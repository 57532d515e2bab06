"""Planning of members that are commands of other trainers: composed by Hydra, identified by `sweeps.command`."""

from __future__ import annotations

import copy
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

BASE = "command"
# Whose files are chosen, and whose values may stand in others.
_GROUPS = ("cluster", "member", "hydra")
_BEGIN = "defaults: [{member: command}, _self_]"


def command_conf_dir() -> Path:
    """Return the folder of configurations whose members are commands: the base, and an example a trainer."""
    return conf_dir() / BASE


def named_study(overrides: Sequence[str], file: Path) -> list[str]:
    """Return the overrides with the study's name, which is that of its file where neither says another."""
    named = "study" in _read(file) or any(word.startswith("study=") for word in overrides)
    return [*overrides] if named else [*overrides, f"study={file.stem}"]


def study_file(name: str | None, folders: Folders) -> Path | None:
    """Find the file of a study whose members are commands.

    Args:
        name: as given by `--config-name`.
        folders: of the user's.

    Returns:
        Its path; None for a name that is none of such a file: it chooses no `member`.

    Raises:
        ConfigurationError: the file says a command, and does not choose what goes with one, or its defaults are none.
    """
    if name is None:
        return None
    for folder in (*folders, command_conf_dir()):
        path = Path(folder) / f"{name.removesuffix('.yaml')}.yaml"
        if not path.is_file():
            continue
        content = _read(path)
        defaults = content.get("defaults") if isinstance(content, Mapping) else None
        chosen = defaults if isinstance(defaults, list) else []
        if any(isinstance(each, Mapping) and "member" in each for each in chosen):
            for each in chosen:
                _check_default(path, each)
            hydra = content.get("hydra")
            for name in ("launcher", "sweeper") if isinstance(hydra, Mapping) else ():
                if not isinstance(hydra.get(name, {}), Mapping):
                    raise ConfigurationError(f"{path}: hydra.{name}: {hydra[name]!r} must be a group of settings")
            return path.resolve()
        if isinstance(content, Mapping) and "command" in content:
            raise ConfigurationError(f"{path}: has a command and no member; begin it with {_BEGIN}")
        if isinstance(content, Mapping) and not isinstance(content.get("defaults", []), list):
            raise ConfigurationError(
                f"{path}: defaults: {defaults!r} must be a list; begin the file with {_BEGIN} for a study of a "
                "command, else with defaults: [train, _self_]"
            )
        for each in chosen:
            _check_default(path, each, "for a study of a command, begin it")
    return None


def _read(path: Path) -> Any:
    """Return the content of a file as Hydra will read it, its interpolations as they are written.

    Raises:
        ConfigurationError: it is no text in UTF-8, or no YAML; one line, which names the file.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigurationError(f"{path}: {place}not YAML ({error.problem}); correct it there") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: nested too deep to be read; give plainer values") from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ConfigurationError(f"{path}: holds no settings; begin it with {_BEGIN}") from error
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigurationError(f"{path}: not YAML ({' '.join(str(error).split())}); correct it") from error


def _check_default(path: Path, item: Any, begin: str = "begin it") -> None:
    """Check an item of a file's `defaults`: Hydra fails on some of them with an error of its own program.

    Raises:
        ConfigurationError: it is neither a name nor a group with its choice, or another member than `command`.
    """
    choices = list(item.values()) if isinstance(item, Mapping) else [item]
    names = choices[0] if isinstance(item, Mapping) and isinstance(choices[0], list) else choices
    if len(choices) != 1 or not all(isinstance(name, str) or (name is None and item is not None) for name in names):
        raise ConfigurationError(
            f"{path}: defaults: {item!r} must be a name, or one group and its choice; {begin} with {_BEGIN}"
        )
    if isinstance(item, Mapping) and item.get("member", BASE) != BASE:
        raise ConfigurationError(f"{path}: defaults: member: {item['member']!r} must be {BASE}; begin it with {_BEGIN}")


def plan_commands(override_lists: Sequence[Sequence[str]], folders: Folders = ()) -> list[RunSpec]:
    """Compose, check and identify members that are commands; nothing is started before all of it holds.

    Args:
        override_lists: one a member, as on the command line.
        folders: of the user's, and behind them the study's file.

    Raises:
        ConfigurationError: the first problem found, in one line.
    """
    # Here: it needs NumPy, which the command line does not before it is known to be one of these.
    from sweeps.command.plan import Composed, make_specs

    *own, file = folders
    path = Path(file)
    use_folders(own)
    try:
        base = _composed(named_study([], path), path, own)
        plain = _plain(base)
        members = []
        for overrides in override_lists:
            config = _changed(base, overrides)
            values = _values(_composed(overrides, path, own) if config is None else config, path)
            members.append(Composed(values, plain, tuple(overrides)))
        return make_specs(members, path.stem, path.parent, tuple(map(str, folders)))
    except UserError as error:
        raise ConfigurationError(str(error)) from error


def run_command(run_dir: Path, progress: bool = False) -> None:
    """Run a member that is a command, from its folder; see `sweeps.command.runner`."""
    from sweeps.command.runner import run_member

    run_member(run_dir, progress)


@contextmanager
def shared_groups() -> Iterator[None]:
    """Context manager: Hydra finds the groups that all studies have, and the base of these, and no other of ours.

    A key of the user's may then be called as a group of ours is: `loss`, `model`, `task`.
    """
    Plugins.instance()  # at its first use Hydra imports what adds to the store, which must not be lost afterwards
    store = ConfigStore.instance()
    before = store.repo
    store.repo = {key: copy.deepcopy(group) for key, group in before.items() if key != "variant"}
    try:
        for folder, group in _shared():
            for path in sorted(folder.glob("*.yaml")):
                text = path.read_text(encoding="utf-8")
                package = "_global_" if "@package _global_" in text else None
                store.store(path.stem, OmegaConf.create(text), group=group, package=package)
        yield
    finally:
        # Elsewhere they lie in `conf/`, and Hydra takes a configuration that it has twice for a schema of the other.
        store.repo = before


def _shared() -> list[tuple[Path, str]]:
    """Return the folders of the shared groups, each with the group's name."""
    of_all = [(conf_dir() / group, group) for group in ("cluster", "hydra/launcher", "hydra/sweeper")]
    return [*of_all, (command_conf_dir() / "base", "member")]


def _composed(overrides: Sequence[str], path: Path, folders: Folders) -> DictConfig:
    with shared_groups():
        config: DictConfig = compose(overrides, folders, base=(path.parent, path.stem))
    return config


def _changed(base: DictConfig, overrides: Sequence[str]) -> DictConfig | None:
    """Return the configuration with plain values changed, without composing it anew: that takes a tenth of a second.

    None where an override is of another kind, or Hydra has something to say of it.
    """
    config = copy.deepcopy(base)
    try:
        for each in OverridesParser.create().parse_overrides(list(overrides)):
            key, value = each.key_or_group, each.value()
            plain = each.type == OverrideType.CHANGE and each.package is None and not each.is_sweep_override()
            if not plain or key.split(".")[0] in _GROUPS or not isinstance(value, str | int | float | bool | None):
                return None
            if OmegaConf.is_config(OmegaConf.select(config, key)):
                return None
            OmegaConf.update(config, key, value)
    except Exception:  # whatever it was: composed whole, the list fails with the message it deserves
        return None
    return config


def _plain(config: DictConfig) -> dict[str, Any]:
    """Return the values of a file as they stand: resolved, unless they build upon one that it leaves open."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        values = OmegaConf.to_container(config)
    return dict(values)


def _values(config: DictConfig, path: Path) -> dict[str, Any]:
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        values: Any = {} if missing else OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigurationError(f"{where}{explain_other(error)}; correct it in {path}") from error
    if missing:
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=..., or a value in {path}")
    return dict(values)
