"""A study: its members, its ledger, and the loop that runs what is not done yet."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError, naming
from sweeps.executor.base import Executor, Launch, Outcome
from sweeps.executor.failure import BLAMES_NODE, NEVER, may_retry
from sweeps.executor.slurm.attempts import attempts
from sweeps.launch.decider import Decider, Wish
from sweeps.launch.labels import check_labels
from sweeps.launch.ledger import RUNS_DIR, Ledger, MemberState, after
from sweeps.launch.node_blacklist import NodeBlacklist
from sweeps.launch.observer import Observer
from sweeps.launch.refusal import Before
from sweeps.redact import redact
from sweeps.run.interruption import STOP_FILE, let_go_on, stop_asked
from sweeps.run.lease import Lease, LeaseHeldError, LeaseLostError
from sweeps.run.progress import check_own, is_done, why_failed, written
from sweeps.run.spec import SPEC_FILE, RunSpec, Texts, check_distinct, check_form

_log = logging.getLogger(__name__)

LEASE_NAME = "controller"
WRITERS = 8  # of specifications, at a time


class Study:
    """Members under `directory/runs/<identity>`, and a ledger of what happened to them.

    Args:
        directory: the study's folder, created when it is run.
        specs: specifications of the members; repetitions count once.
    """

    def __init__(self, directory: Path, specs: Sequence[RunSpec]) -> None:
        self.directory = directory
        self.specs = check_distinct(specs)
        self.ledger = Ledger(directory)
        self.gathered = False  # from the folder: several launches may have shared it

    @classmethod
    def read(cls, directory: Path) -> Study:
        """Read the study in a directory from its ledger and its frozen specifications.

        Raises:
            UserError: there is none, or a specification was changed since it was frozen.
        """
        study = cls(directory, [])
        study.gathered = True
        states = study.ledger.fold()
        if not states:
            raise UserError(f"{directory}: no ledger of a study here; give the folder that a --multirun wrote to")
        if damaged := study.ledger.damaged():
            _log.warning(
                "%s: line %s torn or damaged; what only stood there is lost, but for members that have a folder",
                study.ledger.path,
                ", ".join(map(str, damaged)),
            )
        # Several sweeps may have shared the folder, under labels that only together are ambiguous.
        known: dict[str, Any] = {}
        study.specs = [_frozen(directory / RUNS_DIR / run, state, known) for run, state in states.items()]
        return study

    def run_dir(self, spec: RunSpec) -> Path:
        """Return the folder that a member writes to, `runs/<identity>`."""
        return self.directory / RUNS_DIR / spec.run

    def run(
        self,
        executor: Executor,
        observers: Sequence[Observer] = (),
        retries: Mapping[str, int | None] = NEVER,
        detach: bool = False,
        again: bool = True,
        accepted: Callable[[], None] = lambda: None,
        decider: Decider | None = None,
    ) -> dict[str, MemberState]:
        """Run every member that is not done; a member that fails touches no other.

        Args:
            executor: starts members; if they outlive their controller (a cluster's), running ones are adopted.
            observers: notified as members start and end.
            retries: attempts after the first, by kind of failure (`sweeps.executor.failure`); None is no limit.
            detach: leave once everything that can be is submitted, and what ended meanwhile is dealt with.
            again: whether members that were given up get another chance; so does one whose job was over before this
                process looked, whatever the retries say.
            accepted: called once, when the executor has taken members or there is none to be taken. What is kept with
                the study is written now: up to here the launch may be refused, and then it leaves no trace.
            decider: decides which members are at work; without one all are that are not done.

        Returns:
            The state of each member, by identity.

        Raises:
            UserError: another process is running this study, another version has begun it, a member's folder holds
                another run's journal, members are at work elsewhere, a label stands for something else, an observer
                cannot be opened, or the executor refuses the first members. What was there before is as it was, and
                what was not is not there.
        """
        lease = Lease(self.directory, LEASE_NAME)
        try:
            with naming("output_dir"):
                new = missing_folders(self.directory)
                make_private(self.directory)
                lease.acquire(2.0)  # whoever only looks holds it for a moment
                if self.ledger.size() is not None or (self.directory / RUNS_DIR).exists():
                    new = []  # somebody has made it a study meanwhile
        except LeaseHeldError as error:
            raise UserError(
                f"study: {self.directory} is being run by another process ({lease.holder()}); wait for it, or end it "
                "first"
            ) from error
        # Interrupted, what is not done counts as failed; every part is released, whatever becomes of the others.
        failed, left = len(self.specs), 0
        with ExitStack() as stack:
            stack.callback(lease.release)
            # Undone while the lease is held: whoever waits for it must not find a study that vanishes under him.
            refusal = stack.enter_context(ExitStack())
            refusal.callback(remove_folders, new)
            known = self.ledger.fold()
            joined = self._join(decider.decided()) if decider is not None else []
            check_form(self.directory / RUNS_DIR / run for run in known)
            check_labels(self.directory / RUNS_DIR, self.specs, known)
            self._check_reach(executor, known)
            for spec in self.specs:
                check_own(self.run_dir(spec), spec.run)
            for observer in observers:
                observer.open()
                stack.callback(lambda each: each.close(failed, left), observer)
                if joined:
                    observer.added(joined)
            stack.callback(executor.close)
            controller = _Controller(self, executor, observers, retries, lease.check, accepted, decider)
            try:
                states = controller.run(detach, again)
            except BaseException as error:
                if isinstance(error, UserError | OSError) and controller.take_back():
                    failed, left = (0, len(self.specs)) if known else (failed, left)  # all is as it was
                    raise
                refusal.pop_all()
                if isinstance(error, LeaseLostError):
                    failed, left = 0, len(self.specs)  # somebody else runs the study now: nothing is ours to say
                    raise
                # Also those that were being submitted, or to be found again.
                states = self.ledger.fold()
                own = [states[spec.run].state for spec in self.specs if spec.run in states]
                left = sum(state in ("submitting", "started") for state in own) if executor.outlives else 0
                failed = len(self.specs) - left - controller.done - controller.stopped
                raise
            refusal.pop_all()
            left = sum(state.state not in ("finished", "failed", "stopped") for state in states.values())
            failed = sum(state.state == "failed" for state in states.values())
            return states

    def _join(self, specs: Sequence[RunSpec]) -> list[RunSpec]:
        """Merge members that a decider added earlier, the larger budget winning; return those that are new.

        Called before members are planned: a job of theirs may be at work, and a run with a raised budget is not done.
        """
        decided = {spec.run: spec for spec in check_distinct(specs)}
        own = {spec.run for spec in self.specs}
        joined = [spec for spec in decided.values() if spec.run not in own]
        larger = [max(spec, decided.get(spec.run, spec), key=lambda each: each.steps) for spec in self.specs]
        self.specs = [*larger, *joined]
        return joined

    def _check_reach(self, executor: Executor, known: Mapping[str, MemberState]) -> None:
        """Check that no member that is to be run has a cluster job, which this executor cannot follow."""
        if executor.outlives:
            return
        elsewhere = [
            str(state.job)
            for spec in self.specs
            if (state := known.get(spec.run)) is not None and state.state in ("submitting", "started") and state.job
            if not is_done(self.run_dir(spec), spec.steps, spec.run)
        ]
        if elsewhere:
            shown = ", ".join(elsewhere[:3]) + (", ..." if len(elsewhere) > 3 else "")
            raise UserError(
                f"study: {len(elsewhere)} members have jobs on a cluster ({shown}); wait for them with `scalerl "
                f"collect --wait {self.directory}`, or scancel them and `scalerl collect {self.directory}`"
            )


class _Controller:
    """Control loop of one process over a study: submit, poll, decide, record."""

    def __init__(
        self,
        study: Study,
        executor: Executor,
        observers: Sequence[Observer],
        retries: Mapping[str, int | None],
        still_ours: Callable[[], None],
        accepted: Callable[[], None],
        decider: Decider | None,
    ) -> None:
        self._study = study
        self._ledger = study.ledger
        self._specs = {spec.run: spec for spec in study.specs}
        self._executor = executor
        self._observers = observers
        self._retries = retries
        self._still_ours = still_ours
        self._earlier: dict[str, tuple[int, int]] = {}
        self._seen: dict[str, str] = {}
        self._finished: list[dict[str, Any]] = []
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self.stopped = 0
        self._states = self._ledger.fold()
        self._tell_accepted = accepted
        self._decider = decider
        self._asked: dict[str, str] = {}  # to stop, and for which reason
        self._held: dict[str, Launch] = {}  # that the decider does not want at work now
        self._accepted = self._put_off = False
        self._new_study = not self._states
        self._before = Before(self._ledger)
        self._again = False
        self._nodes = NodeBlacklist(self._at_work)
        for entry in self._ledger.entries():
            self._nodes.note(entry)

    @property
    def done(self) -> int:
        """Number of members that have finished their current budgets."""
        return len(self._done)

    def _note(self, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append entries to the ledger, after a check of the lease, then update the states in memory."""
        if entries:
            self._still_ours()
        self._ledger.append_all(event, entries)
        for entry in entries:
            run = entry["run"]
            if event == "planned":
                spec = self._specs[run]
                self._states.setdefault(run, MemberState(run, spec.recipe, spec.seed, curve=spec.curve))
            self._states[run] = after(self._states[run], event, entry)

    def run(self, detach: bool, again: bool) -> dict[str, MemberState]:
        """Run until every member has ended; with `detach`, until all that can be is submitted."""
        self._again = again
        for name in self._decider.files if self._decider is not None else []:
            self._before.writing(self._study.directory / name)
        waiting = self._conduct(self._take_stock(again))
        if not waiting:
            self._accept()
        while waiting or self._executor.running():
            self._still_ours()  # before a folder is made where the study no longer is
            waiting = self._submit(waiting)
            for outcome in self._executor.poll(timeout_s=1.0):
                waiting += self._settle(outcome)
            self._note_finished()
            waiting = self._conduct(waiting)
            if detach and self._executor.settled():
                waiting = self._submit(waiting)
                self._look()
                break
            self._look()
        self._accept()
        return {run: self._states[run] for run in self._specs}

    def _accept(self) -> None:
        """Mark the launch as accepted, once: drop the rollback and call back."""
        if not self._accepted:
            self._accepted = True
            self._before.forget()
            self._tell_accepted()

    def take_back(self) -> bool:
        """Roll back a refused launch; return False, and change nothing, if jobs may have come of it."""
        if self._accepted or self._put_off:
            return False
        self._before.restore()
        return True

    def _take_stock(self, again: bool) -> list[Launch]:
        """Plan new members, adopt those done or under way, and return those to submit."""
        done = {spec.run for spec in self._specs.values() if self._is_done(spec)}
        new = [spec for spec in self._specs.values() if spec.run not in self._states]
        # Frozen before the ledger knows of it: a later process finds whatever was planned. The budget may have grown.
        frozen = [spec for spec in self._specs.values() if spec.run not in done and self._to_go_on(spec, again)]
        self._freeze(frozen)
        self._note_planned(new, frozen)
        waiting: list[Launch] = []
        underway: list[Launch] = []
        for spec in self._specs.values():
            state = self._states[spec.run]
            if spec.run in done:
                self._finish(spec, note=state.state != "finished")
                continue
            if not self._to_go_on(spec, again):
                self._given_up(spec)
                continue
            launch = self._launch(spec, known=True)
            (underway if state.state in ("submitting", "started") else waiting).append(launch)
        self._note_finished()
        found = self._executor.adopt(underway) if underway else {}
        for launch in underway:
            if launch.run in found and launch.job is None:
                # The process that submitted it was gone before it could write down the job.
                self._note("started", [{"run": launch.run, "submission": launch.submission, "job": found[launch.run]}])
        # In the order of the study, not of the ledger's states.
        todo = {launch.run: launch for launch in [*waiting, *underway] if launch.run not in found}
        for run in found:
            self._earlier[run] = (0, 0)
            # An earlier process's decider has asked it to stop: ending for that is no failure.
            if (why := stop_asked(self._study.run_dir(self._specs[run]))) is not None:
                self._asked[run] = why
        return [todo[run] for run in self._specs if run in todo]

    def _conduct(self, waiting: list[Launch]) -> list[Launch]:
        """Apply the decider's decisions; return the members to submit, in its order."""
        if self._decider is None:
            return waiting
        self._still_ours()
        running = self._executor.running()
        self._wish()  # it looks first, and then says who is to come
        waiting = [*waiting, *self._add(self._decider.members(self._states))]
        wish = self._wish()
        unwanted = {**wish.later, **wish.over}
        for run in running:
            if run in unwanted and self._asked.get(run) != unwanted[run]:
                self._still_ours()
                self._asked[run] = unwanted[run]
                self._executor.stop([run], unwanted[run])
        idle = self._held | {launch.run: launch for launch in waiting}
        for run in [run for run in idle if run in wish.over]:
            del idle[run]
            if self._states[run].state != "stopped" or self._states[run].reason != redact(wish.over[run]):
                self._note("stopped", [{"run": run, "kind": "stopped", "reason": wish.over[run]}])
            self._given_up(self._specs[run])
        wanted = [idle.pop(run) for run in wish.go_on if run in idle]
        self._failed.difference_update(launch.run for launch in wanted)
        for run in [run for run in idle if self._states[run].state == "failed" and run not in wish.later]:
            del idle[run]  # nobody wants it again
            self._given_up(self._specs[run])
        for run in idle:
            if run not in self._held and run in wish.later and self._states[run].state == "stopped":
                for observer in self._observers:
                    observer.paused(self._specs[run], self._study.run_dir(self._specs[run]), wish.later[run])
        self._held = idle
        return wanted

    def _wish(self) -> Wish:
        assert self._decider is not None
        wish = self._decider.wish(self._states, set(self._executor.running()) - self._executor.queued())
        for line in wish.said:
            for observer in self._observers:
                observer.say(line)
        return wish

    def _add(self, specs: Sequence[RunSpec]) -> list[Launch]:
        """Add members that are new, or have a larger budget; return those to submit."""
        if not specs:
            return []
        self._still_ours()
        new = [spec for spec in check_distinct(specs) if spec.run not in self._states]
        check_labels(self._study.directory / RUNS_DIR, new, self._states)
        for spec in specs:
            check_own(self._study.run_dir(spec), spec.run)
        self._freeze(specs)
        known = {spec.run for spec in self._study.specs}
        self._study.specs = [*self._study.specs, *(spec for spec in specs if spec.run not in known)]
        self._specs |= {spec.run: spec for spec in specs}
        self._note_planned(new, specs)
        for observer in self._observers:
            observer.added([spec for spec in specs if spec.run not in known])
        todo = []
        running = self._executor.running()
        for spec in specs:
            if not self._is_done(spec):
                self._done.discard(spec.run)
                if spec.run not in running:  # else at work since an earlier controller, who had added it
                    todo.append(self._launch(spec))
            elif spec.run not in self._done:
                self._finish(spec, note=self._states[spec.run].state != "finished")
        return todo

    def _note_planned(self, new: Sequence[RunSpec], frozen: Sequence[RunSpec]) -> None:
        """Record new members, and those whose specification differs from the ledger's checksum."""
        checksums = {spec.run: spec.checksum() for spec in (*new, *frozen)}
        changed = [
            spec
            for spec in frozen
            if spec.run in self._states and self._states[spec.run].checksum != checksums[spec.run]
        ]
        self._note(
            "planned",
            [
                {
                    "run": spec.run,
                    "recipe": spec.recipe,
                    "seed": spec.seed,
                    "curve": spec.curve,
                    "checksum": checksums[spec.run],
                }
                for spec in (*new, *changed)
            ],
        )

    def _is_done(self, spec: RunSpec) -> bool:
        return is_done(self._study.run_dir(spec), spec.steps, spec.run)

    def _to_go_on(self, spec: RunSpec, again: bool) -> bool:
        """Return whether a member that is not done is to be run by this launch."""
        state = self._states[spec.run].state if spec.run in self._states else "planned"
        return again or state not in ("failed", "stopped") or (state == "stopped" and self._decider is not None)

    def _given_up(self, spec: RunSpec) -> None:
        """Count a member that ends unfinished, as stopped or failed, and notify the observers."""
        state = self._states[spec.run]
        told = state.state
        if told == "stopped":
            self.stopped += 1
        else:
            self._failed.add(spec.run)
            told = "cancelled" if state.kind in ("cancelled", "stopped") else "failed"
        for observer in self._observers:
            observer.ended(spec, self._study.run_dir(spec), told, state.reason)

    def _freeze(self, specs: Sequence[RunSpec]) -> None:
        """Write specifications in parallel threads, for each waits for an fsync on a remote file system."""
        texts = Texts()

        def freeze(spec: RunSpec) -> None:
            run_dir = self._study.run_dir(spec)
            self._before.making(run_dir)
            if (replaced := spec.write(run_dir, texts)) is not None:
                self._before.replaced(run_dir / SPEC_FILE, replaced)

        self._before.making(self._study.directory / RUNS_DIR)
        pool = ThreadPoolExecutor(WRITERS)
        try:
            for _ in pool.map(freeze, specs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)

    def _launch(self, spec: RunSpec, known: bool = False) -> Launch:
        """Make a member's launch for the executor, with the ledger's submission and job if it is to be adopted."""
        state = self._states[spec.run]
        run_dir = self._study.run_dir(spec)
        own = Launch(spec.run, run_dir, state.spent, state.excluded, unanswered=state.unanswered, layout=spec.layout)
        return replace(own, submission=state.submission, job=state.job) if known else own

    def _submit(self, waiting: list[Launch]) -> list[Launch]:
        """Submit as many members as the executor takes; return the rest."""
        if waiting:
            out = self._nodes.out(self._ledger.now())  # by now; when the member failed it may have been one node less
            waiting = [self._keep_off(launch, out) for launch in waiting]
        while waiting and (size := self._executor.next_batch(waiting)) > 0:
            batch, waiting = self._unchanged(waiting[:size]), waiting[size:]
            if not batch:
                continue
            submission = uuid.uuid4().hex[:12]
            if self._executor.outlives:
                # Written before the scheduler is asked: after a crash the next process looks for the jobs by this name.
                self._note("submitting", [{"run": launch.run, "submission": submission} for launch in batch])
            for launch in batch:
                self._earlier[launch.run] = written(launch.run_dir)
                self._let_go_on(launch.run_dir)
            jobs = self._executor.submit(submission, batch)
            if jobs or self._new_study:  # one that is put off has nothing to spoil where nothing was
                self._accept()
            self._put_off = self._put_off or not jobs
            taken = [launch for launch in batch if launch.run in jobs]
            named = {"submission": submission} if self._executor.outlives else {}
            self._note(
                "started",
                [
                    {"run": launch.run, **named, **({"job": job} if (job := jobs[launch.run]) else {})}
                    for launch in taken
                ],
            )
            # What was not taken comes back in smaller arrays, or after a pause: `next_batch` knows.
            waiting = [launch for launch in batch if launch.run not in jobs] + waiting
            self._look()
        return waiting

    def _unchanged(self, batch: Sequence[Launch]) -> list[Launch]:
        """Return the members whose specification matches the ledger's checksum; record the others as failed."""
        sound = []
        for launch in batch:
            try:
                _frozen(launch.run_dir, self._states[launch.run])
                sound.append(launch)
            except UserError as error:
                self._note("failed", [{"run": launch.run, "kind": "error", "reason": str(error)}])
                self._given_up(self._specs[launch.run])
        return sound

    def _let_go_on(self, run_dir: Path) -> None:
        """Remove an earlier stop request from a member that is about to be submitted."""
        path = run_dir / STOP_FILE
        if path.exists():
            if not self._accepted:
                self._before.replaced(path, path.read_bytes())
            let_go_on(run_dir)

    def _keep_off(self, launch: Launch, out: Sequence[str]) -> Launch:
        own = self._states[launch.run].excluded
        return replace(launch, excluded=(*own, *(node for node in out if node not in own)))

    def _at_work(self) -> set[str]:
        """Nodes on which members are at work, by the attempt records of their jobs."""
        found = set()
        for run in set(self._executor.running()) - self._executor.queued():
            last = attempts(self._study.run_dir(self._specs[run]))[-1:]
            found |= {
                each.node for each in last if each.outcome is None and each.submission == self._states[run].submission
            }
        return found

    def _settle(self, outcome: Outcome) -> list[Launch]:
        """Record how an attempt ended; return the member if it is to run again, else nothing."""
        spec = self._specs[outcome.run]
        run_dir = self._study.run_dir(spec)
        self._seen.pop(spec.run, None)
        asked = self._asked.pop(spec.run, None) is not None or outcome.earlier
        if self._is_done(spec) and (outcome.exit_code == 0 or self._executor.outlives):
            self._finish(spec, note=True, node=outcome.node)
            return []
        reason = outcome.reason or why_failed(run_dir, outcome.how, self._earlier[outcome.run])
        kind = outcome.kind or ("killed" if outcome.exit_code < 0 else "error")
        blamed = {"node": outcome.node} if outcome.node and kind in BLAMES_NODE else {}
        said = {"run": spec.run, "kind": kind, "reason": reason, **blamed}
        now = self._ledger.now()
        self._nodes.note({**said, "event": "retried", "time": now, "reason": redact(reason)})
        excused = self._nodes.excused(spec.run, now).get(kind, 0)
        if may_retry(self._retries, kind, self._states[spec.run].spent, excused):
            self._note("retried", [said])
            for observer in self._observers:
                observer.retried(spec, run_dir, reason)
            return [self._launch(spec)]
        self._nodes.over(spec.run)
        # Under a decider who did not ask for it a member that stops is one that will not come.
        of_itself = kind == "stopped" and (asked or self._decider is None)
        self._note("stopped" if of_itself else "failed", [said])
        if kind == "stopped" and asked and self._decider is not None:
            return [self._launch(spec)]  # saved; the decider says whether it goes on one day
        # It was over, or asked to be, when this command was given, and the command wants it.
        if self._again and (outcome.earlier or (kind == "stopped" and asked)):
            for observer in self._observers:
                observer.retried(spec, run_dir, reason)
            return [self._launch(spec)]
        self._given_up(spec)
        return []

    def _finish(self, spec: RunSpec, note: bool, node: str | None = None) -> None:
        self._done.add(spec.run)
        if note:
            finished = {"run": spec.run, **({"node": node} if node else {})}
            self._nodes.note({**finished, "event": "finished", "time": self._ledger.now()})
            self._finished.append(finished)
        for observer in self._observers:
            observer.ended(spec, self._study.run_dir(spec), "finished", None)

    def _note_finished(self) -> None:
        """Append all finished members in one write, for thousands may end together and each write waits for an fsync.

        If a crash loses the entries, the journals still show that the members are done.
        """
        finished, self._finished = self._finished, []
        self._note("finished", finished)

    def _look(self) -> None:
        """Notify the observers of queued and running members and of the counts of ended ones."""
        queued = self._executor.queued()
        running = self._executor.running()
        for run in running:
            now = "queued" if run in queued else "started"
            if self._seen.get(run) != now:
                self._seen[run] = now
                for observer in self._observers:
                    getattr(observer, now)(self._specs[run], self._study.run_dir(self._specs[run]))
        active = [self._specs[run] for run in running if run not in queued]
        for observer in self._observers:
            observer.tick(active, len(queued), self.done, len(self._failed))


def _frozen(run_dir: Path, state: MemberState, known: dict[str, Any] | None = None) -> RunSpec:
    """Read a member's specification and check it against the ledger's checksum; see `RunSpec.read`."""
    spec = RunSpec.read(run_dir, known)
    spec.check_checksum(run_dir, state.checksum)
    return spec


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700; an existing one keeps its mode."""
    if not directory.exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)


def missing_folders(directory: Path) -> list[Path]:
    """Return those of a directory and its parents that do not exist yet, the innermost first."""
    return [each for each in (directory, *directory.parents) if not each.exists()]


def remove_folders(made: Sequence[Path]) -> None:
    """Remove folders made for a refused launch: the innermost with its content, its parents if empty."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for above in made[1:]:
        try:
            above.rmdir()
        except OSError:
            return  # somebody has put something there
