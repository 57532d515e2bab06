"""Joint draws of a curve's future at any compute, on which forecasts, rankings and plans rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from sweeps.fit.constants import COLLAPSE, FARTHEST
from sweeps.fit.grid import by_weight, draw_levels
from sweeps.fit.kinds import KINDS, drifting
from sweeps.fit.least_squares import Array
from sweeps.fit.mixture import DRIFT, JUMP, NONE, Mixture, Walk
from sweeps.fit.wander import Seen

# Where a walk is drawn beyond the window's end, in windows.
_NODES = np.array([0.02, 0.05, 0.1, 0.175, 0.25, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 9, 20, 50, 99.0])
_SMOOTHED = 400
_CEILING = np.array([*(kind.ceiling for kind in KINDS), False])
_WALKING = len(KINDS)


@dataclass(frozen=True, eq=False)
class Futures:
    """Joint draws of curves on a reward scale of width 1, compute in units of the window's end.

    Attributes:
        kind: index into `KINDS` of each draw, `len(KINDS)` for a walk; (K,), as all arrays without another shape.
        u, v, r0, a: shape coordinates, R0 and A.
        extra, size, jump_at, width: drift or jump on top of the curve, see `sweeps.fit.grid.Cells`.
        nodes, levels: computes (m,), and the levels of the W walks there, (W, m).
        smoothed: draws of the reward within the window, at the first w nodes, under no law but that it wanders, (S, w).
        bounded: whether rewards lie in [0, 1].
        dead: draws whose reward stays at 0 from `died` on, (K,) and a compute; see `death`.
    """

    kind: NDArray[np.intp]
    u: Array
    v: Array
    r0: Array
    a: Array
    extra: NDArray[np.intp]
    size: Array
    jump_at: Array
    width: Array
    nodes: Array
    levels: Array
    smoothed: Array
    bounded: bool
    dead: NDArray[np.bool_]
    died: float = np.inf

    def at(self, x: Array) -> Array:
        """Return each draw's rewards at computes x (m,), in windows; (K, m)."""
        paths = np.empty((len(self.kind), len(x)))
        for i in np.unique(self.kind):
            mine = np.flatnonzero(self.kind == i)
            if i == _WALKING:
                paths[mine] = np.stack([np.interp(x, self.nodes, level) for level in self.levels])
                continue
            g = KINDS[i].shape(x[None, :], self.u[mine, None], self.v[mine, None])
            paths[mine] = self.r0[mine, None] * (1 - g) + self.a[mine, None] * g
        adrift, jumped = np.flatnonzero(self.extra == DRIFT), np.flatnonzero(self.extra == JUMP)
        paths[adrift] += self.size[adrift, None] * drifting(x)[None, :]
        steps = (x[None, :] - self.jump_at[jumped, None]) / self.width[jumped, None]
        paths[jumped] += self.size[jumped, None] * expit(steps)
        paths[np.ix_(self.dead, x >= self.died)] = 0.0
        return np.clip(paths, 0.0, 1.0) if self.bounded else paths

    @cached_property
    def ceiling(self) -> Array:
        """Reward of each draw at `FARTHEST` windows, its drift held at the value of the window's end. (K,).

        A ceiling that is approached more slowly than that could be neither observed nor used by a study.
        """
        still = replace(self, extra=np.where(self.extra == DRIFT, NONE, self.extra))
        drifted = np.where((self.extra == DRIFT) & ~self.dead, self.size, 0.0)
        value: Array = still.at(np.array([FARTHEST]))[:, 0] + drifted
        return np.clip(value, 0.0, 1.0) if self.bounded else value


