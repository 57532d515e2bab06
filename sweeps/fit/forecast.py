"""Forecasts of a recipe: posterior draws of its curve at any compute, in the curve's units, computed on demand."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sweeps.curve import Array
from sweeps.fit.family import SIGMOID, Family
from sweeps.fit.points import FitOptions, Points, grouped
from sweeps.fit.posterior import Futures, Posterior, by_weight, laws_of
from sweeps.fit.schedule import Schedule
from sweeps.fit.seen import Seen

DRAWS = 2000
# Above this number of points, neighbours or seeds are averaged: more points only take time.
_MOST = 160
# With fewer points there is no forecast.
_LEAST = 4
# Computes, in windows, at which the fitted line is computed; linear in between.
_LINE = np.concatenate([[0.0], np.geomspace(1e-3, 0.04, 8), np.linspace(0.05, 1, 39), np.geomspace(1.05, 300, 32)])


@dataclass(frozen=True, eq=False)
class Draws:
    """Joint draws of a fitted family's parameters.

    Attributes:
        A, R0: in reward, (K,). A includes the runs' current offset, see `sweeps.fit.posterior.Futures.standing`.
        B, C_mid: shape parameters, (K,); for other families than the sigmoid, their first and second one.
        family: family of the curve.
        schedule: decay of the learning rate, which defines effective compute; None where it is constant or unknown.
    """

    A: Array
    B: Array
    C_mid: Array
    R0: Array
    family: Family = SIGMOID
    schedule: Schedule | None = None

    def share(self, compute: Array) -> Array:
        """Return the share of A - R0 that each draw has gained at `compute`. Shapes: (m,) -> (K, m)."""
        with np.errstate(divide="ignore"):
            log_compute = np.log(compute if self.schedule is None else self.schedule.count(compute))
        u, v = self.family.search(self.B, self.C_mid)
        return self.family.basis(log_compute[None], u[:, None], v[:, None])


@dataclass(frozen=True, eq=False)
class Outlook:
    """Posterior draws of a recipe's curve in its own units, and the posterior weights of the laws.

    Attributes:
        futures: K joint draws of the curve under all laws, without units.
        alone: K draws under the fitted family alone; None after pooling with other recipes.
        draws: K draws of the fitted family's parameters; for a sigmoid, some of them are also in `futures`.
        line: median of law plus walk under the fitted family at the computes `_LINE`, without units.
        end: largest evaluated compute, at the peak learning rate, in the curve's unit.
        bottom, width: lower end and width of the reward's scale.
        weights, log_evidence: posterior probability and log evidence of each law, by name.
        noise: standard deviation of one evaluation about each draw, in reward, (K,).
        schedule: decay of the learning rate, which defines effective compute; None where it is constant or unknown.
    """

    futures: Futures
    alone: Futures | None
    draws: Draws
    line: Array
    end: float
    bottom: float
    width: float
    weights: Mapping[str, float]
    log_evidence: Mapping[str, float]
    noise: Array
    schedule: Schedule | None = None

    def at(self, compute: Array) -> Array:
        """Return the draws' rewards at each compute (m,), in the curve's units; (K, m)."""
        at = np.asarray(compute, dtype=float)
        at = at if self.schedule is None else self.schedule.count(at)
        return self.bottom + self.width * self.futures.at(np.asarray(at / self.end))

    def line_at(self, compute: Array) -> Array:
        """Return the fitted line, in reward, at computes at the peak learning rate; it ends at A's median; (m,)."""
        return np.asarray(self.bottom + self.width * np.interp(compute / self.end, _LINE, self.line))

    @cached_property
    def ceiling(self) -> Array:
        """Ceiling of each draw in reward, see `Futures.ceiling`; (K,)."""
        return self.bottom + self.width * self.futures.ceiling


