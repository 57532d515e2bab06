"""How much a reward curve's points are worth: their variance, and how many independent ones they amount to.

Evaluations of one run are autocorrelated (the policy wanders), so n points carry the information of
n_eff = n / inflation. For a mean, and in the limit of many points, inflation = (1 + r) / (1 - r) with lag-1
correlation r; a parameter of a curve contrasts early with late points and suffers less, exactly the ratio of
its variance under correlated and under independent noise, which is what is used here. Residuals of a fit
show less correlation than the noise has, because the fit has followed part of it; the observed moments are
therefore compared with their expectation after the same projection, and what stays uncertain about r is
averaged over. (To split the variance into sampling error, independent by construction, and a wandering policy
would be sharper still; with some thirty points the split is so uncertain that intervals come out too narrow.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sweeps.profile import Array, divide

_RHOS = np.linspace(0.0, 0.95, 20)
# Beyond this the projection's effect on r is below 0.02 and the dense matrices are not worth their time.
_EXACT_UP_TO = 400


@dataclass(frozen=True)
class Noise:
    """Noise of one recipe's points.

    sd: of one point about the curve, in reward units. correlation: lag 1, within a seed. inflation: n by
    n_eff. scale: variance of an *effective* point relative to the problem's weights (1: the weights are right
    and the points independent).
    """

    sd: float
    correlation: float
    inflation: float
    scale: float


def extra_variance(residual: Array, variance: Array, dof: int) -> float:
    """Variance to add to every point's own so that weighted residuals come out at their degrees of freedom.

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
    residual: Array,
    weight: Array,
    seed: NDArray[np.intp],
    jacobian: Array,
    targets: int,
    known: Array | None = None,
) -> Noise:
    """Noise from the residuals of a fit, and never less than the points' own errors.

    A few points can lie on a curve by luck, or because seeds share the random numbers of their evaluations;
    that makes none of them more precise than its sampling error.

    Args:
        residual: reward minus curve, (n,), by seed and within a seed by compute.
        weight: 1 / variance as used in the fit, (n,).
        seed: index of the seed, (n,).
        jacobian: of the curve by every fitted parameter, (n, p): the directions the fit has followed.
        targets: how many of the first columns are the parameters to be judged; the inflation is the largest
            of theirs.
        known: sampling variance of each point, (n,), if there is one.
    """
    least = 0.0 if known is None else float((weight * known).mean())
    root = np.sqrt(weight)
    scaled = root * residual
    n = len(scaled)
    same = seed[1:] == seed[:-1]
    squares = float(scaled @ scaled)
    dof = max(n - jacobian.shape[1], 1)
    # Residuals far below their own weights: exact data, where correlation is one of rounding errors.
    if squares <= 1e-6 * n or not same.any():
        scale = max(squares / dof, least, 1e-6)
        return Noise(float(np.sqrt(scale / weight.mean())), 0.0, 1.0, scale)
    observed = float((scaled[1:] * scaled[:-1])[same].sum()) / squares
    if n <= _EXACT_UP_TO:
        expected, shares, growth = _projected(root[:, None] * jacobian, seed, targets)
    else:
        expected = _RHOS * same.sum() / n
        shares = np.full(len(_RHOS), float(dof))
        growth = (1 + _RHOS) / (1 - _RHOS)
    # Normal approximation of the sampling error of a lag-1 correlation, flat in rho.
    likelihood = np.exp(-0.5 * (observed - expected) ** 2 * n / np.maximum(1 - expected**2, 0.1))
    likelihood /= likelihood.sum()
    correlation = float(likelihood @ _RHOS)
    variance = max(float(likelihood @ (squares / shares)), least)
    # Jointly: where the correlation is high the residuals also understate the variance.
    scale = float(likelihood @ (np.maximum(growth, 1.0) * np.maximum(squares / shares, least)))
    return Noise(float(np.sqrt(variance / weight.mean())), correlation, scale / variance, scale)


def _projected(jacobian: Array, seed: NDArray[np.intp], targets: int) -> tuple[Array, Array, Array]:
    """What noise of each correlation rho does to a fit with this Jacobian; three arrays like `_RHOS`.

    With S the noise's correlation matrix, M = I - QQ' the residual maker, L the lag within seeds and v a row
    of the pseudo-inverse (a parameter's estimator): the residuals' expected lag-1 ratio
    tr(M S M L) / tr(M S M), their expected sum of squares tr(M S M), and the largest v S v' / v v' among the
    targets.
    Shapes: jacobian (n, p).
    """
    n = len(seed)
    Q = np.linalg.qr(jacobian)[0]
    V = np.linalg.pinv(jacobian)[:targets].T
    index = np.arange(n)
    together = seed[:, None] == seed[None, :]
    distance = np.abs(index[:, None] - index[None, :])
    L = 0.5 * (together & (distance == 1))
    LQ = L @ Q
    QLQ = Q.T @ LQ
    ratio, squares, growth = np.empty(len(_RHOS)), np.empty(len(_RHOS)), np.empty(len(_RHOS))
    for at, rho in enumerate(_RHOS):
        S = np.where(together, (rho**index)[distance], 0.0)
        SQ = S @ Q
        QSQ = Q.T @ SQ
        lagged = float((S * L).sum() - 2 * (SQ * LQ).sum() + (QSQ * QLQ).sum())
        squares[at] = max(n - float(np.trace(QSQ)), 0.1)
        ratio[at] = lagged / squares[at]
        # A parameter without effect (B of a constant) has no estimator and no say.
        growth[at] = float(divide((V * (S @ V)).sum(0), (V * V).sum(0)).max())
    return ratio, squares, growth
