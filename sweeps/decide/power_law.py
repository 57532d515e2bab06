"""Power law across model sizes: test loss against compute (or data), with an exponent that saturates with size.

    log L(N, X) = E(N) - k(N) log X,   k(N) = k_max / (1 + N_0 / N),   L = 1 - pass rate     arXiv 2509.25300

N is the model's size in parameters and X the compute. k is the exponent and E the intercept of the log-log line. Others
write L(N, X) = K(N) X^(-E(N)): their K(N) is exp(E) here, and their exponent E(N) is k here.

E is estimated separately for each size that was run. For other sizes, log L at a reference compute in the middle of the
data comes from a straight line in log N. (At X = 1 this line would depend on the unit of compute.) Results for such
sizes are marked as extrapolation. Given N_0 the model is linear, so only N_0 is searched. Unlike a sigmoid, a power law
in 1 - R has no ceiling below R = 1: `sweeps.decide.sizes` fits both and reports which to trust.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from sweeps.curve import Array
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, Interval
from sweeps.fit.predict import quantiles

_DRAWS = 2000
# Search N_0 from 1/100 of the smallest size (where k is saturated at all sizes) to 100 x the largest (where k is
# proportional to N).
_N0_REACH, _N0_GRID = 100.0, 400
_SUFFIX = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# Finds a size in a model's name, such as Qwen/Qwen3-0.6B. A mixture of experts has two; the first counts all
# parameters.
_SIZE_IN_NAME = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([kmbt])(?![a-z0-9])")


def parse_size(text: str) -> float:
    """Parse a model size in parameters: `7e9`, a number with K, M, B or T (`0.5B`), or a model name with a size.

    Raises:
        UserError: there is no positive number.
    """
    body = text.strip().lower()
    unit = _SUFFIX.get(body[-1:], 1.0)
    try:
        value = float(body[:-1] if unit > 1 else body) * unit
    except ValueError:
        size_in_name = _SIZE_IN_NAME.search(body)
        value = float(size_in_name[1]) * _SUFFIX[size_in_name[2]] if size_in_name else np.nan
    if not np.isfinite(value) or value <= 0:
        raise UserError(
            f"size {text!r}: not a positive number of parameters; write 7e9 or 7B, or a name with it, such as Qwen3-8B"
        )
    return value


@dataclass(frozen=True)
class _Points:
    """The n evaluations, of all sizes, to which a power law is fitted.

    Attributes:
        log_x, log_l, sd: log compute, log loss, and standard error of the reward (None if unknown), (n,) each.
        size, run: index of the model size, and of the run counted over all sizes, (n,).
        left_out: number of evaluations whose compute is 0 or reward 1, which have no logarithm.
    """

    log_x: Array
    log_l: Array
    sd: Array | None
    size: NDArray[np.intp]
    run: NDArray[np.intp]
    left_out: int


@dataclass(frozen=True)
class _WeightedSums:
    """Weighted sums per model size, (S,) each: total weight, means of x and y, and centred sums of products."""

    weight: Array
    x: Array
    y: Array
    xx: Array
    xy: Array
    yy: Array


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """The fitted power law with joint draws.

    Attributes:
        sizes: model sizes that were run, ascending, in parameters, (S,).
        reference: compute at which a size's level, its log L, is given, in the curves' unit.
        k_max, N_0: estimates with 95% bounds; a bound is None where the data do not limit it.
        draw_k_max, draw_n_0: K joint draws of both, (K,).
        draw_level: draws of the level of each size that was run, for the mean over seeds, (K, S).
        best: least-squares estimates of k_max, N_0 and the levels (S,).
        points: number of evaluations used.
        left_out: number of evaluations with compute 0 or reward 1, which have no logarithm.
        rmse: root mean squared error of log L about the least-squares law.
    """

    sizes: Array
    reference: float
    k_max: Interval
    N_0: Interval
    draw_k_max: Array
    draw_n_0: Array
    draw_level: Array
    best: tuple[float, float, Array]
    points: int
    left_out: int
    rmse: float

    def exponent(self, size: float) -> Array:
        """Return draws of the exponent k(N) for a model size in parameters; (K,)."""
        return np.asarray(self.draw_k_max / (1 + self.draw_n_0 / size))

    def was_run(self, size: float) -> bool:
        """Return whether a size was run and fitted, to a relative 1e-9."""
        return bool(np.isclose(self.sizes, size, rtol=1e-9).any())

    def level(self, size: float) -> Array:
        """Return draws (K,) of log L at the reference compute.

        For a size that was not run they come from a line in log N.
        """
        if self.was_run(size):
            column: Array = self.draw_level[:, int(np.isclose(self.sizes, size, rtol=1e-9).argmax())]
            return column
        u = np.log(self.sizes) - np.log(self.sizes).mean()
        at = np.log(size) - np.log(self.sizes).mean()
        slope = self.draw_level @ u / (u @ u)
        line: Array = self.draw_level.mean(1) + slope * at
        dof = len(u) - 2
        if dof < 1:
            return line
        # The other sizes' scatter about the line is also the uncertainty of a size that was not run.
        off = self.draw_level - self.draw_level.mean(1)[:, None] - slope[:, None] * u
        scatter = np.sqrt((off**2).sum(1) / dof * (1 + 1 / len(u) + at**2 / (u @ u)))
        rng = np.random.default_rng(zlib.crc32(f"{size:.9g}".encode()))
        return np.asarray(line + scatter * rng.standard_t(dof, len(line)))

    def log_loss(self, size: float, compute: Array) -> Array:
        """Return draws (K, m) of the log loss of a size at each compute (m,)."""
        x = np.log(compute) - np.log(self.reference)
        return np.asarray(self.level(size)[:, None] - self.exponent(size)[:, None] * x[None])

    def reward(self, size: float, compute: float) -> Interval:
        """Return a size's pass rate at a compute with its 95% interval."""
        loss = np.exp(np.minimum(self.log_loss(size, np.array([compute]))[:, 0], 0.0))
        return quantiles(1 - loss)

    def compute_to_reach(self, size: float, target: float) -> Array:
        """Return draws (K,) of the compute at which the pass rate is `target`; infinite if the loss does not fall."""
        gap = self.level(size) - np.log1p(-target)
        k = self.exponent(size)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # exp overflows above about 709.
            x = np.where(k > 0, np.log(self.reference) + gap / k, np.inf)
            return np.asarray(np.where(x > 700, np.inf, np.exp(np.minimum(x, 700))))


