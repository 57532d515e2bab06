"""Executor for SLURM clusters. Members are jobs, which continue when the process that submitted them ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sweeps.errors import UserError, require
from sweeps.executor.base import Launch, Outcome
from sweeps.executor.slurm.ending import FollowedJob, JobEndings, launch_failed
from sweeps.executor.slurm.handover import complete
from sweeps.executor.slurm.scheduler import ENDED, QUEUED, JobInfo, Scheduler, Slurm
from sweeps.executor.slurm.settings import JobSettings
from sweeps.executor.slurm.submitter import Submitter, job_ids, job_ids_by_submission
from sweeps.run.interruption import ask_to_stop

_log = logging.getLogger(__name__)

# Seconds to wait for accounting to list a job that has left the queue, because accounting lags behind the queue.
_ACCOUNTING_S = 15.0

# Reasons, given by SLURM, for which a queued job never starts unless someone changes it.
_NEVER_RUNS = (
    *("PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "Held", "held", "DependencyNeverSatisfied"),
    *("MaxWall", "MaxNodePerJob", "MaxCpuPerJob", "MaxMemPerLimit", "MaxGRESPerJob"),
)

# A job in one of these states may be requeued by SLURM, and is then pending again a little later.
_MAY_BE_REQUEUED = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED"})


@dataclass
class ClusterExecutor:
    """Executor that submits members as job arrays and follows them in the scheduler's queue.

    Args:
        study: the study's folder, on a file system that all nodes see.
        scheduler: access to the cluster's scheduler.
        settings: resources and limits of the jobs.
        entry: `module:function` that runs one member, given the member's folder.
        threads: CPU threads of a member's process.
        title: beginning of the jobs' names.
        clock, sleep: return monotonic seconds, and wait; tests replace them.
    """

    study: Path
    scheduler: Scheduler
    settings: JobSettings
    entry: str
    threads: int
    title: str
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    outlives: bool = field(default=True, init=False)
    _followed: dict[str, FollowedJob] = field(default_factory=dict, init=False)
    _last_query: float = field(default=float("-inf"), init=False)
    _no_answer: bool = field(default=False, init=False)
    _warned: set[str] = field(default_factory=set, init=False)
    _submitter: Submitter = field(init=False)
    _endings: JobEndings = field(init=False)

    def __post_init__(self) -> None:
        arguments = (self.study, self.scheduler, self.settings, self.entry, self.threads, self.title, self.clock)
        self._submitter, self._endings = Submitter(*arguments), JobEndings(self.study)

    # --- submitting --------------------------------------------------------------------------------------

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many waiting members fit into one array and need the same resources; 0 during a backoff."""
        return self._submitter.next_batch(waiting)

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Submit members as one job, or one array.

        Returns:
            The job of each member, by identity; empty if the scheduler cannot accept them now.

        Raises:
            UserError: the scheduler will never accept them; nothing of this batch was submitted.
        """
        job = self._submitter.submit(submission, members)
        if job is None:
            return {}
        jobs: dict[str, str | None] = {}
        for member, name in zip(members, job_ids(job, len(members)), strict=True):
            jobs[member.run] = name
            self._followed[member.run] = FollowedJob(member, submission, name)
        return jobs

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Follow jobs that an earlier controller submitted.

        A job with a recorded id is followed even if the scheduler no longer lists it. If the id was not recorded,
        because the controller died while it submitted the job, the job is searched for by the name of its submission.

        Returns:
            The job of each member that was found, by identity.

        Raises:
            UserError: the scheduler does not answer, so it is unknown whether it accepted the interrupted submission.
        """
        found: dict[str, str | None] = {}
        self._submitter.abandoned.update(name for member in members for name in member.unanswered)
        self._submitter.abandoned.difference_update(member.submission for member in members if member.submission)
        unclear = [member for member in members if member.job is None and member.submission]
        queue = self.scheduler.queue() if unclear else {}
        if queue is None:
            raise UserError(
                "cluster: the scheduler does not answer, and an earlier launch was interrupted while it submitted; "
                "try again when it does"
            )
        for member in members:
            if member.job is not None and member.submission:
                self._followed[member.run] = FollowedJob(member, member.submission, member.job, seen_alive=False)
                found[member.run] = member.job
        self._endings.clear_listings()
        ids = job_ids_by_submission(queue)
        for member in unclear:
            assert member.submission is not None
            artifacts = self._endings.artifacts_of(member.submission)
            position = artifacts.position(member.run)
            # The id of a job that ended before its id was recorded is in the name of its log file.
            job = ids.get(member.submission) or artifacts.id()
            if job is None or position is None:
                self._submitter.abandoned.add(member.submission)
                continue
            number, size = position
            name = job_ids(job, size)[number]
            if self._endings.was_refused(queue.get(name), member):
                continue
            if (info := queue.get(name)) is not None and info.state in QUEUED:
                complete(
                    artifacts.folder, {name: member.run_dir}
                )  # the earlier controller may have died before it wrote the pickle
            found[member.run] = name
            self._followed[member.run] = FollowedJob(member, member.submission, name, seen_alive=False)
        return found

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Write a stop file for each member, which members check at step boundaries. Cancel their queued jobs."""
        asked = [self._followed[run] for run in runs if run in self._followed]
        for each in asked:
            ask_to_stop(each.launch.run_dir, reason)
        self.scheduler.cancel([each.job for each in asked], waiting_only=True)

    # --- following ---------------------------------------------------------------------------------------

    def running(self) -> list[str]:
        """Return the members whose jobs have not ended."""
        return list(self._followed)

    def queued(self) -> frozenset[str]:
        """Return the members whose jobs are queued, for the first time or after a requeue."""
        return frozenset(run for run, each in self._followed.items() if each.info is None or each.info.state in QUEUED)

    def settled(self) -> bool:
        """Return whether the last query of the queue was answered, and showed the state of every job."""
        looked = self._last_query > float("-inf") and not self._no_answer
        return looked and not any(each.missing_since is not None or each.had_ended for each in self._followed.values())

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return outcomes of jobs that have ended for good. Query the queue at most every `poll_s` seconds."""
        pause = self._last_query + self.settings.poll_s - self.clock()
        if pause > 0:
            self.sleep(min(pause, timeout_s))
            if pause > timeout_s:
                return []
        self._last_query = self.clock()
        return self.query()

    def query(self) -> list[Outcome]:
        """Query the scheduler now, update the followed jobs, and return the outcomes of those that have ended."""
        queue = self.scheduler.queue()
        if queue is None:
            if not self._no_answer:
                _log.warning("cluster: the scheduler does not answer; running jobs continue, and it is asked again")
            self._no_answer = True
            for each in self._followed.values():
                each.missing_since = None  # while there is no answer, it is unknown whether the job is gone
            return []
        self._no_answer = False
        self._endings.clear_listings()
        self._cancel_abandoned(queue)
        gone: list[FollowedJob] = []
        ended: list[FollowedJob] = []
        held: list[str] = []
        for each in self._followed.values():
            info = queue.get(each.job)
            if info is None or not info.name.endswith(each.submission):  # not listed, or another job with the same id
                gone.append(each)
            else:
                each.missing_since, each.info = None, info
                if launch_failed(info):
                    held.append(info.job)
                    ended.append(each)
                    continue
                each.seen_alive = each.seen_alive or info.state not in ENDED
                self._warn_if_never_starts(info)
                if info.state in ENDED and (each.had_ended or info.state not in _MAY_BE_REQUEUED):
                    ended.append(each)
                each.had_ended = info.state in ENDED
        if held:
            self.scheduler.cancel(held)
        self._add_exit_codes([each for each in ended if each.info and each.info.state == "FAILED"])
        ended += self._ended_outside_queue(gone)
        outcomes = [
            replace(self._endings.outcome(each, self._submitter.nodes(each.launch)), ended_before=not each.seen_alive)
            for each in ended
        ]
        for outcome in outcomes:
            del self._followed[outcome.run]
        return outcomes

    def _add_exit_codes(self, failed: Sequence[FollowedJob]) -> None:
        """Query the exit codes of failed jobs. For some jobs they are the only record of why they ended."""
        known = self.scheduler.exit_codes([each.job for each in failed]) if failed else {}
        for each in failed:
            if each.info is not None:
                each.info = replace(each.info, exit_code=known.get(each.job, ""))

    def _warn_if_never_starts(self, info: JobInfo) -> None:
        stuck = info.state in QUEUED and any(word in info.reason for word in _NEVER_RUNS)
        if stuck and info.reason not in self._warned:
            self._warned.add(info.reason)
            _log.warning(
                "cluster: job %s cannot start (%s); scancel it, and request resources that the cluster has",
                info.job,
                info.reason,
            )

    def _ended_outside_queue(self, gone: Sequence[FollowedJob]) -> list[FollowedJob]:
        """Return those jobs missing from the queue that have ended, or are missing for `lost_after_s` or longer."""
        if not gone:
            return []
        now = self.clock()
        known = self.scheduler.accounted([each.job for each in gone])
        ended = []
        for each in gone:
            each.missing_since = now if each.missing_since is None else each.missing_since
            missing_s = now - each.missing_since
            info = known.get(each.job)
            if info is not None and info.state in ENDED and info.name.endswith(each.submission):
                each.info = info
                ended.append(each)
            elif self._endings.last_attempt(each, outcome=True) is not None and missing_s >= _ACCOUNTING_S:
                ended.append(each)  # the job recorded its end, but accounting may be switched off
            elif missing_s >= self.settings.lost_after_s:
                each.info = None
                ended.append(each)
        return ended

    def _cancel_abandoned(self, queue: Mapping[str, JobInfo]) -> None:
        """Cancel jobs in the queue that belong to submissions which were given up as lost."""
        late = {
            info.job.split("_")[0]
            for info in queue.values()
            if info.state not in ENDED and info.name.rpartition("-")[2] in self._submitter.abandoned
        }
        if late:
            self.scheduler.cancel(sorted(late))

    def close(self) -> None:
        """Do nothing: submitted jobs continue."""


class SlurmCluster(JobSettings):
    """SLURM as one of `sweeps.executor.clusters.CLUSTERS`: settings of its jobs, and access to SLURM."""

    def scheduler(self) -> Slurm:
        """Return access to SLURM through its commands.

        Raises:
            UserError: the commands are not in PATH.
        """
        return Slurm(self.clusters)

    def executor(self, study: Path, entry: str, threads: int) -> ClusterExecutor:
        """Make the executor that submits a study's members to SLURM.

        Raises:
            UserError: submitit is not installed, or SLURM's commands are not in PATH.
        """
        require("submitit", "cluster: slurm")
        study = study.resolve()
        title = str(self.resources.get("name") or study.name)
        return ClusterExecutor(study, self.scheduler(), self, entry, threads, title)
