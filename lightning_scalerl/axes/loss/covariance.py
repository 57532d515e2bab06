"""Losses that treat a few tokens differently, selected by the covariance of log-probability and advantage."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.loss.base import Loss, per_token_kl_error
from lightning_scalerl.checks import ConfigurationError


class CovarianceLoss(Loss):
    """Loss that treats some tokens differently, selected by their covariance (arXiv 2505.22617).

    Tokens are selected once per step over the whole batch, by the log-probabilities in the ratio's denominator (the
    anchor). verl and SkyRL select in every micro-batch and pass, by the current policy's log-probabilities. The two
    ways agree in a step of one pass and one micro-batch with `correction=proximal`, where the current policy is the
    anchor.

    Args:
        share: share of the step's tokens that are selected, at least one.

    Attributes:
        configured_as: name of the choice in configurations, for errors.
    """

    configured_as: ClassVar[str]

    def __init__(self, share: float) -> None:
        self.share = check_share(share)

    @abstractmethod
    def choose(self, covariance: Tensor, count: int, key: Sequence[int]) -> Tensor:
        """Return the indices (at most `count`) of the selected tokens.

        Args:
            covariance: covariance of each token in the loss, (N,).
            count: number of tokens that `share` allows.
            key: seed of random choices; it differs in each step.
        """

    def select(self, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor, key: Sequence[int]) -> Tensor:
        """Return the tokens (R, T, bool) that the loss treats differently."""
        inside = mask > 0
        covariance = covariances(anchor_logprobs[inside], advantages[inside])
        return token_table(self.choose(covariance, selected_count(self.share, covariance.numel()), key), mask)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if axis `kl` gives additional advantages, which the selection would ignore."""
        return per_token_kl_error(f"{self.configured_as} selects tokens by the advantages of the task", others)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, and when tokens are selected."""
        return {
            **super().semantics(),
            "selection": "once per step, over the whole batch, by the anchor's log-probabilities",
        }


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log pi_i - mean log pi) (A_i - mean A) of each token, in float64. Shapes: all (N,).

    The mean of the result is the covariance, to which the change of the policy's entropy is proportional.
    Source: arXiv 2505.22617, eq. 10.
    """
    # Compute in float64: with FP32's rounding errors, the selection would depend on the order in which a device adds.
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def selected_count(share: float, tokens: int) -> int:
    """Return the number of tokens to select: `share * tokens` rounded down, but at least 1 if there is a token."""
    return min(tokens, max(1, int(share * tokens)))


def check_share(value: float) -> float:
    """Return `value` if it is above 0 and at most 1.

    Raises:
        ConfigurationError: otherwise.
    """
    if not 0 < value <= 1:
        raise ConfigurationError(f"loss.share: {value!r} must be above 0 and at most 1, a share of the step's tokens")
    return value


def token_table(selected: Tensor, mask: Tensor) -> Tensor:
    """Return a table (R, T, bool) that is True at the tokens `selected`.

    `selected` holds indices of tokens, counted row by row within the mask.
    """
    flags = torch.zeros(int((mask > 0).sum()), dtype=torch.bool, device=mask.device)
    flags[selected] = True
    table = torch.zeros_like(mask, dtype=torch.bool)
    table[mask > 0] = flags
    return table
