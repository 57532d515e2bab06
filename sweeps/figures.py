"""The figures of a report: compute curves as small multiples, asymptotes with their intervals.

Drawn without pyplot, so no global state and no display. Text stays text in the SVG, and ink and rules carry
marker colours that `inline_svg` turns into the page's own, so that one drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sweeps.curve import Curve
from sweeps.fit import Fit
from sweeps.predict import predict
from sweeps.rank import Ranking

# Okabe and Ito's colours: told apart by most colour-blind readers, legible on white and on near-black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#C28F00", "#56A0D9")
_REFUSED = "#8a8f98"
_INK, _RULE = "#1b1f24", "#d7dadf"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scalerl",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _RULE,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def colours(ranking: Ranking) -> dict[str, str]:
    """A colour for each recipe: ranked ones in order, refused ones grey."""
    ranked = [entry.recipe for entry in ranking.ranking if entry.rank is not None]
    chosen = {recipe: COLOURS[i % len(COLOURS)] for i, recipe in enumerate(ranked)}
    return {entry.recipe: chosen.get(entry.recipe, _REFUSED) for entry in ranking.ranking}


def label(text: str, limit: int = 34) -> str:
    """A recipe's name as drawn: printable and short."""
    line = "".join(ch if ch.isprintable() else "?" for ch in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def curves_figure(curves: Sequence[Curve], fits: Sequence[Fit], ranking: Ranking) -> Figure:
    """One panel a recipe on shared axes: points by seed, fitted curve, 95% band, A; the baseline in grey."""
    by_recipe = {fit.recipe: fit for fit in fits}
    points = {curve.recipe: curve for curve in curves}
    order = [entry.recipe for entry in ranking.ranking]
    columns = 2 if len(order) in (2, 4) else min(3, len(order))
    rows = -(-len(order) // columns)
    left, right = _limits(curves)
    colour = colours(ranking)
    with rc_context(_STYLE):
        figure = Figure(figsize=(3.15 * columns + 0.5, 2.45 * rows + 0.4), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for panel in panels.ravel()[len(order) :]:
            panel.set_visible(False)
        # Shared axes label the bottom row only; above a gap that row is missing.
        for panel in panels.ravel()[max(len(order) - columns, 0) : len(order)]:
            panel.tick_params(labelbottom=True)
        for recipe, panel in zip(order, panels.ravel(), strict=False):
            panel.set_xscale("log")
            panel.set_xlim(left, right)
            base = by_recipe.get(ranking.baseline or "")
            if base is not None and base.recipe != recipe:
                _draw_fit(panel, base, left, right, _REFUSED, ghost=True)
            _draw_fit(panel, by_recipe[recipe], left, right, colour[recipe], ghost=False)
            _draw_points(panel, points[recipe], left, colour[recipe])
            panel.set_title(label(recipe), loc="left", fontsize=9.5, fontweight="bold", parse_math=False)
            panel.grid(axis="y", color=_RULE, linewidth=0.6)
            panel.tick_params(length=2.5)
        figure.supxlabel(curves[0].unit, fontsize=9, parse_math=False)
        figure.supylabel(label(curves[0].metric, 50), fontsize=9, parse_math=False)
    return figure


def _limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """The compute axis: from below the first positive point, where compute 0 goes, to beyond the last."""
    positive = np.concatenate([curve.compute[curve.compute > 0] for curve in curves])
    if not len(positive):
        return 0.5, 2.0
    return float(positive.min()) / 1.8, float(positive.max()) * 1.5


def _draw_points(panel: Axes, curve: Curve, left: float, colour: str) -> None:
    """Points by seed, one marker each; evaluations at compute 0 are hollow, at the left edge."""
    for index, seed in enumerate(np.unique(curve.seed)):
        own = curve.seed == seed
        x, y = curve.compute[own], curve.reward[own]
        marker = "osD^v"[index % 5]
        panel.plot(x[x > 0], y[x > 0], marker, color=colour, markersize=2.8, alpha=0.75, markeredgewidth=0)
        start = y[x == 0]
        panel.plot(
            np.full(len(start), left * 1.15),
            start,
            marker,
            markerfacecolor="none",
            color=colour,
            markersize=4,
        )


def _draw_fit(panel: Axes, fit: Fit, left: float, right: float, colour: str, ghost: bool) -> None:
    """The fitted curve, solid within the window and dashed beyond it, with its band and A at the right."""
    if fit.draws is None or fit.window is None:
        return
    x = np.geomspace(left, right, 120)
    band = predict(fit, x)
    if ghost:
        panel.plot(x, band.mean, color=colour, linewidth=0.9, alpha=0.8)
        return
    inside = x <= fit.window[1]
    panel.fill_between(x, band.low, band.high, color=colour, alpha=0.16, linewidth=0)
    panel.plot(x[inside], band.mean[inside], color=colour, linewidth=1.6)
    panel.plot(x[~inside], band.mean[~inside], color=colour, linewidth=1.3, linestyle=(0, (4, 2)))
    if fit.identifiable and fit.A.value is not None:
        panel.axhline(fit.A.value, color=colour, linewidth=0.7, linestyle=":")
        note = f"A {fit.A.value:.3f}"
        where = (x[2], fit.A.value)
        panel.annotate(note, where, color=colour, fontsize=8.5, xytext=(0, 3), textcoords="offset points")
    else:
        panel.text(0.03, 0.94, fit.verdict, transform=panel.transAxes, va="top", fontsize=8.5, color=colour)


def _named(fit: Fit) -> float:
    assert fit.A.value is not None, "only identifiable recipes are ranked"
    return fit.A.value


def asymptotes_figure(fits: Sequence[Fit], ranking: Ranking) -> Figure | None:
    """A of every ranked recipe: thick its 95% interval for these runs, thin with the spread between seeds.

    None if no recipe is ranked. The shaded strip is the margin below the best A.
    """
    by_recipe = {fit.recipe: fit for fit in fits}
    ranked = [by_recipe[entry.recipe] for entry in ranking.ranking if entry.rank is not None]
    if not ranked:
        return None
    colour = colours(ranking)
    best = max(_named(fit) for fit in ranked)
    with rc_context(_STYLE):
        figure = Figure(figsize=(6.6, 0.36 * len(ranked) + 0.95), layout="constrained")
        panel = figure.subplots()
        panel.axvspan(best - ranking.margin, best, color=_REFUSED, alpha=0.15, linewidth=0)
        for row, fit in enumerate(ranked):
            for ends, width in ((fit.A_total, 1.1), ((fit.A.low, fit.A.high), 4.0)):
                at = np.array(ends, dtype=float)
                panel.plot(at, np.full(2, row), color=colour[fit.recipe], linewidth=width, alpha=0.7)
            panel.plot([_named(fit)], [row], "o", color=colour[fit.recipe], markersize=5)
        panel.set_yticks(range(len(ranked)))
        panel.set_yticklabels([label(fit.recipe).replace("$", r"\$") for fit in ranked])
        panel.set_ylim(len(ranked) - 0.5, -0.5)
        panel.grid(axis="x", color=_RULE, linewidth=0.6)
        panel.tick_params(axis="y", length=0)
        panel.spines["left"].set_visible(False)
        panel.set_xlabel(f"asymptote A (shaded: within {ranking.margin:g} of the best)")
    return figure


def svg(figure: Figure) -> str:
    """The figure as a standalone SVG document: same input, same bytes."""
    buffer = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as a PNG on white, 160 dots an inch."""
    buffer = io.BytesIO()
    with rc_context(_STYLE):
        figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def inline_svg(document: str, prefix: str, description: str) -> str:
    """The SVG as an element of a page: its ids made unique, ink and rules in the page's colours.

    Args:
        document: from `svg`.
        prefix: unique on the page, for ids.
        description: what a screen reader says; already escaped.
    """
    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    # Inside a page the drawing's own stylesheet would apply to everything.
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = body.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
    width = re.search(r'width="([\d.]+)pt"', body)
    style = f' style="max-width:{float(width.group(1)) * 4 / 3:.0f}px"' if width else ""
    body = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", body, count=2)
    return body.replace("<svg", f'<svg role="img" aria-label="{description}" class="figure"{style}', 1)
