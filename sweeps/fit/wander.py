"""Noise model of evaluations: sampling error, the wander of a run in compute, and the offsets between seeds.

The wander is an Ornstein-Uhlenbeck process in compute, so that spacing counts and not the number of evaluations. A
policy diffuses: how far it strays grows with the root of how long it remembers, and the prior is on that rate. So a
misfit is not taken for wander however well wander would explain it. All is on a reward scale of width 1, compute in
windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dtrtri

from sweeps.fit.constants import (
    EXACT,
    LEAST_SD,
    MEMORIES,
    P_STILL,
    SEED_SD,
    SETTLED,
    STRENGTHS,
    WANDER_SD,
    WHITE_KNOWN,
    WHITE_UNKNOWN,
)
from sweeps.fit.least_squares import Array

# Evaluations of a mean whose covariances are summed one by one.
_MANY = 200


def apart(x: Array) -> Array:
    """Share of the final offset between seeds that is there at a compute in windows, 0 at the start; (n,)."""
    grown: Array = -np.expm1(-x / SETTLED)
    return grown


@dataclass(frozen=True, eq=False)
class Seen:
    """A recipe's evaluations without units.

    Shapes: x (compute in windows), z (reward on a scale of width 1) and seed are (n,), ordered by x; variance (n,) of
    sampling, None if unknown. bounded: whether rewards lie in [0, 1]. of: number of seeds whose mean each run is, 1
    where there are few of them (`sweeps.fit.points.grouped`).
    """

    x: Array
    z: Array
    seed: NDArray[np.intp]
    variance: Array | None
    bounded: bool
    of: float = 1.0

    def __getstate__(self) -> dict[str, object]:
        """Pickle the fields alone: the cached properties are many times as large."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def seeds(self) -> int:
        """Number of seeds among the evaluations."""
        return len(np.unique(self.seed))

    @cached_property
    def same(self) -> Array:
        """1 where two points are of one seed; (n, n)."""
        found: Array = (self.seed[:, None] == self.seed[None, :]).astype(float)
        return found

    @cached_property
    def roughness(self) -> float:
        """Standard deviation of a point about its neighbours: second differences within seeds, by their median."""
        found = []
        for s in np.unique(self.seed):
            z = self.z[self.seed == s]
            if len(z) >= 3:
                # Of independent errors a second difference has 1 + 4 + 1 times the variance.
                found.append((z[:-2] - 2 * z[1:-1] + z[2:]) / np.sqrt(6))
        every = np.abs(np.concatenate(found)) if found else np.zeros(1)
        mean_square = float(np.sqrt(np.mean(every**2)))
        # 1.4826 x the median of absolute values is the standard deviation of a normal (its 75% quantile is 0.6745).
        spread = max(1.4826 * float(np.median(every)), 0.3 * mean_square)
        levels = np.unique(self.z)
        # What never passes, or always does, repeats itself whatever a step of the reward is.
        between = self.z[(self.z > 0) & (self.z < 1)] if self.bounded else self.z
        if len(levels) == 1:
            spread = max(spread, LEAST_SD)
        elif not len(between) or len(np.unique(between)) < 0.6 * len(between):
            # Coarse rewards repeat themselves, which is no precision: a step of theirs is one rollout.
            spread = max(spread, 0.7 * mean_square, 0.5 * float(np.diff(levels).min()))
        if self.variance is not None:
            spread = max(spread, 0.5 * float(np.sqrt(np.median(self.variance))))
        return max(spread, EXACT)

    @cached_property
    def white(self) -> list[Array]:
        """Sampling variances to consider, each (n,)."""
        if self.variance is not None:
            return [np.maximum(self.variance * scale, EXACT**2) for scale in WHITE_KNOWN]
        even = np.full(len(self.x), self.roughness**2)
        return [even * scale**2 for scale in WHITE_UNKNOWN]

    @cached_property
    def between(self) -> Array:
        """Covariance by the offsets between seeds, which grow with compute; (n, n).

        About the mean of the seeds given, which is what the curve is of: how far that lies off the mean of all seeds is
        added where it is asked for (`sweeps.fit.predict.seed_offsets`).
        """
        if self.seeds == 1:
            return np.zeros((len(self.x), len(self.x)))
        grown = apart(self.x)
        result: Array = SEED_SD**2 / self.of * np.outer(grown, grown) * (self.same - 1 / self.seeds)
        return result

    def wandering(self, strength: float, memory: float) -> Array:
        """Covariance by an Ornstein-Uhlenbeck wander of this strength and memory, within seeds; (n, n)."""
        result: Array = strength**2 * np.exp(-np.abs(self.x[:, None] - self.x[None, :]) / memory) * self.same
        return result


