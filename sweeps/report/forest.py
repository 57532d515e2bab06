"""Forest plot of the effects of a grid's axes on the asymptote, with their intervals."""

from __future__ import annotations

from matplotlib import rc_context
from matplotlib.figure import Figure

from sweeps.decide.effects import Effects
from sweeps.report.drawing import COLOURS, REFUSED, RULE, STYLE
from sweeps.report.labels import cut


def forest_figure(effects: Effects) -> Figure:
    """Draw one line per effect, in the order of the axes. A line is coloured if its interval excludes 0."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 0.9 + 0.28 * len(effects.effects)), layout="constrained")
        panel = figure.add_subplot()
        panel.axvline(0.0, color=RULE, linewidth=1)
        for place, effect in enumerate(effects.effects):
            low, value, high = effect.A.low, effect.A.value, effect.A.high
            assert low is not None and value is not None and high is not None
            colour = COLOURS[0] if low > 0 or high < 0 else REFUSED
            panel.plot([low, high], [-place, -place], color=colour, linewidth=1.6, solid_capstyle="round")
            panel.plot([value], [-place], "o", color=colour, markersize=4)
        panel.set_yticks([-place for place in range(len(effects.effects))])
        names = [f"{effect.axis} = {effect.level}" for effect in effects.effects]
        panel.set_yticklabels([cut(names, 34)[name] for name in names])
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel(f"effect on the asymptote, mean over {effects.cells} recipes (95% interval)")
        panel.margins(y=0.5 / max(len(effects.effects), 1))
    return figure
