"""Relabel runs that have the same label but different curves, by the differences in their configurations.

A label is made from a command line. So two grids with the same study name, the second with another learning rate, may
produce the same label. The header's `curve` identifies a run's curve. Runs of scripts have no such identity: their
resolved settings are compared, and a warning states the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.run.files import parse_json
from sweeps.run.journal import SEMANTICS_FILE, JournalView
from sweeps.run.spec import SPEC_FILE, flatten_config, learning_config
from sweeps.source.collected import LoadedStudy
from sweeps.source.text import short

_MAX_KEYS = 3  # largest number of keys in a label
# Values of the header's `curve` in runs of scripts, which name no curve.
_UNKNOWN = frozenset({"", "local", "None"})
# Advice to users whose runs of scripts share a label.
NAME_RUNS = "give each recipe its own label, RunLog(run_dir, {'recipe': NAME})"
# Keys of `semantics.json` that may differ between runs of one recipe, or that follow from other keys.
_RUN_KEYS = ("seed", "versions", "commit", "departs_from_recipe_on")
_NO_KEY = object()

# Label of a recipe, and the (name, value) pairs of the factors by which curves are grouped.
_Label = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class _Namesakes:
    """Different curves under one label.

    Attributes:
        labels: new label of each curve, by the curve's identity.
        keys: keys of the configuration in which the curves differ.
        values: configuration of each curve by dotted key, by the curve's identity.
    """

    labels: dict[str, str]
    keys: list[str]
    values: dict[str, Mapping[str, Any]]


def relabel_namesakes(runs: Sequence[tuple[JournalView, Mapping[str, str]]], study: LoadedStudy) -> None:
    """Give new labels, in their headers, to runs that share a label but belong to different curves. Add a warning.

    Args:
        runs: runs with their factors, which already separate some curves.
        study: receives the warning.
    """
    curves: dict[_Label, dict[str, list[JournalView]]] = {}
    for view, factors in runs:
        curve = str(view.header.get("curve", ""))
        if curve not in _UNKNOWN:
            curves.setdefault(_label(view, factors), {}).setdefault(curve, []).append(view)
    ambiguous = {label: _make_labels(label[0], views) for label, views in curves.items() if len(views) > 1}
    if not ambiguous:
        return
    for view, factors in runs:
        new_fields = {}
        if (entry := ambiguous.get(_label(view, factors))) is not None:
            new_fields["recipe"] = entry.labels.get(str(view.header.get("curve", "")), str(view.header.get("recipe")))
        base = str(view.header.get("baseline"))
        if (base_entry := ambiguous.get((base, tuple(factors.items())))) is not None:
            is_baseline = base == view.header.get("recipe")
            new_fields["baseline"] = (
                new_fields.get("recipe", base) if is_baseline else _baseline_label(view, base_entry, base)
            )
        view.header = {**view.header, **new_fields}
    for (recipe, factor_pairs), entry in ambiguous.items():
        where = "".join(f" {name}={value}" for name, value in factor_pairs)
        study.warnings.append(
            f"{len(entry.labels)} different configurations share the label {recipe!r}{where}; each has a separate "
            f"curve: {short(', '.join(entry.labels.values()), 400)}"
        )


def unlike_scripts(label: str, views: Sequence[JournalView]) -> str | None:
    """Return a warning if runs of scripts under one label differ in their resolved settings, else None.

    Runs whose header names a curve, and runs without `semantics.json`, are left out.
    """
    all_settings = (_semantics(view.path.parent) for view in views if str(view.header.get("curve", "")) in _UNKNOWN)
    settings = [values for values in all_settings if values]
    differing = {
        key: texts
        for key in dict.fromkeys(key for values in settings for key in values)
        if len(texts := dict.fromkeys(str(values.get(key, "none")) for values in settings)) > 1
    }
    if not differing:
        return None
    listed = "; ".join(f"{key}: {short(', '.join(texts), 80)}" for key, texts in list(differing.items())[:_MAX_KEYS])
    rest_note = f"; and {len(differing) - _MAX_KEYS} more" if len(differing) > _MAX_KEYS else ""
    return (
        f"runs of {label} differ in {listed}{rest_note}; they are fitted together as seeds of one recipe; {NAME_RUNS}"
    )


def _semantics(run_dir: Path) -> dict[str, Any]:
    """Return a run's resolved choices, then its settings, by dotted key; empty if they cannot be read."""
    try:
        values = parse_json((run_dir / SEMANTICS_FILE).read_text())
        settings = {key: value for key, value in values.items() if key not in (*_RUN_KEYS, "choices")}
        return {**flatten_config(values.get("choices", {})), **flatten_config(settings)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _label(view: JournalView, factors: Mapping[str, str]) -> _Label:
    return str(view.header.get("recipe", view.path.parent.name)), tuple(factors.items())


def _make_labels(recipe: str, curves: Mapping[str, Sequence[JournalView]]) -> _Namesakes:
    """Make new labels from the values that differ. If values are unknown or too long, use the curve's identity."""
    values: dict[str, Mapping[str, Any]] = {curve: _values(views[0].path.parent) for curve, views in curves.items()}
    all_keys = dict.fromkeys(key for config in values.values() for key in config)
    keys = [key for key in all_keys if len({repr(config.get(key, _NO_KEY)) for config in values.values()}) > 1]
    # A configuration that another version wrote may lack keys. Such keys are shown only if the keys that all
    # configurations have do not separate the curves.
    shared = [key for key in keys if all(key in config for config in values.values())]
    keys = [*shared, *(key for key in keys if key not in shared)]
    for shown in (shared, keys):
        texts = {
            curve: ", ".join(f"{key}={config.get(key, 'none')}" for key in shown[:_MAX_KEYS])
            for curve, config in values.items()
        }
        if len(set(texts.values())) == len(texts):
            break
    if (
        not all(values.values())
        or len(set(texts.values())) < len(texts)
        or any(len(text) > 100 for text in texts.values())
    ):
        length = next(n for n in range(6, 65) if len({curve[:n] for curve in curves}) == len(curves))
        texts = {curve: f"curve {curve[:length]}" for curve in curves}
    return _Namesakes({curve: f"{recipe} ({text})" for curve, text in texts.items()}, keys, values)


def _baseline_label(view: JournalView, base: _Namesakes, label: str) -> str:
    """Return the new label of the baseline's curve that has this run's values; the old label without such a curve."""
    run_values = _values(view.path.parent)
    if not run_values:
        return label
    # Another version may have written the baseline's runs. If no curve has all values, compare only keys that all have.
    shared = [key for key in base.keys if all(key in values for values in (run_values, *base.values.values()))]
    for keys in (base.keys, shared):
        matching = [
            curve
            for curve, values in base.values.items()
            if all(run_values.get(key, _NO_KEY) == values.get(key, _NO_KEY) for key in keys)
        ]
        if len(matching) == 1:
            return base.labels[matching[0]]
    return label


def _values(run_dir: Path) -> dict[str, Any]:
    """Return the values of a run's stored configuration that affect learning, by dotted key; empty on errors."""
    try:
        return flatten_config(learning_config(parse_json((run_dir / SPEC_FILE).read_text())["config"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