def death(seen: Seen) -> tuple[float, float]:
    """Return how likely a run that came down to no reward at all stays there, and the compute where it began.

    Where no completion earns anything every advantage is 0, and nothing leads out again; but a few samples may all fail
    by chance. Of k evaluations in a row at 0, the last there are, a dead run shows k for certain; one that fails by
    chance shows the next whenever it has shown the last, which it did s times of s + r before (Laplace's rule, and one
    death for every r recoveries). Of several seeds k is the least:

        P = d / (d + (1 - d) q^(k - 1)),   d = 1 / (r + 2),   q = (s + 1) / (s + r + 2)

    Returns:
        The probability and the compute; 0 for fewer than two evaluations at 0, or a run that never was at `COLLAPSE`.
    """
    never = 0.0, np.inf
    if not seen.bounded or seen.z.all():
        return never
    # Of every seed, and of the seeds together, which may be evaluated at other computes each.
    k = min(_trailing(seen.z[seen.seed == seed] == 0) for seed in np.unique(seen.seed))
    high = np.flatnonzero(seen.z >= COLLAPSE)
    if not len(high) or k < 2:
        return never
    x, of = np.unique(seen.x, return_inverse=True)
    none = np.bincount(of, seen.z != 0) == 0
    gone = len(x) - _trailing(none)
    before = none[int(of[high].min()) : gone]
    stayed, left = int((before[:-1] & before[1:]).sum()), int((before[:-1] & ~before[1:]).sum())
    d, q = 1 / (left + 2), (stayed + 1) / (stayed + left + 2)
    return d / (d + (1 - d) * q ** (k - 1)), float(x[gone])


def _trailing(mask: NDArray[np.bool_]) -> int:
    """Count how many at the end of a mask (n,) are true."""
    return int(np.cumprod(mask[::-1]).sum())


def draw(found: Mixture, count: int, rng: np.random.Generator) -> Futures:
    """Draw futures from the posterior mixture, cells and walks by their weights."""
    cells, walk = found.cells, found.walk
    weight = np.exp(np.concatenate([cells.log_weight, walk.log_weight]))
    chosen = by_weight(weight, count, rng)
    curves = chosen < len(cells.log_weight)
    at = chosen[curves]
    kind = np.full(count, _WALKING, dtype=np.intp)
    extra = np.full(count, NONE, dtype=np.intp)
    u, v, r0, a, size, jump_at, width = np.zeros((7, count))
    kind[curves], extra[curves] = cells.kind[at], cells.extra[at]
    u[curves], v[curves], jump_at[curves], width[curves] = cells.u[at], cells.v[at], cells.at[at], cells.width[at]
    size[curves] = cells.extra_mean[at] + cells.extra_sd[at] * rng.standard_normal(len(at))
    r0[curves], a[curves] = draw_levels(cells, at, size[curves], found.seen.bounded, _CEILING[kind[curves]], rng)
    walking = chosen[~curves] - len(cells.log_weight)
    now = _levels(walk, walking, rng)
    # A smooth of the window by the walk alone, whatever its weight among the kinds.
    share = np.exp(walk.log_weight - walk.log_weight.max())
    smoothed = _levels(walk, rng.choice(len(share), _SMOOTHED, p=share / share.sum()), rng)
    # A walk's increments are independent, of variance step^2 times the compute between nodes.
    spans = np.sqrt(np.diff(_NODES, prepend=0.0))
    moved = np.cumsum(walk.step[walking, None] * spans * rng.standard_normal((len(walking), len(spans))), axis=1)
    levels = np.concatenate([now, now[:, -1:] + moved], axis=1)
    nodes = np.concatenate([walk.x, walk.x[-1] + _NODES])
    p, died = death(found.seen)
    dead = np.zeros(count, dtype=np.bool_)
    dead[rng.permutation(count)[: round(p * count)] if p else []] = True
    return Futures(
        kind, u, v, r0, a, extra, size, jump_at, width, nodes, levels, smoothed, found.seen.bounded, dead, died
    )  # fmt: skip


def _levels(walk: Walk, which: NDArray[np.intp], rng: np.random.Generator) -> Array:
    """Draw a walk's level at its nodes, under the strengths with these indices; (k,) -> (k, m)."""
    noise = rng.standard_normal((len(which), len(walk.x), 1))
    return np.asarray(walk.level[which] + (walk.root[which] @ noise)[..., 0])