def group_by_size(fits: Sequence[Fit], column: str) -> dict[str, dict[float, Fit]]:
    """Group fits by recipe, labelled without the size, and by size, ascending.

    Raises:
        UserError: a curve has no such factor, a size is not a number, or a size occurs twice.
    """
    by_recipe: dict[str, dict[float, Fit]] = {}
    for fit in fits:
        if column not in fit.curve.factors:
            raise UserError(f"--size {column}: recipe {fit.recipe!r} has no {column}; name the column that holds it")
        text = fit.curve.factors[column]
        size = parse_size(text)
        recipe = fit.recipe.replace(f" {column}={text}", "")
        if size in by_recipe.setdefault(recipe, {}):
            raise UserError(f"--size {column}: recipe {recipe!r} has size {text} twice; write it one way")
        by_recipe[recipe][size] = fit
    return {recipe: dict(sorted(by_size.items())) for recipe, by_size in sorted(by_recipe.items())}


def _points(fits: Sequence[Fit]) -> _Points:
    columns: list[list[Array]] = [[], [], [], []]
    runs: list[NDArray[np.intp]] = []
    has_errors, left_out, run_count = True, 0, 0
    for s, fit in enumerate(fits):
        curve = fit.curve
        in_window = fit.options.inside(curve.compute)
        usable = in_window & (curve.compute > 0) & (curve.reward < 1)
        left_out += int((in_window & ~usable).sum())
        has_errors &= curve.sd is not None
        sd = np.zeros(len(curve.reward)) if curve.sd is None else curve.sd
        for column, values in zip(
            columns, (np.log(curve.compute[usable]), np.log1p(-curve.reward[usable]), sd[usable]), strict=False
        ):
            column.append(values)
        columns[3].append(np.full(int(usable.sum()), float(s)))
        labels, index = np.unique(curve.seed[usable], return_inverse=True)
        runs.append(index.astype(np.intp) + run_count)
        run_count += len(labels)
    log_x, log_l, sd, size = (np.concatenate(column) for column in columns)
    has_errors = has_errors and bool(sd.size) and float(np.median(sd)) > 0
    # An evaluation whose samples all agree reports an error of 0, but is not infinitely precise.
    error = np.maximum(sd, 0.5 * float(np.median(sd))) if has_errors else None
    return _Points(
        log_x=log_x, log_l=log_l, sd=error, size=size.astype(np.intp), run=np.concatenate(runs), left_out=left_out
    )


