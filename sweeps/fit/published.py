"""The published fit procedure, followed literally (arXiv 2510.13786, A.5): a grid over A and C_mid, B fitted by SciPy.

Use it to compare with published numbers. It gives no interval, so no fit is `identifiable`; rank on `sweeps.fit.fit`
instead. Warnings point out two traps of the printed grids. First, a ceiling outside [0.45, 0.80] comes out as the
nearer edge: a GSM8K curve at 0.93 as 0.80. Second, the grid of C_mid is in GPU-hours, in steps of 403.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sweeps.curve import Array, Curve
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, FitOptions, Interval
from sweeps.fit.names import METHOD

# Rounded, because linspace would give 0.6099999.
A_GRID = np.round(np.linspace(0.450, 0.800, 71), 3)
C_MID_GRID = np.linspace(100.0, 40000.0, 100)  # GPU-hours
# The paper drops compute below this ("about one epoch"), in GPU-hours.
MIN_COMPUTE = 1500.0
# Fewest distinct computes. Three determine A, B and C_mid; one more is needed to contradict the fit.
_MIN_COMPUTES = 4


def fit_literal(
    curve: Curve,
    options: FitOptions | None = None,
    a_grid: Array | Sequence[float] = A_GRID,
    c_mid_grid: Array | Sequence[float] = C_MID_GRID,
) -> Fit:
    """Fit one recipe's curve as the paper describes. This takes one to two seconds on the printed grids.

    In every cell of the two grids, `scipy.optimize.curve_fit` fits B alone, from SciPy's default start (1, unbounded).
    The cell with the least sum of squares wins. All points of all seeds weigh the same. Points at compute 0 and below
    `options.min_compute` are left out. The paper's limit of 1,500 GPU-hours is not applied by default, because it means
    nothing in another unit.

    Args:
        curve: evaluations of one recipe, with compute in the unit of `c_mid_grid`.
        options: r0 is a number, or `first` for the first evaluation's reward (mean over seeds); R0 is not fitted. If
            `asymptote` fixes A, `a_grid` is not used.
        a_grid: values of A to try, in reward units.
        c_mid_grid: values of C_mid to try, positive, in the curve's unit.

    Returns:
        A fit without intervals or draws. Its verdict is `too_few_points`, `degenerate` (no cell has a fit), `at_bound`
        (A or C_mid is at an edge of its grid) or `open`.

    Raises:
        UserError: r0 is `free` or outside the reward's range, a grid is empty, not increasing or not positive, or no
            point above compute 0 is within the options' range of compute.
    """
    options = options or FitOptions()
    if options.family != "sigmoid" or options.robust:
        raise UserError(f"--method {METHOD} fits the sigmoid, all points alike; leave --family and --robust out")
    a = np.asarray(a_grid if options.asymptote is None else [options.asymptote], dtype=float)
    c_mid = np.asarray(c_mid_grid, dtype=float)
    _check_grid("a_grid", a)
    _check_grid("c_mid_grid", c_mid)
    if c_mid[0] <= 0:
        raise UserError(f"c_mid_grid: {c_mid[0]:g} is not positive; give values in the curve's unit of compute")
    notes = list(curve.notes)
    r0, source = _start(curve, options, notes)
    keep = (curve.compute > 0) & options.inside(curve.compute)
    compute, reward = curve.compute[keep], curve.reward[keep]
    if not len(reward):
        raise UserError(
            f"recipe {curve.recipe!r}: no points above compute 0 in the window; compute ({curve.axis}) runs from "
            f"{curve.compute.min():.4g} to {curve.compute.max():.4g}: change --min-compute or --max-compute"
        )
    bounds = curve.bounds
    if options.r0 != "first" and not bounds[0] <= r0 <= bounds[1]:
        raise UserError(f"--r0 {r0:g}: outside the reward's range {bounds[0]:g}..{bounds[1]:g}; give a reward")
    if options.min_compute is None:
        notes.append(f"the paper drops evaluations below {MIN_COMPUTE:,.0f} GPU-hours: give --min-compute in your unit")
    seeds = len(np.unique(curve.seed[keep]))
    if seeds > 1:
        notes.append(f"the points of {seeds} seeds are fitted as one run; the paper fits each run alone")
    fit = Fit(
        curve=curve,
        options=options,
        bounds=bounds,
        warnings=tuple(notes),
        R0=r0,
        R0_source=source,
        n=len(reward),
        seeds=seeds,
        window=(float(compute.min()), float(compute.max())),
    )
    distinct = len(np.unique(compute))
    if distinct < _MIN_COMPUTES:
        values = f"{distinct} distinct compute value{'s' * (distinct != 1)}"
        reason = f"A, B and C_mid cannot be fitted to {values}; evaluate more often or run longer"
        return replace(fit, verdict="too_few_points", reason=reason)
    if compute.max() < c_mid[0] or compute.min() > c_mid[-1]:
        return replace(
            fit,
            verdict="at_bound",
            reason=f"compute runs from {compute.min():.4g} to {compute.max():.4g} ({curve.unit}), outside the grid "
            f"of C_mid, {c_mid[0]:g} to {c_mid[-1]:g}, which is in GPU-hours; run without --method {METHOD}",
        )
    return _search(fit, compute, reward, r0, a, c_mid)


def _check_grid(name: str, values: Array) -> None:
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
        raise UserError(f"{name}: {values.size} values; give at least one, finite and increasing")


def _start(curve: Curve, options: FitOptions, notes: list[str]) -> tuple[float, str]:
    """Return R0 and its source, `given` or `first`. Append a note if R0 was taken at a compute above 0."""
    if options.r0 == "free":
        raise UserError(f"--r0 free: --method {METHOD} does not fit R0; give a number, or first")
    if options.r0 != "first":
        return float(options.r0), "given"
    first_rewards, first_compute = [], []
    for label in np.unique(curve.seed):
        first = int(np.flatnonzero(curve.seed == label)[0])  # a curve is sorted by seed and compute
        first_rewards.append(float(curve.reward[first]))
        first_compute.append(float(curve.compute[first]))
    if max(first_compute) > 0:
        notes.append(
            f"no evaluation at compute 0: the reward at {max(first_compute):.4g} is taken as R0; give --r0 if it is "
            "known"
        )
    return float(np.mean(first_rewards)), "first"


def _search(fit: Fit, compute: Array, reward: Array, r0: float, a_grid: Array, c_mid_grid: Array) -> Fit:
    from scipy.optimize import OptimizeWarning, curve_fit  # slow to import, and only this method needs it

    sse = np.full((len(a_grid), len(c_mid_grid)), np.inf)
    exponent = np.zeros_like(sse)
    failed = 0
    # In some cells the fit overflows on the way to a finite B, or gives no covariance of B, which is not used: suppress
    # these warnings.
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", OptimizeWarning)
        for i, a in enumerate(a_grid):
            for j, c_mid in enumerate(c_mid_grid):

                def law(c: Array, b: float, a: float = a, c_mid: float = c_mid) -> Array:
                    return r0 + (a - r0) / (1 + (c_mid / c) ** b)

                try:
                    # Without p0, SciPy would fit the arguments a and c_mid too. This is its default start.
                    (b,), _ = curve_fit(law, compute, reward, p0=[1.0])
                except RuntimeError:
                    failed += 1
                    continue
                squares = float(((reward - law(compute, b)) ** 2).sum())
                if np.isfinite(squares) and np.isfinite(b):
                    sse[i, j], exponent[i, j] = squares, b
                else:
                    failed += 1
    notes = list(fit.warnings)
    if failed:
        notes.append(f"{failed} of {sse.size} cells of the grid have no fit and were skipped")
    if failed == sse.size:
        return replace(
            fit,
            verdict="degenerate",
            reason=f"no cell of the grid has a fit; look at the rewards, or run without --method {METHOD}",
            warnings=tuple(notes),
        )
    i, j = divmod(int(np.argmin(sse)), len(c_mid_grid))
    best_a, best_b, best_c = float(a_grid[i]), float(exponent[i, j]), float(c_mid_grid[j])
    if len(c_mid_grid) > 1:
        note = f"C_mid is only known to a step of its grid, {np.diff(c_mid_grid).max():.4g}"
        if np.array_equal(c_mid_grid, C_MID_GRID):
            note += f" GPU-hours (compute here: {fit.curve.unit}); none of the published C_mid values is on it"
        notes.append(note)
    edges = [
        f"{name} = {value:.4g}, grid {grid[0]:.4g} to {grid[-1]:.4g}"
        for name, value, grid in (("A", best_a, a_grid), ("C_mid", best_c, c_mid_grid))
        if len(grid) > 1 and value in (grid[0], grid[-1])
    ]
    notes += [f"the best fit is on the edge of its grid ({edge}), so the value is only the edge's" for edge in edges]
    if edges:
        verdict = "at_bound"
        reason = f"the best fit is on the edge of its grid ({'; '.join(edges)}); run without --method {METHOD}"
    else:
        verdict = "open"
        reason = f"the published procedure gives no interval: A {best_a:.3f}; run without --method {METHOD} for one"
    variance = float(((reward - reward.mean()) ** 2).sum())
    shape = {"B": Interval(best_b, None, None), "C_mid": Interval(best_c, None, None)}
    return replace(
        fit,
        verdict=verdict,
        reason=reason,
        A=Interval(best_a, None, None),
        B=shape["B"],
        C_mid=shape["C_mid"],
        shape=shape,
        rmse=float(np.sqrt(sse[i, j] / len(reward))),
        r2=None if variance <= 0 else 1 - float(sse[i, j]) / variance,
        warnings=tuple(notes),
    )
