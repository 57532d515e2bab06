"""Did a choice act? The counters that training logs, read back from the journals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sweeps.journal import JournalView
from sweeps.source import finite


def mechanism_counters(runs: Sequence[JournalView]) -> dict[str, dict[str, float]]:
    """How far each axis acted: the last `mechanism/<axis>` of every run, averaged over a recipe's runs.

    Returns:
        For each recipe label the share in [0, 1] by axis; recipes without counters are left out.
    """
    collected: dict[str, dict[str, list[float]]] = {}
    for view in runs:
        last: dict[str, float] = {}
        for record in view.of_kind("train"):
            for name, value in record.metrics.items():
                if name.startswith("mechanism/") and (number := finite(value)) is not None:
                    last[name.removeprefix("mechanism/")] = number
        for axis, number in last.items():
            recipe = str(view.header.get("recipe", view.path.parent.name))
            collected.setdefault(recipe, {}).setdefault(axis, []).append(number)
    return {r: {axis: sum(v) / len(v) for axis, v in axes.items()} for r, axes in collected.items()}


def idle_variants(counters: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A warning for every variant (`base+axis=choice`) whose own counter stayed at zero."""
    notes = []
    for recipe, axes in sorted(counters.items()):
        for part in recipe.split("+")[1:]:
            axis = part.partition("=")[0]
            if axes.get(axis) == 0:
                notes.append(f"{recipe}: this variant changed nothing (mechanism/{axis} stayed at 0)")
    return notes
