"""Probability that a run whose reward fell to exactly 0 will never recover."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweeps.fit.constants import COLLAPSE
from sweeps.fit.seen import Seen


def death(seen: Seen) -> tuple[float, float]:
    """Return the probability that a run whose reward fell to 0 stays there, and the compute at which that began.

    Where no completion earns a reward, every advantage is 0 and training cannot recover. But a few samples may also all
    fail by chance. Let the last k evaluations be 0. A dead run shows this with certainty. In a run that fails by
    chance, a 0 is followed by another with probability q, estimated from s repeats and r recoveries before (Laplace's
    rule). The prior probability d of death counts one death per r recoveries. With several seeds, k is the smallest:

        P = d / (d + (1 - d) q^(k - 1)),   d = 1 / (r + 2),   q = (s + 1) / (s + r + 2)

    Returns:
        The probability and the compute; probability 0 with fewer than two evaluations at 0, or if the run never reached
        `COLLAPSE`.
    """
    alive = 0.0, np.inf
    if not seen.bounded or seen.z.all():
        return alive
    # k is counted per seed. All seeds are also merged by compute, because they may be evaluated at different computes.
    k = min(_trailing(seen.z[seen.seed == seed] == 0) for seed in np.unique(seen.seed))
    high = np.flatnonzero(seen.z >= COLLAPSE)
    if not len(high) or k < 2:
        return alive
    x, index = np.unique(seen.x, return_inverse=True)
    all_zero = np.bincount(index, seen.z != 0) == 0
    start = len(x) - _trailing(all_zero)
    # Repeats and recoveries are counted from the first high reward up to the final run of zeros.
    earlier = all_zero[int(index[high].min()) : start]
    stayed, recovered = int((earlier[:-1] & earlier[1:]).sum()), int((earlier[:-1] & ~earlier[1:]).sum())
    d, q = 1 / (recovered + 2), (stayed + 1) / (stayed + recovered + 2)
    return d / (d + (1 - d) * q ** (k - 1)), float(x[start])


def _trailing(mask: NDArray[np.bool_]) -> int:
    """Count the true values at the end of a mask (n,)."""
    return int(np.cumprod(mask[::-1]).sum())
