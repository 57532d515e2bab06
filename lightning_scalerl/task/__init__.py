"""Tasks: prompts with a verifier."""

from lightning_scalerl.task.base import Task

__all__ = ["Task"]
