"""Health checks on journals: choices without effect, truncated completions, code changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sweeps.run.journal import SEMANTICS_FILE, JournalView, finite
from sweeps.run.provenance import changes_line


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


# Properties of an optimizer that determine the smallest update with an effect.
_STORED = ("storage", "states", "eps")


def optimizer_differences(runs: Sequence[JournalView]) -> list[str]:
    """Return a warning if runs of several trainers differ in the types of weights and states or in epsilon.

    One recipe at one learning rate ended at rewards of .818 and .733 by the storage type alone (AReaL#1634). Trainers
    that do not state these values are left out. Differences within one trainer give no warning, because the study
    varies them on purpose.
    """
    by_trainer: dict[str, dict[str, set[str]]] = {}
    for view in runs:
        stated = _stored_by(view)
        trainer = by_trainer.setdefault(stated.pop("trainer", "command"), {})
        for name, value in stated.items():
            trainer.setdefault(name, set()).add(value)
    differences = []
    for name in _STORED:
        values = {trainer: sorted(stated[name]) for trainer, stated in by_trainer.items() if name in stated}
        if len({tuple(each) for each in values.values()}) > 1:
            parts = (f"{', '.join(each)} in {trainer}" for trainer, each in sorted(values.items()))
            differences.append(f"{name} is {' and '.join(parts)}")
    if not differences:
        return []
    return [f"optimizers differ between trainers, which can matter as much as recipes: {'; '.join(differences)}"]


def _stored_by(view: JournalView) -> dict[str, str]:
    """Return trainer, types of weights and optimizer states, and epsilon of a run, as texts; unknown ones are left out.

    An adopted run can state it in columns (`scalerl adopt --by loss,storage=config.dtype,eps=config.adam_epsilon`).
    """
    settings = view.header.get("settings") or {}
    stated = {name: value for name, value in settings.items() if name in ("trainer", *_STORED)}
    try:
        semantics = json.loads((view.path.parent / SEMANTICS_FILE).read_text())
        stated |= semantics.get("optimizer") or {}
    except (OSError, ValueError, AttributeError, TypeError):
        semantics = {}  # a journal alone, or of an earlier version
    if "choices" in semantics:
        stated["trainer"] = "lightning-scalerl"
    states = stated.get("states")
    if isinstance(states, Mapping):
        stated["states"] = " and ".join(sorted({str(each) for each in states.values()}))
    texts = {name: str(stated[name]) for name in ("trainer", *_STORED) if stated.get(name) is not None}
    if (eps := _short(texts.get("eps"))) is not None:
        texts["eps"] = eps  # 1e-8 and 1.0e-08 are one number
    return texts


def _short(text: str | None) -> str | None:
    """Return a number in its shortest form; None if the text is not a number."""
    try:
        return f"{float(text):g}" if text is not None else None
    except ValueError:
        return None


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
        f"code: {changes_line(change.what)}"
        for view in runs
        for change in view.code_changes
    ]
