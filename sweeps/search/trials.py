"""Trials of a search: Optuna's study, stored in a journal in the study's folder (`optuna.jsonl`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, Trial, TrialState

from sweeps.errors import UserError
from sweeps.redact import redact_override
from sweeps.run.files import append_lines, parse_line
from sweeps.run.spec import RunSpec
from sweeps.search.settings import Axis, SearchSettings

TRIALS_FILE = "optuna.jsonl"
_NAME = "search"
_REMEDY = "restore the file, or move it away to propose the trials again; results of existing runs are reused"

# Number of trials with which a sampler is tested: more than most samplers draw at random before they use results.
_TEST_TRIALS = 12

# A lock on Optuna's journal is held for one write. If it is held for longer than this, its owner is dead.
_LOCK_GRACE_S = 1.0

# Samplers whose sequence depends only on the seed. The journal shows the position in the sequence.
_SEQUENCE_SAMPLERS = (optuna.samplers.GridSampler, optuna.samplers.QMCSampler)

Planner = Callable[[Sequence[Sequence[str]]], list[RunSpec]]


class Trials:
    """Trials of a search in Optuna's journal, with the sampler that proposes them.

    Args:
        directory: the study's folder.
        space: axes of the search space.
        settings: settings of the search.
        base: command-line overrides that all trials share.
        planner: function that makes members' specifications from lists of overrides.
        sampler: function that makes Optuna's sampler from a seed.
        open_axes: axes whose values are missing (`???`) in the configuration, so that `base` alone is not a member.

    Attributes:
        start: overrides of the member with which trials are compared: `base` with the first values of `open_axes`.
    """

    def __init__(
        self,
        directory: Path,
        space: Sequence[Axis],
        settings: SearchSettings,
        base: Sequence[str],
        planner: Planner,
        sampler: Callable[[int], optuna.samplers.BaseSampler],
        open_axes: Sequence[Axis] = (),
    ) -> None:
        self._directory, self._space, self._settings, self._base = directory, space, settings, base
        self.start = [*base, *(axis.first for axis in open_axes)]
        self._planner, self._sampler = planner, sampler
        self._study: optuna.Study | None = None

    @property
    def study(self) -> optuna.Study:
        """Optuna's study in the journal, opened when first needed: this process then holds the study's lease."""
        if self._study is None:
            # Optuna's messages about the test below would confuse users.
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            self._test_sampler()
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            path = self._directory / TRIALS_FILE
            _break_stale_lock(path)
            _cut_torn_line(path)
            study = _open_study(path)
            try:
                self._check_same(study)
            except UserError:
                if any("run" in each.user_attrs for each in study.get_trials(deepcopy=False)):
                    raise
                path.unlink()  # all trials were refused, so there are no results that this search could be mixed with
                study = _open_study(path)
                self._check_same(study)
            study.sampler = self._sampler(self._settings.seed)
            if not isinstance(study.sampler, _SEQUENCE_SAMPLERS):
                # The sampler's state is not stored: another seed keeps a new process from repeating the draws.
                study.sampler = self._sampler(self._settings.seed + len(study.trials))
            study.stop = self._record_exhausted  # type: ignore[method-assign]
            self._study = study
        return self._study

    def _test_sampler(self) -> None:
        """Test the sampler on the space in memory, before any run is started.

        Only while sampling do many samplers report that they do not fit the space, or that a package is missing.

        Raises:
            UserError: the sampler's message.
        """
        sampler = self._sampler(self._settings.seed)
        if not isinstance(sampler, optuna.samplers.BaseSampler):
            raise UserError(
                f"hydra.sweeper.sampler: a {type(sampler).__name__} is none of Optuna's; give its _target_ and "
                "arguments"
            )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.stop = lambda: None  # type: ignore[method-assign]
        for value in range(min(self._settings.n_trials, _TEST_TRIALS)):
            with sampling():
                trial = study.ask()
                self.suggested_overrides(trial)
                study.tell(trial, float(value))

    def _check_same(self, found: optuna.Study) -> None:
        """Check that the folder's search was begun with the same objective, budget, space and base configuration.

        Raises:
            UserError: something differs.
        """
        (base,) = self._planner([self.start])
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
            # Settings that are not part of a run's identity may differ, such as where it runs or is tracked.
            here = [each for each in shared if each not in begun["shared"]]
            there = [each for each in begun["shared"] if each not in shared]
            same = "none" if here or there else "the same overrides, but with another meaning"
            self._refuse(f"what all trials share: {' '.join(here) or same}", " ".join(there) or same)

    def _refuse(self, now: str, then: str) -> None:
        raise UserError(
            f"{now}, and the search in {self._directory} was begun with {then}; go on with that, or give this "
            "one a folder of its own (study=NAME)"
        )

    @property
    def exhausted(self) -> bool:
        """True if the sampler has reported that it has no more proposals."""
        return self.study.user_attrs.get("exhausted") == _sampler_id(self.study.sampler)

    def _record_exhausted(self) -> None:
        """Record that the sampler has no more proposals. Replaces `optuna.Study.stop`."""
        self.study.set_user_attr("exhausted", _sampler_id(self.study.sampler))

    def unfinished(self) -> list[FrozenTrial]:
        """Return the trials that have no result in Optuna's journal yet."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def suggested_overrides(self, trial: Trial) -> list[str]:
        """Return a trial's proposed values as overrides. Repeated calls return the same values."""
        overrides = []
        for axis in self._space:
            value: Any
            if axis.choices:
                value = trial.suggest_categorical(axis.key, list(axis.choices))
            elif isinstance(axis.low, int) and isinstance(axis.high, int):
                value = trial.suggest_int(axis.key, axis.low, axis.high, log=axis.log)
            else:
                # The values are part of the recipe's label, so round them to six digits.
                value = f"{trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log):.6g}"
            overrides.append(f"{axis.key}={value}")
        return overrides

    def sentence(self) -> str:
        """Describe the search so far: numbers of trials by outcome, and the best trial."""
        trials = self.study.get_trials(deepcopy=False)
        count = {state: sum(each.state is state for each in trials) for state in TrialState}
        done = [each for each in trials if each.state is TrialState.COMPLETE and each.value is not None]
        # A launch that resumes the search may ask for fewer trials than there are.
        text = f"{count[TrialState.COMPLETE]} of {max(self._settings.n_trials, len(trials))} trials finished"
        for state, what in ((TrialState.PRUNED, "pruned"), (TrialState.FAIL, "failed")):
            text += f", {count[state]} {what}" if count[state] else ""
        text += ", and the sampler has no more proposals" if self.exhausted else ""
        if not done:
            return text
        best = max(done, key=lambda each: (each.value or 0.0, -each.number))
        proposed = " ".join(f"{key}={_shown(chosen)}" for key, chosen in best.params.items())
        return f"{text}; the best is trial {best.number} with {best.value:.3f} ({proposed})"

    def refusals(self) -> list[str]:
        """Return the reasons why trials were refused, in the order of the trials."""
        return [str(each.user_attrs["refused"]) for each in self.study.get_trials() if "refused" in each.user_attrs]


