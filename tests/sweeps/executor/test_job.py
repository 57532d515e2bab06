"""Tests of a job on a compute node: which member it runs, its log, and the record of its end.

`sweeps.executor.node.entry` runs in its own process, as a SLURM job with faked variables. The members are functions of
this module.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from submitit.core.submission import process_job

from sweeps.executor.failure import MAX_IDLE_ATTEMPTS
from sweeps.executor.node import entry as node_entry
from sweeps.executor.node import manifest as node_manifest
from sweeps.executor.node.attempts import ATTEMPTS_DIR, Attempt, AttemptLog, attempts
from sweeps.executor.node.ending import end_of_logs
from sweeps.executor.node.entry import DISK_FULL_CODE, idle_attempts
from sweeps.executor.slurm import handover, job
from sweeps.run import gpu, slurm_job
from sweeps.run.activity import HUNG_CODE, HangTimeout, activity
from sweeps.run.interruption import RunInterruptedError, ask_to_stop, interruption
from sweeps.run.journal import LOG_FILE, Journal
from tests.paths import ROOT

TOKEN = "hf_" + "b2" * 15
LOGIN = "https://me:hunter2hunter2@mlflow.example"


# --- members, which the job calls by name --------------------------------------------------------------------


def finish(run_dir: Path) -> None:
    """Write to stdout and stderr in every way."""
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"written\n")
    (run_dir / "ran").write_text(os.environ.get("SLURM_PROCID", "0"))


def leave(run_dir: Path) -> None:
    """Exit by SystemExit, which does not count as success for any code."""
    sys.exit(0)


def fail(run_dir: Path) -> None:
    """Raise an error of the recipe, with secrets in its message."""
    raise ValueError(f"cannot reach {LOGIN} with {TOKEN} and {os.environ['MY_API_KEY']}\nand more")


def run_out_of_memory(run_dir: Path) -> None:
    """Run out of host memory."""
    raise MemoryError


def run_out_of_gpu_memory(run_dir: Path) -> None:
    """Raise torch's out-of-memory error inside another error."""

    class OutOfMemoryError(RuntimeError):
        pass

    try:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    except RuntimeError as error:
        raise ValueError("the step failed") from error


def fill_the_disk(run_dir: Path) -> None:
    """Raise the kernel's error of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir / "checkpoint"))


def fill_the_disk_while_saving(run_dir: Path) -> None:
    """Raise the error of torch's file streams on a full disk."""
    raise RuntimeError("basic_ios::clear: iostream error: No space left on device")


def lose_a_peer(run_dir: Path) -> None:
    """Raise gloo's error of a dead peer. With a single task, the peer is not a rank of this job."""
    raise RuntimeError("Connection closed by peer [10.0.0.7]:4711")


def wait_for_a_signal(run_dir: Path) -> None:
    """Run until a signal asks to stop, then save and stop."""
    (run_dir / "begun").touch()
    deadline = time.monotonic() + 60
    while not interruption.requested:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (run_dir / "saved").touch()
    raise RunInterruptedError(f"at step 7 ({interruption.reason})")


def hang(run_dir: Path) -> None:
    """Hang like a member that waits for a dead peer."""
    # If the watching thread gets no CPU time for twice as long, Python's watchdog ends the process with another code.
    with activity.watched(HangTimeout(2.0, 2.0)):
        activity.note("decode")
        threading.Event().wait(60)


def run_until_stopped(run_dir: Path) -> None:
    """Run until the study asks to stop."""
    (run_dir / "begun").touch()
    with interruption.watching_stop_file(run_dir):
        deadline = time.monotonic() + 60
        while not interruption.requested:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    raise RunInterruptedError(f"at step 7 ({interruption.reason})")


def record_handlers(run_dir: Path) -> None:
    """Record the handlers of the signals that submitit handles."""
    handlers = {number.name: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT)}
    descriptions = {name: f"{getattr(handler, '__module__', '')} {handler!r}" for name, handler in handlers.items()}
    (run_dir / "handlers").write_text(json.dumps(descriptions))


