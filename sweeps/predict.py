"""Predictions from a fit: the runs' reward at given compute with a 95% prediction interval."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sweeps.fit import Fit
from sweeps.profile import Array


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
