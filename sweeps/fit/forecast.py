"""Outlook of a recipe: posterior draws of its curve at any compute, in the curve's units, made on demand."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sweeps.fit.least_squares import Array
from sweeps.fit.points import Points, grouped
from sweeps.fit.posterior import Futures, Posterior
from sweeps.fit.schedule import Schedule
from sweeps.fit.wander import Seen

DRAWS = 2000
# Neighbours, or seeds, are averaged beyond this many points: they add nothing but time.
_MOST = 160
# Fewer points than this say nothing of what comes.
_LEAST = 4


@dataclass(frozen=True, eq=False)
class Outlook:
    """Posterior draws of a recipe's curve in its own units, with the weights of the laws behind them.

    Attributes:
        futures: K joint draws of the curve, without units.
        end: largest compute that was evaluated, at the peak learning rate, in the curve's unit.
        bottom, width: lower end and width of the reward's scale.
        weights, log_evidence: posterior probability and log evidence of each law, by name.
        noise: standard deviation of one evaluation about each draw, in reward, (K,).
        schedule: decay of the learning rate, by which compute is counted; None where it is constant or unknown.
    """

    futures: Futures
    end: float
    bottom: float
    width: float
    weights: Mapping[str, float]
    log_evidence: Mapping[str, float]
    noise: Array
    schedule: Schedule | None = None

    def at(self, compute: Array) -> Array:
        """Rewards at each compute (m,), in the curve's units; (K, m)."""
        at = np.asarray(compute, dtype=float)
        at_peak = at if self.schedule is None else self.schedule.count(at)
        return self.bottom + self.width * self.futures.at(at_peak / self.end)

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
        each: number of evaluations whose mean each of `seen` is, on average.
    """

    recipe: str
    seen: Seen
    end: float
    bottom: float
    width: float
    each: float = 1.0
    schedule: Schedule | None = None

    @cached_property
    def outlook(self) -> Outlook:
        """The outlook from these inputs, computed once."""
        # + 5: a stream apart from the draws of the law (`fit`) and from the noise of forecasts (`predict`).
        posterior = Posterior(self.seen, np.random.default_rng(zlib.crc32(self.recipe.encode()) + 5))
        futures = posterior.draw(DRAWS)
        noise = self.width * self.each**0.5 * futures.noise
        # What never passes is read without error.
        noise[futures.dead] = 0.0
        return Outlook(
            futures, self.end, self.bottom, self.width, posterior.weights, posterior.log_evidence, noise, self.schedule
        )


def lookout(
    recipe: str,
    points: Points,
    scale: tuple[float, float] | None,
    schedule: Schedule | None = None,
    evaluations: int | None = None,
) -> Lookout | None:
    """Rescale points to unit-free evaluations for an outlook; None where they are too few or do not vary.

    Args:
        recipe: label of the recipe, which seeds the draws.
        points: points of its curve, compute at the peak learning rate.
        scale: lowest and highest possible reward; None if rewards have no bounds (their own range is then used).
        schedule: conversion from compute spent to the points' compute; None if they are the same.
        evaluations: how many evaluations the points are means of; None if each is one.
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
    each = (evaluations or len(points.reward)) / len(fewer.reward)
    return Lookout(recipe, seen, end, bottom, width, each, schedule)
