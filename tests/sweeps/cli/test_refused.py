"""Test that a refused launch makes no folder and changes no existing one.

The planner and the entry point are passed on the command line, as users may pass their own. These need no torch.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweeps.cli.main import main
from sweeps.errors import UserError
from sweeps.executor.slurm.executor import SlurmCluster
from sweeps.launch.ledger import Ledger
from sweeps.launch.members import LEASE_NAME
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings
from sweeps.launch.study import Study
from sweeps.run.lease import Lease
from sweeps.run.spec import RunSpec, make_spec
from tests import forked
from tests.examples import every
from tests.paths import ROOT
from tests.sweeps.executor.fake_cluster import FakeCluster, Place, VirtualTime, light


def plan(override_lists: Sequence[Sequence[str]], folders: Sequence[str] = ()) -> list[RunSpec]:
    """Plan members from the keys seed, study, output_dir and strategy.devices; refuse a negative learning rate."""
    specs = []
    for overrides in override_lists:
        by_key = dict(override.split("=", 1) for override in overrides)
        if float(by_key.get("optimizer.lr", 1)) < 0:
            raise UserError(f"optimizer.lr: {by_key['optimizer.lr']} must be positive")
        config = {
            "loss": {"choice": "cispo"},
            "seed": int(by_key.get("seed", 0)),
            "budget": {"steps": 1},
            "output_dir": by_key.get("output_dir", f"outputs/{by_key.get('study', 'local')}"),
            "launch": {"max_parallel": 1, "threads": 1},
            "strategy": {"name": "fsdp2", "nodes": 1, "devices": int(by_key.get("strategy.devices", 1))},
        }
        specs.append(make_spec(config, config, "scalerl", "scalerl"))
    return specs


def train(run_dir: Path, **_: object) -> None:
    """A member that finishes immediately."""
    from tests.sweeps.launch.test_study import finishes

    finishes(Path(run_dir))


def launch(work_dir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    options = [f"hydra.launcher.planner={__name__}:plan", f"hydra.launcher.entry={__name__}:train"]
    options.append("++hydra.launcher.preload=[]")
    return forked.run(
        [
            sys.executable,
            "-m",
            "lightning_scalerl.train",
            "--multirun",
            *options,
            "++hydra.launcher.preload=[]",
            *arguments,
        ],
        cwd=work_dir,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=120,
    )


def without_lease(folder: Path) -> dict[str, bytes]:
    """Contents of a study without its lease, which holds the time of its last use."""
    return {name: text for name, text in contents(folder).items() if "controller" not in name}


# An sbatch that refuses every job.
SBATCH = """#!/bin/sh
echo 'sbatch: error: invalid partition specified: nope' >&2
echo 'sbatch: error: Batch job submission failed: Invalid partition name specified' >&2
exit 1
"""


def commands(folder: Path) -> str:
    """Write fake SLURM commands and return a PATH that begins with their folder."""
    folder.mkdir()
    for name in ("sbatch", "squeue", "srun", "scontrol", "sacct", "scancel"):
        (folder / name).write_text(SBATCH if name == "sbatch" else "#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of two members whose jobs run on a cluster."""
    light(monkeypatch)
    specs = plan([["study=x", f"seed={seed}"] for seed in (0, 1)])
    here = Place(tmp_path / "outputs" / "x", FakeCluster(VirtualTime()), specs)
    settings = LaunchSettings("slurm", "a:b", (), 1, 1, None, "x", SlurmCluster.of({"partition": "gpu"}))
    with Study(here.directory, specs).prepare(here.executor(), retries=here.retries) as prepared:
        prepared.commit({here.directory / LAUNCH_FILE: settings.text()}, detach=True)
    assert {state.state for state in Ledger(here.directory).fold().values()} == {"started"}
    return here.directory


@pytest.mark.slow
def test_the_local_launcher_does_not_touch_a_study_on_a_cluster(tmp_path: Path, on_a_cluster: Path) -> None:
    """`launch.json` stays the same byte for byte, so that `scalerl collect` still polls the cluster."""
    before = without_lease(on_a_cluster)
    done = launch(tmp_path, "study=x", "seed=0,1,2", "cluster=local")
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "2 members have jobs on a cluster (1_0, 1_1)" in done.stderr
    assert "`scalerl collect --wait outputs/x`" in done.stderr
    assert without_lease(on_a_cluster) == before
    assert LaunchSettings.read(on_a_cluster).kind == "slurm"