class _Journal(BaseJournalBackend):
    """Backend for Optuna's journal that adds a checksum to each line, with the same lock as Optuna's backend.

    Optuna's backend can read the file too, for example in a dashboard. A damaged line is an error instead of being
    skipped, because operations build on earlier ones.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = JournalFileSymlinkLock(str(path))
        self._ends = {0: 0}  # offset in the file after each number of operations
        path.touch()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the operations from number `log_number_from` on.

        Raises:
            UserError: a line is damaged.
        """
        number = log_number_from if log_number_from in self._ends else 0
        with self._path.open("rb") as handle:
            handle.seek(self._ends[number])
            for line in handle:
                if not line.endswith(b"\n"):
                    return  # another process is writing this line
                if (entry := parse_line(line)) is None:
                    raise UserError(f"{self._path}, line {number + 1}: damaged; {_REMEDY}")
                self._ends[number + 1] = self._ends[number] + len(line)
                number += 1
                if number > log_number_from:
                    yield entry

    def append_logs(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Append operations. When this returns, they are on the disk."""
        self._lock.acquire()
        try:
            append_lines(self._path, logs, durable=True, checksum=True)
        finally:
            self._lock.release()


def _open_study(path: Path) -> optuna.Study:
    """Open Optuna's study in the journal, or create it.

    Raises:
        UserError: the journal is damaged.
    """
    try:
        storage = JournalStorage(_Journal(path))
        return optuna.create_study(storage=storage, study_name=_NAME, direction="maximize", load_if_exists=True)
    except (UserError, OSError):
        raise
    except Exception as error:  # Optuna raises various errors for inconsistent operations
        raise UserError(f"{path}: no journal of a search ({message_of(error)}); {_REMEDY}") from error


@contextmanager
def sampling() -> Iterator[None]:
    """In a `with` block, turn a sampler's exceptions (about the space or a missing package) into a UserError."""
    try:
        yield
    except OSError:
        raise  # the journal raised it
    except Exception as error:
        raise UserError(
            f"hydra.sweeper.sampler: {message_of(error)}; give one that fits the space (values of a grid as on the "
            "command line, in quotes), and install what it needs"
        ) from error


def message_of(error: Exception) -> str:
    """Format an exception's message on one line; its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _sampler_id(sampler: optuna.samplers.BaseSampler) -> str:
    return f"{type(sampler).__name__} {getattr(sampler, '_search_space', '')}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _break_stale_lock(path: Path) -> None:
    """Remove the lock (a link, `optuna.jsonl.lock`) of a killed process, for which Optuna would wait 30 s.

    Other users of the trials, such as a dashboard, hold the lock for one write at a time, so a lock is removed only if
    it is held for `_LOCK_GRACE_S`.
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
    """Cut off an incomplete last line, which a power cut may leave, because Optuna would append to it."""
    whole = path.read_bytes() if path.exists() else b""
    if whole and not whole.endswith(b"\n"):
        os.truncate(path, whole.rfind(b"\n") + 1)
