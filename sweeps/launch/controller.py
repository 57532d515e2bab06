"""Controller of a launch: read the members' state, decide, then record, act and notify, in this order.

    commit -> first_actions -> [submit -> poll -> next_actions -> wished_actions -> look] until every member has ended

Decisions are made in `launch.decisions`; `Records` writes, and `Audience` notifies the observers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Executor, Launch, Outcome
from sweeps.executor.failure import BLAMES_NODE
from sweeps.executor.node.attempts import attempts
from sweeps.launch import decisions
from sweeps.launch.decider import Decider, Wish
from sweeps.launch.decisions import Action, Adopt, Ended, Finish, GiveUp, Hold, Policy, Retry, Stop, Submit
from sweeps.launch.labels import check_labels
from sweeps.launch.ledger import RUNS_DIR, MemberState, after, member_fields, read_frozen
from sweeps.launch.members import Members
from sweeps.launch.node_blacklist import NodeBlacklist
from sweeps.launch.observer import Observer
from sweeps.launch.rollback import Rollback
from sweeps.redact import redact
from sweeps.run.files import make_private, write_atomically
from sweeps.run.interruption import STOP_FILE, let_go_on, stop_asked
from sweeps.run.lease import LeaseLostError
from sweeps.run.progress import check_own, is_done, why_failed, why_final, written
from sweeps.run.spec import SPEC_FILE, RunSpec, Texts, check_distinct

WRITERS = 8  # threads that write specifications


class Controller:
    """Control loop over a study whose lease this process holds; made by `Study.prepare`.

    Args:
        records: state of the members, and where it is written.
        executor: starts members and reports how they ended.
        audience: the observers.
        policy: rules for running members again.
        decider: decides which members run; None if all unfinished members do.
    """

    def __init__(
        self, records: Records, executor: Executor, audience: Audience, policy: Policy, decider: Decider | None
    ) -> None:
        self.records, self._executor, self._audience = records, executor, audience
        self._policy, self._decider = policy, decider
        self._files: Mapping[Path, str] = {}
        self._number = len(records.specs)
        self._blacklist = NodeBlacklist(self._nodes_at_work)
        for entry in records.study.ledger.entries():
            self._blacklist.note(entry)
        self._waiting: list[str] = []  # members to submit, in this order
        self._held: list[str] = []  # members that the decider does not want to run now
        self._stop_reasons: dict[str, str] = {}  # members asked to stop, with the reason
        self._before: dict[str, tuple[int, int]] = {}  # sizes of journal and log when it was submitted

    def commit(self, files: Mapping[Path, str] | None = None, detach: bool = False) -> dict[str, MemberState]:
        """Run every member that is not done; a failing member does not affect others.

        Args:
            files: texts of files to write once the launch is accepted, with mode 0600.
            detach: return once everything possible is submitted, and members that ended meanwhile are handled.

        Returns:
            The state of each member, by identity.

        Raises:
            UserError: the executor refuses the first members; the folder is restored as it was.
        """
        self._files = files or {}
        try:
            self._begin()
            self._ask_decider()
            if not self._waiting:
                self._accept()
            while self._waiting or self._executor.running():
                self.records.check_lease()  # before making folders: the study may have been moved
                self._submit()
                ended = [self._read(outcome) for outcome in self._executor.poll(timeout_s=1.0)]
                self._carry_out(decisions.next_actions(self.records.states, ended, self._policy))
                self._ask_decider()
                if detach and self._executor.settled():
                    self._submit()
                    self._audience.look(self._executor)
                    break
                self._audience.look(self._executor)
            self._accept()
        except (UserError, OSError):
            raise  # a refusal, if nothing was accepted: `Study.prepare` rolls back
        except BaseException:
            self.records.rollback.forget()  # interrupted: the same command continues it
            raise
        return {run: self.records.states[run] for run in self.records.specs}

    def _begin(self) -> None:
        """Plan new members, find running ones again, and queue the others for submission."""
        for name in self._decider.files if self._decider is not None else []:
            path = self.records.study.directory / name
            self.records.rollback.put_back(path, path.read_bytes() if path.exists() else None)
        done = {run: self.records.why_final(run) for run in self.records.specs if self.records.is_done(run)}
        actions = decisions.first_actions(self.records.members(), done, self._policy)
        wanted = [action for action in actions if isinstance(action, Submit | Adopt)]
        self.records.plan([self.records.specs[action.run] for action in wanted])  # the budget may have grown
        self._carry_out(actions)
        self._adopt([action.run for action in wanted if isinstance(action, Adopt)])

    def _adopt(self, runs: Sequence[str]) -> None:
        """Let the executor follow the members that an earlier process submitted. Queue again those it does not find."""
        states = [self.records.states[run] for run in runs]
        launches = [replace(self._launch(state.run), submission=state.submission, job=state.job) for state in states]
        jobs = self._executor.adopt(launches) if launches else {}
        for launch in launches:
            if launch.run in jobs and launch.job is None:
                # The process that submitted it died before it recorded the job.
                job = {"submission": launch.submission, "job": jobs[launch.run]}
                self.records.note("started", [{"run": launch.run, **job}])
        for run in jobs:
            self._before[run] = (0, 0)
            # An earlier process's decider asked it to stop: ending for that reason is not a failure.
            if (why := stop_asked(self.records.run_dir(run))) is not None:
                self._stop_reasons[run] = why
        waiting = {*self._waiting, *runs} - jobs.keys()
        self._waiting = [run for run in self.records.specs if run in waiting]

    # --- submit ----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Submit as many queued members as the executor accepts."""
        if not self._waiting:
            return
        # Excluded nodes as of now; there may be more than when the member failed.
        out = self._blacklist.out(self.records.study.ledger.now())
        waiting = [self._launch(run, out) for run in self._waiting]
        self._waiting = []
        while waiting and (size := self._executor.next_batch(waiting)) > 0:
            batch, waiting = self._unchanged(waiting[:size]), waiting[size:]
            if batch:
                taken = self._start(batch)
                # Members that were not accepted come back, in smaller batches or after a pause, as `next_batch`
                # decides.
                waiting = [launch for launch in batch if launch.run not in taken] + waiting
                self._audience.look(self._executor)
        self._waiting = [launch.run for launch in waiting]

    def _launch(self, run: str, out: Sequence[str] = ()) -> Launch:
        """Make a member's launch for the executor; it must avoid its excluded nodes and `out`."""
        state = self.records.states[run]
        excluded = tuple(dict.fromkeys([*state.excluded, *out]))
        return Launch(
            run=run,
            run_dir=self.records.run_dir(run),
            spent=state.spent,
            excluded=excluded,
            unanswered=state.unanswered,
            layout=self.records.specs[run].layout,
        )

    def _unchanged(self, batch: Sequence[Launch]) -> list[Launch]:
        """Return the members whose specification matches the ledger's checksum; give up the others."""
        valid = []
        for launch in batch:
            try:
                read_frozen(launch.run_dir, self.records.states[launch.run])
                valid.append(launch)
            except UserError as error:
                failure = {"kind": "error", "reason": str(error)}
                self._carry_out([GiveUp(launch.run, "failed", failure, "failed", str(error))])
        return valid

    def _start(self, batch: Sequence[Launch]) -> Mapping[str, str | None]:
        """Submit a batch under a new name; return the accepted members' jobs."""
        submission = uuid.uuid4().hex[:12]
        if self._executor.outlives:
            # Recorded before the scheduler is called: after a crash the next process looks for the jobs by this name.
            self.records.note("submitting", [{"run": launch.run, "submission": submission} for launch in batch])
        for launch in batch:
            self._before[launch.run] = written(launch.run_dir)
            self.records.let_go_on(launch.run_dir)
        jobs = self._executor.submit(submission, batch)
        if jobs or self.records.new:  # a new study has nothing to lose if the submission is postponed
            self._accept()
        else:
            self.records.rollback.forget()  # the scheduler may have created jobs
        named = {"submission": submission} if self._executor.outlives else {}
        taken = [launch.run for launch in batch if launch.run in jobs]
        started = [{"run": run, **named, **({"job": jobs[run]} if jobs[run] else {})} for run in taken]
        self.records.note("started", started)
        return jobs

    def _accept(self) -> None:
        """Mark the launch as accepted, once; its files are written before anything else can be lost."""
        if not self.records.accepted:
            self.records.accept(self._files)
            for observer in self._audience.observers:
                observer.accepted()

    # --- read ------------------------------------------------------------------------------------------------------

    def _read(self, outcome: Outcome) -> Ended:
        """Determine how an attempt ended, from the executor, its journal and log, and the history of its node."""
        run, run_dir, now = outcome.run, self.records.run_dir(outcome.run), self.records.study.ledger.now()
        was_asked = self._stop_reasons.pop(run, None) is not None or outcome.earlier
        if self.records.is_done(run) and (outcome.exit_code == 0 or self._executor.outlives):
            self._blacklist.note({"run": run, "event": "finished", "time": now, "node": outcome.node})
            return Ended(run, done=True, reason=self.records.why_final(run) or "", node=outcome.node)
        reason = outcome.reason or why_failed(run_dir, outcome.how, self._before[run])
        kind = outcome.kind or ("killed" if outcome.exit_code < 0 else "error")
        node = outcome.node if kind in BLAMES_NODE else None
        failure = {"run": run, "kind": kind, "reason": redact(reason), "node": node}
        self._blacklist.note({**failure, "event": "retried", "time": now})
        excused = self._blacklist.excused(run, now).get(kind, 0)
        return Ended(
            run=run,
            done=False,
            kind=kind,
            reason=reason,
            node=node,
            asked=was_asked,
            earlier=outcome.earlier,
            excused=excused,
        )

    def _nodes_at_work(self) -> set[str]:
        """Return the nodes on which members run, by the attempt records of their jobs."""
        nodes = set()
        for run in set(self._executor.running()) - self._executor.queued():
            submission = self.records.states[run].submission
            last = attempts(self.records.run_dir(run))[-1:]
            nodes |= {attempt.node for attempt in last if attempt.outcome is None and attempt.submission == submission}
        return nodes

    def _ask_decider(self) -> None:
        """Ask the decider, if there is one, for members to add and for its wish, and carry both out."""
        if self._decider is None:
            return
        self.records.check_lease()
        at_work = self._executor.running()
        self._wish(self._decider)  # a decider looks at the members first, and then adds some
        self._add(self._decider.members(self.records.states))
        wish = self._wish(self._decider)
        actions = decisions.wished_actions(
            self.records.states, wish, at_work, self._stop_reasons, self._waiting, self._held
        )
        self._waiting, self._held = [], []
        self._carry_out(actions)

    def _wish(self, decider: Decider) -> Wish:
        queued = self._executor.queued()
        wish = decider.wish(self.records.states, set(self._executor.running()) - queued, queued)
        for line in wish.messages:
            for observer in self._audience.observers:
                observer.say(line)
        return wish

    def _add(self, specs: Sequence[RunSpec]) -> None:
        """Add members that the decider wants, and queue those that are not done."""
        if not specs:
            return
        self.records.check_lease()
        added = self.records.add(specs)
        for observer in self._audience.observers:
            observer.added(added)
        running = self._executor.running()
        for run in (spec.run for spec in specs):
            if not self.records.is_done(run):
                self._audience.done.discard(run)
                if run not in running:  # else an earlier controller added it, and it is running
                    self._waiting.append(run)
            elif run not in self._audience.done:
                done = {run: self.records.why_final(run)}
                self._carry_out(decisions.first_actions([self.records.states[run]], done, self._policy))

    # --- record, act, tell -----------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Record, act and notify. If this process dies at any point, the ledger has all that was done or reported."""
        self.records.record(actions)
        for action in actions:
            if action.event not in (None, "retried"):  # ended: its earlier failures no longer count
                self._blacklist.over(action.run)
            match action:
                case Submit(run):
                    self._waiting.append(run)
                case Hold(run):
                    self._held.append(run)
                case Stop(run):
                    self.records.check_lease()
                    self._stop_reasons[run] = action.reason
                    self._executor.stop([run], action.reason)
        self._audience.tell(actions)

    def unfinished(self, error: BaseException | None = None) -> tuple[int, int]:
        """Count the members that are not done and not running, and those that continue without this process.

        Args:
            error: exception that ended this process's work on the study; None if it completed.
        """
        number = len(self.records.specs)
        if isinstance(error, LeaseLostError):  # another process runs the study now and reports for it
            return 0, number
        if (
            error is not None and self.records.rollback.pending
        ):  # all is rolled back, including members that a decider added
            return (self._number, 0) if self.records.new else (0, number)
        states = self.records.states if error is None else self.records.study.ledger.fold()
        member_states = [states[run].state for run in self.records.specs if run in states]
        if error is None:
            return member_states.count("failed"), sum(
                state not in ("finished", "failed", "stopped") for state in member_states
            )
        # If interrupted, unfinished members count as failed, except those being submitted or to be found again.
        left = sum(state in ("submitting", "started") for state in member_states) if self._executor.outlives else 0
        return number - left - len(self._audience.done) - len(self._audience.stopped), left


