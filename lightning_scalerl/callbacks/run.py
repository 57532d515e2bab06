"""Protocol of a run for callbacks and measurements: the attributes of `ScaleRL` that they may use."""

from __future__ import annotations

from collections.abc import Sequence
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
from lightning_scalerl.recipe import Recipe
from lightning_scalerl.rollouts.grade import Sample
from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.rollouts.rollout import Rollout
from lightning_scalerl.stream.conversations import Conversations
from lightning_scalerl.stream.prompts import PromptSet
from lightning_scalerl.stream.rollout_stream import RolloutStream
from lightning_scalerl.task.base import Task
from lightning_scalerl.update.trained import TrainedPolicy
from lightning_scalerl.verify.verification import Verifiers


class Run(Protocol):
    """Protocol of a run in progress. Only rank 0 has `stream` and `mechanism`."""

    recipe: Recipe
    choices: Choices
    policy: Policy
    trained: TrainedPolicy
    meter: ComputeMeter
    stream: RolloutStream
    exhausted: str | None  # why the fit ended before its budget because prompts ran out; None otherwise

    @property
    def ranks(self) -> Ranks:
        """Ranks of the Trainer."""
        ...

    @property
    def mechanism(self) -> MechanismCounters:
        """Counters of the axes on which the run differs from the recipe."""
        ...

    @property
    def task(self) -> Task:
        """Task whose prompts the run trains on."""

    @property
    def seed(self) -> int:
        """Seed of the prompt order and of sampling."""

    @property
    def completed_steps(self) -> int:
        """Number of completed optimizer steps, which is also the version of the weights."""

    @property
    def device(self) -> torch.device:
        """Device that this rank trains on."""

    @property
    def eval_sets(self) -> dict[str, PromptSet]:
        """Held-out prompts with their tokens, by name of the set."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        ...

    def sample(self, prompt: Prompt, rollout: Rollout) -> Sample:
        """Return a completion as a `Sample`, which is what graders take."""

    def conversations(self, prompts: Sequence[Prompt]) -> Conversations | None:
        """Return the conversations for evaluating these prompts; None if the run has no environments."""

    def verifying(self) -> AbstractContextManager[Verifiers]:
        """Open the verifiers that grade completions, for a `with` block."""

    @property
    def began(self) -> list[str]:
        """Lines to print at the start of a fit; empty on ranks other than 0."""

    def generating(self) -> AbstractContextManager[Generator]:
        """Lend the run's generator for work other than training. Rollouts in flight are paused in the meantime."""

    @property
    def stop_reason(self) -> str | None:
        """Reason to stop as soon as the run can be saved (after a step, or during generation); None to continue."""


def run_of(module: object) -> Run:
    """Return the run behind a Lightning module.

    Raises:
        ConfigurationError: it is not a ScaleRL module.
    """
    if not hasattr(module, "choices"):
        raise ConfigurationError(f"callbacks: they need a ScaleRL module, got {type(module).__name__}")
    return cast(Run, module)
