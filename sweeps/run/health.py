"""Health checks on journals: choices without effect, truncated completions, code changes."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.run.journal import JournalView, finite
from sweeps.run.provenance import said


def mechanism_counters(runs: Sequence[JournalView]) -> dict[str, dict[str, float]]:
    """Return the effect of each axis: the last `mechanism/<axis>` of every run, averaged over a recipe's runs.

    Returns:
        A share in [0, 1] by recipe label and axis; recipes without counters are left out.
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


def idle_variants(runs: Sequence[JournalView]) -> list[str]:
    """Return a warning for each changed axis of a recipe whose counter ended at 0 in all its runs."""
    counters = mechanism_counters(runs)
    notes = set()
    for view in runs:
        recipe = str(view.header.get("recipe", view.path.parent.name))
        # A mapping; in the first journal format a list of axes.
        for axis in view.header.get("departures", view.header.get("departs_on", ())):
            if counters.get(recipe, {}).get(axis) == 0:
                notes.add(f"{recipe}: this variant changed nothing (mechanism/{axis} stayed at 0)")
    return sorted(notes)


def truncation_alarms(runs: Sequence[JournalView]) -> list[str]:
    """Return a warning for each run that raised `alarm/truncated`: 10% (level 1) or 15% (level 2) of completions."""
    notes = []
    for view in runs:
        rung = [(r.metrics.get("alarm/truncated", 0.0), r.step) for r in view.of_kind("train")]
        steps = [step for level, step in rung if level]
        if steps:
            share = "15%" if max(level for level, _ in rung) > 1 else "10%"
            notes.append(
                f"{view.header.get('recipe')} seed {view.header.get('seed')}: {share} or more of the completions were "
                f"truncated (first at step {steps[0]}, in {len(steps)} of {len(rung)} steps); such runs destabilise"
            )
    return notes


def code_changes(runs: Sequence[JournalView]) -> list[str]:
    """Return a warning for each code change between a run's valid records."""
    return [
        f"{view.header.get('recipe')} seed {view.header.get('seed')}: from step {max(0, change.step)} on with other "
        f"code: {said(change.what)}"
        for view in runs
        for change in view.code_changes
    ]
