"""Set the colours of recipes in MLflow's interface: a tag colours a run, and a group's name colours a group of runs.

The interface of MLflow 3.17 derives a group's colour from a hash of `tag.<key>.<value>`. A recipe's seeds, fit and band
should have the same colour. So blanks are appended to the value of the tag by which runs are grouped, until the hash
gives the wanted colour. In another version of MLflow the colours may differ; nothing else depends on this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product

RUN_COLOUR_TAG = "mlflow.runColor"
LINE_TAG = "line"
# MLflow's palette, in the order that its hash uses.
_PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
# Order in which recipes get colours. Blue and orange come first, neighbours are far apart, and near-black comes last.
_FIRST_COLOURS = (26, 15, 19, 2, 28, 8, 1, 6, 3, 0, 12, 24, 20, 4, 23, 7, 16, 27)
COLOURS = tuple(
    _PALETTE[at] for at in (*_FIRST_COLOURS, *sorted(set(range(len(_PALETTE))) - {*_FIRST_COLOURS, 9, 17}), 17, 9)
)
BASELINE_COLOUR = COLOURS[0]
_BLANKS = " \t\n"


def recipe_colours(recipes: Iterable[str], known: Mapping[str, str], baseline: str | None = None) -> dict[str, str]:
    """Assign a colour to each recipe: its known colour, else the first unused one. If all are used, they repeat.

    The baseline gets `BASELINE_COLOUR`. Another recipe has it only if an earlier version assigned it. A known colour
    outside of MLflow's palette, which a user has chosen for a run, is ignored, because no group can have it.
    """
    colours = {recipe: colour for recipe, colour in known.items() if colour in COLOURS}
    others = COLOURS[1:]
    for recipe in recipes:
        if recipe in colours:
            continue
        if recipe == baseline:
            colours[recipe] = BASELINE_COLOUR
        else:
            free = [colour for colour in others if colour not in colours.values()]
            colours[recipe] = free[0] if free else others[len(colours) % len(others)]
    return colours


def group_id(value: str) -> str:
    """Return the id, in MLflow's interface, of the group of runs with this value of the tag `line`."""
    return f"tag.{LINE_TAG}.{value}"


def group_colour(value: str) -> str:
    """Return the colour that MLflow's interface gives to the group of runs with this value of the tag `line`."""
    low = high = 0
    encoded = group_id(value).encode("utf-16-le")  # JavaScript hashes its 16-bit character codes
    for at in range(0, len(encoded), 2):
        low = (low + encoded[at] + 256 * encoded[at + 1]) % 255
        high = (high + low) % 255
    return _PALETTE[(low | high << 8) % len(_PALETTE)]


@cache
def line_value(label: str, colour: str) -> str:
    """Return the label with the fewest blanks that give its group this colour; the label alone if none do."""
    for length in range(7):
        for blanks in product(_BLANKS, repeat=length):
            value = label + "".join(blanks)
            if group_colour(value) == colour:
                return value
    return label
