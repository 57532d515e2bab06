"""Forecasts from a fit: the runs' reward at given compute with a 95% interval, under any verdict.

They come from the outlook (`sweeps.fit.forecast`), which averages laws by how well each predicts. A verdict decides
whether A is identifiable, not whether the curve can be forecast. If another family than the sigmoid was fitted, or A
was fixed, the laws are that family and "no law".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array
from sweeps.fit.constants import FARTHEST, SETTLED
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.forecast import DRAWS, generator
from sweeps.fit.seeds import SeedSpread

# Beyond this many times the window's end a forecast is useless for planning; the source extrapolates 2 to 3 times.
FAR = 100.0


@dataclass(frozen=True)
class Band:
    """Median reward with a 95% prediction interval; arrays of the same shape."""

    value: Array
    low: Array
    high: Array

    def interval(self, at: int = 0) -> Interval:
        """Return the interval at one index of a band."""
        return Interval(float(self.value[at]), float(self.low[at]), float(self.high[at]))


def readable(fit: Fit) -> bool:
    """Return whether the fit has enough points to forecast from."""
    return fit.lookout is not None


def paths(fit: Fit, compute: Array | Sequence[float]) -> Array:
    """Return draws of the runs' mean curve; (m,) in the curve's unit -> (K, m) in reward.

    Raises:
        ValueError: there are too few points to forecast from.
    """
    if fit.outlook is None:
        raise ValueError(f"recipe {fit.recipe!r} has no fit to predict from: {fit.verdict}, {fit.reason}")
    return fit.outlook.at(np.atleast_1d(np.asarray(compute, dtype=float)))


def apart(x: Array) -> Array:
    """Return the share of the final offset between seeds that has built up at compute x, in windows; 0 at 0; (n,)."""
    return np.asarray(-np.expm1(-x / SETTLED))


def paths_over_seeds(fit: Fit, compute: Array | Sequence[float]) -> Array:
    """Return draws of the recipe's mean over all possible seeds, not only the given ones; shapes as for `paths`."""
    draws = paths(fit, compute)
    assert fit.window is not None
    grown = apart(np.atleast_1d(np.asarray(compute, dtype=float)) / fit.window[1])
    result: Array = np.clip(draws + seed_offsets(fit)[:, None] * grown, *fit.bounds)
    return result


def predict(fit: Fit, compute: Array | Sequence[float], observations: int = 0) -> Band:
    """Predict the runs' reward at each compute, pointwise.

    Args:
        fit: a fit of any verdict that is `readable`.
        compute: where to predict, 0 or more, in the curve's unit, (m,).
        observations: 0 for the curve itself; k to include the noise of a mean of k evaluations around that compute,
            over all seeds.

    Raises:
        ValueError: there are too few points to forecast from.
    """
    draws = paths(fit, compute)
    if observations:
        draws = draws + _noise(fit, observations, len(draws))
    return _band(fit, draws)


def predict_mean(fit: Fit, compute: Array | Sequence[float]) -> tuple[float, float, float]:
    """Predict the mean reward over evaluations at the given computes (one entry each): value, low and high at 95%.

    Raises:
        ValueError: there are too few points to forecast from.
    """
    at = np.atleast_1d(np.asarray(compute, dtype=float))
    draws = paths(fit, at).mean(1, keepdims=True)
    band = _band(fit, draws + _noise(fit, len(at), len(draws)))
    return float(band.value[0]), float(band.low[0]), float(band.high[0])


def _noise(fit: Fit, observations: int, count: int) -> Array:
    """Draw the noise of a mean of `observations` evaluations about each of `count` curves; (count, 1)."""
    rng = generator(fit.recipe, "noise")
    assert fit.outlook is not None
    noise: Array = (fit.outlook.noise / observations**0.5 * rng.standard_normal(count))[:, None]
    return noise


def spacing(fit: Fit) -> float:
    """Return the median distance between evaluations of one run in the window, in compute."""
    assert fit.window is not None
    curve = fit.curve
    inside = (curve.compute >= fit.window[0]) & (curve.compute <= fit.window[1])
    steps = [np.diff(np.unique(curve.compute[inside & (curve.seed == label)])) for label in np.unique(curve.seed)]
    return float(np.median(np.concatenate(steps)))


def _band(fit: Fit, draws: Array) -> Band:
    """Return median and 95% quantiles over draws, clipped to the reward's bounds. Shapes: (K, m) -> (m,)."""
    low, value, high = np.quantile(draws, [0.025, 0.5, 0.975], axis=0)
    return Band(*(np.clip(v, *fit.bounds) for v in (value, low, high)))


