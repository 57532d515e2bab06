"""Tests of studies on a cluster: results equal local ones bit for bit, despite faults of controller or MLflow."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps.launch.ledger import Ledger
from sweeps.port import free_port
from tests.paths import ROOT
from tests.place import PATIENCE_S, STEPS, Place
from tests.slurm.cluster import Lab, Sweep, baseline, by_run, eventually, small_disk

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a place whose members do not train, because these tests are about the study."""
    return Place(tmp_path, light=True)


def outcomes(sweep: Sweep) -> Counter[tuple[str, str | None]]:
    return Counter((state.state, state.kind) for state in sweep.states())


def events(sweep: Sweep) -> list[tuple[str, str]]:
    return [(entry["event"], entry["run"]) for entry in Ledger(sweep.directory).entries()]


class AnyMode(Place):
    """A place that sets nothing on the axis `async_mode`, which the study varies."""

    def overrides(self, output: str, *more: str) -> list[str]:
        return [word for word in super().overrides(output, *more) if not word.startswith("async_mode.")]


def test_a_leave_one_out_study_equals_the_local_one(tmp_path: Path, ready_lab: Lab) -> None:
    """18 members take 20 steps, and each asks for two GPUs."""
    place = AnyMode(tmp_path, light=True)
    study = ("experiment=leave_one_out", "seed=0,1", "budget.steps=20", "evaluation.every_n_steps=5")
    sweep = Sweep(place, ready_lab, study)
    with sweep.launched("hydra.launcher.array_size=7", verifier_s=0.02) as process:
        allocated = ""
        while process.poll() is None:
            allocated = allocated or sweep.lab.sh("squeue", "-h", "-t", "R", "-O", "tres-alloc:100")
            time.sleep(1)
    assert process.returncode == 0, sweep.said()
    assert "gres/gpu=2" in allocated
    states = sweep.states()
    assert len(states) == 18 and {state.state for state in states} == {"finished"}
    assert {state.attempts for state in states} == {1}
    assert len(list((sweep.directory / "jobs").iterdir())) == 3, "arrays of 7, 7 and 4"
    assert by_run(sweep.directory) == baseline(place, *study)
    ranked = sweep.scalerl("rank", str(sweep.directory))
    assert ranked.returncode == 0 and "P(best)" in ranked.stdout
    assert sweep.status()["counts"] == {"finished": 18}


# The controller dies after the first ledger entry after which no earlier controller died.
KILLED_AFTER_A_LINE = """
import os, signal, sys
from pathlib import Path
from sweeps.launch.ledger import Ledger
write, deaths = Ledger.append_all, Path("deaths.txt")
def append_all(self, event, entries):
    write(self, event, entries)
    line = " ".join([event, *sorted(entry["run"] for entry in entries)])
    if entries and line not in (deaths.read_text().splitlines() if deaths.exists() else []):
        with deaths.open("a") as handle:
            handle.write(line + chr(10))
        os.kill(os.getpid(), signal.SIGKILL)
Ledger.append_all = append_all
from lightning_scalerl.train import main
main()
"""


@pytest.mark.full
def test_a_study_finishes_if_its_controller_is_killed_after_each_ledger_entry(place: Place, ready_lab: Lab) -> None:
    study = ("variant=none,loss_dapo", "seed=0")
    sweep = Sweep(place, ready_lab, study)
    deaths = 0
    while True:
        launch = sweep.command()
        command = [sys.executable, "-c", KILLED_AFTER_A_LINE, *launch[launch.index("--multirun") :]]
        result = subprocess.run(
            command, cwd=place.root, env=sweep.environment(0.1), capture_output=True, text=True, timeout=200
        )
        if result.returncode == 0:
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        deaths += 1
        assert deaths < 12
    assert deaths >= 4, "killed after the entries planned, submitting, started and finished"
    assert Counter(event for event, _ in events(sweep))["finished"] == 2
    assert {state.attempts for state in sweep.states()} == {1}, "no job was submitted twice"
    assert by_run(sweep.directory) == baseline(place, *study)


