"""Draw the fractions of held-out prompts that never, sometimes and always pass, over compute."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from sweeps.decide.rank import Ranking
from sweeps.report.drawing import INK, STYLE, colours, log_axis, make_panels
from sweeps.report.labels import shorten_labels
from sweeps.source.held_out import PromptShares


def prompts_figure(shares: Sequence[PromptShares], ranking: Ranking, unit: str) -> Figure | None:
    """Draw one panel per recipe: prompts that always pass (dark), sometimes pass (light) and never pass (white).

    Compute 0 is drawn at the left edge. None if no recipe has these fractions for two evaluations.
    """
    by_recipe = {row.recipe: row for row in shares if len(row.compute) > 1}
    order = [entry.recipe for entry in ranking.ranking if entry.recipe in by_recipe]
    if not order:
        return None
    colour = colours(ranking)
    positive = [compute for recipe in order for compute in by_recipe[recipe].compute if compute > 0]
    left, right = min(positive) / 1.5, max(positive)
    short = shorten_labels([entry.recipe for entry in ranking.ranking])
    with rc_context(STYLE):
        figure, panels = make_panels([short[recipe] for recipe in order], unit, "share of prompts")
        for recipe, panel in zip(order, panels, strict=True):
            row = by_recipe[recipe]
            x = [max(compute, left) for compute in row.compute]
            not_never = [1 - never for never in row.never]
            log_axis(panel, left, right)
            panel.set_ylim(0, 1)
            panel.fill_between(x, 0, row.always, color=colour[recipe], alpha=0.75, linewidth=0)
            panel.fill_between(x, row.always, not_never, color=colour[recipe], alpha=0.3, linewidth=0)
            panel.plot(x, not_never, color=INK, linewidth=0.8)
    return figure
