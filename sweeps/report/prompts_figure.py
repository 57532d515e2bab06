"""Figure of held-out prompts over compute: the shares that never, sometimes and always pass."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from sweeps.decide.rank import Ranking
from sweeps.report.drawing import INK, STYLE, colours, log_axis, multiples
from sweeps.report.labels import shortened
from sweeps.source.held_out import PromptShares


def prompts_figure(shares: Sequence[PromptShares], ranking: Ranking, unit: str) -> Figure | None:
    """Draw a panel per recipe: prompts that always pass (dark), sometimes (light), never (white), over compute.

    Compute 0 is drawn at the left edge. None without a recipe that has such shares at two evaluations.
    """
    by_recipe = {each.recipe: each for each in shares if len(each.compute) > 1}
    order = [entry.recipe for entry in ranking.ranking if entry.recipe in by_recipe]
    if not order:
        return None
    colour = colours(ranking)
    positive = [compute for recipe in order for compute in by_recipe[recipe].compute if compute > 0]
    left, right = min(positive) / 1.5, max(positive)
    short = shortened([entry.recipe for entry in ranking.ranking])
    with rc_context(STYLE):
        figure, panels = multiples([short[recipe] for recipe in order], unit, "share of prompts")
        for recipe, panel in zip(order, panels, strict=True):
            each = by_recipe[recipe]
            x = [max(compute, left) for compute in each.compute]
            some = [1 - never for never in each.never]
            log_axis(panel, left, right)
            panel.set_ylim(0, 1)
            panel.fill_between(x, 0, each.always, color=colour[recipe], alpha=0.75, linewidth=0)
            panel.fill_between(x, each.always, some, color=colour[recipe], alpha=0.3, linewidth=0)
            panel.plot(x, some, color=INK, linewidth=0.8)
    return figure
