"""How much a reward curve's points are worth: their variance, and how many independent ones they amount to.

Evaluations of one run are autocorrelated (the policy wanders), so n points carry the information of
n_eff = n / inflation, inflation = (1 + r) / (1 - r) for lag-1 correlation r. Residuals of a fit show less
correlation than the noise has, because the fit has followed part of it; both moments are therefore compared
with their expectation after the same projection, and what remains uncertain about r is averaged over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.profile import Array

MAX_CORRELATION = 0.95
# Beyond this the projection's effect on r is below 0.02 and the dense matrices are not worth their time.
_EXACT_UP_TO = 400


@dataclass(frozen=True)
class Noise:
    """Noise of one recipe's points.

    sd: of one point about the curve, in reward units. correlation: lag 1, within a seed. inflation: n / n_eff.
    scale: variance of one *effective* point relative to the problem's weights (1: the weights are right and
    the points independent).
    """

    sd: float
    correlation: float
    inflation: float
    scale: float


def extra_variance(residual: Array, variance: Array, dof: int) -> float:
    """Variance to add to every point's own so that the weighted residuals come out at their degrees of freedom.

    Zero where the points' own errors already explain the residuals (Mandel and Paule 1970). Shapes: (n,).
    """

    def excess(extra: float) -> float:
        return float((residual**2 / (variance + extra)).sum()) - dof

    low, high = 0.0, float(residual @ residual) / dof
    if excess(low) <= 0:
        return 0.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return 0.5 * (low + high)


def estimate(
    residual: Array, weight: Array, seed: NDArray[np.intp], jacobian: Array, white_share: float
) -> Noise:
    """Noise from the residuals of a fit.

    Args:
        residual: reward minus curve, (n,), by seed and within a seed by compute.
        weight: 1 / variance as used in the fit, (n,).
        seed: index of the seed, (n,).
        jacobian: of the curve by every fitted parameter, (n, p): the directions the fit has followed.
        white_share: the part of the variance known to be independent from point to point (sampling error of
            the evaluation), in [0, 1); 0 if unknown.
    """
    root = np.sqrt(weight)
    scaled = root * residual
    n = len(scaled)
    same = seed[1:] == seed[:-1]
    squares = float(scaled @ scaled)
    dof = max(n - jacobian.shape[1], 1)
    per_seed = n / (int(seed.max()) + 1)
    if squares <= 1e-20 * n or not same.any():
        scale = squares / dof
        return Noise(float(np.sqrt(scale / weight.mean())), 0.0, 1.0, scale)
    observed = float((scaled[1:] * scaled[:-1])[same].sum()) / squares
    rhos = np.linspace(0.0, MAX_CORRELATION, 39)
    if n <= _EXACT_UP_TO:
        expected, shares = _projected_moments(root[:, None] * jacobian, seed, rhos, white_share)
    else:
        expected = (1 - white_share) * rhos * same.sum() / n
        shares = np.full(len(rhos), float(dof))
    # Normal approximation of the sampling error of a lag-1 correlation, flat in rho.
    likelihood = np.exp(-0.5 * (observed - expected) ** 2 * n / np.maximum(1 - expected**2, 0.1))
    likelihood /= likelihood.sum()
    growth = white_share + (1 - white_share) * (1 + rhos) / (1 - rhos)
    # One seed's points cannot be worth less than one point.
    growth = np.minimum(growth, max(per_seed, 1.0))
    correlation = float(likelihood @ rhos) * (1 - white_share)
    inflation = float(likelihood @ growth)
    variance = float(likelihood @ (squares / shares))
    return Noise(float(np.sqrt(variance / weight.mean())), correlation, inflation, variance * inflation)


def _projected_moments(
    jacobian: Array, seed: NDArray[np.intp], rhos: Array, white_share: float
) -> tuple[Array, Array]:
    """What fitted residuals show of noise with correlation rho: expected lag-1 ratio, and expected sum of squares.

    With M = I - QQ' the residual maker, S the noise's correlation matrix and L the lag within seeds these are
    tr(M S M L) / tr(M S M) and tr(M S M). Shapes: jacobian (n, p); returns two arrays like rhos.
    """
    n = len(seed)
    Q = np.linalg.qr(jacobian)[0]
    index = np.arange(n)
    together = seed[:, None] == seed[None, :]
    distance = np.abs(index[:, None] - index[None, :])
    L = 0.5 * (together & (distance == 1))
    LQ = L @ Q
    QLQ = Q.T @ LQ
    ratio, squares = np.empty(len(rhos)), np.empty(len(rhos))
    for at, rho in enumerate(rhos):
        S = (1 - white_share) * np.where(together, rho**distance, 0.0)
        S[index, index] = 1.0
        SQ = S @ Q
        QSQ = Q.T @ SQ
        lagged = float((S * L).sum() - 2 * (SQ * LQ).sum() + (QSQ * QLQ).sum())
        squares[at] = max(n - float(np.trace(QSQ)), 0.1)
        ratio[at] = lagged / squares[at]
    return ratio, squares
