"""Axis `entropy`: a bonus on the policy's entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.checks import not_negative


class Entropy(DesignChoice):
    """An optional bonus per token: a coefficient times the entropy of the distribution the token was sampled from.

    Attributes:
        acts: whether there is a bonus. If so, entropies need a gradient.
    """

    axis: ClassVar[str] = "entropy"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoEntropyBonus"}
    acts: ClassVar[bool] = True
    aggregation: str | None = None

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the coefficient of each rollout (R,) from the mean pass rate of its prompt so far (R,)."""
        return torch.zeros_like(pass_rates)


class NoEntropyBonus(Entropy):
    """No entropy bonus, as in ScaleRL."""

    acts: ClassVar[bool] = False


class FixedEntropy(Entropy):
    """Entropy bonus with the same coefficient for every token.

    Args:
        coefficient: weight of the entropy, in nats, in the loss; 0.01 in PPO (arXiv 1707.06347, c_2).
        aggregation: name of the term's aggregation; None for the one of axis `aggregation`.
    """

    def __init__(self, coefficient: float = 0.01, aggregation: str | None = None) -> None:
        self.coefficient = not_negative("entropy.coefficient", coefficient)
        self.aggregation = aggregation

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the same coefficient for every rollout, (R,)."""
        return torch.full_like(pass_rates, self.coefficient)


class EntropyByDifficulty(Entropy):
    """Entropy bonus that is larger on easy prompts than on hard ones: linear in the prompt's pass rate so far.

    Args:
        easy: coefficient at a pass rate of 1.
        hard: coefficient at a pass rate of 0.
        aggregation: name of the term's aggregation; None for the one of axis `aggregation`.
    """

    def __init__(self, easy: float = 0.02, hard: float = 0.0, aggregation: str | None = None) -> None:
        self.easy = not_negative("entropy.easy", easy)
        self.hard = not_negative("entropy.hard", hard)
        self.aggregation = aggregation

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return coefficients (R,) between `hard` and `easy`, linear in the pass rate."""
        return self.hard + (self.easy - self.hard) * pass_rates
