"""Tests that the executors of this machine and of the virtual cluster meet the contract (`contract`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.executor.base import Executor, Launch
from sweeps.executor.local import LocalExecutor
from sweeps.executor.slurm.executor import ClusterExecutor
from sweeps.executor.slurm.settings import JobSettings
from tests.sweeps.executor import contract
from tests.sweeps.executor.contract import Engine, ExecutorContract, QueueContract
from tests.sweeps.executor.fake_cluster import (
    FINISHES,
    LASTS_UNTIL_STOPPED,
    NODES,
    RAISES,
    FakeCluster,
    VirtualTime,
    light,
)


class ThisMachine(Engine):
    """Members are processes of this machine."""

    def __init__(self, study: Path) -> None:
        super().__init__(study)
        self.executors: list[LocalExecutor] = []

    def executor(self) -> Executor:
        self.executors.append(LocalExecutor(f"{contract.__name__}:perform", 2, threads=1, preload=["pytest"]))
        return self.executors[-1]

    def clock(self) -> float:
        return time.monotonic()

    def has_begun(self, run: str) -> bool:
        return (self.study / "runs" / run / "begun").exists()


class TestThisMachine(ExecutorContract):
    """The contract, for `LocalExecutor`."""

    @pytest.fixture
    def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.setenv(name, "1")
        here = ThisMachine(tmp_path)
        yield here
        for executor in here.executors:
            executor.close()


class Virtual(Engine):
    """Members run on a fake cluster in virtual time."""

    patience_s = 5000.0
    nodes = NODES

    def __init__(self, study: Path) -> None:
        super().__init__(study)
        self.cluster = FakeCluster(VirtualTime())

    def executor(self) -> Executor:
        time = self.cluster.time
        return ClusterExecutor(
            *(self.study, self.cluster, JobSettings(), "unused:entry", 1, "study"), clock=time.clock, sleep=time.sleep
        )

    def clock(self) -> float:
        return self.cluster.time.now

    def launch(self, run: str, behaviour: str) -> Launch:
        self.cluster.fates[run].append({"finish": FINISHES, "fail": RAISES, "wait": LASTS_UNTIL_STOPPED}[behaviour])
        return super().launch(run, behaviour)

    def has_begun(self, run: str) -> bool:
        return self.cluster.begun[run] > 0

    def is_running(self, run: str) -> bool:
        return any(process.run_dir.name == run for process in self.cluster.living())

    def allow_one_at_a_time(self) -> None:
        self.cluster.places = 1


class TestVirtualCluster(QueueContract):
    """The contract, for `ClusterExecutor` with a fake cluster."""

    @pytest.fixture
    def engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
        light(monkeypatch)
        return Virtual(tmp_path)
