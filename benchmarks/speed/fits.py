"""Compare a recipe's fit with its interval to SciPy's `curve_fit` of the same sigmoid and the published procedure."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from scipy.optimize import curve_fit

from benchmarks.fit_speed import simulate
from benchmarks.speed.pairs import Record, compared, in_turns
from sweeps.curve import Curve
from sweeps.fit.fit import fit_curve
from sweeps.fit.published import fit_literal
from sweeps.source import load

CURVES = 5


def sigmoid(compute: np.ndarray, low: float, high: float, middle: float, steepness: float) -> np.ndarray:
    """R(C) of arXiv 2510.13786, eq. 1."""
    result: np.ndarray = low + (high - low) / (1 + (middle / compute) ** steepness)
    return result


def timed_curve_fit(curve: Curve) -> float:
    """Return the seconds of one `curve_fit` from a usual start. It includes standard errors."""
    seen = curve.compute > 0
    compute, reward = curve.compute[seen], curve.reward[seen]
    start = (float(reward.min()), float(reward.max()), float(np.median(compute)), 1.0)
    started_at = time.perf_counter()
    curve_fit(sigmoid, compute, reward, p0=start, bounds=([0, 0, 0, 0.1], [1, 1, np.inf, 20]), maxfev=10_000)
    return time.perf_counter() - started_at


def timed(fit: object, curve: Curve) -> float:
    """Return the seconds of one call."""
    started_at = time.perf_counter()
    fit(curve)  # type: ignore[operator]
    return time.perf_counter() - started_at


def measure(rounds: int) -> list[Record]:
    """Return one record per other side, with one round on each of at least five simulated curves of 40 evaluations.

    Args:
        rounds: number of curves, at least five, because a fit's time depends on the curve.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curves.csv"
        simulate(path, max(rounds, CURVES), 40, 2510)
        curves = load([str(path)]).curves
    fit_curve(curves[0])  # warm-up: imports
    seconds: dict[str, list[float]] = {}
    for curve in curves:
        sides = {
            "ours": partial(timed, fit_curve, curve),
            "SciPy's `curve_fit`, without verdict or posterior": partial(timed_curve_fit, curve),
            "the published procedure": partial(timed, fit_literal, curve),
        }
        for name, values in in_turns(sides, 1).items():
            seconds.setdefault(name, []).extend(values)
    return compared(seconds, "ours", "fit of 40 evaluations with its intervals")
