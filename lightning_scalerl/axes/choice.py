"""A design choice is a Lightning callback that names its axis.

Each axis module derives one abstract class from `DesignChoice`. That class declares the axis: its name, its neutral
choice, the method that the run calls, and how to detect in a step that two choices differ. Thin subclasses call the
pure functions of their module. A run's choices are collected in `choices.Choices`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError, shown
from lightning_scalerl.rollouts.rollout import Group, Rollout, TrainBatch

# Bound on log-ratios before exp. exp(20) is far outside every clip interval, and much larger log-ratios would overflow
# FP32 to inf and make the gradient NaN.
MAX_LOG_RATIO = 20.0

# The methods by which a user-defined axis changes training, in addition to Lightning's hooks.
ADJUST_METHODS = ("adjust_reward", "adjust_advantages", "adjust_loss")
# Members of Lightning's Callback that save and restore a callback's state. All other public members are hooks.
_STATE_MEMBERS = ("state_key", "state_dict", "load_state_dict")

C = TypeVar("C", bound="DesignChoice")


class ObservedStep(Protocol):
    """Data of one optimizer step before its update, by which `DesignChoice.differs` compares two choices.

    Attributes:
        batch: batch to train on, with all groups that were sampled for it.
        admitted: number of groups sent to the generator ("admitted") so far in the run.
        completed_steps: number of optimizer steps done before this one.
        groups_per_step: number of groups per step (P).
        dropped: number of groups that were dropped and replaced for this batch.
        completions: average number of rollouts per group.
        reward_sums: for each weighted sum that the task grades by, the names of its rewards; the first reward decides a
            pass.
    """

    batch: TrainBatch
    admitted: int
    completed_steps: int
    groups_per_step: int
    dropped: int
    completions: int
    reward_sums: Sequence[Sequence[str]]

    @property
    def decode(self) -> Callable[[list[int]], str]:
        """Function from token ids to text, including special tokens."""

    def histories(self) -> Sequence[Sequence[float]]:
        """Return for each prompt the pass rates of its groups so far."""

    def drawn_histories(self) -> Sequence[Sequence[float]]:
        """Return for each group the pass rates that its prompt had when the prompt was drawn.

        The groups are those being sampled, queued or in the batch. A pass rate is included if the group that it belongs
        to was complete when the prompt was drawn.
        """

    def probe_logprobs(self, precision: Any) -> Tensor:
        """Return log-probabilities (R, T) of a few rollouts of the batch, computed under `precision`; R may be 0."""

    def loss_weights_differ(self, other: DesignChoice, rounding: bool = False) -> bool:
        """Return whether the tokens' weights in the update (`update.terms.loss_weights`) would differ under `other`.

        With `rounding` the threshold is low enough to detect the rounding error of a 16-bit type.
        """


class DesignChoice(Callback):
    """One value on one axis of the design space.

    The abstract class of an axis sets `axis` and, if the axis has one, `neutral`. Its choices implement the axis's
    method. Constructor arguments are the choice's parameters and the keys of its YAML file, and are stored as
    attributes of the same names. A choice with memory overrides Lightning's `state_dict` / `load_state_dict`.

    An axis of your own (one without a field in `Choices`) must have a neutral choice. It changes training by
    Lightning's hooks or by `adjust_reward`, `adjust_advantages` or `adjust_loss`, which are called for such axes only.

    Attributes:
        axis: name of the axis, of its configuration group and of its column in tables.
        neutral: `semantics()` of the choice that changes nothing, such as `{"choice": "NoFilter"}`; None if every
            choice has an effect. A configuration with the neutral choice and one without the axis are the same run.
        added: parameters that were added when runs without them existed already, each with its neutral value. At that
            value they are left out of run identities, so that older identities stay valid.
    """

    axis: ClassVar[str]
    neutral: ClassVar[Mapping[str, Any] | None] = None
    added: ClassVar[Mapping[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Lightning sets the module's `log` methods on each callback. Pickling them would pickle the whole module.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}

    @property
    def state_key(self) -> str:
        """Checkpoint key made of axis and class, so that one choice's state is never restored into another."""
        # Lightning reads this key before our checks refuse a choice without an axis, so `axis` may be missing here.
        return f"{getattr(self, 'axis', None)}:{type(self).__name__}"

    def semantics(self) -> dict[str, Any]:
        """Return the choice's name and parameters, including defaults; they are stored with the run."""
        return {"choice": type(self).__name__, **self.parameters()}

    def parameters(self) -> dict[str, Any]:
        """Return the constructor arguments by name, as plain values."""
        return {name: getattr(self, name) for name in self._constructor() if hasattr(self, name)}

    def check_parameters(self) -> None:
        """Check that labels and identities can contain every constructor argument.

        Raises:
            ConfigurationError: an argument is not stored under its name, or is not a plain value.
        """
        shown_parameters = self.semantics()
        for name, parameter in self._constructor().items():
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if not is_variadic and name not in shown_parameters and not hasattr(self, name):
                raise ConfigurationError(
                    f"{self.axis}.{name}: {type(self).__name__} does not store this argument under its name, so runs "
                    f"with other values would have the same label; write self.{name} = {name}"
                )
        for name, value in shown_parameters.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                text = " ".join(shown(value).split())[:80]
                raise ConfigurationError(
                    f"{self.axis}.{name}: {text} of {type(self).__name__} cannot be stored with the run; give finite "
                    "numbers, texts, true or false, or lists or mappings of these"
                ) from None

    def _constructor(self) -> Mapping[str, inspect.Parameter]:
        choice_class: Any = type(self)  # mypy does not count a class as hashable
        return _parameters_of(choice_class)

    def same_as(self, other: DesignChoice) -> bool:
        """Return whether both choices have equal `semantics()`; their classes may differ."""
        return self.semantics() == other.semantics()

    def changes_from(self, other: DesignChoice) -> list[str]:
        """Return the difference of this choice from another one on its axis, as the parts of a label.

        If both choices have the same name, the parts are the parameters, as `name=value`, that differ between them.
        Otherwise the parts are this choice's name and its parameters that differ from their defaults.
        """
        name, other_name = (str(choice.semantics()["choice"]) for choice in (self, other))
        defaults = {key: parameter.default for key, parameter in self._constructor().items()}
        reference = other.parameters() if name == other_name else defaults
        texts = {key: (_text(value), _text(reference.get(key))) for key, value in self.parameters().items()}
        changed = [f"{key}={text}" for key, (text, reference_text) in texts.items() if text != reference_text]
        return changed if changed and name == other_name else [name, *changed]

    @classmethod
    def neutral_choice(cls: type[C]) -> C | None:
        """Build the axis's neutral choice; return None if the axis has no neutral choice.

        Raises:
            ConfigurationError: no imported module defines its class.
        """
        if cls.neutral is None:
            return None
        name, parameters = cls.neutral["choice"], {k: v for k, v in cls.neutral.items() if k != "choice"}
        # Search from the abstract class of the axis, of which all choices on the axis are subclasses.
        root = _axis_class(cls)
        classes = (root, *_descendants(root))
        neutral_class = next((candidate for candidate in classes if candidate.__name__ == name), None)
        if neutral_class is None:
            raise ConfigurationError(
                f"{cls.axis}: its neutral choice, {name}, is not to be found; define it in the axis's own module"
            )
        neutral: C = neutral_class(**parameters)
        return neutral

    def check_neutral(self) -> None:
        """Check that this choice changes nothing if it is the neutral choice of its axis.

        Neutral choices with parameters, and methods that are inherited from the axis's abstract class, are not checked:
        they may be defined so that they change nothing at the neutral values.

        Raises:
            ConfigurationError: the choice changes rewards, advantages or losses, but is left out of labels and
                identities.
        """
        if self.neutral != {"choice": type(self).__name__}:
            return
        root = _axis_class(type(self))
        base = DesignChoice if root is type(self) else root
        defined = [name for name in ADJUST_METHODS if getattr(type(self), name) is not getattr(base, name)]
        if defined:
            raise ConfigurationError(
                f"{self.axis}: its neutral choice, {type(self).__name__}, defines {', '.join(defined)}; a neutral "
                "choice changes nothing, so name another class in `neutral`"
            )

    def without_effect(self) -> str | None:
        """Return a one-line warning if this choice, which is on a user-defined axis, is never called; else None."""
        if self.semantics() == self.neutral:
            return None
        hooks = (name for name in vars(Callback) if not name.startswith("_") and name not in _STATE_MEMBERS)
        if any(getattr(type(self), name) is not getattr(DesignChoice, name) for name in (*ADJUST_METHODS, *hooks)):
            return None
        return (
            f"{self.axis}: {type(self).__name__} has no effect: it defines none of {', '.join(ADJUST_METHODS)}, and no "
            "hook of Lightning"
        )

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if this choice cannot be combined with the others (by axis), else None."""
        return None

    def differs(self, other: Any, step: ObservedStep) -> bool:
        """Return whether `other`, another choice on this axis, would have changed the step.

        By default this compares the tokens' weights in the update. An axis with another effect overrides this method.
        """
        return step.loss_weights_differ(other)

    # --- hooks for axes that the user defines -------------------------------------------------------------

    def adjust_reward(self, reward: float, rollout: Rollout) -> float:
        """Return the reward to train on, given the reward after length control. Called once per rollout."""
        return reward

    def adjust_advantages(self, advantages: list[Tensor], groups: Sequence[Group]) -> list[Tensor]:
        """Return adjusted advantages, given the normalized ones: one (G,) tensor per group that passed the filter.

        Must be a pure function, because mechanism counters call it again. Update any memory in Lightning's hooks.
        """
        return advantages

    def adjust_loss(self, per_token_loss: Tensor, batch: TrainBatch, trainer_logprobs: Tensor) -> Tensor:
        """Return the adjusted per-token loss (R, T) before aggregation. Must be a pure function."""
        return per_token_loss

    # --- Lightning's hook ---------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse a module other than ScaleRL, where the choice would silently do nothing."""
        if not hasattr(pl_module, "choices"):
            raise ConfigurationError(
                f"callbacks: {type(self).__name__} (axis {self.axis}) needs a ScaleRL module, "
                f"got {type(pl_module).__name__}"
            )


@cache  # takes 0.2 ms for a class without its own constructor, and each step compares the choices on all axes
def _parameters_of(choice_class: type[DesignChoice]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(choice_class).parameters


def _text(value: Any) -> str:
    """Return a parameter's value as on the command line; for an object, its name."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, Sequence):
        return f"[{','.join(map(_text, value))}]"
    return str(getattr(value, "__name__", type(value).__name__))


def _axis_class(choice_class: type[DesignChoice]) -> type[DesignChoice]:
    """Return the abstract class of a choice's axis: the topmost base class that sets `axis`."""
    return next(base for base in reversed(choice_class.__mro__) if "axis" in vars(base))


def _descendants(root: type[Any]) -> list[type[Any]]:
    children = root.__subclasses__()
    return children + [descendant for child in children for descendant in _descendants(child)]
