"""Tests of the lease on a run: a second copy waits for a limited time, then gives its allocation back."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest

from sweeps.errors import UserError
from sweeps.executor.failure import BLAMES_NODE, KINDS, kind_of
from sweeps.run import writer
from sweeps.run.interruption import RunInterruptedError, ask_to_stop, interruption, requested_stop
from sweeps.run.spec import RunSpec, make_spec
from sweeps.run.writer import DuplicateRunError, hold_run_lease

CONFIG = {"loss": {"choice": "cispo"}, "seed": 0, "budget": {"steps": 4}}


@pytest.fixture
def spec() -> RunSpec:
    return make_spec(CONFIG, CONFIG, "scalerl", "scalerl")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(writer, "DUPLICATE_WAIT_S", 0.6)


@pytest.mark.usefixtures("job")
def test_a_copy_of_a_job_gives_up_after_its_time_as_a_duplicate(tmp_path: Path, spec: RunSpec) -> None:
    with hold_run_lease(tmp_path, spec) as first:
        begin = time.monotonic()
        message = r"job 77, process .* gives its allocation back"
        with pytest.raises(DuplicateRunError, match=message) as caught, hold_run_lease(tmp_path, spec):
            pytest.fail("two writers at the same time")
        assert 0.6 <= time.monotonic() - begin < 20
        assert first is not None
        first.check()
    assert kind_of(caught.value) == "duplicate"
    assert KINDS["duplicate"][1] is None and "duplicate" not in BLAMES_NODE, (
        "a duplicate is not blamed on a node, and its retries are not limited"
    )


def test_a_copy_waits_longer_than_a_lease_takes_to_expire() -> None:
    assert writer.DUPLICATE_WAIT_S >= 2 * writer.EXPIRY_S >= 8 * writer.BEAT_S
    assert writer.TRUSTED_S < writer.BEAT_S / 2


def test_a_second_local_writer_is_a_user_error(tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(writer, "LEASE_WAIT_S", 0.1)
    with (
        hold_run_lease(tmp_path, spec),
        pytest.raises(UserError, match="has been writing this run") as caught,
        hold_run_lease(tmp_path, spec),
    ):
        pytest.fail("two writers at the same time")
    assert not isinstance(caught.value, DuplicateRunError)


@pytest.mark.usefixtures("job")
def test_a_waiting_copy_stops_on_request(tmp_path: Path, spec: RunSpec) -> None:
    with hold_run_lease(tmp_path, spec):
        interruption.request("SIGUSR2")
        try:
            message = r"SIGUSR2 while .* was writing this run"
            with pytest.raises(RunInterruptedError, match=message), hold_run_lease(tmp_path, spec):
                pytest.fail("two writers at the same time")
        finally:
            interruption.clear()


@pytest.mark.usefixtures("job")
def test_other_ranks_do_not_wait_for_rank_0_after_a_stop_request(tmp_path: Path, spec: RunSpec) -> None:
    """Rank 0 saw the request before it took the lease, and has ended."""
    ask_to_stop(tmp_path, "no longer needed")
    with pytest.raises(RunInterruptedError, match="no longer needed"), hold_run_lease(tmp_path, spec, rank=1):
        pytest.fail("the run has no writer to wait for")


@pytest.mark.usefixtures("job")
def test_a_waiting_copy_takes_over_from_one_on_a_node_that_died(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BEAT_S", 0.05)
    monkeypatch.setattr(writer, "EXPIRY_S", 0.5)
    (tmp_path / ".writer.json").write_text(json.dumps({"host": "gone", "pid": 7, "token": "theirs", "job": "77"}))
    begin = time.monotonic()
    with hold_run_lease(tmp_path, spec) as lease:
        assert lease is not None
        lease.check()
    assert 0.5 <= time.monotonic() - begin < 20


def test_an_unreadable_stop_file_is_not_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop file is checked every two seconds for days; a short outage of the file server must not end the run."""
    ask_to_stop(tmp_path, "no longer needed")

    def stat(path: Path, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as away:
        away.setattr(Path, "stat", stat)
        assert requested_stop(tmp_path) is None
    assert requested_stop(tmp_path) == "no longer needed"
