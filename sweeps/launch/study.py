"""A study that can be launched: members, ledger, and the checks before a launch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from sweeps.errors import UserError, errors_naming
from sweeps.executor.base import Executor
from sweeps.executor.failure import NO_RETRIES
from sweeps.launch.controller import Controller, ObserverNotifier, Records
from sweeps.launch.decider import Decider
from sweeps.launch.decisions import Policy
from sweeps.launch.labels import check_labels
from sweeps.launch.ledger import RUNS_DIR, MemberState
from sweeps.launch.members import LEASE_NAME, Members, take_lease
from sweeps.launch.observer import Observer
from sweeps.launch.rollback import Rollback, missing_folders, remove_folders
from sweeps.run.checkpoint_names import CHECKPOINTS_DIR, checkpoints
from sweeps.run.files import make_private
from sweeps.run.lease import Lease
from sweeps.run.progress import check_journal_owner, has_finished, is_done
from sweeps.run.spec import check_form
from sweeps.terminal import counted

_log = logging.getLogger(__name__)


class Study(Members):
    """Study whose members, in `directory/runs/<identity>`, can be launched.

    Args:
        directory: the study's folder, created when the study runs.
        specs: specifications of the members; duplicates are dropped.
    """

    def run(
        self,
        executor: Executor,
        observers: Sequence[Observer] = (),
        retries: Mapping[str, int | None] = NO_RETRIES,
        detach: bool = False,
        again: bool = True,
        decider: Decider | None = None,
    ) -> dict[str, MemberState]:
        """Prepare and commit a launch; see `prepare` and `Controller.commit`."""
        with self.prepare(executor, observers, retries, again, decider) as prepared:
            return prepared.commit(detach=detach)

    @contextmanager
    def prepare(
        self,
        executor: Executor,
        observers: Sequence[Observer] = (),
        retries: Mapping[str, int | None] = NO_RETRIES,
        again: bool = True,
        decider: Decider | None = None,
    ) -> Iterator[Controller]:
        """Check a launch, then yield its controller while the study's lease is held; call its `commit` to start
        members.

        If the launch is refused here or by the executor in `commit`, the study's folder is restored.

        Args:
            executor: starts members. On a cluster it also reattaches members that an earlier launch left running.
            observers: notified as members start and end.
            retries: attempts after the first, by kind of failure (`sweeps.executor.failure`); None for no limit.
            again: whether to run members again that were given up, see `sweeps.launch.decisions.Policy`.
            decider: decides which members run; None to run all unfinished members.

        Raises:
            UserError: another process is running this study, another version has begun it, a member's folder has
                another run's journal, a finished member has a larger budget but no checkpoint, members have jobs on a
                cluster that the executor cannot follow, a label belongs to another curve, or an observer cannot be
                opened.
        """
        lease = Lease(self.directory, LEASE_NAME)
        with errors_naming("output_dir"):
            new_folders = missing_folders(self.directory)
            make_private(self.directory)
            take_lease(lease, f"study: {self.directory}")
        # The counts for the observers' `close`. If an error occurs before there is a controller, all members count as
        # failed.
        failed, left = len(self.specs), 0
        with ExitStack() as stack:
            stack.callback(lease.release)
            # Roll back while the lease is held: a process that waits for it must not find a study that then disappears.
            rollback = stack.enter_context(Rollback())
            if self.ledger.size() is None and not (self.directory / RUNS_DIR).exists():
                rollback.call(remove_folders, new_folders)  # only if no other process made it a study meanwhile
            known = self.ledger.fold()
            if not self.was_read:  # `read` has already warned
                self.warn_of_damage()
            check_form(self.directory / RUNS_DIR / run for run in known)
            check_labels(self.directory / RUNS_DIR, self.specs, known)
            self._check_no_cluster_jobs(executor, known)
            for spec in self.specs:
                check_journal_owner(self.run_dir(spec), spec.run)
            self._check_checkpoints(known)
            for observer in observers:
                observer.open()
                stack.callback(lambda item: item.close(failed, left), observer)
            stack.callback(executor.close)
            policy = Policy(retries, again, has_decider=decider is not None)
            records = Records(self, known, lease.check, rollback)
            controller = Controller(records, executor, ObserverNotifier(observers, records), policy, decider)
            try:
                yield controller
            except BaseException as error:
                failed, left = controller.count_failed_and_continuing(error)
                raise
            failed, left = controller.count_failed_and_continuing()

    def _check_no_cluster_jobs(self, executor: Executor, known: Mapping[str, MemberState]) -> None:
        """Check that no unfinished member has a cluster job, unless the executor can follow such jobs."""
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

    def _check_checkpoints(self, known: Mapping[str, MemberState]) -> None:
        """Check that every finished member that now has a larger budget has a checkpoint to continue from."""
        stuck = []
        for spec in (spec for spec in self.specs if spec.run in known):
            run_dir = self.run_dir(spec)
            directory = run_dir / CHECKPOINTS_DIR
            # Skip members that can continue, members whose trainer has a checkpoint folder of its own, and members
            # that never wrote a checkpoint. `scalerl clean` empties the folder and keeps it.
            if "command" in spec.config or not directory.is_dir() or checkpoints(directory):
                continue
            if has_finished(run_dir) and not is_done(run_dir, spec.steps, spec.run):
                stuck.append(spec)
        if stuck:
            shown = ", ".join(spec.title for spec in stuck[:3]) + (", ..." if len(stuck) > 3 else "")
            raise UserError(
                f"budget.steps={stuck[0].steps}: {counted(len(stuck), 'finished member')} cannot be continued, because "
                f"no checkpoint is left, as after `scalerl clean` without --keep ({shown}); keep the budget that they "
                "had, or train them again under another name (study=NAME)"
            )
