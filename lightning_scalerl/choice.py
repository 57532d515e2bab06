"""A design choice is a Lightning callback that names its axis.

Each axis module derives one abstract class from `DesignChoice` that declares the axis's one method, and thin
classes that carry the pure functions beside them. `by_axis` refuses two on one axis and `check_conflicts` pairs
that make no sense, before any compute is spent.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from lightning.pytorch import Callback, Trainer


class ConfigurationError(ValueError):
    """A configuration that cannot run. One line: the field, the value and what is valid."""


# Every axis of the design space that works today, in the order of the data path.
AXES = (
    "resampling",
    "allocation",
    "async_mode",
    "length_control",
    "truncated",
    "filter",
    "advantage",
    "normalization",
    "precision",
    "correction",
    "loss",
    "aggregation",
)


class DesignChoice(Callback):
    """One value on one axis of the design space.

    Subclasses set `axis` and implement the axis's method. Constructor arguments are the choice's parameters and
    the keys of its YAML file. A choice with memory overrides Lightning's `state_dict` / `load_state_dict`.
    """

    axis: ClassVar[str]

    @property
    def state_key(self) -> str:
        """Axis and class: a checkpoint of one choice never restores into another."""
        return f"{self.axis}:{type(self).__name__}"

    def semantics(self) -> dict[str, Any]:
        """What the choice means once every default is resolved; stored with the run."""
        return {"choice": type(self).__name__, **self.parameters()}

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments, which a choice keeps under their names (plain values)."""
        names = list(inspect.signature(type(self)).parameters)
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def same_as(self, other: DesignChoice) -> bool:
        """Whether both mean the same."""
        return self.semantics() == other.semantics()

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """One line if this choice cannot be combined with the others (by axis), else None."""
        return None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """A choice acts through a ScaleRL module; in any other it would silently do nothing."""
        if not hasattr(pl_module, "choices"):
            raise ConfigurationError(
                f"callbacks: {type(self).__name__} (axis {self.axis}) needs a ScaleRL module, "
                f"got {type(pl_module).__name__}"
            )


def by_axis(choices: Iterable[DesignChoice]) -> dict[str, DesignChoice]:
    """Choices by axis.

    Raises:
        ConfigurationError: an unknown axis, or two choices on one axis (both are named).
    """
    found: dict[str, DesignChoice] = {}
    for choice in choices:
        if choice.axis not in AXES:
            raise ConfigurationError(
                f"axis: {choice.axis!r} of {type(choice).__name__} is unknown; valid: {', '.join(AXES)}"
            )
        if choice.axis in found:
            raise ConfigurationError(
                f"{choice.axis}: two choices on one axis, {type(found[choice.axis]).__name__} and "
                f"{type(choice).__name__}; keep one"
            )
        found[choice.axis] = choice
    return found


def check_conflicts(choices: Mapping[str, DesignChoice]) -> None:
    """Every axis has a choice, and no two choices contradict each other.

    Raises:
        ConfigurationError: names the missing axis or both choices.
    """
    missing = [axis for axis in AXES if axis not in choices]
    if missing:
        raise ConfigurationError(f"axes: nothing chosen for {', '.join(missing)}; a recipe names every axis")
    for choice in choices.values():
        problem = choice.conflict(choices)
        if problem:
            raise ConfigurationError(problem)


def positive(field: str, value: float) -> float:
    """`value`, if it is a finite number above zero.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigurationError(f"{field}: {value!r} must be a number above 0")
    return value


def whole_number(field: str, value: Any) -> int:
    """`value`, if it is a whole number of 1 or more.

    Raises:
        ConfigurationError: otherwise.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{field}: {value!r} must be a whole number, 1 or more")
    return value
