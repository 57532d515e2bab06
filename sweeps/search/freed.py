"""Compute that a race frees by stopping runs, and the further runs that it pays for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sweeps.curve import Curve
from sweeps.decide.next_run import choice_of, split_budget
from sweeps.errors import UserError
from sweeps.fit.fit import fit_curves
from sweeps.launch.ledger import MemberState
from sweeps.launch.planning import PlannerLostError
from sweeps.launch.study import Study
from sweeps.run.spec import RunSpec
from sweeps.search.journals import Journals
from sweeps.search.race_log import RaceRecord

Planner = Callable[[Sequence[Sequence[str]]], list[RunSpec]]


class FreedCompute:
    """Account of what a race frees, by the looks that stopped runs, and buyer of the runs that it pays for.

    Args:
        study: study whose members race.
        journals: what the members have written so far.
        planned: makes members' specifications from lists of overrides; None where nothing is to be bought.

    Attributes:
        refused: lines on runs that could not be planned, not printed yet.
    """

    def __init__(self, study: Study, journals: Journals, planned: Planner | None) -> None:
        self._study, self._journals, self._planned = study, journals, planned
        self._specs: dict[str, RunSpec] = {}
        self.refused: list[str] = []

    def spec(self, run: str) -> RunSpec:
        """Return the specification of a member by its run."""
        if len(self._specs) != len(self._study.specs):
            self._specs = {spec.run: spec for spec in self._study.specs}
        return self._specs[run]

    def spared(
        self, record: RaceRecord, states: Mapping[str, MemberState], reached: Mapping[str, float], live: bool
    ) -> dict[str, float]:
        """Return the compute saved, or in a dry run to be saved, on each member of a stopped recipe, by run."""
        assert record.rules is not None
        started: dict[str, float] = {}
        for entry in self._study.ledger.entries() if live and record.stopped else []:
            if entry["event"] == "started":
                started[entry["run"]] = float(entry.get("time", 0.0))
        when = {name: taken for look, taken in zip(record.looks, record.taken, strict=True) for name in look.stopped}
        found = {}
        for run in (run for run in states if states[run].recipe in record.stopped):
            name = states[run].recipe
            spent = record.stopped[name].compute
            if live:
                at, mode = when[name]
                if states[run].state == "finished":
                    spent = record.rules.budget
                elif mode != "live" or started.get(run, at) > at:
                    # A dry run stopped nothing, and a launch without a race has let it go on.
                    spent = max(spent, reached.get(run, 0.0))
                # Else as the look has it: how far it came before it was really stopped is a matter of time.
            found[run] = max(0.0, record.rules.budget - spent)
        return found

    def plan(
        self,
        freed: float,
        axis: str,
        curves: Sequence[Curve],
        finished: Mapping[str, MemberState],
        reached: Mapping[str, float],
    ) -> dict[str, Any]:
        """Split freed compute over the remaining recipes, as `scalerl plan --budget` does; return its record.

        Args:
            freed: the compute.
            axis: its name in evaluations.
            curves: the remaining recipes'.
            finished: states of the racing members that have finished.
            reached: compute of each member's last evaluation.
        """
        line: dict[str, Any] = {"kind": "freed", "compute": freed, "steps": [], "sentence": "nothing was freed"}
        if not curves or freed <= 0:
            return line
        split = split_budget(choice_of(fit_curves(curves)), freed)
        steps = []
        for step in split.steps:
            mine = [run for run, state in finished.items() if state.recipe == step.recipe]
            members = (
                [self._seed(mine[0])] if step.action == "seed" else self._longer(mine, step.compute, axis, reached)
            )
            steps.append({"recipe": step.recipe, "action": step.action, "compute": step.compute, "members": members})
        if split.winner is not None and split.commit is not None:
            mine = [run for run, state in finished.items() if state.recipe == split.winner]
            run = max(mine, key=lambda run: (reached.get(run, 0.0), run))
            to = split.commit[1]
            members = self._longer([run], to, axis, reached)
            steps.append({"recipe": split.winner, "action": "commit", "compute": to, "members": members})
        return {**line, "steps": steps, "sentence": split.sentence}

    def bought(self, freed: Mapping[str, Any]) -> list[RunSpec]:
        """Make the specs of the runs that freed compute pays for, with their new budgets."""
        mine = {spec.run for spec in self._study.specs}
        planned = [
            spec
            for step in freed["steps"]
            for run, override in step["members"]
            if run in mine
            for spec in self._planned_as(self.spec(run), override)
        ]
        # One that is made longer and committed to besides has one budget, the larger.
        self._specs = {}
        return list({spec.run: spec for spec in sorted(planned, key=lambda spec: spec.steps)}.values())

    def _seed(self, run: str) -> tuple[str, str]:
        """Return a run to copy for one more seed of its recipe, and the overrides that differ."""
        spec = self.spec(run)
        seeds = [each.seed for each in self._study.specs if each.recipe == spec.recipe]
        # The budget is written down: the run that it is like may be made longer.
        return run, f"seed={max(seeds) + 1} budget.steps={spec.steps}"

    def _longer(
        self, runs: Sequence[str], compute: float, axis: str, reached: Mapping[str, float]
    ) -> list[tuple[str, str]]:
        """Extend runs to a compute at their pace so far; return those that become longer, with the new budget."""
        found = []
        for run in [run for run in runs if reached.get(run, 0.0) > 0]:
            last = self._journals.evaluations(run)[-1]
            steps = math.ceil(last.step * compute / last.metrics[axis])
            found += [(run, f"budget.steps={steps}")] if steps > self.spec(run).steps else []
        return found

    def _planned_as(self, base: RunSpec, override: str) -> list[RunSpec]:
        """Plan a member like another, with a few overrides changed, under the same label; empty if it cannot be."""
        if self._planned is None or not base.overrides:
            return []
        changed = override.split()
        keys = {"output_dir", *(each.partition("=")[0] for each in changed)}
        kept = [each for each in base.overrides if each.lstrip("+~").split("=")[0] not in keys]
        try:
            (spec,) = self._planned([[*kept, *changed, f"output_dir={self._study.directory}"]])
        except PlannerLostError:
            raise
        except UserError as error:
            self.refused.append(f"race: what was freed is not spent on {base.title} ({override}): {error}")
            return []
        # A run whose choices depend on its budget (a cosine, a curriculum) would be another one with a larger.
        if spec.curve != base.curve or ("seed" not in keys and spec.run != base.run):
            return []
        return [replace(spec, recipe=base.recipe, settings=base.settings, overrides=(*kept, *changed))]
