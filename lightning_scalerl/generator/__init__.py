"""Generators: prompts and weights in, rollouts out."""

from lightning_scalerl.generator.base import FinishedRollout, Generator, GroupRequest, StepReport

__all__ = ["FinishedRollout", "Generator", "GroupRequest", "StepReport"]
