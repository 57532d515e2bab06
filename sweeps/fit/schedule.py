"""Effective compute under a decaying learning rate: compute counts less once the rate has come down.

    s(C) = integral of min(1, rate / (peak / 2)) dC

A curve whose rate decays is fitted, and forecast, in s, and its A, B and C_mid are those that it would have at the peak
rate. Down to half of the peak compute counts in full, for cooling down brings about what the lower rate costs; a run
that has cooled down stands still, wherever its compute goes. Between evaluations s is a straight line. Beyond the last
one what compute counts goes on falling as it last did, in a straight line to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array, Curve
from sweeps.fit.constants import COOLED

# Intervals between evaluations that tell how the rate falls at the end.
_LAST = 3


@dataclass(frozen=True, eq=False)
class Schedule:
    """Mapping of one recipe's compute to effective compute at the peak of the learning rate.

    Attributes:
        compute, at_peak: compute spent and its equivalent, increasing from 0, (k,) each; straight lines in between.
        rate: equivalent of a unit of compute at the end of `compute`, 0 to 1.
        slope: change of that rate with compute from there on, 0 or less.
    """

    compute: Array
    at_peak: Array
    rate: float
    slope: float

    def count(self, compute: Array) -> Array:
        """Convert compute spent to its equivalent at the peak rate; any shape."""
        last = float(self.compute[-1])
        # The rate falls to 0 after so much more, or never does.
        more: Array = np.maximum(np.asarray(compute, dtype=float) - last, 0.0)
        if self.slope < 0:
            more = np.minimum(more, self.rate / -self.slope)
        within = np.interp(compute, self.compute, self.at_peak)
        return np.asarray(within + self.rate * more + 0.5 * self.slope * more**2)

    def compute_at(self, counted: Array) -> Array:
        """Convert peak-rate equivalents back to compute spent, within what the runs have shown; any shape."""
        return np.asarray(np.interp(counted, self.at_peak, self.compute))


def schedule_of(curve: Curve, until: float | None = None) -> Schedule | None:
    """Return the schedule of a recipe's longest run, up to a compute; None if the rate is constant or not known."""
    if curve.at_peak is None:
        return None
    seen = curve if until is None else curve.take(curve.compute <= until)
    if not len(seen.compute) or seen.at_peak is None:
        return None
    longest = seen.seed == seen.seed[int(seen.compute.argmax())]
    compute, first = np.unique(seen.compute[longest], return_index=True)
    counted = seen.at_peak[longest][first]
    if compute[0] > 0:
        compute, counted = np.concatenate([[0.0], compute]), np.concatenate([[0.0], counted])
    if len(compute) < 2:
        return None
    rates = np.diff(counted) / np.diff(compute)
    middle = 0.5 * (compute[1:] + compute[:-1])
    slope = float(np.polyfit(middle[-_LAST:], rates[-_LAST:], 1)[0]) if len(rates) >= _LAST else 0.0
    slope = min(slope, 0.0)
    rate = float(np.clip(rates[-1] + slope * (compute[-1] - middle[-1]), 0.0, 1.0))
    return Schedule(compute, counted, rate, slope if rate > 0 else 0.0)


def at_peak_rate(compute: Array, rate: Array, at: Array) -> Array | None:
    """Convert compute to its equivalent at the peak of the learning rate; None if the rate stays near it or is invalid.

    Warm-up counts in full: what it costs belongs to every run alike.

    Args:
        compute: cumulative compute of one run at each logged step, increasing, (n,).
        rate: learning rate of each step, (n,).
        at: cumulative compute to convert, (m,).

    Returns:
        Equivalent compute, never more than `at`, (m,).
    """
    if not len(rate) or not np.isfinite(rate).all() or (rate < 0).any() or (np.diff(compute) < 0).any():
        return None
    # The peak so far, not of the whole run: during warm-up every step is at its peak and so counts in full.
    enough = COOLED * np.maximum.accumulate(rate)
    counts = np.divide(np.minimum(rate, enough), enough, out=np.ones(len(rate)), where=enough > 0)
    if counts.min() >= 1:
        return None
    counted = np.cumsum(counts * np.diff(compute, prepend=0.0))
    beyond = counts[-1] * np.maximum(at - compute[-1], 0.0)
    return np.asarray(np.interp(at, np.append(0.0, compute), np.append(0.0, counted)) + beyond)
