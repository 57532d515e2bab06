"""Comparison of runs that branch from each other, from the step at which they diverge.

A branch is a run that starts from another run's checkpoint; its journal begins with the records of this parent run.
These records are one observation, not one per branch, and contain no information about what the branch changes. So if a
source has branches, every run counts from the step at which it diverges from the others: the last shared evaluation
counts as the evaluation at compute 0 of every run.
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
class _BranchRun:
    """A run, with the last step that it shares with each of its ancestors. Its own entry is infinity."""

    view: JournalView
    shared_steps: Mapping[str, float]

    def divergence(self, other: _BranchRun) -> float | None:
        """Return the last step that two runs share; None if they are not related, infinity if they are the same run."""
        shared = [
            min(step, other.shared_steps[run]) for run, step in self.shared_steps.items() if run in other.shared_steps
        ]
        return max(shared, default=None)


def views_from_divergence(views: Sequence[JournalView]) -> tuple[list[JournalView], list[str]]:
    """Remove from runs the part before they diverge.

    Return the runs, unchanged if none is a branch, and notes for the user.

    A branch that changes nothing has the same curve as its parent: of such runs only the longest is kept.

    Args:
        views: journals with evaluations.

    Raises:
        UserError: some runs are branches and others are not related to them, or two runs diverge before their first
            evaluation.
    """
    branch_runs = [_BranchRun(view, _shared_steps(view)) for view in views]
    if all(len(run.shared_steps) == 1 for run in branch_runs):
        return list(views), []
    families = _families(branch_runs)
    unrelated = [run.view for family in families if len(family) == 1 for run in family if len(run.shared_steps) == 1]
    if unrelated:
        raise UserError(
            f"{short(', '.join(str(view.path.parent) for view in unrelated), 300)}: not related to the other runs, "
            "which branch from each other and are compared from there; give only runs of one line, or only whole runs"
        )
    result, notes = [], []
    for family in families:
        kept_runs, copies = _drop_copies(family)
        result += [_cut_to_start(run.view, step) for run, step in _start_steps(kept_runs)]
        notes += [f"{view.path.parent}: left out, because another run has the same curve" for view in copies]
    steps = sorted({int(view.header[START]["step"]) for view in result})
    runs = counted(len(result), "run")
    intro = f"{runs} in branches, compared from where they diverge (step {', '.join(map(str, steps))}): "
    notes.insert(0, f"{intro}compute is counted from there, and evaluations that they share count once")
    return result, notes


def _shared_steps(view: JournalView) -> dict[str, float]:
    branch = view.header.get("branch")
    ancestors: Mapping[str, Any] = (branch.get("ancestors") or {}) if isinstance(branch, Mapping) else {}
    name = str(view.header.get("run"))
    # Runs of scripts all have the name "local", and are never branches: identify them by path.
    return {
        name if name != "local" else str(view.path): math.inf,
        **{run: float(step) for run, step in ancestors.items()},
    }


def _families(runs: Sequence[_BranchRun]) -> list[list[_BranchRun]]:
    families: list[list[_BranchRun]] = []
    for run in runs:
        related = [family for family in families if any(run.divergence(member) is not None for member in family)]
        families = [family for family in families if not any(family is member for member in related)]
        families.append([*(member for family in related for member in family), run])
    return families


def _drop_copies(family: Sequence[_BranchRun]) -> tuple[list[_BranchRun], list[JournalView]]:
    """Keep the longest of the runs that have the same curve. Return kept and dropped runs."""
    by_run = {str(run.view.header.get("run")): run for run in family}
    by_curve: dict[str, list[_BranchRun]] = {}
    for run in family:
        by_curve.setdefault(_curve_owner(run, by_run), []).append(run)
    kept_runs, dropped_views = [], []
    for copies in by_curve.values():
        longest = max(copies, key=lambda run: max(record.step for record in run.view.records))
        kept_runs.append(longest)
        dropped_views += [run.view for run in copies if run is not longest]
    return kept_runs, dropped_views


def _curve_owner(run: _BranchRun, by_run: Mapping[str, _BranchRun]) -> str:
    """Return the name of the run whose curve this run has: a parent's for a branch without changes, else its own."""
    header = run.view.header
    branch = header.get("branch")
    changes = header.get("departures") or header.get("settings")
    if not isinstance(branch, Mapping) or changes or branch.get("optimizer") != "kept":
        return str(header.get("run"))
    parent = str(branch.get("run"))
    return _curve_owner(by_run[parent], by_run) if parent in by_run else parent


def _start_steps(family: Sequence[_BranchRun]) -> list[tuple[_BranchRun, float]]:
    """Return each run of a family with the step from which it counts: the first at which any two runs of it diverge."""
    steps = [step for one, two in combinations(family, 2) if (step := one.divergence(two)) is not None]
    # A branch without relatives counts from its start.
    first = min(steps, default=min(step for run in family for step in run.shared_steps.values()))
    return [(run, first) for run in family]


def _cut_to_start(view: JournalView, step: float) -> JournalView:
    """Cut a run so that it begins at its last evaluation up to `step`, from which compute is counted."""
    shared = [record for record in view.of_kind("eval") if record.step <= step]
    if not shared:
        raise UserError(
            f"{view.path.parent}: no evaluation up to step {step:g}, where it parts from another run; give whole runs"
        )
    start = shared[-1]
    origin = {name: value for name, value in start.metrics.items() if name.startswith("compute/")}
    records = [
        _subtract_origin(record, origin) for record in view.records if record.step > start.step or record is start
    ]
    header = {**view.header, START: {"step": start.step, **origin}}
    if view.header.get("branch") is None:  # the parent itself counts as the branch that changes nothing
        header["recipe"] = f"{view.header.get('recipe')}@{step:g}"
        header["baseline"] = header["recipe"]
    return replace(view, header=header, records=records)


def _subtract_origin(record: Record, origin: Mapping[str, float]) -> Record:
    """Return a record with its compute counted from `origin`, the compute at the start by metric name."""
    metrics = {name: value - origin.get(name, 0.0) for name, value in record.metrics.items()}
    return replace(record, metrics=metrics)
