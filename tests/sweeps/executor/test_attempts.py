"""Truths about the order of attempts: no clock of a node has a say in it."""

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
    """What the nodes' clocks say, look after look."""
    looks = iter(times)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: next(looks)))


def order(run_dir: Path) -> list[tuple[str, int]]:
    return [(each.job, each.restart) for each in attempts(run_dir)]


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    jobs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=7),
    clocks=st.randoms(use_true_random=False),
)
def test_attempts_come_in_the_order_in_which_they_began_whatever_the_clocks_say(
    jobs: list[tuple[int, int]], clocks: random.Random
) -> None:
    """Jobs in any order of their ids (slurmctld may have lost its count), each started again a few times."""
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
        assert order(Path(folder)) == began


@settings(max_examples=examples(60))
@given(
    jobs=st.lists(st.tuples(st.integers(1, 2000), st.none() | st.integers(0, 99)), unique=True, max_size=5),
    restarts=st.integers(0, 3),
    clocks=st.randoms(use_true_random=False),
)
def test_files_of_an_earlier_version_come_by_their_jobs_ids_and_before_the_others(
    jobs: list[tuple[int, int | None]], restarts: int, clocks: random.Random
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        (Path(folder) / ATTEMPTS_DIR).mkdir()
        expected = []
        for number, task in sorted(jobs, key=lambda each: (each[0], -1 if each[1] is None else each[1])):
            name = str(number) if task is None else f"{number}_{task}"
            for restart in range(restarts + 1):
                entry = {"submission": "a", "job": name, "restart": restart, "node": "n", "step": 0}
                path = Path(folder) / ATTEMPTS_DIR / f"{name}-{restart}-a.jsonl"
                path.write_text(json.dumps({**entry, "began": clocks.uniform(0, 5000)}) + "\n")
                expected.append((name, restart))
        AttemptLog(Path(folder), "b", "1", 0, "n").begin(0)
        assert order(Path(folder)) == [*expected, ("1", 0)]


def test_a_start_that_did_not_see_the_one_before_comes_after_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show a file late: then SLURM's count of a job's starts decides."""
    for name in ("7", "8"):
        AttemptLog(tmp_path, "a", name, 0, "n").begin(0)
    AttemptLog(tmp_path, "b", "9", 0, "n").begin(0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "attempts", lambda run_dir: [])
        AttemptLog(tmp_path, "b", "9", 1, "n").begin(0)
    assert [each.number for each in attempts(tmp_path)] == [1, 2, 3, 1]
    assert order(tmp_path) == [("7", 0), ("8", 0), ("9", 0), ("9", 1)]


def test_a_job_that_starts_again_without_slurm_counting_it_is_the_newest(tmp_path: Path) -> None:
    for name in ("7", "8", "7"):
        AttemptLog(tmp_path, "a", name, 0, "n").begin(0)
    assert order(tmp_path) == [("8", 0), ("7", 0)]


def test_the_chain_without_a_checkpoint_is_counted_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three in a row that took no step, after one that did, on nodes whose clocks run apart."""
    clock(monkeypatch, 900.0, 901.0, 500.0, 501.0, 700.0, 701.0, 100.0, 101.0)
    for restart, step in enumerate((-1, 5, 5, 5)):
        log = AttemptLog(tmp_path, "a", "1", restart, "n")
        log.begin(step)
        log.end("interrupted", "time_limit", "SIGUSR2")
    assert idle_attempts(attempts(tmp_path), 5) == 3


@pytest.mark.parametrize("before", [PREEMPTED_AND_BACK, NODE_FAILS_AND_BACK, REQUEUES])
def test_an_error_on_a_node_that_is_behind_is_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: Fate
) -> None:
    """It once became `never began`: the start before, on a node with another clock, seemed to be the newer one."""
    light(monkeypatch)
    behind = iter(range(10_000, 0, -1000))
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: float(next(behind))))
    spec = member()
    here = Place(
        tmp_path, FakeCluster(VirtualTime(), {spec.run: [before, RAISES]}), [spec], JobSettings.of({}), retry_policy()
    )
    assert here.run()[spec.run].kind == KIND[RAISES] == "error"


@pytest.mark.parametrize("skew", [-1000.0, 0.0, 1000.0])
@pytest.mark.parametrize(("at_s", "kind"), [(60.0, "preempted"), (3480.0, "time_limit")])
@pytest.mark.parametrize("told", [True, False], ids=["SLURM tells the end", "it does not"])
def test_what_a_warning_came_for_is_told_by_one_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skew: float, at_s: float, kind: str, told: bool
) -> None:
    """slurmctld's clock is minutes from the node's; an hour's job, 120 s of warning, ten minutes of set-up."""
    began, now = 50_000.0 + skew, 50_000.0 + skew + at_s
    monkeypatch.setattr(entry, "time", SimpleNamespace(time=lambda: now))
    for name in list(os.environ):
        if name.startswith(("SLURM", "SCALERL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SCALERL_BEGAN", str(int(began)))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    if told:
        monkeypatch.setenv("SLURM_JOB_START_TIME", "50000")
        monkeypatch.setenv("SLURM_JOB_END_TIME", "53600")
    manifest = {"timeout_min": 60, "signal_delay_s": 120, "max_num_timeout": None}
    log = AttemptLog(tmp_path, "a", "1", 0, "n")
    log.begin(0)
    entry._record_interruption(manifest, log, [], began + 600, "SIGUSR2")
    assert attempts(tmp_path)[0].kind == kind


def test_the_batch_script_looks_at_its_nodes_clock_before_the_set_up(tmp_path: Path) -> None:
    setup = parameters(tmp_path, JobSettings.of({"setup": ["sleep 600"]}), 1, "name")["setup"]
    assert setup.index("export SCALERL_BEGAN=$(date +%s)") < setup.index("sleep 600")
