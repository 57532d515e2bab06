"""A run's choices as one record, with one field an axis.

A new axis is a module in `axes/`, a folder in `conf/`, public names and a field here, which names the file of its
neutral choice: `conf/train.yaml` and recipes that say nothing of an axis have that. Light: importing this does not
import Lightning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_scalerl.checks import ConfigurationError

if TYPE_CHECKING:
    from lightning_scalerl.axes.adapter import Adapter
    from lightning_scalerl.axes.advantage import Advantage
    from lightning_scalerl.axes.aggregation import Aggregation
    from lightning_scalerl.axes.allocation import Allocation
    from lightning_scalerl.axes.async_mode import AsyncMode
    from lightning_scalerl.axes.correction import Correction
    from lightning_scalerl.axes.critic import Critic
    from lightning_scalerl.axes.curriculum import Curriculum
    from lightning_scalerl.axes.entropy import Entropy
    from lightning_scalerl.axes.epochs import Epochs
    from lightning_scalerl.axes.filter import Filter
    from lightning_scalerl.axes.kl import KL
    from lightning_scalerl.axes.length_control import LengthControl
    from lightning_scalerl.axes.loss import Loss
    from lightning_scalerl.axes.normalization import Normalization
    from lightning_scalerl.axes.precision import Precision
    from lightning_scalerl.axes.resampling import Resampling
    from lightning_scalerl.axes.truncated import Truncated
    from lightning_scalerl.choice import DesignChoice


@dataclass(frozen=True)
class Passes:
    """Number of passes over a batch in one step; an update is forward and backward, forwards precede the first."""

    policy_updates: int = 1
    value_updates: int = 0
    policy_forwards: int = 0
    value_forwards: int = 0

    @property
    def relative(self) -> float:
        """Total in units of one update of the policy; a forward pass is a third of it."""
        return self.policy_updates + self.value_updates + (self.policy_forwards + self.value_forwards) / 3


@dataclass(frozen=True)
class Choices:
    """One choice on every axis, in the order of the data path, and those on axes of the user's own.

    The metadata names the file in `conf/<axis>/` of an axis's neutral choice; None where every choice means something,
    and a recipe must name one.
    """

    resampling: Resampling = field(metadata={"neutral": "uniform"})
    curriculum: Curriculum = field(metadata={"neutral": "none"})
    allocation: Allocation = field(metadata={"neutral": "fixed"})
    async_mode: AsyncMode = field(metadata={"neutral": "on_policy"})
    length_control: LengthControl = field(metadata={"neutral": "none"})
    truncated: Truncated = field(metadata={"neutral": "keep"})
    filter: Filter = field(metadata={"neutral": "none"})
    advantage: Advantage = field(metadata={"neutral": None})
    normalization: Normalization = field(metadata={"neutral": "none"})
    precision: Precision = field(metadata={"neutral": None})
    correction: Correction = field(metadata={"neutral": "behaviour"})
    critic: Critic = field(metadata={"neutral": "none"})
    loss: Loss = field(metadata={"neutral": None})
    kl: KL = field(metadata={"neutral": "none"})
    entropy: Entropy = field(metadata={"neutral": "none"})
    aggregation: Aggregation = field(metadata={"neutral": None})
    epochs: Epochs = field(metadata={"neutral": "default"})
    adapter: Adapter = field(metadata={"neutral": "none"})
    own: Mapping[str, DesignChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, choices: Iterable[DesignChoice]) -> Choices:
        """Complete a set of choices: an axis that is left open gets its neutral choice.

        Raises:
            ConfigurationError: an axis without a choice and without a neutral one, one with two, an unknown one, or
                choices that contradict each other; what and which, in one line.
        """
        found = by_axis(choices)
        for axis in AXES:
            if axis not in found and (neutral := axis_class(axis).neutral_choice()) is not None:
                found[axis] = neutral
        missing = [axis for axis in AXES if axis not in found]
        if missing:
            raise ConfigurationError(
                f"axes: nothing chosen for {', '.join(missing)}; a recipe names every axis that has no neutral choice "
                f"(override /{missing[0]}: NAME, of conf/{missing[0]}/)"
            )
        for choice in found.values():
            problem = choice.conflict(found)
            if problem:
                raise ConfigurationError(problem)
        own = {axis: found[axis] for axis in sorted(found.keys() - set(AXES))}
        named: dict[str, Any] = {axis: found[axis] for axis in AXES}
        return cls(**named, own=own)

    def __iter__(self) -> Iterator[DesignChoice]:
        """Iterate over every choice, in the order of the data path, then the user's own axes by name."""
        yield from (getattr(self, axis) for axis in AXES)
        yield from self.own.values()

    def items(self) -> list[tuple[str, DesignChoice]]:
        """Return pairs of axis and choice, in the order of iteration."""
        return [(choice.axis, choice) for choice in self]

    def on(self, axis: str) -> DesignChoice | None:
        """Return the choice on an axis; None on one of the user's own that is left open."""
        choice: DesignChoice | None = getattr(self, axis) if axis in AXES else self.own.get(axis)
        return choice

    @property
    def needs_anchor(self) -> bool:
        """Return whether a step needs the trainer's log-probabilities before the update."""
        return self.correction.recomputes or self.kl.where == "reward"

    @property
    def passes(self) -> Passes:
        """Number of updates and forward passes that one step makes of policy and critic."""
        return Passes(
            policy_updates=self.epochs.count,
            value_updates=self.epochs.count if self.critic.has_values else 0,
            policy_forwards=int(self.needs_anchor) + int(bool(self.kl.where)),
            value_forwards=int(self.critic.has_values),
        )

    def having(self, choice: DesignChoice) -> Choices:
        """Return a copy with `choice` in place of the one on its axis."""
        if choice.axis in AXES:
            changed: dict[str, Any] = {choice.axis: choice}
            return replace(self, **changed)
        return replace(self, own={**self.own, choice.axis: choice})


# Every axis of the project, in the order of the data path, with the file of its neutral choice, if it has one.
NEUTRAL: dict[str, str | None] = {axis.name: axis.metadata["neutral"] for axis in fields(Choices) if axis.metadata}
AXES = tuple(NEUTRAL)


def axis_class(axis: str) -> type[DesignChoice]:
    """Return the abstract class of one of the project's axes, by its field's annotation."""
    (name,) = (str(each.type) for each in fields(Choices) if each.name == axis)
    found: type[DesignChoice] = getattr(import_module(f"lightning_scalerl.axes.{axis}"), name)
    return found


def by_axis(choices: Iterable[DesignChoice]) -> dict[str, DesignChoice]:
    """Return the choices keyed by axis.

    Raises:
        ConfigurationError: an unknown axis, or two choices on one axis (both are named).
    """
    found: dict[str, DesignChoice] = {}
    for choice in choices:
        axis = getattr(choice, "axis", None)
        if axis not in AXES and (choice.neutral is None or not isinstance(axis, str)):
            raise ConfigurationError(
                f"axis: {axis!r} of {type(choice).__name__} is unknown; valid: {', '.join(AXES)}; an axis of your own "
                "declares its neutral choice (DesignChoice.neutral)"
            )
        if axis in found:
            raise ConfigurationError(
                f"{axis}: two choices on one axis, {type(found[axis]).__name__} and {type(choice).__name__}; keep one"
            )
        found[axis] = choice
    return found
