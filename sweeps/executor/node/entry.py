"""Entry point on a cluster's node: run one member of a submission, as one task of a job.

The cluster warns of a time limit or a preemption by SIGUSR2. This signal and SIGTERM request a stop: the run saves a
checkpoint at its next step boundary. This module then creates a file, whose path the job's script exports, by which it
asks that script for a requeue.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sweeps.executor.base import load_entry
from sweeps.executor.error_signatures import PEER_FAILURES
from sweeps.executor.failure import MAX_IDLE_ATTEMPTS, failure_text, first_line, kind_of
from sweeps.executor.node.attempts import Attempt, AttemptLog, attempts, log_mark
from sweeps.executor.node.manifest import wait_for_manifest
from sweeps.run.activity import activity
from sweeps.run.gpu import REQUIRED, check_gpu
from sweeps.run.interruption import RunInterruptedError, interruption, requested_stop
from sweeps.run.job import Job, current, enter
from sweeps.run.journal import LOG_FILE, covered_step
from sweeps.terminal import counted

# Variables exported by a job's script: path of the file that asks for a requeue, and time at which the job began.
REQUEUE_VARIABLE = "SCALERL_REQUEUE_FILE"
BEGAN_VARIABLE = "SCALERL_BEGAN"

# Exit code of a member that ran out of disk space, because it may be unable to write a record of this failure.
DISK_FULL_CODE = errno.ENOSPC

# A cluster may send its warning up to this many seconds earlier than requested.
_EARLY_S = 75.0


def run_task(folder: Path, member: Path | int, job: Job) -> NoReturn:
    """Run one task of a member's job, and end the process.

    Args:
        folder: folder of the submission.
        member: folder of the member, or its index in the manifest.
        job: facts about the job.
    """
    enter(job)
    with interruption.on_signals([signal.SIGUSR2, signal.SIGTERM]):
        _end_process(_run(folder, member))


def _end_process(code: int) -> NoReturn:
    """End this process by `os._exit`: a thread of a library that hangs at exit would keep the allocation."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(folder: Path, member: Path | int) -> int:
    began = time.time()
    try:
        manifest = wait_for_manifest(folder)
        run_dir = member if isinstance(member, Path) else folder.parents[1] / "runs" / manifest["members"][member]
        mark, rank = log_mark(manifest["submission"], current().job_id(), current().restart_count()), current().rank()
        _log_to(run_dir / (LOG_FILE if rank == 0 else f"log.rank{rank}.txt"))
        print(mark, flush=True)
        if manifest.get("gpus"):
            os.environ[REQUIRED] = "1"
    except Exception as error:
        print(f"scalerl: the member could not begin on {socket.gethostname()}: {first_line(error)}", flush=True)
        return 1
    log = AttemptLog(
        run_dir, manifest["submission"], current().job_id(), current().restart_count(), current().node_name()
    )
    return (
        _run_as_rank_0(manifest, run_dir, began, log) if rank == 0 else _run_as_other_rank(manifest, run_dir, rank, log)
    )


def _run_as_rank_0(manifest: Mapping[str, Any], run_dir: Path, began: float, log: AttemptLog) -> int:
    """Run the member as rank 0, which writes the attempt record. Return the exit code."""
    step = checkpoint_step(run_dir)
    # Read the earlier attempts first: this one, once recorded, would count as an attempt without a new checkpoint.
    earlier = attempts(run_dir)
    try:
        log.begin(step)
        activity.last_word = lambda reason: log.end("failed", "hang", reason)
        idle = idle_attempts(earlier, step)
        if idle >= MAX_IDLE_ATTEMPTS:
            reason = (
                f"{idle} attempts in a row ended without a new checkpoint (the last is of step {max(step, 0)}); raise "
                "timeout_min or signal_delay_s, or lower checkpoint.every_n_steps"
            )
            print(reason, flush=True)
            log.end("failed", "gave_up", reason)
            return 1
        if asked := requested_stop(run_dir):  # the request came while the job was queued
            log.end("stopped", "stopped", asked)
            return 0
        _check_gpu()
        load_entry(manifest["entry"])(run_dir)
    except RunInterruptedError as error:
        if asked := requested_stop(run_dir):
            with suppress(OSError):
                log.end("stopped", "stopped", asked)
            return 0
        return _record_interruption(manifest, log, earlier, began, str(error))
    except BaseException as error:
        # Write record and traceback separately, because one of them may fail, for example on a full disk.
        kind = kind_of(error)
        reason = first_line(error)
        # In a job with one task, `killed` does not mean that another rank died, but that its command or lease was lost.
        if kind == "killed" and current().step_tasks() > 1:
            reason = "another rank of the job died; its log is log.rank<number>.txt"
        with suppress(OSError):  # if the disk is full, the exit code is the only record
            log.end("failed", kind, reason)
        with suppress(OSError):
            print(failure_text(error), file=sys.stderr, flush=True)
        return DISK_FULL_CODE if kind == "disk_full" else 1
    log.end("finished")
    return 0


