"""Decider of a search: Optuna proposes trials, members run as slots become free, and their curves are judged.

Optuna's journal in the study's folder (`optuna.jsonl`) holds the trials. A trial is asked for, its parameters are
drawn, its identity is written into the journal, and only then is it a member: killed at any point, the next process
finds in the journal what was proposed, and in the ledger and the runs' own journals what has become of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from scipy.special import ndtri

from sweeps.decide.race import judged
from sweeps.decide.standing import joint_rewards
from sweeps.errors import UserError
from sweeps.fit.fit import Fit, fit_curves
from sweeps.fit.predict import within
from sweeps.launch.decider import Wish
from sweeps.launch.ledger import RUNS_DIR, MemberState
from sweeps.launch.planning import PlannerLostError
from sweeps.launch.study import Study
from sweeps.redact import redact_override
from sweeps.run.files import append_lines
from sweeps.run.spec import RunSpec
from sweeps.search.journals import Journals
from sweeps.search.record import RACE_FILE, RaceRecord
from sweeps.search.settings import Axis, SearchSettings

TRIALS_FILE = "optuna.jsonl"
_NAME = "search"
_LOW = 0.025
# Configurations in a row that were refused before the search is.
_REFUSED = 10

# Trials on which a sampler is tried: more than most of them draw at random before they look at what was told.
_REHEARSED = 12

# A lock on Optuna's journal that nobody releases for so long has no owner: it is held for one write.
_LOCK_GRACE_S = 1.0

# The journal holds how far these have come in a sequence that their seed alone decides.
_NUMBERED = (optuna.samplers.GridSampler, optuna.samplers.QMCSampler)

Planner = Callable[[Sequence[Sequence[str]]], list[RunSpec]]


class Search:
    """Decider that runs a study as a search (`sweeps.launch.decider.Decider`).

    Args:
        study: study whose members the trials become.
        space: axes of the search space.
        settings: settings of the search.
        base: command-line overrides that all trials share.
        planned: makes members' specifications from lists of overrides.
        sampler: makes Optuna's sampler from a seed.
    """

    files: tuple[str, ...] = (TRIALS_FILE, RACE_FILE)

    def __init__(
        self,
        study: Study,
        space: Sequence[Axis],
        settings: SearchSettings,
        base: Sequence[str],
        planned: Planner,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
    ) -> None:
        self._study, self._space, self._settings, self._base = study, list(space), settings, list(base)
        self._planned, self._sampler = planned, sampler
        self._journals = Journals(study.directory / RUNS_DIR)
        self._looked: dict[str, float] = {}
        self._pruned: dict[str, str] | None = None
        self._trials: optuna.Study | None = None
        self._said: list[str] = []
        self._refused = 0
        self._trouble = ""

    # --- Optuna's side -------------------------------------------------------------------------------------------

    def _optuna(self) -> optuna.Study:
        """Optuna's study in the journal, opened at first use, when this process holds the study's lease."""
        if self._trials is None:
            optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it says of a rehearsal is no news
            self._rehearse()
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            path = self._study.directory / TRIALS_FILE
            _break_stale_lock(path)
            _cut_torn_line(path)
            found = _opened(path)
            try:
                self._check_same(found)
            except UserError:
                if any("run" in each.user_attrs for each in found.get_trials(deepcopy=False)):
                    raise
                path.unlink()  # every trial was refused: there is nothing that this one could be mixed with
                found = _opened(path)
                self._check_same(found)
            found.sampler = self._sampler(self._settings.seed)
            if not isinstance(found.sampler, _NUMBERED):
                # A sampler's own state is not kept: another process draws on, and does not draw the same again.
                found.sampler = self._sampler(self._settings.seed + len(found.trials))
            found.stop = self._no_more  # type: ignore[method-assign]
            self._trials = found
        return self._trials

    def _rehearse(self) -> None:
        """Try the sampler on the space in memory, before any run is paid for.

        Most samplers show only once they sample that they do not fit the space, or lack a package.

        Raises:
            UserError: what it says.
        """
        made = self._sampler(self._settings.seed)
        if not isinstance(made, optuna.samplers.BaseSampler):
            raise UserError(
                f"hydra.sweeper.sampler: a {type(made).__name__} is none of Optuna's; give its _target_ and arguments"
            )
        tried = optuna.create_study(direction="maximize", sampler=made)
        tried.stop = lambda: None  # type: ignore[method-assign]
        for value in range(min(self._settings.n_trials, _REHEARSED)):
            with _sampling():
                trial = tried.ask()
                self._suggested(trial)
                tried.tell(trial, float(value))

    def _check_same(self, found: optuna.Study) -> None:
        """Check that the folder's search was begun with the same objective, budget, space and base configuration."""
        (base,) = self._planned([self._base])
        budget = self._settings.budget
        asked = {"hydra.sweeper.objective": self._settings.objective}
        asked |= {"hydra.sweeper.budget": "null" if budget is None else str(float(budget))}
        asked |= {} if budget is not None else {"budget.steps": str(base.steps)}
        asked |= {f"the space of {axis.key}": str(axis) for axis in self._space}
        shared = [redact_override(each) for each in self._base]
        begun: Any = found.user_attrs.get("begun_with")
        if begun is None:
            found.set_user_attr("begun_with", {"asked": asked, "run": base.run, "shared": shared})
            return
        for name in [*asked, *begun["asked"]]:
            now, then = asked.get(name, "none"), begun["asked"].get(name, "none")
            if now != then:
                self._refuse(f"{name}: {now}", then)
        if base.run != begun["run"]:
            # What is no part of a run may differ: where it runs, where it is tracked.
            here = [each for each in shared if each not in begun["shared"]]
            there = [each for each in begun["shared"] if each not in shared]
            same = "none" if here or there else "the same words, which stand for something else"
            self._refuse(f"what all trials share: {' '.join(here) or same}", " ".join(there) or same)

    def _refuse(self, now: str, then: str) -> None:
        raise UserError(
            f"{now}, and the search in {self._study.directory} was begun with {then}; go on with that, or give this "
            "one a folder of its own (study=NAME)"
        )

    def _exhausted(self) -> bool:
        return self._optuna().user_attrs.get("exhausted") == _named(self._optuna().sampler)

    def _no_more(self) -> None:
        """Record that the sampler has nothing more to propose; replaces `optuna.Study.stop`."""
        self._optuna().set_user_attr("exhausted", _named(self._optuna().sampler))

    def _open(self) -> list[FrozenTrial]:
        """Return the trials that Optuna has no result of yet."""
        return self._optuna().get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _suggested(self, trial: Trial) -> list[str]:
        """Return a trial's proposal as overrides; asked again, a trial gives the same values."""
        overrides = []
        for axis in self._space:
            value: Any
            if axis.choices:
                value = trial.suggest_categorical(axis.key, list(axis.choices))
            elif isinstance(axis.low, int) and isinstance(axis.high, int):
                value = trial.suggest_int(axis.key, axis.low, axis.high, log=axis.log)
            else:
                # As many digits as anybody reads: they are part of the recipe's label.
                value = f"{trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log):.6g}"
            overrides.append(f"{axis.key}={value}")
        return overrides

    # --- what it wants -------------------------------------------------------------------------------------------

    def decided(self) -> list[RunSpec]:
        """Return no members: the study is read with all that it has. See `Decider.decided`."""
        return []

    def members(self, states: Mapping[str, MemberState]) -> list[RunSpec]:
        """Tell Optuna the results of ended members and return members for new trials. See `Decider.members`."""
        while True:
            self._tell(states)
            asked, found = self._asked(states)
            # A trial that was refused, or proposes what has been run, leaves its place to another.
            if found or not asked:
                return found

    def _asked(self, states: Mapping[str, MemberState]) -> tuple[bool, list[RunSpec]]:
        """Ask Optuna for trials up to the free slots; return whether any was asked for, and their new members."""
        open_trials = self._open()
        lost = [each for each in open_trials if each.user_attrs.get("run") not in states]
        asked = len(self._optuna().get_trials(deepcopy=False))
        places = self._settings.n_jobs - (len(open_trials) - len(lost))
        new = 0 if self._exhausted() else min(max(0, places - len(lost)), self._settings.n_trials - asked)
        # Found again after a kill, or asked for now: a trial has its number before it has its parameters.
        trials = [Trial(self._optuna(), each._trial_id) for each in lost]
        with _sampling():
            trials += [self._optuna().ask() for _ in range(new)]
            suggested = [(trial, self._suggested(trial)) for trial in trials]
        if not trials:
            return False, []
        found = self._specs(suggested)
        return True, list({spec.run: spec for spec in found if spec.run not in states}.values())

    def _specs(self, asked: Sequence[tuple[Trial, list[str]]]) -> list[RunSpec]:
        """Plan trials as members; a refused trial is recorded as failed in Optuna's journal, with its reason."""
        try:
            # With the base first: what the trials have beyond it labels them apart.
            specs = self._planned([self._base, *([*self._base, *overrides] for _, overrides in asked)])[1:]
        except (OSError, PlannerLostError):
            raise  # of no trial: whoever is asked again plans them
        except Exception as error:  # Hydra's too, of a key or a choice that there is not
            if len(asked) > 1:
                return [spec for each in asked for spec in self._specs([each])]
            ((trial, overrides),) = asked
            said = _told(error)
            self._refused += 1
            if self._refused >= _REFUSED:
                raise UserError(f"{said} ({self._refused} trials in a row were refused)") from error
            trial.set_user_attr("refused", said)
            self._optuna().tell(trial, state=TrialState.FAIL)
            self._said.append(f"trial {trial.number} refused ({' '.join(overrides)}): {said}")
            return []
        self._refused = 0
        for (trial, _), spec in zip(asked, specs, strict=True):
            trial.set_user_attr("run", spec.run)
        return specs

    def _tell(self, states: Mapping[str, MemberState]) -> None:
        """Tell Optuna the results of the members that have ended."""
        for trial in self._open():
            run = str(trial.user_attrs.get("run"))
            state = states[run].state if run in states else None
            if state not in ("finished", "failed", "stopped"):
                continue
            if state == "stopped" and run not in self._stopped():
                continue  # asked by nobody here: it goes on when the study is launched again
            self._journals.update([run])
            for record in self._journals.evaluations(run):
                for rate in [value for key, value in record.metrics.items() if key.endswith("/pass_rate")][:1]:
                    self._optuna()._storage.set_trial_intermediate_value(trial._trial_id, record.step, rate)
            try:
                value = self._value(run) if state == "finished" else None
            except UserError as error:  # an evaluation that cannot be read: of this trial, not of the search
                value = None
                self._optuna()._storage.set_trial_user_attr(trial._trial_id, "unreadable", str(error))
                self._said.append(f"trial {trial.number} has no value: {error}")
            if value is None:
                pruned = TrialState.PRUNED if state == "stopped" else TrialState.FAIL
                self._optuna().tell(trial.number, state=pruned)
                continue
            self._optuna().tell(trial.number, value)
            self._said.append(
                f"trial {trial.number}: {self._settings.objective} at least {value:.3f}; {self.sentence()}"
            )

    def sentence(self) -> str:
        """Describe the search so far: counts of trials by outcome, and the best one."""
        trials = self._optuna().get_trials(deepcopy=False)
        count = {state: sum(each.state is state for each in trials) for state in TrialState}
        done = [each for each in trials if each.state is TrialState.COMPLETE and each.value is not None]
        said = f"{count[TrialState.COMPLETE]} of {self._settings.n_trials} trials finished"
        for state, what in ((TrialState.PRUNED, "pruned"), (TrialState.FAIL, "failed")):
            said += f", {count[state]} {what}" if count[state] else ""
        said += ", and the sampler has no more to propose" if self._exhausted() else ""
        if not done:
            return said
        best = max(done, key=lambda each: (each.value or 0.0, -each.number))
        proposed = " ".join(f"{key}={_shown(chosen)}" for key, chosen in best.params.items())
        return f"{said}; the best is trial {best.number} with {best.value:.3f} ({proposed})"

    def refusals(self) -> list[str]:
        """Return the reasons of refused trials, in their order."""
        return [str(each.user_attrs["refused"]) for each in self._optuna().get_trials() if "refused" in each.user_attrs]

    def _value(self, run: str) -> float | None:
        """Return a run's objective, the lower 2.5% bound of A or of the reward; None if nothing was evaluated."""
        curves = self._journals.curves([run])
        if not curves:
            return None
        (fit,) = fit_curves(curves)
        lowest = fit.A_total[0]
        if self._settings.objective == "asymptote" and fit.identifiable and lowest is not None:
            return lowest
        reached = float(curves[0].compute.max())
        budget = self._settings.budget or reached
        if not within(fit, budget) and budget <= reached:
            return _seen_at_least(fit, budget)
        (rewards,) = joint_rewards([fit], budget)
        return float(np.quantile(rewards, _LOW))

    def wish(self, states: Mapping[str, MemberState], at_work: Collection[str]) -> Wish:
        """Want all open trials at work but the pruned ones, `n_jobs` at most. See `Decider.wish`."""
        if self._settings.prune == "race":
            self._race(states, at_work)
        over = {run: why for run, why in self._stopped().items() if run in states and states[run].state != "finished"}
        said, self._said = self._said, []
        # Whoever is launched again gives no second chance to a trial of which Optuna knows that it failed.
        open_runs = {each.user_attrs.get("run") for each in self._open()}
        wanted = [run for run in states if run in open_runs and run not in over]
        wanted.sort(key=lambda run: (run not in at_work, states[run].state not in ("submitting", "started")))
        return Wish(wanted[: self._settings.n_jobs], over=over, said=said)  # an earlier launch may have had more places

    # --- pruning -------------------------------------------------------------------------------------------------

    def _stopped(self) -> dict[str, str]:
        """Reasons of the pruned runs, by run, read from the race record at first use."""
        if self._pruned is None:
            self._pruned = dict(RaceRecord.read(self._study.directory).pruned)
        return self._pruned

    def _race(self, states: Mapping[str, MemberState], at_work: Collection[str]) -> None:
        """Judge every trial at work that has reached its next look against all others, and record those pruned."""
        fresh = self._journals.watch(states, at_work)
        rules = self._settings.rules()
        try:
            curves = self._journals.curves([run for run in states if states[run].state != "failed"]) if fresh else []
        except UserError as error:  # nobody can be compared, so nobody is pruned
            self._said += [f"nothing is pruned: {error}"] if str(error) != self._trouble else []
            self._trouble = str(error)
            return
        if not curves:
            return
        axis, levels = curves[0].axis, list(rules.levels())
        due = [run for run in at_work if run not in self._stopped() and self._due(run, axis, levels)]
        if not due or len(curves) < 2:
            return
        fits: list[Fit] = fit_curves(curves, regions=False)
        look = judged(max(self._looked[run] for run in due), fits, joint_rewards(fits, rules.budget), rules, {})
        for run in due:
            if states[run].recipe in look.stopped:
                why = replace(look, compute=self._looked[run]).why(states[run].recipe, rules)
                line = {"kind": "pruned", "run": run, "why": why, "look": look.to_json()}
                append_lines(self._study.directory / RACE_FILE, [line], durable=True)
                self._stopped()[run] = why

    def _due(self, run: str, axis: str, levels: Sequence[float]) -> bool:
        """Return whether a run has reached a look that it has not been judged at, and mark it as judged."""
        evaluated = self._journals.evaluations(run)
        if not evaluated:
            return False
        passed = [level for level in levels if evaluated[-1].metrics.get(axis, 0.0) >= level]
        if not passed or self._looked.get(run, 0.0) >= passed[-1]:
            return False
        self._looked[run] = passed[-1]
        return True


