"""Effective compute under a decaying learning rate: compute counts less when the rate is low.

    s(C) = integral of min(1, rate / (peak / 2)) dC

A curve with a decaying rate is fitted and forecast in s, so A, B and C_mid are those of a run at the peak rate. Down to
half of the peak rate compute counts in full, because the gain from cooling down makes up for the lower rate. A run that
has cooled down fully no longer improves, however much compute it spends. Between evaluations s is linear. Beyond the
last evaluation ds/dC continues to fall linearly, as over the last evaluations, until it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array, Curve
from sweeps.fit.constants import COOLED

# ds/dC at the end is extrapolated from this many last intervals between evaluations.
_LAST = 3


@dataclass(frozen=True, eq=False)
class Schedule:
    """Mapping of one recipe's compute to effective compute at the peak of the learning rate.

    Attributes:
        compute, at_peak: compute spent and effective compute, increasing from 0, (k,) each; linear in between.
        rate: ds/dC at the end of `compute`, 0 to 1.
        slope: change of ds/dC per unit of compute beyond the end, 0 or less.
    """

    compute: Array
    at_peak: Array
    rate: float
    slope: float

    def effective_compute(self, compute: Array) -> Array:
        """Convert compute spent to effective compute; any shape."""
        last = float(self.compute[-1])
        compute_beyond: Array = np.maximum(np.asarray(compute, dtype=float) - last, 0.0)
        if self.slope < 0:
            # Compute beyond the point where ds/dC reaches 0 does not count.
            compute_beyond = np.minimum(compute_beyond, self.rate / -self.slope)
        at_peak = np.interp(compute, self.compute, self.at_peak)
        return np.asarray(at_peak + self.rate * compute_beyond + 0.5 * self.slope * compute_beyond**2)

    def compute_at(self, counted: Array) -> Array:
        """Convert effective compute back to compute spent, within the observed range; any shape."""
        return np.asarray(np.interp(counted, self.at_peak, self.compute))


def schedule_of(curve: Curve, until: float | None = None) -> Schedule | None:
    """Return the learning-rate schedule of a recipe's longest run, for compute up to `until`.

    None if the learning rate is constant or unknown.
    """
    if curve.at_peak is None:
        return None
    curve_until = curve if until is None else curve.take(curve.compute <= until)
    if not len(curve_until.compute) or curve_until.at_peak is None:
        return None
    longest = curve_until.seed == curve_until.seed[int(curve_until.compute.argmax())]
    compute, first = np.unique(curve_until.compute[longest], return_index=True)
    counted = curve_until.at_peak[longest][first]
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
    """Convert compute to effective compute; None if the rate never falls below half of the peak, or is invalid.

    Warm-up counts in full, because every run has it.

    Args:
        compute: cumulative compute of one run at each logged step, increasing, (n,).
        rate: learning rate of each step, (n,).
        at: cumulative compute to convert, (m,).

    Returns:
        Effective compute, never more than `at`, (m,).
    """
    if not len(rate) or not np.isfinite(rate).all() or (rate < 0).any() or (np.diff(compute) < 0).any():
        return None
    # The peak up to each step, not that of the whole run: every step of the warm-up then counts in full.
    full_rate = COOLED * np.maximum.accumulate(rate)
    weights = np.divide(np.minimum(rate, full_rate), full_rate, out=np.ones(len(rate)), where=full_rate > 0)
    if weights.min() >= 1:
        return None
    counted = np.cumsum(weights * np.diff(compute, prepend=0.0))
    extrapolated = weights[-1] * np.maximum(at - compute[-1], 0.0)
    return np.asarray(np.interp(at, np.append(0.0, compute), np.append(0.0, counted)) + extrapolated)
