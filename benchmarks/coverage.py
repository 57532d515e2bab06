"""How often do 95% intervals contain the truth, and how wide are they compared with intervals for known noise?

The simulated runs have known A, B and C_mid, windows that end at 2, 4 and 8 C_mid, 20 to 80 evaluations, and white
noise or AR(1) noise with correlation 0.7. R0 is observed once, with the same noise, at compute 0. The known-noise
interval is the same posterior given the noise's covariance. In a second table the asymptote varies between seeds; it
shows how often `A_total` contains the mean over all seeds.

    python -m benchmarks.coverage --repeats 1000 --out docs/measured/coverage.md
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.marks import rewrite, wrapped
from sweeps.curve import Curve, make_curve
from sweeps.fit.fit import Fit, fit_curve, fit_curves
from sweeps.fit.posterior import LAWS, draw_by_weight
from sweeps.fit.seeds import BORROWED_SEED_SD

Array = NDArray[np.float64]
A, B, C_MID, R0, SD = 0.61, 1.8, 2000.0, 0.2, 0.01
NAMES = ("A", "B", "C_mid")
TRUTH = dict(zip(NAMES, (A, B, C_MID), strict=True))


def law(compute: Array, a: float = A) -> Array:
    """Return the reward at a compute (arXiv 2510.13786, eq. 1)."""
    with np.errstate(divide="ignore"):
        return np.asarray(R0 + (a - R0) / (1 + (C_MID / compute) ** B))


def ar1(rng: np.random.Generator, n: int, rho: float) -> Array:
    """Draw stationary AR(1) noise of standard deviation SD and correlation `rho`."""
    shock = SD * np.sqrt(1 - rho**2) * rng.standard_normal(n)
    path = np.empty(n)
    path[0] = SD * rng.standard_normal()
    for i in range(1, n):
        path[i] = rho * path[i - 1] + shock[i]
    return path


def grid(n: int, end: float, spacing: str) -> Array:
    """Return the compute of n evaluations, the first at 0."""
    if spacing == "log":
        return np.concatenate([[0.0], np.geomspace(C_MID / 10, end, n - 1)])
    return np.linspace(0.0, end, n)


@dataclass(frozen=True)
class Cell:
    """Settings of one row of the table: window end in C_mid, evaluations, noise correlation, spacing."""

    reach: float
    n: int
    rho: float
    spacing: str


def known_noise_widths(fit: Fit, rho: float) -> dict[str, float | None]:
    """Return the widths of intervals given the true noise covariance and no random walk.

    The shape of the sigmoid is on a grid that covers the fit's draws. R0 and A are solved exactly in each cell.
    """
    assert fit.draws is not None and fit.outlook_inputs is not None
    ahead, law_ = fit.outlook_inputs, LAWS[0]
    steps = np.arange(len(ahead.points.x))
    covariance = SD**2 / ahead.width**2 * rho ** np.abs(steps[:, None] - steps[None, :])
    sides = []
    for values in (np.log(fit.draws.B), np.log(fit.draws.C_mid / ahead.end)):
        low, high = np.quantile(values, [0.002, 0.998])
        sides.append(np.linspace(low - 0.2 * (high - low), high + 0.2 * (high - low), 60))
    u, v = (side.ravel() for side in np.meshgrid(*sides, indexing="ij"))
    with np.errstate(divide="ignore"):
        g = law_.basis(np.log(ahead.points.x)[None], u[:, None], v[:, None])
    design = np.stack([1 - g, g], axis=-1)
    weighed = np.linalg.solve(covariance, design.transpose(1, 0, 2).reshape(len(steps), -1))
    weighed = weighed.reshape(len(steps), len(u), 2).transpose(1, 0, 2)
    (m0, s0), (m1, s1) = law_.r0, law_.a
    precision = design.transpose(0, 2, 1) @ weighed + np.diag([s0**-2, s1**-2])
    right = weighed.transpose(0, 2, 1) @ ahead.points.z + np.array([m0 / s0**2, m1 / s1**2])
    inverse = np.linalg.inv(precision)
    mean = (inverse @ right[..., None])[..., 0]
    log_weight = 0.5 * (right * mean).sum(1) - 0.5 * np.linalg.slogdet(precision)[1]
    for values, (centre, sd) in zip((u, v), law_.shape, strict=True):
        log_weight -= 0.5 * ((values - centre) / sd) ** 2
    rng = np.random.default_rng(0)
    rows = draw_by_weight(np.exp(log_weight - log_weight.max()), 4000, rng)
    a = mean[rows, 1] + np.sqrt(inverse[rows, 1, 1]) * rng.standard_normal(len(rows))
    widths: dict[str, float | None] = {}
    for name, drawn in zip(
        NAMES, (fit.bounds[0] + ahead.width * a, np.exp(u[rows]), ahead.end * np.exp(v[rows])), strict=True
    ):
        low, high = np.quantile(drawn, [0.025, 0.975])
        widths[name] = float(high - low)
    return widths


def one(cell: Cell, repeat: int) -> dict[str, tuple[bool, bool, float | None, float | None]]:
    """Simulate one run; return (contains the truth, is open, width, known-noise width) per parameter."""
    rng = np.random.default_rng([repeat, int(cell.reach * 10), cell.n, int(cell.rho * 10)])
    compute = grid(cell.n, cell.reach * C_MID, cell.spacing)
    fit = fit_curve(make_curve("run", compute, law(compute) + ar1(rng, cell.n, cell.rho)))
    known = known_noise_widths(fit, cell.rho)
    results_by_name = {}
    for name in NAMES:
        ends = getattr(fit, name)
        held = (ends.low is None or ends.low <= TRUTH[name]) and (ends.high is None or ends.high >= TRUTH[name])
        is_open = ends.low is None or ends.high is None
        results_by_name[name] = (held, is_open, None if is_open else ends.high - ends.low, known[name])
    return results_by_name


def many(cell: Cell, repeats: int, start: int = 0) -> list[dict[str, tuple[bool, bool, float | None, float | None]]]:
    """Return the results of a cell's repeats."""
    return [one(cell, start + i) for i in range(repeats)]


