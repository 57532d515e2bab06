"""Read the growing journals of a study's members incrementally."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sweeps.curve import Curve
from sweeps.launch.ledger import MemberState
from sweeps.run.journal import JOURNAL_FILE, JournalError, JournalView, Record
from sweeps.run.tail import JournalTail
from sweeps.source import load


def compute_reached(runs: Iterable[tuple[str, str, float]]) -> tuple[dict[str, float], set[str]]:
    """Compute how far each recipe has come, for `sweeps.decide.race.next_look`.

    Args:
        runs: recipe, state (`finished`, `failed` or another) and compute of the last evaluation of each run.

    Returns:
        First, for each recipe, the smallest compute over its runs. Failed runs are left out, and finished runs count as
        infinite. If all runs of a recipe have failed, it is their largest compute. Second, the recipes whose runs have
        all failed.
    """
    by_recipe: dict[str, list[tuple[str, float]]] = {}
    for recipe, state, compute in runs:
        # No look waits for a run that has finished, so its compute is infinite.
        by_recipe.setdefault(recipe, []).append((state, math.inf if state == "finished" else compute))
    valid = {recipe: [reached for state, reached in ends if state != "failed"] for recipe, ends in by_recipe.items()}
    failed = {recipe for recipe, computes in valid.items() if not computes}
    return {
        recipe: min(valid[recipe] or [max(reached for _, reached in ends)]) for recipe, ends in by_recipe.items()
    }, failed


class Journals:
    """Content of the members' journals so far. Each update reads only new data.

    Args:
        runs_dir: folder with one folder per member, named by the member's identity.
    """

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._tails: dict[str, JournalTail] = {}
        self._views: dict[str, JournalView] = {}
        self._sizes: dict[str, int] = {}
        self._at_work: set[str] = set()
        self._states: dict[str, MemberState] = {}

    def watch(self, states: Mapping[str, MemberState], at_work: Collection[str]) -> bool:
        """Read the journals of members that run, ran at the last call, or have changed their state since.

        Returns:
            Whether any member has new evaluations.
        """
        runs = [
            run
            for run, state in states.items()
            if run in at_work or run in self._at_work or run not in self._views or state != self._states.get(run)
        ]
        self._at_work, self._states = set(at_work), dict(states)
        return self.update(runs)

    def update(self, runs: Sequence[str]) -> bool:
        """Read new records of these members. Return whether any member has new evaluations."""
        has_new = False
        for run in runs:
            run_dir = self._runs_dir / run
            try:
                size = (run_dir / JOURNAL_FILE).stat().st_size
            except OSError:
                continue
            if self._sizes.get(run) == size:
                continue
            self._sizes[run] = size
            try:
                view = self._tails.setdefault(run, JournalTail(run_dir)).update()
            except JournalError:
                continue  # the study's controller reports the damaged journal
            earlier, self._views[run] = self.evaluations(run), view
            has_new = has_new or len(earlier) != len(self.evaluations(run))
        return has_new

    def evaluations(self, run: str) -> list[Record]:
        """Return a member's evaluations sorted by step; empty before the first."""
        return self._views[run].of_kind("eval") if run in self._views else []

    def compute(self, run: str, axis: str) -> float:
        """Return the compute of a member's last evaluation; 0 before the first."""
        evaluated = self.evaluations(run)
        return float(evaluated[-1].metrics.get(axis, 0.0)) if evaluated else 0.0

    def view(self, run: str) -> JournalView | None:
        """Return a member's journal as last read; None without a journal."""
        return self._views.get(run)

    def curves(self, runs: Sequence[str], metric: str | None = None, axis: str | None = None) -> list[Curve]:
        """Make a curve per recipe from those of the members that have evaluations, in the order of `runs`."""
        # `load` changes headers, to make recipes with the same name distinct: give it copies.
        known = {
            (self._runs_dir / run).resolve(): replace(self._views[run], header=dict(self._views[run].header))
            for run in runs
            if self.evaluations(run)
        }
        return load(list(known), metric, axis, read=lambda run_dir: known[run_dir.resolve()]).curves if known else []
