"""The forecasting model, and joint draws from its posterior.

    z = R0 + (A - R0) g(x; u, v) + w(x) + s(x) + e

x is compute in windows (multiples of the largest evaluated compute), z the reward on a scale of width 1. g is a law,
that is a form of the curve: a sigmoid, a Weibull curve, or no gain. w is a random walk about the law: Brownian within
the evaluated compute (x <= 1), levelling off beyond. s is the difference between a seed and the mean of the given
seeds, also a random walk. e is white noise.

Given a law, its shape (u, v) and the scales of walk and noise, the rest of the model is Gaussian, so the evidence is
exact. Only these four parameters are sampled, by adaptive importance sampling with deterministic mixture weights (Owen
and Zhou 2000). The covariance of the walk is diagonalized once; each sample then costs time linear in the points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from sweeps.curve import Array
from sweeps.fit.collapse import collapse_probability
from sweeps.fit.constants import (
    A_PRIOR,
    FARTHEST,
    FIXED,
    KNOWN,
    KNOWN_SD,
    LEVEL_PRIOR,
    LEVELLING,
    NOISE_SD,
    OFFSET_WINDOWS,
    P_NONE,
    P_SIGMOID,
    P_WEIBULL,
    QUIET,
    R0_PRIOR,
    SCALE_PRIOR,
    SEED_WALKS,
    WALK_PRIOR,
    WEIBULL_PRIOR,
)
from sweeps.fit.family import SIGMOID, Family, Prior
from sweeps.fit.scaled_points import ScaledPoints

# Sampling draws `_SAMPLES` per round. It stops when the effective sample size reaches `_FINE`, or, after `_ROUNDS`
# rounds, `_ENOUGH`. After `_MAX_ROUNDS` it stops in any case. Each new proposal is fitted to samples with an effective
# size of at least `_ENOUGH`.
_SAMPLES, _FINE, _ENOUGH, _ROUNDS, _MAX_ROUNDS = 200, 200, 15, 12, 40
# Computes at which walks are drawn, in windows: up to the largest evaluated compute, and beyond. At the last of these
# the walks have levelled off.
_WITHIN = np.linspace(0, 1, 25)[1:]
_BEYOND = np.array([*(1 + OFFSET_WINDOWS * np.array([0.2, 0.5, 1])), 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 100.0])
_NODES = np.concatenate([[0.0], _WITHIN, _BEYOND])
# With this many draws or more, a line is the median of every fourth draw, which is faster.
_MANY_DRAWS = 1000
# Variance added to every rotated point, so that its precision stays finite.
_ROUNDING = 1e-8
# A later proposal is wider than the samples so far: its covariance is `_WIDER` times theirs, plus the square of
# `_PRIOR_SHARE` prior standard deviations. `_TAIL`: degrees of freedom of the proposals, which are Student t.
_WIDER, _PRIOR_SHARE, _TAIL = 1.2, 0.05, 5.0


@dataclass(frozen=True)
class Law:
    """A law (form of the curve) by which the reward grows with compute.

    Attributes:
        prior: prior probability of the law.
        basis: g(log x, u, v) for log computes (n,) and shape parameters u and v (k, 1); (k, n), from 0 to 1.
        shape: prior mean and standard deviation of u, and of v.
        r0, a: prior mean and standard deviation of R0 and A.
        rises: whether the law has a gain; if not, R0 is the constant level and A has no meaning.
    """

    name: str
    prior: float
    basis: Callable[[Array, Array, Array], Array]
    shape: Prior
    r0: tuple[float, float] = R0_PRIOR
    a: tuple[float, float] = A_PRIOR
    rises: bool = True


def _weibull(log_x: Array, u: Array, v: Array) -> Array:
    return np.asarray(-np.expm1(-np.exp(np.minimum(np.exp(u) * (log_x - v), 6.0))))


def _no_gain(log_x: Array, u: Array, v: Array) -> Array:
    return np.zeros(np.broadcast_shapes(log_x.shape, u.shape))


_NONE = Law(name="none", prior=P_NONE, basis=_no_gain, shape=((0.0, 1.0), (0.0, 1.0)), r0=LEVEL_PRIOR, rises=False)
LAWS = (
    Law(name="sigmoid", prior=P_SIGMOID, basis=SIGMOID.basis, shape=SIGMOID.prior),
    # u and v are the logarithms of a Weibull curve's power and scale.
    Law(name="weibull", prior=P_WEIBULL, basis=_weibull, shape=(WEIBULL_PRIOR, SCALE_PRIOR)),
    _NONE,
)


def _power_law_basis(family: Family, log_first: float, log_x: Array, u: Array, v: Array) -> Array:
    """Return g of a power law. Its v is not free: it is the logarithm of the first positive compute."""
    return family.basis(log_x, u, np.full_like(v, log_first))


def laws_of(family: Family, first: float, r0: float | None, a: float | None) -> tuple[Law, ...]:
    """Return the laws to average over.

    For a sigmoid with A free these are `LAWS`; for another family, or with A fixed, that family and "no law".

    Args:
        family: the fitted family.
        first: smallest positive compute, as a fraction of the largest, where a power law begins.
        r0, a: R0 and A where they are fixed, on a scale of width 1; None where they are estimated.
    """
    laws: tuple[Law, ...] = LAWS
    if family is not SIGMOID or a is not None:
        basis = family.basis
        if family.name == "power_law":
            basis = partial(_power_law_basis, family, float(np.log(first)))
        laws = (Law(name=family.name, prior=P_SIGMOID + P_WEIBULL, basis=basis, shape=family.prior), _NONE)
    if a is not None:
        laws = tuple(replace(law, a=(a, FIXED)) if law.rises else law for law in laws)
    return laws if r0 is None else tuple(replace(law, r0=(r0, FIXED)) for law in laws)


def walk_variance(x: Array) -> Array:
    """Return the variance, at computes x in windows (any shape), of a walk of scale 1. It levels off after x = 1."""
    return np.where(x <= 1, x, 1 - LEVELLING * np.expm1(-np.maximum(x - 1, 0) / LEVELLING))


@dataclass(frozen=True, eq=False)
class CurveDraws:
    """Joint draws of curves.

    Rewards are on a scale of width 1, compute is in windows (see the module); arrays are (K,) if not stated otherwise.

    Attributes:
        laws, law: the laws, and the index of each draw's law.
        u, v, r0, a: shape parameters, R0 and A of the law.
        walk: the walk at the computes `_NODES`, (K, m); in single precision, to save memory.
        noise: standard deviation of one evaluation.
        log_walk: logarithm of tau, the walk's standard deviation over one window.
        bounded: whether rewards are in [0, 1]; if so, draws are clipped to [0, 1].
        dead: mask of the draws whose reward is 0 from compute `died` on, see `sweeps.fit.collapse`.
    """

    laws: tuple[Law, ...]
    law: NDArray[np.intp]
    u: Array
    v: Array
    r0: Array
    a: Array
    walk: NDArray[np.floating[Any]]
    noise: Array
    log_walk: Array
    bounded: bool
    dead: NDArray[np.bool_]
    died: float = np.inf

    def take(self, rows: NDArray[np.intp]) -> CurveDraws:
        """Return the draws at these indices."""
        names = ("law", "u", "v", "r0", "a", "walk", "noise", "log_walk", "dead")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def at(self, x: Array) -> Array:
        """Return the reward (K, m) of each draw at computes x (m,)."""
        return self._clip(self._law_at(x) + self._walk_at(x, len(_NODES) - 1), x)

    @property
    def current_offset(self) -> Array:
        """Mean of each draw's walk from x = 1 to x = 1 + `OFFSET_WINDOWS`, (K,)."""
        end = len(_WITHIN)
        x, walk = _NODES[end : end + 4], self.walk[:, end : end + 4]
        return np.asarray(((walk[:, 1:] + walk[:, :-1]) / 2 @ np.diff(x)) / OFFSET_WINDOWS)

    @property
    def ceiling(self) -> Array:
        """Reward of each draw's law at x = `FARTHEST`, plus `current_offset`; (K,)."""
        far = np.array([FARTHEST])
        return self._clip(self._law_at(far) + self.current_offset[:, None], far)[:, 0]

    @property
    def asymptote(self) -> Array:
        """A of each draw, plus `current_offset`; (K,)."""
        end = np.array([np.inf])
        return self._clip((self.a + self.current_offset)[:, None], end)[:, 0]

    def line(self, x: Array) -> Array:
        """Return the median (m,) of law plus walk at computes x (m,).

        From x = 1 + `OFFSET_WINDOWS` on, the walk is replaced by `current_offset`.
        """
        if len(self.law) >= _MANY_DRAWS:
            return self.take(np.arange(0, len(self.law), 4)).line(x)
        walk = self._walk_at(x, len(_WITHIN))
        # Just beyond x = 1, interpolate from the walk to the offset that A includes, so that the line ends at A.
        fraction = np.clip((x - 1) / OFFSET_WINDOWS, 0, 1)
        walk = walk * (1 - fraction) + self.current_offset[:, None] * fraction
        return np.asarray(np.median(self._clip(self._law_at(x) + walk, x), axis=0))

    def _walk_at(self, x: Array, last: int) -> Array:
        """Return the walk (K, m) at computes x (m,): linear between nodes, constant after the node number `last`."""
        right_node = np.clip(np.searchsorted(_NODES, x), 1, last)
        fraction = np.clip((x - _NODES[right_node - 1]) / (_NODES[right_node] - _NODES[right_node - 1]), 0, 1)
        return np.asarray(self.walk[:, right_node - 1] * (1 - fraction) + self.walk[:, right_node] * fraction)

    def _law_at(self, x: Array) -> Array:
        rewards = np.empty((len(self.law), len(x)))
        with np.errstate(divide="ignore"):
            log_x = np.log(x)[None]
        for i, law in enumerate(self.laws):
            rows = np.flatnonzero(self.law == i)
            g = law.basis(log_x, self.u[rows, None], self.v[rows, None])
            rewards[rows] = self.r0[rows, None] + (self.a - self.r0)[rows, None] * g
        return rewards

    def _clip(self, paths: Array, x: Array) -> Array:
        """Clip rewards (K, m) at computes x (m,) to the bounds; set those of dead draws to 0."""
        paths[np.ix_(self.dead, x >= self.died)] = 0.0
        return np.clip(paths, 0.0, 1.0) if self.bounded else paths