def summarise(rows: Sequence[dict[str, tuple[bool, bool, float | None, float | None]]], name: str) -> tuple[float, ...]:
    """Return coverage, fraction open, median width of closed intervals, and its ratio to the known-noise width."""
    held, is_open, width, known = zip(*(row[name] for row in rows), strict=True)
    pairs = [(w, k) for w, k in zip(width, known, strict=True) if w is not None and k is not None]
    ratio = np.median([w for w, _ in pairs]) / np.median([k for _, k in pairs]) if pairs else np.nan
    closed = [w for w in width if w is not None]
    return float(np.mean(held)), float(np.mean(is_open)), float(np.median(closed)) if closed else np.nan, float(ratio)


def seeds_cell(seeds: int, recipes: int, repeat: int) -> tuple[int, int, int]:
    """Simulate one study; return how many `A_total` contain the mean over all seeds, how many are open, and all."""
    rng = np.random.default_rng([repeat, seeds, recipes])
    curves: list[Curve] = []
    compute = grid(40, 8 * C_MID, "even")
    for recipe in range(recipes):
        rewards = [law(compute, A + BORROWED_SEED_SD * rng.standard_normal()) + ar1(rng, 40, 0.5) for _ in range(seeds)]
        labels = np.repeat([str(i) for i in range(seeds)], 40)
        curves.append(make_curve(f"r{recipe}", np.tile(compute, seeds), np.concatenate(rewards), labels))
    held = opened = 0
    for fit in fit_curves(curves):
        low, high = fit.A_total
        held += (low is None or low <= A) and (high is None or high >= A)
        opened += low is None or high is None
    return held, opened, recipes