def _opened(path: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(path)))
    return optuna.create_study(storage=storage, study_name=_NAME, direction="maximize", load_if_exists=True)


@contextmanager
def _sampling() -> Iterator[None]:
    """Context manager: turn what a sampler raises, on the space or a missing package, into a UserError."""
    try:
        yield
    except OSError:
        raise  # of the journal
    except Exception as error:
        raise UserError(
            f"hydra.sweeper.sampler: {_told(error)}; give one that fits the space (values of a grid as on the command "
            "line, in quotes), and install what it needs"
        ) from error


def _told(error: Exception) -> str:
    """Format an exception's message on one line; its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _named(sampler: optuna.samplers.BaseSampler) -> str:
    """Identify a sampler by its type, and by its grid if it has one."""
    return f"{type(sampler).__name__} {getattr(sampler, '_search_space', '')}"


def _seen_at_least(fit: Fit, compute: float) -> float:
    """Lower 2.5% bound of the reward where there are too few evaluations for a fit, from the last one up to there."""
    curve = fit.curve
    at = int(np.argmax(np.where(curve.compute <= compute, curve.compute, -np.inf)))
    error = 0.0 if curve.sd is None or not np.isfinite(curve.sd[at]) else float(curve.sd[at])
    least = float(curve.reward[at]) + float(ndtri(_LOW)) * float(np.hypot(error, fit.seed_spread.sd))
    return max(least, curve.bounds[0])


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _break_stale_lock(path: Path) -> None:
    """Remove the lock (a link, `optuna.jsonl.lock`) that a killed process has left: Optuna itself waits 30 s for it.

    Whoever runs the study alone writes there, and this process does; who only looks at the trials (a dashboard) holds
    the lock for the time of one write, and is waited for.
    """
    lock = path.with_name(path.name + ".lock")

    def held_as() -> tuple[int, int] | None:
        try:
            status = lock.lstat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    before = held_as()
    deadline = time.monotonic() + _LOCK_GRACE_S
    while before is not None and held_as() == before:
        if time.monotonic() >= deadline:
            lock.unlink(missing_ok=True)
            return
        time.sleep(_LOCK_GRACE_S / 10)


def _cut_torn_line(path: Path) -> None:
    """Cut off a torn last line, as a power cut leaves it: Optuna would append behind it."""
    whole = path.read_bytes() if path.exists() else b""
    if whole and not whole.endswith(b"\n"):
        os.truncate(path, whole.rfind(b"\n") + 1)
