"""The model that forecasts rest on, and joint draws from its posterior.

    z = R0 + (A - R0) g(x; u, v) + w(x) + s(x) + e

x is compute in windows (units of the largest that was evaluated) and z the reward on a scale of width 1. g is a law: a
sigmoid, a Weibull curve, or nothing. w is a random walk about every law: Brownian within the window, levelling beyond
it. s is a seed's distance from the mean of the seeds given, a walk as well. e is white noise.

Given a law, its shape (u, v) and the scales of walk and noise, everything else is Gaussian, so the evidence is exact.
Only these four parameters are sampled, by adaptive importance sampling with deterministic mixture weights (Owen and
Zhou 2000). The covariance of the walk is diagonalized once, after which a sample costs time linear in the points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, gammaln

from sweeps.fit.collapse import death
from sweeps.fit.constants import (
    A_PRIOR,
    FARTHEST,
    LEVEL_PRIOR,
    LEVELLING,
    NOISE_SD,
    P_NONE,
    P_SIGMOID,
    P_WEIBULL,
    QUIET,
    R0_PRIOR,
    SCALE_PRIOR,
    SEED_WALKS,
    SIGMOID_PRIOR,
    WALK_PRIOR,
    WEIBULL_PRIOR,
)
from sweeps.fit.least_squares import Array
from sweeps.fit.wander import Seen

# Samples per round, and the largest number of rounds. Sampling stops when this many samples share the weight; a new
# proposal is made of at least so many.
_SAMPLES, _ROUNDS, _FINE, _ENOUGH = 200, 12, 200, 15
# Where walks are drawn, in windows: within the window, and beyond it. At the last one they have levelled.
_WITHIN = np.linspace(0, 1, 25)[1:]
_BEYOND = np.array([1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 100.0])
_NODES = np.concatenate([[0.0], _WITHIN, _BEYOND])
# Added to the variance of every point: rewards are not recorded more exactly, and its precision stays finite.
_ROUNDING = 1e-8
# A later proposal is wider than the samples so far: this factor in variance, plus this share of the prior's standard
# deviation. Then the degrees of freedom of proposals.
_WIDER, _PRIOR_SHARE, _TAIL = 1.2, 0.05, 5.0


@dataclass(frozen=True)
class Law:
    """Law by which the reward grows with compute.

    Attributes:
        prior: probability before the data.
        basis: g(x, u, v) for computes x (n,) and shapes u, v (k, 1); (k, n), from 0 to 1.
        shape: prior mean and standard deviation of u, and of v.
        rises: whether the law has a gain; without one R0 is the level and A has no meaning.
    """

    name: str
    prior: float
    basis: Callable[[Array, Array, Array], Array]
    shape: tuple[tuple[float, float], tuple[float, float]]
    rises: bool = True


def _log_odds(x: Array, u: Array, v: Array) -> Array:
    """exp(u) (log x - v), which is minus infinity at compute 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(u) * (np.log(x) - v))


def _sigmoid(x: Array, u: Array, v: Array) -> Array:
    return np.asarray(expit(_log_odds(x, u, v)))


def _weibull(x: Array, u: Array, v: Array) -> Array:
    return np.asarray(-np.expm1(-np.exp(np.minimum(_log_odds(x, u, v), 6.0))))


def _nothing(x: Array, u: Array, v: Array) -> Array:
    return np.zeros(np.broadcast_shapes(x.shape, u.shape))


# u and v are the logarithms of B and C_mid (arXiv 2510.13786, eq. 1), and of a Weibull curve's power and scale.
LAWS = (
    Law("sigmoid", P_SIGMOID, _sigmoid, (SIGMOID_PRIOR, SCALE_PRIOR)),
    Law("weibull", P_WEIBULL, _weibull, (WEIBULL_PRIOR, SCALE_PRIOR)),
    Law("none", P_NONE, _nothing, ((0.0, 1.0), (0.0, 1.0)), rises=False),
)


def walked(x: Array) -> Array:
    """Variance at compute x, in windows, of a walk of scale 1; it levels beyond the window's end. Any shape."""
    return np.where(x <= 1, x, 1 - LEVELLING * np.expm1(-np.maximum(x - 1, 0) / LEVELLING))