def spread(pool: ProcessPoolExecutor, work: Callable[[int], object], repeats: int) -> list[object]:
    """Run the repeats in a pool of processes."""
    return list(pool.map(work, range(repeats), chunksize=max(repeats // 20, 1)))


def set_up(repeats: int) -> list[str]:
    """Return the text that explains the tables."""
    return wrapped(
        f"- **Runs**: {repeats} simulated runs per row. The true values are A {A}, B {B}, C_mid {C_MID:g} and R0 {R0}. "
        f"R0 is observed once. The noise has a standard deviation of {SD}.",
        "- **noise**: *white*, or *AR(0.7)*, in which neighbouring evaluations have a correlation of 0.7.",
        "- **window ends at**: compute of the last evaluation, as a multiple of C_mid. **n**: number of evaluations.",
        "- **A, B, C_mid**: each cell has four numbers. The first is the coverage of the 95% interval. The second is "
        "the share of intervals with an open end (no upper or no lower limit). The third is the median width of the "
        "other intervals. The fourth is this width divided by the width of the known-noise interval.",
        "- **The known-noise interval** comes from a fit that is given the true covariance of the noise, and that "
        "assumes an exact sigmoid. Our fit also allows a random walk around the sigmoid, for changes that no sigmoid "
        "describes, and this makes its intervals wider. Without the random walk, intervals of forecasts on real curves "
        "contain the truth in only 0.60 of cases ([real_curves.md](real_curves.md)).",
        f"- **Error of a cell**: with {repeats} runs, a true coverage of 0.95 is measured with a standard error of "
        f"{np.sqrt(0.95 * 0.05 / repeats):.2f}.",
    )


def seeds_set_up() -> list[str]:
    """Return the text that explains the table of `A_total`."""
    return wrapped(
        f"Here the seeds of a recipe differ in A, with a standard deviation of {BORROWED_SEED_SD}. A study has the "
        "given numbers of recipes and of seeds per recipe. Each run has 40 evaluations up to 8 C_mid, with AR(0.5) "
        "noise. With one seed per recipe, and for a single recipe with two seeds, the fit assumes this standard "
        "deviation. Otherwise it estimates the standard deviation from the seeds. *Open* is the share of intervals "
        "without an upper or a lower limit."
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--spacing", choices=("log", "even"), nargs="+", default=["log", "even"])
    parser.add_argument("--reach", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--points", type=int, nargs="+", default=[20, 40, 80])
    parser.add_argument("--rho", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--no-seeds", action="store_true", help="leave the table of A_total out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = set_up(options.repeats)
    with ProcessPoolExecutor(options.processes) as pool:
        for spacing in options.spacing:
            lines += ["", f"## {'Log-spaced' if spacing == 'log' else 'Evenly spaced'} evaluations", ""]
            lines += ["| noise | window ends at | n | A | B | C_mid |", "|---|---|---|---|---|---|"]
            for rho in options.rho:
                for reach in options.reach:
                    for n in options.points:
                        rows = spread(pool, partial(one, Cell(reach, n, rho, spacing)), options.repeats)
                        cells = []
                        for name in NAMES:
                            c, o, w, r = summarise(rows, name)  # type: ignore[arg-type]
                            cells.append(f"{c:.3f} / {o:.2f} / {w:.3g} / {r:.2f}")
                        kind = "white" if rho == 0 else f"AR({rho:g})"
                        lines.append(f"| {kind} | {reach:g} C_mid | {n} | {' | '.join(cells)} |")
                        print(lines[-1], flush=True)
        if not options.no_seeds:
            lines += ["", "## A_total: the mean over all seeds, estimated from few", ""]
            lines += [
                *seeds_set_up(),
                "",
                "| seeds | recipes | coverage | open |",
                "|---|---|---|---|",
            ]
            for seeds in (1, 2, 5):
                for recipes in (1, 6):
                    repeats = max(options.repeats // recipes, 1)
                    done = np.array(spread(pool, partial(seeds_cell, seeds, recipes), repeats))
                    held, opened, total = done.sum(0)
                    lines.append(f"| {seeds} | {recipes} | {held / total:.3f} | {opened / total:.2f} |")
                    print(lines[-1], flush=True)
    if options.out:
        rewrite(options.out, "measured", lines)


if __name__ == "__main__":
    main()
