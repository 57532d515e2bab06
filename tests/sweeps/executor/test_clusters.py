"""Tests that a kind of cluster needs only one file and an entry in the registry, with `folder_cluster` as example."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hydra_plugins.scalerl_launcher import ScaleRLClusterLauncher
from sweeps.cli.main import main
from sweeps.errors import UserError
from sweeps.executor.base import Executor
from sweeps.executor.clusters import CLUSTERS, cluster_class
from sweeps.executor.failure import retries
from sweeps.executor.node.attempts import attempts
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings, prepare_study
from sweeps.launch.status import overview
from sweeps.launch.study import Study
from sweeps.run.journal import Journal
from sweeps.run.progress import last_metrics
from sweeps.run.spec import RunSpec, make_spec
from sweeps.run.writer import hold_run_lease
from tests.paths import ROOT
from tests.sweeps.executor import contract
from tests.sweeps.executor.contract import Engine, ExecutorContract
from tests.sweeps.executor.folder_cluster import FolderCluster

PATIENCE_S = 60.0


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Register the kind `folder`, start its daemon, and return the folder of its queue."""
    monkeypatch.setitem(CLUSTERS, "folder", f"{FolderCluster.__module__}:FolderCluster")
    root = tmp_path / "queue"
    root.mkdir()
    command = [sys.executable, "-m", FolderCluster.__module__, str(root), "2"]
    daemon = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    yield root
    daemon.kill()
    daemon.wait()


class InAFolder(Engine):
    """Members are jobs of the folder cluster."""

    def executor(self) -> Executor:
        return FolderCluster(str(self.study / "queue")).executor(self.study, f"{contract.__name__}:perform", 1)

    def clock(self) -> float:
        return time.monotonic()

    def has_begun(self, run: str) -> bool:
        return (self.study / "runs" / run / "begun").exists()


class TestFolderCluster(ExecutorContract):
    """The contract, for `FolderExecutor`."""

    @pytest.fixture
    def engine(self, tmp_path: Path, root: Path) -> Engine:
        return InAFolder(tmp_path)


def work(run_dir: Path) -> None:
    """Run a member. At step 2, which only the first attempt takes, it waits to be killed."""
    spec = RunSpec.read(run_dir)
    with hold_run_lease(run_dir, spec):
        step = int(last_metrics(run_dir).get("step", 0))
        journal = Journal(run_dir)
        if step:
            journal.resume(step)
        else:
            journal.header(run=spec.run)
        for number in range(step + 1, spec.steps + 1):
            journal.record("train", number, {"train/loss": number})
            if number == 2:
                (run_dir / "midway").touch()
                time.sleep(PATIENCE_S)
        journal.end(spec.steps, "finished")
        journal.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_study_continues_after_its_jobs_were_killed(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"loss": {"choice": "cispo"}, "budget": {"steps": 4}}
    specs = [make_spec({**config, "seed": seed}, {**config, "seed": seed}, "r", "r") for seed in (0, 1)]
    study = Study(tmp_path / "study", specs)
    launcher = ScaleRLClusterLauncher(planner="none:none", entry=f"{__name__}:work", kind="folder", root=str(root))
    plan = launcher.plan({"launch": {"max_parallel": 1, "threads": 1}})
    with prepare_study(study, plan) as prepared:
        prepared.commit({study.directory / LAUNCH_FILE: plan.text()}, detach=True)
    run_dirs = [study.run_dir(spec) for spec in specs]
    began = [path.with_suffix(".began") for path in root.glob("*.job")]
    assert len(began) == 2
    wait_until(lambda: all(path.exists() for path in [*began, *(run_dir / "midway" for run_dir in run_dirs)]))
    assert LaunchSettings.read(study.directory) == plan
    assert {view.state for view in overview(study.directory, LaunchSettings.scheduler_of(study.directory))} == {
        "running"
    }

    for path in began:
        os.kill(int(path.read_text()), signal.SIGKILL)
    assert main(["collect", str(study.directory), "--wait", "--trust"]) == 0
    assert "2 finished" in capsys.readouterr().out
    for run_dir in run_dirs:
        assert last_metrics(run_dir)["step"] == 4
        first, second = attempts(run_dir)
        assert (first.outcome, second.outcome) == (None, "finished") and first.job != second.job


def test_an_unregistered_kind_of_cluster_is_refused(tmp_path: Path) -> None:
    plan = LaunchSettings("folder", "a:b", (), 1, 1, None, "x", FolderCluster("q"), retries())
    (tmp_path / LAUNCH_FILE).write_text(replace(plan, kind="none").text())
    with pytest.raises(UserError, match="cluster: 'none' is no kind of cluster; valid: slurm"):
        LaunchSettings.read(tmp_path)
    with pytest.raises(UserError, match="cluster: 'none'"):
        cluster_class("none")
