"""Forecasts from a fit: the runs' reward at given compute with a 95% interval, under any verdict.

Forecasts come from `Fit.outlook`, which averages over laws (forms of the curve) by posterior probability. A verdict
decides whether A is identifiable, not whether the curve can be forecast. If another family than the sigmoid was fitted,
or A was fixed, the laws are that family and "no law".
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

# Beyond this multiple of the evaluated compute a forecast is useless for planning. The paper goes to 2 to 3 times.
FAR = 100.0


@dataclass(frozen=True)
class Band:
    """Median reward with a 95% prediction interval. The arrays have the same shape."""

    value: Array
    low: Array
    high: Array

    def interval(self, at: int = 0) -> Interval:
        """Return the interval at one index."""
        return Interval(float(self.value[at]), float(self.low[at]), float(self.high[at]))


def can_forecast(fit: Fit) -> bool:
    """Return whether the fit has enough points for forecasts, under any verdict."""
    return fit.outlook_inputs is not None


def paths(fit: Fit, compute: Array | Sequence[float]) -> Array:
    """Return draws (K, m) of the given runs' mean reward at computes (m,), in the curve's unit.

    Raises:
        ValueError: there are too few points to forecast from.
    """
    if fit.outlook is None:
        raise ValueError(f"recipe {fit.recipe!r} has no fit to predict from: {fit.verdict}, {fit.reason}")
    return fit.outlook.at(np.atleast_1d(np.asarray(compute, dtype=float)))


def offset_growth(x: Array) -> Array:
    """Return the fraction of a seed's final offset built up at x (n,), multiples of the evaluated compute."""
    return np.asarray(-np.expm1(-x / SETTLED))


def reward_draws_over_seeds(fit: Fit, compute: Array | Sequence[float]) -> Array:
    """Return draws (K, m) of the recipe's mean reward over all possible seeds; `paths` has that of the given runs."""
    draws = paths(fit, compute)
    assert fit.window is not None
    grown = offset_growth(np.atleast_1d(np.asarray(compute, dtype=float)) / fit.window[1])
    result: Array = np.clip(draws + seed_offsets(fit)[:, None] * grown, *fit.bounds)
    return result


def predict(fit: Fit, compute: Array | Sequence[float], observations: int = 0) -> Band:
    """Predict the runs' reward at each compute separately.

    Args:
        fit: a fit of any verdict for which `can_forecast` is true.
        compute: where to predict, 0 or more, in the curve's unit, (m,).
        observations: 0 to predict the curve; k to predict the mean of k evaluations near that compute, with its noise.

    Raises:
        ValueError: there are too few points to forecast from.
    """
    draws = paths(fit, compute)
    if observations:
        draws = draws + _noise(fit, observations, len(draws))
    return _band(fit, draws)


def predict_mean(fit: Fit, compute: Array | Sequence[float]) -> tuple[float, float, float]:
    """Predict the mean reward over evaluations, given the compute of each. Return value, low and high at 95%.

    Raises:
        ValueError: there are too few points to forecast from.
    """
    at = np.atleast_1d(np.asarray(compute, dtype=float))
    draws = paths(fit, at).mean(1, keepdims=True)
    band = _band(fit, draws + _noise(fit, len(at), len(draws)))
    return float(band.value[0]), float(band.low[0]), float(band.high[0])


def _noise(fit: Fit, observations: int, count: int) -> Array:
    """Draw the noise (count, 1) of a mean of `observations` evaluations about each of `count` curves."""
    rng = generator(fit.recipe, "noise")
    assert fit.outlook is not None
    noise: Array = (fit.outlook.noise / observations**0.5 * rng.standard_normal(count))[:, None]
    return noise


def spacing(fit: Fit) -> float:
    """Return the median distance in compute between neighbouring evaluations of a run, within the fitted compute."""
    assert fit.window is not None
    curve = fit.curve
    in_window = (curve.compute >= fit.window[0]) & (curve.compute <= fit.window[1])
    steps = [np.diff(np.unique(curve.compute[in_window & (curve.seed == label)])) for label in np.unique(curve.seed)]
    return float(np.median(np.concatenate(steps)))


def _band(fit: Fit, draws: Array) -> Band:
    """Return median and 95% quantiles (m,) over draws (K, m), clipped to the reward's bounds."""
    low, value, high = np.quantile(draws, [0.025, 0.5, 0.975], axis=0)
    return Band(*(np.clip(v, *fit.bounds) for v in (value, low, high)))


