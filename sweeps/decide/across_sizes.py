"""Joint model of a recipe's sigmoids across model sizes, and the frontier: the best size for each budget.

    log(1 - A) = a0 - a1 log N     log C_mid = c0 + c1 log N     log B = b0     log(1 - R0) = r0 - r1 log N

Each size deviates from each line by N(0, tau^2). A Gibbs sampler (Gelman and Hill 2007, chapter 12) alternates two
steps. It draws the four numbers of each size from the posterior of that size's own runs (`sweeps.fit.posterior`),
weighted by how well they agree with the lines. It then draws the lines given those numbers. So a size whose curve has
not bent yet borrows from the sizes that have, as far as sizes follow a line; and a size that was not run gets a curve.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sweeps.as_json import AsJson
from sweeps.curve import Array
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import FAR, quantiles, seed_offsets
from sweeps.fit.schedule import Schedule

# For (1 - A, C_mid, B, 1 - R0), in logarithms: whether it changes with size; the prior standard deviation of the slope;
# the prior deviation of sizes from the line, which counts as `_OFF_WORTH` observed sizes. Published values are well
# within these priors (compute to reach a loss grows at most like N^2; 1 - A shrinks with a power below 1).
_SLOPED = (True, True, False, True)
_SLOPE_SD = (0.5, 1.0, 1.0, 0.5)
_OFF, _OFF_WORTH = (0.1, 0.3, 0.15, 0.05), 2.0
# Lower limit of 1 - A: a ceiling at the bound would have no logarithm.
_LEAST = 1e-3
_BURN, _DRAWS = 200, 1000
_GRID, _BUDGETS = 61, 40


@dataclass(frozen=True)
class Frontier(AsJson):
    """The best size at one compute, and the reward it reaches there. extrapolation: compute beyond every run."""

    compute: float
    size: Interval
    R: Interval
    extrapolation: bool


@dataclass(frozen=True, eq=False)
class AcrossSizes(AsJson):
    """Joint posterior draws of one recipe's sigmoids across all its model sizes.

    Attributes:
        sizes: model sizes that were run, ascending, in parameters, (S,).
        own: D draws of each size's log(1 - A), log C_mid, log B and log(1 - R0), (D, S, 4).
        line: for each of the four, the value at the mean of log N over the sizes, and the slope in log N, (D, 4, 2).
        off: tau, the standard deviation of sizes about the line, (D, 4).
        schedules: decay of each size's learning rate, which defines effective compute; None where it is constant.
    """

    sizes: Array
    own: Array
    line: Array
    off: Array
    schedules: tuple[Schedule | None, ...]

    def curve(self, size: float, compute: Array) -> Array:
        """Return draws of the mean reward over seeds of a size, run or not; (m,) -> (D, m)."""
        at = np.flatnonzero(np.isclose(self.sizes, size, rtol=1e-9))
        schedule = self.schedules[int(at[0])] if len(at) else None
        return _rewards(self._numbers(size), compute if schedule is None else schedule.count(compute))

    def _numbers(self, size: float) -> Array:
        """Return draws of a size's four logarithms, (D, 4); a size that was not run is off the line by N(0, tau^2)."""
        at = np.flatnonzero(np.isclose(self.sizes, size, rtol=1e-9))
        if len(at):
            draws: Array = self.own[:, int(at[0])]
            return draws
        rng = np.random.default_rng(zlib.crc32(f"{size:.9g}".encode()))
        return self._on_line(np.log(size)) + self.off * rng.standard_normal(self.off.shape)

    def _on_line(self, log_size: float) -> Array:
        # The line's value is given at the mean of log N over the sizes that were run.
        return np.asarray(self.line[..., 0] + self.line[..., 1] * (log_size - np.log(self.sizes).mean()))

    def ceiling(self, size: float) -> Interval:
        """Return the asymptote A of a size, run or not, with its 95% interval."""
        return quantiles(1 - np.exp(self._numbers(size)[:, 0]))

    def half_gain(self, size: float) -> Interval:
        """Return C_mid of a size, run or not, in the unit of compute, with its 95% interval."""
        return quantiles(np.exp(self._numbers(size)[:, 1]))

    @property
    def exponents(self) -> dict[str, Interval]:
        """Exponents of the model size N in 1 - A and in C_mid, by name."""
        return {"one_minus_A": quantiles(self.line[:, 0, 1]), "C_mid": quantiles(self.line[:, 1, 1])}

    def frontier(self, start: float, end: float) -> tuple[Frontier, ...]:
        """Return the best size for budgets from the first evaluation to the limit of useful forecasts.

        A size between two that were run deviates from the line like its neighbours; sizes outside their range are not
        proposed.

        Args:
            start: compute of the first evaluation of any size, in the curves' unit.
            end: compute of the last one.
        """
        log_n = np.linspace(np.log(self.sizes[0]), np.log(self.sizes[-1]), _GRID)
        known = np.log(self.sizes)
        off = self.own - np.stack([self._on_line(log_size) for log_size in known], axis=1)
        right = np.clip(np.searchsorted(known, log_n), 1, len(known) - 1)
        share = ((log_n - known[right - 1]) / (known[right] - known[right - 1]))[:, None]
        lines = np.stack([self._on_line(log_size) for log_size in log_n], axis=1)
        numbers = lines + (1 - share) * off[:, right - 1] + share * off[:, right]
        points = []
        for compute in np.geomspace(start, end * np.sqrt(FAR), _BUDGETS):
            reward = _rewards(numbers.reshape(-1, 4), np.array([compute])).reshape(numbers.shape[:2])
            best = np.exp(log_n)[reward.argmax(1)]
            points.append(Frontier(float(compute), quantiles(best), quantiles(reward.max(1)), bool(compute > end)))
        return tuple(points)

    def to_json(self) -> dict[str, Any]:
        """Return `joint` of one entry of `sizes` of `scalerl plan --size --json`."""
        return {
            "exponents": {name: interval.to_json() for name, interval in self.exponents.items()},
            "sizes": [
                {"size": size, "A": self.ceiling(size).to_json(), "C_mid": self.half_gain(size).to_json()}
                for size in self.sizes.tolist()
            ],
        }


