"""Decider of a search: Optuna proposes trials, which run as members of the study when slots are free.

Optuna's journal in the study's folder (`optuna.jsonl`) stores the trials. A trial is made in four steps: ask Optuna for
a trial, draw its parameters, write the identity of its run to Optuna's journal, and make it a member. After a kill at
any point, the next process finds the proposed trials in Optuna's journal, and their results in the ledger and the runs'
journals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import optuna
from optuna.trial import Trial, TrialState
from scipy.special import ndtri

from sweeps.decide.race import make_look
from sweeps.decide.standing import draw_rewards
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.predict import can_forecast_at
from sweeps.launch.decider import Wish
from sweeps.launch.ledger import RUNS_DIR, MemberState
from sweeps.launch.planning import PlannerLostError
from sweeps.launch.study import Study
from sweeps.run.files import append_lines
from sweeps.run.spec import RunSpec
from sweeps.search.journals import Journals
from sweeps.search.race_log import RACE_FILE, RaceRecord
from sweeps.search.settings import Axis, SearchSettings
from sweeps.search.trials import TRIALS_FILE, Planner, Trials, message_of, sampling
from sweeps.terminal import counted

_LOW = 0.025  # Probability below the lower bound of the result. This bound is a trial's value.
# The search fails after this many configurations in a row that were refused.
_MAX_REFUSED = 10


class Search:
    """Decider that runs a study as a search (`sweeps.launch.decider.Decider`).

    Args:
        study: study whose members the trials become.
        space: axes of the search space.
        settings: settings of the search.
        base: command-line overrides that all trials share.
        planner: function that makes members' specifications from lists of overrides.
        sampler: function that makes Optuna's sampler from a seed.
        find_substitutes: function that finds adopted runs (of other studies or trainers) to use in place of members,
            see `sweeps.launch.adopted.find_substitutes`; None if the study has none.
        open_axes: see `Trials`.
    """

    files: tuple[str, ...] = (TRIALS_FILE, RACE_FILE)

    def __init__(
        self,
        study: Study,
        space: Sequence[Axis],
        settings: SearchSettings,
        base: Sequence[str],
        planner: Planner,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
        find_substitutes: Callable[[Sequence[RunSpec]], tuple[Mapping[str, RunSpec | None], list[str]]] | None = None,
        open_axes: Sequence[Axis] = (),
    ) -> None:
        self._find_substitutes = find_substitutes
        self._study, self._settings, self._base, self._planner = study, settings, list(base), planner
        self.trials = Trials(study.directory, list(space), settings, self._base, planner, sampler, open_axes)
        self._journals = Journals(study.directory / RUNS_DIR)
        self._judged_at: dict[str, float] = {}
        self._pruned: dict[str, str] | None = None
        self._messages: list[str] = []
        self._refused = 0
        self._last_error = ""
        self._checked_unknown_members = False

    # --- members to run ------------------------------------------------------------------------------------------

    def members(self, states: Mapping[str, MemberState]) -> list[RunSpec]:
        """Report results of ended members to Optuna, and return members for new trials. See `Decider.members`."""
        while True:
            self._report_results(states)
            had_trials, members = self._propose_trials(states)
            # A trial that was refused, or whose run is already a member, frees its slot for another trial.
            if members or not had_trials:
                return members

    def _propose_trials(self, states: Mapping[str, MemberState]) -> tuple[bool, list[RunSpec]]:
        """Ask Optuna for a trial per free slot. Return whether there were trials to plan, and their new members."""
        open_trials = self.trials.unfinished()
        lost = [each for each in open_trials if each.user_attrs.get("run") not in states]
        trial_count = len(self.trials.study.get_trials(deepcopy=False))
        places = self._settings.n_jobs - (len(open_trials) - len(lost))
        if not self._checked_unknown_members and (strangers := self._unknown_members_note(states)):
            self._messages.append(strangers)
        self._checked_unknown_members = True
        new = 0 if self.trials.exhausted else min(max(0, places - len(lost)), self._settings.n_trials - trial_count)
        # First the trials that a killed process left without a member, then new ones.
        trials = [Trial(self.trials.study, each._trial_id) for each in lost]
        with sampling():
            trials += [self.trials.study.ask() for _ in range(new)]
            suggested = [(trial, self.trials.suggested_overrides(trial)) for trial in trials]
        if not trials:
            return False, []
        found = self._specs(suggested)
        return True, list({spec.run: spec for spec in found if spec.run not in states}.values())

    def _unknown_members_note(self, states: Mapping[str, MemberState]) -> str | None:
        """Return a warning about members without a trial, because Optuna's journal may have lost lines; else None."""
        known = {each.user_attrs.get("run") for each in self.trials.study.get_trials(deepcopy=False)}
        strange = [state.title for run, state in states.items() if run not in known]
        if not strange:
            return None
        more = ", ..." if len(strange) > 3 else ""
        return (
            f"search: {counted(len(strange), 'member')} without a trial in {TRIALS_FILE} "
            f"({', '.join(strange[:3])}{more}); if this search started them, the file has lost lines, and other "
            "trials may take their place"
        )

    def _specs(self, suggested: Sequence[tuple[Trial, list[str]]]) -> list[RunSpec]:
        """Plan trials as members. A refused trial is recorded as failed in Optuna's journal, with the reason."""
        try:
            # With `start` first, the labels show how each trial differs from it.
            specs = self._planner([self.trials.start, *([*self._base, *overrides] for _, overrides in suggested)])[1:]
        except (OSError, PlannerLostError):
            raise  # the trial did not cause this: the next process plans it again
        except Exception as error:  # includes Hydra's errors about an unknown key or choice
            if len(suggested) > 1:
                return [spec for each in suggested for spec in self._specs([each])]
            ((trial, overrides),) = suggested
            reason = message_of(error)
            self._refused += 1
            if self._refused >= _MAX_REFUSED:
                raise UserError(f"{reason} ({self._refused} trials in a row were refused)") from error
            trial.set_user_attr("refused", reason)
            self.trials.study.tell(trial, state=TrialState.FAIL)
            self._messages.append(f"trial {trial.number} refused ({' '.join(overrides)}): {reason}")
            return []
        self._refused = 0
        if self._find_substitutes is not None:
            specs = self._replace_by_adopted_runs(suggested, specs)
        for (trial, _), spec in zip(suggested, specs, strict=True):
            trial.set_user_attr("run", spec.run)
        return specs

    def _replace_by_adopted_runs(
        self, suggested: Sequence[tuple[Trial, list[str]]], specs: Sequence[RunSpec]
    ) -> list[RunSpec]:
        assert self._find_substitutes is not None
        found, _ = self._find_substitutes(specs)
        for (trial, _), spec in zip(suggested, specs, strict=True):
            if found.get(spec.run) is not None:
                self._messages.append(
                    f"trial {trial.number} ({spec.title}) ran elsewhere and was adopted; it is not started"
                )
        return [found.get(spec.run) or spec for spec in specs]

    def _report_results(self, states: Mapping[str, MemberState]) -> None:
        for trial in self.trials.unfinished():
            run = str(trial.user_attrs.get("run"))
            state = states[run].state if run in states else None
            if state not in ("finished", "failed", "stopped"):
                continue
            if state == "stopped" and run not in self._stopped():
                continue  # Stopped from outside, not pruned: it resumes when the study is launched again.
            self._journals.update([run])
            for record in self._journals.evaluations(run):
                for rate in [value for key, value in record.metrics.items() if key.endswith("/pass_rate")][:1]:
                    self.trials.study._storage.set_trial_intermediate_value(trial._trial_id, record.step, rate)
            try:
                value = self._value(run) if state == "finished" else None
            except UserError as error:  # an unreadable evaluation fails its trial, not the search
                value = None
                self.trials.study._storage.set_trial_user_attr(trial._trial_id, "unreadable", str(error))
                self._messages.append(f"trial {trial.number} has no value: {error}")
            if value is None:
                pruned = TrialState.PRUNED if state == "stopped" else TrialState.FAIL
                self.trials.study.tell(trial.number, state=pruned)
                continue
            self.trials.study.tell(trial.number, value)
            self._messages.append(
                f"trial {trial.number}: {self._settings.objective} at least {value:.3f}; {self.trials.sentence()}"
            )

    def _value(self, run: str) -> float | None:
        """Return a run's objective: the lower 2.5% bound of its asymptote or reward; None without evaluations."""
        curves = self._journals.curves([run])
        if not curves:
            return None
        (fit,) = fit_curves(curves)
        lowest = fit.A_total[0]
        if self._settings.objective == "asymptote" and fit.identifiable and lowest is not None:
            return lowest
        reached = float(curves[0].compute.max())
        budget = self._settings.budget or reached
        if not can_forecast_at(fit, budget) and budget <= reached:
            return _observed_lower_bound(fit, budget)
        (rewards,) = draw_rewards([fit], budget)
        return float(np.quantile(rewards, _LOW))

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str], queued: Collection[str]) -> Wish:
        """Run all trials without a result, except pruned ones, at most `n_jobs`. See `Decider.wish`."""
        if self._settings.prune == "race":
            self._race(states, at_work)
        over = {run: why for run, why in self._stopped().items() if run in states and states[run].state != "finished"}
        messages, self._messages = self._messages, []
        # A new launch does not retry trials that Optuna has recorded as failed.
        open_runs = {each.user_attrs.get("run") for each in self.trials.unfinished()}
        wanted = [run for run in states if run in open_runs and run not in over]
        wanted.sort(key=lambda run: (run not in at_work, states[run].state not in ("submitting", "started")))
        # An earlier launch may have had more slots than this one.
        return Wish(wanted[: self._settings.n_jobs], to_end=over, messages=messages)

    # --- pruning -------------------------------------------------------------------------------------------------

    def _stopped(self) -> dict[str, str]:
        """Return the reason for pruning by run, read from the race record when first needed."""
        if self._pruned is None:
            record = RaceRecord.read(self._study.directory)
            self._messages += [] if record.trouble is None else [f"search: {record.trouble}"]
            self._pruned = dict(record.pruned)
        return self._pruned

    def _race(self, states: Mapping[str, MemberState], at_work: Collection[str]) -> None:
        """Compare each running trial that has reached its next look with all others.

        Record the trials that are pruned.
        """
        fresh = self._journals.watch(states, at_work)
        rules = self._settings.rules()
        try:
            curves = self._journals.curves([run for run in states if states[run].state != "failed"]) if fresh else []
        except UserError as error:  # the curves cannot be compared, so nothing is pruned
            self._messages += [f"nothing is pruned: {error}"] if str(error) != self._last_error else []
            self._last_error = str(error)
            return
        if not curves:
            return
        axis, levels = curves[0].axis, list(rules.levels())
        due = [run for run in at_work if run not in self._stopped() and self._due(run, axis, levels)]
        if not due or len(curves) < 2:
            return
        fits: list[Fit] = fit_curves(curves)
        look = make_look(max(self._judged_at[run] for run in due), fits, draw_rewards(fits, rules.budget), rules)
        for run in due:
            if states[run].recipe in look.stopped:
                why = replace(look, compute=self._judged_at[run]).why(states[run].recipe, rules)
                line = {"kind": "pruned", "run": run, "why": why, "look": look.to_json()}
                append_lines(self._study.directory / RACE_FILE, [line], durable=True, checksum=True)
                self._stopped()[run] = why

    def _due(self, run: str, axis: str, levels: Sequence[float]) -> bool:
        """Return whether a run has reached a level at which it was not judged yet, and mark it as judged there."""
        reached = self._journals.compute(run, axis)
        passed = [level for level in levels if reached >= level]
        if not passed or self._judged_at.get(run, 0.0) >= passed[-1]:
            return False
        self._judged_at[run] = passed[-1]
        return True


def _observed_lower_bound(fit: Fit, compute: float) -> float:
    """Return the lower 2.5% bound of the reward at a compute, from the last evaluation up to there.

    This is used for runs that are too short for a forecast.
    """
    curve = fit.curve
    at = int(np.argmax(np.where(curve.compute <= compute, curve.compute, -np.inf)))
    error = 0.0 if curve.sd is None or not np.isfinite(curve.sd[at]) else float(curve.sd[at])
    least = float(curve.reward[at]) + float(ndtri(_LOW)) * float(np.hypot(error, fit.seed_spread.sd))
    return max(least, curve.bounds[0])
