"""Composition of configurations in `conf/` by Hydra, and construction of the objects that they describe.

A user's own folders stand beside `conf/`: choices, axes, tasks, recipes, variants and experiments in them are found
like ours, and the Python modules they name are looked for there too.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from lightning_scalerl.checks import ConfigurationError, check_arguments, did_you_mean
from lightning_scalerl.choices import AXES, Choices

if TYPE_CHECKING:
    from lightning_scalerl.recipe import Recipe

# Configuration groups of a run besides its choices; each is built, except `thinking`.
SETTINGS = frozenset(
    {
        "model",
        "task",
        "generator",
        "driver",
        "evaluation",
        "optimizer",
        "schedule",
        "batch",
        "context",
        "thinking",
        "cost_model",
        "reward",
        "health",
        "chat",
        "verify",
    }
)

# Groups that came later.
SINCE = ("driver", "reward", "health", "chat", "verify")

Folders = Sequence[str | Path]

_DEVICE = (
    "a run trains on the GPU that its process sees, else on the CPU: CUDA_VISIBLE_DEVICES=1 picks one, "
    "CUDA_VISIBLE_DEVICES= none; several by torchrun, or by cluster=slurm hydra.launcher.gpus_per_node=N"
)
# Lines of Hydra's and OmegaConf's errors that say nothing to a user.
_NO_NEWS = ("full_key", "object_type", "reference_type", "Set the env")
# Configurations that no choice of the user's stands in.
_OURS = ("train", "scalerl_axes", "hydra/config")
# Settings of Lightning's Trainer that a user looks for here, and where it is decided instead.
ELSEWHERE = dict.fromkeys(("accelerator", "device", "devices", "gpus", "num_gpus"), _DEVICE)
# Keys that were removed: their neutral value, which recorded overrides may have, and what a user is told.
REMOVED = {"race.freed": ("nothing", "ask `scalerl plan` what spared compute is best spent on")}
# Groups of another trainer's studies, which stand beside ours in `scalerl train --help`.
_OTHER_STUDIES = ("command", "member")


def conf_dir() -> Path:
    """Return the configuration folder: inside the package when installed from a wheel, else beside it.

    Raises:
        ConfigurationError: neither exists.
    """
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise ConfigurationError(f"conf: no configuration folder in {here} or beside it; reinstall lightning-scalerl")


def use_folders(folders: Iterable[str | Path]) -> tuple[str, ...]:
    """Register the user's folders: make them absolute, and modules in them importable.

    Raises:
        ConfigurationError: one is not there.
    """
    found = []
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise ConfigurationError(f"config-dir: {str(folder)!r} is no folder; give one that holds your files")
        if str(path) not in sys.path:
            sys.path.append(str(path))
        found.append(str(path))
    return tuple(found)


def compose(overrides: Sequence[str], folders: Folders = (), base: tuple[Path, str] | None = None) -> Any:
    """Compose `conf/train.yaml` with Hydra overrides.

    Args:
        overrides: as on the command line.
        folders: of the user's, beside `conf/`.
        base: folder and name of another configuration than `train`, whose groups are not those of a run of ours.

    Raises:
        ConfigurationError: an unknown key, group or choice; one line that lists what is valid.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    # Inside a Hydra application its own state must survive our composing.
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        if base is None:
            check_choices(overrides, folders)
        place, name = base or (conf_dir(), "train")
        with initialize_config_dir(str(place), version_base="1.3"):
            neutral = [f"{key}={value}" for key, (value, _) in REMOVED.items()]
            kept = [entry for entry in overrides if entry not in neutral]
            return hydra_compose(name, overrides=[*_searchpath(folders), *kept])
    except (HydraException, OmegaConfBaseException) as error:
        said = explain(error, folders, overrides) if base is None else explain_other(error)
        raise ConfigurationError(said) from error
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = outer


