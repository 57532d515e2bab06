"""Races for any training loop: report evaluations to a study's folder, and learn when a run should stop.

    from sweeps.stopping import should_stop

    if should_stop("outputs/mine", recipe="grpo", seed=0, step=step, reward=reward, compute=tokens, budget=2e9):
        break

Each run writes its own journal (`runs/<identity>/metrics.jsonl`), and reads those of all others: of members of a
launched study, adopted runs, and other loops, on any machine that sees the folder. At fixed points of compute it takes
a "look": it forecasts all recipes at the budget and decides, with the posterior and the rules of a live race
(`sweeps.decide.race`). Looks are stored in `race.jsonl` next to the journal. `race_callback` does the same for the
Trainer of transformers and the trainers of TRL. This module needs no torch.

The first call raises errors that exist from the beginning: a budget out of range, rules that differ from earlier ones,
a run of another process. Later errors never reach the loop: each is logged once as a warning, data that could not be
written are written at the next call, and the answer is None (continue). A call waits at most `wait_s` for its answer.
If the answer takes longer, a later call returns it.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps.curve import DEVICE_HOURS, FLOPS, STEPS, TOKENS
from sweeps.decide.rules import Rules
from sweeps.errors import UserError, errors_naming, require
from sweeps.executor.base import load_entry
from sweeps.launch.adoption import METRIC
from sweeps.launch.ledger import RUNS_DIR
from sweeps.launch.settings import LAUNCH_FILE
from sweeps.run.fields import MAX_INTEGER
from sweeps.run.files import make_private, read_json
from sweeps.run.journal import Journal, JournalView, find_runs
from sweeps.run.lease import Lease
from sweeps.run.progress import header_of, journal_or_none
from sweeps.run.spec import digest
from sweeps.run.writer import BEAT_S, EXPIRY_S
from sweeps.search.looks import RaceWithoutController
from sweeps.search.race_log import RaceRecord
from sweeps.search.settings import RaceSettings
from sweeps.source.journals import compared_by

log = logging.getLogger(__name__)

WAIT_S = 10.0
_LAST_S = 60.0  # seconds to wait for pending writes when a run ends
# Name of the compute axis if a loop gives compute without naming its axis.
SPENT = "compute/spent"


class RacingRun:
    """One run of a user's training loop in a study's folder. It writes the journal, and decides when to stop.

    Only one process may use it. With several ranks, use it on one of them, and broadcast its answer.

    Args:
        study: the study's folder, new or existing.
        recipe, seed: label of the recipe (the same for all its seeds), and the seed.
        budget: compute of one run at which the best recipe is wanted; None for the budget of the study's own race.
        p_ahead, looks, first, growth, loss: see `sweeps.decide.rules.Rules`; ignored without a budget.
        axis: compute axis by its name in journals, such as `compute/tokens`. None for the study's axis; in a new study
            that is steps if no compute is given.
        members: number of runs that must exist before a look is taken, because a look judges only runs that exist.
        wait_s: seconds that one call waits for its answer.

    Raises:
        UserError: a value is out of range, the study is compared by another axis, the rules differ from earlier ones of
            this run, or another process writes a member with this label and seed.
    """

    def __init__(
        self,
        study: str | Path,
        recipe: str,
        seed: int,
        budget: float | None = None,
        p_ahead: float = Rules.p_ahead,
        looks: int = Rules.looks,
        first: float = Rules.first,
        growth: float = Rules.growth,
        axis: str | None = None,
        members: int = 2,
        wait_s: float = WAIT_S,
        loss: float = Rules.loss,
    ) -> None:
        self.study, self.recipe, self.seed = Path(study).resolve(), str(recipe), int(seed)
        self.rules = (
            Rules(float(budget), p_ahead, looks, first, growth, loss) if budget is not None else _rules_of(self.study)
        )
        self._wait_s = wait_s
        curve = digest({"loop": self.recipe})
        self.run = digest({"loop": self.recipe, "seed": self.seed})
        self.run_dir = self.study / RUNS_DIR / self.run
        for other in find_runs(self.study):
            header = header_of(other)
            if "adopted" in header and (view := journal_or_none(other)) is not None:
                header = view.header  # a launch may have changed the label
            if header.get("recipe") != self.recipe or other.resolve() == self.run_dir:
                continue
            curve = str(header.get("curve", curve))
            if header.get("seed") == self.seed:
                raise UserError(f"recipe: {self.recipe!r} seed {self.seed} is a member of {study} already ({other})")
        self._curve = curve
        self._measured: str | None = None
        self.axis, self.metric = self._axis_and_reward(axis)
        with errors_naming("study"):
            make_private(self.study)
            self.run_dir.mkdir(parents=True, exist_ok=True)
        name = f"{self.recipe} seed {self.seed}"
        self._looks = RaceWithoutController(
            self.study, self.run_dir, self.rules, self.metric, self.axis, log, name, members
        )
        self.warn = self._looks.warn
        self._lease = Lease(self.run_dir, beat_s=BEAT_S, expiry_s=EXPIRY_S)
        self._has_lease = False
        self._pending: list[tuple[int, float, dict[str, float]]] = []
        self._ending: tuple[str, str | None] | None = None
        self._stop_reason: str | None = None
        self._calls: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()  # None ends the thread
        self._thread: threading.Thread | None = None
        self._reached = (-1, 0.0)  # step and compute of the newest evaluation

    def _axis_and_reward(self, axis: str | None) -> tuple[str | None, str]:
        """Return the axis and the reward by which the study's runs are compared; the axis is None while unknown."""
        for other in find_runs(self.study):
            view = journal_or_none(other)
            if view is not None and view.of_kind("eval"):
                theirs, metric = compared_by([view])
                if axis not in (None, theirs):
                    raise UserError(f"axis: {axis}, and the runs in {self.study} are compared by {theirs}; count alike")
                # Runs of one axis are compared only if their descriptions of it are equal, so take over the
                # description.
                self._measured = view.header.get("compute_is") if view.header.get("axis") == theirs else None
                return theirs, metric
        return axis, METRIC

    def should_stop(
        self, step: int, reward: float, compute: float | None = None, reward_se: float | None = None
    ) -> str | None:
        """Record an evaluation. Return why the run should stop, or None to continue.

        Args:
            step: number of optimizer steps so far.
            reward: reward on held-out prompts at this step.
            compute: compute spent so far, also before a resume; None to count steps.
            reward_se: standard error of the reward, if known.
        """
        if self.axis is None:
            self.axis = self._looks.axis = STEPS if compute is None else SPENT
        if compute is None and self.axis != STEPS:
            self.warn(f"no compute is given, but runs are compared by {self.axis}: the evaluation is not recorded")
            return self._stop_reason
        try:
            spent, reward = float(step) if compute is None else float(compute), float(reward)
            bad = not (math.isfinite(spent) and spent >= 0 and math.isfinite(reward) and 0 <= int(step) <= MAX_INTEGER)
        except (TypeError, ValueError, OverflowError):  # must not end the training
            bad, spent = True, math.nan
        if bad:
            self.warn(f"step {step}: reward {reward} at compute {compute} is not valid, and was not recorded")
            return self._stop_reason
        error = {f"{self.metric}_se": float(reward_se)} if reward_se is not None and math.isfinite(reward_se) else {}
        metrics = {self.metric: float(reward), **error, self.axis: spent}
        self._pending.append((int(step), spent, metrics))
        return self._answer(self._wait_s)

    def end(self, status: str = "finished", reason: str | None = None) -> None:
        """Record the end of the run (`finished` or `failed`), so that no look waits for it."""
        if self._stop_reason is None:  # otherwise the race has stopped the run, and its end is recorded
            self._ending = status, reason
            self._answer(_LAST_S)
        if self._thread is not None:
            self._calls.put(None)
            self._calls, self._thread = queue.SimpleQueue(), None
        if self._has_lease:
            self._lease.release()
            self._has_lease = False

    # --- background thread -----------------------------------------------------------------------------------------

    def _answer(self, wait_s: float) -> str | None:
        if self._thread is None or not self._thread.is_alive():  # a thread does not survive a fork
            self._thread = threading.Thread(
                target=self._answer_calls, args=(self._calls,), daemon=True, name=f"race {self.run}"
            )
            self._thread.start()
        answered = threading.Event()
        self._calls.put(answered)
        if not answered.wait(wait_s):
            self.warn(f"no answer within {wait_s:g} s; a later call will return it")
        return self._stop_reason

    def _answer_calls(self, calls: queue.SimpleQueue[threading.Event | None]) -> None:
        """Answer calls in order: write pending records, then let the race decide whether this run stops."""
        while (answered := calls.get()) is not None:
            try:
                self._write()
                self._stop_reason = self._stop_reason or self._look()
            except Exception as error:  # must not end the training
                self.warn(f"failed; the next call will try again ({type(error).__name__}: {error})")
            answered.set()

    def _write(self) -> None:
        """Append pending records to the journal, and wait until they are on the disk."""
        pending, ending = list(self._pending), self._ending
        if not pending and ending is None:
            return
        if not self._has_lease:
            # On a file system without locks, a holder counts as dead only after it has been silent for this long.
            self._lease.acquire(EXPIRY_S + BEAT_S)
            self._has_lease = True
        self._lease.check()
        view = journal_or_none(self.run_dir)
        if view is None and not pending:
            return  # the run ended without an evaluation
        journal = Journal(self.run_dir)
        try:
            if view is None:
                journal.header(**self._header())
                view = JournalView(journal.path, {})
            last = max((record.step for record in view.records), default=-1)
            if pending and (pending[0][0] <= last or view.status != "running"):
                # The loop has resumed from a checkpoint. Records after it are void, because their steps are repeated.
                last = max((r.step for r in view.records if r.step < pending[0][0]), default=-1)
                journal.resume(last)
            for step, spent, metrics in pending:
                if self._has_decreased(view, step, spent):
                    continue
                journal.record("eval", step, metrics)
                self._reached = step, spent
            if ending is not None:
                journal.end(max(self._reached[0], last), *ending)
        finally:
            journal.close()
        del self._pending[: len(pending)]
        self._ending = None if self._ending == ending else self._ending

    def _has_decreased(self, view: JournalView, step: int, spent: float) -> bool:
        """Return whether compute is less than at an earlier step, and warn if so: its counter may have restarted."""
        before = [(r.step, r.metrics.get(self.axis or "", 0.0)) for r in view.records if r.step < step]
        at, reached = max([*before, *([self._reached] if self._reached[0] < step else [])], default=(-1, 0.0))
        if spent < reached:
            self.warn(
                f"step {step}: compute {spent:g} is less than the {reached:g} of step {at} and was not recorded; "
                "after a resume, continue counting from the checkpoint"
            )
        return spent < reached

    def _header(self) -> dict[str, Any]:
        known = {"run": self.run, "curve": self._curve, "recipe": self.recipe, "seed": self.seed}
        return {**known, "axis": self.axis, "compute_is": self._measured or self.axis, "loop": True}

    def _look(self) -> str | None:
        """Take the looks that are due. If they stop this run, record its end and return the reason, else None."""
        began = time.monotonic()
        why = self._looks.take()
        if (took := time.monotonic() - began) > self._wait_s:
            log.info("race: the look took %.1f s", took)
        if why is not None:
            self.warn(why)
            self._ending = "finished", why
            self._write()
        return why


