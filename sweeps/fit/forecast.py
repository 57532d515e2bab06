"""Outlook of a recipe: posterior draws of its curve at any compute, in the curve's units, made on demand."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sweeps.fit.draws import Futures, draw
from sweeps.fit.least_squares import Array
from sweeps.fit.mixture import JUMP, Mixture, mixture
from sweeps.fit.points import Points, grouped
from sweeps.fit.schedule import Schedule
from sweeps.fit.wander import Noise, Seen, noise_of

DRAWS = 2000
# Neighbours, or seeds, are averaged beyond this many points: they add nothing but time.
_MOST = 160
# Fewer points than this say nothing of what comes.
_LEAST = 4


@dataclass(frozen=True)
class Jump:
    """A jump that the points show: its probability, where in compute, and by how much in reward (medians)."""

    p: float
    compute: float
    size: float


@dataclass(frozen=True, eq=False)
class Outlook:
    """Posterior draws of a recipe's curve in its own units, with the weights of the kinds behind them.

    Attributes:
        futures: K joint draws of the curve, without units.
        end: largest compute that was evaluated, at the peak learning rate, in the curve's unit.
        bottom, width: lower end and width of the reward's scale.
        weights, skill: posterior weight and log predictive density of each kind of curve, by name.
        jump: a jump that the points show; None unless it is more likely than not.
        noise: noise of evaluations about the curve.
        schedule: decay of the learning rate, by which compute is counted; None where it is constant or unknown.
    """

    futures: Futures
    end: float
    bottom: float
    width: float
    weights: Mapping[str, float]
    skill: Mapping[str, float]
    jump: Jump | None
    noise: Noise
    schedule: Schedule | None = None

    def at(self, compute: Array) -> Array:
        """Rewards at each compute (m,), in the curve's units; (K, m)."""
        at = np.asarray(compute, dtype=float)
        at_peak = at if self.schedule is None else self.schedule.count(at)
        return self.bottom + self.width * self.futures.at(at_peak / self.end)

    def smoothed(self) -> tuple[Array, Array]:
        """Return a smooth of the window under no curve: computes (w,), and draws of the reward there (S, w)."""
        values = self.bottom + self.width * self.futures.smoothed
        at_peak: Array = self.end * self.futures.nodes[: values.shape[1]]
        return at_peak if self.schedule is None else self.schedule.compute_at(at_peak), values

    @cached_property
    def ceiling(self) -> Array:
        """Final reward of each draw, in reward units, see `Futures.ceiling`; (K,)."""
        return self.bottom + self.width * self.futures.ceiling


@dataclass(frozen=True, eq=False)
class Lookout:
    """Inputs of an outlook, and the outlook itself, computed at first use because it is slow.

    Attributes:
        recipe: its label, which seeds the draws.
        seen: its evaluations, without units.
        end, bottom, width, schedule: see `Outlook`.
        prior: prior weight of each kind of curve, learnt from all recipes of the study; None for the default.
    """

    recipe: str
    seen: Seen
    end: float
    bottom: float
    width: float
    prior: Mapping[str, float] | None = None
    schedule: Schedule | None = None

    @cached_property
    def outlook(self) -> Outlook:
        """The outlook from these inputs, computed once."""
        found = mixture(self.seen, prior=self.prior)
        return Outlook(
            # + 5: a stream apart from the draws of the law (`fit`) and from the noise of forecasts (`predict`).
            draw(found, DRAWS, np.random.default_rng(zlib.crc32(self.recipe.encode()) + 5)),
            self.end, self.bottom, self.width, found.weights, found.skill,
            _jump(found, self.end, self.width, self.schedule),
            noise_of(found.noise, found.noise_share, self.end, self.width, self.seen.of), self.schedule,
        )  # fmt: skip


def _jump(found: Mixture, end: float, width: float, schedule: Schedule | None) -> Jump | None:
    """Return the jump with probability above 0.5, else None; two evaluations of each seed must follow it."""
    after = len(found.seen.x) - np.searchsorted(found.seen.x, found.cells.at)
    cells = found.cells.take((found.cells.extra == JUMP) & (after >= 2 * found.seen.seeds))
    weight = np.exp(cells.log_weight)
    p = float(weight.sum())
    if p <= 0.5:
        return None

    def median(values: Array) -> float:
        order = np.argsort(values)
        return float(values[order][np.searchsorted(np.cumsum(weight[order]), 0.5 * weight.sum())])

    at = end * median(cells.at)
    at = at if schedule is None else float(schedule.compute_at(np.array(at)))
    return Jump(p, at, width * median(cells.extra_mean))


def lookout(
    recipe: str, points: Points, scale: tuple[float, float] | None, schedule: Schedule | None = None
) -> Lookout | None:
    """Rescale points to unit-free evaluations for an outlook; None where they are too few or do not vary.

    Args:
        recipe: label of the recipe, which seeds the draws.
        points: points of its curve, compute at the peak learning rate.
        scale: lowest and highest possible reward; None if rewards have no bounds (their own range is then used).
        schedule: conversion from compute spent to the points' compute; None if they are the same.
    """
    positive = points.compute > 0
    if len(points.reward) < _LEAST or len(np.unique(points.compute[positive])) < _LEAST - 1:
        return None
    bottom, top = scale or (float(points.reward.min()), float(points.reward.max()))
    width = top - bottom
    if width <= 0:
        return None
    fewer, of = grouped(points, _MOST)
    order = np.lexsort((fewer.seed, fewer.compute))
    end = float(points.compute.max())
    variance = None if fewer.variance is None else fewer.variance[order] / width**2
    x, z = fewer.compute[order] / end, (fewer.reward[order] - bottom) / width
    seen = Seen(x, z, fewer.seed[order], variance, scale is not None, of)
    return Lookout(recipe, seen, end, bottom, width, schedule=schedule)
