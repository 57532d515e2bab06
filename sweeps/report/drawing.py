"""Functions for drawing the figures: colours, small multiples, log axes, points, SVG and PNG output.

Figures are drawn without pyplot, so they need no global state and no display. In the SVG, text is stored as text, not
as outlines. Text (`INK`) and lines (`RULE`) have placeholder colours. `inline_svg` replaces these by the page's
colours, so that one drawing fits a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from warnings import catch_warnings, filterwarnings

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from sweeps.curve import Array, Curve
from sweeps.decide.rank import Ranking
from sweeps.errors import UserError
from sweeps.report.labels import cut, printable
from sweeps.report.thinning import shorten_svg

# Colours by Okabe and Ito, which most colour-blind readers can distinguish. They are legible on white and on
# near-black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#C28F00", "#56A0D9")
# Line styles in matplotlib's form, used once all colours are taken. The interactive figure has the same.
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
# Colour of recipes without an identifiable asymptote, and of other subdued marks.
REFUSED = "#8a8f98"
INK, RULE = "#1b1f24", "#d7dadf"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "scalerl",
    # Simplification would remove dots, which are lines of length 0.
    "path.simplify": False,
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Style(NamedTuple):
    """Style of a recipe in every figure: its colour, and the index of its line style in `DASHES`."""

    colour: str
    dash: int


def styles(recipes: Iterable[str], baseline: str | None) -> dict[str, Style]:
    """Assign each recipe a colour and a line style that do not depend on its rank.

    Only the baseline (without a baseline, the first label) has the first colour. The other recipes, sorted by label,
    take the other five colours in turn, with solid lines. After these, the next line style begins.
    """
    order = sorted(set(recipes), key=lambda recipe: (recipe != baseline, recipe))
    other_colours = COLOURS[1:]
    style_by_recipe = {recipe: Style(COLOURS[0], 0) for recipe in order[:1]}
    for index, recipe in enumerate(order[1:]):
        style_by_recipe[recipe] = Style(
            other_colours[index % len(other_colours)], index // len(other_colours) % len(DASHES)
        )
    return style_by_recipe


def ranking_styles(ranking: Ranking) -> dict[str, Style]:
    """Return the style of every recipe of a ranking, see `styles`."""
    return styles((entry.recipe for entry in ranking.ranking), ranking.baseline)


def colours(ranking: Ranking) -> dict[str, str]:
    """Return the colour of every recipe of a ranking, see `styles`."""
    return {recipe: style.colour for recipe, style in ranking_styles(ranking).items()}


def label(text: str, limit: int = 34) -> str:
    """Shorten a title to at most `limit` printable characters by cutting its middle. For recipes see `labels.cut`."""
    line = printable(text)
    head = limit // 2
    return line if len(line) <= limit else f"{line[:head]}…{line[head + 1 - limit :]}"


def make_panels(names: Sequence[str], x: str, y: str) -> tuple[Figure, list[Axes]]:
    """Make a figure with one titled panel per name, on shared, labelled axes. Call it within the context of `STYLE`."""
    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.15 * columns + 0.5, 2.45 * rows + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel())
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    titles = cut(names, 34)
    for name, panel in zip(names, panels, strict=False):
        panel.set_title(titles[name], loc="left", fontsize=9.5, fontweight="bold", parse_math=False)
        panel.grid(axis="y", color=RULE, linewidth=0.6)
        # A narrow page shows the panels one below the other, so each panel needs tick labels.
        panel.tick_params(length=2.5, labelbottom=True, labelleft=True)
    figure.supxlabel(label(x, 50), fontsize=9, parse_math=False)
    figure.supylabel(label(y, 50), fontsize=9, parse_math=False)
    return figure, panels[: len(names)]


def limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the limits of the compute axis, leaving room on the left for points at compute 0."""
    positive = np.concatenate([curve.compute[curve.compute > 0] for curve in curves])
    if not len(positive):
        return 0.5, 2.0
    return float(positive.min()) / 1.8, float(positive.max()) * 1.5


def log_axis(panel: Axes, left: float, right: float) -> None:
    """Set a log axis of compute. An axis of less than two decades also has labels at 2 and 5, as plain numbers."""
    panel.set_xscale("log")
    panel.set_xlim(left, right)
    if right < 100 * left:
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())


