"""The input of the posterior: a recipe's evaluations without units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array
from sweeps.fit.constants import EXACT, LEAST_SD


@dataclass(frozen=True, eq=False)
class ScaledPoints:
    """A recipe's evaluations, rescaled to be without units.

    Attributes:
        x: compute as a fraction of the largest evaluated compute, increasing, (n,).
        z: reward on a scale of width 1, (n,).
        seed: index of the seed, (n,).
        variance: sampling variance, (n,); None if unknown.
        bounded: whether rewards are in [0, 1].
    """

    x: Array
    z: Array
    seed: NDArray[np.intp]
    variance: Array | None
    bounded: bool

    @cached_property
    def seeds(self) -> int:
        """Number of seeds among the evaluations."""
        return len(np.unique(self.seed))

    @cached_property
    def roughness(self) -> float:
        """Standard deviation of a point about its neighbours, from the median second difference within seeds."""
        differences = []
        for s in np.unique(self.seed):
            z = self.z[self.seed == s]
            if len(z) >= 3:
                # The second difference of independent errors has 1 + 4 + 1 times the variance of one error.
                differences.append((z[:-2] - 2 * z[1:-1] + z[2:]) / np.sqrt(6))
        absolute = np.abs(np.concatenate(differences)) if differences else np.zeros(1)
        rms = float(np.sqrt(np.mean(absolute**2)))
        # 1.4826 x the median of absolute values is the standard deviation of a normal (its 75% quantile is 0.6745).
        spread = max(1.4826 * float(np.median(absolute)), 0.3 * rms)
        levels = np.unique(self.z)
        # Rewards of exactly 0 or 1 (no or every completion passes) repeat on any scale: leave them out.
        inner_rewards = self.z[(self.z > 0) & (self.z < 1)] if self.bounded else self.z
        if len(levels) == 1:
            spread = max(spread, LEAST_SD)
        elif not len(inner_rewards) or len(np.unique(inner_rewards)) < 0.6 * len(inner_rewards):
            # Rewards on a coarse scale repeat without being precise. The smallest step between them is one rollout.
            spread = max(spread, 0.7 * rms, 0.5 * float(np.diff(levels).min()))
        if self.variance is not None:
            spread = max(spread, 0.5 * float(np.sqrt(np.median(self.variance))))
        return max(spread, EXACT)
