"""Decider of a live race: take looks while the study runs, and stop runs of recipes that will probably not be best.

A look compares the recipes at one amount of compute (`sweeps.decide.race`). Its decisions depend only on the
evaluations up to that compute, not on the process or the time. Each look is written to `race.jsonl` before anything is
stopped because of it. A later process continues from there.

    race.jsonl   {"kind": "members", "runs": [...]}: the racing members in order, for a process that continues the race;
                 {"kind": "race", "rules", "axis", "metric", ...}; and one {"kind": "look", ...} per look. Earlier
                 versions also wrote {"kind": "freed", ...}, which is ignored.

Launches that share a folder may have several races: the lines after a line "members" belong to the race of those
members. Every line ends with its checksum (`sweeps.run.files`); lines of earlier versions have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sweeps.curve import Curve
from sweeps.decide.race import Look, describe_result, next_look
from sweeps.errors import UserError
from sweeps.launch.decider import Wish
from sweeps.launch.ledger import RUNS_DIR, MemberState
from sweeps.launch.study import Study
from sweeps.run.files import append_lines
from sweeps.run.spec import RunSpec
from sweeps.search.journals import Journals, compute_reached
from sweeps.search.race_log import RACE_FILE, RaceRecord
from sweeps.search.settings import RaceSettings
from sweeps.terminal import counted

# A run's compute per step is estimated after this fraction of its steps.
_KNOWN_AFTER = 0.1
# For a member queued on a cluster, a race waits this many seconds, and then gives its slot to others.
_QUEUED_S = 120.0
# Tolerance on compute, as a factor, because rounding may make the sum over steps slightly too small.
_TOLERANCE = 1 - 1e-9


class LiveRace:
    """Decider that runs a study as a race (`sweeps.launch.decider.Decider`).

    Args:
        study: study whose members race.
        settings: settings of the race.
        clock: monotonic seconds, replaceable in tests.

    Raises:
        UserError: the study's race was begun with other rules.
    """

    files: tuple[str, ...] = (RACE_FILE,)

    def __init__(
        self,
        study: Study,
        settings: RaceSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._study, self._settings, self._clock = study, settings, clock
        # A new launch races all its members. A process that continues a study races the members of its newest race.
        newest = RaceRecord.read(study.directory).members
        here = [spec.run for spec in study.specs]
        self._members = [run for run in newest if run in here] if study.was_read and newest is not None else here
        self._record = RaceRecord.read(study.directory, self._members)
        self._recorded_members = newest == tuple(self._members)
        self._pending_warnings = [] if self._record.trouble is None else [f"race: {self._record.trouble}"]
        self._check_rules()
        self._live = settings.mode == "live"
        self._journals = Journals(study.directory / RUNS_DIR)
        self._specs = {spec.run: spec for spec in study.specs}
        self._reached: dict[str, float] = {}
        self._last_error = ""
        self._queued_since: dict[str, float] = {}
        self._no_more_looks = False
        self._last_inputs: object = None
        self._has_run = False  # a member has run since this process started
        self._last_result: list[str] = []  # lines on the result that were printed last
        self._wish = Wish()

    def _check_rules(self) -> None:
        """Raise UserError if a race that has begun in this folder has other rules."""
        begun = self._record.rules
        if begun is None:
            return
        wanted = self._settings.rules(self._settings.budget or begun.budget).resumed_from(begun)
        for name in ("budget", "p_ahead", "looks", "first", "growth", "loss"):
            if getattr(wanted, name) != getattr(begun, name):
                raise UserError(
                    f"race.{name}: {getattr(wanted, name):g}, and the race in {self._study.directory} was begun with "
                    f"{getattr(begun, name):g}; go on with that, or move {RACE_FILE} away to race anew"
                )

    # --- members to run ------------------------------------------------------------------------------------------

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str], queued: Collection[str]) -> Wish:
        """Run the members with the least compute first, and pause members that are ahead of others.

        See `Decider.wish`.
        """
        all_states = states
        now, states = self._clock(), self._racing_states(states)
        if not self._recorded_members:
            self._write({"kind": "members", "runs": self._members})
            self._recorded_members = True
        self._queued_since = {run: self._queued_since.get(run, now) for run in states if run in queued}
        # Members whose jobs will begin soon: the others wait for them. A member that an earlier process left unfinished
        # has no job yet, so it is not among these.
        due = {run for run, since in self._queued_since.items() if now - since < _QUEUED_S}
        ended = {run for run, state in states.items() if state.state in ("finished", "failed")}
        has_new = self._journals.watch(states, at_work)
        inputs = (frozenset(ended), frozenset(at_work), frozenset(due), tuple(all_states))
        if not has_new and inputs == self._last_inputs:
            return replace(self._wish, messages=())
        self._last_inputs = inputs
        messages, self._pending_warnings = [*self._pending_warnings, *self._look(states, ended)], []
        to_run, to_pause, to_end = self._sort_members(states, ended, {*at_work, *due})
        messages += self._result_lines(states, to_end, at_work)
        others = {
            spec.run: all_states[spec.run]
            for spec in self._study.specs
            if spec.run in all_states.keys() - states.keys()
        }
        to_run += [run for run, state in others.items() if state.state not in ("finished", "stopped")]
        to_end |= {run: state.reason or "stopped" for run, state in others.items() if state.state == "stopped"}
        self._wish = Wish(to_run, to_pause, to_end, messages=tuple(messages))
        return self._wish

    def _racing_states(self, states: Mapping[str, MemberState]) -> dict[str, MemberState]:
        """Select the states of racing members, because other members may share the folder."""
        return {run: states[run] for run in self._members if run in states}

    def _sort_members(
        self,
        states: Mapping[str, MemberState],
        ended: Collection[str],
        running_or_due: Collection[str],
    ) -> tuple[list[str], dict[str, str], dict[str, str]]:
        """Return the members to run, the most urgent first, and the members to pause and to stop with their reasons.

        Args:
            states: states of the members that race.
            ended: members that have finished or failed.
            placed: members that run or will run soon.
        """
        order = {run: at for at, run in enumerate(states)}
        # Failed members are run too, in case a new launch retries them, but the others do not wait for them.
        open_runs = [run for run in states if states[run].state != "finished"]
        open_runs.sort(key=lambda run: (self._reached.get(run, 0.0), order[run]))
        if not self._live:
            return open_runs, {}, {}
        stopped, rules = self._record.stopped, self._record.rules
        to_end = {
            run: stopped[states[run].recipe].why(states[run].recipe, rules)
            for run in open_runs
            if rules is not None and states[run].recipe in stopped
        }
        racing = [run for run in open_runs if run not in {*to_end, *ended}]
        to_pause: dict[str, str] = {}
        if not self._no_more_looks and len({states[run].recipe for run in racing}) > 1:
            limit = self._common_limit(racing)
            behind = [run for run in racing if self._is_behind(run, limit)]
            idle = [run for run in behind if run not in running_or_due]
            if idle:
                others = counted(len(idle), "other member")
                why = (
                    f"paused: its compute per step is known; it waits for {others} to show theirs"
                    if limit is None
                    else f"paused: it is at compute {limit:.4g} and waits for {others} to get there"
                )
                to_pause = {
                    run: _first_reason(self._wish.to_pause.get(run), why) for run in racing if run not in behind
                }
        return [run for run in open_runs if run not in to_end and run not in to_pause], to_pause, to_end

    def _common_limit(self, racing: Sequence[str]) -> float | None:
        """Return the compute that all members must reach before any of them continues beyond it.

        None while the budget is unknown.
        """
        if self._record.rules is None:
            return None
        limit = self._record.rules.first * self._record.rules.budget
        while all(not self._is_behind(run, limit) for run in racing):
            limit *= self._settings.ahead
        return limit

    def _is_behind(self, run: str, limit: float | None) -> bool:
        """Return whether a run is below the limit or, without a limit, whether its compute per step is unknown."""
        if limit is None:
            return self._cost(run) is None
        return self._reached.get(run, 0.0) < limit * _TOLERANCE

    # --- curves and costs ----------------------------------------------------------------------------------------

    def _curves(self) -> list[Curve]:
        """Make the curves so far, in the study's order, on which floating-point sums depend."""
        return self._journals.curves(self._members, self._record.metric, self._record.axis)

    def _cost(self, run: str) -> float | None:
        """Estimate a run's total compute from an evaluation after a tenth of its steps; None before that.

        The estimate extrapolates from the first evaluation after the start instead of from 0, because the first steps
        cost more: a pipeline has to be filled.
        """
        axis, steps = self._record.axis, self._specs[run].steps
        evaluations = [record for record in self._journals.evaluations(run) if record.step > 0]
        if axis is None or not evaluations:
            return None
        first, spent = evaluations[0].step, evaluations[0].metrics[axis]
        for record in evaluations[1:]:
            if record.step >= _KNOWN_AFTER * steps:
                return spent + (record.metrics[axis] - spent) * (steps - first) / (record.step - first)
        # A single evaluation suffices if it is in the second half of the run.
        return spent * steps / first if first >= steps / 2 else None

    # --- looks ---------------------------------------------------------------------------------------------------

    def _look(self, states: Mapping[str, MemberState], ended: Collection[str]) -> list[str]:
        """Take the looks that are due. Return lines to print."""
        try:
            curves = self._curves()
        # An evaluation lacks the metric or the axis: no look is taken, but the study continues.
        except UserError as error:
            messages, self._last_error = (
                [] if str(error) == self._last_error else [f"race: no look: {error}"],
                str(error),
            )
            return messages
        if not curves:
            return []
        axis = curves[0].axis
        if self._record.axis is None:
            self._record = replace(self._record, axis=axis, metric=curves[0].metric)
        self._reached = {run: self._journals.compute(run, axis) for run in states}
        messages = [] if self._record.rules is not None else self._record_rules(states, ended, curves)
        rules = self._record.rules
        if rules is None:
            return messages
        reached, failed = compute_reached(
            (state.recipe, state.state, self._reached.get(run, 0.0)) for run, state in states.items()
        )
        while isinstance(found := next_look(curves, rules, reached, self._record.looks, failed=failed), Look):
            self._write({"kind": "look", "mode": self._settings.mode, "look": found.to_json()})
            self._record = replace(self._record, looks=(*self._record.looks, found))
            if not self._live:
                messages += [f"would be {found.why(name, rules)} ({name})" for name in found.stopped]
        self._no_more_looks = found == ()
        return [f"race: {line}" for line in messages]

    def _record_rules(
        self, states: Mapping[str, MemberState], ended: Collection[str], curves: Sequence[Curve]
    ) -> list[str]:
        """Set and record the race's budget and rules, if the budget is known by now. Return lines to print."""
        budget, source = self._settings.budget, "given"
        if budget is None:
            known = {run: self._cost(run) for run in states}
            if any(cost is None and run not in ended for run, cost in known.items()):
                return []
            costs = [cost for cost in known.values() if cost is not None]
            if not costs:
                return []
            budget, source = min(costs), "the smallest compute that a member spends on its steps"
        rules = self._settings.rules(budget)
        first = curves[0]
        self._write(
            {
                "kind": "race",
                "rules": rules.to_json(),
                "axis": first.axis,
                "metric": first.metric,
                "mode": self._settings.mode,
                "budget_is": source,
            }
        )
        self._record = replace(self._record, rules=rules, axis=first.axis, metric=first.metric)
        return [f"to {budget:.4g} {first.unit} per run ({source}); the first look is at {rules.first * budget:.4g}"]

    def _write(self, line: Mapping[str, Any]) -> None:
        """Append a line to the race record, with the time of the ledger's clock in seconds."""
        line = {"time": self._study.ledger.now(), **line}
        append_lines(self._study.directory / RACE_FILE, [line], durable=True, checksum=True)

    def _result_lines(
        self, states: Mapping[str, MemberState], over: Collection[str], at_work: Collection[str]
    ) -> list[str]:
        """Return lines on the result (ranking, winner, compute saved) when no member races any more, else none."""
        self._has_run = self._has_run or bool(at_work)
        racing = [run for run in self._members if run in states and run not in over and states[run].state != "finished"]
        given_up = self._has_run and all(states[run].state == "failed" for run in racing)
        rules = self._record.rules
        if rules is None or at_work or (racing and not given_up):
            return []
        try:
            curves = self._curves()
        except UserError:  # `_look` has printed the error.
            return []
        spared = self._saved_compute(states)
        full = rules.budget * sum(run in states for run in self._members)
        stopped = self._record.stopped if self._live else {}
        messages = describe_result([each for each in curves if each.recipe not in stopped], rules, stopped)
        verb = "saved" if self._live else "a live race would have saved"
        share = f"({spared / full:.0%})"
        messages.append(f"{verb} {spared:.4g} of the {full:.4g} compute of running all recipes to the budget {share}")
        messages = [f"race: {line}" for line in messages]
        before, self._last_result = self._last_result, messages
        return messages if messages != before else []

    def members(self, states: Mapping[str, MemberState]) -> list[RunSpec]:
        """Return no members: a race adds none. See `Decider.members`."""
        return []

    def _saved_compute(self, states: Mapping[str, MemberState]) -> float:
        """Return the compute saved on members of stopped recipes; in a dry run, what a live race would have saved."""
        record, spared = self._record, 0.0
        assert record.rules is not None
        for run in [run for run in self._members if run in states and states[run].recipe in record.stopped]:
            spent = record.stopped[states[run].recipe].compute
            if self._live:
                # A run continues until it reads the request to stop. A later launch without a race may even finish it.
                spent = max(spent, self._reached.get(run, 0.0))
                spent = record.rules.budget if states[run].state == "finished" else spent
            spared += max(0.0, record.rules.budget - spent)
        return spared


def _first_reason(before: str | None, why: str) -> str:
    """Return the earlier reason, if any. With a new reason, the controller would ask the member to stop again."""
    return before or why