def draw_points(panel: Axes, compute: Array, y: Array, seed: NDArray[Any], left: float, colour: str) -> None:
    """Draw points (n,) with one marker per seed. Points at compute 0 are hollow, at the left edge."""
    for index, label in enumerate(np.unique(seed)):
        marker = "osD^v"[index % 5]
        later = (seed == label) & (compute > 0)
        start = y[(seed == label) & (compute == 0)]
        panel.plot(compute[later], y[later], marker, color=colour, markersize=2.8, alpha=0.75, markeredgewidth=0)
        panel.plot(
            np.full(len(start), left * 1.15),
            start,
            marker,
            markerfacecolor="none",
            color=colour,
            markersize=4,
        )


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Silence matplotlib's repeated warnings about characters that its font lacks. `not_in_font` finds these."""
    with catch_warnings():
        filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def not_in_font(texts: Iterable[str]) -> str:
    """Return the characters that the figures' font lacks, which are boxes in PNG and PDF."""
    font = get_font(findfont(FontProperties(family=[str(STYLE["font.family"])])))
    return "".join(dict.fromkeys(char for text in texts for char in text if not font.get_char_index(ord(char))))


def svg(figure: Figure) -> str:
    """Render the figure as a standalone SVG document, reproducible to the byte."""
    buffer = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """Render the figure as a PNG on white, at 160 dpi."""
    buffer = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(buffer, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def pdf(figure: Figure) -> bytes:
    """Render the figure as a PDF on white, with text as text, reproducible to the byte."""
    buffer = io.BytesIO()
    with rc_context({**STYLE, "pdf.fonttype": 42}):
        figure.savefig(buffer, format="pdf", dpi=160, facecolor="white", metadata={"CreationDate": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Panels:
    """Panels of a figure, for showing them one below the other.

    Attributes:
        boxes: view box of each panel in the SVG: left, top, width and height in points.
        x, y: labels of the axes, which all panels share.
    """

    boxes: tuple[tuple[float, float, float, float], ...] = ()
    x: str = ""
    y: str = ""


def panels_of(figure: Figure) -> Panels:
    """Return the panels of a figure whose layout is final; no boxes for a single panel."""
    axes = [panel for panel in figure.axes if panel.get_visible()]
    if len(axes) < 2:
        return Panels()
    scale, height = 72 / figure.dpi, 72 * figure.get_figheight()
    boxes = []
    for panel in axes:
        box = panel.get_tightbbox()
        assert box is not None, "a visible panel has a size"
        left, top = scale * box.x0 - 3, height - scale * box.y1 - 3
        boxes.append((left, top, scale * box.width + 6, scale * box.height + 6))
    return Panels(tuple(boxes), figure.get_supxlabel(), figure.get_supylabel())


def inline_svg(document: str, prefix: str, description: str, panels: Panels | None = None) -> str:
    """Convert an SVG document to an element of the page, with unique ids and the page's colours.

    Args:
        document: SVG from `svg`.
        prefix: prefix for ids, unique on the page.
        description: text for screen readers, already escaped.
        panels: panels of the figure, which a narrow screen shows instead of the whole figure; None without panels.
    """
    body = shorten_svg(document[document.index("<svg") :])
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    body = body.replace("url(#", f"url(#{prefix}-")
    # Remove the drawing's stylesheet, which would apply to the whole page.
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, count=1, flags=re.DOTALL)
    body = body.replace(INK, "currentColor").replace(RULE, "var(--rule)")
    width = re.search(r'width="([\d.]+)pt"', body)
    style = f' style="max-width:{float(width.group(1)) * 4 / 3:.0f}px"' if width else ""
    body = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", body, count=2)
    if panels is None or not panels.boxes:
        return body.replace("<svg", f'<svg role="img" aria-label="{description}" class="figure"{style}', 1)
    body = re.sub(r"(<svg[^>]*>)(.*)(</svg>)", rf'\1<g id="{prefix}-all">\2</g>\3', body, count=1, flags=re.DOTALL)
    views = "".join(
        f'<svg viewBox="{" ".join(f"{number:.1f}" for number in box)}"><use href="#{prefix}-all"/></svg>'
        for box in panels.boxes
    )
    return (
        body.replace("<svg", f'<svg role="img" aria-label="{description}" class="figure whole"{style}', 1)
        + f'<div class="panels" aria-hidden="true">{views}</div>'
    )


_FORMATS = ("svg", "png", "pdf")


def check_format(path: Path) -> str:
    """Return the format of a figure's file, by its ending.

    Raises:
        UserError: the format is not SVG, PNG or PDF.
    """
    ending: str = path.suffix.lower().removeprefix(".")
    if ending not in _FORMATS:
        raise UserError(f"{path}: figures are written as {', '.join(_FORMATS)}; end the file's name with one of them")
    return ending


def write_figure(figure: Figure, path: Path) -> None:
    """Write the figure on white, in the format of the file's ending, see `check_format`."""
    with rc_context(STYLE):
        figure.savefig(path, format=check_format(path), dpi=160, facecolor="white")
