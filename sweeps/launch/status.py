"""Status of a study's members, from the ledger, the scheduler, attempt records and journals.

Read-only: nothing is submitted, decided or written here.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.as_json import AsJson, as_json
from sweeps.errors import UserError
from sweeps.executor.clusters import QueuedJob, Scheduler
from sweeps.executor.node.attempts import Attempt, attempts
from sweeps.launch.ledger import LEDGER_FILE, RUNS_DIR, Ledger, MemberState
from sweeps.launch.members import LEASE_NAME
from sweeps.redact import redact
from sweeps.run.files import read_end
from sweeps.run.journal import JOURNAL_FILE, LOG_FILE, find_runs
from sweeps.run.lease import BEAT_S, heartbeat_time, held_leases, holder_facts, is_held
from sweeps.run.progress import final_reason, is_done, journal_damage, journal_or_none, last_metrics, looks_whole
from sweeps.run.provenance import changes_line
from sweeps.run.spec import budget_of
from sweeps.run.writer import BEAT_S as WRITER_BEAT_S
from sweeps.run.writer import EXPIRY_S

# States of members, in order of importance to a reader.
STATES = ("failed", "cancelled", "stopped", "ended", "running", "queued", "waiting", "finished")
# Seconds to watch a study's lease: long enough for two heartbeats of a controller.
_WATCH_S = 2 * BEAT_S + 1
_WATCH_WRITERS_S = 2 * WRITER_BEAT_S + 1  # the same for the leases of runs
_GONE = "the process that started it is gone; the same command continues it"
_ENGINE_IDLE = re.compile(r"live/engine(\d+)_idle")


@dataclass(frozen=True)
class SideView(AsJson):
    """Status of the trainer or of one engine of a run with `driver=live`, as `scalerl status` shows it.

    Attributes:
        side: `trainer`, or `engine 0` and so on.
        where: node of the trainer, or address of an engine; None if the run has not reported it.
        state: the engine's state in the run's last heartbeat: `up`, `starting`, `connecting` or `left out`. For the
            trainer, and for engines of a member that does not run, the member's state.
        idle: fraction of wall-clock time, in [0, 1], without work, up to the newest step; None before the first step.
        tokens_s: tokens per second that the trainer has trained on or the engine has sampled; None before the first
            step.
    """

    side: str
    where: str | None
    state: str
    idle: float | None
    tokens_s: float | None


@dataclass(frozen=True)
class MemberView(AsJson):
    """Status of one member, as `scalerl status` shows it.

    Attributes:
        state: `finished`; `running`; `queued` (a job waits, for the first time or again); `waiting` (not submitted);
            `ended` (its job or process is gone, and no controller has handled that yet); `stopped` (the study no longer
            wants it); `failed`; `cancelled`.
        step, steps: newest optimizer step, and the budget in steps; None if unknown.
        pass_rate: pass rate of the newest evaluation in [0, 1]; None before the first.
        attempts: number of jobs started for the member, including restarts.
        job, node: scheduler's id and node of the newest attempt; None without one.
        kind, reason: why the member failed, waits or was retried; None otherwise.
        doing, idle_s: last recorded activity of a running member, and seconds since then; None if it is not running.
        code: where the run resumed with changed code: the steps and the changes; None if it never did.
        sides: trainer and engines of a live run (`driver=live`); empty for others.
    """

    run: str
    recipe: str
    seed: int
    state: str
    step: int | None
    steps: int | None
    pass_rate: float | None
    attempts: int
    job: str | None = None
    node: str | None = None
    kind: str | None = None
    reason: str | None = None
    doing: str | None = None
    idle_s: float | None = None
    code: str | None = None
    sides: Sequence[SideView] = ()


def overview(study: Path, scheduler: Scheduler | None = None) -> list[MemberView]:
    """Return the status of the members of a study, or of the runs in any folder.

    Args:
        study: folder of the study, or any folder with runs.
        scheduler: scheduler of the cluster that runs the study; None without one, or if it should not be queried.

    Raises:
        UserError: the folder has neither a ledger nor a run.
    """
    if not (study / LEDGER_FILE).is_file():
        views = _views_of_journals(find_runs(study))
        if not views:
            raise UserError(f"{study}: no study here; give the folder that a --multirun wrote to (outputs/<study>)")
        return views
    queue = scheduler.queue() if scheduler is not None else None
    states = Ledger(study).fold().values()
    # Watch for a controller's heartbeat only if some state depends on it: if the controller is on another machine, this
    # takes seconds.
    uncertain = [state for state in states if state.job is None and state.state in ("submitting", "started")]
    controlled = bool(uncertain) and bool(held_leases([study], LEASE_NAME, _WATCH_S))
    # A controller that was killed just after it called sbatch has not recorded the job, which may be running.
    written = _with_live_writer({study / RUNS_DIR / state.run for state in uncertain if state.submission is not None})
    views = [_view(study, state, queue, controlled, written) for state in states]
    # Runs of a user's own training loop (`sweeps.stopping`) may be in the same folder.
    launched = {state.run for state in states}
    unlaunched = [
        run_dir for run_dir in find_runs(study / RUNS_DIR) if run_dir.name not in launched and _reports_itself(run_dir)
    ]
    return [*views, *_views_of_journals(unlaunched)]


def counts(views: Sequence[MemberView]) -> str:
    """Format the number of members in each state, as one line."""
    numbers = Counter(view.state for view in views)
    return ", ".join(f"{numbers[state]} {state}" for state in reversed(STATES) if numbers[state])


def log_tail(study: Path, view: MemberView, lines: int = 8) -> list[str]:
    """Return the last lines of a member's log, redacted; empty if there is no log."""
    text = read_end(study / RUNS_DIR / view.run / LOG_FILE, 16384)
    # Redact the whole text, because a private key has several lines.
    return [line.rstrip() for line in redact(text).splitlines() if line.strip()][-lines:]


