"""Tests of the order of attempts, which does not depend on the clocks of the nodes."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sweeps.executor.failure import retries as retry_policy
from sweeps.executor.node import attempts as module
from sweeps.executor.node import entry
from sweeps.executor.node.attempts import ATTEMPTS_DIR, AttemptLog, attempts
from sweeps.executor.node.entry import idle_attempts
from sweeps.executor.slurm.settings import JobSettings
from sweeps.executor.slurm.submission import parameters
from tests.examples import examples
from tests.sweeps.executor.fake_cluster import (
    KIND,
    NODE_FAILS_AND_BACK,
    PREEMPTED_AND_BACK,
    RAISES,
    REQUEUES,
    FakeCluster,
    Fate,
    Place,
    VirtualTime,
    light,
    member,
)


def clock(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """Set the times that successive reads of the clock return."""
    looks = iter(times)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(looks)))


def attempt_order(run_dir: Path) -> list[tuple[str, int]]:
    return [(attempt.job, attempt.restart) for attempt in attempts(run_dir)]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=7),
    clocks=st.randoms(use_true_random=False),
)
def test_attempts_are_in_order_of_their_begin_for_any_clocks(
    jobs: list[tuple[int, int]], clocks: random.Random
) -> None:
    """Job ids are in any order (slurmctld may have lost its counter), and each job is restarted a few times."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", SimpleNamespace(time=lambda: clocks.uniform(-5000, 5000)))
        patch.setattr("os.fsync", lambda descriptor: None)
        began = []
        for number, (name, restarts) in enumerate(jobs):
            for restart in range(restarts + 1):
                log = AttemptLog(Path(folder), f"submission{number}", str(name), restart, "n")
                log.begin(restart)
                if clocks.random() < 0.5:
                    log.end("interrupted", "preempted", "SIGTERM")
                began.append((str(name), restart))
        assert attempt_order(Path(folder)) == began


@settings(max_examples=examples(60))
@given(
    jobs=st.lists(st.tuples(st.integers(1, 2000), st.none() | st.integers(0, 99)), unique=True, max_size=5),
    restarts=st.integers(0, 3),
    clocks=st.randoms(use_true_random=False),
)
def test_files_of_an_earlier_version_come_first_in_order_of_job_ids(
    jobs: list[tuple[int, int | None]], restarts: int, clocks: random.Random
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        (Path(folder) / ATTEMPTS_DIR).mkdir()
        expected = []
        for number, task in sorted(jobs, key=lambda job: (job[0], -1 if job[1] is None else job[1])):
            name = str(number) if task is None else f"{number}_{task}"
            for restart in range(restarts + 1):
                entry = {"submission": "a", "job": name, "restart": restart, "node": "n", "step": 0}
                path = Path(folder) / ATTEMPTS_DIR / f"{name}-{restart}-a.jsonl"
                path.write_text(json.dumps({**entry, "began": clocks.uniform(0, 5000)}) + "\n")
                expected.append((name, restart))
        AttemptLog(Path(folder), "b", "1", 0, "n").begin(0)
        assert attempt_order(Path(folder)) == [*expected, ("1", 0)]


def test_a_restart_that_did_not_see_the_first_start_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show a file late. Then SLURM's restart count decides."""
    for name in ("7", "8"):
        AttemptLog(tmp_path, "a", name, 0, "n").begin(0)
    AttemptLog(tmp_path, "b", "9", 0, "n").begin(0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "attempts", lambda run_dir: [])
        AttemptLog(tmp_path, "b", "9", 1, "n").begin(0)
    assert [attempt.number for attempt in attempts(tmp_path)] == [1, 2, 3, 1]
    assert attempt_order(tmp_path) == [("7", 0), ("8", 0), ("9", 0), ("9", 1)]


def test_a_restart_that_slurm_did_not_count_is_the_newest(tmp_path: Path) -> None:
    for name in ("7", "8", "7"):
        AttemptLog(tmp_path, "a", name, 0, "n").begin(0)
    assert attempt_order(tmp_path) == [("8", 0), ("7", 0)]


def test_idle_attempts_are_counted_from_the_last_for_any_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three attempts without a new checkpoint follow one that made progress, on nodes with different clocks."""
    clock(monkeypatch, 900.0, 901.0, 500.0, 501.0, 700.0, 701.0, 100.0, 101.0)
    for restart, step in enumerate((-1, 5, 5, 5)):
        log = AttemptLog(tmp_path, "a", "1", restart, "n")
        log.begin(step)
        log.end("interrupted", "time_limit", "SIGUSR2")
    assert idle_attempts(attempts(tmp_path), 5) == 3


@pytest.mark.parametrize("first_fate", [PREEMPTED_AND_BACK, NODE_FAILS_AND_BACK, REQUEUES])
def test_an_error_on_a_node_with_a_late_clock_keeps_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_fate: Fate
) -> None:
    """Once it became a launch failure: the earlier start, on a node whose clock was ahead, counted as the newer one."""
    light(monkeypatch)
    times = iter(range(10_000, 0, -1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: float(next(times))))
    spec = member()
    here = Place(
        tmp_path,
        FakeCluster(VirtualTime(), {spec.run: [first_fate, RAISES]}),
        [spec],
        JobSettings.of({}),
        retry_policy(),
    )
    assert here.run()[spec.run].kind == KIND[RAISES] == "error"


@pytest.mark.parametrize("skew", [-1000.0, 0.0, 1000.0])
@pytest.mark.parametrize(("warning_s", "kind"), [(60.0, "preempted"), (3480.0, "time_limit")])
@pytest.mark.parametrize("end_is_known", [True, False], ids=["SLURM tells the end", "it does not"])
def test_the_cause_of_a_warning_is_computed_with_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float, warning_s: float, kind: str, end_is_known: bool
) -> None:
    """A job of one hour, with ten minutes of set-up, gets a warning after `warning_s`.

    slurmctld's clock differs from the node's by `skew`. The warning for the time limit comes 120 s before the end.
    """
    began, now = 50_000.0 + skew, 50_000.0 + skew + warning_s
    monkeypatch.setattr(entry, "time", SimpleNamespace(time=lambda: now))
    for name in list(os.environ):
        if name.startswith(("SLURM", "SCALERL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SCALERL_BEGAN", str(int(began)))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    if end_is_known:
        monkeypatch.setenv("SLURM_JOB_START_TIME", "50000")
        monkeypatch.setenv("SLURM_JOB_END_TIME", "53600")
    manifest = {"timeout_min": 60, "signal_delay_s": 120, "max_num_timeout": None}
    log = AttemptLog(tmp_path, "a", "1", 0, "n")
    log.begin(0)
    entry._record_interruption(manifest, log, [], began + 600, "SIGUSR2")
    assert attempts(tmp_path)[0].kind == kind


def test_the_batch_script_reads_the_clock_before_the_setup_commands(tmp_path: Path) -> None:
    setup = parameters(tmp_path, JobSettings.of({"setup": ["sleep 600"]}), 1, "name")["setup"]
    assert setup.index("export SCALERL_BEGAN=$(date +%s)") < setup.index("sleep 600")