@dataclass(frozen=True, eq=False)
class _Rotated:
    """The points in coordinates in which walk and noise are independent, for one scale of the seeds' walks.

    Attributes:
        rotation: matrix from points to rotated coordinates, (n, n).
        variance: variance of a walk of scale 1 in each coordinate, (n,); the variance of noise of scale 1 is 1.
        one, z: the constant 1 and the rewards in rotated coordinates; (n,) each.
        log_det: log determinant of the covariance of noise of scale 1.
        cross: covariance of a walk of scale 1 at `_WITHIN` with the rotated points, (m, n).
    """

    rotation: Array
    variance: Array
    one: Array
    z: Array
    log_det: float
    cross: Array


def _rotate(points: ScaledPoints, relative: Array, scale: float) -> _Rotated:
    """Diagonalize the covariance of walks of scale 1.

    Args:
        points: the evaluations.
        relative: variance of each point's noise, relative to the mean variance, (n,).
        scale: scale of the seeds' walks, in units of the recipe's walk.
    """
    h = walk_variance(points.x)
    # A seed's walk is relative to the mean of the given seeds, so its covariances over all seeds sum to 0.
    same = points.seed[:, None] == points.seed
    kernel = np.minimum(h[:, None], h) * (1 + scale**2 * (same - 1 / points.seeds))
    root = np.sqrt(relative)
    eigenvalues, eigenvectors = np.linalg.eigh(kernel / (root[:, None] * root))
    rotation = eigenvectors.T / root
    cross = np.minimum(_WITHIN[:, None], h) @ rotation.T
    return _Rotated(
        rotation,
        np.maximum(eigenvalues, 0.0),
        rotation.sum(1),
        rotation @ points.z,
        float(np.log(relative).sum()),
        cross,
    )


