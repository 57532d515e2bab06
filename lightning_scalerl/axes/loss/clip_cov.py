"""Clip-Cov: PPO's surrogate without the gradient of a few tokens of high covariance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scalerl.axes.choice import DesignChoice
from lightning_scalerl.axes.loss.base import (
    Loss,
    clip_bounds,
    credited,
    importance_ratio,
    one_kind_of_advantage,
    pessimistic,
    pessimistic_clips,
)
from lightning_scalerl.axes.loss.covariance import covariances, scattered, share_of, valid_share
from lightning_scalerl.checks import ConfigurationError


class ClipCov(Loss):
    """PPO's clipped surrogate, with a loss of 0 for tokens drawn among those whose covariance is in (low, high).

    Source: arXiv 2505.22617, eq. 10-12. The paper states no clip of the ratio. Its code and verl (`clip_cov`) keep
    PPO's, and the authors' recipe opens it to (0, 2): `clip_low=1`, `clip_high=1`, the defaults here.

    Tokens are selected once per step over the whole batch, by the log-probabilities of the ratio's anchor. verl and
    SkyRL select in every micro-batch and pass, by those of the current policy, and leave out tokens that the ratio's
    clip has caught. Both agree, up to the random draw, for a step of one pass and one micro-batch with
    `correction=proximal`, where the current policy is the anchor.

    Args:
        share: share of the step's tokens that are drawn, at least one if any is in the interval.
        low, high: open interval of the covariance.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """

    def __init__(
        self,
        share: float = 2e-4,
        low: float = 1.0,
        high: float = 5.0,
        clip_low: float = 1.0,
        clip_high: float = 1.0,
    ) -> None:
        if not low < high:
            raise ConfigurationError(f"loss.low: {low!r} must be below loss.high, {high!r}")
        self.share = valid_share(share)
        self.low = low
        self.high = high
        self.clip_low, self.clip_high = clip_bounds(clip_low, clip_high)

    def conflict(self, others: Mapping[str, DesignChoice]) -> str | None:
        """Return a one-line error if axis `kl` gives advantages of its own, which the selection would ignore."""
        return one_kind_of_advantage("clip_cov selects tokens by the advantages of the task", others)

    def select(self, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor, key: Sequence[int]) -> Tensor:
        """Return the tokens that are drawn (R, T, bool), uniformly and without replacement."""
        inside = mask > 0
        covariance = covariances(anchor_logprobs[inside], advantages[inside])
        candidates = torch.nonzero((covariance > self.low) & (covariance < self.high)).flatten()
        # Drawn on the host, by number, so that the draw depends neither on the device nor on how rows are padded.
        order = np.random.default_rng(list(key)).permutation(candidates.numel())
        drawn = torch.from_numpy(order[: share_of(self.share, covariance.numel())]).to(candidates.device)
        return scattered(candidates[drawn], mask)

    def per_token(
        self,
        trainer_logprobs: Tensor,
        anchor_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return PPO's loss (R, T); 0 for the tokens `selected`, and outside the mask."""
        trainer_logprobs, anchor_logprobs, advantages = credited(trainer_logprobs, anchor_logprobs, advantages, mask)
        ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
        loss = pessimistic(ratio, advantages, self.clip_low, self.clip_high)
        return loss if selected is None else torch.where(selected, 0.0, loss)

    def clipped(
        self,
        trainer_logprobs: Tensor,
        anchor_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens without a gradient (R, T, bool): clipped by their ratio, or `selected`."""
        ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
        clips = pessimistic_clips(ratio, advantages, self.clip_low, self.clip_high)
        return clips if selected is None else clips | selected

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, the bounds of the ratio, and when tokens are selected."""
        return {
            **super().semantics(),
            "ratio_interval": [1 - self.clip_low, 1 + self.clip_high],
            "gradient_of_clipped": "dropped",
            "selection": "once per step, over the whole batch, by the anchor's log-probabilities",
        }
