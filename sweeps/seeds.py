"""The spread of A between seeds of one recipe: measured where there are seeds enough, else borrowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from sweeps.profile import Array, Optimum, Problem

# Three ScaleRL runs lay within +-0.015 (arXiv 2510.13786, A.7).
BORROWED_SEED_SD = 0.015


@dataclass(frozen=True)
class SeedSpread:
    """Spread of A between seeds: sd, its source, and its degrees of freedom (inf: taken as known)."""

    sd: float = BORROWED_SEED_SD
    source: str = "borrowed"
    dof: float = float("inf")

    def quantile(self) -> float:
        """The 97.5% quantile that goes with the degrees of freedom."""
        return 1.959964 if np.isinf(self.dof) else float(stdtrit(self.dof, 0.975))


@dataclass(frozen=True)
class SeedExcess:
    """Asymptotes of one recipe's seeds: sum of squares about their mean, sampling variance of one, dof."""

    squares: float = 0.0
    sampling: float = 0.0
    dof: int = 0


def seed_excess(problem: Problem, best: Optimum, g: Array, rho: Array, share: Array, scale: Array) -> SeedExcess:
    """Per-seed asymptotes at the common shape, about their mean.

    Shapes: g (n,); rho, share, scale (r,): the autocorrelations considered, their weights, a point's variance
    relative to the problem's weights.
    """
    count = len(best.seed_offset)
    if count < 2:
        return SeedExcess()
    w = problem.weight
    residual = problem.reward - best.r0 * (1 - g) - best.a * g
    information = np.bincount(problem.seed, w * g * g, count)
    if (information <= 0).any():
        return SeedExcess()
    offset = np.bincount(problem.seed, w * g * residual, count) / information
    # The information on an offset under each rho; see `sweeps.profile` for the three metrics.
    parts = np.stack([np.bincount(problem.seed, row * g, count) for row in problem.applied(g)])
    mix = np.stack([(1 + rho**2), -(rho**2), -rho], axis=1) / (1 - rho**2)[:, None]
    sampling = float(share @ (scale[:, None] / np.maximum(mix @ parts, 1e-300)).mean(1))
    return SeedExcess(float(((offset - offset.mean()) ** 2).sum()), sampling, count - 1)


def pooled_seed_spread(excesses: Sequence[SeedExcess]) -> SeedSpread | None:
    """Spread between seeds over the recipes given, or None with fewer than two degrees of freedom.

    What the points' noise explains is taken off; but never below what that noise could hide of the published
    spread.
    """
    squares = sum(excess.squares for excess in excesses)
    dof = sum(excess.dof for excess in excesses)
    if dof < 2:
        return None
    sampling = sum(excess.sampling * excess.dof for excess in excesses) / dof
    variance = max(squares / dof - sampling, min(sampling, BORROWED_SEED_SD**2))
    return SeedSpread(float(np.sqrt(variance)), "pooled" if len(excesses) > 1 else "measured", float(dof))
