"""A fake SLURM cluster in virtual time, with scripted members and injected faults.

`FakeCluster` implements `sweeps.executor.slurm.scheduler.Scheduler`. Submissions go through submitit, whose call of
sbatch is replaced by a method that reads the batch script. Each member gets a journal and an attempts file, as
`executor.node.entry` writes them, and ends as its `Fate` says. Nothing here waits, forks or reads a real clock.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import sweeps.launch.study
from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.node.attempts import AttemptLog
from sweeps.executor.node.entry import checkpoint_step
from sweeps.executor.slurm import handover
from sweeps.executor.slurm.executor import ClusterExecutor
from sweeps.executor.slurm.handover import Request, pickle_of
from sweeps.executor.slurm.scheduler import ENDED, JobInfo, RefusedError, slurm_environment
from sweeps.executor.slurm.settings import JobSettings
from sweeps.executor.slurm.submission import STARTED
from sweeps.launch.ledger import Ledger, MemberState
from sweeps.launch.observer import Observer
from sweeps.launch.study import Study
from sweeps.run.interruption import requested_stop
from sweeps.run.journal import JOURNAL_FILE, Journal, read_journal
from sweeps.run.lease import Lease
from sweeps.run.progress import is_done
from sweeps.run.spec import RunSpec, make_spec
from sweeps.run.writer import DUPLICATE_WAIT_S

STEPS = 4
NODES = ("n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7")


class Killed(BaseException):
    """Raised where the controller's process is killed."""


class EndlessError(AssertionError):
    """Virtual time has run out: a controller waits for something that never happens."""