def _weighted_sums(points: _Points, weight: Array, count: int, reference: float) -> _WeightedSums:
    """Sum the weighted points of each of `count` sizes; `reference` is the logarithm of the reference compute."""

    def total(values: Array) -> Array:
        return np.bincount(points.size, values, count).astype(np.float64)

    # Sum about each size's weighted means, because sums of raw products would lose digits.
    x, y = points.log_x - reference, points.log_l
    w = total(weight)
    xm, ym = total(weight * x) / w, total(weight * y) / w
    dx, dy = x - xm[points.size], y - ym[points.size]
    return _WeightedSums(
        weight=w, x=xm, y=ym, xx=total(weight * dx * dx), xy=total(weight * dx * dy), yy=total(weight * dy * dy)
    )


def _fit_given_n0(lines: _WeightedSums, h: Array) -> tuple[Array, Array, Array]:
    """Fit k_max for each of G values of N_0, given as h = k / k_max, (G, S).

    Returns:
        k_max, its information and the sum of squared errors (SSE), (G,) each.
    """
    information = h**2 @ lines.xx
    # Least squares of slope = -k_max h over all sizes; if the loss grows with compute, k_max is 0.
    k_max = np.maximum(-(h @ lines.xy) / information, 0.0)
    sse = lines.yy.sum() + 2 * k_max * (h @ lines.xy) + k_max**2 * information
    return k_max, information, np.maximum(sse, 0.0)


def _least_squares(lines: _WeightedSums, sizes: Array, grid: Array) -> tuple[float, float, Array]:
    """Return k_max, N_0 and the level per size (S,) with the smallest SSE: the best grid point, optimized further."""

    def residuals(log_n0: Array) -> Array:
        h = 1 / (1 + np.exp(log_n0[0]) / sizes)
        k_max = float(_fit_given_n0(lines, h[None])[0][0])
        # N_0 affects only the misfit of the slopes. It is scaled to suit the tolerances of the optimizer.
        return np.asarray(np.sqrt(lines.xx / lines.xx.max()) * (lines.xy / lines.xx + k_max * h))

    sse = _fit_given_n0(lines, 1 / (1 + np.exp(grid)[:, None] / sizes))[2]
    start = float(grid[int(sse.argmin())])
    step = float(grid[1] - grid[0])
    low, high = max(start - 2 * step, float(grid[0])), min(start + 2 * step, float(grid[-1]))
    solution = least_squares(
        residuals, np.clip([start], low + 1e-9, high - 1e-9), bounds=([low], [high]), xtol=1e-12, ftol=1e-12, gtol=1e-12
    )
    h = 1 / (1 + np.exp(float(solution.x[0])) / sizes)
    k_max = float(_fit_given_n0(lines, h[None])[0][0])
    return k_max, float(np.exp(solution.x[0])), np.asarray(lines.y + k_max * h * lines.x)


def _variance_inflation(residual: Array, run: NDArray[np.intp]) -> float:
    """Return how many correlated points are worth one independent point, from the autocorrelation within runs."""
    same = run[1:] == run[:-1]
    squares = float(residual @ residual)
    if squares <= 0 or not same.any():
        return 1.0
    lag_1 = float((residual[1:] * residual[:-1])[same].sum()) / squares * len(residual) / same.sum()
    # Residuals of a fit are less correlated than the noise itself (Kendall's first-order correction).
    r = float(np.clip(lag_1 + (1 + 4 * lag_1) / len(residual), 0.0, 0.95))
    return (1 + r) / (1 - r)


