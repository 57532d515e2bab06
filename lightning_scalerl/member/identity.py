"""What of a configuration decides what a run learns, in a form that outlives versions of this code.

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
from typing import Any

from sweeps.run.spec import science


def identity_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The lasting form of a resolved configuration, its seed and all that is operational left out."""
    parts = {key: _part(value) for key, value in science(config).items()}
    return {key: part for key, part in parts.items() if part is not None}


def _part(value: Any) -> Any:
    """One value; None for a group at its neutral choice."""
    if isinstance(value, list | tuple):
        return [_part(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "_target_" not in value:
        return {str(key): _part(item) for key, item in value.items()}
    from hydra.utils import get_object

    target = get_object(str(value["_target_"]))
    parameters = {str(key): item for key, item in value.items() if not str(key).startswith("_")}
    content = getattr(target, "content", None)
    if content is not None:
        parameters |= content(parameters)
    added = getattr(target, "added", {})
    for name in (*added, *getattr(target, "remarks", ())):
        if name not in added or parameters.get(name) == added[name]:
            parameters.pop(name, None)
    choice = {"choice": str(value["_target_"]).rpartition(".")[2], **{k: _part(v) for k, v in parameters.items()}}
    return None if choice == getattr(target, "neutral", None) else choice
