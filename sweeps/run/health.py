"""Health checks on journals: choices without effect, truncated completions, code changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from sweeps.run.journal import SEMANTICS_FILE, JournalView, finite
from sweeps.run.provenance import changes_line


def mechanism_counters(runs: Sequence[JournalView]) -> dict[str, dict[str, float]]:
    """Average the last `mechanism/<axis>` of each run, which shows whether the choice on the axis had an effect.

    Returns:
        Mean over the runs of each recipe, in [0, 1], by recipe label and axis. Recipes without this metric are missing.
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
    """Return a warning for each axis on which a recipe departs from its baseline without effect in any of its runs."""
    counters = mechanism_counters(runs)
    notes = set()
    for view in runs:
        recipe = str(view.header.get("recipe", view.path.parent.name))
        # `departures` is a mapping with axes as keys. The first journal format had a list of axes, `departs_on`.
        for axis in view.header.get("departures", view.header.get("departs_on", ())):
            if counters.get(recipe, {}).get(axis) == 0:
                notes.add(f"{recipe}: no step showed an effect of this variant (mechanism/{axis} stayed at 0)")
    return sorted(notes)


# Properties of an optimizer that determine which is the smallest update that changes a weight.
_PRECISION_SETTINGS = ("storage", "states", "eps")


def optimizer_differences(runs: Sequence[JournalView]) -> list[str]:
    """Return one warning, in a list, if trainers differ in the types of weights or optimizer states, or in epsilon.

    One recipe at one learning rate ended at a reward of .818 or .733, depending only on the storage type of its weights
    (AReaL#1634). Trainers that do not report these values are left out. Runs of one trainer may differ without a
    warning, because a study varies them on purpose.
    """
    by_trainer: dict[str, dict[str, set[str]]] = {}
    for view in runs:
        stated = _precision_settings(view)
        trainer = by_trainer.setdefault(stated.pop("trainer", "command"), {})
        for name, value in stated.items():
            trainer.setdefault(name, set()).add(value)
    differences = []
    for name in _PRECISION_SETTINGS:
        values = {trainer: sorted(stated[name]) for trainer, stated in by_trainer.items() if name in stated}
        if len({tuple(each) for each in values.values()}) > 1:
            parts = (f"{', '.join(each)} in {trainer}" for trainer, each in sorted(values.items()))
            differences.append(f"{name} is {' and '.join(parts)}")
    if not differences:
        return []
    return [f"optimizers differ between trainers, which can matter as much as recipes: {'; '.join(differences)}"]


def _precision_settings(view: JournalView) -> dict[str, str]:
    """Return those of a run's trainer, types of weights and optimizer states, and epsilon that are known, as strings.

    For an adopted run they may be columns (`scalerl adopt --by loss,storage=config.dtype,eps=config.adam_epsilon`).
    """
    settings = view.header.get("settings") or {}
    stated = {name: value for name, value in settings.items() if name in ("trainer", *_PRECISION_SETTINGS)}
    try:
        semantics = json.loads((view.path.parent / SEMANTICS_FILE).read_text())
        stated |= semantics.get("optimizer") or {}
    except (OSError, ValueError, AttributeError, TypeError):
        semantics = {}  # the file is missing: the journal was copied alone, or an earlier version wrote it
    if "choices" in semantics:
        stated["trainer"] = "lightning-scalerl"
    states = stated.get("states")
    if isinstance(states, Mapping):
        stated["states"] = " and ".join(sorted({str(each) for each in states.values()}))
    texts = {name: str(stated[name]) for name in ("trainer", *_PRECISION_SETTINGS) if stated.get(name) is not None}
    if (eps := _short(texts.get("eps"))) is not None:
        texts["eps"] = eps  # 1e-8 and 1.0e-08 are the same number
    return texts


def _short(text: str | None) -> str | None:
    try:
        return f"{float(text):g}" if text is not None else None
    except ValueError:
        return None


def truncation_alarms(runs: Sequence[JournalView]) -> list[str]:
    """Return a warning for each run in which 10% of the completions or more were truncated (`alarm/truncated`).

    The metric of a step is 1 from 10% on, and 2 from 15% on.
    """
    notes = []
    for view in runs:
        levels = [(r.metrics.get("alarm/truncated", 0.0), r.step) for r in view.of_kind("train")]
        steps = [step for level, step in levels if level]
        if steps:
            share = "15%" if max(level for level, _ in levels) > 1 else "10%"
            notes.append(
                f"{view.header.get('recipe')} seed {view.header.get('seed')}: {share} or more of the completions were "
                f"truncated (first at step {steps[0]}, in {len(steps)} of {len(levels)} steps); such runs may become "
                "unstable"
            )
    return notes


def code_changes(runs: Sequence[JournalView]) -> list[str]:
    """Return a warning for each time that a run was resumed with different code."""
    return [
        f"{view.header.get('recipe')} seed {view.header.get('seed')}: continued from step {max(0, change.step)} "
        f"with other code: {changes_line(change.what)}"
        for view in runs
        for change in view.code_changes
    ]
