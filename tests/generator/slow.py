"""A slow scripted generator that can run in another process, for tests of fleets."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scalerl.generator.base import GroupRequest, StepReport
from tests.scripted import ScriptedGenerator


@dataclass
class Size:
    """A model's configuration."""

    width: int = 2
    vocab_size: int = 16


class Weights(nn.Module):
    """A model with a single parameter."""

    def __init__(self, config: Size) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.width))

    def tie_weights(self) -> None:
        """Do nothing: no parameters are tied."""


def script(request: GroupRequest, index: int) -> list[int]:
    return [2] * (1 + (request.random_key[-1] * 5 + index * 3) % 7)


class SlowGenerator(ScriptedGenerator):
    """Takes a random time of up to `most_s` for every token and every publish."""

    def __init__(self, model: nn.Module, *, slots: int, most_s: float, seed: int = 0, **arguments: Any) -> None:
        super().__init__(script, slots)
        self.most_s = most_s
        self._random = random.Random(seed)
        self._weights: dict[str, Tensor] = {}

    def step(self) -> StepReport:
        self._sleep()
        return super().step()

    def publish(self, weights: dict[str, Tensor], version: int, recompute_kv: bool = False) -> None:
        self._sleep()
        # Every weight equals the version number, so weights of another version are detected here.
        if float(weights["weight"][0]) != version:
            raise ValueError(f"weights of {float(weights['weight'][0])} published as version {version}")
        super().publish(weights, version, recompute_kv)

    can_score = True

    def score(self, prompt_tokens: Sequence[int], tokens: Sequence[int]) -> Tensor:
        return torch.tensor([float(token) for token in tokens])

    def _sleep(self) -> None:
        time.sleep(self._random.uniform(0, self.most_s))


def weights_of(version: int) -> dict[str, Tensor]:
    return {"weight": torch.full((2,), float(version))}