@dataclass(frozen=True, eq=False)
class Futures:
    """Joint draws of curves on a reward scale of width 1, compute in windows; (K,) where no shape is given.

    Attributes:
        law: index into `LAWS`.
        u, v, r0, a: shape and levels of the law.
        walk: the walk at the computes `_NODES`, (K, m); in single precision, because a study keeps 2,000 per recipe.
        noise: standard deviation of one evaluation.
        bounded: whether rewards lie in [0, 1]. Draws are then clipped to it.
        dead: draws whose reward is 0 from compute `died` on, see `sweeps.fit.collapse`.
    """

    law: NDArray[np.intp]
    u: Array
    v: Array
    r0: Array
    a: Array
    walk: NDArray[np.floating[Any]]
    noise: Array
    bounded: bool
    dead: NDArray[np.bool_]
    died: float = np.inf

    def at(self, x: Array) -> Array:
        """Reward of each draw at computes x (m,), in windows; (K, m)."""
        paths = np.empty((len(self.law), len(x)))
        for i, law in enumerate(LAWS):
            mine = np.flatnonzero(self.law == i)
            g = law.basis(x[None], self.u[mine, None], self.v[mine, None])
            paths[mine] = self.r0[mine, None] + (self.a - self.r0)[mine, None] * g
        after = np.clip(np.searchsorted(_NODES, x), 1, len(_NODES) - 1)
        part = np.clip((x - _NODES[after - 1]) / (_NODES[after] - _NODES[after - 1]), 0, 1)
        paths += self.walk[:, after - 1] * (1 - part) + self.walk[:, after] * part
        paths[np.ix_(self.dead, x >= self.died)] = 0.0
        return np.clip(paths, 0.0, 1.0) if self.bounded else paths

    @property
    def ceiling(self) -> Array:
        """Reward of each draw at `FARTHEST` windows, (K,). No study could use a ceiling that is reached later."""
        return self.at(np.array([FARTHEST]))[:, 0]


@dataclass(frozen=True, eq=False)
class _Turned:
    """The points in coordinates in which walk and noise are independent, for one scale of the seeds' walks.

    Attributes:
        turn: matrix from points to these coordinates, (n, n).
        value: variance of a walk of scale 1 in each, (n,); that of noise of scale 1 is 1.
        one, z: a constant of 1, and the rewards, turned; (n,) each.
        log_det: log determinant of the covariance of noise of scale 1.
        across: covariance of a walk of scale 1 at `_WITHIN` with the turned points, (m, n).
    """

    turn: Array
    value: Array
    one: Array
    z: Array
    log_det: float
    across: Array


def _turned(seen: Seen, relative: Array, scale: float) -> _Turned:
    """Diagonalize the walks of scale 1. relative (n,): variance of each point's noise at scale 1."""
    h = walked(seen.x)
    # A seed's walk about the mean of the seeds given: covariances over all seeds sum to 0.
    kernel = np.minimum(h[:, None], h) * (1 + scale**2 * (seen.same - 1 / seen.seeds))
    root = np.sqrt(relative)
    value, vectors = np.linalg.eigh(kernel / (root[:, None] * root))
    turn = vectors.T / root
    across = np.minimum(_WITHIN[:, None], h) @ turn.T
    return _Turned(turn, np.maximum(value, 0.0), turn.sum(1), turn @ seen.z, float(np.log(relative).sum()), across)


@dataclass(frozen=True, eq=False)
class _Regressed:
    """Posterior of R0 and A given parameters; (k,) each, but g and the precision of the turned points are (k, n)."""

    precision: Array
    g: Array
    r0: Array
    a: Array
    v01: Array
    v11: Array
    m00: Array
    log_evidence: Array


@dataclass(frozen=True, eq=False)
class _Samples:
    """Weighted samples of one law's parameters.

    Attributes:
        theta: u, v, and the logarithms of the scales of walk and noise, (k, 4).
        weight: of each sample under each scale of the seeds' walks, (S, k), summing to 1.
        log_evidence: of the law.
    """

    theta: Array
    weight: Array
    log_evidence: float