def _view(
    study: Path, state: MemberState, queue: Mapping[str, QueuedJob] | None, controlled: bool, written: Set[Path]
) -> MemberView:
    """Return a member's status.

    Args:
        study: the study's folder.
        state: the member's state from the ledger.
        queue: jobs in the scheduler's queue, by id; None if no scheduler answers.
        controlled: whether a controller of the study is alive.
        written: folders of members that a living process writes to, although their job is not recorded.
    """
    run_dir = study / RUNS_DIR / state.run
    steps = budget_of(run_dir)
    past_attempts = attempts(run_dir)
    metrics = last_metrics(run_dir)
    name, reason = _state(state, run_dir, steps, past_attempts, queue, controlled, run_dir in written)
    facts = (holder_facts(run_dir) or {}) if name == "running" else {}
    doing, idle_s = _last_activity(run_dir, facts)
    code, missing = _resume_traces(run_dir)
    return MemberView(
        run=state.run,
        recipe=state.recipe,
        seed=state.seed,
        state=name,
        step=int(metrics["step"]) if "step" in metrics else None,
        steps=steps,
        pass_rate=_pass_rate(metrics),
        attempts=max(state.attempts, len(past_attempts)),
        job=state.job,
        node=past_attempts[-1].node if past_attempts else None,
        kind=state.kind if name != "finished" else None,
        reason=reason or _damage(run_dir, state.run, name) or missing,
        doing=doing,
        idle_s=idle_s,
        code=code,
        sides=_sides(name, facts, metrics),
    )


def _damage(run_dir: Path, run: str, state: str) -> str | None:
    """Describe damage in the journal of a member that is not running; None if there is none."""
    if state in ("running", "queued") or (state == "finished" and looks_whole(run_dir)):
        return None
    return journal_damage(run_dir, run)


def _state(
    state: MemberState,
    run_dir: Path,
    steps: int | None,
    past_attempts: Sequence[Attempt],
    queue: Mapping[str, QueuedJob] | None,
    controlled: bool,
    written: bool,
) -> tuple[str, str | None]:
    """Return a member's state and the reason for it, see `MemberView`. `written`: whether a process writes to it."""
    if steps is not None and is_done(run_dir, steps, state.run):
        return "finished", final_reason(run_dir)
    if state.state == "failed":
        return (state.kind if state.kind in ("cancelled", "stopped") else "failed"), state.reason
    if state.state == "stopped":
        return "stopped", state.reason
    if state.state in ("planned", "retried", "finished"):
        return "waiting", state.reason
    if state.job is None:
        # A member without a job runs on this machine, and only as long as the process that started it.
        if state.submission is None:
            return ("running", state.reason) if controlled else ("ended", state.reason or _GONE)
        if written:
            return "running", None
        # The job's id is unknown, but its name ends with the submission's name.
        jobs = [] if controlled else [job for job in (queue or {}).values() if job.name.endswith(state.submission)]
        if any(job.shown[0] != "ended" for job in jobs):
            return "queued", "was being submitted; a job of its submission is in the queue"
        return ("waiting" if controlled else "ended"), "was being submitted"
    info = (queue or {}).get(state.job)
    # Clusters reuse job ids: the job is this member's only if its name ends with the submission's name.
    if info is not None and state.submission and info.name.endswith(state.submission):
        return info.shown
    if queue is None:
        # No scheduler answers: go by the job's last attempt record.
        running = bool(past_attempts) and past_attempts[-1].outcome is None and past_attempts[-1].job == state.job
        return ("running" if running else "queued"), "last known state; the scheduler does not answer"
    return "ended", "the job is no longer in the queue"