@pytest.mark.slow
def test_a_launch_refused_by_the_cluster_changes_nothing(tmp_path: Path, on_a_cluster: Path) -> None:
    path, before = commands(tmp_path / "bin"), without_lease(on_a_cluster)
    nope = ("cluster=slurm", "hydra.launcher.partition=nope", "seed=0,1,2")
    done = launch(tmp_path, "study=x", *nope, PATH=path)
    assert done.returncode == 1 and "invalid partition" in done.stderr, done.stderr
    assert without_lease(on_a_cluster) == before
    done = launch(tmp_path, "study=new", *nope, PATH=path)
    assert done.returncode == 1 and "invalid partition" in done.stderr, done.stderr
    assert [entry.name for entry in (tmp_path / "outputs").iterdir()] == ["x"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    every(
        3,
        [
            (["optimizer.lr=-1,1"], "optimizer.lr: -1 must be positive"),
            (["optimiser.lr=1", "seed=0,1"], "did you mean optimizer?"),
            (["strategy=fsdp2", "strategy.devices=2", "seed=0,1"], "strategy.devices: scalerl seed 0 asks for 2 ranks"),
            (["seed=0,1", "mlflow.uri=sqlite:////proc/nowhere/mlflow.db"], "mlflow"),
        ],
        pytest.mark.full,
    ),
    ids=["value", "key", "ranks", "store"],
)
@pytest.mark.parametrize(
    "there", [False, pytest.param(True, marks=pytest.mark.full)], ids=["nothing there", "outputs there"]
)
def test_a_refused_launch_makes_no_folder(tmp_path: Path, arguments: list[str], words: str, there: bool) -> None:
    if there:
        (tmp_path / "outputs").mkdir()
        (tmp_path / "outputs" / "notes.txt").write_text("mine")
    done = launch(tmp_path, "study=x", *arguments)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert contents(tmp_path) == ({"outputs/notes.txt": b"mine"} if there else {})
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["notes.txt", "outputs"] if there else [])


@pytest.mark.slow
def test_without_a_cluster_no_folder_is_made(tmp_path: Path) -> None:
    done = launch(tmp_path, "study=x", "cluster=slurm", "seed=0,1", PATH=str(tmp_path))
    assert done.returncode == 1 and "sbatch" in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_only_the_owner_may_read_the_study_folder(tmp_path: Path) -> None:
    done = launch(tmp_path, "study=x", "seed=0,1", "cluster=debug")
    assert done.returncode == 0, done.stderr
    study = tmp_path / "outputs" / "x"
    assert stat.S_IMODE(study.stat().st_mode) == 0o700
    assert {"multirun.yaml", "launch.json", "ledger.jsonl"} <= {path.name for path in study.iterdir()}
    assert "seed=0,1" in (study / "multirun.yaml").read_text()


@pytest.mark.full
def test_a_second_launch_changes_nothing_of_the_first(tmp_path: Path) -> None:
    done = launch(tmp_path, "study=x", "seed=0,1", "cluster=debug")
    assert done.returncode == 0, done.stderr
    study = tmp_path / "outputs" / "x"
    lease = Lease(study, LEASE_NAME, beat_s=600.0)
    lease.acquire()
    try:
        before = contents(study)
        done = launch(tmp_path, "study=x", "seed=0,1,2", "cluster=debug")
        assert done.returncode == 1 and "is being run by another process" in done.stderr, done.stderr
        assert contents(study) == before
    finally:
        lease.release()
    for refused in (["optimizer.lr=-1,1"], ["seed=0", "mlflow.uri=sqlite:////proc/nowhere/mlflow.db"]):
        before = contents(study)
        done = launch(tmp_path, "study=x", "cluster=debug", *refused)
        assert done.returncode == 1, done.stderr
        after = contents(study)
        # The lease is left out: it holds the time of its last use.
        assert {name: after[name] for name in after if "controller" not in name} == {
            name: before[name] for name in before if "controller" not in name
        }


def test_the_pattern_of_seed_from_may_begin_with_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse would take the pattern for an option. Here it is accepted, and only the missing file is refused."""
    assert main(["fit", "nowhere.csv", "--seed-from", r"-s(\d+)"]) == 1
    assert "nowhere.csv" in capsys.readouterr().err