# --- fates: how one start of a job ends ----------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """The script of one start of a job: its steps and its end.

    Attributes:
        state: state that SLURM shows at the end.
        steps: number of steps that the member takes and saves; None for all remaining steps.
        unsaved: whether it takes one more step that it never saves.
        recorded: outcome, kind and reason that it writes to its attempts file; None if it is killed.
        begins: whether the member gets as far as writing its attempts file.
        comes_back: whether the job is requeued under its own id.
        held: whether the requeued job is held forever, because its node refused to launch it a second time.
        exit_code: exit code, as SLURM writes it.
        log_text: text in the batch log.
        lingers_s: how long the process continues after the scheduler counts the job as ended. It then finishes the run.
        forgotten: whether the scheduler loses the job and may give its id to another one.
        lasts_s: time from start to end.
        until_stopped: the job runs until its study asks it to stop, which is checked every `lasts_s`.
        lacks_pickle: whether the submission ended before it named the pickle that the job starts from.
    """

    state: str
    steps: int | None = 1
    unsaved: bool = True
    recorded: tuple[str, str | None, str | None] | None = None
    begins: bool = True
    comes_back: bool = False
    held: bool = False
    exit_code: str = "0:0"
    log_text: str = ""
    lingers_s: float = 0.0
    forgotten: bool = False
    lasts_s: float = 60.0
    until_stopped: bool = False
    lacks_pickle: bool = False


FINISHES = Fate("COMPLETED", steps=None, recorded=("finished", None, None))
# Interrupted near the time limit; the member saves and asks for a requeue.
REQUEUES = Fate("COMPLETING", unsaved=False, recorded=("interrupted", "time_limit", "SIGUSR2"), comes_back=True)
NOT_REQUEUED = Fate("FAILED", unsaved=False, recorded=("interrupted", "preempted", "SIGTERM"), exit_code="1:0")
PREEMPTED_AND_BACK = Fate("PREEMPTED", comes_back=True)
PREEMPTED = Fate("PREEMPTED")
NODE_FAILS_AND_BACK = Fate("NODE_FAIL", comes_back=True)
NODE_FAILS = Fate("NODE_FAIL", exit_code="1:0")
# slurmctld was down when the job began and took it for pending. The node then refused to launch it a second time.
IS_HELD = Fate("COMPLETING", comes_back=True, held=True)
TIMES_OUT = Fate("TIMEOUT", exit_code="0:1")
RUNS_OUT_OF_MEMORY = Fate("OUT_OF_MEMORY", exit_code="0:125")
RAISES_OUT_OF_MEMORY = Fate("FAILED", recorded=("failed", "out_of_memory", "MemoryError"), exit_code="1:0")
IS_KILLED_FOR_MEMORY = Fate(
    "FAILED", exit_code="0:9", log_text="slurmstepd: error: Detected 1 oom_kill event in StepId=7.0"
)
RAISES = Fate("FAILED", recorded=("failed", "error", "ValueError: no good"), exit_code="1:0")
FILLS_THE_DISK = Fate("FAILED", recorded=("failed", "disk_full", "OSError: [Errno 28]"), exit_code="1:0")
FILLS_THE_DISK_SILENTLY = Fate("FAILED", exit_code="28:0")
# It read the budget before it was raised, so it stops too early.
FINISHES_TOO_EARLY = Fate("COMPLETED", unsaved=False, recorded=("finished", None, None))
GIVES_UP = Fate("FAILED", steps=0, recorded=("failed", "gave_up", "5 attempts in a row"), exit_code="1:0")
IS_KILLED = Fate("FAILED", exit_code="0:9")
LASTS_UNTIL_STOPPED = Fate(
    "COMPLETED", recorded=("stopped", "stopped", "no longer needed"), lasts_s=10.0, until_stopped=True
)
IS_STOPPED = Fate("COMPLETED", unsaved=False, recorded=("stopped", "stopped", "no longer needed"))
IS_A_DUPLICATE = Fate(
    "FAILED", steps=0, recorded=("failed", "duplicate", "another process has been writing"), exit_code="1:0"
)
HANGS = Fate("FAILED", recorded=("failed", "hang", "no sign of life for 1800 s"), exit_code="86:0")
ECC = "CUDA error: uncorrectable ECC error encountered"
LOSES_ITS_GPU = Fate("FAILED", recorded=("failed", "gpu", f"RuntimeError: {ECC}"), exit_code="1:0")
# Native code aborts: no Python exception, so the only trace is in the log.
ABORTS_WITHOUT_A_GPU = Fate(
    "FAILED",
    exit_code="134:0",
    log_text=f"terminate called after throwing an instance of 'c10::Error'\n  what():  {ECC}",
)
LOSES_ITS_FILES = Fate(
    "FAILED", recorded=("failed", "storage", "OSError: [Errno 116] Stale file handle"), exit_code="1:0"
)
WAITS_FOR_A_RANK = Fate(
    "FAILED",
    exit_code="134:0",
    log_text="[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600061 milliseconds",
)
FINDS_NO_HUB = Fate("FAILED", steps=0, recorded=("failed", "network", "ReadTimeout: timed out"), exit_code="1:0")
LACKS_ITS_PICKLE = Fate(
    "FAILED",
    begins=False,
    exit_code="1:0",
    log_text="RuntimeError: Waited for 60 seconds but could not find submitted jobs in path:",
    lacks_pickle=True,
)
NEVER_BEGINS = Fate("FAILED", begins=False, exit_code="1:0", log_text="srun: error: no such file")
IS_CANCELLED = Fate("CANCELLED", exit_code="0:15")
IS_FORGOTTEN = Fate("RUNNING", forgotten=True)
# The scheduler believes the node is dead. The process continues, and a second copy is started.
HAS_A_SURVIVING_PROCESS = Fate("NODE_FAIL", steps=0, unsaved=False, comes_back=True, lingers_s=200.0)
IS_FORGOTTEN_AND_FINISHES = Fate("RUNNING", steps=0, unsaved=False, forgotten=True, lingers_s=400.0)

# Kind of failure that the study must record for each fate; None if it records no failure.
KIND: Mapping[Fate, str | None] = {
    FINISHES: None,
    REQUEUES: None,
    PREEMPTED_AND_BACK: None,
    NODE_FAILS_AND_BACK: None,
    NOT_REQUEUED: "preempted",
    PREEMPTED: "preempted",
    NODE_FAILS: "node",
    IS_HELD: "node",
    TIMES_OUT: "time_limit",
    RUNS_OUT_OF_MEMORY: "out_of_memory",
    RAISES_OUT_OF_MEMORY: "out_of_memory",
    IS_KILLED_FOR_MEMORY: "out_of_memory",
    RAISES: "error",
    FILLS_THE_DISK: "disk_full",
    FILLS_THE_DISK_SILENTLY: "disk_full",
    FINISHES_TOO_EARLY: "outgrown",
    GIVES_UP: "gave_up",
    IS_KILLED: "killed",
    HANGS: "hang",
    IS_A_DUPLICATE: "duplicate",
    LOSES_ITS_GPU: "gpu",
    ABORTS_WITHOUT_A_GPU: "gpu",
    LOSES_ITS_FILES: "storage",
    WAITS_FOR_A_RANK: "collective",
    FINDS_NO_HUB: "network",
    IS_STOPPED: "stopped",
    NEVER_BEGINS: "launch",
    LACKS_ITS_PICKLE: "half_submitted",
    IS_CANCELLED: "cancelled",
    IS_FORGOTTEN: "lost",
}


# --- time ----------------------------------------------------------------------------------------------------


@dataclass
class VirtualTime:
    """A clock that advances only when `sleep` is called."""

    limit_s: float = 200_000.0
    now: float = 1_000.0
    then: list[Callable[[], None]] = field(default_factory=list)

    def clock(self) -> float:
        """Return the current virtual time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock, and call the functions in `then`."""
        assert seconds > 0, "a sleep of no time: the caller is in a busy loop"
        self.now += seconds
        if self.now > self.limit_s:
            raise EndlessError(f"not done after {self.limit_s:.0f} virtual seconds")
        for each in self.then:
            each()


# --- jobs ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A job, or a task of an array, as the scheduler sees it."""

    number: int
    task: int | None
    name: str
    submission: str
    run: str
    run_dir: Path
    options: Mapping[str, str]
    visible_at: float
    state: str = "PENDING"
    reason: str = "Priority"
    restart: int = 0
    node: str = ""
    exit_code: str = "0:0"
    ended_at: float | None = None
    forgotten: bool = False
    process: Process | None = None
    epoch: int = 0

    @property
    def id(self) -> str:
        """`12`, or `12_3`."""
        return f"{self.number}" if self.task is None else f"{self.number}_{self.task}"