def fit_power_law(by_size: dict[float, Fit], recipe: str = "") -> PowerLaw:
    """Fit the power law to all sizes of a recipe.

    The noise of R is assumed constant, or is each point's known error. So weights in log L are proportional to L^2,
    where L is the fitted loss instead of the noisy points. N_0 is drawn from its profile likelihood, with the tails of
    Student's t for the effective number of points. Draws of slopes and levels include the spread between seeds.

    Args:
        by_size: fits by model size in parameters, ascending; only their evaluations are used, not their fitted curves.
        recipe: name of the recipe, for messages and to seed the draws.

    Raises:
        UserError: fewer than two sizes, a size with fewer than three usable points, or rewards that are not pass rates.
    """
    sizes = np.array(list(by_size), dtype=float)
    fits = list(by_size.values())
    if len(sizes) < 2:
        raise UserError(f"--size: recipe {recipe!r} has one size only ({sizes[0]:g}); a law across sizes takes two")
    for fit in fits:
        if fit.curve.reward.min() < 0 or fit.curve.reward.max() > 1:
            raise UserError(f"--size: {fit.recipe!r} is no pass rate in [0, 1]; test loss is 1 - pass rate")
    points = _points(fits)
    for s, fit in enumerate(fits):
        if len(np.unique(points.log_x[points.size == s])) < 3:
            raise UserError(f"--size: {fit.recipe!r} has fewer than 3 points with compute > 0 and R < 1; evaluate more")
    reference = float(points.log_x.mean())
    grid = np.linspace(np.log(sizes[0] / _N0_REACH), np.log(sizes[-1] * _N0_REACH), _N0_GRID)
    weight = np.ones(len(points.log_x))
    # The weights depend on the fitted loss, so fit several times.
    for _ in range(4):
        lines = _weighted_sums(points, weight, len(sizes), reference)
        best = _least_squares(lines, sizes, grid)
        fitted = _log_loss_at(best, sizes, points, reference)
        weight = np.exp(2 * fitted) / (1.0 if points.sd is None else points.sd**2)
    residual = points.log_l - fitted
    n, parameters = len(residual), 2 + len(sizes)
    inflation = _variance_inflation(np.sqrt(weight) * residual, points.run)
    dof = max(n / inflation - parameters, 3.0)
    squares = float(weight @ residual**2) / max(n - parameters, 1)
    scale = max(squares, 1e-12 if points.sd is None else 1.0) * inflation
    lines = _add_seed_spread(
        lines=_weighted_sums(points, weight, len(sizes), reference),
        points=points,
        weight=weight,
        fitted=fitted,
        fits=fits,
        scale=scale,
    )
    best = _least_squares(lines, sizes, grid)
    rng = np.random.default_rng(zlib.crc32(recipe.encode()))
    k_max, n_0, level = _draw(lines=lines, sizes=sizes, grid=grid, scale=scale, dof=dof, rng=rng)
    level += _seed_sd(fits) * _slope_at_end(fits) * rng.standard_normal(level.shape)
    # Where draws of N_0 reach an end of the search range, the data bound N_0 (and k_max) on one side only.
    small, large = _is_open(np.log(n_0) < grid[0] + 0.1), _is_open(np.log(n_0) > grid[-1] - 0.1)
    return PowerLaw(
        sizes=sizes,
        reference=float(np.exp(reference)),
        k_max=_interval(best[0], k_max, False, large),
        N_0=_interval(best[1], n_0, small, large),
        draw_k_max=k_max,
        draw_n_0=n_0,
        draw_level=level,
        best=best,
        points=n,
        left_out=points.left_out,
        rmse=float(np.sqrt(np.mean(residual**2))),
    )


