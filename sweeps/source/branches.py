"""Runs that branch from each other, compared from the step at which they diverge.

A branch's journal begins with the records of its parent. These are one observation, not several, and they contain no
information about the change. So if a source has branches, every run counts from the step at which it diverges from the
others. The last shared evaluation is the reward at compute 0 of all of them, and compute is counted from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from sweeps.errors import UserError
from sweeps.run.journal import JournalView, Record
from sweeps.source.text import short
from sweeps.terminal import counted

# Field in the headers of the returned views: the last shared evaluation, from which compute is counted.
START = "starts_at"


@dataclass(frozen=True)
class _Line:
    """A run with the last step that it shares with each ancestor (`shared_steps`); infinity for the run itself."""

    view: JournalView
    shared_steps: Mapping[str, float]

    def divergence(self, other: _Line) -> float | None:
        """Return the last step that two runs share; None if they are not related, infinity for one run twice."""
        shared = [
            min(step, other.shared_steps[run]) for run, step in self.shared_steps.items() if run in other.shared_steps
        ]
        return max(shared, default=None)


def views_from_divergence(views: Sequence[JournalView]) -> tuple[list[JournalView], list[str]]:
    """Return the runs from the step at which they diverge, with lines for the user; unchanged if none is a branch.

    A branch that changes nothing has the same curve as its parent: of such runs the longest is kept.

    Args:
        views: journals with evaluations.

    Raises:
        UserError: some runs are branches and others are not related to them, or two runs diverge before their first
            evaluation.
    """
    lines = [_Line(view, _shared_steps(view)) for view in views]
    if all(len(line.shared_steps) == 1 for line in lines):
        return list(views), []
    families = _families(lines)
    alone = [line.view for family in families if len(family) == 1 for line in family if len(line.shared_steps) == 1]
    if alone:
        raise UserError(
            f"{short(', '.join(str(view.path.parent) for view in alone), 300)}: not related to the other runs, which "
            "branch from each other and are compared from there; give only runs of one line, or only whole runs"
        )
    result, notes = [], []
    for family in families:
        kept, dropped = _without_copies(family)
        result += [_rebased(line.view, step) for line, step in _with_start(kept)]
        notes += [f"{view.path.parent}: its parent's own curve, left out beside it" for view in dropped]
    steps = sorted({int(view.header[START]["step"]) for view in result})
    runs = counted(len(result), "run")
    intro = f"{runs} of branches, from where they part (step {', '.join(map(str, steps))}): "
    notes.insert(0, f"{intro}compute is counted from there, and what they share counts once, as their common start")
    return result, notes


def _shared_steps(view: JournalView) -> dict[str, float]:
    branch = view.header.get("branch")
    above: Mapping[str, Any] = (branch.get("ancestors") or {}) if isinstance(branch, Mapping) else {}
    own = str(view.header.get("run"))
    # A script's runs share a name, but none of them is a branch.
    return {own if own != "local" else str(view.path): math.inf, **{run: float(step) for run, step in above.items()}}


def _families(lines: Sequence[_Line]) -> list[list[_Line]]:
    """Group related runs, in order."""
    families: list[list[_Line]] = []
    for line in lines:
        related = [family for family in families if any(line.divergence(each) is not None for each in family)]
        families = [family for family in families if not any(family is each for each in related)]
        families.append([*(each for family in related for each in family), line])
    return families


def _without_copies(family: Sequence[_Line]) -> tuple[list[_Line], list[JournalView]]:
    """Of the runs that have the same curve (branches that change nothing), keep the longest; also return the others."""
    by_run = {str(line.view.header.get("run")): line for line in family}
    same: dict[str, list[_Line]] = {}
    for line in family:
        same.setdefault(_source(line, by_run), []).append(line)
    kept, dropped = [], []
    for copies in same.values():
        longest = max(copies, key=lambda line: max(record.step for record in line.view.records))
        kept.append(longest)
        dropped += [line.view for line in copies if line is not longest]
    return kept, dropped


def _source(line: _Line, by_run: Mapping[str, _Line]) -> str:
    """Return the run whose curve a branch without changes repeats; for any other run, its own name."""
    header = line.view.header
    branch = header.get("branch")
    changes = header.get("departures") or header.get("settings")
    if not isinstance(branch, Mapping) or changes or branch.get("optimizer") != "kept":
        return str(header.get("run"))
    parent = str(branch.get("run"))
    return _source(by_run[parent], by_run) if parent in by_run else parent


def _with_start(family: Sequence[_Line]) -> list[tuple[_Line, float]]:
    """Return each run of a family with the step from which it counts: the first at which any two of them diverge."""
    steps = [step for one, two in combinations(family, 2) if (step := one.divergence(two)) is not None]
    # Alone, a branch counts from its own start.
    first = min(steps, default=min(step for line in family for step in line.shared_steps.values()))
    return [(line, first) for line in family]


def _rebased(view: JournalView, step: float) -> JournalView:
    """Return a run from the last evaluation up to `step`: earlier records are dropped, and compute counts from it."""
    shared = [record for record in view.of_kind("eval") if record.step <= step]
    if not shared:
        raise UserError(
            f"{view.path.parent}: no evaluation up to step {step:g}, where it parts from another run; give whole runs"
        )
    start = shared[-1]
    origin = {name: value for name, value in start.metrics.items() if name.startswith("compute/")}
    records = [_later(record, origin) for record in view.records if record.step > start.step or record is start]
    header = {**view.header, START: {"step": start.step, **origin}}
    if view.header.get("branch") is None:  # the parent is the branch that changes nothing
        header["recipe"] = f"{view.header.get('recipe')}@{step:g}"
        header["baseline"] = header["recipe"]
    return replace(view, header=header, records=records)


def _later(record: Record, origin: Mapping[str, float]) -> Record:
    metrics = {name: value - origin.get(name, 0.0) for name, value in record.metrics.items()}
    return replace(record, metrics=metrics)
