"""A task of the tests, in a module that imports neither torch nor Lightning: each verifier process imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_scalerl.rollouts.prompt import Prompt
from lightning_scalerl.task.base import Task


class CountingTask(Task):
    """A task whose reward is the share of the digit 1 in the completion. It varies even with random models."""

    trusted = True

    def __init__(self, prompts: int = 11) -> None:
        self.pool = [Prompt(f"p{i}", f"{i}+{i}=", "1", str(i % 2)) for i in range(prompts)]

    def train_prompts(self) -> Sequence[Prompt]:
        return self.pool[:-3]

    def eval_sets(self) -> Mapping[str, Sequence[Prompt]]:
        return {"heldout": self.pool[-3:]}

    def stated(self, completion: str) -> str:
        return completion

    def reward(self, prompt: Prompt, completion: str) -> float:
        return completion.count("1") / max(1, len(completion))

    def is_correct(self, reward: float) -> bool:
        return reward >= 0.1