class Audience:
    """Observers of a launch, and the ends of members reported to them.

    Args:
        observers: notified as members start and end.
        records: members of the launch.

    Attributes:
        done, failed, stopped: members reported to have ended so.
    """

    def __init__(self, observers: Sequence[Observer], records: Records) -> None:
        self.observers, self._records = observers, records
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.stopped: set[str] = set()
        self._queued: dict[str, bool] = {}  # by running or queued member, the last report

    def tell(self, actions: Sequence[Action]) -> None:
        """Notify the observers of actions that were carried out, in order."""
        for action in actions:
            self._count(action)
            spec, run_dir = self._records.specs[action.run], self._records.run_dir(action.run)
            for observer in self.observers:
                match action:
                    case Retry():
                        observer.retried(spec, run_dir, action.reason)
                    case Hold(reason=str(reason)):
                        observer.paused(spec, run_dir, reason)
                    case Finish():
                        observer.ended(spec, run_dir, "finished", action.reason)
                    case GiveUp():
                        observer.ended(spec, run_dir, action.state, action.reason)

    def _count(self, action: Action) -> None:
        if not isinstance(action, Stop):  # it no longer runs
            self._queued.pop(action.run, None)
        match action:
            case Submit(run):
                self.failed.discard(run)
            case Finish(run):
                self.done.add(run)
            case GiveUp(run):
                (self.stopped if action.state == "stopped" else self.failed).add(run)

    def look(self, executor: Executor) -> None:
        """Notify the observers of members that are queued or have started, and of the counts."""
        queued, running = executor.queued(), executor.running()
        for run in running:
            is_queued = run in queued
            if self._queued.get(run) != is_queued:
                self._queued[run] = is_queued
                spec, run_dir = self._records.specs[run], self._records.run_dir(run)
                for observer in self.observers:
                    (observer.queued if is_queued else observer.started)(spec, run_dir)
        active = [self._records.specs[run] for run in running if run not in queued]
        for observer in self.observers:
            observer.tick(active, len(queued), len(self.done), len(self.failed))


