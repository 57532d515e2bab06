"""Tests of kinds of failure: each error has a kind, and each kind a number of retries."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.errors import UserError
from sweeps.executor.failure import BLAMES_NODE, KINDS, NO_RETRIES, first_line, kind_of, may_retry, retries
from sweeps.executor.node.attempts import Attempt
from sweeps.executor.slurm.ending import why_ended
from sweeps.executor.slurm.scheduler import ENDED, JobInfo
from sweeps.executor.slurm.submitter import with_remedy


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's own error; only the name counts."""


def chained(outer: BaseException, inner: BaseException, because: bool) -> BaseException:
    """Return `outer` with `inner` as its cause (`raise ... from`) or as its context (raised while handling it)."""
    if because:
        outer.__cause__ = inner
    else:
        outer.__context__ = inner
    return outer


# --- kinds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), "error"),
        (ValueError("out of memory of what was said"), "error"),
        (KeyError("memory"), "error"),
        (SystemExit(3), "error"),
        (KeyboardInterrupt(), "error"),
        (MemoryError(), "out_of_memory"),
        (OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (OutOfMemoryError(), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"), "out_of_memory"),
        (RuntimeError("shape mismatch"), "error"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk_full"),
        (OSError(errno.ENOENT, "No such file"), "error"),
        (RuntimeError("PytorchStreamWriter failed: No space left on device"), "disk_full"),
        (RuntimeError("Disk quota exceeded"), "disk_full"),
    ],
    ids=repr,
)
def test_the_kind_of_an_error_is_found_in_its_chain(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
    for because in (True, False):
        wrapped = chained(ValueError("while saving"), error, because)
        assert kind_of(wrapped) == kind
        assert kind_of(chained(TypeError("at the end"), wrapped, because)) == kind


def test_a_cycle_in_the_chain_of_errors_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert kind_of(one) == "error"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no\nand more"), "ValueError: no"),
        (ValueError("\n\n  late \n"), "ValueError: late"),
        (ValueError(), "ValueError"),
        (MemoryError(), "MemoryError"),
        (ValueError(" \n "), "ValueError"),
    ],
    ids=repr,
)
def test_an_error_in_one_line(error: BaseException, line: str) -> None:
    assert first_line(error) == line


@given(st.text())
def test_an_error_is_always_one_short_line(text: str) -> None:
    line = first_line(ValueError(text))
    assert len(line) <= 500
    assert len(line.splitlines()) == 1


# --- retries -------------------------------------------------------------------------------------------------


def test_each_default_can_be_overridden() -> None:
    policy = retries()
    assert policy == {kind: limit for kind, (_, limit) in KINDS.items()}
    assert retries({"error": 2, "node": None}) == {**policy, "error": 2, "node": None}
    assert retries() == policy, "overrides do not change the defaults"


@pytest.mark.parametrize("number", [-1, 1.5, "2", True, float("inf")])
def test_an_invalid_number_of_retries_is_refused_by_name(number: object) -> None:
    with pytest.raises(UserError, match=r"retries\.node"):
        retries({"node": number})  # type: ignore[dict-item]


def test_an_unknown_kind_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(UserError, match=r"retries\.nodes: .*valid: error, out_of_memory, .*cancelled"):
        retries({"nodes": 1})


@given(st.sampled_from(sorted(KINDS)), st.one_of(st.none(), st.integers(0, 5)), st.integers(0, 9), st.integers(0, 9))
def test_retries_are_counted_per_kind(kind: str, limit: int | None, spent: int, spent_by_others: int) -> None:
    others = {other: spent_by_others for other in KINDS if other != kind}
    assert may_retry({kind: limit}, kind, {**others, kind: spent}) == (limit is None or spent < limit)


@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_excused_failures_do_not_count_unless_no_retry_is_allowed(limit: int, spent: int, excused: int) -> None:
    assert may_retry({"gpu": limit}, "gpu", {"gpu": spent}, excused) == (spent - excused < limit)
    assert not may_retry({"gpu": 0}, "gpu", {"gpu": spent}, excused)
    assert may_retry({"gpu": None}, "gpu", {"gpu": spent}, excused)


def test_kinds_without_a_limit_in_the_policy_are_not_retried() -> None:
    assert not any(may_retry(NO_RETRIES, kind, {}) for kind in KINDS)
    assert not may_retry(retries(), "a kind of tomorrow", {})
    assert set(KINDS) == set(NO_RETRIES) and set(KINDS) >= BLAMES_NODE


def test_errors_of_the_recipe_are_not_retried_by_default() -> None:
    policy = retries()
    assert [kind for kind, limit in policy.items() if limit == 0] == [
        *("error", "disk_full", "gave_up", "cancelled", "stopped"),
    ]


# --- why a job ended -----------------------------------------------------------------------------------------


def info(state: str, exit_code: str = "1:0") -> JobInfo:
    return JobInfo("7", state, "n3", "None", "study-abc", exit_code)


def attempt(outcome: str | None, kind: str | None = None, reason: str | None = None) -> Attempt:
    return Attempt("abc", "7", 0, "n3", 1.0, -1, 2.0 if outcome else None, outcome, kind, reason)


NOT_BEGUN = None
KILLED = attempt(None)