def _record_interruption(
    manifest: Mapping[str, Any], log: AttemptLog, earlier: list[Attempt], began: float, reason: str
) -> int:
    """Record the interruption of a run that has saved, request a requeue, and return the exit code."""
    # The same signal warns of a time limit and of a preemption; the time shows which of them it is.
    kind = (
        "time_limit"
        if time.time() >= _time_limit_at(manifest, began) - manifest["signal_delay_s"] - _EARLY_S
        else "preempted"
    )
    limit = manifest["max_num_timeout"]
    reached = 1 + sum(attempt.job == current().job_id() and attempt.kind == "time_limit" for attempt in earlier)
    if kind == "time_limit" and limit is not None and reached > limit:
        reason = (
            f"the time limit of {manifest['timeout_min']} min was reached {counted(reached, 'time')}; "
            f"max_num_timeout={limit}"
        )
        with suppress(OSError):
            log.end("failed", "gave_up", reason)
        return 1
    code = 1
    try:
        log.end("interrupted", kind, reason)
        print(f"scalerl: saved ({reason}); asking for a requeue", flush=True)
    except OSError as error:  # the checkpoint was saved all the same
        code = DISK_FULL_CODE if kind_of(error) == "disk_full" else 1
    if marker := os.environ.get(REQUEUE_VARIABLE):
        with suppress(OSError):
            Path(marker).touch(mode=0o600)
    return code


def _time_limit_at(manifest: Mapping[str, Any], began: float) -> float:
    """Return the time in seconds, by this node's clock, at which the job reaches its time limit.

    The cluster's clock may be minutes off, so only the difference of its start and end times is used.

    Args:
        manifest: the submission's manifest.
        began: start of this process, after the job's set-up commands. It is used if the job's script has not exported
            when it began itself.
    """
    return float(os.environ.get(BEGAN_VARIABLE) or began) + (current().length_s() or manifest["timeout_min"] * 60)


def _run_as_other_rank(manifest: Mapping[str, Any], run_dir: Path, rank: int, log: AttemptLog) -> int:
    """Run the member as a rank other than 0, which records only its own failures; return the exit code."""
    try:
        _check_gpu()
        load_entry(manifest["entry"])(run_dir)
    except RunInterruptedError:
        return 0
    except BaseException as error:
        print(failure_text(error), file=sys.stderr, flush=True)
        # Do not record a failure that rank 0's failure or death has caused: rank 0 records the cause.
        if not getattr(error, "leave_journal", False) and (kind := kind_of(error)) not in PEER_FAILURES:
            with suppress(OSError):
                log.record_follower_failure(rank, kind, f"rank {rank}: {first_line(error)}")
        return 1
    return 0


def idle_attempts(earlier: list[Attempt], step: int) -> int:
    """Count the latest attempts in a row that began from the checkpoint of `step` and saved no newer one."""
    count = 0
    for attempt in reversed(earlier):
        if attempt.step != step or attempt.outcome not in (None, "interrupted"):
            break
        count += 1
    return count


def checkpoint_step(run_dir: Path) -> int:
    """Return the step of the last checkpoint in the journal; -1 if there is none."""
    step = covered_step(run_dir)
    return -1 if step is None else step


def _check_gpu() -> None:
    """If the job requests a GPU, check for one before a model is loaded. Training checks again through the driver."""
    if REQUIRED in os.environ:
        check_gpu()


def _log_to(path: Path) -> None:
    """Redirect stdout and stderr to the run's log, by file descriptor, so that output of native code is included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
