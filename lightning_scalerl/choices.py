"""A run's design choices as one record, with one field per axis.

To add an axis, add a module in `axes/`, a folder in `conf/`, public names and a field here. The field names the file of
the neutral choice, which applies in `conf/train.yaml` and in recipes that do not mention the axis. Importing this
module does not import Lightning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_scalerl.checks import ConfigurationError, check_public_name

if TYPE_CHECKING:
    from lightning_scalerl.axes.adapter import Adapter
    from lightning_scalerl.axes.advantage import Advantage
    from lightning_scalerl.axes.aggregation import Aggregation
    from lightning_scalerl.axes.allocation import Allocation
    from lightning_scalerl.axes.async_mode import AsyncMode
    from lightning_scalerl.axes.choice import DesignChoice
    from lightning_scalerl.axes.correction import Correction
    from lightning_scalerl.axes.credit import Credit
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


@dataclass(frozen=True)
class Passes:
    """Numbers of passes over a batch in one step.

    An update is a forward and a backward pass. All other forward passes are made before the first update, with one
    exception: if the loss has a KL term over the whole vocabulary, the reference model runs in every update.
    `reference_size` is the cost of a forward pass of the reference model, relative to one of the policy.
    """

    policy_updates: int = 1
    value_updates: int = 0
    policy_forwards: int = 0
    value_forwards: int = 0
    reference_forwards: int = 0
    reference_size: float = 1.0

    @property
    def relative(self) -> float:
        """Total cost in units of one policy update; a forward pass counts as a third of an update."""
        forwards = self.policy_forwards + self.value_forwards + self.reference_forwards * self.reference_size
        return self.policy_updates + self.value_updates + forwards / 3


@dataclass(frozen=True)
class Choices:
    """One choice on every axis, in the order of the data path, and choices on the user's own axes (`user_axes`).

    The metadata `neutral` of a field is the name of the neutral choice's file in `conf/<axis>/`. It is None for an axis
    on which every choice has an effect; a recipe must name a choice on such an axis.
    """

    resampling: Resampling = field(metadata={"neutral": "uniform"})
    curriculum: Curriculum = field(metadata={"neutral": "none"})
    allocation: Allocation = field(metadata={"neutral": "fixed"})
    async_mode: AsyncMode = field(metadata={"neutral": "on_policy"})
    length_control: LengthControl = field(metadata={"neutral": "none"})
    truncated: Truncated = field(metadata={"neutral": "keep"})
    filter: Filter = field(metadata={"neutral": "none"})
    credit: Credit = field(metadata={"neutral": "outcome"})
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
    user_axes: Mapping[str, DesignChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, choices: Iterable[DesignChoice]) -> Choices:
        """Complete a set of choices: an axis without a choice gets its neutral choice.

        Raises:
            ConfigurationError: an axis has neither a choice nor a neutral one, or has two choices; an axis is unknown;
                a choice lacks a method of its axis, has the name of a class of this package, or does not store an
                argument; or two choices contradict each other.
        """
        chosen = by_axis(choices)
        for axis in AXES:
            if axis not in chosen and (neutral := axis_class(axis).neutral_choice()) is not None:
                chosen[axis] = neutral
        missing = [axis for axis in AXES if axis not in chosen]
        if missing:
            raise ConfigurationError(
                f"axes: nothing chosen for {', '.join(missing)}; a recipe names every axis that has no neutral choice "
                f"(override /{missing[0]}: NAME, of conf/{missing[0]}/)"
            )
        for choice in chosen.values():
            choice_class = type(choice)
            check_public_name(f"{choice_class.__module__}.{choice_class.__name__}", choice_class)
            # Lightning's Callback is not an abstract base class, so Python does not refuse a choice with abstract
            # methods.
            if missing_methods := [
                name
                for name in dir(choice_class)
                if getattr(getattr(choice_class, name), "__isabstractmethod__", False)
            ]:
                raise ConfigurationError(
                    f"{choice.axis}: {choice_class.__name__} lacks {', '.join(missing_methods)}, which every choice on "
                    "this axis defines"
                )
            choice.check_parameters()
            choice.check_neutral()
            problem = choice.conflict(chosen)
            if problem:
                raise ConfigurationError(problem)
        user_axes = {axis: chosen[axis] for axis in sorted(chosen.keys() - set(AXES))}
        project_axes: dict[str, Any] = {axis: chosen[axis] for axis in AXES}
        return cls(**project_axes, user_axes=user_axes)

    def __iter__(self) -> Iterator[DesignChoice]:
        """Iterate over the choices on the project's axes in the order of the data path, then on the user's by name."""
        yield from (getattr(self, axis) for axis in AXES)
        yield from self.user_axes.values()

    def items(self) -> list[tuple[str, DesignChoice]]:
        """Return pairs of axis and choice, in the order of iteration."""
        return [(choice.axis, choice) for choice in self]

    def on(self, axis: str) -> DesignChoice | None:
        """Return the choice on an axis; None if it is not one of the project's axes and has no choice."""
        choice: DesignChoice | None = getattr(self, axis) if axis in AXES else self.user_axes.get(axis)
        return choice

    @property
    def needs_logprobs_before_update(self) -> bool:
        """True if a step needs the trainer's log-probabilities before the update."""
        return self.correction.recomputes or self.kl.where == "reward"

    @property
    def kl_in_update(self) -> bool:
        """True if every update runs the reference model, because the loss has a KL term over the whole vocabulary."""
        return self.kl.reads_vocabulary and self.kl.where == "loss"

    @property
    def passes(self) -> Passes:
        """Numbers of updates and forward passes of policy and critic in one step."""
        return Passes(
            policy_updates=self.epochs.count,
            value_updates=self.epochs.count if self.critic.has_values else 0,
            policy_forwards=int(self.needs_logprobs_before_update),
            value_forwards=int(self.critic.has_values),
            reference_forwards=self.epochs.count if self.kl_in_update else int(bool(self.kl.where)),
            reference_size=self.kl.relative_size,
        )

    def replacing(self, choice: DesignChoice) -> Choices:
        """Return a copy in which `choice` replaces the choice on the same axis."""
        if choice.axis in AXES:
            replacement: dict[str, Any] = {choice.axis: choice}
            return replace(self, **replacement)
        return replace(self, user_axes={**self.user_axes, choice.axis: choice})


