"""Clip-Cov: PPO's surrogate without the gradient of a few tokens of high covariance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_scalerl.axes.loss.base import clip_bounds, clipped_loss, clipped_tokens, importance_ratio, masked_inputs
from lightning_scalerl.axes.loss.covariance import CovarianceLoss
from lightning_scalerl.checks import ConfigurationError


class ClipCov(CovarianceLoss):
    """PPO's clipped surrogate, with a loss of 0 for tokens drawn among those whose covariance is in (low, high).

    Source: arXiv 2505.22617, eq. 10-12. The paper does not mention a clip of the ratio. Its code and verl (`clip_cov`)
    clip the ratio like PPO, and the authors' recipe widens the interval to (0, 2), as the defaults here do.

    The docstring of `CovarianceLoss` says when tokens are selected. verl and SkyRL never select tokens that the ratio's
    clip already affects, and use another random generator.

    Args:
        share: share of the step's tokens that are drawn, at least one if any is in the interval.
        low, high: open interval of the covariance.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    """

    configured_as: ClassVar[str] = "clip_cov"

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
        super().__init__(share)
        self.low = low
        self.high = high
        self.clip_low, self.clip_high = clip_bounds(clip_low, clip_high)

    def choose(self, covariance: Tensor, count: int, key: Sequence[int]) -> Tensor:
        """Return the indices of at most `count` tokens with a covariance in the interval, drawn without replacement."""
        candidates = torch.nonzero((covariance > self.low) & (covariance < self.high)).flatten()
        # Draw indices on the host, so that the draw depends neither on the device nor on how rows are padded.
        order = np.random.default_rng(list(key)).permutation(candidates.numel())
        return candidates[torch.from_numpy(order[:count]).to(candidates.device)]

    def per_token(
        self,
        trainer_logprobs: Tensor,
        anchor_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return PPO's loss (R, T); 0 for the tokens `selected`, and outside the mask."""
        trainer_logprobs, anchor_logprobs, advantages = masked_inputs(
            trainer_logprobs, anchor_logprobs, advantages, mask
        )
        ratio = importance_ratio(trainer_logprobs, anchor_logprobs)
        loss = clipped_loss(ratio, advantages, self.clip_low, self.clip_high)
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
        clips = clipped_tokens(ratio, advantages, self.clip_low, self.clip_high)
        return clips if selected is None else clips | selected

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, when tokens are selected, and the bounds of the ratio."""
        return {
            **super().semantics(),
            "ratio_interval": [1 - self.clip_low, 1 + self.clip_high],
            "gradient_of_clipped": "dropped",
        }
