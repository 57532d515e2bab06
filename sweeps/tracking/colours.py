"""Colours of recipes in MLflow's interface: a run has that of a tag, a group of runs one that follows from its name.

The interface of MLflow 3.17 takes a group's colour from a hash of `tag.<key>.<value>`. So that a recipe's seeds, fit
and band share one, the value of the tag that lines are grouped by ends in blanks, which no page shows, as many as
lead to the wanted colour. In another version the colours may differ again, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product

RUN_COLOUR_TAG = "mlflow.runColor"
LINE_TAG = "line"
# MLflow's palette, in the order that its hash counts in.
_PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
# Recipes take them in this order: blue and orange first, neighbours far apart, near black last.
_FIRST = (26, 15, 19, 2, 28, 8, 1, 6, 3, 0, 12, 24, 20, 4, 23, 7, 16, 27)
COLOURS = tuple(_PALETTE[at] for at in (*_FIRST, *sorted(set(range(len(_PALETTE))) - {*_FIRST, 9, 17}), 17, 9))
_BLANKS = " \t\n"


def recipe_colours(recipes: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return a colour for each recipe: the known one, else the first that none has, from the start when all are taken.

    A known colour that is not of MLflow's palette was chosen by hand for a run; no group can have it.
    """
    colours = {recipe: colour for recipe, colour in known.items() if colour in COLOURS}
    for recipe in recipes:
        if recipe not in colours:
            free = [colour for colour in COLOURS if colour not in colours.values()]
            colours[recipe] = free[0] if free else COLOURS[len(colours) % len(COLOURS)]
    return colours


def group_id(value: str) -> str:
    """Return what MLflow's interface calls the group of runs that have this value of the tag `line`."""
    return f"tag.{LINE_TAG}.{value}"


def group_colour(value: str) -> str:
    """Return the colour that MLflow's interface gives to that group."""
    low = high = 0
    encoded = group_id(value).encode("utf-16-le")  # JavaScript counts in these units
    for at in range(0, len(encoded), 2):
        low = (low + encoded[at] + 256 * encoded[at + 1]) % 255
        high = (high + low) % 255
    return _PALETTE[(low | high << 8) % len(_PALETTE)]


@cache
def line_value(label: str, colour: str) -> str:
    """Return the label followed by the fewest blanks that give its group this colour; without, if none does."""
    for length in range(7):
        for blanks in product(_BLANKS, repeat=length):
            value = label + "".join(blanks)
            if group_colour(value) == colour:
                return value
    return label
