"""Axis `kl`: the penalty that keeps the policy close to the initial model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import MAX_LOG_RATIO, DesignChoice
from lightning_scalerl.checks import ConfigurationError, not_negative

WHERE = ("loss", "reward")


def k3(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate exp(d) - d - 1 of each token, with d = reference - trainer log-probability.

    It is never negative, and unbiased for KL(policy, reference). Shapes: all (R, T); unreduced, with gradient.
    Source: Schulman 2020 (k3); arXiv 2402.03300, eq. 4.
    """
    gap = (reference_logprobs - trainer_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # The result is about d^2 / 2. For the tiny d of an early policy, exp(d) - 1 would lose it to rounding.
    return torch.expm1(gap) - gap


class KL(DesignChoice):
    """An optional penalty per token on the policy's distance from the frozen reference model.

    Attributes:
        where: "loss" for a term of the loss, "reward" for a deduction from the token's reward, "" for no penalty.
    """

    axis: ClassVar[str] = "kl"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoKL"}
    where: str = ""
    aggregation: str | None = None

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the coefficient of each rollout (R,) from the mean pass rate of its prompt so far (R,)."""
        return torch.zeros_like(pass_rates)


class NoKL(KL):
    """No reference model and no penalty (ScaleRL)."""


class _Penalised(KL):
    """A penalty as a term of the loss or as a deduction from token rewards."""

    def __init__(self, where: str, aggregation: str | None) -> None:
        if where not in WHERE:
            raise ConfigurationError(f"kl.where: {where!r} is unknown; valid: {', '.join(WHERE)}")
        self.where = where
        self.aggregation = aggregation

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if the penalty is deducted from rewards and advantages are not per token."""
        if self.where == "reward" and not getattr(others["advantage"], "after_forward", False):
            return (
                "kl.where: 'reward' needs advantages a token (advantage=gae): credit within a group is given before "
                "any log-probability is known; use kl.where=loss"
            )
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus the estimator (k3) and the reference model."""
        return {**super().semantics(), "estimator": "k3", "reference": "the model that training began with, frozen"}


class FixedKL(_Penalised):
    """KL penalty with the same coefficient for every token.

    Args:
        coefficient: beta. 0.05 to 0.1 for small models, 0.01 to 0.05 for large ones.
        where: "loss" for a term of the loss, "reward" for a deduction from each token's reward.
        aggregation: name of the term's aggregation (with "loss"); None for the one of axis `aggregation`.
    """

    def __init__(self, coefficient: float = 0.05, where: str = "loss", aggregation: str | None = None) -> None:
        super().__init__(where, aggregation)
        self.coefficient = not_negative("kl.coefficient", coefficient)

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the same coefficient for every rollout, (R,)."""
        return torch.full_like(pass_rates, self.coefficient)


class KLByDifficulty(_Penalised):
    """KL penalty that is larger on easy prompts than on hard ones: linear in the prompt's pass rate so far.

    Args:
        easy: coefficient at a pass rate of 1.
        hard: coefficient at a pass rate of 0.
        where, aggregation: as `FixedKL`.
    """

    def __init__(
        self, easy: float = 0.1, hard: float = 0.01, where: str = "loss", aggregation: str | None = None
    ) -> None:
        super().__init__(where, aggregation)
        self.easy = not_negative("kl.easy", easy)
        self.hard = not_negative("kl.hard", hard)

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return coefficients (R,) between `hard` and `easy`, linear in the pass rate."""
        return self.hard + (self.easy - self.hard) * pass_rates