def _rules_of(study: Path) -> Rules:
    """Return the rules of the study's own race.

    Raises:
        UserError: the study has no race with a known budget.
    """
    rules = RaceRecord.read(study).rules
    if rules is None:
        settings = RaceSettings.recorded(read_json(study / LAUNCH_FILE).get("race"))
        rules = settings.rules(settings.budget) if settings.budget is not None else None
    if rules is None:
        raise UserError(f"budget: {study} has no race whose budget is known; give the compute of one run")
    return rules


_RUNS: dict[tuple[Path, str, int], RacingRun] = {}


def should_stop(
    study: str | Path,
    recipe: str,
    seed: int,
    step: int,
    reward: float,
    compute: float | None = None,
    reward_se: float | None = None,
    **settings: Any,
) -> str | None:
    """Record an evaluation of a run in a study's folder. Return why the run should stop, or None to continue.

    Args:
        study, recipe, seed: see `RacingRun`.
        step, reward, compute, reward_se: see `RacingRun.should_stop`.
        settings: `budget` and other arguments of `RacingRun`. Only the first call for a run uses them.

    Raises:
        UserError: at the first call for a run, see `RacingRun`.
    """
    key = (Path(study).resolve(), str(recipe), int(seed))
    if key not in _RUNS:
        _RUNS[key] = RacingRun(study, recipe, seed, **settings)
    return _RUNS[key].should_stop(step, reward, compute, reward_se)