@dataclass(frozen=True, eq=False)
class _Regression:
    """Posterior of R0 and A given the other parameters, one entry per sample, (k,) if not stated otherwise.

    Attributes:
        precision, g: precision of the rotated points, and rotated g at the points, (k, n).
        r0, a: posterior means.
        v01, v11: covariance of R0 and A, and variance of A.
        m00: precision of R0 given A.
        log_evidence: log evidence of the points.
    """

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
        theta: u, v and the logarithms of the scales of walk and noise, (k, 4).
        weight: weight of each sample under each scale of the seeds' walks, (S, k), summing to 1.
        log_evidence: log evidence of the law.
    """

    theta: Array
    weight: Array
    log_evidence: float


class Posterior:
    """The posterior of one recipe's curve: weighted samples under each law, from which curves are drawn.

    Attributes:
        weights: posterior probability of each law, by name.
        log_evidence: log evidence of each law, by name.
    """

    def __init__(self, points: ScaledPoints, rng: np.random.Generator, laws: tuple[Law, ...] = LAWS) -> None:
        self._points, self._rng, self._laws = points, rng, laws
        with np.errstate(divide="ignore"):
            self._log_x = np.log(points.x)[None]
        sampling = np.ones(len(points.x)) if points.variance is None else points.variance
        mean = float(sampling.mean())
        # Known sampling errors are used only if they explain all of the points' roughness.
        self._noise = float(np.log(max(points.roughness, QUIET))), NOISE_SD
        if points.variance is not None and KNOWN * mean**0.5 >= points.roughness:
            self._noise = float(np.log(KNOWN * mean**0.5)), KNOWN_SD
        scales = (0.0,) if points.seeds == 1 else SEED_WALKS
        self._rotated = [_rotate(points, sampling / mean, scale) for scale in scales]
        self._samples = [self._sample_law(i) for i in range(len(laws))]
        self.log_evidence: Mapping[str, float] = {
            law.name: samples.log_evidence for law, samples in zip(laws, self._samples, strict=True)
        }
        log_weight = np.array([np.log(law.prior) + self.log_evidence[law.name] for law in laws])
        share = np.exp(log_weight - np.logaddexp.reduce(log_weight))
        self.weights: Mapping[str, float] = dict(zip((law.name for law in laws), share.tolist(), strict=True))

    def _regress(self, law_index: int, rotated: _Rotated, theta: Array) -> _Regression:
        """Regress the points on R0 (1 - g) + A g under a law, for each row of theta (k, 4), see `_Samples`."""
        law, n = self._laws[law_index], len(rotated.z)
        (m0, s0), (m1, s1) = law.r0, law.a
        u, v, log_walk, log_noise = theta.T[..., None]
        p = 1 / (np.exp(2 * log_walk) * rotated.variance + np.exp(2 * log_noise) + _ROUNDING)
        g = law.basis(self._log_x, u, v) @ rotated.rotation.T
        pg, one, z = p * g, rotated.one, rotated.z
        oo, oz, zz = p @ one**2, p @ (one * z), p @ z**2
        og, gz, gg = pg @ one, pg @ z, (pg * g).sum(1)
        # The normal equations of the columns 1 - g and g, with the prior's precision added.
        m00, m01, m11 = oo - 2 * og + gg + s0**-2, og - gg, gg + s1**-2
        c0, c1 = oz - gz + m0 / s0**2, gz + m1 / s1**2
        det = m00 * m11 - m01**2
        v01, v11 = -m01 / det, m00 / det
        r0, a = m11 / det * c0 + v01 * c1, v01 * c0 + v11 * c1
        # Gaussian evidence with R0 and A integrated out.
        squares = zz + (m0 / s0) ** 2 + (m1 / s1) ** 2 - r0 * c0 - a * c1
        log_evidence = -0.5 * (
            n * np.log(2 * np.pi) + rotated.log_det - np.log(p).sum(1) + np.log(det * (s0 * s1) ** 2) + squares
        )
        return _Regression(precision=p, g=g, r0=r0, a=a, v01=v01, v11=v11, m00=m00, log_evidence=log_evidence)

    def _sample_law(self, law_index: int) -> _Samples:
        """Sample the parameters of a law: first from the prior, then around the samples with the most weight."""
        prior = np.array([*self._laws[law_index].shape, WALK_PRIOR, self._noise])
        proposals = [_StudentT(prior[:, 0], np.diag(prior[:, 1]))]
        theta, log_likelihood = np.empty((0, 4)), np.empty((len(self._rotated), 0))
        for round_ in range(_MAX_ROUNDS):
            new_samples = proposals[-1].draw(_SAMPLES, self._rng)
            theta = np.concatenate([theta, new_samples])
            evidences = [self._regress(law_index, rotated, new_samples).log_evidence for rotated in self._rotated]
            log_likelihood = np.concatenate([log_likelihood, np.stack(evidences) - np.log(len(evidences))], axis=1)
            # Weigh all samples by the mixture of all proposals so far (deterministic mixture).
            log_proposal = np.logaddexp.reduce([bell.log_density(theta) for bell in proposals], 0) - np.log(
                len(proposals)
            )
            log_weight = log_likelihood + _log_normal(theta, prior) - log_proposal
            total = np.logaddexp.reduce(log_weight, 0)
            weight = np.exp(total - total.max())
            effective = float(weight.sum() ** 2 / (weight @ weight))
            if round_ and effective >= (_FINE if round_ < _ROUNDS else _ENOUGH):
                break
            # Fit the next proposal to tempered weights, so that it does not collapse onto a few samples.
            weight = _tempered(total)
            centre = weight @ theta
            deviation = theta - centre
            covariance = _WIDER * (deviation * weight[:, None]).T @ deviation + np.diag(
                (_PRIOR_SHARE * prior[:, 1]) ** 2
            )
            proposals.append(_StudentT(centre, np.asarray(np.linalg.cholesky(covariance))))
        log_total = float(np.logaddexp.reduce(log_weight.ravel()))
        return _Samples(theta, np.exp(log_weight - log_total), log_total - float(np.log(len(theta))))

    def draw(self, count: int) -> tuple[CurveDraws, CurveDraws]:
        """Draw `count` curves of all laws, by posterior probability, and `count` curves of the first law only.

        The first draw's curves of the first law are also in the second draw.
        """
        edges = np.rint(np.cumsum([0.0, *self.weights.values()]) * count).astype(int)
        counts = np.diff(edges)
        parts = [self._draw(i, count if i == 0 else int(counts[i])) for i in range(len(self._laws))]
        p, died = collapse_probability(self._points)
        order = self._rng.permutation(count)
        first_law = [values[order] for values in parts[0]]
        first_law_futures = self._make_curve_draws(np.zeros(count, dtype=np.intp), first_law, p, died)
        parts_by_law = [[values[: counts[0]] for values in first_law], *parts[1:]]
        order = self._rng.permutation(count)
        law = np.repeat(np.arange(len(self._laws)), counts)
        joint_draws = [np.concatenate([part[i] for part in parts_by_law])[order] for i in range(7)]
        return self._make_curve_draws(law[order], joint_draws, p, died), first_law_futures

    def _make_curve_draws(self, law: NDArray[np.intp], draws: Sequence[Array], p: float, died: float) -> CurveDraws:
        """Assemble draws of u, v, r0, a, walk, noise and log_walk. The first fraction p of the rows are dead runs."""
        u, v, r0, a, walk, noise, log_walk = draws
        dead = np.arange(len(law)) < round(p * len(law))
        return CurveDraws(
            laws=self._laws,
            law=law,
            u=u,
            v=v,
            r0=r0,
            a=a,
            walk=walk.astype(np.float32),
            noise=noise,
            log_walk=log_walk,
            bounded=self._points.bounded,
            dead=dead,
            died=died,
        )

    def _draw(self, law_index: int, count: int) -> tuple[Array, ...]:
        """Draw from one law: u, v, r0, a, walk (count, m), noise and log_walk."""
        samples, rng = self._samples[law_index], self._rng
        scale, row = np.divmod(draw_by_weight(samples.weight.ravel(), count, rng), len(samples.theta))
        theta = samples.theta[row]
        r0, a, walk = np.empty(count), np.empty(count), np.empty((count, len(_NODES)))
        for s, rotated in enumerate(self._rotated):
            rows = np.flatnonzero(scale == s)
            if len(rows):
                r0[rows], a[rows], walk[rows] = self._draw_levels(law_index, rotated, theta[rows])
        return theta[:, 0], theta[:, 1], r0, a, walk, np.exp(theta[:, 3]), theta[:, 2]

    def _draw_levels(self, law_index: int, rotated: _Rotated, theta: Array) -> tuple[Array, Array, Array]:
        """Draw R0 and A (k,) and the walk (k, m) given the other parameters (k, 4)."""
        regression, rng, k, m = self._regress(law_index, rotated, theta), self._rng, len(theta), len(_WITHIN)
        a = regression.a + np.sqrt(regression.v11) * rng.standard_normal(k)
        r0 = (
            regression.r0
            + regression.v01 / regression.v11 * (a - regression.a)
            + rng.standard_normal(k) / np.sqrt(regression.m00)
        )
        # Matheron's rule: draw walk and points from the prior, then correct the walk by the difference between the
        # drawn points and the observed rewards.
        tau, sigma = np.exp(theta[:, 2:3]), np.exp(theta[:, 3:4])
        prior_walk = tau * np.cumsum(
            np.sqrt(np.diff(walk_variance(_NODES))) * rng.standard_normal((k, len(_NODES) - 1)), axis=1
        )
        nodes = np.minimum(_WITHIN[:, None], _WITHIN)
        gain = np.linalg.solve(nodes, rotated.cross)
        # Covariance of the points given the walk at the nodes: variation between the nodes, and the seeds' walks.
        value, vectors = np.linalg.eigh(np.diag(rotated.variance) - rotated.cross.T @ gain)
        scale = np.sqrt(tau**2 * np.maximum(value, 0.0) + sigma**2)
        prior_points = prior_walk[:, :m] @ gain + (scale * rng.standard_normal((k, len(value)))) @ vectors.T
        law = r0[:, None] * rotated.one + (a - r0)[:, None] * regression.g
        correction = tau**2 * ((regression.precision * (rotated.z - law - prior_points)) @ rotated.cross.T)
        walk = np.zeros((k, len(_NODES)))
        walk[:, 1 : m + 1] = prior_walk[:, :m] + correction
        # Nothing is observed beyond x = 1, so the last correction is kept.
        walk[:, m + 1 :] = prior_walk[:, m:] + correction[:, -1:]
        return r0, a, walk


def draw_by_weight(weight: Array, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw indices (count,) by weight (n,), in random order. The draw is stratified, which is less noisy."""
    quantiles = (np.arange(count) + rng.random(count)) / max(count, 1)
    indices = np.minimum(np.searchsorted(np.cumsum(weight) / weight.sum(), quantiles), len(weight) - 1)
    return np.asarray(rng.permutation(indices), dtype=np.intp)