def _rewards(numbers: Array, compute: Array) -> Array:
    """Return the reward of sigmoids given by their four logarithms; (D, 4), (m,) -> (D, m)."""
    # For a size that was not run, a draw of log(1 - R) may be above 0, which would be a negative pass rate: clip it.
    top, start = 1 - np.exp(np.minimum(numbers[:, 0], 0.0)), 1 - np.exp(np.minimum(numbers[:, 3], 0.0))
    start = np.minimum(start, top)
    with np.errstate(divide="ignore"):
        exponent = np.exp(numbers[:, 2])[:, None] * (numbers[:, 1][:, None] - np.log(compute)[None])
    result: Array = start[:, None] + (top - start)[:, None] / (1 + np.exp(np.clip(exponent, -700, 700)))
    return result


def fit_across(by_size: Mapping[float, Fit], recipe: str = "") -> AcrossSizes | None:
    """Fit the joint posterior of a recipe's sizes; None if a size has no sigmoid, or there is only one size.

    Args:
        by_size: fits of pass rates, under any verdict, by model size in parameters, ascending.
        recipe: name of the recipe, which seeds the draws.
    """
    fits = list(by_size.values())
    if len(fits) < 2 or any(fit.draws is None or fit.family != "sigmoid" for fit in fits):
        return None
    rng = np.random.default_rng(zlib.crc32(recipe.encode()) + 7)
    sizes = np.array(list(by_size), dtype=float)
    draws = np.stack([_log_parameter_draws(fit) for fit in fits])
    u = np.log(sizes) - np.log(sizes).mean()
    chosen = draws[:, 0].copy()
    for c in range(4):
        chosen[:, c] = np.median(draws[..., c], axis=1)
    off = np.array(_OFF)
    own, line, offs = [], [], []
    for sweep in range(_BURN + _DRAWS):
        lines, off = _lines_given(chosen, u, off, rng)
        expected = lines[:, 0] + u[:, None] * lines[:, 1]
        log_weight = -0.5 * (((draws - expected[:, None]) / off) ** 2).sum(2)
        weight = np.cumsum(np.exp(log_weight - log_weight.max(1, keepdims=True)), axis=1)
        # One draw per size, with probability proportional to its weight (inverse of the cumulative weights).
        at = (weight < rng.random(len(u))[:, None] * weight[:, -1:]).sum(1)
        chosen = draws[np.arange(len(u)), at]
        if sweep >= _BURN:
            own.append(chosen)
            line.append(lines)
            offs.append(off)
    schedules = tuple(fit.draws.schedule for fit in fits if fit.draws is not None)
    return AcrossSizes(sizes=sizes, own=np.stack(own), line=np.stack(line), off=np.stack(offs), schedules=schedules)


def _log_parameter_draws(fit: Fit) -> Array:
    """Return the logarithms of 1 - A over seeds, C_mid, B and 1 - R0 of each draw; (K, 4)."""
    assert fit.draws is not None
    top = np.clip(np.maximum(fit.draws.A + seed_offsets(fit), fit.draws.R0), 0.0, 1 - _LEAST)
    start = np.clip(fit.draws.R0, 0.0, top)
    return np.stack([np.log1p(-top), np.log(fit.draws.C_mid), np.log(fit.draws.B), np.log1p(-start)], axis=1)


def _lines_given(chosen: Array, u: Array, off: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw the lines (4, 2), then the scatter of sizes about them (4,), given each size's numbers (S, 4)."""
    lines = np.zeros((4, 2))
    count = len(u)
    for c, sloped in enumerate(_SLOPED):
        # u sums to 0, so the value at the mean size (flat prior) and the slope are independent given `off`.
        lines[c, 0] = chosen[:, c].mean() + off[c] / np.sqrt(count) * rng.standard_normal()
        if sloped:
            precision = u @ u / off[c] ** 2 + _SLOPE_SD[c] ** -2
            mean = (u @ chosen[:, c]) / off[c] ** 2 / precision
            lines[c, 1] = mean + rng.standard_normal() / np.sqrt(precision)
    residual = chosen - lines[:, 0] - u[:, None] * lines[:, 1]
    # Scaled inverse chi-squared: the prior counts as `_OFF_WORTH` sizes that deviate by `_OFF`.
    squares = _OFF_WORTH * np.array(_OFF) ** 2 + (residual**2).sum(0)
    return lines, np.sqrt(squares / rng.chisquare(_OFF_WORTH + count, 4))
