"""Find out why a job ended, from SLURM's description of the job, the job's attempt record, and its logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.executor.base import Launch, Outcome
from sweeps.executor.error_signatures import classify_log
from sweeps.executor.failure import KINDS
from sweeps.executor.node.attempts import Attempt, attempts
from sweeps.executor.node.ending import end_of_logs, last_log_lines, newest_attempt, outcome_of
from sweeps.executor.node.entry import DISK_FULL_CODE
from sweeps.executor.slurm.job_artifacts import JobArtifacts
from sweeps.executor.slurm.scheduler import ENDED, QUEUED, JobInfo

_KIND_OF_STATE = {
    "TIMEOUT": "time_limit",
    "DEADLINE": "time_limit",
    "PREEMPTED": "preempted",
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
}

# Messages of slurmd about a task that was killed for using too much memory. The job's state may not show this.
_OUT_OF_MEMORY = re.compile(r"(?i)exceeded (job |step )?memory limit|oom[-_ ]?kill|out of memory")

# srun's message about a task that was killed, with the node's name. Tasks that exited by themselves do not match,
# because their failure is a consequence.
_TASK_DIED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?!Exited)")

# Reason that SLURM gives for a job that it has requeued and holds for ever: slurmctld was down while the job began, or
# a node refused to launch it.
_LAUNCH_FAILED = "launch failed requeued held"


@dataclass
class FollowedJob:
    """A job that this process follows until it ends.

    Attributes:
        launch, submission, job: the member, the name of its submission, and SLURM's id of the job.
        info: the scheduler's newest description of the job; None if there is none.
        missing_since: time, by the executor's clock, of the first query that did not list the job; None while it is
            listed.
        had_ended: whether the job had ended at the last poll. SLURM may still requeue it.
        seen_alive: whether this process has seen the job in the queue, not ended. True for a job that this process
            submitted.
    """

    launch: Launch
    submission: str
    job: str
    info: JobInfo | None = None
    missing_since: float | None = None
    had_ended: bool = False
    seen_alive: bool = True


class JobEndings:
    """Classifier of ended jobs by the files that they left. Each submission's folder is listed once per poll.

    Args:
        study: the study's folder.
    """

    def __init__(self, study: Path) -> None:
        self._study = study
        self._artifacts: dict[str, JobArtifacts] = {}

    def clear_listings(self) -> None:
        """Forget the listings of submission folders, because running jobs add files to them."""
        self._artifacts.clear()

    def artifacts_of(self, submission: str) -> JobArtifacts:
        """Return the files of a submission's jobs, as they were at the first call after `clear_listings`."""
        if submission not in self._artifacts:
            self._artifacts[submission] = JobArtifacts(self._study, submission)
        return self._artifacts[submission]

    def was_refused(self, info: JobInfo | None, member: Launch) -> bool:
        """Return whether SLURM lists a job that it refused: the job has ended and never started."""
        if info is None or info.state not in ENDED:
            return False
        began = any(attempt.submission == member.submission for attempt in attempts(member.run_dir))
        return not began and not self.artifacts_of(member.submission or "").starts(info.job)

    def last_attempt(self, job: FollowedJob, outcome: bool = False) -> Attempt | None:
        """Return the attempt record of a job's newest start; None if there is none.

        With `outcome`, also None if the record has no end.
        """
        attempt = newest_attempt(job.launch.run_dir, job.submission, job.job)
        if attempt is None or (outcome and attempt.outcome is None):
            return None
        # If the newest start failed before the member began, it has no record: do not return the one of an earlier
        # start.
        newest = max(self.artifacts_of(job.submission).starts(job.job), default=0)
        return attempt if attempt.restart >= newest else None

    def outcome(self, job: FollowedJob, nodes: int) -> Outcome:
        """Classify how a job on `nodes` nodes ended: from the scheduler, attempt record, logs and journal."""
        logs = self.artifacts_of(job.submission).logs(job.job)
        attempt = self.last_attempt(job)
        kind, reason = why_ended(
            job.info,
            attempt,
            lambda: last_log_lines(logs),
            lambda: end_of_logs(logs, job.launch.run_dir, job.submission, job.job),
            self.artifacts_of(job.submission).has_pickle(job.job),
        )
        return outcome_of(job.launch, kind, reason, attempt, _to_blame(job, attempt, nodes, logs))


