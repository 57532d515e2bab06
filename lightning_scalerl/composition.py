"""Composition of configurations in `conf/` by Hydra, and construction of the objects that they describe.

A user's folders extend `conf/`: their choices, axes, tasks, recipes, variants and experiments are found like those of
this project. Python modules that the user's files name are imported from the user's folders too.
"""

from __future__ import annotations

import logging
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from lightning_scalerl.checks import ONE_TRAINER, ConfigurationError, check_arguments, did_you_mean
from lightning_scalerl.choices import AXES, Choices
from lightning_scalerl.compat.hydra import locate
from sweeps.redact import redact_override
from sweeps.run.spec import OPERATIONAL_KEYS

if TYPE_CHECKING:
    from lightning_scalerl.recipe import Recipe

_log = logging.getLogger(__name__)

# Configuration groups of a run that are not design choices. Each is instantiated, except `thinking`.
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
        "compute",
        "environment",
        "branch",
    }
)

# Groups that configurations of studies from earlier versions may lack.
ADDED_GROUPS = ("driver", "reward", "health", "chat", "verify", "compute", "environment")

Folders = Sequence[str | Path]

_DEVICE = (
    "a run trains on the GPU that its process sees, else on the CPU: CUDA_VISIBLE_DEVICES=1 picks one, "
    "CUDA_VISIBLE_DEVICES= none; several by torchrun, or by cluster=slurm hydra.launcher.gpus_per_node=N"
)
# Prefixes of lines in Hydra's and OmegaConf's errors that do not help a user.
_UNHELPFUL_PREFIXES = ("full_key", "object_type", "reference_type", "Set the env")
# Stems of this project's own configuration files. An error message names the file with the mistake only if it is a
# user's file.
_PROJECT_CONFIGS = ("train", "scalerl_axes", "hydra/config")
# Settings of Lightning's Trainer that a user may try here, each with what to do instead.
TRAINER_SETTINGS = dict.fromkeys(("accelerator", "device", "devices", "gpus", "num_gpus"), _DEVICE)
# Keys of `scalerl train` that do not belong to a recipe. A script, which uses only the recipe, would ignore them.
_NOT_OF_A_RECIPE = (OPERATIONAL_KEYS - {"scaled_for"}) | {
    "branch", "cluster", "experiment", "model", "recipe", "task", "trainer",
}  # fmt: skip
# For some of these keys, what to write in a script instead.
_IN_A_SCRIPT = {
    "seed": "RolloutDataModule(task, seed=...)",
    "task": "RolloutDataModule(task)",
    "model": "ScaleRL(model)",
    "recipe": "ScaleRL(model, recipe=...)",
    "budget": "Trainer(max_steps=...)",
    "checkpoint": "ResumableCheckpoint(...) among the Trainer's callbacks",
    "rollouts": "RolloutLog(...) among the Trainer's callbacks",
    "race": "Race(...) among the Trainer's callbacks",
    "strategy": "Trainer(strategy=..., devices=...)",
}
# Fields of TRL's GRPOConfig that a user may try here, with what is set instead; docs/guide/from_trl.md lists all.
FROM_TRL = {
    "beta": "kl=fixed kl.coefficient=",
    "epsilon": "loss.clip_low=",
    "epsilon_high": "loss.clip_high=",
    "gradient_accumulation_steps": "batch.prompts=",
    "learning_rate": "optimizer.lr=",
    "loss_type": "loss= and aggregation=",
    "max_completion_length": "context.max_new_tokens=",
    "max_grad_norm": "optimizer.clip_norm=",
    "max_steps": "budget.steps=",
    "num_generations": "batch.completions=",
    "per_device_train_batch_size": "batch.micro_batch=",
    "reward_funcs": "task=dataset task.rewards=",
    "scale_rewards": "normalization=",
    "steps_per_generation": "async_mode.k=",
    "temperature": "context.temperature=",
}
# Removed keys, each with its neutral value and the advice in the error. The recorded overrides of old studies may still
# set a removed key to its neutral value.
REMOVED_KEYS = {"race.freed": ("nothing", "ask `scalerl plan` what saved compute is best spent on")}
# Groups for studies of other trainers; `scalerl train --help` lists them next to the groups of a run.
_OTHER_STUDIES = ("command", "member")


