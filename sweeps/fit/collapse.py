"""The probability that a run whose reward came down to exactly 0 has died."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweeps.fit.constants import COLLAPSE
from sweeps.fit.seen import Seen


def death(seen: Seen) -> tuple[float, float]:
    """Return how likely a run that came down to no reward at all stays there, and the compute where it began.

    Where no completion earns anything every advantage is 0, and nothing leads out again; but a few samples may all fail
    by chance. Of k evaluations in a row at 0, the last there are, a dead run shows k for certain; one that fails by
    chance shows the next whenever it has shown the last, which it did s times of s + r before (Laplace's rule, and one
    death for every r recoveries). Of several seeds k is the least:

        P = d / (d + (1 - d) q^(k - 1)),   d = 1 / (r + 2),   q = (s + 1) / (s + r + 2)

    Returns:
        The probability and the compute; 0 for fewer than two evaluations at 0, or a run that never was at `COLLAPSE`.
    """
    never = 0.0, np.inf
    if not seen.bounded or seen.z.all():
        return never
    # Of every seed, and of the seeds together, which may be evaluated at other computes each.
    k = min(_trailing(seen.z[seen.seed == seed] == 0) for seed in np.unique(seen.seed))
    high = np.flatnonzero(seen.z >= COLLAPSE)
    if not len(high) or k < 2:
        return never
    x, of = np.unique(seen.x, return_inverse=True)
    none = np.bincount(of, seen.z != 0) == 0
    gone = len(x) - _trailing(none)
    before = none[int(of[high].min()) : gone]
    stayed, left = int((before[:-1] & before[1:]).sum()), int((before[:-1] & ~before[1:]).sum())
    d, q = 1 / (left + 2), (stayed + 1) / (stayed + left + 2)
    return d / (d + (1 - d) * q ** (k - 1)), float(x[gone])


def _trailing(mask: NDArray[np.bool_]) -> int:
    """Count how many at the end of a mask (n,) are true."""
    return int(np.cumprod(mask[::-1]).sum())
