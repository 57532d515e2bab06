"""Draw a report's figures: compute curves, asymptotes, residuals, confidence curves of A, and A over compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweeps.curve import Curve
from sweeps.decide.aggregate import Aggregate
from sweeps.decide.rank import Ranking
from sweeps.fit.fit import Fit
from sweeps.fit.history import Snapshot
from sweeps.fit.points import select
from sweeps.fit.predict import confidence_curve, fitted_line, predict
from sweeps.report.drawing import (
    DASHES,
    INK,
    REFUSED,
    RULE,
    STYLE,
    colours,
    draw_points,
    limits,
    log_axis,
    make_panels,
    ranking_styles,
)
from sweeps.report.labels import cut, shorten_labels
from sweeps.report.overlay import name_rows


def _short_labels(order: Sequence[str], ranking: Ranking) -> list[str]:
    short = shorten_labels([entry.recipe for entry in ranking.ranking])
    return [short[recipe] for recipe in order]


def residuals_figure(fits: Sequence[Fit], ranking: Ranking) -> Figure | None:
    """Draw residuals (reward minus the fitted curve), one panel per recipe, by seed, with +-2 standard deviations.

    Only fitted points are drawn. None if no recipe has a fitted curve.
    """
    by_recipe = {fit.recipe: fit for fit in fits if fit.draws is not None and fit.A.value is not None}
    order = [entry.recipe for entry in ranking.ranking if entry.recipe in by_recipe]
    if not order:
        return None
    colour = colours(ranking)
    left, right = limits([by_recipe[recipe].curve for recipe in order])
    with rc_context(STYLE):
        figure, panels = make_panels(_short_labels(order, ranking), fits[0].curve.unit, "reward minus the curve")
        largest = max(
            _draw_residuals(panel=panel, fit=by_recipe[recipe], left=left, right=right, colour=colour[recipe])
            for recipe, panel in zip(order, panels, strict=True)
        )
        # Leave room for the note below the points.
        panels[0].set_ylim(-1.35 * largest, 1.1 * largest)
    return figure


def _draw_residuals(panel: Axes, fit: Fit, left: float, right: float, colour: str) -> float:
    """Draw the residuals of one recipe. Return the largest absolute residual."""
    points = select(fit.curve, fit.options)
    log_axis(panel, left, right)
    panel.axhline(0, color=colour, linewidth=1.2)
    if fit.outlook is not None:
        noise = float(np.median(fit.outlook.noise))
        panel.axhspan(-2 * noise, 2 * noise, color=colour, alpha=0.13, linewidth=0)
        note = f"sd {noise:.4f}"
        panel.text(0.97, 0.03, note, transform=panel.transAxes, ha="right", fontsize=8.5)
    residual = points.reward - fitted_line(fit, points.compute)
    draw_points(panel=panel, compute=points.compute, y=residual, seed=points.seed, left=left, colour=colour)
    return max(float(np.abs(residual).max()), 1e-6)


# --- the confidence curve of A ------------------------------------------------------------------------------


def profile_figure(fits: Sequence[Fit], ranking: Ranking) -> Figure | None:
    """Draw the confidence curves of A: identifiable recipes on the left, open recipes on the right; None without any.

    For each value of A the curve shows its p-value. It crosses 0.05 at the ends of the 95% interval. An end at which A
    is not bounded is marked as open.
    """
    by_recipe = {fit.recipe: fit for fit in fits if fit.A.value is not None and fit.draws is not None}
    ordered = [by_recipe[entry.recipe] for entry in ranking.ranking if entry.recipe in by_recipe]
    groups = [
        ("A identifiable", [fit for fit in ordered if fit.identifiable]),
        ("A open", [fit for fit in ordered if fit.verdict == "open"]),
    ]
    groups = [(title, group) for title, group in groups if group]
    if not groups:
        return None
    style_by_recipe = ranking_styles(ranking)
    with rc_context(STYLE):
        longest = max(len(group) for _, group in groups)
        size = (6.6 if len(groups) == 1 else 9.4, 2.9 + 0.19 * -(-longest // 2))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False).ravel()
        names = _legend_names(ranking)
        for (title, group), panel in zip(groups, panels, strict=True):
            for fit in group:
                colour, dash = style_by_recipe[fit.recipe]
                _draw_profile(
                    panel=panel,
                    fit=fit,
                    colour=colour,
                    dash=DASHES[dash],
                    name=names[fit.recipe],
                )
            panel.axhline(0.05, color=REFUSED, linewidth=0.8, linestyle=":")
            panel.set_ylim(0, 1.04)
            panel.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
            panel.set_xlabel("asymptote A")
            panel.tick_params(length=2.5)
            legend = panel.legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=8, handlelength=2.4
            )
            for text in legend.get_texts():
                text.set_parse_math(False)
        panels[0].set_ylabel("p value")
    return figure


def _draw_profile(panel: Axes, fit: Fit, colour: str, dash: object, name: str) -> None:
    x, p = confidence_curve(fit)
    panel.plot(x, p, color=colour, linewidth=1.4, linestyle=dash, label=name)
    for end, known in ((0, fit.A.low), (-1, fit.A.high)):
        if known is None:
            panel.plot([x[end], x[end]], [0, p[end]], color=colour, linewidth=1.4, linestyle=(0, (2, 2)))
            panel.annotate(
                "open",
                (x[end], p[end]),
                color=INK,
                fontsize=8,
                xytext=(0, 3),
                textcoords="offset points",
                ha="right" if end else "left",
            )


def _legend_names(ranking: Ranking) -> dict[str, str]:
    """Return names for a legend. A name that begins with `_`, which Matplotlib would omit, gets a zero-width space."""
    short = shorten_labels([entry.recipe for entry in ranking.ranking])
    cut_names = cut(list(short.values()), 40)
    return {recipe: "\u200b" * cut_names[name].startswith("_") + cut_names[name] for recipe, name in short.items()}


# --- the asymptote over compute -----------------------------------------------------------------------------


def history_figure(histories: Mapping[str, Sequence[Snapshot]], ranking: Ranking, unit: str) -> Figure | None:
    """Draw A over compute, one panel per recipe: A of the fit up to each compute, with its 95% interval.

    Markers are filled where A was identifiable, else hollow and grey. An open bound is a dotted line to the panel's
    edge. Recipes whose A was never identifiable or open are left out; None if no recipe remains.
    """
    with_asymptote = {
        recipe: [snapshot for snapshot in snapshots if snapshot.A.value is not None]
        for recipe, snapshots in histories.items()
        if any(snapshot.verdict in ("identifiable", "open") for snapshot in snapshots)
    }
    order = [entry.recipe for entry in ranking.ranking if with_asymptote.get(entry.recipe)]
    if not order:
        return None
    colour = colours(ranking)
    all_snapshots = [snapshot for recipe in order for snapshot in with_asymptote[recipe]]
    identifiable = [snapshot for snapshot in all_snapshots if snapshot.verdict == "identifiable"] or all_snapshots
    heights = [value for s in identifiable for value in (s.A.value, s.A.low, s.A.high) if value is not None]
    margin = 0.12 * (max(heights) - min(heights)) + 1e-3
    with rc_context(STYLE):
        figure, panels = make_panels(_short_labels(order, ranking), unit, "asymptote A, fitted up to this compute")
        panels[0].set_ylim(min(heights) - margin, max(heights) + margin)
        ends = [snapshot.compute_end for snapshot in all_snapshots]
        for recipe, panel in zip(order, panels, strict=True):
            log_axis(panel, min(ends) / 1.15, max(ends) * 1.15)
            _draw_history(panel, with_asymptote[recipe], colour[recipe])
    return figure


def _draw_history(panel: Axes, snapshots: Sequence[Snapshot], colour: str) -> None:
    bottom, top = panel.get_ylim()
    for snapshot in snapshots:
        value, x = snapshot.A.value, snapshot.compute_end
        assert value is not None
        shade = colour if snapshot.verdict == "identifiable" else REFUSED
        for bound, edge in ((snapshot.A.low, bottom), (snapshot.A.high, top)):
            style = (0, (1, 2)) if bound is None else "-"
            end = edge if bound is None else bound
            panel.plot([x, x], [value, end], color=shade, linewidth=1.6, linestyle=style, alpha=0.7)
        face = shade if snapshot.verdict == "identifiable" else "none"
        panel.plot([x], [value], "o", color=shade, markerfacecolor=face, markersize=4)
    if snapshots[-1].verdict == "identifiable":
        panel.axhline(snapshots[-1].A.value or 0.0, color=colour, linewidth=0.7, linestyle=":")
    panel.set_axisbelow(True)
    panel.grid(axis="x", color=RULE, linewidth=0.4)


def curves_figure(curves: Sequence[Curve], fits: Sequence[Fit], ranking: Ranking) -> Figure:
    """Draw one panel per recipe on shared axes: points by seed, fitted curve, 95% band, A, and the baseline's line."""
    by_recipe = {fit.recipe: fit for fit in fits}
    points = {curve.recipe: curve for curve in curves}
    order = [entry.recipe for entry in ranking.ranking]
    left, right = limits(curves)
    colour = colours(ranking)
    with rc_context(STYLE):
        figure, panels = make_panels(_short_labels(order, ranking), curves[0].unit, curves[0].metric)
        for recipe, panel in zip(order, panels, strict=True):
            log_axis(panel, left, right)
            base = by_recipe.get(ranking.baseline or "")
            if base is not None and base.recipe != recipe:
                _draw_fit(panel=panel, fit=base, left=left, right=right, colour=colour[base.recipe], ghost=True)
            _draw_fit(panel=panel, fit=by_recipe[recipe], left=left, right=right, colour=colour[recipe], ghost=False)
            curve = points[recipe]
            draw_points(
                panel=panel, compute=curve.compute, y=curve.reward, seed=curve.seed, left=left, colour=colour[recipe]
            )
    return figure


