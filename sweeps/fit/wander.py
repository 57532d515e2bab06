"""Noise model of evaluations: sampling error, the wander of a run in compute, and the offsets between seeds.

The wander is an Ornstein-Uhlenbeck process in compute, so that spacing counts and not the number of evaluations. A
policy diffuses: how far it strays grows with the root of how long it remembers, and the prior is on that rate. So a
misfit is not taken for wander however well wander would explain it. All is on a reward scale of width 1, compute in
windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

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

    @cached_property
    def bases(self) -> tuple[Array, Array, Array, Array]:
        """Bases in which points without wander have unit variance, and a wander of each memory is independent.

        For each of W covariances without wander and each memory: one for each of `white`; but the first alone of one
        seed's where the others are multiples of it.

        Returns:
            Inverse Cholesky factors of the covariances, (W, n, n); variance in each direction of a wander of unit
            strength at each memory, (W, memories, n); the matrices that turn points, (W, memories, n, n); and the
            multiples of each covariance that there are.
        """
        ratios = [variance / self.white[0] for variance in self.white]
        alike = self.seeds == 1 and all(np.ptp(ratio) <= 1e-12 * ratio[0] for ratio in ratios)
        multiples = np.array([ratio[0] for ratio in ratios] if alike else [1.0])
        whiten = whitening(np.stack([self.between + np.diag(v) for v in (self.white[:1] if alike else self.white)]))
        lag = np.abs(self.x[:, None] - self.x[None, :])
        kernels = np.stack([np.exp(-lag / memory) * self.same for memory in MEMORIES])
        value, vectors = np.linalg.eigh(whiten[:, None] @ kernels @ whiten.transpose(0, 2, 1)[:, None])
        return whiten, np.maximum(value, 0.0), vectors.transpose(0, 1, 3, 2) @ whiten[:, None], multiples


@dataclass(frozen=True, eq=False)
class Noises:
    """The J kinds of noise that a recipe's n points may have, without units.

    Kinds that differ only in how strong the wander is share a basis in which their errors are independent of each
    other, of unit variance were there no wander: points are turned once for all of them.

    Attributes:
        turn: matrix that turns points to each of B bases, (B, n, n).
        base: which basis each kind has, (J,).
        precision: 1 / variance of each turned point, (J, n).
        log_det: log determinant of the covariance, (J,).
        log_prior: log prior weight, (J,).
        white: mean sampling variance, (J,).
        strength, memory: standard deviation and correlation length in windows of the wander, (J,) each.
    """

    turn: Array
    base: NDArray[np.intp]
    precision: Array
    log_det: Array
    log_prior: Array
    white: Array
    strength: Array
    memory: Array

    def take(self, keep: NDArray[np.intp]) -> Noises:
        """Return the kinds of noise at these indices; their prior weights are not normalized again."""
        base = self.base[keep]
        used = np.zeros(len(self.turn), dtype=np.bool_)
        used[base] = True
        bases, base = np.flatnonzero(used), (used.cumsum() - 1)[base]
        rest = [name for name in self.__dataclass_fields__ if name not in ("turn", "base")]
        return Noises(self.turn[bases], base, *(getattr(self, name)[keep] for name in rest))

    @cached_property
    def _members(self) -> list[tuple[int, NDArray[np.intp], Array]]:
        """Each basis, the kinds that have it, and their precisions."""
        by_base = [(b, np.flatnonzero(self.base == b)) for b in range(len(self.turn))]
        return [(b, mine, self.precision[mine]) for b, mine in by_base]

    def weighed(self, columns: Array) -> list[Array]:
        """Turned columns under each kind's precision, for `products`; (B, n, p) -> by basis, of K kinds (K, p, n)."""
        return [precision[:, None, :] * columns[b].T for b, _, precision in self._members]

    def products(self, left: list[Array], right: Array) -> Array:
        """left' V^-1 right of `weighed` and of turned columns under each kind; (B, n, p), (B, n, q) -> (J, p, q)."""
        found = np.empty((len(self.base), left[0].shape[1], right.shape[2]))
        for (b, mine, _), weighed in zip(self._members, left, strict=True):
            found[mine] = (weighed.reshape(-1, weighed.shape[2]) @ right[b]).reshape(len(mine), *found.shape[1:])
        return found

    def squares(self, columns: Array) -> Array:
        """c' V^-1 c of each turned column under each kind; (B, n, q) -> (J, q)."""
        found = np.empty((len(self.base), columns.shape[2]))
        for b, mine, precision in self._members:
            found[mine] = precision @ columns[b] ** 2
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


@lru_cache(maxsize=1)
def _wanders() -> tuple[NDArray[np.intp], Array, Array]:
    """No wander first, then each strength at every memory.

    Returns:
        The memory's index, the memory, and the strength in units of the points' roughness, one a wander.
    """
    which = np.repeat(np.arange(len(MEMORIES)), len(STRENGTHS))
    strength = np.tile(STRENGTHS, len(MEMORIES))
    return np.append(0, which), np.append(1.0, np.array(MEMORIES)[which]), np.append(0.0, strength)


def noises(seen: Seen) -> Noises:
    """Make every kind of noise with its prior weight."""
    white, (whiten, value, turn, multiples) = seen.white, seen.bases
    which, memory, strength = _wanders()
    strength = strength * seen.roughness
    # The prior, (1 + rate^2)^-2, is on the rate of diffusion and not on strength and memory apart.
    rate = strength * np.sqrt(seen.of) / (WANDER_SD * np.sqrt(memory))
    prior = np.append(P_STILL, np.full(len(rate) - 1, (1 - P_STILL) / (len(rate) - 1))) / (1 + rate**2) ** 2
    variance = multiples[:, None, None] + strength[:, None] ** 2 * value[:, None, which]
    log_det = np.log(variance).sum(-1) - 2 * np.log(np.einsum("wnn->wn", whiten)).sum(-1)[:, None, None]
    base = np.repeat(np.arange(len(whiten)) * len(MEMORIES), len(multiples))[:, None] + which
    n, every = len(seen.x), len(white)
    return Noises(
        turn.reshape(-1, n, n), base.ravel(), 1 / variance.reshape(-1, n), log_det.ravel(),
        np.log(np.tile(prior, every) / (every * prior.sum())), np.repeat([each.mean() for each in white], len(which)),
        np.tile(strength, every), np.tile(memory, every),
    )  # fmt: skip


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
