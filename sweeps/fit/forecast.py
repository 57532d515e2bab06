"""Forecasts of a recipe: posterior draws of its curve at any compute, in the curve's units, computed on demand."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sweeps.curve import Array
from sweeps.fit.family import SIGMOID, Family
from sweeps.fit.points import FitOptions, Points, average_neighbours
from sweeps.fit.posterior import CurveDraws, Posterior, draw_by_weight, laws_of
from sweeps.fit.scaled_points import ScaledPoints
from sweeps.fit.schedule import Schedule

DRAWS = 2000
# With more points than this, neighbouring points, or points of several seeds, are averaged: more points only take time.
_MAX_POINTS = 160
# With fewer points than this there is no forecast.
_MIN_POINTS = 4
# Computes, relative to the largest evaluated one, at which the fitted line is evaluated. In between it is linear.
_LINE = np.concatenate([[0.0], np.geomspace(1e-3, 0.04, 8), np.linspace(0.05, 1, 39), np.geomspace(1.05, 300, 32)])


@dataclass(frozen=True, eq=False)
class Draws:
    """Joint draws of a fitted family's parameters.

    Attributes:
        A, R0: asymptote and reward at compute 0, (K,). A includes the mean of the random walk just beyond the data
            (`sweeps.fit.posterior.Futures.current_offset`).
        B, C_mid: first and second shape parameter of the family, (K,); B and C_mid for a sigmoid.
        family: family of the curve.
        schedule: decay of the learning rate, which converts compute to effective compute; None if it is constant or
            unknown.
    """

    A: Array
    B: Array
    C_mid: Array
    R0: Array
    family: Family = SIGMOID
    schedule: Schedule | None = None

    def gain_fraction(self, compute: Array) -> Array:
        """Return the fraction (K, m) of A - R0 that each draw has gained at computes (m,)."""
        with np.errstate(divide="ignore"):
            log_compute = np.log(compute if self.schedule is None else self.schedule.effective_compute(compute))
        u, v = self.family.coordinates(self.B, self.C_mid)
        return self.family.basis(log_compute[None], u[:, None], v[:, None])


@dataclass(frozen=True, eq=False)
class Outlook:
    """Posterior draws of a recipe's curve in its own units, and posterior weights of its possible forms, the laws.

    Attributes:
        futures: K joint draws of the curve under all laws, without units.
        family_futures: K draws of the curve under the fitted family only; None after pooling with other recipes.
        draws: K draws of the fitted family's parameters.
        line: fitted line at the computes `_LINE`, without units: the median, under the fitted family, of curve plus
            random walk.
        end: largest evaluated compute, as effective compute (at the peak learning rate), in the curve's unit.
        bottom, width: lower end and width of the reward's scale.
        weights, log_evidence: posterior probability and log evidence of each law, by name.
        noise: standard deviation of one evaluation about each draw, in reward, (K,).
        schedule: decay of the learning rate, which converts compute to effective compute; None if it is constant or
            unknown.
    """

    futures: CurveDraws
    family_futures: CurveDraws | None
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
        """Return the draws' rewards (K, m) at each compute (m,), in the curve's units."""
        at = np.asarray(compute, dtype=float)
        at = at if self.schedule is None else self.schedule.effective_compute(at)
        return self.bottom + self.width * self.futures.at(np.asarray(at / self.end))

    def fitted_line_at(self, compute: Array) -> Array:
        """Return the fitted line, in reward, at effective computes (m,). It ends at A's median."""
        return np.asarray(self.bottom + self.width * np.interp(compute / self.end, _LINE, self.line))

    @cached_property
    def ceiling(self) -> Array:
        """Ceiling of each draw in reward, see `Futures.ceiling`; (K,)."""
        return self.bottom + self.width * self.futures.ceiling


