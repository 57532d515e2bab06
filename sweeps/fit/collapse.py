"""Probability that a run whose reward fell to exactly 0 will never recover."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweeps.fit.constants import COLLAPSE
from sweeps.fit.scaled_points import ScaledPoints


def collapse_probability(seen: ScaledPoints) -> tuple[float, float]:
    """Estimate the probability that a run whose reward fell to 0 stays there, and the compute from which it is 0.

    Where no completion earns a reward, every advantage is 0 and training cannot recover. But a few samples may also all
    fail by chance. Let the last k evaluations be 0. In a dead run they are 0 for certain. In a run that fails by
    chance, a 0 is followed by another 0 with probability q. Laplace's rule estimates q from earlier zeros, of which s
    were followed by another 0 (repeats) and r were not (recoveries). By the same rule, a fall to 0 is a death with
    prior probability d = 1 / (r + 2). With several seeds, k is the smallest over seeds:

        P = d / (d + (1 - d) q^(k - 1)),   d = 1 / (r + 2),   q = (s + 1) / (s + r + 2)

    Returns:
        The probability P, and the compute of the first of the last zeros, as a fraction of the largest evaluated
        compute. P is 0 if fewer than two evaluations at the end are 0, or the run never reached the reward `COLLAPSE`.
    """
    no_collapse = 0.0, np.inf
    if not seen.bounded or seen.z.all():
        return no_collapse
    # k is counted per seed. Repeats and recoveries are counted after merging all seeds by compute, because seeds may be
    # evaluated at different computes.
    k = min(_count_trailing_true(seen.z[seen.seed == seed] == 0) for seed in np.unique(seen.seed))
    high_rows = np.flatnonzero(seen.z >= COLLAPSE)
    if not len(high_rows) or k < 2:
        return no_collapse
    x, index = np.unique(seen.x, return_inverse=True)
    all_zero = np.bincount(index, seen.z != 0) == 0
    first_zero = len(x) - _count_trailing_true(all_zero)
    # Repeats and recoveries are counted from the first high reward up to the final run of zeros.
    zeros_before = all_zero[int(index[high_rows].min()) : first_zero]
    repeats, recoveries = (
        int((zeros_before[:-1] & zeros_before[1:]).sum()),
        int((zeros_before[:-1] & ~zeros_before[1:]).sum()),
    )
    d, q = 1 / (recoveries + 2), (repeats + 1) / (repeats + recoveries + 2)
    return d / (d + (1 - d) * q ** (k - 1)), float(x[first_zero])


def _count_trailing_true(mask: NDArray[np.bool_]) -> int:
    """Count the true values at the end of a mask (n,)."""
    return int(np.cumprod(mask[::-1]).sum())