@dataclass(frozen=True, eq=False)
class Lookout:
    """Inputs of an outlook. The outlook itself is computed at first use, because it is slow.

    Attributes:
        recipe: label of the recipe, which seeds the draws.
        seen: evaluations of the recipe, without units.
        end, bottom, width, schedule: see `Outlook`.
        each: average number of evaluations behind each point of `seen`.
        options: the family, and R0 and A where they are fixed.
    """

    recipe: str
    seen: Seen
    end: float
    bottom: float
    width: float
    options: FitOptions
    each: float = 1.0
    schedule: Schedule | None = None

    @cached_property
    def outlook(self) -> Outlook:
        """The outlook from these inputs, computed once."""
        r0, a = (None if value is None else (value - self.bottom) / self.width for value in self._fixed)
        laws = laws_of(self.options.shape, self._first, r0, a)
        posterior = Posterior(self.seen, generator(self.recipe, "posterior"), laws)
        return self._read(*posterior.draw(DRAWS), posterior.log_evidence)

    def pooled(self, weights: tuple[Array, Array]) -> Lookout:
        """Return a copy whose draws are resampled.

        Args:
            weights: weights of the draws under all laws, and of the draws under the fitted family only.
        """
        assert self.outlook.alone is not None
        rng = generator(self.recipe, "pooled")
        pairs = zip((self.outlook.futures, self.outlook.alone), weights, strict=True)
        futures, alone = (futures.take(by_weight(weight, DRAWS, rng)) for futures, weight in pairs)
        resampled = replace(self)
        # A cached property stores its value in the instance's dictionary: fill it in.
        resampled.__dict__["outlook"] = replace(self._read(futures, alone, self.outlook.log_evidence), alone=None)
        return resampled

    def _read(self, futures: Futures, alone: Futures, log_evidence: Mapping[str, float]) -> Outlook:
        """Convert draws of all laws, and of the family alone, to the curve's units."""
        # A point of `each` evaluations is a mean: one evaluation is noisier by the square root.
        family = self.options.shape
        noise = self.width * self.each**0.5 * futures.noise
        # A dead run earns exactly 0, without noise.
        noise[futures.dead] = 0.0
        v = np.full(DRAWS, np.log(self._first)) if family.name == "power_law" else alone.v
        first, second = family.natural(alone.u, v)
        draws = Draws(
            A=self.bottom + self.width * alone.asymptote,
            B=first * self.end ** family.powers[0],
            C_mid=second * self.end ** family.powers[1],
            R0=self.bottom + self.width * alone.r0,
            family=family,
            schedule=self.schedule,
        )
        share = np.bincount(futures.law, minlength=len(futures.laws)) / len(futures.law)
        return Outlook(
            futures=futures,
            alone=alone,
            draws=draws,
            line=alone.line(_LINE),
            end=self.end,
            bottom=self.bottom,
            width=self.width,
            weights={law.name: float(share[i]) for i, law in enumerate(futures.laws)},
            log_evidence=log_evidence,
            noise=noise,
            schedule=self.schedule,
        )

    @property
    def limits(self) -> tuple[float, float] | None:
        """Lowest and highest possible reward; None if rewards have no bounds."""
        return (self.bottom, self.bottom + self.width) if self.seen.bounded else None

    @property
    def _first(self) -> float:
        """Smallest positive compute, in windows."""
        return float(self.seen.x[self.seen.x > 0].min())

    @property
    def _fixed(self) -> tuple[float | None, float | None]:
        """R0 and A where the options fix them, in reward."""
        r0 = None if isinstance(self.options.r0, str) else self.options.r0
        return 0.0 if self.options.family == "sigmoid_zero" else r0, self.options.asymptote


# Purposes of a recipe's random numbers. The index in this list is part of the seed: append new ones at the end.
_STREAMS = (
    "posterior",
    "pooled",
    "noise",
    "seeds",
    "asymptote",
    "reward",
    "efficiency",
    "pair",
    "paired",
    "sets",
)


def generator(name: str, stream: str) -> np.random.Generator:
    """Return the random numbers of a recipe for one purpose: the same in every process, independent of other streams.

    Args:
        name: label of the recipe, or of another object that is drawn.
        stream: one of `_STREAMS`.
    """
    # crc32 instead of `hash`, which is salted per process.
    return np.random.default_rng([zlib.crc32(name.encode()), _STREAMS.index(stream)])


def lookout(
    recipe: str,
    points: Points,
    scale: tuple[float, float] | None,
    schedule: Schedule | None = None,
    options: FitOptions | None = None,
) -> Lookout | None:
    """Rescale points to unit-free evaluations for an outlook; None where they are too few or do not vary.

    Args:
        recipe: label of the recipe, which seeds the draws.
        points: points of its curve; compute at the peak learning rate.
        scale: lowest and highest possible reward; None if rewards are unbounded (their observed range is then used).
        schedule: conversion from compute spent to the points' compute; None if they are equal.
        options: the family, and R0 and A where they are fixed; the defaults if None.
    """
    positive = points.compute > 0
    if len(points.reward) < _LEAST or len(np.unique(points.compute[positive])) < _LEAST - 1:
        return None
    bottom, top = scale or (float(points.reward.min()), float(points.reward.max()))
    width = top - bottom
    if width <= 0:
        return None
    fewer = grouped(points, _MOST)
    order = np.lexsort((fewer.seed, fewer.compute))
    end = float(points.compute.max())
    variance = None if fewer.variance is None else np.round(fewer.variance[order] / width**2, 14)
    # Rounded, so that changing the unit of compute or reward does not change a bit of the result.
    x, z = np.round(fewer.compute[order] / end, 12), np.round((fewer.reward[order] - bottom) / width, 12)
    seen = Seen(x, z, fewer.seed[order], variance, scale is not None)
    per_point = len(points.reward) / len(fewer.reward)
    return Lookout(
        recipe=recipe,
        seen=seen,
        end=end,
        bottom=bottom,
        width=width,
        options=options or FitOptions(),
        each=per_point,
        schedule=schedule,
    )
