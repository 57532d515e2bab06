"""Measures that keep a large study's page small: points as dots of one path, shorter SVG, fewer points to hover."""

from __future__ import annotations

import re

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

# A figure of more points is drawn with dots: as a marker of its own each is 150 bytes of the page, as a dot 16.
MANY_POINTS = 1500
# So many points are in the interactive figure, about 60 bytes each.
MOST_HOVERED = 3000
# Lines of fewer points keep their markers: those at compute 0 are told by theirs.
_FEW = 8
# Attributes of an SVG that hold coordinates; texts, which hold numbers too, stay as they are.
_COORDINATES = re.compile(r'\s(?:d|x|y|width|height|points|transform)="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")
# Spaces beside a command of a path set nothing apart; others may be line breaks.
_SPACES = re.compile(r"(?<!^)\s*([MLCQzh]|\s(?=[-.\d]))\s*")
_DOT = re.compile(r"M([-\d.]+ [-\d.]+)L\1(?=[M\s\"])")


def points_as_dots(figure: Figure) -> int:
    """Have the points of a crowded figure drawn as round dots below its curves, a path a seed.

    Returns:
        How many points became dots; 0 where all keep their markers.
    """
    markers = [
        line
        for axes in figure.axes
        for line in axes.lines
        if line.get_linestyle() == "None" and len(np.atleast_1d(line.get_xdata())) > _FEW
    ]
    count = sum(len(np.atleast_1d(line.get_xdata())) for line in markers)
    if count <= MANY_POINTS:
        return 0
    for line in markers:
        # A line of no length with round ends is a dot; a gap before the next.
        x, y = (
            np.column_stack([values, values, np.full(len(values), np.nan)]).ravel()
            for values in (np.asarray(line.get_xdata(), dtype=float), np.asarray(line.get_ydata(), dtype=float))
        )
        line.set_data(x, y)
        line.set(marker="None", linestyle="-", linewidth=line.get_markersize(), solid_capstyle="round", zorder=1.9)
    return count


def smaller(document: str) -> str:
    """Shorten an SVG that goes into a page: coordinates to a hundredth of a point, no unused names, no own fonts."""
    body = _COORDINATES.sub(lambda found: _SPACES.sub(r"\1", _DIGITS.sub(r"\1", found.group())), document)
    body = _DOT.sub(r"M\1h0", body)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    body = re.sub(r'\sid="([^"]*)"', lambda found: found.group() if found.group(1) in used else "", body)
    # The page's own font applies; a list of fonts at each number is most of an axis.
    body = re.sub(r"font-family: [^;\"]*;\s*", "", body)
    return re.sub(r">\s*\n\s*<", "><", body)


def evenly(count: int, share: float) -> NDArray[np.intp]:
    """Return the indices of about this share of `count` points: evenly spread, the first and the last among them."""
    kept = max(2, round(count * share))
    return np.arange(count) if kept >= count else np.unique(np.linspace(0, count - 1, kept).round().astype(np.intp))
