"""Controller of a launch: read the members' state, decide what to do, record it, do it, and notify the observers.

    commit -> first_actions -> [submit -> poll -> next_actions -> wished_actions -> report] until every member has ended

Decisions are made in `launch.decisions`; `Records` writes to disk, and `ObserverNotifier` notifies the observers.
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
from sweeps.launch.decisions import Action, AttemptEnd, Finish, GiveUp, Hold, Policy, Reattach, Retry, Stop, Submit
from sweeps.launch.labels import check_labels
from sweeps.launch.ledger import RUNS_DIR, MemberState, member_fields, read_checked_spec, state_after
from sweeps.launch.members import Members
from sweeps.launch.node_blacklist import NodeBlacklist
from sweeps.launch.observer import Observer
from sweeps.launch.rollback import Rollback
from sweeps.redact import redact
from sweeps.run.files import make_private, write_atomically
from sweeps.run.interruption import STOP_FILE, clear_stop_request, requested_stop
from sweeps.run.lease import LeaseLostError
from sweeps.run.progress import check_journal_owner, file_sizes, final_reason, is_done, why_failed
from sweeps.run.spec import SPEC_FILE, RunSpec, Texts, check_distinct

WRITERS = 8  # number of threads that write specifications


class Controller:
    """Control loop over a study whose lease this process holds. `Study.prepare` makes it.

    Args:
        records: specifications, states and ledger of the members.
        executor: starts members and reports how their attempts ended.
        audience: the observers.
        policy: rules for retrying members.
        decider: decides which members run; None if all unfinished members do.
    """

    def __init__(
        self, records: Records, executor: Executor, audience: ObserverNotifier, policy: Policy, decider: Decider | None
    ) -> None:
        self.records, self._executor, self._audience = records, executor, audience
        self._policy, self._decider = policy, decider
        self._files: Mapping[Path, str] = {}
        self._initial_member_count = len(records.specs)  # number of members before a decider added any
        self._blacklist = NodeBlacklist(self._nodes_at_work)
        for entry in records.study.ledger.entries():
            self._blacklist.add_entry(entry)
        self._waiting: list[str] = []  # members to submit, in this order
        self._held: list[str] = []  # members that the decider does not want to run now
        self._stop_reasons: dict[str, str] = {}  # members asked to stop, with the reason
        self._sizes: dict[str, tuple[int, int]] = {}  # by member, sizes of its journal and log when it was submitted

    def commit(self, files: Mapping[Path, str] | None = None, detach: bool = False) -> dict[str, MemberState]:
        """Run every member that is not done. A member that fails does not affect the others.

        Args:
            files: texts of files, by path, to write with mode 0600 once the launch is accepted.
            detach: whether to return before the members end, as soon as everything that can be submitted now is
                submitted, and the ends of members up to then are handled.

        Returns:
            The state of each member, by identity.

        Raises:
            UserError: the executor refused the first members; the study's folder is restored.
        """
        self._files = files or {}
        try:
            self._begin()
            self._ask_decider()
            if not self._waiting:
                self._accept()
            while self._waiting or self._executor.running():
                self.records.check_lease()  # before folders are made: the study may have been moved away
                self._submit()
                ended = [self._classify(outcome) for outcome in self._executor.poll(timeout_s=1.0)]
                self._carry_out(decisions.next_actions(self.records.states, ended, self._policy))
                self._ask_decider()
                if detach and self._executor.settled():
                    self._submit()
                    self._audience.report(self._executor)
                    break
                self._audience.report(self._executor)
            self._accept()
        except (UserError, OSError):
            raise  # if nothing was accepted yet, `Study.prepare` rolls back
        except BaseException:
            self.records.rollback.commit()  # interrupted: the same command continues the study
            raise
        return {run: self.records.states[run] for run in self.records.specs}

    def _begin(self) -> None:
        """Plan new members, reattach running ones, and queue the others for submission."""
        for name in self._decider.files if self._decider is not None else []:
            path = self.records.study.directory / name
            self.records.rollback.restore_file_on_rollback(path, path.read_bytes() if path.exists() else None)
        done = {run: self.records.why_final(run) for run in self.records.specs if self.records.is_done(run)}
        actions = decisions.first_actions(self.records.members(), done, self._policy)
        wanted = [action for action in actions if isinstance(action, Submit | Reattach)]
        self.records.plan([self.records.specs[action.run] for action in wanted])  # the budget may have grown
        self._carry_out(actions)
        self._reattach([action.run for action in wanted if isinstance(action, Reattach)])

    def _reattach(self, runs: Sequence[str]) -> None:
        """Let the executor follow members that an earlier process submitted. Queue those that it does not find."""
        states = [self.records.states[run] for run in runs]
        launches = [replace(self._launch(state.run), submission=state.submission, job=state.job) for state in states]
        jobs = self._executor.adopt(launches) if launches else {}
        for launch in launches:
            if launch.run in jobs and launch.job is None:
                # The earlier process died after it submitted the member, and before it recorded the job.
                job = {"submission": launch.submission, "job": jobs[launch.run]}
                self.records.append("started", [{"run": launch.run, **job}])
        for run in jobs:
            self._sizes[run] = (0, 0)
            # If an earlier controller asked the member to stop, the member's end is not a failure.
            if (why := requested_stop(self.records.run_dir(run))) is not None:
                self._stop_reasons[run] = why
        waiting = {*self._waiting, *runs} - jobs.keys()
        self._waiting = [run for run in self.records.specs if run in waiting]

    # --- submit ----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        if not self._waiting:
            return
        # Get the list now: it may have grown since the member failed.
        excluded_nodes = self._blacklist.excluded_nodes(self.records.study.ledger.now())
        waiting = [self._launch(run, excluded_nodes) for run in self._waiting]
        self._waiting = []
        while waiting and (size := self._executor.next_batch(waiting)) > 0:
            batch, waiting = self._valid_launches(waiting[:size]), waiting[size:]
            if batch:
                accepted = self._start(batch)
                # Retry members that were not accepted: `next_batch` decides when and in which batch size.
                waiting = [launch for launch in batch if launch.run not in accepted] + waiting
                self._audience.report(self._executor)
        self._waiting = [launch.run for launch in waiting]

    def _launch(self, run: str, excluded_nodes: Sequence[str] = ()) -> Launch:
        """Describe how the executor shall start a member, with nodes to avoid: these, and those on which it failed."""
        state = self.records.states[run]
        excluded = tuple(dict.fromkeys([*state.excluded, *excluded_nodes]))
        return Launch(
            run=run,
            run_dir=self.records.run_dir(run),
            retries_used=state.retries_used,
            excluded=excluded,
            unanswered=state.unanswered,
            layout=self.records.specs[run].layout,
        )

    def _valid_launches(self, batch: Sequence[Launch]) -> list[Launch]:
        """Return the launches whose specification matches the ledger's checksum. Give up the other members."""
        valid = []
        for launch in batch:
            try:
                read_checked_spec(launch.run_dir, self.records.states[launch.run])
                valid.append(launch)
            except UserError as error:
                failure = {"kind": "error", "reason": str(error)}
                self._carry_out([GiveUp(launch.run, "failed", failure, "failed", str(error))])
        return valid

    def _start(self, batch: Sequence[Launch]) -> Mapping[str, str | None]:
        """Submit a batch under a new name; return the job of each accepted member (None without a scheduler)."""
        submission = uuid.uuid4().hex[:12]
        if self._executor.outlives:
            # Recorded before the scheduler is called, so that after a crash the next process finds the jobs by this
            # name.
            self.records.append("submitting", [{"run": launch.run, "submission": submission} for launch in batch])
        for launch in batch:
            self._sizes[launch.run] = file_sizes(launch.run_dir)
            self.records.clear_stop_request(launch.run_dir)
        jobs = self._executor.submit(submission, batch)
        # Without jobs (submission postponed), a new study is accepted too: it has no earlier launch files to overwrite.
        if jobs or self.records.new:
            self._accept()
        else:
            self.records.rollback.commit()  # keep all changes, because the scheduler may have created jobs
        fields = {"submission": submission} if self._executor.outlives else {}
        accepted = [launch.run for launch in batch if launch.run in jobs]
        started = [{"run": run, **fields, **({"job": jobs[run]} if jobs[run] else {})} for run in accepted]
        self.records.append("started", started)
        return jobs

    def _accept(self) -> None:
        """If the launch is not accepted yet: write its files, mark it as accepted, and notify the observers."""
        if not self.records.accepted:
            self.records.accept(self._files)
            for observer in self._audience.observers:
                observer.accepted()

    # --- read ------------------------------------------------------------------------------------------------------

    def _classify(self, outcome: Outcome) -> AttemptEnd:
        """Determine how an attempt ended, from its outcome, the member's journal and log, and the nodes' failures."""
        run, run_dir, now = outcome.run, self.records.run_dir(outcome.run), self.records.study.ledger.now()
        stop_requested = self._stop_reasons.pop(run, None) is not None or outcome.ended_before
        if self.records.is_done(run) and (outcome.exit_code == 0 or self._executor.outlives):
            self._blacklist.add_entry({"run": run, "event": "finished", "time": now, "node": outcome.node})
            return AttemptEnd(run, done=True, reason=self.records.why_final(run) or "", node=outcome.node)
        reason = outcome.reason or why_failed(run_dir, outcome.how, self._sizes[run])
        kind = outcome.kind or ("killed" if outcome.exit_code < 0 else "error")
        node = outcome.node if kind in BLAMES_NODE else None
        failure = {"run": run, "kind": kind, "reason": redact(reason), "node": node}
        self._blacklist.add_entry({**failure, "event": "retried", "time": now})
        excused = self._blacklist.count_excused(run, now).get(kind, 0)
        return AttemptEnd(
            run=run,
            done=False,
            kind=kind,
            reason=reason,
            node=node,
            stop_requested=stop_requested,
            ended_before=outcome.ended_before,
            excused=excused,
        )

    def _nodes_at_work(self) -> set[str]:
        """Return the nodes on which members run now, according to their attempt records."""
        nodes = set()
        for run in set(self._executor.running()) - self._executor.queued():
            submission = self.records.states[run].submission
            last = attempts(self.records.run_dir(run))[-1:]
            nodes |= {attempt.node for attempt in last if attempt.outcome is None and attempt.submission == submission}
        return nodes

    def _ask_decider(self) -> None:
        """Ask the decider, if there is one, which members to add, run, pause or end, and carry that out."""
        if self._decider is None:
            return
        self.records.check_lease()
        at_work = self._executor.running()
        self._wish(self._decider)  # before `members`, because this lets the decider read the journals
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

    # --- record, act, notify ---------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Record the actions, carry them out, and notify the observers.

        The ledger is written first: even if this process dies, it contains everything that was done or reported.
        """
        self.records.record(actions)
        for action in actions:
            if action.event not in (None, "retried"):  # the member has ended, so its earlier failures no longer count
                self._blacklist.reset_failures(action.run)
            match action:
                case Submit(run):
                    self._waiting.append(run)
                case Hold(run):
                    self._held.append(run)
                case Stop(run):
                    self.records.check_lease()
                    self._stop_reasons[run] = action.reason
                    self._executor.stop([run], action.reason)
        self._audience.notify(actions)

    def count_failed_and_continuing(self, error: BaseException | None = None) -> tuple[int, int]:
        """Count failed members, and members that continue without this process; called when it leaves the study.

        Args:
            error: exception that ended this process's work on the study; None if it completed. After an exception,
                members that are neither done nor running count as failed.
        """
        number = len(self.records.specs)
        if isinstance(error, LeaseLostError):  # another process has taken over the study and will report failures
            return 0, number
        if error is not None and self.records.rollback.pending:
            # Everything is rolled back, including members that a decider added.
            return (self._initial_member_count, 0) if self.records.new else (0, number)
        states = self.records.states if error is None else self.records.study.ledger.fold()
        member_states = [states[run].state for run in self.records.specs if run in states]
        if error is None:
            return member_states.count("failed"), sum(
                state not in ("finished", "failed", "stopped") for state in member_states
            )
        # Members whose jobs continue on a cluster do not count as failed.
        left = sum(state in ("submitting", "started") for state in member_states) if self._executor.outlives else 0
        return number - left - len(self._audience.done) - len(self._audience.stopped), left


class ObserverNotifier:
    """The observers of a launch, with a record of what was reported to them.

    Args:
        observers: notified as members start and end.
        records: members of the launch.

    Attributes:
        done, failed, stopped: identities of members that were reported as done, as failed or cancelled, and as stopped.
    """

    def __init__(self, observers: Sequence[Observer], records: Records) -> None:
        self.observers, self._records = observers, records
        self.done: set[str] = set()
        self.failed: set[str] = set()
        self.stopped: set[str] = set()
        self._queued: dict[str, bool] = {}  # by member that has not ended: whether it was last reported as queued

    def notify(self, actions: Sequence[Action]) -> None:
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
        if not isinstance(action, Stop):  # only after a stop request does the member still run
            self._queued.pop(action.run, None)
        match action:
            case Submit(run):
                self.failed.discard(run)
            case Finish(run):
                self.done.add(run)
            case GiveUp(run):
                (self.stopped if action.state == "stopped" else self.failed).add(run)

    def report(self, executor: Executor) -> None:
        """Report members that were queued or started since the last call, then the counts, to the observers."""
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
    """Specifications, ledger and files of a launch, and the members' states, which follow from the ledger.

    Args:
        study: study to run. Members that its decider adds become part of it.
        states: state of each member in the ledger, by identity; updated in place.
        check_lease: raises if another process has taken over the study, so that this process writes nothing more.
        rollback: undoes the writes of a refused launch.

    Attributes:
        specs: specification of each member, by identity.
        new: whether the study had no member before this launch.
        accepted: whether the executor accepted members, or none had to be submitted; from then on nothing is undone.
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
        """Return whether a member's journal reaches its budget, or has a final end before it."""
        return is_done(self.run_dir(run), self.specs[run].steps, run)

    def why_final(self, run: str) -> str | None:
        """Return why a member ended before its budget and cannot be continued; None if it reached its budget."""
        return final_reason(self.run_dir(run))

    def members(self) -> list[MemberState]:
        """Return the members' states in the study's order; `planned` for a member that is not in the ledger yet."""
        return [self.states.get(run) or _planned(spec) for run, spec in self.specs.items()]

    def add(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Add members that are new or have a larger budget. Return those that were not part of the study.

        Raises:
            UserError: a label belongs to another curve, or a member's folder has another run's journal.
        """
        new = [spec for spec in check_distinct(specs) if spec.run not in self.states]
        check_labels(self.study.directory / RUNS_DIR, new, self.states)
        for spec in specs:
            check_journal_owner(self.study.run_dir(spec), spec.run)
        known = {spec.run for spec in self.study.specs}
        added = [spec for spec in specs if spec.run not in known]
        self.study.specs = [*self.study.specs, *added]
        self.specs |= {spec.run: spec for spec in specs}
        self.plan(specs)
        return added

    def plan(self, frozen: Sequence[RunSpec]) -> None:
        """Write these specifications, then record new members and changed checksums in the ledger.

        In this order, every member in the ledger has a specification, even if this process dies in between.
        """
        self._write_specs(frozen)
        # Registered after the writing of the specifications: a rollback runs in reverse order, so it cuts the ledger
        # first.
        self.rollback.call(self.study.ledger.cut, self._size)
        new = [spec for spec in self.specs.values() if spec.run not in self.states]
        checksums = {spec.run: spec.checksum() for spec in (*new, *frozen)}
        known = [spec for spec in frozen if spec.run in self.states]
        changed = [spec for spec in known if self.states[spec.run].checksum != checksums[spec.run]]
        self.append("planned", [member_fields(spec, checksums[spec.run]) for spec in (*new, *changed)])

    def _write_specs(self, specs: Sequence[RunSpec]) -> None:
        """Write specifications in parallel threads, because on a remote file system each write waits for an fsync."""
        texts = Texts()

        def write(spec: RunSpec) -> None:
            run_dir = self.study.run_dir(spec)
            self.rollback.remove(run_dir)
            if (replaced := spec.write(run_dir, texts)) is not None:
                self.rollback.restore_file_on_rollback(run_dir / SPEC_FILE, replaced)

        self.rollback.remove(self.study.directory / RUNS_DIR)
        pool = ThreadPoolExecutor(WRITERS)
        try:
            for _ in pool.map(write, specs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)

    def record(self, actions: Sequence[Action]) -> None:
        """Append the ledger entries of actions. Entries of finished members come last, in one write.

        That is because thousands of members may finish at the same time, and each write waits for an fsync. If a crash
        loses these entries, the journals still show that the members are done.
        """
        for action in actions:
            if action.event is not None and not isinstance(action, Finish):
                self.append(action.event, [action.entry])
        self.append(
            "finished", [action.entry for action in actions if isinstance(action, Finish) and action.event is not None]
        )

    def append(self, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append entries of one event to the ledger after checking the lease, then update `states`."""
        if entries:
            self.check_lease()
        self.study.ledger.append_all(event, entries)
        for entry in entries:
            run = entry["run"]
            self.states[run] = state_after(self.states.get(run) or _planned(self.specs[run]), event, entry)

    def clear_stop_request(self, run_dir: Path) -> None:
        """Remove an earlier stop request of a member that is about to be submitted."""
        path = run_dir / STOP_FILE
        if path.exists():
            self.rollback.restore_file_on_rollback(path, path.read_bytes())
            clear_stop_request(run_dir)

    def accept(self, files: Mapping[Path, str]) -> None:
        """Write the launch's files with mode 0600. From now on nothing is rolled back."""
        self.accepted = True
        self.rollback.commit()
        for path, text in files.items():
            make_private(path.parent)
            write_atomically(path, text, mode=0o600)


def _planned(spec: RunSpec) -> MemberState:
    return MemberState(spec.run, spec.recipe, spec.seed, curve=spec.curve)