def support(fit: Fit) -> float | None:
    """Return the largest compute, in the curve's unit, up to which the fit may be read; None if it may not be read."""
    if fit.window is None or not readable(fit):
        return None
    return (FAR if fit.identifiable else FARTHEST) * fit.window[1]


def within(fit: Fit, compute: float) -> bool:
    """Return whether the fit may be read at this compute, see `support`."""
    limit = support(fit)
    return limit is not None and compute <= limit * (1 + 1e-9)


def reward_at(fit: Fit, compute: float) -> Interval | None:
    """Return the runs' reward at a compute with its 95% interval; None where the fit may not be read."""
    return predict(fit, [compute]).interval() if within(fit, compute) else None


def total_draws(fit: Fit, new_run: bool = False, spread: SeedSpread | None = None) -> Array:
    """Return draws of a recipe's A over all possible seeds, or of a new run's A; (K,), in reward.

    The draws cover all laws, whether or not A is identifiable. The mean over the given seeds differs from the recipe's
    A by sd / sqrt(seeds), and a new run from the recipe's A by a further sd.

    Args:
        fit: fit of one recipe.
        new_run: draw the A of a new run instead of the recipe's.
        spread: spread between seeds; None for the fit's own (the spread between paired recipes is smaller).

    Raises:
        ValueError: there are too few points.
    """
    total: Array = asymptote_draws(fit) + seed_offsets(fit, new_run, spread)
    return total


def seed_offsets(fit: Fit, new_run: bool = False, spread: SeedSpread | None = None) -> Array:
    """Return draws of the offset of the given seeds' mean, or of a new run, from the recipe's A, see `total_draws`."""
    rng = generator(fit.recipe, "seeds")
    spread = spread or fit.seed_spread
    noise = rng.standard_normal(DRAWS) if np.isinf(spread.dof) else rng.standard_t(spread.dof, DRAWS)
    offsets: Array = spread.sd * np.sqrt(1 / max(fit.informing, 1) + new_run) * noise
    return offsets


def asymptote_draws(fit: Fit) -> Array:
    """Return draws of A for the given runs: as `total_draws` but without the spread between seeds. (K,).

    Raises:
        ValueError: there are too few points.
    """
    if fit.outlook is None:
        raise ValueError(f"recipe {fit.recipe!r} has no draws: {fit.verdict}")
    if fit.verdict in ("flat", "decreasing") and fit.window is not None:
        # Nothing rises, so there is no ceiling to extrapolate to: take the forecast at twice the compute.
        return fit.outlook.at(np.array([2 * fit.window[1]]))[:, 0]
    return fit.outlook.ceiling


def quantiles(values: Array, beyond: float = 0.025) -> Interval:
    """Return median and bounds of draws (K,), with the share `beyond` outside on either side; None if infinite."""
    # This method returns one of the draws: interpolating with infinity would give NaN.
    low, value, high = np.quantile(values, [beyond, 0.5, 1 - beyond], method="inverted_cdf")
    return Interval(*(float(v) if np.isfinite(v) else None for v in (value, low, high)))


def chance(p: float) -> str:
    """Format a probability; `P > 0.99` and `P < 0.01` at the ends, because 2000 draws cannot resolve more."""
    return f"P = {p:.2f}" if 0.01 <= p <= 0.99 else "P > 0.99" if p > 0.5 else "P < 0.01"


# Number of values at which a confidence curve is computed.
_LOOKS = 125


def fitted(fit: Fit, compute: Array) -> Array:
    """Return the fitted line at computes at the peak learning rate. Shapes: (n,) -> (n,).

    Raises:
        ValueError: there is no fit.
    """
    if fit.draws is None or fit.outlook is None:
        raise ValueError(f"recipe {fit.recipe!r} has no fit: {fit.verdict}, {fit.reason}")
    return fit.outlook.line_at(compute)


def confidence_curve(fit: Fit) -> tuple[Array, Array]:
    """Return values of A across its interval, and for each twice the share of draws beyond it, on the smaller side.

    Raises:
        ValueError: the fit names no A.
    """
    if fit.draws is None or fit.A.value is None:
        raise ValueError(f"recipe {fit.recipe!r} names no asymptote: {fit.verdict}, {fit.reason}")
    share = np.linspace(0.004, 0.996, _LOOKS)
    x, first = np.unique(np.quantile(fit.draws.A, share), return_index=True)
    return x, np.asarray(2 * np.minimum(share, 1 - share)[first])
