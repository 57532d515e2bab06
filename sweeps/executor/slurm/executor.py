"""Executor for SLURM clusters: members become jobs that outlive the process which submitted them."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sweeps.errors import UserError
from sweeps.executor.base import Launch, Outcome
from sweeps.executor.failure import KINDS, MEMORY_GROWTH
from sweeps.executor.signs import shown_in
from sweeps.executor.slurm.attempts import Attempt, attempts, log_mark
from sweeps.executor.slurm.handover import complete
from sweeps.executor.slurm.job import DISK_FULL_CODE
from sweeps.executor.slurm.remains import Remains
from sweeps.executor.slurm.scheduler import ENDED, QUEUED, JobInfo, RefusedError, Scheduler
from sweeps.executor.slurm.settings import JobSettings, with_layout
from sweeps.executor.slurm.submission import freeze, new_folder
from sweeps.run.interruption import ask_to_stop, stop_asked
from sweeps.run.journal import LOG_FILE
from sweeps.run.progress import is_done, trouble
from sweeps.run.spec import budget_of

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 300.0
# Retry of a member of which another copy was running: after so many minutes, then twice as many, up to the last.
_FIRST_LOOK_MIN, _LAST_LOOK_MIN = 10, 240
# Accounting lags behind the queue: what it says about a job that left the queue is waited for this long.
_ACCOUNTING_S = 15.0

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


# How slurmd tells of a task that was killed for its memory where the job's state does not say so.
_OUT_OF_MEMORY = re.compile(r"(?i)exceeded (job |step )?memory limit|oom[-_ ]?kill|out of memory")

# How srun names the node of a task that was killed; tasks that exited by themselves came after.
_TASK_DIED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (?!Exited)")

# Reasons for which a job waits for ever unless somebody changes it.
_NEVER_RUNS = (
    *("PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "Held", "held", "DependencyNeverSatisfied"),
    *("MaxWall", "MaxNodePerJob", "MaxCpuPerJob", "MaxMemPerLimit", "MaxGRESPerJob"),
)

# slurmctld was down while a job began, or a node refused its launch: SLURM requeues the job and holds it, for ever.
_LAUNCH_FAILED = "launch failed requeued held"

# These failures are reported even of a member that was asked to stop.
_OWN_FAULT = frozenset({"error", "out_of_memory", "disk_full"})

# SLURM itself requeues a job after these; a moment later it may be pending again.
_MAY_COME_BACK = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED"})


@dataclass
class _Followed:
    """A job that this process waits for.

    Attributes:
        launch, submission, job: the member, the name of its submission, and SLURM's id of the job.
        info: the scheduler's newest view of the job; None if it has none.
        missing_since: executor's clock when the queue first lacked the job; None while it lists it.
        suspect: whether the job had ended at the last look; SLURM may still requeue it.
    """

    launch: Launch
    submission: str
    job: str
    info: JobInfo | None = None
    missing_since: float | None = None
    suspect: bool = False
    seen: bool = True  # in the queue and not over, since this process follows it


@dataclass
class _Pause:
    """Backoff: the time from which the scheduler may be asked to take a submission again."""

    until: float = 0.0
    length_s: float = 0.0

    def longer(self, now: float) -> None:
        """Double the pause after a refusal, from 5 s up to `_LONGEST_PAUSE_S`."""
        self.length_s = min(_LONGEST_PAUSE_S, max(5.0, 2 * self.length_s))
        self.until = now + self.length_s

    def over(self) -> None:
        """Reset the pause after a success."""
        self.length_s = self.until = 0.0


@dataclass
class ClusterExecutor:
    """Submits members as job arrays and follows them by the scheduler's queue.

    Args:
        study: the study's folder, on a file system that all nodes see.
        scheduler: access to the cluster's scheduler.
        settings: resources and limits of the jobs.
        entry: `module:function` that runs one member, given its directory.
        threads: CPU threads of a member's process.
        title: first part of the jobs' names.
        clock, sleep: monotonic seconds and waiting, replaceable in tests.
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
    _followed: dict[str, _Followed] = field(default_factory=dict, init=False)
    _abandoned: set[str] = field(default_factory=set, init=False)
    _pause: _Pause = field(default_factory=_Pause, init=False)
    _chunk: int | None = field(default=None, init=False)
    _most: int = field(default=1, init=False)
    _last_look: float = field(default=float("-inf"), init=False)
    _silent: bool = field(default=False, init=False)
    _warned: set[str] = field(default_factory=set, init=False)
    _remains: dict[str, Remains] = field(default_factory=dict, init=False)

    # --- submitting --------------------------------------------------------------------------------------

    def next_batch(self, waiting: Sequence[Launch]) -> int:
        """Return how many members fit one array and ask for the same resources; 0 during a backoff."""
        if not waiting or self.clock() < self._pause.until:
            return 0
        if self._chunk is None:
            self._most = self._chunk = min(self.scheduler.array_limit(), self.settings.array_size or 10**6)
        first = self._resources(waiting[0])
        size = 0
        while size < min(len(waiting), self._chunk) and self._resources(waiting[size]) == first:
            size += 1
        return size

    def submit(self, submission: str, members: Sequence[Launch]) -> dict[str, str | None]:
        """Submit members as one job, or one array; empty if the scheduler cannot take them now.

        Raises:
            UserError: it will never take them; nothing of this batch was submitted.
        """
        self._abandoned.update(name for member in members for name in member.unanswered)
        try:
            folder = new_folder(self.study, submission)
            job = self._submit(folder, submission, members, self._resources(members[0]))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._pause.longer(self.clock())
            _log.warning(
                "cluster: no space left for what is to be submitted; trying again in %.0f s", self._pause.length_s
            )
            return {}
        except RefusedError as refusal:
            try:
                found = self._refused(refusal, submission, len(members))
            except UserError:
                _remove(folder)
                raise
            if found is None:
                return {}
            job = found
            complete(folder, dict(zip(_names(job, len(members)), (each.run_dir for each in members), strict=True)))
        else:
            self._pause.over()
            self._chunk = min(self._most, 2 * (self._chunk or 1))
        return self._follow(submission, job, members)

    def _submit(self, folder: Path, submission: str, members: Sequence[Launch], resources: Mapping[str, Any]) -> str:
        """Write the submission's files, submit it and return the job's id; raise RefusedError."""
        settings = replace(self.settings, resources=resources)
        request = freeze(folder, submission, members, settings, self.entry, self.threads, self.title)
        try:
            return self.scheduler.submit(request)
        except RefusedError as refusal:
            # With failed nodes excluded or memory raised no node may be left: then retry with the original request.
            if members[0].excluded and not refusal.later:
                everywhere = self._resources(replace(members[0], excluded=()))
            elif not refusal.later and resources != (plain := with_layout(self.settings.resources, members[0].layout)):
                everywhere = plain
            else:
                raise
            members = [replace(member, excluded=()) for member in members]
            return self._submit(folder, submission, members, everywhere)

    def _refused(self, refusal: RefusedError, submission: str, size: int) -> str | None:
        """Handle a refusal: return the job's id if it was taken after all, None to try later, or raise."""
        if refusal.too_large and size > 1:
            self._most = self._chunk = max(1, size // 2)
            return None
        if not refusal.later:
            raise UserError(f"cluster: {said(str(refusal))}")
        if refusal.uncertain:
            # It may have been taken although nothing came back: then it is in the queue under its name.
            queue = self.scheduler.queue()
            if queue is not None and (job := _ids(queue).get(submission)):
                return job
            self._abandoned.add(submission)
        elif size > 1:
            self._chunk = max(1, size // 2)
        self._pause.longer(self.clock())
        _log.warning(
            "cluster: %d members wait to be submitted (%s); trying again in %.0f s",
            size,
            refusal,
            self._pause.length_s,
        )
        return None

    def _resources(self, launch: Launch) -> dict[str, Any]:
        """Return a member's resources: ranks, more memory after running out, failed nodes excluded, a later begin."""
        resources = with_layout(self.settings.resources, launch.layout)
        grown = launch.spent.get("out_of_memory", 0)
        if grown and resources.get("mem_gb"):
            resources["mem_gb"] = resources["mem_gb"] * MEMORY_GROWTH**grown
        if waits := launch.spent.get("duplicate", 0):
            # Another copy is at work: to look again costs an allocation for a while, so the pauses grow.
            begin = f"now+{min(_FIRST_LOOK_MIN * 2 ** (waits - 1), _LAST_LOOK_MIN)}minutes"
            resources["additional_parameters"] = {**(resources.get("additional_parameters") or {}), "begin": begin}
        if launch.excluded:
            given = [resources["exclude"]] if resources.get("exclude") else []
            resources["exclude"] = ",".join([*given, *launch.excluded])
        return resources

    def _follow(self, submission: str, job: str, members: Sequence[Launch]) -> dict[str, str | None]:
        jobs: dict[str, str | None] = {}
        for member, name in zip(members, _names(job, len(members)), strict=True):
            jobs[member.run] = name
            self._followed[member.run] = _Followed(member, submission, name)
        return jobs

    def adopt(self, members: Sequence[Launch]) -> dict[str, str | None]:
        """Follow jobs that an earlier controller submitted.

        A job whose id was written down is followed, whatever the scheduler knows of it now. One that was about to
        be submitted is looked for by the name of its submission.

        Raises:
            UserError: the scheduler does not answer, so nobody knows whether it took what was being submitted.
        """
        found: dict[str, str | None] = {}
        self._abandoned.update(name for member in members for name in member.unanswered)
        self._abandoned.difference_update(member.submission for member in members if member.submission)
        unclear = [member for member in members if member.job is None and member.submission]
        queue = self.scheduler.queue() if unclear else {}
        if queue is None:
            raise UserError(
                "cluster: the scheduler does not answer, and an earlier launch was interrupted while it submitted; "
                "try again when it does"
            )
        for member in members:
            if member.job is not None and member.submission:
                self._followed[member.run] = _Followed(member, member.submission, member.job, seen=False)
                found[member.run] = member.job
        self._remains.clear()
        ids = _ids(queue)
        for member in unclear:
            assert member.submission is not None
            left = self._left(member.submission)
            place = left.place(member.run)
            # A job that came and went before its id was written down is known by the log it left.
            job = ids.get(member.submission) or left.id()
            if job is None or place is None:
                self._abandoned.add(member.submission)
                continue
            number, size = place
            name = _names(job, size)[number]
            if self._was_refused(queue.get(name), member):
                continue
            if (info := queue.get(name)) is not None and info.state in QUEUED:
                complete(left.folder, {name: member.run_dir})  # its submission may have ended in between
            found[member.run] = name
            self._followed[member.run] = _Followed(member, member.submission, name, seen=False)
        return found

    def _was_refused(self, info: JobInfo | None, member: Launch) -> bool:
        """Return whether SLURM lists a job that it did not accept: its record says ended, but it never started."""
        if info is None or info.state not in ENDED:
            return False
        began = any(attempt.submission == member.submission for attempt in attempts(member.run_dir))
        return not began and not self._left(member.submission or "").starts(info.job)

    def _left(self, submission: str) -> Remains:
        """Return the files of a submission's jobs, cached until the next look at the queue."""
        if submission not in self._remains:
            self._remains[submission] = Remains(self.study, submission)
        return self._remains[submission]

    def _logs(self, each: _Followed) -> list[Path]:
        return self._left(each.submission).logs(each.job)

    def stop(self, runs: Sequence[str], reason: str) -> None:
        """Write a stop file for each member, read at its step boundaries, and cancel jobs that are still queued."""
        asked = [self._followed[run] for run in runs if run in self._followed]
        for each in asked:
            ask_to_stop(each.launch.run_dir, reason)
        self.scheduler.cancel([each.job for each in asked], waiting_only=True)

    # --- following ---------------------------------------------------------------------------------------

    def running(self) -> list[str]:
        """Members whose jobs have not ended."""
        return list(self._followed)

    def queued(self) -> frozenset[str]:
        """Members whose jobs are queued, for the first time or after a requeue."""
        return frozenset(run for run, each in self._followed.items() if each.info is None or each.info.state in QUEUED)

    def settled(self) -> bool:
        """Return whether the last query of the queue was answered and left the state of no job in doubt."""
        looked = self._last_look > float("-inf") and not self._silent
        return looked and not any(each.missing_since is not None or each.suspect for each in self._followed.values())

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return outcomes of jobs that have ended for good; the queue is queried every `poll_s` seconds at most."""
        pause = self._last_look + self.settings.poll_s - self.clock()
        if pause > 0:
            self.sleep(min(pause, timeout_s))
            if pause > timeout_s:
                return []
        self._last_look = self.clock()
        return self.look()

    def look(self) -> list[Outcome]:
        """Query the scheduler now, update the followed jobs, and return the outcomes of those that have ended."""
        queue = self.scheduler.queue()
        if queue is None:
            if not self._silent:
                _log.warning("cluster: the scheduler does not answer; jobs that run go on, and are asked for again")
            self._silent = True
            for each in self._followed.values():
                each.missing_since = None  # silence is no sign that a job is gone
            return []
        self._silent = False
        self._remains.clear()
        self._cancel_abandoned(queue)
        gone: list[_Followed] = []
        ended: list[_Followed] = []
        held: list[str] = []
        for each in self._followed.values():
            info = queue.get(each.job)
            if info is None or not info.name.endswith(each.submission):  # an id that was given out again
                gone.append(each)
            else:
                each.missing_since, each.info = None, info
                if _launch_failed(info):
                    held.append(info.job)
                    ended.append(each)
                    continue
                each.seen = each.seen or info.state not in ENDED
                self._warn_if_it_waits_for_ever(info)
                if info.state in ENDED and (each.suspect or info.state not in _MAY_COME_BACK):
                    ended.append(each)
                each.suspect = info.state in ENDED
        if held:
            self.scheduler.cancel(held)
        self._add_exit_codes([each for each in ended if each.info and each.info.state == "FAILED"])
        ended += self._left_the_queue(gone)
        outcomes = [replace(self._outcome(each), earlier=not each.seen) for each in ended]
        for outcome in outcomes:
            del self._followed[outcome.run]
        return outcomes

    def _add_exit_codes(self, failed: Sequence[_Followed]) -> None:
        """Add the exit codes of failed jobs, for a job that left no other record of why it ended."""
        known = self.scheduler.exit_codes([each.job for each in failed]) if failed else {}
        for each in failed:
            if each.info is not None:
                each.info = replace(each.info, exit_code=known.get(each.job, ""))

    def _warn_if_it_waits_for_ever(self, info: JobInfo) -> None:
        stuck = info.state in QUEUED and any(word in info.reason for word in _NEVER_RUNS)
        if stuck and info.reason not in self._warned:
            self._warned.add(info.reason)
            _log.warning(
                "cluster: job %s cannot start (%s); scancel it, and ask for what the cluster has", info.job, info.reason
            )

    def _left_the_queue(self, gone: Sequence[_Followed]) -> list[_Followed]:
        """Return those of the jobs missing from the queue that have ended, or are lost after `lost_after_s`."""
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
            elif self._last_attempt(each, outcome=True) is not None and missing_s >= _ACCOUNTING_S:
                ended.append(each)  # it said itself how it ended; accounting may be switched off
            elif missing_s >= self.settings.lost_after_s:
                each.info = None
                ended.append(each)
        return ended

    def _cancel_abandoned(self, queue: Mapping[str, JobInfo]) -> None:
        """Cancel jobs of submissions that were given up as lost and turn up in the queue after all."""
        late = {
            info.job.split("_")[0]
            for info in queue.values()
            if info.state not in ENDED and info.name.rpartition("-")[2] in self._abandoned
        }
        if late:
            self.scheduler.cancel(sorted(late))

    def _last_attempt(self, each: _Followed, outcome: bool = False) -> Attempt | None:
        """Return the record of a job's newest start; None if it left none, or (with `outcome`) none of its end."""
        own = [
            attempt
            for attempt in attempts(each.launch.run_dir)
            if attempt.job == each.job and attempt.submission == each.submission
        ]
        if not own or (outcome and own[-1].outcome is None):
            return None
        # A later start of the job that never came to the member must not be judged by what the earlier one said.
        newest = max(self._left(each.submission).starts(each.job), default=0)
        return own[-1] if own[-1].restart >= newest else None

    def _outcome(self, each: _Followed) -> Outcome:
        """Judge a job that has ended, by scheduler, attempt record, logs and journal."""
        attempt = self._last_attempt(each)
        kind, reason = why_ended(
            each.info,
            attempt,
            lambda: last_words(self._logs(each)),
            lambda: end_of_logs(self._logs(each), each.launch.run_dir, each.submission, each.job),
            self._left(each.submission).handed_over(each.job),
        )
        if kind is None:
            # If the journal says otherwise, it cannot be read, or the job had read a budget that was raised since.
            run, run_dir = each.launch.run, each.launch.run_dir
            steps = budget_of(run_dir)
            if (steps is None or not is_done(run_dir, steps, run)) and (wrong := trouble(run_dir, run)):
                return Outcome(run, 1, "error", wrong)
            where = attempt.node if attempt else None
            return Outcome(each.launch.run, 0, "outgrown", KINDS["outgrown"][0], where)
        if kind not in _OWN_FAULT and (asked := stop_asked(each.launch.run_dir)):
            return Outcome(each.launch.run, 1, "stopped", asked)  # whatever has ended it: it is not to go on
        return Outcome(each.launch.run, 1, kind, reason, self._to_blame(each, attempt))

    def _to_blame(self, each: _Followed, attempt: Attempt | None) -> str | None:
        """Return the node to exclude from the next attempt; of several, the one that a rank or srun names, or None."""
        if int(self._resources(each.launch).get("nodes") or 1) > 1:
            if attempt is not None and (attempt.culprit or attempt.kind in ("gpu", "storage")):
                return attempt.culprit or attempt.node  # the rank that failed has said where it was
            died = _TASK_DIED.search(last_words(self._logs(each), lines=100))
            return died[1] if died else None
        return attempt.node if attempt else (each.info.node or None if each.info else None)

    def close(self) -> None:
        """Do nothing: submitted jobs outlive this process."""


def _remove(folder: Path) -> None:
    """Remove the folder of a refused submission, and its parent if that is then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


def _launch_failed(info: JobInfo) -> bool:
    """Return whether SLURM holds the job in the queue for ever after it failed to launch it."""
    return info.state in QUEUED and _LAUNCH_FAILED in info.reason.replace("_", " ")


def why_ended(
    info: JobInfo | None,
    attempt: Attempt | None,
    last_words: Callable[[], str],
    logs: Callable[[], str] = lambda: "",
    handed_over: bool = True,
) -> tuple[str | None, str | None]:
    """Return kind and reason of a job's failure, both None if its member finished.

    The scheduler's state, the job's own last word and its log are put together: a Python error and an empty node look
    alike to SLURM, and a job that was killed had no last word.

    Args:
        info: the scheduler's view of the job; None if it does not know it.
        attempt: the job's own record; None if the member never began.
        last_words: reads the last lines of the batch log; called only if needed, as `logs`.
        logs: reads the end of the logs of the batch script and of every rank.
        handed_over: whether the job has the pickle that submitit starts from.
    """
    state = info.state if info else "UNKNOWN"
    if state == "CANCELLED":
        return "cancelled", "cancelled (scancel, or by an administrator)"
    if attempt is not None and attempt.outcome == "finished":
        return None, None
    if info is not None and _launch_failed(info):
        return "node", f"SLURM could not launch it, and holds it ({info.reason}); its job was cancelled"
    if state == "OUT_OF_MEMORY":
        return "out_of_memory", "killed for using more memory than the job asked for; raise mem_gb"
    if attempt is not None and attempt.outcome == "stopped":
        return "stopped", attempt.reason
    if attempt is not None and attempt.outcome == "failed":
        return attempt.kind or "error", attempt.reason or "failed"
    if info is not None and info.exit_code == f"{DISK_FULL_CODE}:0":
        return "disk_full", KINDS["disk_full"][0]
    kind = _KIND_OF_STATE.get(state)
    if kind is not None:
        node = f" ({info.node})" if info and info.node and kind == "node" else ""
        return kind, KINDS[kind][0] + node
    if attempt is not None and attempt.outcome == "interrupted":
        return attempt.kind or "preempted", f"{attempt.reason}; the job was not requeued"
    if attempt is None and not handed_over:
        return "half_submitted", KINDS["half_submitted"][0]
    if info is None:
        return "lost", "the scheduler no longer knows the job, and it left no last word"
    detail = f"SLURM says {state}" + (f", exit code {info.exit_code}" if info.exit_code else "")
    words = last_words()
    if _OUT_OF_MEMORY.search(words):
        return "out_of_memory", "killed for using more memory than the job asked for; raise mem_gb"
    if shown := shown_in(f"{logs()}\n{words}"):
        kind, line = shown
        return kind, f"{line} ({detail}, on {attempt.node if attempt else info.node})"
    if attempt is None:
        hint = "it said nothing; did a command of setup end the job, or does the node not see output_dir?"
        return "launch", f"the member never began ({detail}): {words[-500:] or hint}"
    return "killed", f"killed from outside on {attempt.node} ({detail})"


def last_words(logs: Sequence[Path], lines: int = 5) -> str:
    """Return the last lines of the batch logs, joined into one of at most 2000 characters."""
    said_lines = [line.strip() for path in logs for line in _tail(path)[0].splitlines() if line.strip()]
    return " / ".join(said_lines[-lines:])[-2000:]


# What native code prints when it gives up is long: a stack of each thread.
_LOG_TAIL = 1 << 16


def end_of_logs(logs: Sequence[Path], run_dir: Path, submission: str, job: str) -> str:
    """Return the end of the logs of a job's last start, those of the batch script and of every rank."""
    said = [_tail(path)[0] for path in logs]
    starts = [each.restart for each in attempts(run_dir) if (each.job, each.submission) == (job, submission)]
    for path in [run_dir / LOG_FILE, *sorted(run_dir.glob("log.rank*.txt"))] if starts else []:
        text, whole = _tail(path)
        _, found, own = text.rpartition(log_mark(submission, job, max(starts)))
        # A log without the mark is of other attempts, unless the mark is out of sight by now.
        said.append(own if found or not whole else "")
    return "\n".join(said)


def _tail(path: Path) -> tuple[str, bool]:
    """Return the end of a log, and whether that is the whole of it."""
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(max(0, size - _LOG_TAIL))
            return handle.read().decode(errors="replace"), size <= _LOG_TAIL
    except OSError:
        return "", True


def said(message: str) -> str:
    """Return sbatch's refusal followed by a remedy, a specific one where the message is known."""
    low = message.lower()
    for words, remedy in _REMEDIES:
        if all(word in low for word in words):
            return f"{message} -- {remedy}"
    return f"{message} -- sbatch refused the job; `sinfo` and `scontrol show partition` say what the cluster has"


_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("invalid partition",), "hydra.launcher.partition names no partition of this cluster; `sinfo` lists them"),
    (("account",), "hydra.launcher.account is not yours to use; `sacctmgr show associations user=$USER` lists yours"),
    (("qos",), "hydra.launcher.qos is not yours to use; `sacctmgr show associations user=$USER` lists yours"),
    (("node configuration",), "no node has what the job asks for; lower gpus_per_node, cpus_per_task or mem_gb"),
    (("node count",), "fewer nodes than hydra.launcher.nodes asks for; `sinfo` lists them"),
    (("maxwall",), "your account or QOS allows shorter jobs; lower hydra.launcher.timeout_min: jobs are chained"),
    (("perjob",), "more than your account or QOS allows one job; ask for less"),
    (("time limit",), "hydra.launcher.timeout_min is more than the partition allows; chains of jobs make up for it"),
    (("gres",), "hydra.launcher.gres names nothing that the nodes have; `sinfo -o '%N %G'` lists it"),
    (("feature",), "hydra.launcher.constraint names a feature that no node has; `sinfo -o '%N %f'` lists them"),
)


def _names(job: str, members: int) -> list[str]:
    """Return the ids of a submission's jobs: `12`, or `12_0` and so on in an array."""
    return [f"{job}_{number}" for number in range(members)] if members > 1 else [job]


def _ids(queue: Mapping[str, JobInfo]) -> dict[str, str]:
    """Return the job or array id of each submission in the queue, by the submission's name."""
    found: dict[str, str] = {}
    for info in queue.values():
        found.setdefault(info.name.rpartition("-")[2], info.job.split("_")[0])
    return found
