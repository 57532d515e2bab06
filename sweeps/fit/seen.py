"""A recipe's evaluations without units: the input of the posterior."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Array
from sweeps.fit.constants import EXACT, LEAST_SD


@dataclass(frozen=True, eq=False)
class Seen:
    """A recipe's evaluations without units.

    Attributes:
        x: compute in windows, increasing, (n,).
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
                # A second difference of independent errors has 1 + 4 + 1 times their variance.
                differences.append((z[:-2] - 2 * z[1:-1] + z[2:]) / np.sqrt(6))
        every = np.abs(np.concatenate(differences)) if differences else np.zeros(1)
        mean_square = float(np.sqrt(np.mean(every**2)))
        # 1.4826 x the median of absolute values is the standard deviation of a normal (its 75% quantile is 0.6745).
        spread = max(1.4826 * float(np.median(every)), 0.3 * mean_square)
        levels = np.unique(self.z)
        # Rewards of exactly 0 or 1 (never or always passing) repeat regardless of the step between rewards: leave
        # them out.
        between = self.z[(self.z > 0) & (self.z < 1)] if self.bounded else self.z
        if len(levels) == 1:
            spread = max(spread, LEAST_SD)
        elif not len(between) or len(np.unique(between)) < 0.6 * len(between):
            # Coarse rewards repeat themselves, which does not make them precise: their smallest step is one rollout.
            spread = max(spread, 0.7 * mean_square, 0.5 * float(np.diff(levels).min()))
        if self.variance is not None:
            spread = max(spread, 0.5 * float(np.sqrt(np.median(self.variance))))
        return max(spread, EXACT)