def conf_dir() -> Path:
    """Return the configuration folder: inside the package if installed from a wheel, else next to it.

    Raises:
        ConfigurationError: neither folder exists.
    """
    here = Path(__file__).resolve().parent
    for candidate in (here / "conf", here.parent / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise ConfigurationError(f"conf: no configuration folder in {here} or beside it; reinstall lightning-scalerl")


def use_folders(folders: Iterable[str | Path]) -> tuple[str, ...]:
    """Register the user's folders: make their paths absolute, and modules in them importable.

    Raises:
        ConfigurationError: a folder does not exist.
    """
    paths = []
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            raise ConfigurationError(f"config-dir: {str(folder)!r} is no folder; give one that holds your files")
        if str(path) not in sys.path:
            sys.path.append(str(path))
        paths.append(str(path))
    return tuple(paths)


def compose(overrides: Sequence[str], folders: Folders = (), base: tuple[Path, str] | None = None) -> Any:
    """Compose `conf/train.yaml` with Hydra overrides.

    Args:
        overrides: Hydra overrides, as on the command line.
        folders: the user's folders, in addition to `conf/`.
        base: folder and name of a configuration to compose instead of `train`; it may have other groups.

    Raises:
        ConfigurationError: an unknown key, group or choice; one line that lists the valid ones.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    # Inside a Hydra application, save the application's state and restore it afterwards.
    outer_hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        if base is None:
            check_choices(overrides, folders)
        folder, name = base or (conf_dir(), "train")
        with initialize_config_dir(str(folder), version_base="1.3"):
            without_effect = [f"{key}={value}" for key, (value, _) in REMOVED_KEYS.items()]
            valid = [entry for entry in overrides if entry not in without_effect]
            return hydra_compose(name, overrides=[*_searchpath(folders), *valid])
    except (HydraException, OmegaConfBaseException) as error:
        message = explain(error, folders, overrides) if base is None else explain_other(error)
        raise ConfigurationError(message) from error
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra = outer_hydra


class Composer:
    """Composes many override lists. Hydra composes each set of group choices once; plain values are set on copies.

    One composition of `conf/` by Hydra takes half a second of CPU.

    Args:
        folders: the user's folders, in addition to `conf/`.
    """

    def __init__(self, folders: Folders = ()) -> None:
        self.folders = folders
        self._composed: dict[tuple[str, ...], bytes] = {}  # pickled, as unpickling is three times as fast as deepcopy
        self._resolved: dict[tuple[str, ...], dict[str, Any]] = {}  # members without overrides share a configuration
        self._shared_groups: dict[str, Any] = {}

    def config(self, overrides: Sequence[str]) -> Any:
        """Return what `compose` returns for these overrides, and raise the same errors."""
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        try:
            return self._values_on_groups(overrides)
        except (HydraException, OmegaConfBaseException, ConfigurationError):
            return compose(overrides, self.folders)  # compose the whole list again, for the full error message

    def resolved(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the configuration as plain values. Groups that are equal in several configurations share one object.

        Raises:
            ConfigurationError: as for `compose`, or a key has no value.
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
        shared = {key: self._shared_groups.setdefault(repr(part), part) for key, part in values.items()}
        return self._resolved.setdefault(tuple(overrides), shared)

    def _values_on_groups(self, overrides: Sequence[str]) -> Any:
        """Let Hydra compose the group choices among the overrides (or take them from the cache), and set the values."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.override_parser.types import OverrideType
        from omegaconf import OmegaConf

        groups, values = [], []
        for parsed in OverridesParser.create().parse_overrides(list(overrides)):
            key, changes = parsed.key_or_group, parsed.type == OverrideType.CHANGE and not parsed.is_sweep_override()
            if not key or not changes or parsed.package is not None or key.startswith("hydra"):
                return compose(overrides, self.folders)  # not split, because the order of these overrides matters
            if is_group(key, self.folders) and not isinstance(parsed.value(), Mapping):
                groups.append(parsed.input_line)
            else:
                values.append(parsed)
        group_key = tuple(groups)
        if group_key not in self._composed:
            self._composed[group_key] = pickle.dumps(compose(group_key, self.folders))
        config = pickle.loads(self._composed[group_key])
        for parsed in values:
            OmegaConf.update(config, parsed.key_or_group, parsed.value(), merge=True)
        return config


@cache
def _composer_of_ours() -> Composer:
    return Composer()


def composer_of(folders: Folders = ()) -> Composer:
    """Return the process-wide composer of `conf/`; with user folders a new one, as their files may have changed."""
    return Composer(folders) if folders else _composer_of_ours()


def is_group(key: str, folders: Folders = ()) -> bool:
    """Return whether a key is a configuration group: a subfolder of `conf/` or of a user folder."""
    return bool(key) and any((Path(folder) / key).is_dir() for folder in (conf_dir(), *folders))


def names_in(group: str, folders: Folders = ()) -> list[str]:
    """Return the names of the choices in a configuration group."""
    names = {path.stem for folder in (conf_dir(), *folders) for path in (Path(folder) / group).glob("*.yaml")}
    return sorted(names | plain_variants().keys() if group == "variant" else names)


def file_contents(group: str, folders: Folders) -> list[Any]:
    """Return the contents of a configuration group's files in the user's folders; broken files are skipped."""
    import yaml

    contents = []
    for path in sorted(path for folder in folders for path in (Path(folder) / group).glob("**/*.yaml")):
        try:
            contents.append(yaml.safe_load(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, yaml.YAMLError):  # reported by Hydra if the file is chosen
            continue
    return contents


def help_text(folders: Folders = ()) -> str:
    """Return the help of `scalerl train`: the template of `conf/train.yaml` with the groups filled in.

    Hydra's own help copies all configurations for every group, which takes five seconds of CPU.
    """
    import yaml

    groups = {
        str(path.parent.relative_to(folder))
        for folder in map(Path, (conf_dir(), *folders))
        for path in folder.glob("*/**/*.yaml")
        if path.relative_to(folder).parts[0] != "hydra"
    }
    group_lines = "".join(f"{group}: {', '.join(names_in(group, folders))}\n" for group in sorted(groups))
    template = yaml.safe_load((conf_dir() / "train.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    return Template(template).substitute(APP_CONFIG_GROUPS=group_lines)


# Axes without plain variants (`plain_variants`): advantage and critic change together, and `epochs` is only a number.
_NO_PLAIN_VARIANT = ("advantage", "critic", "epochs")
# Groups that are not axes but have plain variants, too.
_GROUPS_WITH_VARIANTS = ("optimizer",)
# Files with a value that the user must set (kl.reference). A plain variant is only a name, so it cannot set a value.
_FILES_WITHOUT_VARIANT = frozenset({"kl_distil"})


def plain_variants() -> dict[str, tuple[str, str]]:
    """Return the plain variants, by name: `loss_dapo` maps to ("loss", "dapo"), an axis and the stem of its file.

    A plain variant only chooses another file on one axis. It needs no file in `conf/variant/`, because
    `hydra_plugins/scalerl_axes.py` generates it for Hydra.
    """
    files = (
        (axis, path.stem) for axis in (*AXES, *_GROUPS_WITH_VARIANTS) for path in (conf_dir() / axis).glob("*.yaml")
    )
    variants = {f"{axis}_{name}": (axis, name) for axis, name in files if axis not in _NO_PLAIN_VARIANT}
    return {variant: choice for variant, choice in variants.items() if variant not in _FILES_WITHOUT_VARIANT}


def check_choices(overrides: Sequence[str], folders: Folders = ()) -> None:
    """Refuse overrides that choose a file that does not exist, before Hydra prints its own error.

    Raises:
        ConfigurationError: the choice does not exist; the message names the group and its choices.
        HydraException: an override cannot be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    chosen: dict[str, str] = {}
    for parsed in OverridesParser.create().parse_overrides(list(overrides)):
        group, value = parsed.key_or_group, None if parsed.is_sweep_override() else parsed.value()
        if not group:
            raise ConfigurationError(f"{parsed.input_line}: no key before the =; write KEY=VALUE")
        if isinstance(value, str):
            chosen[group] = value
        # Only plain names choose a file: a mapping sets values in a group, and `~GROUP` has no value.
        if isinstance(value, str | Mapping) or parsed.is_sweep_override() or not is_group(group, folders):
            continue
        if parsed.is_delete() and value is None:
            continue
        if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
            name = parsed.input_line.partition("=")[2]
            raise ConfigurationError(no_choice_message(group, name, names_in(group, folders), folders=folders))
    _check_inherited(chosen, folders)


def _check_inherited(chosen: Mapping[str, str], folders: Folders) -> None:
    """Refuse to override a choice if its file also sets values for it, because the new choice would get these values.

    Args:
        chosen: names of the chosen files, by group.
        folders: the user's folders.

    Raises:
        ConfigurationError: the recipe or experiment chooses a file of the axis and changes values of it, and the
            overrides choose another file of this axis.
    """
    variant = chosen.get("variant", "")
    by_variant = dict([plain_variants()[variant]]) if variant in plain_variants() else {}
    by_variant |= _defaults_and_body("variant", variant, folders)[0]
    for group in ("recipe", "experiment"):
        defaults, body = _defaults_and_body(group, chosen.get(group, ""), folders)
        for axis, choice in defaults.items():
            other = chosen.get(axis, by_variant.get(axis, choice))
            if other != choice and isinstance(body.get(axis), Mapping):
                names = ", ".join(f"{axis}.{name}" for name in body[axis])
                raise ConfigurationError(
                    f"{group}={chosen[group]}: its file sets {names} for {axis}={choice}, and {axis}={other} would get "
                    f"the same; move these values into a file {axis}/NAME.yaml of your folder, and choose {axis}: NAME"
                )


def _defaults_and_body(group: str, name: str, folders: Folders) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the choices in a file's defaults list, by axis, and the file's content; both are empty without a file."""
    import yaml

    # The first folder of Hydra's search path wins.
    paths = [path for folder in (conf_dir(), *folders) if (path := Path(folder) / group / f"{name}.yaml").is_file()]
    try:
        content = yaml.safe_load(paths[0].read_text(encoding="utf-8")) if paths else None
    except (OSError, ValueError, yaml.YAMLError):
        content = None  # Hydra reports the broken file
    if not isinstance(content, dict):
        return {}, {}
    entries = [entry for entry in content.get("defaults") or () if isinstance(entry, Mapping)]
    choices = {str(key).rpartition("/")[2]: value for entry in entries for key, value in entry.items()}
    return {axis: name for axis, name in choices.items() if axis in AXES and isinstance(name, str)}, content


def no_choice_message(group: str, name: str, valid: Sequence[str], location: str = "", folders: Folders = ()) -> str:
    """Return the error message for a name that is not a choice of a group, with a suggestion.

    Args:
        group, name: the override GROUP=NAME.
        valid: names of the group's choices.
        location: text after the override that names the file with the mistake; "" for the command line.
        folders: the user's folders, in which the suggestion is looked up as well.
    """
    suggestion = did_you_mean(name, valid, f"{group}=")
    hint = "" if folders else "; a choice of your own needs --config-dir FOLDER"
    for axis in AXES if group == "variant" else ():
        choice = name.removeprefix(f"{axis}_")
        if choice != name and any((Path(folder) / axis / f"{choice}.yaml").is_file() for folder in folders):
            suggestion = f"; use {axis}={choice}, or write variant/{name}.yaml"
    return f"{group}={name}{location}: no such choice{suggestion}; valid: {', '.join(valid)}{hint}"


def _searchpath(folders: Folders) -> list[str]:
    """Return the override of Hydra's search path that adds the user's folders, as a list; empty without folders."""
    quoted = ["'" + f"file://{folder}".replace("\\", "\\\\").replace("'", "\\'") + "'" for folder in folders]
    return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []


def _unknown_key(error: Exception) -> str:
    """Return the unknown key that Hydra's error is about; "" for any other error."""
    unknown = re.search(r"Could not override '([^']+)'", str(error))
    return unknown[1] if unknown else ""


def _valid_keys(error: Exception, folders: Folders, overrides: Sequence[str]) -> str:
    """Return the end of an error about an unknown key: a suggestion, and the valid keys at its last existing level."""
    unknown = _unknown_key(error)
    if not unknown:
        return ""
    # Apply the overrides of other keys, because a chosen file may have other keys than the group's default file.
    others = [entry for entry in overrides if entry.lstrip("+~").split("=")[0] != unknown]
    node: Any
    try:
        node = compose(others if len(others) < len(overrides) else [], folders)
    except ConfigurationError:  # the other overrides are wrong too: use the default keys
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
    # Groups such as recipe and scale are chosen at the top level, but leave no key in the configuration.
    groups = [] if path else [each.name for each in conf_dir().iterdir() if each.is_dir() and each.name != "hydra"]
    return f"{did_you_mean(wrong, [*keys, *groups], '.'.join([*path, '']))}; valid here: {', '.join(keys)}"


def _choices_with(unknown: str, folders: Folders) -> list[str]:
    """Return the choices of a group that have a key, such as `kl.coefficient`; empty if no choice has it."""
    import yaml

    group, _, key = unknown.rpartition(".")
    if not group or not is_group(group, folders):
        return []
    group_dirs = [Path(folder) / group for folder in (conf_dir(), *folders)]
    files = sorted(file for group_dir in group_dirs for file in group_dir.glob("*.yaml"))
    return [file.stem for file in files if key in (yaml.safe_load(file.read_text(encoding="utf-8")) or {})]


def _removed_key_message(key: str) -> str:
    return f"{key}: the key was removed; leave it out, and {REMOVED_KEYS[key][1]}"


def _unreadable_override(error: Exception) -> str | None:
    """Return Hydra's error in one line if it cannot parse an override of the command line; None for other errors.

    Hydra's parser ("LexerNoViableAltException") shows a wrong character by a caret under the override.
    """
    from hydra.errors import OverrideParseException

    if not isinstance(error, OverrideParseException):
        return None
    problem, *rest = str(error.message).splitlines()
    word, key = redact_override(error.override), error.override.partition("=")[0]
    if not problem.startswith("LexerNoViableAlt") or not rest or "^" not in rest[0]:
        return f"{word}: {problem}; put a value with special characters into quotes: \"{key}='...'\""
    at = rest[0].index("^")
    character = problem[at : at + 1]
    if at - (len(problem) - len(error.override)) < len(key):
        return f"{word}: a key cannot have the character {character!r}; correct it"
    if character in ("'", '"'):
        return f"{word}: the quote {character} is not closed; close it"
    return f"{word}: a value with the character {character!r} needs quotes: \"{key}='...'\""


def explain_other(error: Exception) -> str:
    """Return Hydra's error in one line, for the configuration of another trainer's command (`conf/command`)."""
    if (message := _unreadable_override(error)) is not None:
        return message
    lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines() if line.strip()]
    kept = [line for line in dict.fromkeys(lines) if not line.startswith(_UNHELPFUL_PREFIXES)]
    hint = ""
    if "No match in the defaults list" in str(error):
        hint = "; the name of a folder of configurations is no key of your own: call the key otherwise"
    elif (unknown := _unknown_key(error)) in REMOVED_KEYS:
        return _removed_key_message(unknown)
    elif unknown:
        hint = f"; give {unknown} a value in your file, or take it away"
    return "; ".join(kept).replace(":;", ":").replace(".;", ";") + hint


def explain(error: Exception, folders: Folders = (), overrides: Sequence[str] = ()) -> str:
    """Return Hydra's error in one line: the mistake, and the valid values given these overrides."""
    from hydra.errors import MissingConfigException

    if (message := _unreadable_override(error)) is not None:
        return message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    unknown = _unknown_key(error)
    if unknown in REMOVED_KEYS:
        return _removed_key_message(unknown)
    if (hint := TRAINER_SETTINGS.get(unknown.rpartition(".")[2])) is not None:
        return f"{unknown}: no setting of a run; {hint}"
    if unknown in FROM_TRL:
        return f"{unknown}: TRL's name; here {FROM_TRL[unknown]} (docs/guide/from_trl.md)"
    if (group := re.split(r"[./@]", unknown)[0]) in _OTHER_STUDIES:
        return (
            f"{group}: another trainer's command is a file of yours, which begins with member: command; copy one of "
            "conf/command, and give --config-dir FOLDER --config-name NAME (docs/guide/any_trainer.md)"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        source = re.match(r"In '([^']+)'", lines[0])
        location = f" (in {source[1]}.yaml)" if source and source[1] not in _PROJECT_CONFIGS else ""
        return no_choice_message(group, name, sorted(error.options), location, folders)
    if choices_with_key := _choices_with(unknown, folders):
        group = unknown.rpartition(".")[0]
        return f"{unknown}: the chosen {group} has no such setting; choices that have it: {', '.join(choices_with_key)}"
    cause = error.__cause__
    if cause is not None:
        lines += [line.strip() for line in str(cause).splitlines() if line.strip() and line.strip() not in lines]
    if any(line.startswith("Cannot merge ") for line in lines):
        lines.append(
            "a chosen file, such as that of scale=, has a list where you give a mapping, or the reverse; choose another"
        )
    kept = [line for line in lines if not line.startswith(_UNHELPFUL_PREFIXES)]
    return "; ".join(kept).replace(":;", ":").replace(".;", ";") + _valid_keys(error, folders, overrides)


def axes_of(config: Mapping[str, Any]) -> list[str]:
    """Return the axes that a composed configuration sets: the project's, then the user's in order of name."""
    other_keys = sorted(key for key in config if key not in AXES and key not in SETTINGS)
    user_axes = [key for key in other_keys if isinstance(config[key], Mapping) and "_target_" in config[key]]
    return [*(axis for axis in AXES if axis in config), *user_axes]


def group_of(override: str) -> str:
    """Return the configuration group of an override, the first word of its key."""
    return override.lstrip("+~").split("=")[0].split(".")[0].split("@")[0]


def choice_overrides(overrides: Sequence[str], axes: Sequence[str]) -> list[str]:
    """Return the overrides that may change a recipe's choices: overrides of an axis, and variants."""
    return [entry for entry in overrides if group_of(entry) in (*axes, "variant")]


def chosen_node(config: Any, group: str) -> Any:
    """Return the node of a group in a composed configuration: `_target_` and its arguments.

    Raises:
        ConfigurationError: no file was chosen for the group, or the file has no `_target_`.
    """
    node = config.get(group)
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigurationError(
            f"{group}: nothing chosen; select one of the files in conf/{group}/: {', '.join(names_in(group))}"
        )
    return node


def _check_missing(node: Any) -> None:
    from omegaconf import OmegaConf

    if OmegaConf.is_config(node) and (missing := sorted(OmegaConf.missing_keys(node))):
        raise ConfigurationError(f"{missing[0]}: needs a value; give {missing[0]}=...")


def _check_types(field: str, node: Any) -> None:
    """Check the types of a group's settings, also in nested objects, against the constructors' annotations."""
    if isinstance(node, Mapping) and "_target_" in node:
        try:
            target = locate(str(node["_target_"]))
        except Exception as error:  # the reason is reported later, when the target is instantiated
            _log.debug("%s: types not checked, because %s cannot be imported (%r)", field, node["_target_"], error)
            return
        check_arguments(field, target, node)
    if isinstance(node, Mapping):
        for name, value in node.items():
            _check_types(f"{field}.{name}", value)


def build(config: Any, group: str) -> Any:
    """Instantiate one group of a composed configuration.

    Raises:
        ConfigurationError: the constructor failed; the message is its error in one line.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    node = chosen_node(config, group)
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
    """Instantiate a composed configuration; `build` instantiates one group.

    Raises:
        ConfigurationError: a choice or setting refuses a value.
    """
    from lightning_scalerl.recipe import Recipe

    return Recipe(
        name=name,
        choices=_choices_of(config, build),
        optimizer=build(config, "optimizer"),
        schedule=build(config, "schedule"),
        batch=build(config, "batch"),
        context=build(config, "context"),
        cost_model=build(config, "cost_model"),
        generator=build(config, "generator"),
        scaled_for=config.get("scaled_for"),
        evaluation={key: value for key, value in config.get("evaluation", {}).items() if not str(key).startswith("_")},
        # A study that was recorded before these groups existed uses the defaults.
        **{group: build(config, group) for group in ADDED_GROUPS if group in config},
    )


def check_keys(config: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse overrides that would have no effect, or would change a recipe without a trace in its label.

    Raises:
        ConfigurationError: a top-level key of the configuration is neither a setting nor an axis; an axis is removed.
    """
    settings, axes = {*SETTINGS, *OPERATIONAL_KEYS}, axes_of(config)
    for entry in overrides:
        name = entry.lstrip("~").split("=")[0]
        if entry.startswith("~") and "." not in name and name not in settings:
            raise ConfigurationError(f"{entry}: an axis cannot be taken away; pick another of its choices instead")
    for key in config:
        if key == "trainer":
            trainer_settings = [entry for entry in overrides if entry.lstrip("+").startswith("trainer.")]
            if not trainer_settings:
                raise ConfigurationError(ONE_TRAINER)
            raise ConfigurationError(
                f"{trainer_settings[0]}: needs trainer=trl; Lightning's Trainer is set up by strategy.*, such as "
                "strategy.devices=2"
            )
        if key not in settings and key not in axes:
            raise ConfigurationError(
                f"{key}: neither a setting nor an axis; an axis of your own is a mapping with _target_ "
                "(docs/guide/extend.md)"
            )


def _check_recipe_overrides(overrides: Sequence[str], folders: Folders) -> None:
    """Refuse overrides that do not belong to a recipe, because a script would silently ignore them."""
    for entry in overrides:
        key = group_of(entry)
        if key in _NOT_OF_A_RECIPE:
            recipes = f" ({', '.join(names_in('recipe', folders))})" if key == "recipe" else ""
            raise ConfigurationError(
                f"{entry}: not a part of the recipe but a setting of `scalerl train`; in a script: "
                f"{_IN_A_SCRIPT.get(key, 'leave it out')}{recipes}"
            )


def _choices_of(config: Any, build: Callable[[Any, str], Any] = build) -> Choices:
    return Choices.of(build(config, axis) for axis in axes_of(config))


def _build_for(config: Any, group: str, steps: int) -> Any:
    from omegaconf import OmegaConf

    return build(OmegaConf.merge(config, {"budget": {"steps": steps}}), group)


def load_recipe(name: str, overrides: Sequence[str] = (), folders: Folders = ()) -> Recipe:
    """Build the recipe `recipe/<name>.yaml` of `conf/` or a user folder.

    If overrides change an axis, the attribute `named` of the returned recipe holds the choices without these overrides.

    Args:
        name: name of the recipe's file.
        overrides: Hydra overrides such as `optimizer.lr=1e-3`.
        folders: the user's folders, in addition to `conf/`.

    Raises:
        ConfigurationError: a recipe, key or value is unknown, or an override does not belong to a recipe.
    """
    folders = use_folders(folders)
    _check_recipe_overrides(overrides, folders)
    composer, recipe_override = composer_of(folders), f"recipe={name}"
    config = composer.config([recipe_override, *overrides])
    check_keys(config, overrides)
    of_length: list[tuple[Any, Callable[[int], Any]]] = []

    def build_group(group_config: Any, group: str) -> Any:
        """Build a group, and add it to `of_length` if it depends on the budget."""
        built = build(group_config, group)
        if "budget.steps" in str(group_config[group]):  # interpolations are not resolved in this text
            of_length.append((built, partial(_build_for, group_config, group)))
        return built

    recipe = replace(build_recipe(config, name, build_group), of_length=of_length)
    departures = choice_overrides(overrides, axes_of(config))
    if not departures:
        return recipe
    other_overrides = [entry for entry in overrides if entry not in departures]

    def build_if_changed(other_config: Any, axis: str) -> Any:
        """Build a choice only if it differs from the recipe's, because building all 20 choices takes 30 ms."""
        return recipe.choices.on(axis) if other_config[axis] == config.get(axis) else build_group(other_config, axis)

    try:
        named = _choices_of(composer.config([recipe_override, *other_overrides]), build_if_changed)
    except ConfigurationError:
        return recipe  # the recipe is incomplete without these overrides, so there is nothing to compare with
    return replace(recipe, named=named)