@pytest.mark.full
def test_errors_and_lack_of_memory_are_reported_and_affect_no_other_member(place: Place, ready_lab: Lab) -> None:
    verifiers = ",".join(
        [f"tests.slurm.entries:{name}" for name in ("explode", "hoard", "starve")] + ["tests.place:odd_digits"]
    )
    sweep = Sweep(place, ready_lab, ("variant=none", "seed=0", f"task.verifier={verifiers}"))
    assert sweep.launch(extra={"SERVICE_PASSWORD": "correct horse"}) == 1
    assert outcomes(sweep) == {("finished", None): 1, ("failed", "error"): 1, ("failed", "out_of_memory"): 2}
    for state in sweep.states():
        if "explode" in state.recipe:
            assert "RewardError" in str(state.reason) and state.attempts == 1
        elif state.state == "failed":
            assert state.attempts == 2, "one retry, with more memory"
    scripts = [path.read_text() for path in sweep.directory.glob("jobs/*/*_submission.sh")]
    assert any("#SBATCH --mem=3GB" in script for script in scripts)
    written = [path for path in sweep.directory.rglob("*") if path.is_file() and path.suffix != ".ckpt"]
    assert not [path for path in written if b"correct horse" in path.read_bytes()]
    assert "no such verifier at https://***@example.org" in sweep.said()
    assert sweep.status()["counts"] == {"failed": 3, "finished": 1}


@pytest.mark.full
def test_a_full_disk_is_reported_and_the_run_continues_once_there_is_space(place: Place, ready_lab: Lab) -> None:
    study = ("variant=none", "seed=0")
    sweep = Sweep(place, ready_lab, study, name="small/study")
    with small_disk(place.root / "small", 64):
        with sweep.launched(verifier_s=0.1) as process:
            sweep.reaches(4)
            ballast = place.root / "small/ballast"
            with ballast.open("wb") as handle, pytest.raises(OSError, match="No space left"):
                while True:
                    handle.write(bytes(1 << 16))
                    handle.flush()
            eventually(lambda: not sweep.lab.jobs(), "the end of the job")
            ballast.unlink()
            assert process.wait(timeout=PATIENCE_S) == 1, sweep.said()
        state = sweep.state()
        assert (state.state, state.kind) == ("failed", "disk_full"), (state, sweep.said())
        assert sweep.launch() == 0, sweep.said()
        assert by_run(sweep.directory) == baseline(place, *study)


