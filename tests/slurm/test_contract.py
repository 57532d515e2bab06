"""Tests that the cluster's executor meets the contract of all executors on a real cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.executor.base import Executor, Outcome
from sweeps.executor.slurm.executor import ClusterExecutor
from sweeps.executor.slurm.scheduler import Slurm
from sweeps.executor.slurm.settings import JobSettings
from tests.paths import ROOT
from tests.slurm.cluster import PATIENCE_S, Lab, eventually
from tests.sweeps.executor import contract
from tests.sweeps.executor.contract import Engine, QueueContract, new_submission_name

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


class Cluster(Engine):
    """Members are jobs of the lab."""

    patience_s = PATIENCE_S
    nodes = ("n1", "n2")

    def __init__(self, study: Path, lab: Lab) -> None:
        super().__init__(study)
        self.lab = lab
        self.resources: dict[str, object] = {"timeout_min": 10}

    def executor(self) -> Executor:
        settings = JobSettings.of({**self.resources, "poll_s": 1.0, "lost_after_s": 10.0})
        return ClusterExecutor(
            self.study, Slurm(settings.clusters), settings, f"{contract.__name__}:perform", 1, "contract"
        )

    def clock(self) -> float:
        return time.monotonic()

    def has_begun(self, run: str) -> bool:
        return (self.study / "runs" / run / "begun").exists()

    def allow_one_at_a_time(self) -> None:
        self.resources |= {"nodelist": "n1", "exclusive": True}


class TestSlurm(QueueContract):
    """The contract, for `ClusterExecutor` on the lab's SLURM."""

    @pytest.fixture
    def engine(self, tmp_path: Path, ready_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
        for name, value in ready_lab.environment.items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # jobs import the members from here
        yield Cluster(tmp_path, ready_lab)

    def test_jobs_can_be_submitted_to_a_named_cluster(self, engine: Engine) -> None:
        """With `clusters` set, SLURM's commands name the cluster and print other columns or headings."""
        assert isinstance(engine, Cluster)
        engine.resources["clusters"] = "lab"
        engine.allow_one_at_a_time()
        executor = engine.executor()
        (member,) = executor.submit(new_submission_name(), [engine.launch("a", "wait")])
        engine.until(executor, lambda: engine.has_begun(member))
        job = executor.submit(new_submission_name(), [engine.launch("b", "wait")])["b"]
        engine.until(executor, lambda: "b" in executor.queued())
        outcomes: dict[str, Outcome] = {}
        executor.stop(["a", "b"], "no longer needed")
        engine.until(executor, lambda: not executor.running(), outcomes)
        assert {outcome.kind for outcome in outcomes.values()} == {"stopped"}
        assert not engine.has_begun("b")
        slurm = Slurm("lab")
        assert job is not None
        eventually(lambda: slurm.accounted([job])[job].state == "CANCELLED", "accounting")
        ended = engine.drive(executor, [engine.launch("c", "fail")])
        assert ended["c"].kind == "error"
        assert Slurm("nowhere").queue() is None
