"""Simulated curves for the tests of fit and rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sweeps.curve import Curve, make_curve

Array = NDArray[np.float64]


def law(compute: Array, a: float, b: float | Array, c_mid: float | Array, r0: float) -> Array:
    """The curve of arXiv 2510.13786, eq. 1."""
    with np.errstate(divide="ignore"):
        return np.asarray(r0 + (a - r0) / (1 + (c_mid / compute) ** b))


def curve(
    recipe: str = "scalerl",
    a: float = 0.61,
    b: float = 1.9,
    c_mid: float = 2500.0,
    r0: float = 0.3,
    end: float = 16000.0,
    points: int = 33,
    seeds: int = 2,
    white: float = 0.006,
    wander: float = 0.0,
    seed_sd: float = 0.0,
    rng: int = 0,
) -> Curve:
    """Simulate evenly spaced evaluations with white noise (sd `white`) and AR(1) noise (sd `wander`, rho 0.6).

    The baseline of `base+axis=choice` is `base`.
    """
    random = np.random.default_rng(rng)
    compute = np.linspace(0.0, end, points)
    rewards, labels = [], []
    for seed in range(seeds):
        process = np.zeros(points)
        for i in range(1, points):
            process[i] = 0.6 * process[i - 1] + 0.8 * wander * random.standard_normal()
        asymptote = a + seed_sd * random.standard_normal()
        rewards.append(law(compute, asymptote, b, c_mid, r0) + process + white * random.standard_normal(points))
        labels += [str(seed)] * points
    reward = np.clip(np.concatenate(rewards), 0, 1)
    return make_curve(recipe, np.tile(compute, seeds), reward, labels, baseline=recipe.partition("+")[0])