@pytest.mark.full
def test_the_documented_check_ends_as_documented(tmp_path: Path, ready_lab: Lab) -> None:
    page = (ROOT / "docs/guide/cluster.md").read_text()
    (command,) = re.findall(r"(?m)^scalerl (train --multirun study=check .*)$", page)
    (expected_end,) = re.findall(r"It should end with `([^`]+)`", page)
    arguments = command.replace("partition=YOURS", "partition=main").split()
    environment = {**ready_lab.environment, "OMP_NUM_THREADS": "1", "SCALERL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "sweeps.cli.main", *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip().splitlines()[-1].endswith(expected_end)


def test_study_names_are_not_run_as_commands(place: Place, ready_lab: Lab) -> None:
    name = 'it\'s "my" $(touch pwned) `touch pwned`; touch pwned & \u00e9tude'
    sweep = Sweep(place, ready_lab, ("variant=none", "seed=0", "budget.steps=2"), name=name)
    quoted = str(sweep.directory).replace("\\", "\\\\").replace("'", "\\'")
    with sweep.log.open("a") as log:
        command = [word for word in sweep.command() if not word.startswith("output_dir=")]
        result = subprocess.run(
            [*command, f"output_dir='{quoted}'"],
            cwd=place.root, env=sweep.environment(0.0), stdout=log, stderr=log, timeout=200,
        )  # fmt: skip
    assert result.returncode == 0, sweep.said()
    assert sweep.state().state == "finished"
    assert not list(place.root.rglob("pwned"))
    assert (sweep.directory / "jobs").stat().st_mode & 0o077 == 0


class TrackingServer:
    """A tracking server, started as documented, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.folder / "server.txt").open("a") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)),
                    *("--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"),
                    *("--artifacts-destination", str(self.folder / "artifacts")),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        eventually(self.answers, "a tracking server", 120)

    def answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TrackingServer]:
    tracking_server = TrackingServer(tmp_path / "mlflow")
    tracking_server.start()
    yield tracking_server
    tracking_server.kill()


@pytest.mark.full
def test_an_outage_of_the_tracking_server_loses_nothing(place: Place, ready_lab: Lab, server: TrackingServer) -> None:
    """The server dies while members train, and returns. No point is lost or duplicated, and all states are correct."""
    from mlflow import MlflowClient

    verifiers = "tests.place:odd_digits,tests.slurm.entries:explode"
    sweep = Sweep(
        place, ready_lab, ("variant=none", "seed=0", f"task.verifier={verifiers}", f"mlflow.uri={server.uri}")
    )
    secret = {"SERVICE_PASSWORD": "correct horse", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    with sweep.launched(verifier_s=0.2, extra=secret) as process:
        eventually(lambda: list(sweep.directory.glob("runs/*/checkpoints/*.ckpt")), f"a checkpoint; {sweep.said()}")
        server.kill()
        time.sleep(8)
        assert process.poll() is None, "training does not need the server"
        server.start()
        assert process.wait(timeout=PATIENCE_S) == 1, "one member failed"
    # The next controller sends the points that the first one could not send.
    assert sweep.scalerl("collect", str(sweep.directory), "--trust").returncode == 1
    client = MlflowClient(server.uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == sweep.directory.name]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "sweep"]
    members = [run for run in runs if run.data.tags["kind"] == "member"]
    assert parent.info.status == "FAILED"
    assert sorted(run.info.status for run in members) == ["FAILED", "FINISHED"]
    (finished,) = [run for run in members if run.info.status == "FINISHED"]
    losses = client.get_metric_history(finished.info.run_id, "train/loss")
    assert [point.step for point in losses] == list(range(1, STEPS + 1))
    rates = [point.step for point in client.get_metric_history(finished.info.run_id, "eval/heldout/pass_rate")]
    assert rates == sorted(set(rates)) and rates[-1] == STEPS
    assert not any("correct horse" in f"{run.data.params} {run.data.tags}" for run in runs)


@pytest.mark.full
def test_mlflow_shows_a_requeued_member_as_one_run_and_a_cancelled_one_as_killed(place: Place, ready_lab: Lab) -> None:
    """Each member has one MLflow run, also after requeues. The store is SQLite, prepared by the controller."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{place.root}/mlflow.db"
    sweep = Sweep(place, ready_lab, ("variant=none,loss_dapo", "seed=0", f"mlflow.uri={uri}"))
    with sweep.launched(verifier_s=0.2) as process:
        eventually(lambda: len(list(sweep.directory.glob("runs/*/checkpoints/*.ckpt"))) == 2, "checkpoints")
        first, second = sweep.states()
        sweep.lab.sh("scancel", second.job or "")
        sweep.lab.sh("scancel", "--signal=USR2", first.job or "")
        assert process.wait(timeout=PATIENCE_S) == 1
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == sweep.directory.name]
    members = {
        run.data.tags["scalerl.run"]: run
        for run in client.search_runs([experiment.experiment_id])
        if run.data.tags["kind"] == "member"
    }
    assert {run: each.info.status for run, each in members.items()} == {first.run: "FINISHED", second.run: "KILLED"}
    history = client.get_metric_history(members[first.run].info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, STEPS + 1))
    assert [attempt["outcome"] for attempt in map(vars, attempts_of(sweep, first.run))] == ["interrupted", "finished"]


def attempts_of(sweep: Sweep, run: str) -> Any:
    from sweeps.executor.node.attempts import attempts

    return attempts(sweep.directory / "runs" / run)


@pytest.mark.full
def test_impossible_resources_are_refused_in_one_line(place: Place, ready_lab: Lab) -> None:
    sweep = Sweep(place, ready_lab, ("variant=none", "seed=0"))
    for override, remedy in (
        ("hydra.launcher.partition=nope", "names no partition"),
        ("hydra.launcher.gpus_per_node=64", "no node has what the job asks for"),
    ):
        assert sweep.launch(override) == 1
        last = sweep.said().strip().splitlines()[-1]
        assert last.startswith("scalerl train: ") and remedy in last, last
    assert not sweep.lab.jobs()
    # Corrected, the same study runs.
    assert sweep.launch() == 0, sweep.said()
    assert json.loads((sweep.directory / "launch.json").read_text())["kind"] == "slurm"