def finished(study: str | Path, recipe: str, seed: int, status: str = "finished", reason: str | None = None) -> None:
    """Record that a run has ended, so that no look waits for it. A run without evaluations is ignored."""
    run = _RUNS.pop((Path(study).resolve(), str(recipe), int(seed)), None)
    if run is not None:
        run.end(status, reason)


# --- transformers ----------------------------------------------------------------------------------------------

# Axis in the journal, by the kind of compute that the callback counts.
COUNTED = {"tokens": TOKENS, "flops": FLOPS, "steps": STEPS, "device_hours": DEVICE_HOURS}


class _RaceEvents:
    """Hooks of transformers' Trainer in which a run reports and may be stopped; see `race_callback`."""

    def __init__(self, run: Mapping[str, Any], metric: str, compute: str) -> None:
        self._about, self._metric, self._compute = dict(run), metric, compute
        self._run: RacingRun | None = None
        self._why: str | None = None
        self._tokens: float | None = None
        self._began = self._hours = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Join the study, so that errors are raised before any training."""
        self._began = time.monotonic()
        if state.is_world_process_zero:
            self._run = RacingRun(**self._about, axis=COUNTED[self._compute])
            view = journal_or_none(self._run.run_dir)
            before = [] if view is None else [r for r in view.of_kind("eval") if r.step <= state.global_step]
            self._hours = before[-1].metrics.get(DEVICE_HOURS, 0.0) if before else 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Report a logged reward, and ask whether to stop. Rank 0 broadcasts the answer to all ranks."""
        logs = logs or {}
        self._tokens = next(
            (float(logs[key]) for key in ("eval_num_tokens", "num_tokens") if key in logs), self._tokens
        )
        if self._metric not in logs:
            return
        why = None
        if self._run is not None:
            spent = self._spent(args, state)
            if spent is None:
                self._run.warn(
                    f"the Trainer does not count {self._compute}, so nothing is recorded; choose compute=steps"
                )
            else:
                why = self._run.should_stop(int(state.global_step), float(logs[self._metric]), spent)
        if args.world_size > 1:
            reasons = [why]
            load_entry("accelerate.utils:broadcast_object_list")(reasons)
            why = reasons[0]
        self._why = self._why or why
        if self._why is not None:
            control.should_training_stop = control.should_save = True

    def _spent(self, args: Any, state: Any) -> float | None:
        if self._compute == "steps" or state.global_step == 0:
            return float(state.global_step)
        if self._compute == "flops":
            return float(state.total_flos) or None
        if self._compute == "device_hours":
            return self._hours + (time.monotonic() - self._began) / 3600 * int(args.world_size)
        counted = float(state.num_input_tokens_seen or 0) if self._tokens is None else self._tokens
        return counted or None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Repeat the answer, because another callback of the Trainer may have reset it."""
        if self._why is not None:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Record the end of the run, unless the race has stopped it."""
        if self._run is not None and self._why is None:
            self._run.end()


def race_callback(
    study: str | Path,
    recipe: str,
    seed: int,
    budget: float | None = None,
    metric: str = "eval_reward",
    compute: str = "tokens",
    **settings: Any,
) -> Any:
    """Make a callback that stops a run unlikely to be the best, for transformers' Trainer and trainers based on it
    (TRL).

    Rank 0 reports and asks; the other ranks get its answer. A run that is stopped is saved.

    Args:
        study, recipe, seed, budget: see `RacingRun`.
        metric: name of the logged reward, such as TRL's `eval_reward`.
        compute: what is counted: `tokens` (TRL's `num_tokens`, else the Trainer's count), `flops`, `steps` or
            `device_hours`.
        settings: other arguments of `RacingRun`.

    Raises:
        UserError: transformers is not installed, or `compute` is unknown.
    """
    require("transformers", "race_callback")
    if compute not in COUNTED:
        raise UserError(f"compute: {compute!r} is none of {', '.join(COUNTED)}")
    made = type(
        "RaceCallback", (_RaceEvents, load_entry("transformers:TrainerCallback")), {"__doc__": _RaceEvents.__doc__}
    )
    about = {"study": study, "recipe": recipe, "seed": seed, "budget": budget, **settings}
    return made(about, metric, compute)