def stop_at_once(run_dir: Path) -> None:
    """Stop at once, like a member that was asked to stop before it began."""
    raise RunInterruptedError("at step 7 (SIGUSR2)")


# --- helpers -------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """The process of a job."""

    pid: int

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def call_function(here: Submission) -> None:
    """Call the function that submitit unpickles."""
    job.run_member(str(here.own_run_dir()))


def call_submitit(here: Submission) -> None:
    """Run everything that follows srun, with submitit's own signal handlers."""
    handover.complete(here.folder, {slurm_job.job_id(): here.own_run_dir()})
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"
    process_job(here.folder)


def call_as_an_earlier_version(here: Submission) -> None:
    """Call the function that batch scripts called before they used submitit."""
    job.run([str(here.folder)])


STARTS = (call_function, call_submitit, call_as_an_earlier_version)


@dataclass
class Submission:
    """A submission: its folder, its manifest, and how its jobs start the member."""

    study: Path
    entry: Callable[[Path], None] = finish
    members: tuple[str, ...] = ("one",)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    start_member: Callable[[Submission], None] = call_function

    def __post_init__(self) -> None:
        self.folder = self.study / "jobs" / "abc"
        self.folder.mkdir(parents=True)
        facts = {
            "submission": "abc",
            "entry": f"{__name__}:{self.entry.__name__}",
            "members": self.members,
            "timeout_min": 60,
            "signal_delay_s": 120,
            "max_num_timeout": None,
            **self.manifest,
        }
        (self.folder / "submission.json").write_text(json.dumps(facts))

    @property
    def marker(self) -> Path:
        """Return the path of the file that asks for a requeue."""
        return self.folder / "requeue-77-0"

    def run_dir(self, run: str = "one") -> Path:
        return self.study / "runs" / run

    def own_run_dir(self) -> Path:
        """Return the folder of this task's member."""
        return self.run_dir(self.members[slurm_job.array_index()])

    def start(self, before: Callable[[], None] | None = None, /, **variables: str) -> Job:
        """Start a job, which calls `before` first."""
        output = self.study / "output"
        pid = os.fork()  # a fork needs no new imports, which take seconds
        if pid == 0:
            code = 99
            try:
                for name in [name for name in os.environ if name.startswith(("SLURM", "SUBMITIT"))]:
                    del os.environ[name]
                os.environ |= {
                    "SLURM_JOB_ID": "77",
                    "SLURMD_NODENAME": "node-9",
                    "SCALERL_REQUEUE_FILE": str(self.marker),
                    "SUBMITIT_FOLDER": str(self.folder),
                    "MY_API_KEY": "a-key-of-mine",
                    **variables,
                }
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                interruption.clear()
                (before or (lambda: None))()
                self.start_member(self)
            finally:
                os._exit(code)
        return Job(pid)

    def run(self, before: Callable[[], None] | None = None, /, **variables: str) -> int:
        """Run a job and return its exit code."""
        return self.start(before, **variables).wait()

    def interrupt(self, number: signal.Signals, **variables: str) -> int:
        """Run a job that gets a signal once its member has begun; return its exit code."""
        started = self.start(None, **variables)
        deadline = time.monotonic() + 60
        while not (self.run_dir() / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(started.pid, number)
        return started.wait()

    @property
    def job_output(self) -> str:
        """Return the output of the job that is not in the member's log."""
        return (self.study / "output").read_text()

    def attempts(self, run: str = "one") -> list[Attempt]:
        return attempts(self.run_dir(run))


def checkpoint(run_dir: Path, step: int) -> None:
    """Write a journal with a checkpoint."""
    journal = Journal(run_dir)
    journal.header(run="one")
    journal.checkpoint(step)
    journal.close()


def record_attempts(
    submission: Submission, count: int, step: int, outcome: str | None, kind: str | None = None
) -> None:
    """Record `count` earlier attempts of this job."""
    for number in range(count):
        log = AttemptLog(submission.run_dir(), "abc", "77", number, "node-1")
        log.begin(step)
        if outcome is not None:
            log.end(outcome, kind, "before")


# --- ends of a member ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_member", STARTS)
def test_a_finished_member_is_recorded(tmp_path: Path, start_member: Callable[[Submission], None]) -> None:
    here = Submission(tmp_path, start_member=start_member)
    assert here.run() == 0
    (attempt,) = here.attempts()
    assert (attempt.submission, attempt.job, attempt.restart, attempt.node) == ("abc", "77", 0, "node-9")
    assert (attempt.outcome, attempt.kind, attempt.reason, attempt.step) == ("finished", None, None, -1)
    assert attempt.ended is not None and attempt.began <= attempt.ended
    assert not here.marker.exists()


def test_all_output_of_a_member_is_appended_to_its_log(tmp_path: Path) -> None:
    here = Submission(tmp_path)
    here.run_dir().mkdir(parents=True)
    (here.run_dir() / LOG_FILE).write_text("of an earlier attempt\n")
    here.run()
    assert sorted((here.run_dir() / LOG_FILE).read_text().splitlines()) == [
        "--- job 77, start 0 (abc)",
        "complained",
        "of an earlier attempt",
        "printed",
        "written",
    ]
    assert here.job_output == ""


def test_only_the_owner_can_read_a_log(tmp_path: Path) -> None:
    here = Submission(tmp_path)
    here.run()
    assert stat.S_IMODE((here.run_dir() / LOG_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("entry", "kind", "reason"),
    [
        (fail, "error", "ValueError: cannot reach https://***@mlflow.example with *** and ***"),
        (run_out_of_memory, "out_of_memory", "MemoryError"),
        (run_out_of_gpu_memory, "out_of_memory", "ValueError: the step failed"),
        (fill_the_disk, "disk_full", "OSError: [Errno 28] No space left on device"),
        (fill_the_disk_while_saving, "disk_full", "RuntimeError: basic_ios::clear"),
        (leave, "error", "SystemExit: 0"),
    ],
)
def test_a_failure_is_recorded_with_its_reason_and_not_requeued(
    tmp_path: Path, entry: Callable[[Path], None], kind: str, reason: str
) -> None:
    here = Submission(tmp_path, entry)
    assert here.run() == (DISK_FULL_CODE if kind == "disk_full" else 1)
    (attempt,) = here.attempts()
    assert (attempt.outcome, attempt.kind) == ("failed", kind)
    assert attempt.reason is not None and attempt.reason.startswith(reason)
    assert not here.marker.exists()
    assert "Traceback" in (here.run_dir() / LOG_FILE).read_text()


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [("1", "RuntimeError: Connection closed by peer"), ("2", "another rank of the job died; its log")],
)
def test_a_dead_peer_is_another_rank_only_if_the_job_has_several_tasks(tmp_path: Path, tasks: str, reason: str) -> None:
    here = Submission(tmp_path, lose_a_peer)
    assert here.run(SLURM_STEP_NUM_TASKS=tasks) == 1
    (attempt,) = here.attempts()
    assert attempt.kind == "killed" and str(attempt.reason).startswith(reason)


def test_a_hanging_member_ends_itself_and_is_not_requeued(tmp_path: Path) -> None:
    here = Submission(tmp_path, hang)
    assert here.run() == HUNG_CODE
    (attempt,) = here.attempts()
    assert (attempt.outcome, attempt.kind) == ("failed", "hang")
    assert attempt.reason is not None and "no sign of life for" in attempt.reason and "decode" in attempt.reason
    assert not here.marker.exists()
    assert "in hang" in (here.run_dir() / LOG_FILE).read_text(), "the log has the stack"


def test_a_member_stopped_by_its_study_is_recorded_and_not_requeued(tmp_path: Path) -> None:
    here = Submission(tmp_path, run_until_stopped)
    started = here.start()
    deadline = time.monotonic() + 60
    while not (here.run_dir() / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ask_to_stop(here.run_dir(), "no longer needed")
    assert started.wait() == 0
    (attempt,) = here.attempts()
    assert (attempt.outcome, attempt.kind, attempt.reason) == ("stopped", "stopped", "no longer needed")
    assert not here.marker.exists()


@pytest.mark.parametrize("entry", [run_until_stopped, finish])
def test_a_member_stopped_while_its_job_was_queued_never_begins(tmp_path: Path, entry: Callable[[Path], None]) -> None:
    here = Submission(tmp_path, entry)
    here.run_dir().mkdir(parents=True)
    ask_to_stop(here.run_dir(), "no longer needed")
    assert here.run() == 0
    (attempt,) = here.attempts()
    assert (attempt.outcome, attempt.reason) == ("stopped", "no longer needed")
    assert not (here.run_dir() / "begun").exists() and not (here.run_dir() / "ran").exists()


def test_secrets_in_an_error_are_masked_everywhere(tmp_path: Path) -> None:
    here = Submission(tmp_path, fail)
    here.run()
    written = here.job_output + "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "cannot reach" in written
    for secret in ("hunter2hunter2", TOKEN, "a-key-of-mine"):
        assert secret not in written


def test_an_entry_that_cannot_be_imported_is_a_recorded_error(tmp_path: Path) -> None:
    here = Submission(tmp_path, manifest={"entry": "no_such_module:entry"})
    assert here.run() == 1
    assert here.attempts()[0].reason == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_full_disk_that_prevents_the_record_is_reported_by_the_exit_code(tmp_path: Path) -> None:
    here = Submission(tmp_path, fill_the_disk)

    def nothing_can_be_written() -> None:
        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        AttemptLog.end = full  # type: ignore[method-assign, assignment]

    assert here.run(nothing_can_be_written) == DISK_FULL_CODE
    assert here.attempts()[0].outcome is None
    assert "No space left on device" in (here.run_dir() / LOG_FILE).read_text()


def test_an_interrupted_member_asks_for_a_requeue_on_a_full_disk(tmp_path: Path) -> None:
    here = Submission(tmp_path, stop_at_once)

    def nothing_can_be_written() -> None:
        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        AttemptLog.end = full  # type: ignore[method-assign, assignment]

    assert here.run(nothing_can_be_written) == DISK_FULL_CODE
    assert here.marker.exists()


# --- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_member", STARTS)
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_makes_a_member_save_and_ask_for_a_requeue(
    tmp_path: Path, number: signal.Signals, start_member: Callable[[Submission], None]
) -> None:
    here = Submission(tmp_path, wait_for_a_signal, start_member=start_member)
    assert here.interrupt(number) == 1
    assert (here.run_dir() / "saved").exists()
    (attempt,) = here.attempts()
    assert (attempt.outcome, attempt.kind) == ("interrupted", "preempted")
    assert attempt.reason == f"at step 7 ({number.name})"
    assert here.marker.exists()
    assert stat.S_IMODE(here.marker.stat().st_mode) == 0o600


def test_submitit_neither_handles_signals_nor_pickles_results(tmp_path: Path) -> None:
    """submitit's handlers would requeue the job in the middle of a step. Its pickled results are never read."""
    here = Submission(tmp_path, record_handlers, start_member=call_submitit)
    assert here.run() == 0
    handlers = json.loads((here.run_dir() / "handlers").read_text())
    assert "SIG_DFL" in handlers.pop("SIGCONT")
    assert len(handlers) == 2 and not any("submitit" in handler for handler in handlers.values())
    assert [path.name for path in here.folder.glob("*.pkl*")] == ["77_submitted.pkl"]


def jump_clock(seconds: float) -> Callable[[], None]:
    """Return a function that lets the clock jump after its first read, which is the begin of the job."""

    def patch() -> None:
        real, looks = time.time, iter([0.0])
        node_entry.time = SimpleNamespace(  # type: ignore[assignment, attr-defined]
            time=lambda: real() + next(looks, seconds), monotonic=time.monotonic, sleep=time.sleep
        )

    return patch


@pytest.mark.parametrize(
    ("seconds", "kind"), [(60, "preempted"), (3300, "preempted"), (3420, "time_limit"), (3480, "time_limit")]
)
def test_a_warning_near_the_time_limit_is_of_kind_time_limit(tmp_path: Path, seconds: int, kind: str) -> None:
    here = Submission(tmp_path, stop_at_once)
    assert here.run(jump_clock(seconds)) == 1
    assert here.attempts()[0].kind == kind
    assert here.marker.exists()


@pytest.mark.parametrize(
    ("limit", "reached", "gives_up"), [(0, 0, True), (1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True)]
)
def test_a_job_may_reach_its_time_limit_max_num_timeout_times(
    tmp_path: Path, limit: int, reached: int, gives_up: bool
) -> None:
    here = Submission(tmp_path, stop_at_once, manifest={"max_num_timeout": limit})
    for number in range(reached):
        log = AttemptLog(here.run_dir(), "abc", "77", number, "node-1")
        log.begin(number)
        log.end("interrupted", "time_limit", "before")
    assert here.run(jump_clock(3480), SLURM_RESTART_COUNT=str(reached)) == 1
    last = here.attempts()[-1]
    assert (last.outcome, last.kind) == (("failed", "gave_up") if gives_up else ("interrupted", "time_limit"))
    assert here.marker.exists() is not gives_up
    if gives_up:
        assert f"max_num_timeout={limit}" in str(last.reason)


def test_preemptions_do_not_count_as_time_limits(tmp_path: Path) -> None:
    here = Submission(tmp_path, stop_at_once, manifest={"max_num_timeout": 1})
    for number in range(3):
        log = AttemptLog(here.run_dir(), "abc", "77", number, "node-1")
        log.begin(number)
        log.end("interrupted", "preempted", "before")
    assert here.run(jump_clock(3480), SLURM_RESTART_COUNT="3") == 1
    assert here.attempts()[-1].outcome == "interrupted"


def test_a_signal_before_the_member_begins_is_not_lost(tmp_path: Path) -> None:
    here = Submission(tmp_path, wait_for_a_signal)

    def signal_while_it_waits() -> None:
        original = node_entry.wait_for_manifest

        def wait(path: Path) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGUSR2)
            return original(path)

        node_entry.wait_for_manifest = wait

    assert here.run(signal_while_it_waits) == 1
    assert here.attempts()[0].outcome == "interrupted"


# --- chains of attempts without progress ---------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [None, "interrupted"])
def test_a_chain_of_attempts_without_a_new_checkpoint_is_given_up(tmp_path: Path, outcome: str | None) -> None:
    here = Submission(tmp_path)
    checkpoint(here.run_dir(), 6)
    record_attempts(here, MAX_IDLE_ATTEMPTS, 6, outcome)
    assert here.run(SLURM_RESTART_COUNT="5") == 1
    last = here.attempts()[-1]
    assert (last.outcome, last.kind) == ("failed", "gave_up")
    assert f"{MAX_IDLE_ATTEMPTS} attempts in a row" in str(last.reason) and "step 6" in str(last.reason)
    assert not (here.run_dir() / "ran").exists()
    assert not here.marker.exists()


@pytest.mark.parametrize(
    ("count", "step", "outcome"),
    [(MAX_IDLE_ATTEMPTS - 1, 6, None), (MAX_IDLE_ATTEMPTS, 5, None), (MAX_IDLE_ATTEMPTS, 6, "failed")],
)
def test_a_chain_of_attempts_with_progress_continues(
    tmp_path: Path, count: int, step: int, outcome: str | None
) -> None:
    here = Submission(tmp_path)
    checkpoint(here.run_dir(), 6)
    record_attempts(here, count, step, outcome)
    assert here.run(SLURM_RESTART_COUNT=str(count)) == 0
    assert here.attempts()[-1].step == 6


def test_idle_attempts_are_counted_back_from_the_last() -> None:
    def attempt(step: int, outcome: str | None) -> Attempt:
        return Attempt("abc", "77", 0, "n", 0.0, step, 1.0, outcome)

    idle, moved, failed = attempt(6, None), attempt(5, None), attempt(6, "failed")
    assert idle_attempts([], 6) == 0
    assert idle_attempts([idle, idle], 6) == 2
    assert idle_attempts([idle, moved, idle], 6) == 1
    assert idle_attempts([idle, failed], 6) == 0
    assert idle_attempts([idle, idle], 7) == 0


# --- members and ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_member", STARTS)
def test_a_task_of_an_array_runs_its_own_member_under_its_own_id(
    tmp_path: Path, start_member: Callable[[Submission], None]
) -> None:
    here = Submission(tmp_path, members=("one", "two", "three"), start_member=start_member)
    variables = {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "2"}
    assert here.run(None, **variables, SLURM_RESTART_COUNT="4") == 0
    (attempt,) = here.attempts("three")
    assert (attempt.job, attempt.restart) == ("77_2", 4)
    assert here.attempts("one") == here.attempts("two") == []


def test_a_rank_other_than_0_records_no_attempt_and_has_its_own_log(tmp_path: Path) -> None:
    here = Submission(tmp_path)
    assert here.run(SLURM_PROCID="1") == 0
    assert here.attempts() == []
    assert "printed" in (here.run_dir() / "log.rank1.txt").read_text()
    assert not (here.run_dir() / LOG_FILE).exists()
    assert (here.run_dir() / "ran").read_text() == "1"


def test_a_rank_other_than_0_masks_its_traceback_and_asks_for_no_requeue(
    tmp_path: Path,
) -> None:
    here = Submission(tmp_path / "a", fail)
    assert here.run(SLURM_PROCID="3") == 1
    log_text = (here.run_dir() / "log.rank3.txt").read_text()
    assert "ValueError" in log_text and TOKEN not in log_text and "hunter2hunter2" not in log_text
    there = Submission(tmp_path / "b", stop_at_once)
    assert there.run(SLURM_PROCID="3") == 0
    assert not there.marker.exists()


# --- GPUs ----------------------------------------------------------------------------------------------------


def fake_devices(*names: str) -> Callable[[], None]:
    """Return a function that fakes the devices in /dev."""

    def patch() -> None:
        folder = Path(tempfile.mkdtemp())
        for name in names:
            (folder / name).touch()
        gpu._DEVICES = folder
        for name in gpu._VISIBLE:
            os.environ.pop(name, None)

    return patch


def hide_gpu(name: str, value: str) -> Callable[[], None]:
    """Return a function that fakes a GPU and sets a variable that hides it."""

    def patch() -> None:
        fake_devices("nvidia0")()
        os.environ[name] = value

    return patch


ASKS_FOR_GPUS = {"gpus": True}


def record_gpu_requirement(run_dir: Path) -> None:
    """Record whether training must check for a GPU."""
    (run_dir / "told").write_text(os.environ.get(gpu.REQUIRED, "nothing"))


@pytest.mark.parametrize(
    "before",
    [
        fake_devices(),
        fake_devices("nvidiactl", "nvidia-uvm", "null"),
        hide_gpu("CUDA_VISIBLE_DEVICES", ""),
        hide_gpu("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
        hide_gpu("ROCR_VISIBLE_DEVICES", "-1"),
    ],
)
def test_a_job_that_requests_gpus_and_sees_none_fails_before_loading_its_member(
    tmp_path: Path, before: Callable[[], None]
) -> None:
    here = Submission(tmp_path, record_gpu_requirement, manifest=ASKS_FOR_GPUS)
    assert here.run(before) == 1
    (attempt,) = here.attempts()
    assert (attempt.outcome, attempt.kind, attempt.node) == ("failed", "gpu", "node-9")
    assert "the job asks for GPUs and sees none" in str(attempt.reason)
    assert "require_gpu=false" in str(attempt.reason)
    assert not (here.run_dir() / "told").exists()


@pytest.mark.parametrize(
    "before",
    [
        fake_devices("nvidia0"),
        fake_devices("nvidia7", "nvidiactl"),
        fake_devices("kfd"),
        hide_gpu("CUDA_VISIBLE_DEVICES", "MIG-12ab"),
    ],
)
def test_a_job_that_sees_its_gpu_makes_training_check_again(tmp_path: Path, before: Callable[[], None]) -> None:
    here = Submission(tmp_path, record_gpu_requirement, manifest=ASKS_FOR_GPUS)
    assert here.run(before) == 0
    assert (here.run_dir() / "told").read_text() == "1"


@pytest.mark.parametrize("manifest", [{}, {"gpus": False}], ids=["of an earlier version", "without"])
def test_a_job_without_gpus_does_not_check_for_them(tmp_path: Path, manifest: dict[str, Any]) -> None:
    here = Submission(tmp_path, record_gpu_requirement, manifest=manifest)
    assert here.run(fake_devices()) == 0
    assert (here.run_dir() / "told").read_text() == "nothing"


def test_a_rank_without_a_gpu_records_its_node(tmp_path: Path) -> None:
    """srun then kills rank 0, which is on another node, so rank 0 records nothing."""
    here = Submission(tmp_path, manifest=ASKS_FOR_GPUS)
    AttemptLog(here.run_dir(), "abc", "77", 0, "node-1").begin(-1)
    assert here.run(fake_devices(), SLURM_PROCID="1") == 1
    (attempt,) = here.attempts()
    assert (attempt.kind, attempt.node, attempt.culprit) == ("gpu", "node-1", "node-9")
    assert str(attempt.reason).startswith("rank 1: NoGpuError")


def wait_for_a_rank(run_dir: Path) -> None:
    """Raise gloo's timeout."""
    raise RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete")


def test_the_record_of_the_failed_rank_overrides_the_timeout_of_rank_0(tmp_path: Path) -> None:
    here = Submission(tmp_path, wait_for_a_rank)
    assert here.run(SLURM_PROCID="2") == 1
    assert not list(here.run_dir().glob("attempts/*.rank2")), (
        "a timeout is not recorded, because another rank failed first"
    )
    assert here.run() == 1
    assert here.attempts()[0].kind == "collective"
    AttemptLog(here.run_dir(), "abc", "77", 0, "node-5").record_follower_failure(3, "gpu", "rank 3: an ECC error")
    (attempt,) = here.attempts()
    assert (attempt.kind, attempt.reason, attempt.culprit) == ("gpu", "rank 3: an ECC error", "node-5")


# --- the end of the logs -------------------------------------------------------------------------------------

LAST_WORDS = (
    "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: uncorrectable ECC error\n"
)


def print_and_abort(run_dir: Path) -> None:
    """Print and abort, as native code does, without a Python exception."""
    os.write(2, os.environ.get("LAST_WORDS", LAST_WORDS).encode())
    # pytest's faulthandler would print this abort into its report as if a test had crashed.
    faulthandler.disable()
    os.abort()


def test_the_end_of_the_logs_has_the_output_of_the_last_start_only(tmp_path: Path) -> None:
    here = Submission(tmp_path, print_and_abort)
    assert here.run() < 0
    assert here.attempts()[0].outcome is None
    assert "uncorrectable ECC error" in end_of_logs(list(here.folder.glob("77_*_log.out")), here.run_dir(), "abc", "77")
    (here.folder / "77_0_log.out").write_text("srun: error: node-9: task 0: Aborted\n")
    assert "task 0: Aborted" in end_of_logs(list(here.folder.glob("77_*_log.out")), here.run_dir(), "abc", "77")
    assert here.run(SLURM_RESTART_COUNT="1", LAST_WORDS="nothing of meaning") < 0
    later = end_of_logs(list(here.folder.glob("77_*_log.out")), here.run_dir(), "abc", "77")
    assert "nothing of meaning" in later and "ECC" not in later
    assert end_of_logs([], here.run_dir(), "def", "77") == "", "another job has printed nothing"


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    here = Submission(tmp_path, print_and_abort)
    here.run()
    with (here.run_dir() / LOG_FILE).open("a") as log:
        log.write("frame\n" * 30_000)
    log_text = end_of_logs(list(here.folder.glob("77_*_log.out")), here.run_dir(), "abc", "77")
    assert 60_000 < len(log_text) < 70_000 and "frame" in log_text and "ECC" not in log_text


# --- manifests that are missing or damaged -------------------------------------------------------------------


def test_a_missing_manifest_is_waited_for_and_then_named(tmp_path: Path) -> None:
    here = Submission(tmp_path)
    (here.folder / "submission.json").unlink()
    begin = time.monotonic()

    def impatient() -> None:
        node_manifest._VISIBLE_S = 1.0

    assert here.run(impatient) == 1
    assert time.monotonic() - begin >= 1.0
    assert "the member could not begin on" in here.job_output
    assert "submission.json is not there; the study's output_dir must be on a file system" in here.job_output
    assert here.job_output.count("\n") == 1


def test_a_manifest_that_becomes_visible_late_is_found(tmp_path: Path) -> None:
    here = Submission(tmp_path)
    path = here.folder / "submission.json"
    text = path.read_text()
    path.unlink()
    started = here.start()
    time.sleep(0.3)
    (here.folder / ".new").write_text(text)
    (here.folder / ".new").rename(path)
    assert started.wait() == 0
    assert here.attempts()[0].outcome == "finished"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"members": []}'])
def test_an_invalid_manifest_ends_the_job_with_one_line(tmp_path: Path, text: str) -> None:
    here = Submission(tmp_path)
    (here.folder / "submission.json").write_text(text)
    assert here.run() == 1
    assert here.job_output.startswith("scalerl: the member could not begin on")
    assert "Traceback" not in here.job_output


# --- the files of attempts -----------------------------------------------------------------------------------


def test_unreadable_attempt_files_are_skipped(tmp_path: Path) -> None:
    AttemptLog(tmp_path, "abc", "1", 0, "n").begin(3)
    folder = tmp_path / ATTEMPTS_DIR
    (folder / "torn.jsonl").write_text('{"submission": "abc", "job"')
    (folder / "other.jsonl").write_text('{"began": 1, "what": 2}\n')
    (folder / "bytes.jsonl").write_bytes(b"\xff\xfe\n")
    (folder / "note.txt").write_text("hello")
    assert [attempt.job for attempt in attempts(tmp_path)] == ["1"]
    assert attempts(tmp_path / "nowhere") == []


@pytest.mark.parametrize("text", ["7", "[1]", "null", '"began"'])
def test_files_without_an_attempt_are_skipped(tmp_path: Path, text: str) -> None:
    AttemptLog(tmp_path, "abc", "1", 0, "n").begin(3)
    (tmp_path / ATTEMPTS_DIR / "other.jsonl").write_text(f"{text}\n")
    assert [attempt.job for attempt in attempts(tmp_path)] == ["1"]


def test_a_torn_record_of_the_end_is_ignored(tmp_path: Path) -> None:
    log = AttemptLog(tmp_path, "abc", "1", 0, "n")
    log.begin(3)
    (path,) = (tmp_path / ATTEMPTS_DIR).iterdir()
    without_end = path.read_text()
    log.end("finished")
    path.write_text(path.read_text()[:-9])
    assert attempts(tmp_path)[0].outcome is None
    assert path.read_text().startswith(without_end)


def test_attempts_are_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    for name, restart in (("9", 0), ("9", 1), ("10", 0), ("2", 0)):
        AttemptLog(tmp_path, "abc", name, restart, "n").begin(0)
    assert [(attempt.job, attempt.restart) for attempt in attempts(tmp_path)] == [
        ("9", 0),
        ("9", 1),
        ("10", 0),
        ("2", 0),
    ]


def test_the_end_of_a_lost_job_does_not_count_for_the_job_with_the_same_id(tmp_path: Path) -> None:
    forgotten, new = (AttemptLog(tmp_path, name, "1", 0, "n") for name in ("abc", "def"))
    forgotten.begin(0)
    new.begin(0)
    forgotten.end("failed", "error", "of the forgotten one")
    (running,) = (attempt for attempt in attempts(tmp_path) if attempt.submission == "def")
    assert running.outcome is None


def test_the_command_of_earlier_batch_scripts_still_works(tmp_path: Path) -> None:
    here = Submission(tmp_path)
    variables = {"SLURM_JOB_ID": "77", "SLURMD_NODENAME": "node-9", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-u", "-m", "sweeps", "job", str(here.folder)], env=os.environ | variables)
    assert result.returncode == 0
    assert here.attempts()[0].outcome == "finished"