class Posterior:
    """The posterior of one recipe's curve: weighted samples under each law, and draws from them.

    Attributes:
        weights: posterior probability of each law, by name.
        log_evidence: log evidence of each law, by name.
    """

    def __init__(self, seen: Seen, rng: np.random.Generator) -> None:
        self._seen, self._rng = seen, rng
        self._levels = [(R0_PRIOR if law.rises else LEVEL_PRIOR, A_PRIOR) for law in LAWS]
        sampling = np.ones(len(seen.x)) if seen.variance is None else seen.variance
        mean = float(sampling.mean())
        # The noise is centred on the points' roughness, or on their given errors where those are larger.
        rough = max(seen.roughness, QUIET if seen.variance is None else 0.8 * mean**0.5)
        self._noise = float(np.log(rough)), NOISE_SD
        scales = (0.0,) if seen.seeds == 1 else SEED_WALKS
        self._turned = [_turned(seen, sampling / mean, scale) for scale in scales]
        self._samples = [self._explore(i) for i in range(len(LAWS))]
        self.log_evidence: Mapping[str, float] = {
            law.name: found.log_evidence for law, found in zip(LAWS, self._samples, strict=True)
        }
        log_weight = np.array([np.log(law.prior) + self.log_evidence[law.name] for law in LAWS])
        share = np.exp(log_weight - np.logaddexp.reduce(log_weight))
        self.weights: Mapping[str, float] = dict(zip((law.name for law in LAWS), share.tolist(), strict=True))

    def _regress(self, which: int, turned: _Turned, theta: Array) -> _Regressed:
        """Regress the points on R0 (1 - g) + A g under each row of theta (k, 4)."""
        ((m0, s0), (m1, s1)), n = self._levels[which], len(turned.z)
        u, v, log_walk, log_noise = theta.T[..., None]
        p = 1 / (np.exp(2 * log_walk) * turned.value + np.exp(2 * log_noise) + _ROUNDING)
        g = LAWS[which].basis(self._seen.x[None], u, v) @ turned.turn.T
        pg, one, z = p * g, turned.one, turned.z
        oo, oz, zz = p @ one**2, p @ (one * z), p @ z**2
        og, gz, gg = pg @ one, pg @ z, (pg * g).sum(1)
        # Normal equations of the columns 1 - g and g; the prior adds its precision.
        m00, m01, m11 = oo - 2 * og + gg + s0**-2, og - gg, gg + s1**-2
        c0, c1 = oz - gz + m0 / s0**2, gz + m1 / s1**2
        det = m00 * m11 - m01**2
        v01, v11 = -m01 / det, m00 / det
        r0, a = m11 / det * c0 + v01 * c1, v01 * c0 + v11 * c1
        squares = zz + (m0 / s0) ** 2 + (m1 / s1) ** 2 - r0 * c0 - a * c1
        log_evidence = -0.5 * (
            n * np.log(2 * np.pi) + turned.log_det - np.log(p).sum(1) + np.log(det * (s0 * s1) ** 2) + squares
        )
        return _Regressed(p, g, r0, a, v01, v11, m00, log_evidence)

    def _explore(self, which: int) -> _Samples:
        """Sample the parameters of a law: first from their prior, then around the samples with the most weight."""
        prior = np.array([*LAWS[which].shape, WALK_PRIOR, self._noise])
        proposals = [_Bell(prior[:, 0], np.diag(prior[:, 1]))]
        theta, likely = np.empty((0, 4)), np.empty((len(self._turned), 0))
        for round_ in range(_ROUNDS):
            fresh = proposals[-1].draw(_SAMPLES, self._rng)
            theta = np.concatenate([theta, fresh])
            each = [self._regress(which, turned, fresh).log_evidence for turned in self._turned]
            likely = np.concatenate([likely, np.stack(each) - np.log(len(each))], axis=1)
            # Weighed by the mixture of all proposals so far.
            proposed = np.logaddexp.reduce([bell.log_density(theta) for bell in proposals], 0) - np.log(len(proposals))
            log_weight = likely + _log_normal(theta, prior) - proposed
            total = np.logaddexp.reduce(log_weight, 0)
            weight = np.exp(total - total.max())
            if round_ and weight.sum() ** 2 >= _FINE * (weight @ weight):
                break
            weight = _tempered(total)
            centre = weight @ theta
            about = theta - centre
            covariance = _WIDER * (about * weight[:, None]).T @ about + np.diag((_PRIOR_SHARE * prior[:, 1]) ** 2)
            proposals.append(_Bell(centre, np.asarray(np.linalg.cholesky(covariance))))
        whole = float(np.logaddexp.reduce(log_weight.ravel()))
        return _Samples(theta, np.exp(log_weight - whole), whole - float(np.log(len(theta))))

    def draw(self, count: int) -> Futures:
        """Draw curves, each law by its posterior probability."""
        edges = np.rint(np.cumsum([0.0, *self.weights.values()]) * count).astype(int)
        parts = [self._draw(i, int(edges[i + 1] - edges[i])) for i in range(len(LAWS))]
        order = self._rng.permutation(count)
        law = np.repeat(np.arange(len(LAWS)), np.diff(edges))
        u, v, r0, a, walk, noise = (np.concatenate([part[i] for part in parts])[order] for i in range(6))
        p, died = death(self._seen)
        dead = np.zeros(count, dtype=np.bool_)
        dead[: round(p * count)] = True
        return Futures(law[order], u, v, r0, a, walk.astype(np.float32), noise, self._seen.bounded, dead, died)

    def _draw(self, which: int, count: int) -> tuple[Array, Array, Array, Array, Array, Array]:
        """Draw shapes, levels, walks and noise of one law: u, v, r0, a, walk (count, m) and noise."""
        found, rng = self._samples[which], self._rng
        # Systematic sampling: less noise than independent draws.
        place = (np.arange(count) + rng.random()) / max(count, 1)
        flat = found.weight.ravel()
        chosen = np.minimum(np.searchsorted(np.cumsum(flat), place), len(flat) - 1)
        scale, row = np.divmod(chosen, len(found.theta))
        theta = found.theta[row]
        r0, a, walk = np.empty(count), np.empty(count), np.empty((count, len(_NODES)))
        for s, turned in enumerate(self._turned):
            mine = np.flatnonzero(scale == s)
            if len(mine):
                r0[mine], a[mine], walk[mine] = self._draw_levels(which, turned, theta[mine])
        return theta[:, 0], theta[:, 1], r0, a, walk, np.exp(theta[:, 3])

    def _draw_levels(self, which: int, turned: _Turned, theta: Array) -> tuple[Array, Array, Array]:
        """Draw R0, A (k,) and the walk (k, m) given the parameters (k, 4)."""
        found, rng, k, m = self._regress(which, turned, theta), self._rng, len(theta), len(_WITHIN)
        a = found.a + np.sqrt(found.v11) * rng.standard_normal(k)
        r0 = found.r0 + found.v01 / found.v11 * (a - found.a) + rng.standard_normal(k) / np.sqrt(found.m00)
        # Matheron's rule: a walk and points from the prior, and what the rewards differ from these points.
        tau, sigma = np.exp(theta[:, 2:3]), np.exp(theta[:, 3:4])
        free = tau * np.cumsum(np.sqrt(np.diff(walked(_NODES))) * rng.standard_normal((k, len(_NODES) - 1)), axis=1)
        nodes = np.minimum(_WITHIN[:, None], _WITHIN)
        gain = np.linalg.solve(nodes, turned.across)
        # The points' covariance that the walk at the nodes leaves: what lies between the nodes, and the seeds' walks.
        value, vectors = np.linalg.eigh(np.diag(turned.value) - turned.across.T @ gain)
        scale = np.sqrt(tau**2 * np.maximum(value, 0.0) + sigma**2)
        points = free[:, :m] @ gain + (scale * rng.standard_normal((k, len(value)))) @ vectors.T
        law = r0[:, None] * turned.one + (a - r0)[:, None] * found.g
        moved = tau**2 * ((found.precision * (turned.z - law - points)) @ turned.across.T)
        walk = np.zeros((k, len(_NODES)))
        walk[:, 1 : m + 1] = free[:, :m] + moved
        walk[:, m + 1 :] = free[:, m:] + moved[:, -1:]
        return r0, a, walk


