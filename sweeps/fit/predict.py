"""Predictions from a fit: the runs' reward at given compute with a 95% prediction interval."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.curve import Array
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.interval import asymptote_confidence
from sweeps.fit.seeds import SeedSpread


@dataclass(frozen=True)
class Band:
    """Expected reward with a 95% prediction interval; floats in arrays of one shape."""

    mean: Array
    low: Array
    high: Array


def predict(fit: Fit, compute: Array | Sequence[float], observations: int = 0) -> Band:
    """The runs' reward at each compute, pointwise.

    Args:
        fit: any fit that has draws.
        compute: (m,), in the curve's unit, >= 0.
        observations: 0 for the curve itself; k for the mean of k consecutive evaluations around that compute.

    Raises:
        ValueError: the fit has no draws (`too_few_points`, `degenerate`, constant rewards).
    """
    return _band(fit, _curves(fit, compute), observations)


def predict_mean(fit: Fit, compute: Array | Sequence[float]) -> tuple[float, float, float]:
    """Mean reward over evaluations at the given computes (one entry each): value, low and high at 95%.

    Raises:
        ValueError: the fit has no draws.
    """
    paths = _curves(fit, compute)
    band = _band(fit, paths.mean(1, keepdims=True), paths.shape[1])
    return float(band.mean[0]), float(band.low[0]), float(band.high[0])


def _curves(fit: Fit, compute: Array | Sequence[float]) -> Array:
    if fit.draws is None:
        raise ValueError(f"recipe {fit.recipe!r} has no fit to predict from: {fit.verdict}, {fit.reason}")
    return fit.draws.curve(np.atleast_1d(np.asarray(compute, dtype=float)))


def _band(fit: Fit, paths: Array, observations: int) -> Band:
    """Quantiles over draws, plus the noise of a mean of `observations` points. Shapes: (K, m) -> (m,)."""
    mean = np.asarray(paths.mean(0))
    if observations and fit.noise is not None:
        rng = np.random.default_rng(zlib.crc32(fit.recipe.encode()) + 1)
        # Seeds run side by side: k evaluations around one compute are a few consecutive ones of every seed.
        each = max(round(observations / fit.seeds), 1)
        sd = fit.noise.of_mean(each) * np.sqrt(each / observations)
        paths = paths + sd * rng.standard_t(fit.dof, size=(len(paths), 1))
    low, high = np.quantile(paths, [0.025, 0.975], axis=0)
    return Band(mean, np.clip(low, *fit.bounds), np.clip(high, *fit.bounds))


# Beyond this many times the window's end a forecast is no plan; the source extrapolates 2 to 3 times.
FAR = 100.0


# How far past the window's end the curve itself is known although A is not: what docs/forecast.md has tested.
SUPPORT = 2.0


# Verdicts under which there is a rising curve to read at all, and how far past the window.
_REACH = {"identifiable": FAR, "open": SUPPORT, "at_bound": SUPPORT, "pre_inflection": 1.0}


def support(fit: Fit) -> float | None:
    """The largest compute, in the curve's unit, at which the fit may be read; None if it may not at all."""
    if fit.draws is None or fit.window is None or fit.verdict not in _REACH:
        return None
    return _REACH[fit.verdict] * fit.window[1]


def total_draws(fit: Fit, new_run: bool = False, spread: SeedSpread | None = None) -> Array:
    """Draws of a recipe's A over seeds, or of a new run's. (K,), in reward units.

    The mean over the seeds given is off by sd / sqrt(seeds); a new seed is off from the recipe's mean by sd
    again. spread: between seeds, the fit's own if not given (where recipes are compared in pairs it is less).

    Raises:
        ValueError: the fit has no draws.
    """
    if fit.draws is None:
        raise ValueError(f"recipe {fit.recipe!r} has no draws: {fit.verdict}")
    rng = np.random.default_rng(zlib.crc32(fit.recipe.encode()) + 3)
    spread, count = spread or fit.seed_spread, len(fit.draws.A)
    noise = rng.standard_normal(count) if np.isinf(spread.dof) else rng.standard_t(spread.dof, count)
    total: Array = fit.draws.A + spread.sd * np.sqrt(1 / fit.informing + new_run) * noise
    return total


def quantiles(values: Array) -> Interval:
    """Median and 95% bounds of draws that may be infinite; None for what is. (K,)."""
    # "lower" and "higher" interpolate nothing: half-way to infinity is NaN.
    low, value, high = np.quantile(values, [0.025, 0.5, 0.975], method="inverted_cdf")
    return Interval(*(float(v) if np.isfinite(v) else None for v in (value, low, high)))


def chance(p: float) -> str:
    """A probability as text: two thousand draws do not tell 1 from 0.999."""
    return f"P = {p:.2f}" if 0.01 <= p <= 0.99 else "P > 0.99" if p > 0.5 else "P < 0.01"


# How far beyond its interval a confidence curve is drawn, in units of the interval's half.
_BEYOND = 1.7


_LOOKS = 61


def fitted(fit: Fit, compute: Array) -> Array:
    """The least-squares curve itself, not the mean of its draws. Shapes: (n,) -> (n,).

    Raises:
        ValueError: there is no fit.
    """
    if fit.allowed is None:
        raise ValueError(f"recipe {fit.recipe!r} has no fit: {fit.verdict}, {fit.reason}")
    best, family = fit.allowed.best, fit.allowed.problem.family
    with np.errstate(divide="ignore"):
        g = family.at(np.log(compute), best.u, best.v)
    result: Array = best.r0 * (1 - g) + best.a * g
    return result


def confidence_curve(fit: Fit) -> tuple[Array, Array]:
    """Values of A from well below its interval to well above, or to the bound where it is open, and their p value.

    Raises:
        ValueError: the fit names no A.
    """
    if fit.allowed is None or fit.A.value is None:
        raise ValueError(f"recipe {fit.recipe!r} names no asymptote: {fit.verdict}, {fit.reason}")
    low, high, best = fit.A.low, fit.A.high, fit.A.value
    first = fit.bounds[0] if low is None else max(best - _BEYOND * (best - low), fit.bounds[0])
    last = fit.bounds[1] if high is None else min(best + _BEYOND * (high - best), fit.bounds[1])
    # Both sides reach the estimate itself: an open interval is long, and its peak is narrow.
    t = np.linspace(0, 1, _LOOKS) ** 2
    x = np.unique(np.clip(np.concatenate([best - (best - first) * t, best + (last - best) * t]), first, last))
    return x, asymptote_confidence(fit.allowed, x)
