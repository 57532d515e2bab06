"""Draw the whole study: all recipes' curves on one pair of axes, and the ranking next to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweeps.curve import Curve
from sweeps.decide.rank import Ranking
from sweeps.fit.fit import Fit
from sweeps.fit.predict import can_forecast, predict
from sweeps.report.drawing import DASHES, INK, REFUSED, RULE, STYLE, Style, label, limits, ranking_styles
from sweeps.report.labels import cut, shorten_labels


def overlay_figure(curves: Sequence[Curve], fits: Sequence[Fit], ranking: Ranking) -> Figure:
    """Draw evaluations and fitted curves on the left, and each recipe's asymptote with its 95% interval on the right.

    The best recipe is on top. If a recipe's asymptote is not identifiable, a hollow point shows its mean reward over
    the last tenth of compute.
    """
    by_recipe = {fit.recipe: fit for fit in fits}
    points = {curve.recipe: curve for curve in curves}
    order = [entry.recipe for entry in ranking.ranking]
    with rc_context(STYLE):
        figure = Figure(figsize=(11.0, max(4.2, 0.36 * len(order) + 1.6)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=False, width_ratios=(1.25, 1.0))
        styles = ranking_styles(ranking)
        _draw_curves(panel=left, styles=styles, order=order, fits=by_recipe, points=points)
        _draw_ranking(panel=right, styles=styles, order=order, fits=by_recipe, points=points, ranking=ranking)
    return figure


def _draw_curves(
    panel: Axes,
    styles: Mapping[str, Style],
    order: Sequence[str],
    fits: Mapping[str, Fit],
    points: Mapping[str, Curve],
) -> None:
    _, end = limits(list(points.values()))
    panel.set_xlim(0, end / 1.5 * 1.02)
    panel.grid(axis="y", color=RULE, linewidth=0.6)
    for recipe in order:
        colour, dash = styles[recipe]
        curve, fit = points[recipe], fits[recipe]
        panel.plot(curve.compute, curve.reward, "o", color=colour, markersize=2.2, alpha=0.35, markeredgewidth=0)
        if can_forecast(fit) and fit.window is not None:
            x = np.linspace(fit.window[0], fit.window[1], 120)
            panel.plot(x, predict(fit, x).value, color=colour, linewidth=1.8, linestyle=DASHES[dash])
    panel.set_xlabel(label(points[order[0]].unit, 50), parse_math=False)
    panel.set_ylabel(label(points[order[0]].metric, 50), parse_math=False)


def _draw_ranking(
    panel: Axes,
    styles: Mapping[str, Style],
    order: Sequence[str],
    fits: Mapping[str, Fit],
    points: Mapping[str, Curve],
    ranking: Ranking,
) -> None:
    """Draw one row per recipe: A with its interval, or the mean reward at the end.

    Shade the margin below the best A.
    """
    tied = {entry.recipe for entry in ranking.ranking if entry.tied_with_best}
    asymptotes = [fits[recipe].A.value for recipe in order if fits[recipe].identifiable]
    best = max((value for value in asymptotes if value is not None), default=None)
    if best is not None:
        panel.axvspan(best - ranking.margin, best, color=REFUSED, alpha=0.15, linewidth=0)
    for row, recipe in enumerate(order):
        colour, fit, curve = styles[recipe].colour, fits[recipe], points[recipe]
        if fit.identifiable and fit.A.value is not None:
            ends = [bound if bound is not None else end for bound, end in zip(fit.A_total, fit.bounds, strict=True)]
            panel.plot(ends, [row, row], color=colour, linewidth=2.2, solid_capstyle="round")
            panel.plot([fit.A.value], [row], "o", color=colour, markersize=6)
            text = f"{fit.A.value:.2f}" + (" tied" if recipe in tied and len(tied) > 1 else "")
        else:
            last_reward = float(curve.reward[curve.compute >= 0.9 * curve.compute.max()].mean())
            panel.plot([last_reward], [row], "o", color=colour, markerfacecolor="none", markersize=6)
            text = f"{last_reward:.2f} so far"
        panel.annotate(
            text, (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8.5, color=INK,
        )  # fmt: skip
    short = shorten_labels(order)
    name_rows(panel, [short[recipe] for recipe in order], 44)
    panel.set_xlabel(f"asymptote A (shaded: within {ranking.margin:g} of the best; hollow: reward so far)")


def name_rows(panel: Axes, names: Sequence[str], limit: int = 34) -> None:
    """Name the rows of a panel from the top, one per recipe, where values are on the horizontal axis."""
    panel.set_yticks(range(len(names)))
    cut_names = cut(names, limit)
    panel.set_yticklabels([cut_names[name].replace("$", r"\$") for name in names])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.grid(axis="x", color=RULE, linewidth=0.6)
    panel.tick_params(axis="y", length=0)
    panel.spines["left"].set_visible(False)