@dataclass(frozen=True, eq=False)
class OutlookInputs:
    """Inputs of an outlook, which is slow and therefore computed when first read.

    Attributes:
        recipe: label of the recipe, which seeds the draws.
        points: evaluations of the recipe, without units.
        end, bottom, width, schedule: see `Outlook`.
        evaluations_per_point: mean number of evaluations that were averaged into one point; 1 without averaging.
        options: the family, and R0 and A where they are fixed.
    """

    recipe: str
    points: ScaledPoints
    end: float
    bottom: float
    width: float
    options: FitOptions
    evaluations_per_point: float = 1.0
    schedule: Schedule | None = None

    @cached_property
    def outlook(self) -> Outlook:
        """The outlook from these inputs."""
        r0, a = (None if value is None else (value - self.bottom) / self.width for value in self._fixed)
        laws = laws_of(self.options.curve_family, self._first, r0, a)
        posterior = Posterior(self.points, generator(self.recipe, "posterior"), laws)
        return self._outlook_from(*posterior.draw(DRAWS), posterior.log_evidence)

    def resample(self, weights: Callable[[Array], Array]) -> OutlookInputs:
        """Return a copy whose draws, under all laws and under the fitted family, are resampled by weight.

        Args:
            weights: function that returns the weights (K,) of draws, given their `Futures.log_walk` (K,).
        """
        assert self.outlook.family_futures is not None
        rng = generator(self.recipe, "pooled")
        futures, family_futures = (
            each.take(draw_by_weight(weights(each.log_walk), DRAWS, rng))
            for each in (self.outlook.futures, self.outlook.family_futures)
        )
        resampled = replace(self)
        # A cached property stores its value in the instance's dictionary: store the resampled outlook there.
        resampled.__dict__["outlook"] = replace(
            self._outlook_from(futures, family_futures, self.outlook.log_evidence), family_futures=None
        )
        return resampled

    def _outlook_from(
        self, futures: CurveDraws, family_futures: CurveDraws, log_evidence: Mapping[str, float]
    ) -> Outlook:
        # A point is a mean of several evaluations. One evaluation is noisier by the square root of their number.
        family = self.options.curve_family
        noise = self.width * self.evaluations_per_point**0.5 * futures.noise
        # A dead run earns exactly 0, without noise.
        noise[futures.dead] = 0.0
        v = np.full(DRAWS, np.log(self._first)) if family.name == "power_law" else family_futures.v
        first, second = family.to_shape(family_futures.u, v)
        draws = Draws(
            A=self.bottom + self.width * family_futures.asymptote,
            B=first * self.end ** family.powers[0],
            C_mid=second * self.end ** family.powers[1],
            R0=self.bottom + self.width * family_futures.r0,
            family=family,
            schedule=self.schedule,
        )
        fractions = np.bincount(futures.law, minlength=len(futures.laws)) / len(futures.law)
        return Outlook(
            futures=futures,
            family_futures=family_futures,
            draws=draws,
            line=family_futures.line(_LINE),
            end=self.end,
            bottom=self.bottom,
            width=self.width,
            weights={law.name: float(fractions[i]) for i, law in enumerate(futures.laws)},
            log_evidence=log_evidence,
            noise=noise,
            schedule=self.schedule,
        )

    @property
    def limits(self) -> tuple[float, float] | None:
        """Lowest and highest possible reward; None if rewards have no bounds."""
        return (self.bottom, self.bottom + self.width) if self.points.bounded else None

    @property
    def _first(self) -> float:
        """Smallest positive compute, as a fraction of the largest evaluated compute."""
        return float(self.points.x[self.points.x > 0].min())

    @property
    def _fixed(self) -> tuple[float | None, float | None]:
        r0 = None if isinstance(self.options.r0, str) else self.options.r0
        return 0.0 if self.options.family == "sigmoid_zero" else r0, self.options.asymptote


# Purposes of a recipe's random numbers. Their index is part of the seed: append new purposes at the end.
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
    """Return a generator of a recipe's random numbers for one purpose, with the same seed in every process.

    Args:
        name: label of the recipe, or of another object that is drawn.
        stream: purpose of the numbers, one of `_STREAMS`.
    """
    # `hash` would differ between processes, because it is salted.
    return np.random.default_rng([zlib.crc32(name.encode()), _STREAMS.index(stream)])


def outlook_inputs(
    recipe: str,
    points: Points,
    scale: tuple[float, float] | None,
    schedule: Schedule | None = None,
    options: FitOptions | None = None,
) -> OutlookInputs | None:
    """Rescale points to be without units, as inputs of an outlook; None if they are too few or do not vary.

    Args:
        recipe: label of the recipe, which seeds the draws.
        points: points of the recipe's curve, in effective compute.
        scale: lowest and highest possible reward; None if rewards are unbounded (their observed range is then used).
        schedule: conversion from compute spent to effective compute; None if they are equal.
        options: the family, and R0 and A where they are fixed; None for `FitOptions()`.
    """
    positive = points.compute > 0
    if len(points.reward) < _MIN_POINTS or len(np.unique(points.compute[positive])) < _MIN_POINTS - 1:
        return None
    bottom, top = scale or (float(points.reward.min()), float(points.reward.max()))
    width = top - bottom
    if width <= 0:
        return None
    averaged = average_neighbours(points, _MAX_POINTS)
    order = np.lexsort((averaged.seed, averaged.compute))
    end = float(points.compute.max())
    variance = None if averaged.variance is None else np.round(averaged.variance[order] / width**2, 14)
    # Rounding makes the result bit-equal under a change of the units of compute and reward.
    x, z = np.round(averaged.compute[order] / end, 12), np.round((averaged.reward[order] - bottom) / width, 12)
    scaled = ScaledPoints(x, z, averaged.seed[order], variance, scale is not None)
    per_point = len(points.reward) / len(averaged.reward)
    return OutlookInputs(
        recipe=recipe,
        points=scaled,
        end=end,
        bottom=bottom,
        width=width,
        options=options or FitOptions(),
        evaluations_per_point=per_point,
        schedule=schedule,
    )