@pytest.mark.parametrize(
    ("state", "record", "log_text", "kind", "reason"),
    [
        ("COMPLETED", attempt("finished"), "", None, None),
        ("FAILED", attempt("finished"), "", None, None),
        ("TIMEOUT", attempt("finished"), "", None, None),
        ("NODE_FAIL", attempt("finished"), "", None, None),
        ("CANCELLED", KILLED, "", "cancelled", "cancelled"),
        ("CANCELLED", NOT_BEGUN, "", "cancelled", "cancelled"),
        ("CANCELLED", attempt("interrupted", "preempted", "SIGTERM"), "", "cancelled", "cancelled"),
        ("OUT_OF_MEMORY", KILLED, "", "out_of_memory", "raise mem_gb"),
        ("OUT_OF_MEMORY", attempt("failed", "error", "a worker died"), "", "out_of_memory", "raise mem_gb"),
        ("FAILED", attempt("failed", "error", "ValueError: no"), "", "error", "ValueError: no"),
        ("FAILED", attempt("failed"), "", "error", "failed"),
        ("TIMEOUT", attempt("failed", "disk_full", "OSError"), "", "disk_full", "OSError"),
        ("TIMEOUT", KILLED, "", "time_limit", "time limit"),
        ("DEADLINE", KILLED, "", "time_limit", "time limit"),
        ("PREEMPTED", KILLED, "", "preempted", "preempted"),
        ("NODE_FAIL", KILLED, "", "node", "n3"),
        ("BOOT_FAIL", NOT_BEGUN, "", "node", "n3"),
        ("REVOKED", NOT_BEGUN, "", "cancelled", "cancelled"),
        ("FAILED", attempt("interrupted", "preempted", "SIGTERM"), "", "preempted", "not requeued"),
        ("FAILED", attempt("interrupted", "time_limit", "SIGUSR2"), "", "time_limit", "not requeued"),
        ("FAILED", KILLED, "", "killed", "n3"),
        ("FAILED", KILLED, "slurmstepd: error: Detected 1 oom_kill event", "out_of_memory", "raise mem_gb"),
        ("FAILED", KILLED, "error: Exceeded job memory limit", "out_of_memory", "raise mem_gb"),
        ("FAILED", NOT_BEGUN, "srun: error: no such image", "launch", "no such image"),
        ("FAILED", NOT_BEGUN, "", "launch", "output_dir"),
        ("COMPLETED", NOT_BEGUN, "", "launch", "never began"),
        ("FAILED", KILLED, "what(): CUDA error: uncorrectable ECC error encountered", "gpu", "ECC error encountered"),
        ("FAILED", KILLED, "srun: error: n3: task 0: Bus error (core dumped)", "storage", "n3"),
        ("FAILED", KILLED, "Watchdog caught collective operation timeout: WorkNCCL", "collective", "WorkNCCL"),
        ("FAILED", NOT_BEGUN, "bash: /shared/venv: Stale file handle", "storage", "Stale file handle"),
        ("FAILED", NOT_BEGUN, "nvidia-container-cli: nvml error: driver/library version mismatch", "gpu", "mismatch"),
        ("FAILED", KILLED, "Temporary failure in name resolution; trying again", "killed", "n3"),
        ("FAILED", attempt("failed", "error", "ValueError: no"), "GPU is lost", "error", "ValueError: no"),
        ("TIMEOUT", KILLED, "GPU is lost", "time_limit", "time limit"),
        (None, KILLED, "", "lost", "no longer knows"),
        (None, NOT_BEGUN, "", "lost", "no longer knows"),
        (None, attempt("finished"), "", None, None),
        (None, attempt("failed", "error", "ValueError: no"), "", "error", "ValueError: no"),
        (None, attempt("interrupted", "preempted", "SIGTERM"), "", "preempted", "SIGTERM"),
    ],
)
def test_kind_and_reason_follow_from_scheduler_record_and_log(
    state: str | None, record: Attempt | None, log_text: str, kind: str | None, reason: str | None
) -> None:
    found_kind, found_reason = why_ended(info(state) if state else None, record, lambda: log_text)
    assert found_kind == kind
    assert (found_reason is None) == (reason is None)
    assert reason is None or reason in str(found_reason)


def test_the_logs_of_the_ranks_count_if_the_job_log_says_nothing() -> None:
    kind, reason = why_ended(info("FAILED", "134:0"), KILLED, lambda: "srun: Aborted", lambda: "GPU is lost, they say")
    assert kind == "gpu"
    assert reason == "GPU is lost, they say (SLURM says FAILED, exit code 134:0, on n3)"


@pytest.mark.parametrize("state", sorted(ENDED))
@pytest.mark.parametrize(
    "record", [NOT_BEGUN, KILLED, attempt("failed", "error", "no"), attempt("interrupted", "preempted", "x")]
)
def test_every_end_but_a_success_has_a_kind_and_a_reason(state: str, record: Attempt | None) -> None:
    kind, reason = why_ended(info(state), record, lambda: "")
    assert kind in KINDS
    assert reason


def test_a_full_disk_is_recognized_by_the_exit_code() -> None:
    for record in (KILLED, NOT_BEGUN):
        assert why_ended(info("FAILED", "28:0"), record, lambda: "")[0] == "disk_full"
    assert why_ended(info("FAILED", "28:0"), attempt("failed", "error", "no"), lambda: "")[0] == "error"
    assert why_ended(info("FAILED", "0:28"), KILLED, lambda: "")[0] == "killed"


def test_the_log_is_read_only_if_the_kind_is_not_known() -> None:
    def unread() -> str:
        raise AssertionError

    for state, record in (
        ("TIMEOUT", KILLED),
        ("FAILED", attempt("failed", "error", "no")),
        ("COMPLETED", attempt("finished")),
    ):
        why_ended(info(state), record, unread)


@pytest.mark.parametrize(
    "message",
    [
        "sbatch: error: invalid partition specified: gpuu",
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
        "sbatch: error: Batch job submission failed: Invalid qos specification",
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification",
        "sbatch: error: something new",
    ],
)
def test_a_refusal_comes_with_a_remedy(message: str) -> None:
    text = with_remedy(message)
    assert text.startswith(message + " -- ")
    assert any(word in text for word in ("hydra.launcher.", "sinfo", "lower "))
    assert os.linesep not in text