def _tempered(log_weight: Array) -> Array:
    """Return weights (k,) that sum to 1, flattened by a power until their effective size is at least `_ENOUGH`."""
    below = log_weight - log_weight.max()
    for power in 0.7 ** np.arange(60):
        weight = np.exp(power * below)
        weight /= weight.sum()
        if 1 / (weight @ weight) >= _ENOUGH:
            break
    return np.asarray(weight)


def _log_normal(x: Array, prior: Array) -> Array:
    """Return the log density (k,) of independent normals at x (k, d).

    `prior` has their means and standard deviations, (d, 2).
    """
    mean, sd = prior.T
    return np.asarray(-0.5 * (((x - mean) / sd) ** 2).sum(1) - np.log(sd).sum() - 0.5 * len(sd) * np.log(2 * np.pi))


@dataclass(frozen=True, eq=False)
class _StudentT:
    """A multivariate Student t distribution, used as proposal because its tails are heavier than the posterior's.

    Attributes:
        mean: mean, (d,).
        root: Cholesky factor of the scale matrix, (d, d).
    """

    mean: Array
    root: Array

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        scale = np.sqrt(_TAIL / rng.chisquare(_TAIL, (count, 1)))
        return np.asarray(self.mean + scale * rng.standard_normal((count, len(self.mean))) @ self.root.T)

    def log_density(self, x: Array) -> Array:
        d = len(self.mean)
        squares = (np.linalg.solve(self.root, (x - self.mean).T) ** 2).sum(0)
        norm = gammaln((_TAIL + d) / 2) - gammaln(_TAIL / 2) - d / 2 * np.log(_TAIL * np.pi)
        return np.asarray(norm - np.log(np.diag(self.root)).sum() - (_TAIL + d) / 2 * np.log1p(squares / _TAIL))