@dataclass(frozen=True, eq=False)
class Noises:
    """The J kinds of noise that a recipe's n points may have, without units.

    Attributes:
        whiten: inverse Cholesky factor of each covariance, (J, n, n).
        log_prior: log prior weight, (J,).
        white: mean sampling variance, (J,).
        strength, memory: standard deviation and correlation length in windows of the wander, (J,) each.
    """

    whiten: Array
    log_prior: Array
    white: Array
    strength: Array
    memory: Array

    def take(self, keep: NDArray[np.intp]) -> Noises:
        """Return the kinds of noise at these indices; their prior weights are not normalized again."""
        return Noises(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))

    @cached_property
    def log_det(self) -> Array:
        """Log determinant of the covariance; (J,)."""
        found: Array = -2 * np.log(np.einsum("jnn->jn", self.whiten)).sum(1)
        return found


@dataclass(frozen=True, eq=False)
class Noise:
    """Noise of one run's evaluations about their curve, averaged over kinds of noise, in units of reward.

    Attributes:
        white: sampling variance of one evaluation.
        wander: variance of each of m Ornstein-Uhlenbeck processes, (m,).
        memory: their correlation lengths in compute, (m,).
    """

    white: float
    wander: Array
    memory: Array

    @property
    def sd(self) -> float:
        """Standard deviation of one evaluation."""
        return float(np.sqrt(self.white + self.wander.sum()))

    def covariance(self, compute: Array) -> Array:
        """Covariance of one run's evaluations at these computes; (n,) -> (n, n)."""
        return self.white * np.eye(len(compute)) + self._remembered(compute)

    def _remembered(self, compute: Array) -> Array:
        apart = np.abs(compute[:, None] - compute[None, :])
        result: Array = np.tensordot(self.wander, np.exp(-apart / self.memory[:, None, None]), 1)
        return result

    def correlation(self, apart: float) -> float:
        """Correlation of two evaluations of one run that lie this far apart in compute."""
        return float(self.wander @ np.exp(-apart / self.memory)) / self.sd**2

    def of_mean(self, compute: Array) -> float:
        """Standard deviation of the mean of one run's evaluations, one at each compute (m,)."""
        at = np.asarray(compute, dtype=float)
        # Of very many a few tell how long the run remembers.
        few = at[np.linspace(0, len(at) - 1, min(len(at), _MANY)).astype(np.intp)]
        return float(np.sqrt(self.white / len(at) + self._remembered(few).mean()))


def noise_of(every: Noises, share: Array, end: float, width: float, of: float = 1.0) -> Noise:
    """Average the kinds of noise by their shares (J,), converted to units of compute and reward.

    Args:
        every: J kinds of noise, without units.
        share: weight of each kind, summing to 1, (J,).
        end: largest compute that was evaluated, in the curve's unit.
        width: width of the reward's scale.
        of: number of seeds whose mean each run is; the noise returned is that of a single one.
    """
    memory, which = np.unique(every.memory, return_inverse=True)
    wander: Array = np.bincount(which, share * every.strength**2).astype(float)
    return Noise(of * width**2 * float(share @ every.white), of * width**2 * wander, end * memory)


def noises(seen: Seen, brief: bool = False) -> Noises:
    """Make every kind of noise with its prior weight; if brief, only the few that explain most curves."""
    strengths = np.array(STRENGTHS[:2] if brief else STRENGTHS) * seen.roughness
    # No wander first, then every strength at every memory; all that under each sampling variance.
    memory = np.append(1.0, np.repeat(MEMORIES, len(strengths)))
    strength = np.append(0.0, np.tile(strengths, len(MEMORIES)))
    kernels = [seen.wandering(1.0, each) for each in MEMORIES]
    wander = np.stack([np.zeros_like(kernels[0]), *(s**2 * kernel for kernel in kernels for s in strengths)])
    # The prior, (1 + rate^2)^-2, is on the rate of diffusion and not on strength and memory apart.
    rate = strength * np.sqrt(seen.of) / (WANDER_SD * np.sqrt(memory))
    prior = np.append(P_STILL, np.full(len(rate) - 1, (1 - P_STILL) / (len(rate) - 1))) / (1 + rate**2) ** 2
    white = seen.white[-1:] if brief else seen.white
    covariance = np.concatenate([wander + (seen.between + np.diag(variance)) for variance in white])
    log_prior = np.log(np.tile(prior, len(white)) / (len(white) * prior.sum()))
    mean = np.repeat([variance.mean() for variance in white], len(rate))
    return Noises(whitening(covariance), log_prior, mean, np.tile(strength, len(white)), np.tile(memory, len(white)))


def whitening(covariance: Array) -> Array:
    """Inverse Cholesky factors; (J, n, n) -> (J, n, n)."""
    inverse = np.empty_like(covariance)
    for j, matrix in enumerate(covariance):
        root, bad = dpotrf(matrix, lower=1, clean=1)
        if bad:
            jitter = 1e-8 * np.trace(matrix) / len(matrix)
            root, _ = dpotrf(matrix + jitter * np.eye(len(matrix)), lower=1, clean=1)
        inverse[j] = dtrtri(root, lower=1)[0]
    return inverse