def forecast_limit(fit: Fit) -> float | None:
    """Return the largest compute, in the curve's unit, at which forecasts of the fit may be used; None without any."""
    if fit.window is None or not can_forecast(fit):
        return None
    return (FAR if fit.identifiable else FARTHEST) * fit.window[1]


def can_forecast_at(fit: Fit, compute: float) -> bool:
    """Return whether a forecast of the fit may be used at this compute, see `forecast_limit`."""
    limit = forecast_limit(fit)
    return limit is not None and compute <= limit * (1 + 1e-9)


def reward_at(fit: Fit, compute: float) -> Interval | None:
    """Return the runs' reward at a compute with its 95% interval; None where `can_forecast_at` is false."""
    return predict(fit, [compute]).interval() if can_forecast_at(fit, compute) else None


def asymptote_draws_over_seeds(fit: Fit, new_run: bool = False, spread: SeedSpread | None = None) -> Array:
    """Return draws (K,), in reward, of a recipe's A over all possible seeds, or of a new run's A.

    The draws cover all laws (forms of the curve), whether or not A is identifiable. The mean over the given seeds
    differs from the recipe's A by a standard deviation of sd / sqrt(seeds). A new run differs from the recipe's A by sd
    more.

    Args:
        fit: fit of one recipe.
        new_run: whether to draw the A of a new run instead of the recipe's A.
        spread: spread between seeds; None for the fit's `seed_spread`. Between paired recipes it is smaller.

    Raises:
        ValueError: there are too few points.
    """
    total: Array = asymptote_draws(fit) + seed_offsets(fit, new_run, spread)
    return total


def seed_offsets(fit: Fit, new_run: bool = False, spread: SeedSpread | None = None) -> Array:
    """Return draws of `asymptote_draws_over_seeds` minus `asymptote_draws`, (K,)."""
    rng = generator(fit.recipe, "seeds")
    spread = spread or fit.seed_spread
    noise = rng.standard_normal(DRAWS) if np.isinf(spread.dof) else rng.standard_t(spread.dof, DRAWS)
    offsets: Array = spread.sd * np.sqrt(1 / max(fit.informative_seeds, 1) + new_run) * noise
    return offsets


def asymptote_draws(fit: Fit) -> Array:
    """Return draws (K,) of A for the given runs: like `asymptote_draws_over_seeds`, but without the spread between
    seeds.

    Raises:
        ValueError: there are too few points.
    """
    if fit.outlook is None:
        raise ValueError(f"recipe {fit.recipe!r} has no draws: {fit.verdict}")
    if fit.verdict in ("flat", "decreasing") and fit.window is not None:
        # A reward that does not rise has no ceiling to extrapolate to: take the forecast at twice the compute.
        return fit.outlook.at(np.array([2 * fit.window[1]]))[:, 0]
    return fit.outlook.ceiling


def quantiles(values: Array, tail: float = 0.025) -> Interval:
    """Return the median of draws (K,) with bounds, each with probability `tail` beyond it; None where infinite."""
    # "inverted_cdf" returns one of the draws; interpolating with an infinite draw would give NaN.
    low, value, high = np.quantile(values, [tail, 0.5, 1 - tail], method="inverted_cdf")
    return Interval(*(float(v) if np.isfinite(v) else None for v in (value, low, high)))


# Number of values at which a confidence curve is computed.
_CONFIDENCE_POINTS = 125


def fitted_line(fit: Fit, compute: Array) -> Array:
    """Return the fitted line (n,) at effective computes (n,).

    Raises:
        ValueError: there is no fit.
    """
    if fit.draws is None or fit.outlook is None:
        raise ValueError(f"recipe {fit.recipe!r} has no fit: {fit.verdict}, {fit.reason}")
    return fit.outlook.fitted_line_at(compute)


def confidence_curve(fit: Fit) -> tuple[Array, Array]:
    """Return values of A with two-sided p-values: twice the fraction of draws above or below, the smaller of both.

    Raises:
        ValueError: the fit has no A.
    """
    if fit.draws is None or fit.A.value is None:
        raise ValueError(f"recipe {fit.recipe!r} names no asymptote: {fit.verdict}, {fit.reason}")
    probabilities = np.linspace(0.004, 0.996, _CONFIDENCE_POINTS)
    x, first = np.unique(np.quantile(fit.draws.A, probabilities), return_index=True)
    return x, np.asarray(2 * np.minimum(probabilities, 1 - probabilities)[first])