class Composer:
    """Composes many override lists: Hydra composes each set of groups once, and values are set on copies of it.

    Hydra takes half a second of CPU to compose `conf/`.

    Args:
        folders: the user's, next to `conf/`.
    """

    def __init__(self, folders: Folders = ()) -> None:
        self.folders = folders
        self._composed: dict[tuple[str, ...], bytes] = {}  # pickled: three times as quick to copy as by deepcopy
        self._resolved: dict[tuple[str, ...], dict[str, Any]] = {}  # members share recipes without departures
        self._parts: dict[str, Any] = {}

    def config(self, overrides: Sequence[str]) -> Any:
        """Return what `compose` returns for these overrides; raises what it raises."""
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return self._values_on_groups(overrides)
        except (HydraException, OmegaConfBaseException, ConfigurationError):
            return compose(overrides, self.folders)  # its error names the whole list

    def resolved(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the configuration in plain values; equal groups of several configurations are one object.

        Raises:
            ConfigurationError: as `compose` does, or a key without a value.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if tuple(overrides) in self._resolved:
            return self._resolved[tuple(overrides)]
        config = self.config(overrides)
        try:
            values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException:
            _check_missing(config)
            raise
        shared = {key: self._parts.setdefault(repr(part), part) for key, part in values.items()}
        return self._resolved.setdefault(tuple(overrides), shared)

    def _values_on_groups(self, overrides: Sequence[str]) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import OverrideType
        from omegaconf import OmegaConf

        groups, values = [], []
        for parsed in OverridesParser.create().parse_overrides(list(overrides)):
            key, changes = parsed.key_or_group, parsed.type == OverrideType.CHANGE and not parsed.is_sweep_override()
            if not key or not changes or parsed.package is not None or key.startswith("hydra"):
                return compose(overrides, self.folders)  # the order of such overrides and of groups matters
            if is_group(key, self.folders) and not isinstance(parsed.value(), Mapping):
                groups.append(parsed.input_line)
            else:
                values.append(parsed)
        row = tuple(groups)
        if row not in self._composed:
            self._composed[row] = pickle.dumps(compose(row, self.folders))
        config = pickle.loads(self._composed[row])
        for parsed in values:
            OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=True)
        return config


@cache
def _composer_of_ours() -> Composer:
    return Composer()


def composer_of(folders: Folders = ()) -> Composer:
    """Return the process's composer of `conf/`; a new one with a user's folders, which may have been edited since."""
    return Composer(folders) if folders else _composer_of_ours()


def is_group(key: str, folders: Folders = ()) -> bool:
    """Return whether a key is a configuration group: a folder in `conf/` or in one of the user's."""
    return bool(key) and any((Path(folder) / key).is_dir() for folder in (conf_dir(), *folders))


def names_in(group: str, folders: Folders = ()) -> list[str]:
    """Return the choices of a configuration group, by name."""
    found = {path.stem for folder in (conf_dir(), *folders) for path in (Path(folder) / group).glob("*.yaml")}
    return sorted(found | plain_variants().keys() if group == "variant" else found)


