"""Disambiguation of runs with one label but different curves, by what differs in their configurations.

A label is made from a command, so two grids under one study's name (the second with another learning rate) may have
written the same one. What a run is, its header says: the identity of its curve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.run.files import parse_json
from sweeps.run.journal import JournalView
from sweeps.run.spec import SPEC_FILE, leaves, science
from sweeps.source.collected import LoadedStudy
from sweeps.source.text import short

_SHOWN = 3  # keys in a label
# Headers of scripts that name no identity have these.
_UNKNOWN = frozenset({"", "local", "None"})
_NO_KEY = object()

# A recipe's label, and the factors that a curve is one value of each.
_Label = tuple[str, tuple[tuple[str, str], ...]]


@dataclass
class _Apart:
    """The curves behind one label: their new labels by identity, and the keys in which they differ."""

    labels: dict[str, str]
    keys: list[str]
    values: dict[str, Mapping[str, Any]]


def tell_apart(runs: Sequence[tuple[JournalView, Mapping[str, str]]], study: LoadedStudy) -> None:
    """Give runs of one label that are different curves labels of their own, in their headers, with a warning.

    Args:
        runs: with the factors that their curves are grouped by; these tell some of them apart already.
        study: where the warning goes.
    """
    curves: dict[_Label, dict[str, list[JournalView]]] = {}
    for view, factors in runs:
        curve = str(view.header.get("curve", ""))
        if curve not in _UNKNOWN:
            curves.setdefault(_label(view, factors), {}).setdefault(curve, []).append(view)
    apart = {label: _named(label[0], views) for label, views in curves.items() if len(views) > 1}
    if not apart:
        return
    for view, factors in runs:
        given = {}
        if (own := apart.get(_label(view, factors))) is not None:
            given["recipe"] = own.labels.get(str(view.header.get("curve", "")), str(view.header.get("recipe")))
        base = str(view.header.get("baseline"))
        if (theirs := apart.get((base, tuple(factors.items())))) is not None:
            itself = base == view.header.get("recipe")
            given["baseline"] = given.get("recipe", base) if itself else _like(view, theirs, base)
        view.header = {**view.header, **given}
    for (recipe, grouped), found in apart.items():
        where = "".join(f" {name}={value}" for name, value in grouped)
        study.warnings.append(
            f"{len(found.labels)} different configurations share the label {recipe!r}{where}; each is a curve of its "
            f"own: {short(', '.join(found.labels.values()), 400)}"
        )


def _label(view: JournalView, factors: Mapping[str, str]) -> _Label:
    return str(view.header.get("recipe", view.path.parent.name)), tuple(factors.items())


def _named(recipe: str, curves: Mapping[str, Sequence[JournalView]]) -> _Apart:
    """Make labels from the differing values, or from the curve's identity where these are unknown or too long."""
    values: dict[str, Mapping[str, Any]] = {curve: _values(views[0].path.parent) for curve, views in curves.items()}
    every = dict.fromkeys(key for each in values.values() for key in each)
    keys = [key for key in every if len({repr(each.get(key, _NO_KEY)) for each in values.values()}) > 1]
    keys.sort(key=lambda key: any(key not in each for each in values.values()))  # of another version's, perhaps
    said = {
        curve: ", ".join(f"{key}={each.get(key, 'none')}" for key in keys[:_SHOWN]) for curve, each in values.items()
    }
    if (
        not all(values.values())
        or len(set(said.values())) < len(said)
        or any(len(text) > 100 for text in said.values())
    ):
        length = next(n for n in range(6, 65) if len({curve[:n] for curve in curves}) == len(curves))
        said = {curve: f"curve {curve[:length]}" for curve in curves}
    return _Apart({curve: f"{recipe} ({text})" for curve, text in said.items()}, keys, values)


def _like(view: JournalView, base: _Apart, label: str) -> str:
    """Return the new label of the baseline's curve that has this run's values; the old label if none has."""
    own = _values(view.path.parent)
    for curve, theirs in base.values.items():
        if own and all(own.get(key, _NO_KEY) == theirs.get(key, _NO_KEY) for key in base.keys):
            return base.labels[curve]
    return label


def _values(run_dir: Path) -> dict[str, Any]:
    """Return the values of a run's frozen configuration that decide what it learns, by dotted key; empty on errors."""
    try:
        return leaves(science(parse_json((run_dir / SPEC_FILE).read_text())["config"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