def _tempered(log_weight: Array) -> Array:
    """Return weights (k,) that sum to 1, flattened until at least `_ENOUGH` samples share them."""
    below = log_weight - log_weight.max()
    for power in 0.7 ** np.arange(60):
        weight = np.exp(power * below)
        weight /= weight.sum()
        if 1 / (weight @ weight) >= _ENOUGH:
            break
    return np.asarray(weight)


def _log_normal(x: Array, prior: Array) -> Array:
    """Log density of independent normals; (k, d), means and standard deviations (d, 2) -> (k,)."""
    mean, sd = prior.T
    return np.asarray(-0.5 * (((x - mean) / sd) ** 2).sum(1) - np.log(sd).sum() - 0.5 * len(sd) * np.log(2 * np.pi))


@dataclass(frozen=True, eq=False)
class _Bell:
    """A Student t distribution, whose tails are heavier than a posterior's.

    Attributes:
        mean: (d,).
        root: Cholesky factor of its scale, (d, d).
    """

    mean: Array
    root: Array

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """Draw points (count, d)."""
        scale = np.sqrt(_TAIL / rng.chisquare(_TAIL, (count, 1)))
        return np.asarray(self.mean + scale * rng.standard_normal((count, len(self.mean))) @ self.root.T)

    def log_density(self, x: Array) -> Array:
        """Log density at points (k, d); (k,)."""
        d = len(self.mean)
        squares = (np.linalg.solve(self.root, (x - self.mean).T) ** 2).sum(0)
        norm = gammaln((_TAIL + d) / 2) - gammaln(_TAIL / 2) - d / 2 * np.log(_TAIL * np.pi)
        return np.asarray(norm - np.log(np.diag(self.root)).sum() - (_TAIL + d) / 2 * np.log1p(squares / _TAIL))
