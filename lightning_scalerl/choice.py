"""A design choice is a Lightning callback that names its axis.

Each axis module derives one abstract class from `DesignChoice` that declares the axis: its name, its neutral choice,
the one method that the run calls, and how one sees in a step that two of its choices differ. Thin classes below it
carry the pure functions beside them. `choices` has the record of a run's choices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.rollout import Group, Rollout, TrainBatch

# exp(20) is far outside every clip interval; beyond it float32 would overflow to inf and poison the gradient.
MAX_LOG_RATIO = 20.0

C = TypeVar("C", bound="DesignChoice")


class ObservedStep(Protocol):
    """One optimizer step, before it is taken, as the mechanism counters see it."""

    @property
    def batch(self) -> TrainBatch:
        """Batch that is trained on, with all groups that were sampled for it."""
        ...

    @property
    def decode(self) -> Callable[[list[int]], str]:
        """Decoder from tokens to text, special tokens included."""
        ...

    @property
    def admitted(self) -> int:
        """Number of groups admitted so far in the run."""
        ...

    @property
    def completed_steps(self) -> int:
        """Number of optimizer steps done before this one."""
        ...

    @property
    def groups_per_step(self) -> int:
        """Number of groups in a step's batch (P)."""
        ...

    @property
    def dropped(self) -> int:
        """Number of groups that were dropped and replaced for this batch."""
        ...

    @property
    def completions(self) -> int:
        """Number of rollouts a group, on average."""
        ...

    @property
    def reward_sums(self) -> Sequence[Sequence[str]]:
        """Names of the rewards in each weighted sum that the task grades by, the one that decides a pass first."""
        ...

    def histories(self) -> Sequence[Sequence[float]]:
        """Return the pass rates of each prompt's groups so far, one sequence a prompt."""
        ...

    def probe_logprobs(self, precision: Any) -> Tensor:
        """Return the policy's log-probabilities (R, T) of a few rollouts of the batch in this precision; R may be 0."""
        ...

    def loss_weights_differ(self, theirs: DesignChoice, rounding: bool = False) -> bool:
        """Return whether the tokens' weights in the update would differ with `theirs` in place of the run's choice.

        With `rounding` the threshold is so low that the rounding error of a 16-bit type counts as a difference.
        """
        ...


class DesignChoice(Callback):
    """One value on one axis of the design space.

    The abstract class of an axis sets `axis` and, if there is one, `neutral`. Its choices implement the axis's method.
    Constructor arguments are the choice's parameters and the keys of its YAML file, and are kept under their names.
    A choice with memory overrides Lightning's `state_dict` / `load_state_dict`.

    An axis of your own, one that `Choices` has no field for, must have a neutral choice. It acts through Lightning's
    hooks, or through one of `adjust_reward`, `adjust_advantages`, `adjust_loss`, which only such axes are asked for.

    Attributes:
        axis: name of the axis, of its configuration group and of its column in tables.
        neutral: semantics of the choice that changes nothing, such as `{"choice": "NoFilter"}`; None if every choice
            means something. A configuration with it and one without the axis are the same run.
        added: parameters that came after identities were frozen, each with the value at which nothing changes; at
            that value they are left out of identities.
    """

    axis: ClassVar[str]
    neutral: ClassVar[Mapping[str, Any] | None] = None
    added: ClassVar[Mapping[str, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Lightning sets the module's `log` on each callback; pickled with it, the whole module would go along.
        return {name: value for name, value in vars(self).items() if name not in ("log", "log_dict")}

    @property
    def state_key(self) -> str:
        """Checkpoint key from axis and class: a checkpoint of one choice never restores into another."""
        return f"{self.axis}:{type(self).__name__}"

    def semantics(self) -> dict[str, Any]:
        """Return the choice's name and parameters with every default resolved; stored with the run."""
        return {"choice": type(self).__name__, **self.parameters()}

    def parameters(self) -> dict[str, Any]:
        """Return the constructor's arguments, which a choice keeps under their names (plain values)."""
        names = list(inspect.signature(type(self)).parameters)
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def same_as(self, other: DesignChoice) -> bool:
        """Return whether both choices have the same semantics, whatever their classes."""
        return self.semantics() == other.semantics()

    @classmethod
    def neutral_choice(cls: type[C]) -> C | None:
        """Build the axis's neutral choice; return None if it has none.

        Raises:
            ConfigurationError: its class is in no module that was imported.
        """
        if cls.neutral is None:
            return None
        name, parameters = cls.neutral["choice"], {k: v for k, v in cls.neutral.items() if k != "choice"}
        root = next(one for one in reversed(cls.__mro__) if "axis" in vars(one))
        found = next((one for one in (root, *_descendants(root)) if one.__name__ == name), None)
        if found is None:
            raise ConfigurationError(
                f"{cls.axis}: its neutral choice, {name}, is not to be found; define it in the axis's own module"
            )
        neutral: C = found(**parameters)
        return neutral

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return one line if this choice cannot be combined with the others (by axis), else None."""
        return None

    def differs(self, theirs: Any, step: ObservedStep) -> bool:
        """Return whether `theirs`, another choice on this axis, would have changed anything in the step.

        By default: the tokens' weights in the update would differ. An axis that acts elsewhere overrides this.
        """
        return step.loss_weights_differ(theirs)

    # --- for axes that the project does not have ----------------------------------------------------------

    def adjust_reward(self, reward: float, rollout: Rollout) -> float:
        """Return the reward that is trained on, from the verifier's after length control. Called once a rollout."""
        return reward

    def adjust_advantages(self, advantages: list[Tensor], groups: Sequence[Group]) -> list[Tensor]:
        """Return normalized advantages, one (G,) tensor a group that passed the filter.

        A pure function: mechanism counters call it again. What a choice remembers moves in Lightning's hooks.
        """
        return advantages

    def adjust_loss(self, per_token_loss: Tensor, batch: TrainBatch, trainer_logprobs: Tensor) -> Tensor:
        """Return the per-token loss (R, T) before aggregation. A pure function, as `adjust_advantages`."""
        return per_token_loss

    # --- Lightning's --------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Refuse a module that is no ScaleRL: the choice would silently do nothing there."""
        if not hasattr(pl_module, "choices"):
            raise ConfigurationError(
                f"callbacks: {type(self).__name__} (axis {self.axis}) needs a ScaleRL module, "
                f"got {type(pl_module).__name__}"
            )


def _descendants(root: type[Any]) -> list[type[Any]]:
    """Return all subclasses of a class, the nearest first."""
    found = root.__subclasses__()
    return found + [each for one in found for each in _descendants(one)]