def help_text(folders: Folders = ()) -> str:
    """Return the help of `scalerl train`, the template of `conf/train.yaml` with the groups filled in.

    Hydra fills it in too, but copies all of its configurations for every group: five seconds of CPU.
    """
    import yaml

    groups = {
        str(path.parent.relative_to(folder))
        for folder in map(Path, (conf_dir(), *folders))
        for path in folder.glob("*/**/*.yaml")
        if path.relative_to(folder).parts[0] != "hydra"
    }
    listed = "".join(f"{group}: {', '.join(names_in(group, folders))}\n" for group in sorted(groups))
    template = yaml.safe_load((conf_dir() / "train.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    return Template(template).substitute(APP_CONFIG_GROUPS=listed)


# Axes without plain variants: advantage and critic change together, an epoch's choice by its number alone.
_NO_PLAIN_VARIANT = ("advantage", "critic", "epochs")


def plain_variants() -> dict[str, tuple[str, str]]:
    """Return axis and file of each variant that takes one file of an axis as it is, by name: `loss_dapo`.

    Such a variant needs no file in `conf/variant/`: `hydra_plugins/scalerl_axes.py` hands it to Hydra.
    """
    files = ((axis, path.stem) for axis in AXES for path in (conf_dir() / axis).glob("*.yaml"))
    return {f"{axis}_{name}": (axis, name) for axis, name in files if axis not in _NO_PLAIN_VARIANT}


def check_choices(overrides: Sequence[str], folders: Folders = ()) -> None:
    """Refuse overrides of groups that name no file, which Hydra answers with an error of its own program.

    Raises:
        ConfigurationError: which group, and its choices.
        HydraException: an override that cannot be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for parsed in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = parsed.key_or_group, None if parsed.is_sweep_override() else parsed.value()
        if not group:
            raise ConfigurationError(f"{parsed.input_line}: no key before the =; write KEY=VALUE")
        # A mapping sets values in a group; `~GROUP` alone has no value.
        if isinstance(value, str | Mapping) or parsed.is_sweep_override() or not is_group(group, folders):
            continue
        if parsed.is_delete() and value is None:
            continue
        if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
            raise ConfigurationError(no_choice(group, parsed.input_line.partition("=")[2], names_in(group, folders)))


def no_choice(group: str, name: str, valid: Sequence[str], where: str = "") -> str:
    """Return the line for a name that is none of a group's choices."""
    return f"{group}={name}{where}: no such choice{did_you_mean(name, valid, f'{group}=')}; valid: {', '.join(valid)}"


def _searchpath(folders: Folders) -> list[str]:
    quoted = ["'" + f"file://{folder}".replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in folders]
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []


def _unknown_key(error: Exception) -> str:
    """Return the key that an override asks for and that does not exist; empty if the error is another."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    return unknown[1] if unknown else ""


def _valid_keys(error: Exception, folders: Folders, overrides: Sequence[str]) -> str:
    """Return the valid keys beside a key that does not exist, at the deepest level that exists, the nearest first."""
    unknown = _unknown_key(error)
    if not unknown:
        return ""
    # Without the one that fails, and those of the same key: a group that was picked has other keys than the default.
    others = [entry for entry in overrides if entry.lstrip("+~").split("=")[0] != unknown]
    node: Any
    try:
        node = compose(others if len(others) < len(overrides) else [], folders)
    except ConfigurationError:  # one mistake at a time
        node = compose([], folders)
    path: list[str] = []
    wrong = ""
    for part in unknown.split("."):
        if not hasattr(node, "keys") or part not in node:
            wrong = part
            break
        path.append(part)
        node = node[part]
    keys = [str(key) for key in node] if hasattr(node, "keys") else []
    if not keys:
        return f"; {'.'.join(path)} is a value, not a group"
    # A recipe, a scale, ... are chosen at the top and leave no key of their own.
    groups = [] if path else [each.name for each in conf_dir().iterdir() if each.is_dir() and each.name != "hydra"]
    return f"{did_you_mean(wrong, [*keys, *groups], '.'.join([*path, '']))}; valid here: {', '.join(keys)}"


def _removed(key: str) -> str:
    return f"{key}: the key was removed; leave it away, and {REMOVED[key][1]}"


def explain_other(error: Exception) -> str:
    """Return Hydra's error on a configuration that is none of a run of ours, in one line."""
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines() if line.strip()]
    kept = [line for line in dict.fromkeys(lines) if not line.startswith(_NO_NEWS)]
    hint = ""
    if "No match in the defaults list" in str(error):
        hint = "; the name of a folder of configurations is no key of your own: call the key otherwise"
    elif (unknown := _unknown_key(error)) in REMOVED:
        return _removed(unknown)
    elif unknown:
        hint = f"; give {unknown} a value in your file, or take it away"
    return "; ".join(kept).replace(":;", ":").replace(".;", ";") + hint


def explain(error: Exception, folders: Folders = (), overrides: Sequence[str] = ()) -> str:
    """Return Hydra's error in one line: what was wrong, and what would be valid beside these overrides."""
    from hydra.errors import MissingConfigException

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    unknown = _unknown_key(error)
    if unknown in REMOVED:
        return _removed(unknown)
    if (hint := ELSEWHERE.get(unknown.rpartition(".")[2])) is not None:
        return f"{unknown}: no setting of a run; {hint}"
    if (group := re.split(r"[./@]", unknown)[0]) in _OTHER_STUDIES:
        return (
            f"{group}: another trainer's command is a file of yours, which begins with member: command; copy one of "
            "conf/command, and give --config-dir FOLDER --config-name NAME (docs/guide/any_trainer.md)"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        asking = re.match(r"In '([^']+)'", lines[0])
        where = f" (in {asking[1]}.yaml)" if asking and asking[1] not in _OURS else ""
        return no_choice(group, name, sorted(error.options), where)
    cause = error.__cause__
    if cause is not None:
        lines += [line.strip() for line in str(cause).splitlines() if line.strip() and line.strip() not in lines]
    kept = [line for line in lines if not line.startswith(_NO_NEWS)]
    return "; ".join(kept).replace(":;", ":").replace(".;", ";") + _valid_keys(error, folders, overrides)


def axes_of(config: Mapping[str, Any]) -> list[str]:
    """Return the axes that a composed configuration sets: the project's, then the user's own by name."""
    rest = sorted(key for key in config if key not in AXES and key not in SETTINGS)
    own = [key for key in rest if isinstance(config[key], Mapping) and "_target_" in config[key]]
    return [*(axis for axis in AXES if axis in config), *own]


def chosen(config: Any, group: str) -> Any:
    """Return a group of a composed configuration.

    Raises:
        ConfigurationError: no file was chosen for it, or one that says nothing of what to build.
    """
    node = config.get(group)
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigurationError(
            f"{group}: nothing chosen; select one of the files in conf/{group}/: {', '.join(names_in(group))}"
        )
    return node


def _check_missing(node: Any) -> None:
    """Refuse a configuration with a key that has no value."""
    from omegaconf import OmegaConf

    if OmegaConf.is_config(node) and (missing := sorted(OmegaConf.missing_keys(node))):
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=...")


def _check_types(field: str, node: Any) -> None:
    """Check a group's settings, and those of what it is made of, against what they are given to."""
    from hydra._internal.utils import _locate

    if isinstance(node, Mapping) and "_target_" in node:
        try:
            target = _locate(str(node["_target_"]))
        except Exception:  # instantiating it says why
            return
        check_arguments(field, target, node)
    if isinstance(node, Mapping):
        for name, value in node.items():
            _check_types(f"{field}.{name}", value)


def build(config: Any, group: str) -> Any:
    """Instantiate one group of a composed configuration.

    Raises:
        ConfigurationError: in one line, whatever the constructor had to say.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    node = chosen(config, group)
    _check_missing(node)
    try:
        _check_types(group, OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node)
        built = instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ConfigurationError):
            raise cause from None
        line = " ".join(str(cause or error).split())
        raise ConfigurationError(f"{group}: {line}") from error
    if group not in SETTINGS and getattr(built, "axis", None) != group:
        raise ConfigurationError(
            f"{group}: {node['_target_']} is no choice on this axis, but {getattr(built, 'axis', 'none at all')!r}; a "
            f"choice derives from the axis's class, whose `axis` is {group!r}"
        )
    return built


def build_recipe(config: Any, name: str, build: Callable[[Any, str], Any] = build) -> Recipe:
    """Instantiate a composed configuration; `build` makes one group of it.

    Raises:
        ConfigurationError: a value that a choice or setting refuses.
    """
    from lightning_scalerl.recipe import Recipe

    return Recipe(
        name=name,
        choices=Choices.of(build(config, axis) for axis in axes_of(config)),
        optimizer=build(config, "optimizer"),
        schedule=build(config, "schedule"),
        batch=build(config, "batch"),
        context=build(config, "context"),
        cost_model=build(config, "cost_model"),
        generator=build(config, "generator"),
        scaled_for=config.get("scaled_for"),
        evaluation={key: value for key, value in config.get("evaluation", {}).items() if not str(key).startswith("_")},
        # A study that was frozen before these were there has the defaults.
        **{group: build(config, group) for group in SINCE if group in config},
    )


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
    return build_recipe(composer_of(folders).config([f"recipe={name}", *overrides]), name)
