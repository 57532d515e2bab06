"""Keep the page of a large study small: points as dots of one path, shorter SVG, fewer points to hover over."""

from __future__ import annotations

import re

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

# With more points than this, a figure has dots instead of markers: a marker takes 150 bytes of the page, a dot 16.
MANY_POINTS = 1500
# Largest number of points in the interactive figure. Each takes about 60 bytes.
MAX_HOVERED = 3000
# Lines of at most this many points keep their markers, because they may be the points at compute 0.
_MIN_DOTS = 8
# SVG attributes with coordinates. Only these are shortened, because texts may contain numbers too.
_COORDINATES = re.compile(r'\s(?:d|x|y|width|height|points|transform)="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")
# White space next to a path command, which is redundant, and white space before a number, of which one character is
# kept (it may be a line break).
_SPACES = re.compile(r"(?<!^)\s*([MLCQzh]|\s(?=[-.\d]))\s*")
_DOT = re.compile(r"M([-\d.]+ [-\d.]+)L\1(?=[M\s\"])")


def points_as_dots(figure: Figure) -> int:
    """Replace the points of a crowded figure by round dots below its curves, one path per seed.

    Returns:
        Number of points that became dots; 0 if all keep their markers.
    """
    markers = [
        line
        for axes in figure.axes
        for line in axes.lines
        if line.get_linestyle() == "None" and len(np.atleast_1d(line.get_xdata())) > _MIN_DOTS
    ]
    count = sum(len(np.atleast_1d(line.get_xdata())) for line in markers)
    if count <= MANY_POINTS:
        return 0
    for line in markers:
        # A line of length 0 with round ends is a dot, and NaN makes a gap before the next one.
        x, y = (
            np.column_stack([values, values, np.full(len(values), np.nan)]).ravel()
            for values in (np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float))
        )
        line.set_data(x, y)
        line.set(marker="None", linestyle="-", linewidth=line.get_markersize(), solid_capstyle="round", zorder=1.9)
    return count


def shorten_svg(document: str) -> str:
    """Shorten an SVG for the page: coordinates to a hundredth of a point, no unused ids, no fonts."""
    body = _COORDINATES.sub(lambda match: _SPACES.sub(r"\1", _DIGITS.sub(r"\1", match.group())), document)
    body = _DOT.sub(r"M\1h0", body)
    used_ids = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    body = re.sub(r'\sid="([^"]*)"', lambda match: match.group() if match.group(1) in used_ids else "", body)
    # The page's font applies, and lists of fonts, one per tick label, are most of an axis's SVG.
    body = re.sub(r"font-family: [^;\"]*;\s*", "", body)
    return re.sub(r">\s*\n\s*<", "><", body)


def even_indices(count: int, share: float) -> NDArray[np.intp]:
    """Return the indices of about a fraction `share` of `count` points, evenly spread, with the first and the last."""
    size = max(2, round(count * share))
    return np.arange(count) if size >= count else np.unique(np.linspace(0, count - 1, size).round().astype(np.intp))