def _draw_fit(panel: Axes, fit: Fit, left: float, right: float, colour: str, ghost: bool) -> None:
    """Draw a fitted curve with its band, solid within the evaluated compute and dashed beyond, and A or the verdict.

    With `ghost`, only a thin line is drawn: the baseline's curve in another recipe's panel.
    """
    if fit.draws is None or fit.window is None:
        return
    x = np.geomspace(left, right, 80)
    band = predict(fit, x)
    if ghost:
        panel.plot(x, band.value, color=colour, linewidth=0.9, alpha=0.8)
        return
    inside = x <= fit.window[1]
    panel.fill_between(x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
    panel.plot(x[inside], band.value[inside], color=colour, linewidth=1.6)
    panel.plot(x[~inside], band.value[~inside], color=colour, linewidth=1.3, linestyle=(0, (4, 2)))
    if fit.identifiable and fit.A.value is not None:
        panel.axhline(fit.A.value, color=colour, linewidth=0.7, linestyle=":")
        note = f"A {fit.A.value:.3f}"
        where = (x[2], fit.A.value)
        panel.annotate(note, where, color=INK, fontsize=8.5, xytext=(0, 3), textcoords="offset points")
    else:
        panel.text(0.03, 0.94, fit.verdict, transform=panel.transAxes, va="top", fontsize=8.5, color=INK)


def _asymptote(fit: Fit) -> float:
    assert fit.A.value is not None, "only identifiable recipes are ranked"
    return fit.A.value


def asymptotes_figure(fits: Sequence[Fit], ranking: Ranking) -> Figure | None:
    """Draw A of every ranked recipe: a thick 95% interval for the given runs, a thin one for all possible seeds.

    The shaded strip is the margin below the best A. None if no recipe is ranked.
    """
    by_recipe = {fit.recipe: fit for fit in fits}
    ranked = [by_recipe[entry.recipe] for entry in ranking.ranking if entry.rank is not None]
    if not ranked:
        return None
    colour = colours(ranking)
    best = max(_asymptote(fit) for fit in ranked)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.6, 0.36 * len(ranked) + 0.95), layout="constrained")
        panel = figure.subplots()
        panel.axvspan(best - ranking.margin, best, color=REFUSED, alpha=0.15, linewidth=0)
        for row, fit in enumerate(ranked):
            for ends, width in ((fit.A_total, 1.1), ((fit.A.low, fit.A.high), 4.0)):
                at = np.array(ends, dtype=float)
                panel.plot(at, np.full(2, row), color=colour[fit.recipe], linewidth=width, alpha=0.7)
            panel.plot([_asymptote(fit)], [row], "o", color=colour[fit.recipe], markersize=5)
        name_rows(panel, _short_labels([fit.recipe for fit in ranked], ranking))
        panel.set_xlabel(f"asymptote A (shaded: within {ranking.margin:g} of the best)")
    return figure


def performance_figure(aggregate: Aggregate | None, ranking: Ranking) -> Figure | None:
    """Draw the performance profiles of all recipes over several evaluation sets; None without an aggregate."""
    if aggregate is None:
        return None
    style_by_recipe, names = ranking_styles(ranking), _legend_names(ranking)
    with rc_context(STYLE):
        figure = Figure(figsize=(6.6, 2.9 + 0.19 * -(-len(aggregate.rows) // 2)), layout="constrained")
        panel = figure.subplots()
        for row in aggregate.rows:
            colour, dash = style_by_recipe[row.recipe]
            name = names[row.recipe]
            panel.step(aggregate.thresholds, row.profile, where="post", color=colour, ls=DASHES[dash], label=name)
            if row.runs > 1:
                low, high = np.array([row.profile_low, row.profile_high], dtype=float)
                panel.fill_between(aggregate.thresholds, low, high, step="post", color=colour, alpha=0.15, linewidth=0)
        panel.set_ylim(0, 1.04)
        panel.set_xlabel("score")
        panel.set_ylabel("share of runs and sets above the score")
        panel.tick_params(length=2.5)
        legend = panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)
    return figure