@dataclass(eq=False)
class Process:
    """A member's process on a node; it may still run when the scheduler counts the job as ended."""

    run_dir: Path
    log: AttemptLog
    began: float
    alive: bool = True
    writes: bool = False
    journal: Journal | None = None


class FakeCluster:
    """A fake cluster with one user.

    Args:
        time: the virtual clock.
        fates: fates of the starts of each run, in order; all further starts finish.
        wait_s: time that a job waits in the queue.
        remembers_s: how long the queue shows a job that has ended.
        accounting: whether sacct is available.
        accounting_lag_s: how long sacct shows an ended job as running.
        array_limit: largest size of an array, as `scontrol` reports it.
        true_array_limit: largest size that sbatch accepts; `array_limit` by default.
        submit_limit: largest number of the user's jobs that have not ended; no limit by default.
    """

    def __init__(
        self,
        time: VirtualTime,
        fates: Mapping[str, Sequence[Fate]] | None = None,
        wait_s: float = 5.0,
        remembers_s: float = 300.0,
        accounting: bool = True,
        accounting_lag_s: float = 0.0,
        array_limit: int = 1001,
        true_array_limit: int | None = None,
        submit_limit: int | None = None,
    ) -> None:
        self.time = time
        self.fates = defaultdict[str, deque[Fate]](deque, {run: deque(each) for run, each in (fates or {}).items()})
        self.wait_s = wait_s
        self.remembers_s = remembers_s
        self.accounting = accounting
        self.accounting_lag_s = accounting_lag_s
        self.reported_array_limit = array_limit
        self.true_array_limit = true_array_limit or array_limit
        self.submit_limit = submit_limit
        self.blink_s = 4.0  # how long a job shows its end state before it is requeued
        self.silent: Callable[[float], bool] = lambda now: False
        # One fault per future submission: None, "limit", "no_answer", "reply_lost", "late" (no answer, accepted later),
        # "shown_late" (answered, but in the queue only later), "refused", "killed_before", "killed_after",
        # "killed_between" (the controller and its helper process die before the pickles have their names).
        self.faults: deque[str | None] = deque()
        self.late_s = 100.0
        self.places: int | None = None  # number of jobs that may run at a time
        self.bad: dict[str, Fate] = {}  # bad nodes, with the fate of every job on them
        self.ahead_s: Mapping[str, float] = {}  # by node, seconds that its clock is ahead
        self.longest_wait_s = 0.0  # longest time that a copy of a run waited for the other copy
        self.jobs: list[Job] = []
        self.scripts: list[str] = []
        self.submit_times: list[float] = []
        self.cancelled: list[str] = []
        self.looks = 0
        self.begun = Counter[str]()
        self.started = Counter[str]()
        self._processes: list[Process] = []
        self._next = 1
        self._dies_next = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()
        time.then.append(self._catch_up)

    # --- interface of the scheduler, called by the executor ----------------------------------------------

    def submit(self, request: Request) -> str:
        """See `Scheduler.submit`. The helper process of `handover` is replaced by a call in this process."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
            patch.setattr(
                "submitit.core.utils.CommandFunction", lambda command, verbose: lambda: self._sbatch(*command)
            )
            job = handover.submit(handover.executor_of(request), request.members)
        if self._dies_next:
            die()
        return job

    def _sbatch(self, name: str, path: str) -> str:
        """Replace the sbatch command that submitit calls."""
        assert name == "sbatch"
        script, self._dies_next = Path(path), False
        self._catch_up()
        self.submit_times.append(self.time.now)
        text = script.read_text()
        options = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(.*)$", text)) | _exported()
        if not _free(options):
            raise RefusedError("sbatch: error: Requested node configuration is not available")
        size = int(match[1]) + 1 if (match := re.match(r"0-(\d+)%\d+$", options.get("array", ""))) else 1
        fault = self.faults.popleft() if self.faults else None
        if fault == "killed_before":
            die()
        if fault == "refused":
            raise RefusedError("sbatch: error: invalid partition specified: nowhere")
        if fault == "no_answer":
            raise RefusedError("sbatch: no answer", retryable=True, uncertain=True)
        if size > self.true_array_limit:
            raise RefusedError("sbatch: error: Invalid job array specification", retryable=True, too_large=True)
        if fault == "limit" or (self.submit_limit is not None and self._living() + size > self.submit_limit):
            raise RefusedError("sbatch: error: AssocMaxSubmitJobLimit: job submit limit", retryable=True)
        number = self._accept(script, text, options, size, fault)
        if fault in ("reply_lost", "late"):
            raise RefusedError("sbatch: error: Socket timed out on send/recv operation", retryable=True, uncertain=True)
        if fault == "killed_between":
            die()
        self._dies_next = fault == "killed_after"
        return f"Submitted batch job {number}\n"

    def queue(self) -> dict[str, JobInfo] | None:
        """See `Scheduler.queue`."""
        self._catch_up()
        self.looks += 1
        if self.silent(self.time.now):
            return None
        return {job.id: replace(self._info(job), exit_code="") for job in self.jobs if self._shown(job)}

    def exit_codes(self, jobs: Sequence[str]) -> dict[str, str]:
        """See `Scheduler.exit_codes`."""
        self._catch_up()
        if self.silent(self.time.now):
            return {}
        matching = [job for job in self.jobs if job.id in jobs and (self.accounting or self._shown(job))]
        return {job.id: job.exit_code for job in matching if job.ended_at is not None}

    def accounted(self, jobs: Sequence[str]) -> dict[str, JobInfo]:
        """See `Scheduler.accounted`."""
        self._catch_up()
        if not self.accounting or self.silent(self.time.now):
            return {}
        numbers = {int(job.split("_")[0]) for job in jobs}
        infos = {}
        for job in self.jobs:
            if job.number not in numbers:
                continue
            info = self._info(job)
            if job.forgotten:
                info = replace(info, state="PENDING", node="")  # the accounting database never learns of its end
            elif job.ended_at is not None and self.time.now - job.ended_at < self.accounting_lag_s:
                info = replace(info, state="RUNNING")
            infos[job.id] = info
        return infos

    def array_limit(self) -> int:
        """See `Scheduler.array_limit`."""
        return self.reported_array_limit

    def cancel(self, jobs: Sequence[str], waiting_only: bool = False) -> None:
        """See `Scheduler.cancel`."""
        self._catch_up()
        self.cancelled += jobs
        for job in self.jobs:
            if waiting_only and job.state != "PENDING":
                continue
            if (job.id in jobs or str(job.number) in jobs) and not job.forgotten and job.state not in ENDED:
                self._kill(job)
                self._end_job(job, "CANCELLED", "0:15")

    # --- called by tests ---------------------------------------------------------------------------------

    def jobs_of(self, run: str) -> list[Job]:
        """Return all jobs that were accepted for a run."""
        return [job for job in self.jobs if job.run == run]

    def sizes(self) -> list[int]:
        """Return the sizes of the accepted submissions, in order."""
        return list(Counter(job.submission for job in self.jobs if job.submission).values())

    def foreign(self, number: int, name: str = "somebody-elses", state: str = "RUNNING") -> Job:
        """Add a job of another user with the given id."""
        job = Job(number, None, name, "", "", Path(), {}, self.time.now, state=state)
        self.jobs.append(job)
        return job

    def first_id(self, number: int) -> None:
        """Set the id of the next job, which also determines its node."""
        self._next = number

    def living(self) -> list[Process]:
        """Return the processes that have not ended. The scheduler may count their jobs as ended."""
        return [process for process in self._processes if process.alive]

    # --- simulation --------------------------------------------------------------------------------------

    def _accept(self, script: Path, text: str, options: Mapping[str, str], size: int, fault: str | None) -> int:
        manifest = json.loads((script.parent / "submission.json").read_text())
        members = manifest["members"]
        late_s = self.late_s if fault in ("late", "shown_late") else 0.0
        assert len(members) == size, "the array and the manifest disagree"
        assert options["job-name"].endswith(f"-{manifest['submission']}")
        known = {job.number for job in self.jobs if not job.forgotten}
        number = self._next
        while number in known:
            number += 1
        self._next = number + 1
        self.scripts.append(text)
        for task, run in enumerate(members):
            job = Job(
                number=number,
                task=task if size > 1 else None,
                name=options["job-name"],
                submission=manifest["submission"],
                run=run,
                run_dir=script.parents[2] / "runs" / run,
                options=options,
                visible_at=self.time.now + late_s,
            )
            self.jobs.append(job)
            self._schedule(self.time.now + late_s + _begin_s(options) + self.wait_s, job, self._start)
        return number

    def _schedule(self, when: float, job: Job, what: Callable[[Job], None]) -> None:
        epoch = job.epoch

        def happen() -> None:
            if job.epoch == epoch:
                what(job)

        heapq.heappush(self._events, (when, next(self._serial), happen))

    def _catch_up(self) -> None:
        now = self.time.now
        while self._events and self._events[0][0] <= now:
            when, _, happen = heapq.heappop(self._events)
            self.time.now = when
            try:
                happen()
            finally:
                self.time.now = now

    def _start(self, job: Job) -> None:
        if self.places is not None and sum(other.state == "RUNNING" for other in self.jobs) >= self.places:
            self._schedule(self.time.now + self.wait_s, job, self._start)
            return
        free = _free(job.options)
        job.state, job.reason = "RUNNING", "None"
        job.node = free[(job.number + (job.task or 0) + job.restart) % len(free)]
        self.started[job.run] += 1
        folder = job.run_dir.parents[1] / "jobs" / job.submission
        (folder / f"{job.id}_0_log.out").touch()  # SLURM creates this file, the batch script the next one
        (folder / f"{STARTED}{job.id}-{job.restart}").touch()
        self._look_for_pickle(job, self.time.now + 60.0)

    def _look_for_pickle(self, job: Job, until: float) -> None:
        """Look for the pickle once per second for a minute, as submitit does in the job."""
        pickle = job.run_dir.parents[1] / "jobs" / job.submission / pickle_of(job.id)
        if not pickle.exists():
            if self.time.now >= until:
                self._end(job, LACKS_ITS_PICKLE)
            else:
                self._schedule(self.time.now + 1.0, job, lambda each: self._look_for_pickle(each, until))
            return
        fates = self.fates[job.run]
        fate = self.bad.get(job.node) or (fates.popleft() if fates else FINISHES)
        if fate.lacks_pickle:
            pickle.unlink()
        if fate.begins:
            ahead_s = self.ahead_s.get(job.node, 0.0)
            who = (job.run_dir, job.submission, job.id, job.restart, job.node)
            log = AttemptLog(*who, clock=lambda: self.time.now + ahead_s)
            log.begin(checkpoint_step(job.run_dir))
            job.process = Process(job.run_dir, log, self.time.now)
            self._processes.append(job.process)
            self.begun[job.run] += 1
            self._take_turn(job.process)
        self._schedule(self.time.now + fate.lasts_s, job, lambda each: self._end(each, fate))

    def _take_turn(self, process: Process) -> bool:
        """Let one process of a run write and the others wait, as the lease on a run does."""
        others = [each for each in self.living() if each.run_dir == process.run_dir and each.writes]
        if not process.writes and not others:
            process.writes = True
            if not is_done(process.run_dir, STEPS, process.run_dir.name):
                process.journal = continue_journal(process.run_dir)
        return process.writes

    def _end(self, job: Job, fate: Fate) -> None:
        process = job.process
        if fate.until_stopped and requested_stop(job.run_dir) is None:
            self._schedule(self.time.now + fate.lasts_s, job, lambda each: self._end(each, fate))
            return
        if process is not None and not self._take_turn(process) and fate.recorded is not None:
            waited_s = self.time.now - process.began
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
            if waited_s < DUPLICATE_WAIT_S:
                self._schedule(self.time.now + 10.0, job, lambda each: self._end(each, fate))  # wait for the other copy
                return
            fate = IS_A_DUPLICATE
        if process is not None:
            work(process, fate)
        if fate.log_text:
            folder = job.run_dir.parents[1] / "jobs" / job.submission
            (folder / f"{job.id}_0_log.out").write_text(fate.log_text + "\n")
        if fate.lingers_s and process is not None:
            job.process = None
            end_of_process = self.time.now + fate.lingers_s
            heapq.heappush(self._events, (end_of_process, next(self._serial), lambda: finish(process)))
        else:
            self._kill(job)
        if fate.forgotten:
            job.forgotten, job.epoch = True, job.epoch + 1
            self._next = min(self._next, job.number)
        elif fate.comes_back:
            job.state, job.epoch = fate.state, job.epoch + 1
            self._schedule(self.time.now + self.blink_s, job, self._hold if fate.held else self._come_back)
        else:
            self._end_job(job, fate.state, fate.exit_code)

    def _come_back(self, job: Job) -> None:
        job.state, job.reason, job.node, job.restart = "PENDING", "BeginTime", "", job.restart + 1
        self._schedule(self.time.now + self.wait_s, job, self._start)

    def _hold(self, job: Job) -> None:
        job.state, job.reason, job.node = "PENDING", "launch failed requeued held", ""

    def _end_job(self, job: Job, state: str, exit_code: str) -> None:
        job.state, job.exit_code, job.ended_at, job.epoch = state, exit_code, self.time.now, job.epoch + 1

    def _kill(self, job: Job) -> None:
        if job.process is not None:
            stop(job.process)
            job.process = None

    def _living(self) -> int:
        return sum(job.state not in ENDED and not job.forgotten for job in self.jobs)

    def _shown(self, job: Job) -> bool:
        old = job.ended_at is not None and self.time.now - job.ended_at >= self.remembers_s
        return not job.forgotten and not old and job.visible_at <= self.time.now

    def _info(self, job: Job) -> JobInfo:
        return JobInfo(job.id, job.state, job.node, job.reason, job.name, job.exit_code)


def _exported() -> dict[str, str]:
    """Return the options that sbatch takes from its environment; they override the options in the script."""
    names = {"SBATCH_JOB_NAME": "job-name", "SBATCH_ARRAY_INX": "array", "SBATCH_EXCLUDE": "exclude"}
    return {names[name]: value for name, value in slurm_environment(os.environ).items() if name in names}


def _begin_s(options: Mapping[str, str]) -> float:
    """Return the delay of `--begin` in seconds."""
    match = re.fullmatch(r"now\+(\d+)minutes", options.get("begin", "now+0minutes"))
    assert match is not None, options["begin"]
    return 60.0 * int(match[1])


def _free(options: Mapping[str, str]) -> list[str]:
    """Return the nodes on which a job may run."""
    excluded = options.get("exclude", "").strip("'").split(",")
    return [node for node in NODES if node not in excluded]


# --- members -------------------------------------------------------------------------------------------------


def continue_journal(run_dir: Path) -> Journal:
    """Continue a journal from the last checkpoint, as a run does; later records become void."""
    step = checkpoint_step(run_dir)
    fresh = not (run_dir / JOURNAL_FILE).exists()
    journal = Journal(run_dir)
    if fresh:
        journal.header(run=run_dir.name)
    else:
        journal.resume(step)
    return journal


def metrics_at(step: int) -> dict[str, dict[str, float]]:
    """Return the metrics that the deterministic fake recipe records at a step."""
    return {"train": {"train/loss": 1 / step}, "eval": {"eval/heldout/pass_rate": step / (step + 1)}}


def work(process: Process, fate: Fate) -> None:
    """Take the steps that a fate allows, and record the end that it allows to record."""
    journal = process.journal
    if journal is not None:
        begin = max(checkpoint_step(process.run_dir), 0)
        # Only a member that finishes may reach the budget.
        end = STEPS if fate.steps is None else min(begin + fate.steps, STEPS - 1)
        for step in range(begin + 1, end + 1):
            record_step(journal, step)
        if end > begin:
            journal.checkpoint(end)
        if fate.steps is not None and fate.unsaved:
            record_step(journal, end + 1)
        if fate.recorded is not None and fate.recorded[0] == "finished":
            journal.end(end, "finished")
        elif fate.recorded is not None and fate.recorded[0] == "failed":
            journal.end(end, "failed", fate.recorded[2])
    if fate.recorded is not None:
        process.log.end(*fate.recorded)


def record_step(journal: Journal, step: int) -> None:
    """Record one step."""
    for kind, metrics in metrics_at(step).items():
        journal.record(kind, step, metrics)


def finish(process: Process) -> None:
    """Let a lingering process finish its run."""
    if process.alive:
        work(process, FINISHES)
        stop(process)


def stop(process: Process) -> None:
    """End a process without a record of its end."""
    process.alive = process.writes = False
    if process.journal is not None:
        process.journal.close()


def member(seed: int = 0) -> RunSpec:
    """Return the spec of a run of `STEPS` steps."""
    config = {"loss": {"choice": "cispo"}, "seed": seed, "budget": {"steps": STEPS}}
    return make_spec(config, config, "scalerl", "scalerl")


def assert_complete(run_dir: Path) -> None:
    """Assert that no journal record is missing, duplicated or altered."""
    view = read_journal(run_dir)
    assert view.status == "finished"
    for kind in ("train", "eval"):
        records = view.of_kind(kind)
        assert [record.step for record in records] == list(range(1, STEPS + 1)), f"{kind} of {run_dir.name}"
        assert all(record.metrics == metrics_at(record.step)[kind] for record in records)
    entries = [json.loads(line) for line in (run_dir / JOURNAL_FILE).read_text().splitlines()]
    assert sum(entry["kind"] == "run" for entry in entries) == 1
    ends = [entry["step"] for entry in entries if entry["kind"] == "end" and entry["status"] == "finished"]
    assert ends.count(STEPS) == 1 and ends[-1] == STEPS
    written: set[tuple[str, int]] = set()
    for entry in entries:
        if entry["kind"] == "resume":
            written = {each for each in written if each[1] <= entry["step"]}
        elif entry["kind"] in ("train", "eval"):
            assert (entry["kind"], entry["step"]) not in written, "written twice without a resume between"
            written.add((entry["kind"], entry["step"]))


# --- controllers ---------------------------------------------------------------------------------------------


class RecordingObserver(Observer):
    """An observer that records events, and checks their order."""

    def __init__(self) -> None:
        self.events: dict[str, list[str]] = defaultdict(list)
        self.ticks: list[tuple[int, int, int, int]] = []
        self.opened = 0
        self.closed: list[tuple[int, int]] = []

    def open(self) -> None:
        self.opened += 1

    def queued(self, spec: RunSpec, run_dir: Path) -> None:
        self._add(spec, "queued")

    def started(self, spec: RunSpec, run_dir: Path) -> None:
        self._add(spec, "started")

    def retried(self, spec: RunSpec, run_dir: Path, reason: str) -> None:
        assert reason
        self._add(spec, "retried")

    def ended(self, spec: RunSpec, run_dir: Path, state: str, reason: str | None) -> None:
        assert (state == "finished") == (reason is None)
        assert (state == "finished") == is_done(run_dir, STEPS, spec.run), (
            "reported as finished, or not, against the journal"
        )
        self._add(spec, state)

    def tick(self, running: Sequence[RunSpec], queued: int, done: int, failed: int) -> None:
        self.ticks.append((len(running), queued, done, failed))

    def close(self, failed: int, left: int) -> None:
        self.closed.append((failed, left))

    def _add(self, spec: RunSpec, event: str) -> None:
        earlier = self.events[spec.run]
        assert not earlier or earlier[-1] not in ("finished", "failed", "cancelled"), "an event after the end"
        assert not earlier or earlier[-1] != event, f"{event} twice"
        earlier.append(event)


class MortalLease(Lease):
    """A lease whose holder can be killed: the operating system drops the lock, and the file stays unchanged."""

    holder_was_killed = False

    def release(self) -> None:
        if not MortalLease.holder_was_killed:
            super().release()
            return
        self._stop.set()
        if isinstance(self._thread, threading.Thread):
            self._thread.join()
        self._flock.release()


@dataclass
class Place:
    """A study on a fake cluster; each `run` is a new controller."""

    directory: Path
    cluster: FakeCluster
    specs: list[RunSpec]
    settings: JobSettings = field(default_factory=JobSettings)
    retries: Mapping[str, int | None] = field(default_factory=retry_policy)
    virtual_ledger: bool = False  # whether the ledger uses the cluster's clock

    @property
    def time(self) -> VirtualTime:
        """Return the cluster's clock."""
        return self.cluster.time

    def executor(self) -> ClusterExecutor:
        """Return the executor of a new controller."""
        return ClusterExecutor(
            self.directory,
            self.cluster,
            self.settings,
            "unused:entry",
            1,
            "study",
            clock=self.time.clock,
            sleep=self.time.sleep,
        )

    def run(
        self,
        observers: Sequence[Observer] = (),
        detach: bool = False,
        again: bool = True,
        killed_at: tuple[str, int] | None = None,
    ) -> dict[str, MemberState]:
        """Run one controller; `killed_at` kills it `before` or `after` the n-th write to the ledger."""
        MortalLease.holder_was_killed = False
        study = Study(self.directory, self.specs)
        if self.virtual_ledger:
            study.ledger = Ledger(self.directory, self.time.clock)
        try:
            with killed(*killed_at) if killed_at else nothing():
                return study.run(self.executor(), observers, self.retries, detach=detach, again=again)
        except Killed:
            raise
        finally:
            MortalLease.holder_was_killed = False

    def until_done(
        self, kills: Iterator[tuple[str, int] | None], gap_s: float = 0.0, controllers: int = 100
    ) -> dict[str, MemberState]:
        """Run controllers, each killed at the next of `kills`, until one runs to its end."""
        for _ in range(controllers):
            try:
                return self.run([RecordingObserver()], again=False, killed_at=next(kills, None))
            except Killed:
                if gap_s:
                    self.time.sleep(gap_s)
        raise EndlessError(f"not done after {controllers} controllers")

    def events(self, run: str) -> list[dict[str, Any]]:
        """Return a run's entries in the ledger."""
        return [entry for entry in Ledger(self.directory).entries() if entry["run"] == run]

    def count(self, run: str, event: str) -> int:
        """Count an event in a run's ledger entries."""
        return sum(entry["event"] == event for entry in self.events(run))

    def run_dir(self, run: str) -> Path:
        """Return the folder of a run."""
        return self.directory / "runs" / run

    def finished_once(self, run: str) -> None:
        """Assert that a run finished, that the ledger says so once, and that its journal is complete."""
        assert self.count(run, "finished") == 1, [entry["event"] for entry in self.events(run)]
        assert self.count(run, "failed") == 0
        assert_complete(self.run_dir(run))


@contextmanager
def killed(where: str, number: int) -> Iterator[None]:
    """Kill the controller before or after the n-th write to the ledger."""
    calls = count(1)
    original = Ledger.append_all

    def append_all(ledger: Ledger, event: str, entries: Sequence[Mapping[str, Any]]) -> None:
        if not entries:
            return
        due = next(calls) == number
        if due and where == "before":
            die()
        original(ledger, event, entries)
        if due:
            die()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "append_all", append_all)
        yield


def die() -> None:
    """End the controller's process without any clean-up."""
    MortalLease.holder_was_killed = True
    raise Killed


@contextmanager
def nothing() -> Iterator[None]:
    """Do not kill the controller."""
    yield


def light(patch: pytest.MonkeyPatch) -> None:
    """Replace slow parts that are tested elsewhere: fsync, and freezing the code. Make leases mortal."""
    patch.setattr("os.fsync", lambda descriptor: None)
    patch.setattr("sweeps.executor.node.manifest.record_code", lambda folder: {"commit": None})
    patch.setattr(sweeps.launch.study, "Lease", MortalLease)
