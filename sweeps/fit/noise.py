"""How much a reward curve's points are worth: their variance, and how far they depend on each other.

Evaluations of one run are autocorrelated (the policy wanders), so n points carry the information of fewer. The
noise of a seed is taken as a first-order autoregression, by evaluation: correlation rho between neighbours. Some
thirty points leave rho uncertain, and residuals of a fit show less correlation than the noise has, because the fit
has followed part of it. So no rho is chosen: each on a grid gets as weight a prior times its restricted likelihood
(REML, which accounts for what the fit followed), and intervals are averaged over them. With twenty points the data
say little on rho, and the prior decides how the risk is shared between independent and wandering
evaluations; its numbers are set so that coverage holds for both (`benchmarks/coverage.py`). (To split the variance into
sampling error, independent by construction, and a wandering policy would be sharper still; with some thirty points
the split is so uncertain that intervals come out too narrow.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sweeps.fit.least_squares import Array, Problem, ar1_inverse

RHOS = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93])
# Before the data: independent evaluations, with this weight, or a wandering policy with a correlation about 0.65.
_P_INDEPENDENT = 0.7
_WANDERING = (5.0, 3.0)
# Few points cannot show that they are independent: then intervals are at least this much wider, over n.
_LEAST_STRETCH = 3.5
_LEAST_DOF = 1.0


@dataclass(frozen=True)
class Noise:
    """Noise of one recipe's points.

    sd: of one point about the curve, in reward units. correlation: lag 1, within a seed. inflation: n by n_eff,
    for the mean of many points. scale: variance of an *effective* point relative to the problem's weights (1: the
    weights are right and the points independent). rho, share, variance: the autocorrelations considered, the
    weight of each, and a point's variance under it, (r,).
    """

    sd: float
    correlation: float
    inflation: float
    scale: float
    rho: Array = field(default_factory=lambda: np.zeros(1))
    share: Array = field(default_factory=lambda: np.ones(1))
    variance: Array = field(default_factory=lambda: np.ones(1))

    def of_mean(self, count: int) -> float:
        """Standard deviation of the mean of `count` consecutive evaluations of one seed."""
        lag = np.arange(1, count)
        factor = 1 + 2 * ((1 - lag / count) * self.rho[:, None] ** lag).sum(1)
        return float(np.sqrt(self.share @ (self.variance * factor) / count))


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


def _prior() -> Array:
    """Weight of each rho before the data; the wandering ones follow a beta distribution on the uneven grid."""
    edges = np.concatenate([[0.0], 0.5 * (RHOS[1:] + RHOS[:-1]), [1.0]])
    a, b = _WANDERING
    density = np.diff(edges) * RHOS ** (a - 1) * (1 - RHOS) ** (b - 1)
    weight = (1 - _P_INDEPENDENT) * density / density.sum()
    weight[0] = _P_INDEPENDENT
    result: Array = np.maximum(weight, 1e-12)
    return result


PRIOR = _prior()


def degrees_of_freedom(dof: int) -> Array:
    """Of the t statistic under each rho: effective points less parameters, (r,)."""
    least = min(_LEAST_DOF, float(dof))
    result: Array = least + (dof - least) * (1 - RHOS) / (1 + RHOS)
    return result


def least_stretch(n: int) -> float:
    """By how much an interval must at least exceed that of independent points."""
    return 1 + _LEAST_STRETCH / n


def shares(problem: Problem, jacobian: Array, sse: Array, dof: int) -> Array:
    """Posterior weight of each rho: prior x restricted likelihood.

    Args:
        problem: whose points' order within seeds matters.
        jacobian: of the curve by every fitted parameter, (n, p).
        sse: least sum of squares under each rho, (r,).
        dof: points less parameters.
    """
    rho = RHOS
    n, S = len(problem.reward), problem.seeds
    # |V| of a seed with m points is (1 - rho^2)^(m - 1).
    log_det = (n - S) * np.log1p(-(rho**2))
    columns = np.stack([problem.applied(column) for column in jacobian.T], axis=-1)
    parts = np.einsum("np,mnq->mpq", jacobian, columns)
    matrix = np.tensordot(ar1_inverse(rho), parts, 1)
    # Columns of no effect carry nothing; scaling makes the rest comparable.
    size = np.sqrt(np.maximum(np.diagonal(parts[0]), 0.0))
    used = size > 1e-12 * size.max()
    matrix = matrix[:, used][:, :, used] / np.outer(size[used], size[used])
    log_information = np.linalg.slogdet(matrix + 1e-12 * np.eye(int(used.sum())))[1]
    tiny = 1e-300 + 1e-14 * float(sse.max())
    log_weight = np.log(PRIOR) - 0.5 * (log_det + log_information + dof * np.log(sse + tiny))
    weight = np.exp(log_weight - log_weight.max())
    result: Array = weight / weight.sum()
    return result


def summary(problem: Problem, share: Array, variance: Array) -> Noise:
    """The noise under the weights `share` of each rho.

    Shapes: share, variance (r,); variance is that of a point relative to the problem's weights.
    """
    mean_weight = float(problem.weight.mean())
    growth = (1 + RHOS) / (1 - RHOS)
    average = float(share @ variance)
    scale = float(share @ (variance * growth))
    return Noise(
        sd=float(np.sqrt(average / mean_weight)),
        correlation=float(share @ RHOS),
        inflation=scale / average,
        scale=scale,
        rho=RHOS,
        share=share,
        variance=variance / mean_weight,
    )


def least_variance(problem: Problem, known: Array | None) -> float:
    """Floor of a point's variance relative to the weights: its own sampling error, and rounding.

    A few points can lie on a curve by luck, or because seeds share the random numbers of their evaluations;
    that makes none of them more precise than its sampling error. Shapes: known (n,).
    """
    return 1e-6 if known is None else max(float((problem.weight * known).mean()), 1e-6)
