"""Recipe of a run: all settings that decide how it learns, composed from `conf/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_scalerl.axes.filter import NoFilter
from lightning_scalerl.checks import ConfigurationError, check_scale, whole_number
from lightning_scalerl.choices import Choices
from lightning_scalerl.environment.settings import EnvironmentSettings
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.model.chat import Chat
from lightning_scalerl.optim import AdamW, ConstantSchedule
from lightning_scalerl.rollouts.rollout import PassSize
from lightning_scalerl.stream.cost_model import CostModel
from lightning_scalerl.stream.drivers import Live, Virtual
from lightning_scalerl.stream.prompts import TOO_LONG
from lightning_scalerl.task.base import NoReward, RewardScale
from lightning_scalerl.update.health import Health
from lightning_scalerl.update.terms import terms
from lightning_scalerl.verify.charges import ComputeAxes
from lightning_scalerl.verify.verification import Verification

# A model with at least this many parameters recomputes activations by default: for such a model, the activations of one
# long rollout take more memory than weights, gradients and optimizer states.
RECOMPUTE_FROM = 2**28


@dataclass(frozen=True)
class BatchSettings:
    """Size of one optimizer step and of its forward passes.

    The settings from `micro_batch` on, except `rollouts`, change results by rounding only.

    Attributes:
        prompts: groups per step (P).
        completions: rollouts per group (G).
        micro_batch: largest number of rollouts per forward pass.
        rollouts: rollouts per step. If given, it sets `prompts` to `rollouts / completions`.
        micro_tokens: largest number of tokens per forward pass; padding counts, except with `packed`. A longer rollout
            is a pass alone. None for no limit on tokens.
        recompute: whether to recompute a layer's activations in the backward pass instead of keeping them (gradient
            checkpointing); None to do so for models of `RECOMPUTE_FROM` parameters or more.
        offload: whether to recompute activations and to keep the layers' inputs in host memory.
        packed: whether to concatenate the rollouts of a pass into one sequence without padding. Models that do not
            support that get padded rollouts, with a warning.
    """

    added: ClassVar[Mapping[str, Any]] = {
        "rollouts": None,
        "micro_tokens": None,
        "recompute": None,
        "offload": False,
        "packed": False,
    }

    prompts: int
    completions: int
    micro_batch: int
    rollouts: int | None = None
    micro_tokens: int | None = None
    recompute: bool | None = None
    offload: bool = False
    packed: bool = False

    def __post_init__(self) -> None:
        for field in ("prompts", "completions", "micro_batch"):
            whole_number(f"batch.{field}", getattr(self, field))
        if self.micro_tokens is not None:
            whole_number("batch.micro_tokens", self.micro_tokens)
        if self.offload and self.recompute is False:
            raise ConfigurationError(
                "batch.offload: what is kept on the host are the inputs of layers that are recomputed, and "
                "batch.recompute is false; leave batch.recompute out"
            )
        if self.rollouts is not None:
            whole_number("batch.rollouts", self.rollouts)
            if self.rollouts % self.completions:
                raise ConfigurationError(
                    f"batch.rollouts: {self.rollouts} cannot be divided into groups of batch.completions, "
                    f"{self.completions}"
                )
            object.__setattr__(self, "prompts", self.rollouts // self.completions)

    def recomputes(self, parameters: int) -> bool:
        """Return whether the activations of a model of this size are recomputed."""
        if self.recompute is None:
            return self.offload or parameters >= RECOMPUTE_FROM
        return self.recompute

    @property
    def pass_size(self) -> PassSize:
        """Upper limits of one forward pass."""
        return PassSize(self.micro_batch, self.micro_tokens)


@dataclass(frozen=True)
class ContextSettings:
    """Limits on tokens and turns, and the temperature.

    Attributes:
        max_prompt_tokens: limit on prompts, after rendering by the chat template.
        max_new_tokens: limit on completions; with an environment, on all turns and observations together.
        temperature: sampling temperature.
        too_long: treatment of longer prompts: "refuse" the run, or "drop" them.
        max_turns: limit on turns of the model, with an environment.
        max_turn_tokens: limit on the tokens of one turn; None for no limit.
    """

    added: ClassVar[Mapping[str, Any]] = {"too_long": "refuse", "max_turns": 8, "max_turn_tokens": None}

    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    too_long: str = "refuse"
    max_turns: int = 8
    max_turn_tokens: int | None = None

    def __post_init__(self) -> None:
        whole_number("context.max_turns", self.max_turns)
        if self.max_turn_tokens is not None:
            whole_number("context.max_turn_tokens", self.max_turn_tokens)
        if self.too_long not in TOO_LONG:
            raise ConfigurationError(f"context.too_long: {self.too_long!r} must be one of {', '.join(TOO_LONG)}")
        for field in ("max_prompt_tokens", "max_new_tokens"):
            whole_number(f"context.{field}", getattr(self, field))
        if not 0 < self.temperature < float("inf"):
            raise ConfigurationError(f"context.temperature: {self.temperature!r} must be above 0")


@dataclass(frozen=True)
class Recipe:
    """Named set of choices with the settings that go with them.

    `scaled_for` is the model that the settings were made for; None if they are for any model. `evaluation` has default
    arguments for `Evaluate`. `named` has the choices of the recipe's file if overrides changed any of them, else None.
    `of_length` has each object whose arguments depend on `budget.steps`, and a function that builds it for other steps.
    """

    name: str
    choices: Choices
    optimizer: AdamW
    schedule: ConstantSchedule
    batch: BatchSettings
    context: ContextSettings
    cost_model: CostModel
    generator: Callable[..., Generator]
    driver: Virtual | Live = Virtual()  # noqa: RUF009  # frozen, and without fields
    reward: RewardScale = RewardScale()  # noqa: RUF009  # frozen
    health: Health = Health()  # noqa: RUF009  # frozen
    chat: Chat = Chat()  # noqa: RUF009  # frozen
    verify: Verification = Verification()  # noqa: RUF009  # frozen
    compute: ComputeAxes = ComputeAxes()  # noqa: RUF009  # frozen
    environment: EnvironmentSettings = EnvironmentSettings()  # noqa: RUF009  # frozen
    scaled_for: str | None = None
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    named: Choices | None = None
    of_length: Sequence[tuple[Any, Callable[[int], Any]]] = dataclasses.field(default=(), repr=False, compare=False)

    def set_length(self, steps: int) -> None:
        """Set the values that depend on `budget.steps`, which a script lacks, as for a run of `steps` steps.

        Raises:
            ConfigurationError: a value is invalid for a run of this length.
        """
        for built, build in self.of_length:
            # Change the object itself: a Trainer that fits again has it among its callbacks.
            vars(built).update(vars(build(steps)))

    def check_scale(self, same_model: bool) -> None:
        """Refuse settings that were made for another model, unless the user set `scaled_for=null`.

        Args:
            same_model: whether the run's model is the model that the settings were made for.

        Raises:
            ConfigurationError: the settings were made for another model.
        """
        check_scale(self.scaled_for, same_model)

    def _nothing_to_learn(self, choices: Choices) -> str | None:
        """Return a one-line error if all rewards are equal and there is no other training signal, else None."""
        if not isinstance(self.reward, NoReward):
            return None
        if not isinstance(choices.filter, NoFilter):
            name = type(choices.filter).__name__
            return f"reward: none makes the rewards of a group equal, and filter {name} drops such groups; filter=none"
        if not choices.kl.where:
            return "reward: none leaves nothing to learn from; choose kl=distil kl.reference=PATH, or another reward"
        return None

    def _no_rewards_to_weigh(self, choices: Choices) -> str | None:
        """Return a one-line error if a curriculum weighs the task's rewards and the environment replaces them."""
        if not (choices.curriculum.weighs_rewards and self.environment.gives_reward):
            return None
        name = type(choices.curriculum).__name__
        return (
            f"curriculum: {name} weighs the task's rewards, and with environment.reward=environment only the "
            "environment gives rewards; set environment.reward=task, or choose curriculum=none"
        )

    def check(self, choices: Choices) -> None:
        """Refuse choices that cannot run with these settings.

        Raises:
            ConfigurationError: a choice contradicts a setting.
        """
        control = choices.length_control
        problems = [
            self._nothing_to_learn(choices),
            choices.advantage.check_group_size(self.batch.completions),
            choices.filter.check_group_size(self.batch.completions),
            choices.normalization.check_rewards(self.reward.incorrect),
            choices.allocation.check_average(self.batch.completions),
            self.cost_model.conflict(choices.async_mode.drains),
            control.check_limit(self.context.max_new_tokens),
            self._no_rewards_to_weigh(choices),
        ]
        for problem in filter(None, problems):
            raise ConfigurationError(problem)
        if self.environment.acts and self.verify.on_error == "zero":
            raise ConfigurationError(
                "verify.on_error: zero would give a reward of 0 to rollouts whose environment failed; use drop or stop"
            )
        terms(choices)  # raises if a term names an unknown aggregation
