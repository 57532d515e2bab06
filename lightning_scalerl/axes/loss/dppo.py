"""DPPO: importance-weighted REINFORCE that masks tokens by a divergence instead of clipping their ratio."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_scalerl.axes.loss.base import Loss, masked_inputs
from lightning_scalerl.axes.loss.cispo import cispo
from lightning_scalerl.checks import ConfigurationError, positive

DIVERGENCES = ("tv", "kl")
# Added to 1 - p in the binary KL, as in verl and SkyRL: a probability of 1 would make it infinite.
EPS = 1e-8


def binary_divergence(trainer_logprobs: Tensor, anchor_logprobs: Tensor, divergence: str) -> Tensor:
    """Return the divergence of the two distributions over {the sampled token, any other token}.

    "tv" is |p - q|, and "kl" is KL(anchor || trainer), with p the trainer's and q the anchor's probability of the
    token. Shapes: all (R, T). Source: DPPO, arXiv 2602.04879, eq. 13 and 14.
    """
    p, q = trainer_logprobs.exp(), anchor_logprobs.exp()
    if divergence == "tv":
        return (p - q).abs()
    return q * (anchor_logprobs - trainer_logprobs) + (1 - q) * torch.log((1 - q + EPS) / (1 - p + EPS))


def outside_trust_region(
    trainer_logprobs: Tensor,
    anchor_logprobs: Tensor,
    advantages: Tensor,
    divergence: str,
    max_divergence_low: float,
    max_divergence_high: float,
) -> Tensor:
    """Return the tokens whose probability has moved too far in the direction of the advantage (R, T, bool).

    With A > 0 these are the tokens whose probability has risen and whose divergence is above `max_divergence_high`.
    With A < 0 their probability has fallen and their divergence is above `max_divergence_low`. Shapes: all (R, T).
    """
    gap = binary_divergence(trainer_logprobs, anchor_logprobs, divergence)
    rises = (trainer_logprobs > anchor_logprobs) & (gap > max_divergence_high) & (advantages > 0)
    falls = (trainer_logprobs < anchor_logprobs) & (gap > max_divergence_low) & (advantages < 0)
    return rises | falls


class DPPO(Loss):
    """loss_t = -m_t sg(min(r_t, max_ratio)) A_t log pi(y_t), with m_t = 0 outside the trust region, else 1.

    The trust region of the paper, TRL, SkyRL and prime-rl is around the policy that sampled (`correction=behaviour`).
    verl's is around its `old_log_prob`: the trainer before the update (`correction=proximal`), unless `bypass_mode`
    puts the generator's log-probabilities there.

    The bounds and the cap differ between sources. Bounds: 0.2 in prime-rl (`dppo_mask_low`, `dppo_mask_high`) and verl
    (`clip_ratio`), 0.2 and 0.28 in TRL. Cap: 20 in verl's function but 3 in its configuration, 10 in TRL, none in
    prime-rl and SkyRL. The gradient of a token under the cap is the same in all these sources. prime-rl adds a squared
    log-ratio, which is not part of the paper's loss or of this one.

    Args:
        divergence: "tv" or "kl", see `binary_divergence`. Bounds chosen for one of them do not fit the other.
        max_divergence_low: bound where the advantage is negative.
        max_divergence_high: bound where the advantage is positive.
        max_ratio: cap on the importance ratio.
    """

    def __init__(
        self,
        divergence: str = "tv",
        max_divergence_low: float = 0.2,
        max_divergence_high: float = 0.2,
        max_ratio: float = 20.0,
    ) -> None:
        if divergence not in DIVERGENCES:
            raise ConfigurationError(f"loss.divergence: {divergence!r} is unknown; valid: {', '.join(DIVERGENCES)}")
        self.divergence = divergence
        self.max_divergence_low = positive("loss.max_divergence_low", max_divergence_low)
        self.max_divergence_high = positive("loss.max_divergence_high", max_divergence_high)
        self.max_ratio = positive("loss.max_ratio", max_ratio)

    def per_token(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the loss (R, T): `cispo` with the cap, 0 outside the trust region and outside the mask."""
        tables = masked_inputs(trainer_logprobs, anchor_logprobs, advantages, mask)
        return torch.where(self.clipped(*tables, mask), 0.0, cispo(*tables, self.max_ratio))

    @torch.no_grad()
    def clipped(self, trainer_logprobs: Tensor, anchor_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """Return the tokens outside the trust region (R, T, bool), which have no gradient."""
        bounds = self.max_divergence_low, self.max_divergence_high
        return outside_trust_region(trainer_logprobs, anchor_logprobs, advantages, self.divergence, *bounds)

    def semantics(self) -> dict[str, Any]:
        """Return the parameters, plus the bounds of the ratio and whether clipped tokens keep their gradient."""
        return {**super().semantics(), "ratio_interval": [0.0, self.max_ratio], "gradient_of_clipped": "dropped"}