def _sides(state: str, facts: Mapping[str, Any], metrics: Mapping[str, float]) -> tuple[SideView, ...]:
    """Return the status of trainer and engines of a live run; empty for other runs.

    Args:
        state: the member's state.
        facts: content of the run's last heartbeat.
        metrics: metrics of the run's newest step.
    """
    reported = facts.get("engines", ())
    measured = {int(match[1]) for key in metrics if (match := _ENGINE_IDLE.fullmatch(key))}
    if not reported and not measured:
        return ()
    sides = [_side("trainer", facts.get("host"), state, "live/trainer", metrics)]
    for number in range(max(len(reported), max(measured, default=-1) + 1)):
        engine = reported[number] if number < len(reported) else {}
        where, engine_state = engine.get("where"), str(engine.get("state", state))
        sides.append(_side(f"engine {number}", where, engine_state, f"live/engine{number}", metrics))
    return tuple(sides)


def _side(side: str, where: str | None, state: str, prefix: str, metrics: Mapping[str, float]) -> SideView:
    return SideView(side, where, state, metrics.get(f"{prefix}_idle"), metrics.get(f"{prefix}_tokens_s"))


def _last_activity(run_dir: Path, facts: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """Return a running member's last activity and the seconds since then, from its last heartbeat `facts`."""
    if "idle_s" not in facts:
        return None, None
    # Clocks of the file server and of this machine are compared: precise enough for display.
    age_s = max(0.0, time.time() - heartbeat_time(run_dir))
    return str(facts.get("doing")), float(facts["idle_s"]) + age_s


def _resume_traces(run_dir: Path) -> tuple[str | None, str | None]:
    """Describe what a run's journal shows of its resumes.

    Returns:
        A line on code that changed between records, and a line on steps without records; None for each if there are
        none.
    """
    try:
        raw = (run_dir / JOURNAL_FILE).read_bytes()
    except OSError:
        return None, None
    # Parse only journals with a resume, because parsing thousands of journals takes a while.
    view = journal_or_none(run_dir) if b'"kind":"resume"' in raw else None
    if view is None:
        return None, None
    changes = [f"from step {max(0, change.step)}: {changes_line(change.what)}" for change in view.code_changes]
    return "; ".join(changes) or None, view.missing


def _reports_itself(run_dir: Path) -> bool:
    """Return whether the run is one of a user's own training loop (`sweeps.stopping`), which no ledger contains."""
    view = journal_or_none(run_dir)
    return view is not None and bool(view.header.get("loop"))


def _pass_rate(metrics: Mapping[str, float]) -> float | None:
    return next((value for key, value in metrics.items() if key.endswith("/pass_rate")), None)


def _views_of_journals(run_dirs: Sequence[Path]) -> list[MemberView]:
    """Return the status of runs without a ledger, from their journals and their writers' leases.

    A run without a lease, such as a script's, counts as running until its journal has an end.
    """
    views = {run_dir: _view_of_journal(run_dir) for run_dir in run_dirs}
    leased = {run_dir for run_dir, view in views.items() if view.state == "running" and heartbeat_time(run_dir) > 0}
    # Read the journals of runs without a writer again: they may have finished in the meantime.
    for run_dir in leased - _with_live_writer(leased):
        views[run_dir] = _view_of_journal(run_dir, without_end="ended")
    return list(views.values())


def _with_live_writer(run_dirs: Set[Path]) -> Set[Path]:
    """Return the runs that a living process writes to, by their leases."""
    # A recent heartbeat from another machine is accepted: waiting for the next one would take up to 15 s.
    now = time.time()
    recent = {each for each in run_dirs if is_held(each, "writer") is None and now - heartbeat_time(each) < EXPIRY_S}
    return recent | held_leases(run_dirs - recent, "writer", _WATCH_WRITERS_S)


def _view_of_journal(run_dir: Path, without_end: str = "running") -> MemberView:
    """Return the status of a run without a ledger; its state is `without_end` if its journal has no end."""
    view = journal_or_none(run_dir)
    metrics = last_metrics(run_dir)
    header = view.header if view is not None else {}
    code, missing = _resume_traces(run_dir)
    states = {"finished": "finished", "failed": "failed", "stopped": "stopped"}
    # A user's own loop that finished with a reason was stopped by its race.
    stopped = view is not None and view.status == "finished" and view.reason is not None and header.get("loop")
    state = states.get("stopped" if stopped else view.status, without_end) if view is not None else "waiting"
    reason = (view.reason or missing) if view is not None else journal_damage(run_dir, run_dir.name)
    return MemberView(
        run=str(header.get("run", run_dir.name)),
        recipe=str(header.get("recipe", run_dir.name)),
        seed=int(header.get("seed", 0)),
        state=state,
        step=int(metrics["step"]) if "step" in metrics else None,
        steps=None,
        pass_rate=_pass_rate(metrics),
        attempts=1,
        reason=_GONE if state == "ended" else reason,
        code=code,
        sides=_sides(state, (holder_facts(run_dir) or {}) if state == "running" else {}, metrics),
    )


def to_json(study: Path, views: Sequence[MemberView]) -> dict[str, Any]:
    """Return the object of `scalerl status --json`: counts and members."""
    numbers = Counter(view.state for view in views)
    return {
        "study": str(study),
        "counts": {state: numbers[state] for state in STATES if numbers[state]},
        "members": as_json(views),
    }