class Records:
    """Specifications, ledger and files of a launch, with the states folded from the ledger.

    Args:
        study: study to run; members that its decider adds become part of it.
        states: state of each run in the ledger, by identity; kept up to date.
        check_lease: raises if another process has taken over the study; nothing is written then.
        rollback: undoes the writes of a refused launch.

    Attributes:
        specs: specification of each member, by identity.
        new: whether the study had no member before this launch.
        accepted: whether the executor accepted members, or none had to be submitted; the launch is then not undone.
    """

    def __init__(
        self, study: Members, states: dict[str, MemberState], check_lease: Callable[[], None], rollback: Rollback
    ) -> None:
        self.study, self.check_lease, self.rollback = study, check_lease, rollback
        self.specs = {spec.run: spec for spec in study.specs}
        self.states = states
        self.new = not states
        self.accepted = False
        self._size = study.ledger.size()

    def run_dir(self, run: str) -> Path:
        """Return the folder that a member writes to."""
        return self.study.run_dir(self.specs[run])

    def is_done(self, run: str) -> bool:
        """Return whether a member's journal shows its whole budget, or a final end before it."""
        return is_done(self.run_dir(run), self.specs[run].steps, run)

    def why_final(self, run: str) -> str | None:
        """Return why a finished member cannot be continued; None if its budget is spent."""
        return why_final(self.run_dir(run))

    def members(self) -> list[MemberState]:
        """Return the members' states in the study's order; for a new member, the state it will have once planned."""
        return [self.states.get(run) or _planned(spec) for run, spec in self.specs.items()]

    def add(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Add members that are new, or have a larger budget; return those that were not part of the study.

        Raises:
            UserError: a label belongs to another curve, or a member's folder has another run's journal.
        """
        new = [spec for spec in check_distinct(specs) if spec.run not in self.states]
        check_labels(self.study.directory / RUNS_DIR, new, self.states)
        for spec in specs:
            check_own(self.study.run_dir(spec), spec.run)
        known = {spec.run for spec in self.study.specs}
        added = [spec for spec in specs if spec.run not in known]
        self.study.specs = [*self.study.specs, *added]
        self.specs |= {spec.run: spec for spec in specs}
        self.plan(specs)
        return added

    def plan(self, frozen: Sequence[RunSpec]) -> None:
        """Freeze specifications, then record new members, and those whose checksum changed.

        They are frozen before the ledger names them, so that a later process finds every planned specification.
        """
        self._freeze(frozen)
        # Registered again, last, so that a rollback cuts the ledger before it removes specifications named in it.
        self.rollback.call(self.study.ledger.cut, self._size)
        new = [spec for spec in self.specs.values() if spec.run not in self.states]
        checksums = {spec.run: spec.checksum() for spec in (*new, *frozen)}
        known = [spec for spec in frozen if spec.run in self.states]
        changed = [spec for spec in known if self.states[spec.run].checksum != checksums[spec.run]]
        self.note("planned", [member_fields(spec, checksums[spec.run]) for spec in (*new, *changed)])

    def _freeze(self, specs: Sequence[RunSpec]) -> None:
        """Write specifications in parallel threads, because each waits for an fsync on a remote file system."""
        texts = Texts()

        def freeze(spec: RunSpec) -> None:
            run_dir = self.study.run_dir(spec)
            self.rollback.remove(run_dir)
            if (replaced := spec.write(run_dir, texts)) is not None:
                self.rollback.put_back(run_dir / SPEC_FILE, replaced)

        self.rollback.remove(self.study.directory / RUNS_DIR)
        pool = ThreadPoolExecutor(WRITERS)
        try:
            for _ in pool.map(freeze, specs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)

    def record(self, actions: Sequence[Action]) -> None:
        """Append the entries of actions to the ledger; those of finished members last, in one write.

        Thousands may finish at the same time, and each write waits for an fsync. If a crash loses these entries, the
        journals still show that the members are done.
        """
        for action in actions:
            if action.event is not None and not isinstance(action, Finish):
                self.note(action.event, [action.entry])
        self.note(
            "finished", [action.entry for action in actions if isinstance(action, Finish) and action.event is not None]
        )

    def note(self, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append entries to the ledger after checking the lease, then update the states in memory."""
        if entries:
            self.check_lease()
        self.study.ledger.append_all(event, entries)
        for entry in entries:
            run = entry["run"]
            self.states[run] = after(self.states.get(run) or _planned(self.specs[run]), event, entry)

    def let_go_on(self, run_dir: Path) -> None:
        """Remove an earlier stop request of a member that is about to be submitted."""
        path = run_dir / STOP_FILE
        if path.exists():
            self.rollback.put_back(path, path.read_bytes())
            let_go_on(run_dir)

    def accept(self, files: Mapping[Path, str]) -> None:
        """End the possibility of a rollback, and write the launch's files with mode 0600."""
        self.accepted = True
        self.rollback.forget()
        for path, text in files.items():
            make_private(path.parent)
            write_atomically(path, text, mode=0o600)


def _planned(spec: RunSpec) -> MemberState:
    return MemberState(spec.run, spec.recipe, spec.seed, curve=spec.curve)
