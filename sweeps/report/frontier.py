"""Draw the frontier: curves of the model sizes over compute, and the best size for each budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from sweeps.curve import Array
from sweeps.decide.across_sizes import AcrossSizes, Frontier
from sweeps.decide.plan import Plan
from sweeps.decide.power_law import group_by_size
from sweeps.errors import UserError
from sweeps.fit.fit import Fit
from sweeps.report.drawing import COLOURS, INK, STYLE, draw_points, limits, log_axis, write_figure


def write_frontier(path: Path, plan: Plan, fits: Sequence[Fit], column: str) -> None:
    """Write the figure of the best model size for each budget, for the plan's only recipe.

    Args:
        path: file to write; its ending is the format.
        plan: plan of one recipe.
        fits: fits of all model sizes.
        column: name of the factor with the model size.

    Raises:
        UserError: there are several recipes, or the sigmoids across sizes could not be fitted, or the file cannot be
            written.
    """
    if len(plan.sizes) != 1:
        names = ", ".join(sizes.recipe for sizes in plan.sizes)
        raise UserError(f"{path}: the figure is of one recipe's sizes, and there are {names}; give a source with one")
    sizes = plan.sizes[0]
    if sizes.joint is None:
        raise UserError(
            f"{path}: no figure, for a size of {sizes.recipe} has too few points for a curve; evaluate more"
        )
    by_size = group_by_size(fits, column)[sizes.recipe]
    write_figure(frontier_figure(sizes.joint, sizes.frontier, list(by_size.values())), path)


def frontier_figure(joint: AcrossSizes, frontier: Sequence[Frontier], fits: Sequence[Fit]) -> Figure:
    """Draw the sizes' points and curves with their upper envelope and, next to it, the best size for each budget.

    The best size has its 95% band. Lines are dashed beyond the largest evaluated compute (extrapolation).

    Args:
        joint: the sigmoids of all sizes.
        frontier: the best size at each budget.
        fits: fits of the sizes, in the same order.
    """
    compute = np.array([point.compute for point in frontier])
    evaluated = ~np.array([point.extrapolation for point in frontier])
    left, _ = limits([fit.curve for fit in fits])
    with rc_context(STYLE):
        figure = Figure(figsize=(9.4, 3.6), layout="constrained")
        rewards, sizes = figure.subplots(1, 2)
        for panel in (rewards, sizes):
            log_axis(panel, left, float(compute[-1]))
            panel.set_xlabel(f"compute of one run ({fits[0].curve.unit})")
        for index, (size, fit) in enumerate(zip(joint.sizes.tolist(), fits, strict=True)):
            colour = COLOURS[index % len(COLOURS)]
            draw_points(
                panel=rewards,
                compute=fit.curve.compute,
                y=fit.curve.reward,
                seed=fit.curve.seed,
                left=left,
                colour=colour,
            )
            rewards.plot(compute, np.median(joint.curve(size, compute), 0), color=colour, label=f"{size:.3g}")
        best = _with_nan([point.R.value for point in frontier])
        for part, dash in ((evaluated, "-"), (~evaluated, (0, (2, 2)))):
            rewards.plot(compute[part], best[part], color=INK, linewidth=2.2, alpha=0.5, linestyle=dash)
        rewards.set_ylabel("reward")
        rewards.legend(title="size", frameon=False, fontsize=8)
        low, value, high = (
            _with_nan([getattr(point.size, end) for point in frontier]) for end in ("low", "value", "high")
        )
        sizes.fill_between(compute, low, high, color=COLOURS[0], alpha=0.15, linewidth=0)
        for part, dash in ((evaluated, "-"), (~evaluated, (0, (2, 2)))):
            sizes.plot(compute[part], value[part], color=COLOURS[0], linestyle=dash)
        sizes.set_yscale("log")
        sizes.set_ylim(0.8 * joint.sizes[0], 1.25 * joint.sizes[-1])
        sizes.set_yticks(joint.sizes, [f"{size:.3g}" for size in joint.sizes])
        sizes.minorticks_off()
        sizes.set_ylabel("best size for each budget")
    return figure


def _with_nan(values: Sequence[float | None]) -> Array:
    return np.array([np.nan if value is None else value for value in values])