def _log_loss_at(best: tuple[float, float, Array], sizes: Array, points: _Points, reference: float) -> Array:
    """Return the fitted log L at the points, (n,)."""
    k_max, n_0, level = best
    k = k_max / (1 + n_0 / sizes)
    return np.asarray(level[points.size] - k[points.size] * (points.log_x - reference))


def _draw(
    lines: _WeightedSums, sizes: Array, grid: Array, scale: float, dof: float, rng: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Draw N_0 from its profile likelihood, then k_max and the levels. Return k_max (K,), N_0 (K,), levels (K, S)."""
    fine = np.linspace(grid[0], grid[-1], 4 * len(grid))
    k_hat, information, sse = _fit_given_n0(lines, 1 / (1 + np.exp(fine)[:, None] / sizes))
    excess = sse - sse.min()
    # Student's likelihood with the noise's variance integrated out: (1 + excess / (dof scale))^(-(dof + 1) / 2).
    weight = np.exp(-0.5 * (dof + 1) * np.log1p(excess / (scale * dof)))
    cell = np.searchsorted(np.cumsum(weight) / weight.sum(), (np.arange(_DRAWS) + rng.random()) / _DRAWS)
    cell = cell.clip(max=len(fine) - 1)
    rng.shuffle(cell)
    n_0 = np.exp(fine[cell])
    spread = np.sqrt((scale * dof + excess[cell]) / rng.chisquare(dof + 1, _DRAWS))
    k_max = np.maximum(k_hat[cell] + spread / np.sqrt(information[cell]) * rng.standard_normal(_DRAWS), 0.0)
    k = k_max[:, None] / (1 + n_0[:, None] / sizes)
    level = lines.y + k * lines.x + spread[:, None] / np.sqrt(lines.weight) * rng.standard_normal(k.shape)
    return k_max, n_0, level


def _seed_sd(fits: Sequence[Fit]) -> Array:
    """Return the standard error of each size's mean over seeds, in reward, (S,)."""
    # A spread measured on few seeds is itself uncertain: widen it by Student's quantile over the normal's.
    spreads = [(fit.seed_spread.sd, fit.seed_spread.quantile() / 1.959964, fit.seeds) for fit in fits]
    return np.array([sd * factor / np.sqrt(seeds) for sd, factor, seeds in spreads])


def _slope_at_end(fits: Sequence[Fit]) -> Array:
    """Return the change of log L per change of R at the end of each size's curve, 1 / L, (S,)."""
    last_rewards = [float(fit.curve.reward[fit.curve.compute >= 0.75 * fit.curve.compute.max()].mean()) for fit in fits]
    return np.asarray(1 / np.maximum(1 - np.array(last_rewards), 0.02))


def _add_seed_spread(
    lines: _WeightedSums, points: _Points, weight: Array, fitted: Array, fits: Sequence[Fit], scale: float
) -> _WeightedSums:
    """Reduce the information on each slope by the spread between seeds.

    An R that is off by a constant in one seed makes log L off by this constant divided by L. This error grows along the
    curve and tilts the line. The information on the slope is then 1 / (scale / xx + sd^2 tilt^2) instead of xx / scale.
    """
    count = len(fits)
    x = points.log_x - (np.bincount(points.size, weight * points.log_x, count) / lines.weight)[points.size]
    tilt = np.bincount(points.size, weight * x * np.exp(-fitted), count) / lines.xx
    xx = lines.xx / (1 + lines.xx / scale * (_seed_sd(fits) * tilt) ** 2)
    slope = lines.xy / lines.xx
    # Choose yy so that each line's smallest sum of squares, yy - xy^2 / xx, is unchanged.
    return replace(lines, xx=xx, xy=slope * xx, yy=lines.yy - slope * lines.xy + slope**2 * xx)


def _is_open(at_edge: NDArray[np.bool_]) -> bool:
    """Return whether more than 2.5% of the draws are at this end of the search range, which leaves the bound open."""
    return bool(at_edge.mean() > 0.025)


def _interval(value: float, draws: Array, open_low: bool, open_high: bool) -> Interval:
    """Return a value with the 95% bounds of its draws. A bound that is open is None."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(value, None if open_low else float(low), None if open_high else float(high))
