"""Identity of a run: everything in its configuration that affects learning, in a form that outlives code versions.

An identity is a hash of this form (`sweeps.run.spec`). Moving a class, or adding an axis or a parameter, must not
change existing identities. Therefore:

- a class or function is represented by its name, without its module;
- a group at its neutral choice, which changes nothing, is left out (attribute `neutral` of an axis's class);
- a parameter that was added later is left out at the value that changes nothing (attribute `added`);
- parameters without effect on learning, such as the origin of a value, are left out (attribute
  `operational_parameters`);
- data is represented by its content, not its path: the method `content` of its class computes it from the parameters.
  The same holds for a model whose path is a parameter (attribute `models`).

The attributes belong to the class that `_target_` names. tests/member/identities.json pins the resulting identities.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_scalerl.checks import ADDRESSES, ConfigurationError, check_public_name
from lightning_scalerl.compat.hydra import locate
from lightning_scalerl.composition import axes_of, file_contents
from lightning_scalerl.model.place import content as model_content
from sweeps.run.spec import SPEC_FILE, RunSpec, changed_keys, identities, learning_config

# Hydra's keys for how an object is built; they are not parameters of the object.
_HYDRA_KEYS = frozenset({"_target_", "_partial_", "_convert_", "_recursive_"})


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity form of a resolved configuration, without seed and operational settings.

    Raises:
        ConfigurationError: a class or file that a group names cannot be found or read, or a class has the name of a
            public class of this package.
    """
    parts = {key: group_identity(key, value) for key, value in learning_config(config).items()}
    return {key: part for key, part in parts.items() if part is not None}


def group_identity(group: str, value: Any) -> Any:
    """Return the identity form of one group of a configuration; None at its neutral choice, which changes nothing.

    Raises:
        ConfigurationError: see `identity_of`.
    """
    try:
        return _identity_form(value)
    except ConfigurationError:
        raise
    except Exception as error:  # from Hydra's look-up, an import, or a user's `content`
        message = " ".join(str(error.__cause__ or error).split())
        raise ConfigurationError(f"{group}: {type(error).__name__}: {message}") from error


def check_class_names(configs: Sequence[Mapping[str, Any]], folders: Sequence[str]) -> None:
    """Check that no two classes of a group have the same name: identities would not tell their runs apart.

    Args:
        configs: resolved configurations whose classes can be imported.
        folders: the user's folders; other choices in their files are compared with the classes of `configs`, because
            another launch may use them.

    Raises:
        ConfigurationError: two classes have the same name.
    """
    for group in sorted({key for config in configs for key in learning_config(config)}):
        used = {target for config in configs for target in _targets(config.get(group))}
        users = sorted(target for target in used if not target.startswith("lightning_scalerl."))
        first = {_class_name(target): target for target in reversed(users)}
        others = [target for part in file_contents(group, folders) for target in _targets(part)] if users else []
        for target in (*users, *others):
            other = first.get(_class_name(target), target)
            if other != target and _is_another_class(target, other):
                raise ConfigurationError(
                    f"{group}: {other} and {target} have the same name, and names tell runs apart; rename one"
                )


def check_identity(spec: RunSpec, run_dir: Path) -> None:
    """Check that a specification has the identity that it names.

    Args:
        spec: the specification; the user's folders that it names must be in use (`use_folders`).
        run_dir: directory from which it was read.

    Raises:
        ConfigurationError: the content has another identity, or the identity cannot be computed.
    """
    ids = identities(identity_of(spec.config), spec.seed)
    if ids != (spec.run, spec.curve) or spec.config.get("seed") != spec.seed:
        raise ConfigurationError(
            f"{run_dir / SPEC_FILE}: names run {spec.run} of curve {spec.curve}, and its content is run {ids[0]} of "
            f"curve {ids[1]}: it was changed, or a file was that it names (data, code); restore what was changed, or "
            "launch this as a run of its own"
        )
    # A run is built from the choices in `reference`, the unchanged recipe, except on the axes of `departures`, in which
    # the member differs. On all other axes config and reference must agree.
    own_choices, recipe_choices = (
        {axis: config[axis] for axis in axes_of(config)} for config in (spec.config, spec.reference)
    )
    if changed := set(changed_keys(identity_of(own_choices), identity_of(recipe_choices))) - spec.departures.keys():
        raise ConfigurationError(
            f"{run_dir / SPEC_FILE}: config and reference differ in {', '.join(sorted(changed))}, which departures "
            "does not name; restore what was changed, or launch this as a run of its own"
        )


def _targets(value: Any) -> Iterator[str]:
    """Yield the dotted name of every class in a configuration."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _targets(item)
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield str(value["_target_"])
        yield from _targets(list(value.values()))


def _class_name(target: str) -> str:
    return target.rpartition(".")[2]


def _is_another_class(target: str, other: str) -> bool:
    """Return whether `target` can be imported and is another object than `other`."""
    try:
        return locate(target) is not locate(other)
    except Exception:  # the code of a file that was not chosen may be broken
        return False


def _identity_form(value: Any) -> Any:
    """Return the identity form of one value; None for a group at its neutral choice (see `group_identity`)."""
    if isinstance(value, list | tuple):
        return [_identity_form(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {str(key): _identity_form(item) for key, item in value.items()}
    name = _class_name(str(value["_target_"]))
    target = locate(str(value["_target_"]))
    check_public_name(str(value["_target_"]), target)
    parameters = _parameters(value) | content_of(value)
    added = getattr(target, "added", {})
    for parameter in (*added, *getattr(target, "operational_parameters", ())):
        if parameter not in added or parameters.get(parameter) == added[parameter]:
            parameters.pop(parameter, None)
    choice = {"choice": name, **{key: _identity_form(item) for key, item in parameters.items()}}
    return None if choice == getattr(target, "neutral", None) else choice


def content_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that represent the target's data and models in an identity, by name; empty if it has none.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    target, parameters = locate(str(value["_target_"])) if "_target_" in value else None, _parameters(value)
    content = getattr(target, "content", None)
    parameter_names = [name for name in getattr(target, "models", ()) if parameters.get(name)]
    models = {
        name: _model_entry(parameters[name], f"{getattr(target, 'axis', 'model')}.{name}") for name in parameter_names
    }
    return models if content is None else {**models, **content(parameters)}


def _model_entry(path: Any, setting: str) -> Any:
    """Return a model's entry in an identity; a constant for a server's address, because `served` names that model."""
    return "served" if str(path).startswith(ADDRESSES) else model_content(str(path), setting)


def _parameters(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): item for key, item in value.items() if key not in _HYDRA_KEYS}
