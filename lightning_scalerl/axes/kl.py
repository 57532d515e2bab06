"""Axis `kl`: the penalty that keeps the policy near the model that training began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError, not_negative
from lightning_scalerl.choice import MAX_LOG_RATIO, DesignChoice

WHERE = ("loss", "reward")


def k3(trainer_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return exp(d) - d - 1, d = reference - trainer, per token: never negative, unbiased for KL(policy, reference).

    Shapes: all (R, T); unreduced, with gradient. Source: Schulman 2020 (k3); arXiv 2402.03300, eq. 4.
    """
    gap = (reference_logprobs - trainer_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1: while the policy has hardly moved, exp(d) - 1 in floating point loses all of the result, d^2 / 2.
    return torch.expm1(gap) - gap


class KL(DesignChoice):
    """A penalty a token on the policy's distance from the frozen reference, or none.

    Attributes:
        where: "loss" for a term of the loss, "reward" for a deduction from the token's reward; "" for none.
    """

    axis: ClassVar[str] = "kl"
    neutral: ClassVar[Mapping[str, Any] | None] = {"choice": "NoKL"}
    where: str = ""
    aggregation: str | None = None

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the coefficient of each rollout (R,), given its prompt's pass rates (R,)."""
        return torch.zeros_like(pass_rates)


class NoKL(KL):
    """No reference model and no penalty (ScaleRL)."""


class _Penalised(KL):
    """A penalty that acts: a term of the loss, or a deduction from the rewards of tokens."""

    def __init__(self, where: str, aggregation: str | None) -> None:
        if where not in WHERE:
            raise ConfigurationError(f"kl.where: {where!r} is unknown; valid: {', '.join(WHERE)}")
        self.where = where
        self.aggregation = aggregation

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return one line if the penalty is taken from rewards and the estimator does not look at tokens."""
        if self.where == "reward" and not getattr(others["advantage"], "after_forward", False):
            return (
                "kl.where: 'reward' needs advantages a token (advantage=gae): credit within a group is given before "
                "any log-probability is known; use kl.where=loss"
            )
        return None

    def semantics(self) -> dict[str, Any]:
        """Return the parameters with the estimator (k3) and the reference."""
        return {**super().semantics(), "estimator": "k3", "reference": "the model that training began with, frozen"}


class FixedKL(_Penalised):
    """KL penalty with the same coefficient for every token.

    Args:
        coefficient: beta. 0.05 to 0.1 for small models, 0.01 to 0.05 for large ones.
        where: "loss" for a term of the loss, "reward" for a deduction from each token's reward.
        aggregation: name of the aggregation of the term (with "loss"); None for that of the axis `aggregation`.
    """

    def __init__(self, coefficient: float = 0.05, where: str = "loss", aggregation: str | None = None) -> None:
        super().__init__(where, aggregation)
        self.coefficient = not_negative("kl.coefficient", coefficient)

    def coefficients(self, pass_rates: Tensor) -> Tensor:
        """Return the same coefficient for every rollout, (R,)."""
        return torch.full_like(pass_rates, self.coefficient)


class KLByDifficulty(_Penalised):
    """More regularisation on easy prompts, less on hard ones: linear in the prompt's pass rate so far.

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