# The project's axes in the order of the data path, each with the file of its neutral choice or None.
NEUTRAL: dict[str, str | None] = {axis.name: axis.metadata["neutral"] for axis in fields(Choices) if axis.metadata}
AXES = tuple(NEUTRAL)


def axis_class(axis: str) -> type[DesignChoice]:
    """Return the abstract class of one of the project's axes: the annotation of the axis's field in `Choices`."""
    (name,) = (str(entry.type) for entry in fields(Choices) if entry.name == axis)
    axis_type: type[DesignChoice] = getattr(import_module(f"lightning_scalerl.axes.{axis}"), name)
    return axis_type


def by_axis(choices: Iterable[DesignChoice]) -> dict[str, DesignChoice]:
    """Return the choices keyed by axis.

    Raises:
        ConfigurationError: an axis is unknown, or has two choices (the message names both) or one of another class.
    """
    chosen: dict[str, DesignChoice] = {}
    for choice in choices:
        axis = getattr(choice, "axis", None)
        if axis not in AXES and (choice.neutral is None or not isinstance(axis, str)):
            raise ConfigurationError(
                f"axis: {axis!r} of {type(choice).__name__} is unknown; valid: {', '.join(AXES)}; an axis of your own "
                "declares its neutral choice (DesignChoice.neutral)"
            )
        if axis in AXES and not isinstance(choice, kind := axis_class(axis)):
            raise ConfigurationError(
                f"{axis}: {type(choice).__name__} is no choice on this axis; derive it from "
                f"lightning_scalerl.{kind.__name__}, or name its own axis otherwise"
            )
        if axis in chosen:
            raise ConfigurationError(
                f"{axis}: two choices on one axis, {type(chosen[axis]).__name__} and {type(choice).__name__}; keep one"
            )
        chosen[axis] = choice
    return chosen
