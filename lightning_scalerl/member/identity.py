"""Identity of a run: what of its configuration decides what it learns, in a form that outlives code versions.

An identity is a hash of this form (`sweeps.run.spec`). So that moving a class, or adding an axis or a parameter,
changes no identity that exists:

- a class or function counts by its name, not by the module it stands in;
- a group at its neutral choice is left out (`neutral`, on the class of an axis);
- a parameter that came later is left out at the value at which nothing changes (`added`, on the class);
- a remark that explains a value is left out (`remarks`);
- data counts by content, wherever it lies (`content`, a function of the parameters).

All four are attributes of what `_target_` names. tests/member/identities.json holds them to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning_scalerl
from lightning_scalerl import public_names
from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.composition import axes_of
from sweeps.run.spec import SPEC_FILE, RunSpec, changed_keys, identities, science

# Hydra's keys for how an object is built, which are no parameters of it.
_HOW = frozenset({"_target_", "_partial_", "_convert_", "_recursive_"})


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lasting form of a resolved configuration, without its seed and operational settings.

    Raises:
        ConfigurationError: something that a group names cannot be found or read, or bears a public name of ours.
    """
    parts = {key: part_of(key, value) for key, value in science(config).items()}
    return {key: part for key, part in parts.items() if part is not None}


def part_of(group: str, value: Any) -> Any:
    """Return the lasting form of one group of a configuration; None for a group at its neutral choice.

    Raises:
        ConfigurationError: something that it names cannot be found or read, or bears a public name of ours.
    """
    try:
        return _part(value)
    except ConfigurationError:
        raise
    except Exception as error:  # of Hydra's look-up, of imports, of a user's `content`
        said = " ".join(str(error.__cause__ or error).split())
        raise ConfigurationError(f"{group}: {type(error).__name__}: {said}") from error


def check_identity(spec: RunSpec, run_dir: Path) -> None:
    """Refuse a specification whose content does not have the identity that it names.

    Args:
        spec: as read; the user's folders that it names are in use.
        run_dir: it was read from there.

    Raises:
        ConfigurationError: it is another run's by its content; or its identity cannot be told.
    """
    made = identities(identity_of(spec.config), spec.seed)
    if made != (spec.run, spec.curve) or spec.config.get("seed") != spec.seed:
        raise ConfigurationError(
            f"{run_dir / SPEC_FILE}: names run {spec.run} of curve {spec.curve}, and its content is run {made[0]} of "
            f"curve {made[1]}: it was changed, or a file was that it names (data, code); restore what was changed, or "
            "launch this as a run of its own"
        )
    # A run is made of its recipe's choices (`reference`) where it does not depart from them.
    own, recipe = ({axis: each[axis] for axis in axes_of(each)} for each in (spec.config, spec.reference))
    if changed := set(changed_keys(identity_of(own), identity_of(recipe))) - spec.departures.keys():
        raise ConfigurationError(
            f"{run_dir / SPEC_FILE}: config and reference differ in {', '.join(sorted(changed))}, which departures "
            "does not name; restore what was changed, or launch this as a run of its own"
        )


def _part(value: Any) -> Any:
    """Return the lasting form of one value; None for a group at its neutral choice."""
    if isinstance(value, list | tuple):
        return [_part(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {str(key): _part(item) for key, item in value.items()}
    name = str(value["_target_"]).rpartition(".")[2]
    target = located(str(value["_target_"]))
    if name in public_names() and getattr(lightning_scalerl, name) is not target:
        raise ConfigurationError(
            f"{value['_target_']}: bears the name of lightning_scalerl.{name}, and names tell runs apart; rename it"
        )
    parameters = _parameters(value) | content_of(value)
    added = getattr(target, "added", {})
    for parameter in (*added, *getattr(target, "remarks", ())):
        if parameter not in added or parameters.get(parameter) == added[parameter]:
            parameters.pop(parameter, None)
    choice = {"choice": name, **{key: _part(item) for key, item in parameters.items()}}
    return None if choice == getattr(target, "neutral", None) else choice


def content_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that count by the content of files; empty if the target names no files.

    Raises:
        ConfigurationError: a file that cannot be read.
    """
    content = getattr(located(str(value["_target_"])), "content", None) if "_target_" in value else None
    return {} if content is None else dict(content(_parameters(value)))


def _parameters(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): item for key, item in value.items() if key not in _HOW}


def located(path: str) -> Any:
    """Return what a dotted path names, without the line that Hydra logs where it names nothing."""
    from hydra._internal.utils import _locate

    return _locate(path)
