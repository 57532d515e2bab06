"""Joint model of a recipe's sigmoids across model sizes, and from it the best model size for each budget.

    log(1 - A) = a0 - a1 log N     log C_mid = c0 + c1 log N     log B = b0     log(1 - R0) = r0 - r1 log N

N is the model size in parameters. The four logarithms of one size deviate from the four lines by N(0, tau^2), with a
tau for each line. A Gibbs sampler (Gelman and Hill 2007, chapter 12) alternates two steps. It draws each size's four
logarithms from the posterior of that size's own runs (`sweeps.fit.posterior`), weighted by how well they agree with the
lines. It then draws the lines given these logarithms. So a size whose curve has not bent yet is estimated with the help
of the other sizes, and a size that was not run gets a curve too.
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

# Priors for the logarithms of (1 - A, C_mid, B, 1 - R0). _SLOPED: whether the value changes with size. _SLOPE_SD:
# standard deviation of the slope. _SCATTER: prior standard deviation of sizes about the line, which counts as much as
# `_SCATTER_WORTH` observed sizes. Published values are well within these priors: the compute to reach a loss grows at
# most like N^2, and 1 - A shrinks with a power of N below 1.
_SLOPED = (True, True, False, True)
_SLOPE_SD = (0.5, 1.0, 1.0, 0.5)
_SCATTER, _SCATTER_WORTH = (0.1, 0.3, 0.15, 0.05), 2.0
# Lower limit of 1 - A, because the logarithm of 0 does not exist.
_MIN_FAILURE = 1e-3
_BURN_IN, _DRAWS = 200, 1000
_GRID, _BUDGETS = 61, 40


@dataclass(frozen=True)
class Frontier(AsJson):
    """Best model size for one compute, and its reward. extrapolation: whether no run has spent this much compute."""

    compute: float
    size: Interval
    R: Interval
    extrapolation: bool


@dataclass(frozen=True, eq=False)
class AcrossSizes(AsJson):
    """Joint posterior draws of one recipe's sigmoids across all its model sizes.

    Attributes:
        sizes: model sizes that were run, ascending, in parameters, (S,).
        log_parameters: D draws of each size's log(1 - A), log C_mid, log B and log(1 - R0), (D, S, 4).
        lines: draws of the four lines, each as its value at the mean of log N over the sizes and its slope, (D, 4, 2).
        scatter: draws of tau, the standard deviation of sizes about each line, (D, 4).
        schedules: learning rate schedule of each size, which converts compute to effective compute; None if constant.
    """

    sizes: Array
    log_parameters: Array
    lines: Array
    scatter: Array
    schedules: tuple[Schedule | None, ...]

    def curve(self, size: float, compute: Array) -> Array:
        """Return draws (D, m) of the mean reward over seeds at each compute (m,). The size need not have been run."""
        at = np.flatnonzero(np.isclose(self.sizes, size, rtol=1e-9))
        schedule = self.schedules[int(at[0])] if len(at) else None
        return _rewards(
            self._log_parameters(size), compute if schedule is None else schedule.effective_compute(compute)
        )

    def _log_parameters(self, size: float) -> Array:
        """Return draws of a size's four logarithms, (D, 4). A size that was not run is drawn about the lines."""
        at = np.flatnonzero(np.isclose(self.sizes, size, rtol=1e-9))
        if len(at):
            draws: Array = self.log_parameters[:, int(at[0])]
            return draws
        rng = np.random.default_rng(zlib.crc32(f"{size:.9g}".encode()))
        return self._on_line(np.log(size)) + self.scatter * rng.standard_normal(self.scatter.shape)

    def _on_line(self, log_size: float) -> Array:
        return np.asarray(self.lines[..., 0] + self.lines[..., 1] * (log_size - np.log(self.sizes).mean()))

    def ceiling(self, size: float) -> Interval:
        """Return the asymptote A of a size with its 95% interval. The size need not have been run."""
        return quantiles(1 - np.exp(self._log_parameters(size)[:, 0]))

    def half_gain(self, size: float) -> Interval:
        """Return C_mid of a size with its 95% interval, in the unit of compute. The size need not have been run."""
        return quantiles(np.exp(self._log_parameters(size)[:, 1]))

    @property
    def exponents(self) -> dict[str, Interval]:
        """Exponents of the power laws in N of 1 - A (key `one_minus_A`) and of C_mid (key `C_mid`)."""
        return {"one_minus_A": quantiles(self.lines[:, 0, 1]), "C_mid": quantiles(self.lines[:, 1, 1])}

    def frontier(self, start: float, end: float) -> tuple[Frontier, ...]:
        """Return the best model size for each of a series of budgets, up to as far as forecasts are useful.

        A size between two that were run gets their interpolated deviation from the line. Sizes outside the range that
        was run are not proposed.

        Args:
            start: compute of the first evaluation of any size, in the curves' unit.
            end: compute of the last evaluation of any size.
        """
        log_n = np.linspace(np.log(self.sizes[0]), np.log(self.sizes[-1]), _GRID)
        log_sizes = np.log(self.sizes)
        deviation = self.log_parameters - np.stack([self._on_line(log_size) for log_size in log_sizes], axis=1)
        right = np.clip(np.searchsorted(log_sizes, log_n), 1, len(log_sizes) - 1)
        weight = ((log_n - log_sizes[right - 1]) / (log_sizes[right] - log_sizes[right - 1]))[:, None]
        on_lines = np.stack([self._on_line(log_size) for log_size in log_n], axis=1)
        log_parameters = on_lines + (1 - weight) * deviation[:, right - 1] + weight * deviation[:, right]
        points = []
        for compute in np.geomspace(start, end * np.sqrt(FAR), _BUDGETS):
            reward = _rewards(log_parameters.reshape(-1, 4), np.array([compute])).reshape(log_parameters.shape[:2])
            best = np.exp(log_n)[reward.argmax(1)]
            points.append(Frontier(float(compute), quantiles(best), quantiles(reward.max(1)), bool(compute > end)))
        return tuple(points)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `scalerl plan --size --json` stores in the field `joint`."""
        return {
            "exponents": {name: interval.to_json() for name, interval in self.exponents.items()},
            "sizes": [
                {"size": size, "A": self.ceiling(size).to_json(), "C_mid": self.half_gain(size).to_json()}
                for size in self.sizes.tolist()
            ],
        }


def _rewards(numbers: Array, compute: Array) -> Array:
    """Return the rewards (D, m) of D sigmoids, given by their four logarithms (D, 4), at each compute (m,)."""
    # For a size that was not run, a draw of log(1 - R) may be above 0, which would be a negative pass rate: clip it.
    top, start = 1 - np.exp(np.minimum(numbers[:, 0], 0.0)), 1 - np.exp(np.minimum(numbers[:, 3], 0.0))
    start = np.minimum(start, top)
    with np.errstate(divide="ignore"):
        exponent = np.exp(numbers[:, 2])[:, None] * (numbers[:, 1][:, None] - np.log(compute)[None])
    result: Array = start[:, None] + (top - start)[:, None] / (1 + np.exp(np.clip(exponent, -700, 700)))
    return result


def fit_across(by_size: Mapping[float, Fit], recipe: str = "") -> AcrossSizes | None:
    """Fit the joint posterior of one recipe's sigmoids over its model sizes.

    Args:
        by_size: fits of pass rates, under any verdict, by model size in parameters, ascending.
        recipe: name of the recipe, which seeds the draws.

    Returns:
        None with fewer than two sizes, or if the fit of a size is not a sigmoid.
    """
    fits = list(by_size.values())
    if len(fits) < 2 or any(fit.draws is None or fit.family != "sigmoid" for fit in fits):
        return None
    rng = np.random.default_rng(zlib.crc32(recipe.encode()) + 7)
    sizes = np.array(list(by_size), dtype=float)
    draws = np.stack([_log_parameter_draws(fit) for fit in fits])
    u = np.log(sizes) - np.log(sizes).mean()
    current = draws[:, 0].copy()
    for c in range(4):
        current[:, c] = np.median(draws[..., c], axis=1)
    scatter = np.array(_SCATTER)
    parameters_drawn, lines_drawn, scatter_drawn = [], [], []
    for sweep in range(_BURN_IN + _DRAWS):
        lines, scatter = _draw_lines(current, u, scatter, rng)
        expected = lines[:, 0] + u[:, None] * lines[:, 1]
        log_weight = -0.5 * (((draws - expected[:, None]) / scatter) ** 2).sum(2)
        weight = np.cumsum(np.exp(log_weight - log_weight.max(1, keepdims=True)), axis=1)
        # Choose one draw per size, with probability proportional to its weight, by inverting the cumulative weights.
        at = (weight < rng.random(len(u))[:, None] * weight[:, -1:]).sum(1)
        current = draws[np.arange(len(u)), at]
        if sweep >= _BURN_IN:
            parameters_drawn.append(current)
            lines_drawn.append(lines)
            scatter_drawn.append(scatter)
    schedules = tuple(fit.draws.schedule for fit in fits if fit.draws is not None)
    return AcrossSizes(
        sizes=sizes,
        log_parameters=np.stack(parameters_drawn),
        lines=np.stack(lines_drawn),
        scatter=np.stack(scatter_drawn),
        schedules=schedules,
    )


def _log_parameter_draws(fit: Fit) -> Array:
    """Return the four logarithms of each draw, (K, 4), with A varied by the spread between seeds."""
    assert fit.draws is not None
    top = np.clip(np.maximum(fit.draws.A + seed_offsets(fit), fit.draws.R0), 0.0, 1 - _MIN_FAILURE)
    start = np.clip(fit.draws.R0, 0.0, top)
    return np.stack([np.log1p(-top), np.log(fit.draws.C_mid), np.log(fit.draws.B), np.log1p(-start)], axis=1)


def _draw_lines(parameters: Array, u: Array, scatter: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw the lines (4, 2), then the scatter of sizes about them (4,), given the parameters of each size (S, 4)."""
    lines = np.zeros((4, 2))
    count = len(u)
    for c, sloped in enumerate(_SLOPED):
        # u sums to 0, so the value at the mean size (flat prior) and the slope are independent given `scatter`.
        lines[c, 0] = parameters[:, c].mean() + scatter[c] / np.sqrt(count) * rng.standard_normal()
        if sloped:
            precision = u @ u / scatter[c] ** 2 + _SLOPE_SD[c] ** -2
            mean = (u @ parameters[:, c]) / scatter[c] ** 2 / precision
            lines[c, 1] = mean + rng.standard_normal() / np.sqrt(precision)
    residual = parameters - lines[:, 0] - u[:, None] * lines[:, 1]
    # Scaled inverse chi-squared: the prior counts as `_SCATTER_WORTH` sizes that deviate by `_SCATTER`.
    squares = _SCATTER_WORTH * np.array(_SCATTER) ** 2 + (residual**2).sum(0)
    return lines, np.sqrt(squares / rng.chisquare(_SCATTER_WORTH + count, 4))