def _to_blame(job: FollowedJob, attempt: Attempt | None, nodes: int, logs: Sequence[Path]) -> str | None:
    """Return the node to blame for a failure; None if unknown.

    For a job on several nodes, it is the node that a failed rank has recorded, or that srun names.
    """
    if nodes > 1:
        if attempt is not None and (attempt.culprit or attempt.kind in ("gpu", "storage")):
            return attempt.culprit or attempt.node  # the failed rank recorded its node
        killed_task = _TASK_DIED.search(last_log_lines(logs, lines=100))
        return killed_task[1] if killed_task else None
    return attempt.node if attempt else (job.info.node or None if job.info else None)


def launch_failed(info: JobInfo) -> bool:
    """Return whether SLURM failed to launch the job and holds it in the queue for ever."""
    return info.state in QUEUED and _LAUNCH_FAILED in info.reason.replace("_", " ")


def why_ended(
    info: JobInfo | None,
    attempt: Attempt | None,
    last_log_lines: Callable[[], str],
    logs: Callable[[], str] = lambda: "",
    has_pickle: bool = True,
) -> tuple[str | None, str | None]:
    """Return kind and reason of a job's failure; (None, None) if its member finished.

    All three sources are needed: SLURM cannot distinguish a Python error from a lost node, and a killed job records no
    end.

    Args:
        info: the scheduler's description of the job; None if the scheduler does not know the job.
        attempt: the job's attempt record; None if the member never began.
        last_log_lines: reads the last lines of the batch log. Like `logs`, it is called only when needed.
        logs: reads the end of the logs of the batch script and of every rank.
        has_pickle: whether the pickle exists from which submitit starts the job.
    """
    state = info.state if info else "UNKNOWN"
    if state == "CANCELLED":
        return "cancelled", "cancelled (scancel, or by an administrator)"
    recorded = attempt.failure if attempt else None
    if recorded == (None, None):
        return recorded
    if info is not None and launch_failed(info):
        return "node", f"SLURM could not launch the job and held it in the queue ({info.reason}); it was cancelled"
    if state == "OUT_OF_MEMORY":
        return "out_of_memory", "killed for using more memory than the job asked for; raise mem_gb"
    if recorded and attempt and attempt.outcome != "interrupted":
        return recorded  # an interrupted attempt may have been ended by SLURM, so the state is checked first
    if info is not None and info.exit_code == f"{DISK_FULL_CODE}:0":
        return "disk_full", KINDS["disk_full"][0]
    kind = _KIND_OF_STATE.get(state)
    if kind is not None:
        node = f" ({info.node})" if info and info.node and kind == "node" else ""
        return kind, KINDS[kind][0] + node
    if recorded:
        return recorded
    if attempt is None and not has_pickle:
        return "half_submitted", KINDS["half_submitted"][0]
    if info is None:
        return "lost", "the scheduler no longer knows the job, and the job did not record how it ended"
    detail = f"SLURM says {state}" + (f", exit code {info.exit_code}" if info.exit_code else "")
    words = last_log_lines()
    if _OUT_OF_MEMORY.search(words):
        return "out_of_memory", "killed for using more memory than the job asked for; raise mem_gb"
    if shown := classify_log(f"{logs()}\n{words}"):
        kind, line = shown
        return kind, f"{line} ({detail}, on {attempt.node if attempt else info.node})"
    if attempt is None:
        hint = "its log is empty; did a command of setup end the job, or does the node not see output_dir?"
        return "launch", f"the member never began ({detail}): {words[-500:] or hint}"
    return "killed", f"killed from outside on {attempt.node} ({detail})"
