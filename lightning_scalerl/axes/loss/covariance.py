"""Covariance of log-probability and advantage per token, by which `clip_cov` and `kl_cov` select tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scalerl.checks import ConfigurationError


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log pi_i - mean log pi) (A_i - mean A) of each token, in float64. Shapes: all (N,).

    The mean of the result is the covariance, to which the change of the policy's entropy is proportional.
    Source: arXiv 2505.22617, eq. 10.
    """
    # Computed in float64, because the selection must not depend on the order in which a device adds.
    logprobs, advantages = logprobs.double(), advantages.double()
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def share_of(share: float, tokens: int) -> int:
    """Return the number of tokens to select: the whole part of `share * tokens`, but at least one if there are any."""
    return min(tokens, max(1, int(share * tokens)))


def valid_share(value: float) -> float:
    """Return a share of the tokens if it is valid.

    Raises:
        ConfigurationError: it is not above 0 and at most 1.
    """
    if not 0 < value <= 1:
        raise ConfigurationError(f"loss.share: {value!r} must be above 0 and at most 1, a share of the step's tokens")
    return value


def scattered(chosen: Tensor, mask: Tensor) -> Tensor:
    """Return a table (R, T, bool) that is True at the tokens `chosen`, numbered over the mask's tokens row by row."""
    flags = torch.zeros(int((mask > 0).sum()), dtype=torch.bool, device=mask.device)
    flags[chosen] = True
    table = torch.zeros_like(mask, dtype=torch.bool)
    table[mask > 0] = flags
    return table
