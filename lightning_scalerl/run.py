"""What a callback and the measurements may ask of a run: the part of `ScaleRL` that others rely on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, cast

import torch

from lightning_scalerl.checks import ConfigurationError
from lightning_scalerl.choices import Choices
from lightning_scalerl.distributed.ranks import Ranks
from lightning_scalerl.generator.base import Generator
from lightning_scalerl.measure.compute_meter import ComputeMeter
from lightning_scalerl.measure.mechanism import MechanismCounters
from lightning_scalerl.model.policy import Policy
from lightning_scalerl.prompt import Prompt
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollout import Rollout
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import Task
from lightning_scalerl.verify.grade import Sample
from lightning_scalerl.verify.verification import Verifiers


class Run(Protocol):
    """A run under way. `stream` and `mechanism` are rank 0's alone."""

    recipe: Recipe
    choices: Choices
    policy: Policy
    ranks: Ranks
    meter: ComputeMeter
    mechanism: MechanismCounters
    stream: RolloutStream

    @property
    def task(self) -> Task:
        """What is trained on."""
        ...

    @property
    def seed(self) -> int:
        """Of prompt order and sampling."""
        ...

    @property
    def completed_steps(self) -> int:
        """Optimizer steps done: the version of the weights."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        ...

    @property
    def eval_sets(self) -> dict[str, PromptSet]:
        """The held-out prompts of each set that are evaluated, with their tokens."""
        ...

    def sample(self, prompt: Prompt, rollout: Rollout) -> Sample:
        """A completion as it is graded."""
        ...

    def verifying(self) -> AbstractContextManager[Verifiers]:
        """What grades completions."""
        ...

    @property
    def began(self) -> list[str]:
        """What a user wants to see once, at the start; rank 0's alone."""
        ...

    def generating(self) -> AbstractContextManager[Generator]:
        """The run's generator with nothing in flight, for something else than training; whatever was waits."""
        ...

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to stop at its next clean border, if it is."""
        ...


def run_of(module: object) -> Run:
    """The run behind a Lightning module.

    Raises:
        ConfigurationError: it is no ScaleRL module.
    """
    if not hasattr(module, "choices"):
        raise ConfigurationError(f"callbacks: they need a ScaleRL module, got {type(module).__name__}")
    return cast(Run, module)
